"""The synchronous client: threads, timeouts, closing, forks, and what it leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client.fakes import Freezer, Proxy, fake_server, freezable, proxy_to, silent
from contract.store_kinds import either_client
from marks import STOCK_SERVERS
from support import LIMIT, alarms, in_child, run_python, server_of, tcpstore_server, until
from tcpstore_async import DistNetworkError, Store, StoreTimeoutError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.keys import stored_key
from tcpstore_async.client import pool, requests, sync_client
from tcpstore_async.client.sync_connection import NO_THREAD, SyncConnection


@pytest.fixture(scope="module", params=["ours", *STOCK_SERVERS])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with server_of(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def ours() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


@pytest.fixture
def store(port: int) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        yield store


_numbers = iter(range(1_000_000))


@pytest.fixture
def key() -> str:
    """A name that no other test uses."""
    return f"key{next(_numbers)}"


def connections(store: TCPStore) -> list[Any]:
    assert store._client is not None
    return list(store._client._connections)


def until_parked(store: TCPStore, count: int = 1) -> None:
    until(lambda: sum(connection.parked for connection in connections(store)) >= count)


# Threads


# quirk: threads
def test_a_blocked_thread_blocks_no_other(store: TCPStore, key: str) -> None:
    names = [f"{key}/{number}" for number in range(10)]
    with ThreadPoolExecutor(len(names)) as threads:
        waits = [threads.submit(store.get, name) for name in names]
        until_parked(store, len(names))
        assert store.add(key, 1) == 1
        for name in names:
            store.set(name, name)
        assert [wait.result(LIMIT) for wait in waits] == [name.encode() for name in names]


def test_time_outs_leave_it_in_step(store: TCPStore, key: str) -> None:
    for seconds in (0.0, 0.001, 0.03, 0.0, 0.002):
        with pytest.raises(StoreTimeoutError):
            store.wait([key], seconds)
        assert store.add(key + "n", 0) == 0
        with pytest.raises(StoreTimeoutError):
            store.barrier(key + "bar", 100, seconds)
    store.set(key, "")
    store.wait([key])
    assert len(connections(store)) == 1


def test_what_a_thread_wrote_is_there_for_every_thread(store: TCPStore, key: str) -> None:
    """While others park on further connections: a read must not overtake a silent write."""
    stop = threading.Event()

    def park_again_and_again() -> None:
        while not stop.is_set():
            with pytest.raises(StoreTimeoutError):
                store.wait([key + "never"], 0.001)

    with ThreadPoolExecutor(4) as threads:
        parking = [threads.submit(park_again_and_again) for _ in range(3)]
        try:
            for number in range(300):
                store.set(f"{key}/{number}", "x" * 5000)
                assert threads.submit(store.check, [f"{key}/{number}"]).result(LIMIT)
        finally:
            stop.set()
        for one in parking:
            one.result(LIMIT)


class _Held(Proxy):
    """Holds back what clients send on one connection."""

    def __init__(self, port: int) -> None:
        self.held = -1
        """The number of that connection."""
        self.go_on = threading.Event()
        self.spoken = threading.Event()
        """Set by a reply on another connection meanwhile."""
        super().__init__(port)

    def _note(self, number: int, who: str) -> None:
        if who == "c" and self.held == number:
            self.go_on.wait(LIMIT)
        elif who == "s" and self.held >= 0:
            self.spoken.set()
        super()._note(number, who)

    def let_go(self) -> None:
        self.spoken.wait(LIMIT)
        self.go_on.set()


def test_what_two_threads_wrote_at_once_is_there_for_both(ours: int, key: str) -> None:
    """Each has a connection before either has written: a read on one must not overtake a write on the other."""
    proxy = _Held(ours)
    try:
        with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store, ThreadPoolExecutor(2) as threads:
            store.set(key, "old")
            parked = threads.submit(store.wait, [key + "go"])
            until(lambda: any(connection.parked for connection in connections(store)))
            assert store.get(key) == b"old"  # on a second connection
            store.set(key + "go", "")
            parked.result(LIMIT)
            assert store.check([key])
            first, second = connections(store)
            client: Any = store._client
            for connection in (first, second):
                connection.user = threading.get_ident()
            proxy.held = 0  # the first
            for connection, name in ((first, key), (second, key + "other")):
                data, call = connection.session.prepare(*requests.set_(name, "new"))
                assert connection.put(data, call, True)
            for connection in (first, second):
                client._release(connection)
            threads.submit(proxy.let_go)
            assert store.get(key) == b"new"
    finally:
        proxy.go_on.set()
        proxy.stop()


def test_a_thread_that_waits_for_a_connection_hears_of_it(ours: int, key: str) -> None:
    """A thread that finds the only connection leased just as it is released must not sleep."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store, ThreadPoolExecutor(4) as threads:
            for _ in range(300):
                adds = [threads.submit(store.add, key, 1) for _ in range(4)]
                for one in adds:
                    one.result(LIMIT / 2)
            assert store.add(key, 0) == 1200
    finally:
        sys.setswitchinterval(old)


