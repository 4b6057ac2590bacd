"""Signal handlers that use the synchronous client: whatever they interrupt, and whatever they do."""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from client.fakes import Fake
from interrupts import Stop, interrupt
from support import LIMIT, tcpstore_server
from tcpstore_async import DistNetworkError, StoreTimeoutError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.keys import stored_key
from tcpstore_async.client import background, capabilities, requests, sync_client, wait_queue
from tcpstore_async.client.brief_join import BriefJoin
from tcpstore_async.client.resume import resume_blocking
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.sync_connection import DeadlineExceeded, SyncConnection
from tcpstore_async.links.single_client import ClientSingleLink
from tls.certificates import certificates

pytestmark = pytest.mark.slow

TIMEOUT = 15.0
"""Of the stores here. No call takes so long unless it waits for something that never comes."""

BIG = bytes(4 << 20)
"""More than the kernel takes at once; its buffers are set to be small."""


class Gate(Fake):
    """Forwards bytes. Either direction of the first connection can be held back."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.reading = threading.Event()
        """Set while it reads what the client sends."""
        self.answering = threading.Event()
        """Set while it forwards what the server sends."""
        self.open = 0
        self.open_all()
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        super().__init__(self._pass_on, listener)

    def open_all(self) -> None:
        self.reading.set()
        self.answering.set()

    def _pass_on(self, peer: socket.socket) -> None:
        first = self.connections == 1
        with socket.create_connection(("127.0.0.1", self.target), LIMIT) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.open += 1
            up = threading.Thread(target=self._pump, args=(peer, server, self.reading if first else None))
            up.start()
            self._pump(server, peer, self.answering if first else None)
            up.join(LIMIT)
            self.open -= 1

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, gate: threading.Event | None) -> None:
        try:
            while True:
                if gate is not None:
                    gate.wait(LIMIT)
                data = source.recv(1 << 16)
                if not data:
                    break
                if gate is not None:
                    gate.wait(LIMIT)
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


@pytest.fixture(scope="module")
def observer(port: int) -> Iterator[TCPStore]:
    """A store that no signal interrupts."""
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        yield store


@pytest.fixture
def gate(port: int) -> Iterator[Gate]:
    gate = Gate(port)
    try:
        yield gate
    finally:
        gate.open_all()
        gate.stop()


_numbers = iter(range(1_000_000))


@pytest.fixture
def key() -> str:
    return f"key{next(_numbers)}/"


@contextmanager
def struck(event: int, handler: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Send the main thread a signal, once, when it is about to wait for this event of a connection. Yields what is set
    when the handler is over.
    """
    over, waits = threading.Event(), threading.Event()
    real = select.poll

    class Poll:
        """Reports that a wait begins."""

        def __init__(self) -> None:
            self._poll = real()
            self._event = 0

        def register(self, peer: Any, event: int) -> None:
            self._event = event
            self._poll.register(peer, event)

        def poll(self, milliseconds: float | None = None) -> Any:
            if self._event == event and threading.current_thread() is threading.main_thread():
                waits.set()
            return self._poll.poll(milliseconds)

    def strike() -> None:
        if waits.wait(LIMIT) and event:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def handle(*_: object) -> None:
        try:
            handler()
        finally:
            over.set()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(select, "poll", Poll)
            yield over
        assert waits.is_set() or not event
        waits.set()
        thread.join(LIMIT)
    finally:
        waits.set()
        thread.join(LIMIT)
        signal.signal(signal.SIGUSR1, before)


class Scene:
    """A store of the main thread, during a call or between two."""

    def __init__(self, gate: Gate, observer: TCPStore, key: str) -> None:
        self.gate = gate
        self.observer = observer
        self.key = key
        self.store = TCPStore("127.0.0.1", gate.port, timeout=TIMEOUT)
        self.earlier = False
        """Whether an unconfirmed write precedes the call."""
        observer.set(key + "there", "v")
        observer.queue_push(key + "queue", "item")
        observer.queue_push(key + "queue", "item")
        assert self.store.queue_len(key + "queue") == 2  # now it knows who the server is

    def read_your_writes(self) -> None:
        assert not self.earlier or self.store.check([self.key + "before"])