def test_threads_that_never_pause_starve_no_other(ours: int, key: str) -> None:
    stop = threading.Event()
    with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store, ThreadPoolExecutor(3) as threads:

        def add() -> None:
            while not stop.is_set():
                store.add(key, 1)

        adding = [threads.submit(add) for _ in range(3)]
        try:
            until(lambda: store._client is not None and store._client._free_queue.tickets)
            for number in range(50):
                assert store.add(key + "mine", 1) == number + 1
        finally:
            stop.set()
        for one in adding:
            one.result(LIMIT)


@pytest.mark.interpreted("compiled code does not look the flag up")
def test_without_the_gil_a_connection_is_released_with_the_lock(
    ours: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has queued and then looked might not be seen, and sleep beside a free connection."""
    locked: list[bool] = []

    class Watched(SyncConnection):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "user" and value == NO_THREAD:
                locked.append(lock._is_owned())
            super().__setattr__(name, value)

    with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store:
        assert store.add(key, 1) == 1
        assert store._client is not None
        lock: Any = store._client._lock
        for connection in connections(store):
            connection.__class__ = Watched
        monkeypatch.setattr(sync_client, "_FREE_THREADED", True)
        store.set(key, "2")
        assert store.add(key, 1) == 3
        store.wait([key])
        assert locked == [True] * 3


@pytest.mark.interpreted("no method of a compiled class can be replaced")
def test_a_lease_that_ends_between_two_looks() -> None:
    """The same race, made deterministic."""
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        client = store._client
        assert client is not None
        (connection,) = client._connections
        connection.user = -1  # somebody's
        free = client._free

        def look_and_lose() -> Any:
            found = free()
            if connection.user == -1:
                connection.user = threading.get_ident()
                client._release(connection)
            return found

        client._free = look_and_lose  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            try:
                assert threads.submit(store.add, "a", 1).result(5) == 1
            finally:
                store.close()


def test_closing_ends_what_others_wait_for(store: TCPStore, key: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(store.get, key) for _ in range(8)]
        until_parked(store, 8)
        store.close()
        for one in waiting:
            with pytest.raises(DistNetworkError, match="has been closed"):
                one.result(LIMIT)
    for _ in range(2):
        with pytest.raises(DistNetworkError, match="the store has been closed"):
            store.set(key, "")
        store.close()
    assert repr(store) == "TCPStore(client=TCPClient(closed), server=<nullptr>)"


def test_closing_in_the_midst_of_calls(ours: int) -> None:
    """At every moment of a call: the only result is DistNetworkError, at once."""
    rng = random.Random(3)

    def work(store: TCPStore) -> None:
        while True:
            for call in (
                lambda: store.add("n", 1),
                lambda: store.wait(["never"], rng.random() / 500),
                lambda: store.set("k", "v"),
                lambda: store.get("k"),
            ):
                try:
                    call()
                except StoreTimeoutError:
                    pass
                except DistNetworkError as error:
                    assert "the store has been closed" in str(error)
                    return

    with ThreadPoolExecutor(6) as threads:
        for _ in range(60):
            with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store:
                working = [threads.submit(work, store) for _ in range(6)]
                time.sleep(rng.random() / 50)
            for one in working:
                one.result(LIMIT)


def test_closing_ends_what_connects() -> None:
    """A further connection to a server that is frozen."""
    with (
        freezable() as server,
        TCPStore("127.0.0.1", server.port, timeout=-1) as store,
        ThreadPoolExecutor(3) as threads,
    ):
        store.set("k", "")
        assert store.get("k") == b""
        server.freeze()
        waiting: list[Any] = [threads.submit(store.wait, ["never"]), threads.submit(store.add, "n", 1)]
        until_parked(store)
        waiting.append(threads.submit(store.add, "n", 1))
        assert store._client is not None
        client = store._client
        until(lambda: client._opening or not all(c.parked for c in client._connections))
        store.close()
        for one in waiting:
            with pytest.raises(DistNetworkError, match="has been closed"):
                one.result(LIMIT)


def test_a_server_that_goes_is_noticed() -> None:
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=-1) as store:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.get, "k")
            until_parked(store)
            assert store.add("n", 1) == 1
            server.stop(signal.SIGKILL)
            with pytest.raises(DistNetworkError, match=r"remote server shutdown|reset|Broken pipe"):
                waiting.result(LIMIT)
        with pytest.raises(DistNetworkError, match=r"remote server shutdown|reset|Broken pipe"):
            store.add("n", 1)


def test_a_server_that_goes_ends_what_connects() -> None:
    """The further connection is not retried until the timeout: the first one shows that the server is gone."""
    with (
        freezable() as server,
        TCPStore("127.0.0.1", server.port, timeout=-1) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = threads.submit(store.get, "k")
        until_parked(store)
        server.freeze()
        adding = threads.submit(store.add, "n", 1)
        assert store._client is not None
        client = store._client
        until(lambda: client._opening)
        server.kill()
        for one in (waiting, adding):
            with pytest.raises(DistNetworkError, match=r"remote server shutdown|reset|Broken pipe"):
                one.result(LIMIT)


def test_surplus_connections_are_closed_when_idle(ours: int, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store, ThreadPoolExecutor(5) as threads:
        waits = [threads.submit(store.get, key) for _ in range(5)]
        until_parked(store, 5)
        store.set(key, "")
        for one in waits:
            one.result(LIMIT)
        assert len(connections(store)) > 1
        monkeypatch.setattr(pool, "IDLE_SECONDS", 0.0)
        until(lambda: store.add(key + "n", 1) and len(connections(store)) == 1)
        assert store.get(key) == b""


# Time


CALLS: dict[str, tuple[Callable[[Store], object], str]] = {
    "get": (lambda store: store.get("k"), "wait timeout after 50ms, keys: /k"),
    "add": (lambda store: store.add("k0", 1), "add timeout after 50ms"),
    "compare_set": (lambda store: store.compare_set("k0", "", ""), "compare_set timeout after 50ms"),
    "check": (lambda store: store.check(["k"]), "check timeout after 50ms"),
    "wait": (lambda store: store.wait(["k"]), "wait timeout after 50ms, keys: /k"),
    "wait, its own timeout": (lambda store: store.wait(["k"], 0.05), "wait timeout after 50ms, keys: /k"),
    "wait, its own timeout 0": (lambda store: store.wait(["k"], 0), "wait timeout after 0ms, keys: /k"),
    "delete_key": (lambda store: store.delete_key("k0"), "delete_key timeout after 50ms"),
    "num_keys": (lambda store: store.num_keys(), "num_keys timeout after 50ms"),
    "list_keys": (lambda store: store.list_keys(), "list_keys timeout after 50ms"),
    "multi_get": (lambda store: store.multi_get(["k"]), "wait timeout after 50ms, keys: /k"),
    "queue_pop": (lambda store: store.queue_pop("k"), "wait timeout after 50ms, keys: /k"),
    "queue_pop, not waiting": (lambda store: store.queue_pop("k", False), "queue_pop timeout after 50ms"),
    "queue_len": (lambda store: store.queue_len("k"), "queue_len timeout after 50ms"),
    "barrier": (lambda store: store.barrier("k1", 2), "barrier timeout after 50ms, key: k1"),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["not probed", "probed"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("client", ["sync", "async"])
def test_a_frozen_server(client: str, name: str, fresh: bool, frozen: Freezer) -> None:
    """Every method times out, at the first call and later, also after a write; then the store is in step."""
    call, text = CALLS[name]
    with either_client(client) as connect:
        store = connect(frozen.port)
        if not fresh:
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0)
        frozen.freeze()
        store.set_timeout(0.05)
        store.set("other", "v")
        if "its own" in name:
            store.set_timeout(3600)
        for _ in range(2):
            with pytest.raises(StoreTimeoutError) as caught:
                call(store)
            assert str(caught.value) == text
        frozen.thaw()
        store.set_timeout(LIMIT)
        assert store.get("other") == b"v"
        assert store.add(f"{client} {name}", 1) in (1, 2)
        store.set("other", "w")
        assert store.get("other") == b"w"


@pytest.fixture(scope="module")
def frozen() -> Iterator[Freezer]:
    with freezable() as server:
        yield server


def test_a_wait_keeps_its_own_deadline(frozen: Freezer) -> None:
    """Not the store's: for the request of the identity, the fence, the lease and a further connection."""
    with TCPStore("127.0.0.1", frozen.port, timeout=3600) as store, ThreadPoolExecutor(2) as threads:
        frozen.freeze()
        store.set_timeout(0.05)  # too short for the request of the identity
        store.set("k", "v")
        store.set_timeout(3600)
        for _ in range(2):
            for call in (lambda: store.wait(["never"], 0.05), lambda: store.barrier("never", 2, 0.05)):
                with pytest.raises(StoreTimeoutError, match=r"^(wait|barrier) timeout after 50ms"):
                    threads.submit(call).result(LIMIT)
        adding = threads.submit(store.add, "n", 1)
        until(lambda: any(connection.user for connection in connections(store)))
        with pytest.raises(StoreTimeoutError, match=r"^wait timeout after 50ms"):
            threads.submit(store.wait, ["never"], 0.05).result(LIMIT)
        frozen.thaw()
        adding.result(LIMIT)
        assert store.get("k") == b"v"


def test_a_further_connection_to_a_frozen_server_is_a_timeout(frozen: Freezer) -> None:
    with TCPStore("127.0.0.1", frozen.port, timeout=LIMIT) as store, ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(store.get, "late")
        until_parked(store)
        frozen.freeze()
        store.set_timeout(0.1)
        with pytest.raises(StoreTimeoutError, match=r"^add timeout after 100ms$"):
            store.add("n", 1)
        frozen.thaw()
        store.set_timeout(LIMIT)
        store.set("late", "")
        assert waiting.result(LIMIT) == b""


def test_a_full_buffer_honours_the_timeout(frozen: Freezer) -> None:
    """A request that is sent in part breaks the connection and the store: the write is lost."""
    with TCPStore("127.0.0.1", frozen.port, timeout=LIMIT) as store:
        store.set_timeout(0.1)
        frozen.freeze()
        with pytest.raises(StoreTimeoutError, match=r"^set timeout after 100ms$"):
            for _ in range(100):
                store.set("k", bytes(8 << 20))
        with pytest.raises(DistNetworkError, match="in the middle of a call"):
            store.add("n", 1)
        frozen.thaw()


def test_a_silent_server_is_given_up() -> None:
    with fake_server(silent) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        store.set_timeout(0.05)
        for _ in range(2):
            with pytest.raises(StoreTimeoutError, match=r"^add timeout after 50ms$"):
                store.add("a", 1)
            with pytest.raises(StoreTimeoutError, match=r"^wait timeout after 50ms, keys: /a$"):
                store.get("a")


@pytest.mark.unmeasured
def test_a_storm_of_signals_does_not_stop_the_clock(store: TCPStore, key: str) -> None:
    fired = 0

    def handle(*_: object) -> None:
        nonlocal fired
        fired += 1

    with alarms(handle, 0.001, 0.001):
        waits: list[Callable[[], object]] = [lambda: store.wait([key], 0.3), lambda: store.barrier(key, 2, 0.2)]
        for call in waits:
            began = time.monotonic()
            with pytest.raises(StoreTimeoutError):
                call()
            assert time.monotonic() - began < LIMIT / 2
        for number in range(500):
            assert store.add(key + "n", 1) == number + 1
            store.set(key + "v", str(number))
            assert store.get(key + "v") == b"%d" % number
    assert fired > 50


# Ctrl-C

INTERRUPTED = """
import os, signal, sys, threading, time
from tcpstore_async import TCPStore
port, call = int(sys.argv[1]), sys.argv[2]
do = eval("lambda: " + call)
struck = []
def interrupt():
    time.sleep(0.3)  # until the call is under way; should it not be, the interrupt comes all the same
    struck.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
if call.startswith("TCPStore"):
    store = None
    if "hangs" in call:
        import socket
        socket.getaddrinfo = lambda *_, **__: time.sleep(1000)
else:
    store = TCPStore("127.0.0.1", port, timeout=60)
    store.set("k", "v")
    assert store.get("k") == b"v"
if "frozen" in call:
    os.kill(int(sys.argv[3]), signal.SIGSTOP)
threading.Thread(target=interrupt, daemon=True).start()
try:
    do()
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - struck[0], flush=True)
if "frozen" in call:
    os.kill(int(sys.argv[3]), signal.SIGCONT)
if store is not None:
    store.set("k", "w")
    assert store.get("k") == b"w" and store.check(["k"])
    store.close()
def left():
    yield from [thread.name for thread in threading.enumerate() if "connecting" in thread.name]
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                yield f"socket {fd}"
        except FileNotFoundError:
            pass  # that of the listing
end = time.monotonic() + 30
while list(left()):
    assert time.monotonic() < end, list(left())
    time.sleep(0.001)
"""


@pytest.mark.unmeasured
@pytest.mark.needs_proc
@pytest.mark.parametrize(
    "call",
    [
        "store.get('never')",
        "store.wait(['never'])",
        "store.barrier('never', 2)",
        "store.queue_pop('never')",
        "store.multi_get(['never'])",
        "store.add('frozen', 1)",
        "store.wait(['frozen'])",
        "TCPStore('127.0.0.1', 1, timeout=60)",
        "TCPStore('localhost', 1, timeout=60)",
        "TCPStore('127.0.0.1', port, timeout=60)",
        "TCPStore('hangs.invalid', port, timeout=60)",
        "TCPStore('127.0.0.1', 0, 2, True, 60)",
    ],
)
# quirk: ctrl-c
def test_ctrl_c(call: str, record_property: Callable[[str, object], None]) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    with deaf, tcpstore_server() as server:
        port = deaf.getsockname()[1] if call.startswith("TCPStore") else server.port
        try:
            word, seconds = run_python(INTERRUPTED, port, call, server.process.pid).split()
        finally:
            server.process.send_signal(signal.SIGCONT)
    assert word == "interrupted"
    record_property("milliseconds", round(1000 * float(seconds), 1))
    print(f"{call}: {1000 * float(seconds):.1f} ms")
    assert float(seconds) < LIMIT / 2


# Forks


@pytest.mark.unmeasured
# quirk: fork
def test_a_forked_child_has_connections_of_its_own(store: TCPStore, key: str) -> None:
    store.set(key, "parent")
    assert store.get(key) == b"parent"

    def work() -> str:
        assert not connections(store)
        store.set(key + "child", "child")
        assert store.get(key + "child") == b"child"
        said = store.get(key).decode()
        store.close()
        return said

    assert in_child(work) == "parent"
    assert store.get(key + "child") == b"child"
    assert store.add(key + "n", 1) == 1


@pytest.mark.unmeasured
def test_a_fork_while_others_are_at_work(ours: int, key: str) -> None:
    stop = threading.Event()
    with TCPStore("127.0.0.1", ours, timeout=LIMIT) as store, ThreadPoolExecutor(4) as threads:

        def add() -> int:
            count = 0
            while not stop.is_set():
                store.add(key, 1)
                count += 1
            return count

        waiting = threads.submit(store.get, key + "late")
        until_parked(store)
        adding = [threads.submit(add) for _ in range(3)]

        said = [in_child(lambda: store.add(key + "children", 1)) for _ in range(10)]
        assert said == [str(number) for number in range(1, 11)]
        stop.set()
        total = sum(one.result(LIMIT) for one in adding)
        assert store.add(key, 0) == total
        store.set(key + "late", "now")
        assert waiting.result(LIMIT) == b"now"


@pytest.mark.unmeasured
def test_multiprocessing(ours: int, key: str) -> None:
    for method in ("fork", "forkserver", "spawn"):
        assert run_python(POOL, method, ours, key + method) == "[1, 2, 3] 3\n"
    assert multiprocessing.active_children() == []


POOL = """
import multiprocessing, sys
from tcpstore_async import TCPStore
method, port, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with TCPStore("127.0.0.1", port, timeout=60) as store:
    store.add(key, 0)
    code = '''
import sys
from tcpstore_async import TCPStore
def work(port, key):
    with TCPStore("127.0.0.1", port, timeout=60) as store:
        return store.add(key, 1)
'''
    import pathlib, tempfile
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "worker_of_a_pool.py").write_text(code)
        sys.path.insert(0, folder)
        from worker_of_a_pool import work
        with multiprocessing.get_context(method).Pool(3) as pool:
            sums = [pool.apply_async(work, (port, key)) for _ in range(3)]
            sums = sorted(one.get(60) for one in sums)
            pool.close()
            pool.join()
    print(sums, store.add(key, 0))
"""


# What it leaves behind


@pytest.mark.needs_proc
def test_nothing_is_left(ours: int, key: str) -> None:
    """No thread, no socket."""
    threads_before = threading.active_count()
    sockets_before = sockets()
    for host in ("127.0.0.1", "localhost"):
        with TCPStore(host, ours, timeout=LIMIT) as store, ThreadPoolExecutor(5) as threads:
            waits = [threads.submit(store.get, key + host) for _ in range(5)]
            until_parked(store, 5)
            store.set(key + host, "")
            for one in waits:
                one.result(LIMIT)
    until(lambda: threading.active_count() <= threads_before)
    assert sockets() == sockets_before


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            pass
    return count


def test_an_error_shows_nothing_internal() -> None:
    """Nor in compiled code, which ignores `from None`."""
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        assert store.queue_len("q") == 0  # all that a first call asks has been asked
        store.set_timeout(0.05)
        requests: list[Callable[[], object]] = [
            lambda: store.wait(["k"]),
            lambda: store.get("k"),
            lambda: store.barrier("b", 2),
            lambda: store.queue_pop("q"),
            lambda: store.multi_get(["k"]),
            lambda: store.set("\ud800", "v"),
            lambda: store.add("n", "x"),  # type: ignore[arg-type]
        ]
        for call in requests:
            with pytest.raises((StoreTimeoutError, TypeError)) as caught:
                call()
            assert caught.value.__suppress_context__
            assert caught.value.__cause__ is None
        store.set_timeout(LIMIT)
        server.process.kill()
        server.process.wait(LIMIT)
        with pytest.raises(DistNetworkError) as lost:
            store.num_keys()
        assert lost.value.__suppress_context__


def test_calls_that_are_made_at_once_take_one_round_trip(ours: int, key: str) -> None:
    with proxy_to(ours) as proxy, TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
        assert not store.check([key])
        before = len(proxy.senders[0])
        checks = [requests.check([stored_key(key)])] * 500
        assert store._connection().call_all(checks, Deadline(LIMIT)) == [False] * 500
        assert len(proxy.senders[0]) - before < 20  # the first replies may overtake the last requests


def test_missing_keys_are_found_in_few_round_trips(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time-out, a rank of a large world looks for all others: not with a round trip for each."""
    present = {f"few/{number}" for number in range(0, 1500, 3)}
    for name in present:
        store.set(name, "")
    client = store._connection()
    batches: list[int] = []

    class Counted:
        """All that looking for missing keys may use of a connection."""

        def call_all(self, batch: list[Any], *options: Any) -> list[Any]:
            batches.append(len(batch))
            return client.call_all(batch, *options)

    monkeypatch.setattr(store, "_connection", Counted)
    names = [f"few/{number}" for number in range(1500)]
    absent, complete = store._absent(names, Deadline(LIMIT))
    assert complete
    assert absent == [place for place, name in enumerate(names) if name not in present]
    assert batches == [512, 512, 476]