def _big(scene: Scene) -> None:
    scene.gate.reading.clear()
    assert scene.store._client is not None
    for connection in scene.store._client._connections:
        connection.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    scene.store.set(scene.key + "big", BIG)


def _add(scene: Scene) -> None:
    scene.gate.answering.clear()
    assert scene.store.add(scene.key + "n", 5) == 5


def _get(scene: Scene) -> None:
    scene.gate.answering.clear()
    assert scene.store.get(scene.key + "there") == b"v"


def _pop(scene: Scene) -> None:
    scene.gate.answering.clear()
    assert scene.store.queue_pop(scene.key + "queue") == b"item"


def _parked_get(scene: Scene) -> None:
    assert scene.store.get(scene.key + "late") == b"now"


def _parked_wait(scene: Scene) -> None:
    scene.store.wait([scene.key + "late"])


def _parked_pop(scene: Scene) -> None:
    assert scene.store.queue_pop(scene.key + "late queue") == b"now"


def _idle(scene: Scene) -> None:
    signal.raise_signal(signal.SIGUSR1)


INTERRUPTED: dict[str, tuple[int, Callable[[Scene], None]]] = {
    "idle": (0, _idle),
    "writing": (select.POLLOUT, _big),
    "waiting, add": (select.POLLIN, _add),
    "waiting, get": (select.POLLIN, _get),
    "waiting, queue_pop": (select.POLLIN, _pop),
    "parked, get": (select.POLLIN, _parked_get),
    "parked, wait": (select.POLLIN, _parked_wait),
    "parked, queue_pop": (select.POLLIN, _parked_pop),
}


def _in_child(scene: Scene, work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scene.observer.get(scene.key + "from the child") == b"1"


def _raise(scene: Scene) -> None:
    raise Stop


def _fork(scene: Scene) -> None:
    def work() -> None:
        scene.store.set(scene.key + "from the child", "1")
        assert scene.store.add(scene.key + "c", 1) == 1

    _in_child(scene, work)


def _nested(scene: Scene) -> None:
    def handle(*_: object) -> None:
        assert scene.store.add(scene.key + "nested", 1) == 1
        scene.store.set(scene.key + "nested too", "1")

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert scene.store.check([scene.key + "nested too"])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert scene.store.add(scene.key + "nested", 1) == 2


def _handler_add(scene: Scene) -> None:
    assert scene.store.add(scene.key + "h", 3) == 3


def _handler_get(scene: Scene) -> None:
    assert scene.store.get(scene.key + "there") == b"v"


def _handler_pop(scene: Scene) -> None:
    assert scene.store.queue_pop(scene.key + "queue") == b"item"


def _handler_set(scene: Scene) -> None:
    scene.store.set(scene.key + "preempted", "1")


HANDLERS: dict[str, Callable[[Scene], object]] = {
    "get": _handler_get,
    "set": _handler_set,
    "add": _handler_add,
    "wait": lambda scene: scene.store.wait([scene.key + "there"]),
    "queue_pop": _handler_pop,
    "close": lambda scene: scene.store.close(),
    "raise": _raise,
    "fork": _fork,
    "nested": _nested,
}


@pytest.mark.parametrize("earlier", [False, True], ids=["", "behind a write"])
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("interrupted", INTERRUPTED)
# quirk: signal-handler
def test_a_handler_within_a_call(
    interrupted: str,
    handler: str,
    earlier: bool,
    gate: Gate,
    observer: TCPStore,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never waits for the interrupted call, only for the server, and only after a write."""
    event, call = INTERRUPTED[interrupted]
    scene = Scene(gate, observer, key)
    threads = _threads(gate)
    with scene.store as store:
        scene.earlier = earlier
        if earlier:
            store.set(key + "before", "x")

        def handle() -> None:
            if handler not in ("close", "raise"):
                if earlier:
                    gate.open_all()
                scene.read_your_writes()
            HANDLERS[handler](scene)

        with struck(event, handle, monkeypatch) as over:

            def let_it_go_on() -> None:
                over.wait(LIMIT)
                observer.set(key + "late", "now")
                observer.queue_push(key + "late queue", "now")
                gate.open_all()

            helper = threading.Thread(target=let_it_go_on)
            helper.start()
            try:
                if handler == "close" and interrupted != "idle":
                    with pytest.raises(DistNetworkError, match="has been closed"):
                        call(scene)
                elif handler == "raise":
                    with pytest.raises(Stop):
                        call(scene)
                else:
                    call(scene)
            finally:
                over.set()
                helper.join(LIMIT)
        if handler == "close":
            with pytest.raises(DistNetworkError, match="has been closed"):
                store.add(key + "after", 1)
        else:
            scene.read_your_writes()
            assert store.add(key + "after", 1) == 1
            assert handler != "set" or store.check([key + "preempted"])
            store.set(key + "last", "w")
            assert store.get(key + "last") == b"w"
            assert store._client is not None
            assert not any(connection.user for connection in store._client._connections)
            assert len(store._client._connections) <= 3
    _all_gone(gate)
    assert _threads(gate) <= threads
    assert [thread.name for thread in threading.enumerate()].count(background.THREAD_NAME) <= 1


def _threads(gate: Gate) -> set[threading.Thread]:
    """All but the gate's and the background loop's, of which a fork makes another one."""
    return {
        thread
        for thread in threading.enumerate()
        if thread not in gate._threads and thread.name != background.THREAD_NAME
    }


def _all_gone(gate: Gate) -> None:
    """Wait until no connection is left."""
    gate.open_all()
    for thread in gate._threads[1:]:
        thread.join(LIMIT)
    assert gate.open == 0


def test_another_thread_that_asks_who_the_server_is(gate: Gate, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the connection that the interrupted call holds; the handler does not wait for it."""
    with TCPStore("127.0.0.1", gate.port, timeout=TIMEOUT) as store:
        asking = threading.Thread(target=lambda: store.get(key + "v"))
        client = store._client
        assert client is not None
        client._identified = True  # so that neither call requests the identity
        store.set(key + "v", "x")
        gate.answering.clear()

        def handle() -> None:
            client._identified = False
            asking.start()
            end = threading.Event()
            while client._identifying == 0 or not client._free_queue.tickets:
                end.wait(0.001)
            gate.answering.set()
            assert store.get(key + "v") == b"x"

        with struck(select.POLLIN, handle, monkeypatch):
            assert store.add(key + "n", 1) == 1
        asking.join(LIMIT)
        assert not asking.is_alive()


def test_a_child_that_goes_on_with_the_parents_call(
    gate: Gate, observer: TCPStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply is the parent's; the child's store continues on a connection of its own."""
    with TCPStore("127.0.0.1", gate.port, timeout=TIMEOUT) as store:
        assert store.queue_len(key + "q") == 0
        gate.answering.clear()
        child = -1

        def handle() -> None:
            nonlocal child
            child = os.fork()

        with struck(select.POLLIN, handle, monkeypatch) as over:

            def answer() -> None:
                over.wait(LIMIT)
                gate.answering.set()

            helper = threading.Thread(target=answer)
            helper.start()
            try:
                sum_ = store.add(key + "n", 5)
                assert child > 0
            except BaseException as error:
                if child:
                    raise
                status = 1
                try:
                    assert isinstance(error, DistNetworkError)
                    assert "forked during this call" in str(error)
                    assert store.add(key + "n", 1) == 6
                    status = 0
                finally:
                    os._exit(status)
            finally:
                helper.join(LIMIT)
            assert sum_ == 5
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.add(key + "n", 0) == 6


def test_an_interrupt_at_any_step_loses_nothing(port: int, key: str) -> None:
    """Of calls after unconfirmed writes."""
    rng = random.Random(1)
    armed = False
    interrupts = 0

    def handle(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Stop

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
            assert store.queue_len(key) == 0
            while interrupts < 300:
                try:
                    try:
                        armed = True
                        signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.0002 + 1e-5)
                        store.set(key + "a", "1")
                        assert store.get(key + "a") == b"1"
                        store.set(key + "b", "2")
                        armed = False
                    finally:
                        armed = False
                except Stop:
                    interrupts += 1
                    assert store.check([key + "never"]) is False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("raises", [True, False])
# quirk: interrupted-send
def test_an_interrupt_at_every_step_of_a_call(
    port: int, observer: TCPStore, key: str, monkeypatch: pytest.MonkeyPatch, raises: bool, linked: bool
) -> None:
    """One after the other, in the client and the session: at each of them a handler may run.

    One that raises within a send ends a store without a link.
    """
    if not linked:
        monkeypatch.setattr(sync_client, "SINGLE_LINKS", 1000)
    calls: list[Callable[[TCPStore], object]] = [
        lambda store: store.set(key + "a", "2"),
        lambda store: store.add(key + "n", 1),
        lambda store: store.multi_get([key + "b", key + "b"]),
    ]
    observer.set(key + "b", "b")
    for number, call in enumerate(calls):
        step, struck, lost = 0, True, 0
        while struck:
            struck, survived = _interrupt_at(port, call, step, raises, f"{key}{number}/{step}/")
            lost += not survived
            step += 1
        assert (0 < lost < 10) if raises and not linked else not lost


def _interrupt_at(
    port: int, call: Callable[[TCPStore], object], step: int, raises: bool, key: str
) -> tuple[bool, bool]:
    """Interrupt a call at a step; return whether there was one, and whether the store survived."""
    with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
        client = store._client
        assert client is not None

        def handle() -> None:
            if raises:
                raise Stop
            if all(connection.torn is None for connection in client._connections):
                assert store.check([key + "before"])
            store.set(key + "handler", "1")

        assert store.queue_len(key) == 0
        store.set(key + "before", "1")
        struck = interrupt(partial(call, store), step, handler=handle)
        try:
            assert store.check([key + "before"])
        except DistNetworkError as error:
            assert "an interrupt struck within a send or receive" in str(error)
            return struck, False
        assert store.check([key + "handler"]) is (struck and not raises)
        assert store.add(key + "after", 1) == 1
        assert not any(connection.user for connection in client._connections)
        return struck, True


@pytest.mark.parametrize("interrupted", [name for name in INTERRUPTED if name != "idle"])
# quirk: interrupted-send
def test_an_exception_in_a_call_of_a_store_without_a_link(
    interrupted: str, gate: Gate, observer: TCPStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the call waits, it does no harm. Within a large request, it ends the store: the server expects the rest."""
    monkeypatch.setattr(sync_client, "SINGLE_LINKS", 1000)
    event, call = INTERRUPTED[interrupted]
    scene = Scene(gate, observer, key)
    with scene.store as store:
        with struck(event, partial(_raise, scene), monkeypatch), pytest.raises(Stop):
            call(scene)
        gate.open_all()
        if interrupted == "writing":
            with pytest.raises(DistNetworkError, match="in the middle of a call"):
                store.add(key + "after", 1)
        else:
            assert store.add(key + "after", 1) == 1
            assert store.queue_len(key + "queue") == 2


class OutOfTime:
    """Has the next wait of a connection end as if its deadline had passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        wait = SyncConnection._wait

        def run_out(connection: SyncConnection, event: int, deadline: Deadline) -> None:
            if self.armed:
                self.armed = False
                raise DeadlineExceeded
            wait(connection, event, deadline)

        monkeypatch.setattr(SyncConnection, "_wait", run_out)


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_an_interrupt_at_every_step_after_a_pop_has_timed_out(
    port: int, observer: TCPStore, key: str, monkeypatch: pytest.MonkeyPatch, block: bool, linked: bool
) -> None:
    """It neither loses the store, unless that has no link, nor keeps the item. A write is unconfirmed."""
    if not linked:
        monkeypatch.setattr(sync_client, "SINGLE_LINKS", 1000)
    out = OutOfTime(monkeypatch)
    step, stopped, lost = 0, True, 0
    while stopped:
        queue = f"{key}{step}"
        with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
            assert store.queue_len(queue) == 0
            if not block:
                observer.queue_push(queue, "job")
                assert observer.queue_len(queue) == 1
            store.set(queue + "/written", "1")
            out.armed = True

            def pop() -> None:
                with pytest.raises(StoreTimeoutError):
                    store.queue_pop(queue, block)  # noqa: B023

            stopped = interrupt(pop, step, lambda _: not out.armed)
            lost += _is_lost(store, queue + "/written")
            if block:
                observer.queue_push(queue, "job")
            assert observer.queue_pop(queue) == b"job"
            assert observer.queue_len(queue) == 0
            assert store._client is not None
            assert not any(connection.user or connection.leased for connection in store._client._connections)
        step += 1
    assert step > 10
    assert lost == 0 if linked else lost < 5


def _is_lost(store: TCPStore, key: str) -> bool:
    """Return whether an interrupt has ended a store that has written this key."""
    try:
        assert store.check([key])
    except DistNetworkError as error:
        assert "an interrupt struck within a send or receive" in str(error)
        return True
    return False


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
def test_an_interrupt_at_every_step_of_pushing_back(
    port: int, observer: TCPStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server without leases has sent too late returns once, whatever the next call is interrupted at.

    Within a send, that ends the store, and the item may go with it.
    """
    out = OutOfTime(monkeypatch)
    step, stopped, lost = 0, True, 0
    while stopped:
        queue = f"{key}{step}"
        with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
            client = store._client
            assert client is not None
            client._identified = True  # as a server of PyTorch, which has queues
            client._supported[capabilities.QUEUES] = True
            observer.queue_push(queue, "job")
            assert observer.queue_len(queue) == 1
            store.set(queue + "/written", "1")
            out.armed = True
            with pytest.raises(StoreTimeoutError):
                store.queue_pop(queue, block=False)
            stopped = interrupt(partial(store.check, [queue + "/written"]), step)
            if _is_lost(store, queue + "/written"):
                lost += 1
            else:
                assert observer.queue_pop(queue) == b"job"
            assert observer.queue_len(queue) <= 1
        step += 1
    assert step > 10
    assert lost < 10


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
def test_an_interrupt_at_every_step_of_many_checks(port: int, key: str) -> None:
    """They are sent together, when a wait for several keys has timed out say."""
    step = 0
    stopped = True
    while stopped:
        with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
            client = store._client
            assert client is not None
            assert store.queue_len(key) == 0
            store.set(f"{key}{step}", "1")
            checks = [requests.check([stored_key(name)]) for name in (f"{key}{step}", key, f"{key}{step}")]
            stopped = interrupt(partial(client.call_all, checks, Deadline(TIMEOUT)), step)
            assert client.call_all(checks, Deadline(TIMEOUT)) == [True, False, True]
            assert store.check([f"{key}{step}"])
        step += 1
    assert step > 10


@pytest.mark.interpreted("compiled code runs no handlers there")
@pytest.mark.parametrize("name", ["release", "remove"])
def test_a_handler_in_the_midst_of_telling_others(gate: Gate, key: str, name: str) -> None:
    """Two threads wait for the connection that is released: neither stays asleep."""
    with TCPStore("127.0.0.1", gate.port, timeout=TIMEOUT) as store:
        assert store.add(key, 1) == 1
        source = Path(wait_queue.__file__).read_text().splitlines()
        strikes = 0

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal strikes
            if frame.f_code is not wait_queue.WaitQueue.notify.__code__:
                return None

            def step(frame: Any, event: str, _: object) -> Any:
                nonlocal strikes
                if event == "line" and f".{name}(" in source[frame.f_lineno - 1]:
                    sys.settrace(None)
                    strikes += 1
                    store.set(key + "from the handler", "1")
                return step

            return step

        others = [threading.Thread(target=store.add, args=(key, 1)) for _ in range(2)]
        client = store._client
        assert client is not None

        def join() -> None:
            for number, other in enumerate(others):
                other.start()
                until(lambda: len(client._free_queue.tickets) > number)  # noqa: B023
            gate.answering.set()

        gate.answering.clear()
        joining = threading.Thread(target=join)
        joining.start()
        sys.settrace(trace)
        try:
            store.add(key, 1)
        finally:
            sys.settrace(None)
        for thread in [joining, *others]:
            thread.join(LIMIT)
        assert strikes == 1
        assert store.add(key, 0) == 4


def until(true: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


class Seconds(float):
    """A float that C functions receive as the number of a signal."""

    _as_parameter_ = int(signal.SIGUSR1)


@pytest.mark.skipif(not hasattr(ctypes, "PyDLL") or sys.platform != "linux", reason="no C library to ask")
def test_a_signal_just_before_the_wait(gate: Gate, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the interpreter lies between it and the system call, so it does not interrupt the call."""
    struck = threading.Event()

    def handle(*_: object) -> None:
        monkeypatch.undo()
        struck.set()
        gate.answering.set()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with TCPStore("127.0.0.1", gate.port, timeout=TIMEOUT) as store:
            gate.answering.clear()
            strike = getattr(ctypes.PyDLL(None), "raise")
            given = staticmethod(partial(max, (Seconds(0.1),), key=strike))  # a partial alone would become a method
            monkeypatch.setattr(Deadline, "poll_seconds", given)
            assert store.add(key, 1) == 1
            assert struck.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_main_thread_looks_for_signals_now_and_then() -> None:
    """No other thread runs handlers."""
    for timeout in (-1.0, 1000.0):
        seconds = Deadline(timeout).poll_seconds()
        assert seconds is not None
        assert seconds <= 0.25
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(Deadline(-1.0).poll_seconds).result(LIMIT) is None


SIGPIPE = """
import signal, sys, threading
from tcpstore_async import DistNetworkError, TCPStore

def refuse(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refuse  # the background loop would notice the loss, and nothing would be sent
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    store.set("a", "1")
    assert store.get("a") == b"1"
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        try:
            store.set("a", bytes(1 << 20))
        except DistNetworkError as error:
            print(error)
"""


# quirk: sigpipe
def test_sigpipe_at_its_default() -> None:
    """With SIGPIPE at its default a lost server is an ordinary error, and the program survives."""
    with tcpstore_server() as server:
        command = [sys.executable, "-c", SIGPIPE, str(server.port)]
        program = subprocess.Popen(
            command, cwd=tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with program:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            server.stop(signal.SIGKILL)
            out, errors = program.communicate(b"\n", LIMIT)
    assert program.returncode == 0, errors
    assert len(out.splitlines()) >= 2


@pytest.mark.skipif(not hasattr(socket, "MSG_NOSIGNAL"), reason="this system has no such flag")
@pytest.mark.parametrize("tls", [False, True])
def test_nothing_that_a_caller_sends_raises_sigpipe(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while it connects, joins, resumes and closes, when the server may go at any moment."""
    for name, value in certificates().environment().items() if tls else ():
        monkeypatch.setenv(name, value)
    careless: list[str] = []
    careful: set[str] = set()

    def recorded(name: str) -> Callable[..., Any]:
        real = getattr(socket.socket, name)

        def send(peer: socket.socket, data: Any, given: int = 0) -> Any:
            if threading.current_thread() is threading.main_thread() and peer.family == socket.AF_INET:
                if given & socket.MSG_NOSIGNAL:
                    careful.add(name)
                else:
                    careless.append("".join(traceback.format_stack(limit=2)))
            return real(peer, data, given)

        return send

    with tcpstore_server(*certificates().serving()) as server, monkeypatch.context() as patched:
        for name in ("send", "sendall"):
            patched.setattr(socket.socket, name, recorded(name))
        with TCPStore("127.0.0.1", server.port, 2, timeout=TIMEOUT) as store:
            store.set("a", BIG)
            assert store.add("n", 1) > 0
            assert store.queue_len("q") == 0
        with BriefJoin("127.0.0.1", server.port, Deadline(TIMEOUT)) as brief:
            brief.join(bytes(16), 2)
        link = ClientSingleLink()
        assert link.begun(b'{"status": "new", "instance": "x", "grace": 1}')
        peer, _ = resume_blocking(Servers(("127.0.0.1", server.port)), link, Deadline(TIMEOUT), lambda: True)
        peer.close()
    assert not careless, careless[0]
    assert careful == {"send", "sendall"}
