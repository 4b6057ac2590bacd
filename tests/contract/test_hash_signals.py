"""HashStore and signal handlers that use it, raise or fork."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from support import LIMIT
from tcpstore_async import HashStore
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.stores.hash import UNLIMITED
from tcpstore_async.wire.values import Framed

pytestmark = pytest.mark.unmeasured

plain = pytest.mark.interpreted("no handler runs within a compiled method")


@contextmanager
def on_signal(then: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: then())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Interrupted(Keyspace):
    """A keyspace that is interrupted in its first `set`, and continues when the handler runs."""

    def __init__(self) -> None:
        super().__init__(UNLIMITED)
        self.handling = threading.Event()
        self.steps: list[str] = []

    def set(self, key: bytes, value: Framed) -> None:
        first = not self.steps
        self.steps.append("begin")
        end = time.monotonic() + LIMIT
        # Repeated, because a signal just before the main thread sleeps is not handled until it wakes.
        while first and not self.handling.is_set():
            assert time.monotonic() < end
            os.kill(os.getpid(), signal.SIGUSR1)
            self.handling.wait(0.01)
        super().set(key, value)
        self.steps.append("done")


@contextmanager
def interrupted(then: Callable[[HashStore], object]) -> Iterator[tuple[HashStore, list[str]]]:
    """A store whose first `set` is interrupted by a handler, and the steps of its keyspace."""
    store = HashStore()
    keyspace = store._keyspace = Interrupted()

    def handle() -> None:
        if not keyspace.handling.is_set():
            keyspace.handling.set()
            then(store)

    with on_signal(handle):
        yield store, keyspace.steps


@plain
def test_handler_s_call_waits_for_the_interrupted_operation() -> None:
    def handle(store: HashStore) -> None:
        store.set("k", "handler's")
        assert store.get("k") == b"handler's"
        assert store.add("n", 1) == 1

    with interrupted(handle) as (store, steps):
        store.set("k", "first")
    assert steps == ["begin", "done"] * 2
    assert store.get("k") == b"handler's"


@plain
def test_operation_completes_when_a_handler_raises() -> None:
    def handle(_: HashStore) -> None:
        raise InterruptedError

    with interrupted(handle) as (store, _), pytest.raises(InterruptedError):
        store.set("k", "first")
    assert store.get("k") == b"first", "the next call waits for it"


@plain
def test_handler_that_forks() -> None:
    pids: list[int] = []
    with interrupted(lambda _: pids.append(os.fork())) as (store, _):
        store.set("k", "first")
    if pids == [0]:
        store.set("k", "child's")
        os._exit(0 if store.get("k") == b"child's" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert store.get("k") == b"first"


# quirk: hash-signals
def test_handlers_at_any_moment() -> None:
    """No increment and no item of a queue is lost or duplicated."""
    store = HashStore()
    handled = [0]
    nested = 0

    def handle() -> None:
        nonlocal nested
        nested += 1
        handled[0] += 1
        store.add("n", 1)
        store.queue_push("q", "handler's")
        store.set(f"k{handled[0] % 7}", str(handled[0]))
        store.delete_key(f"k{handled[0] % 5}")
        nested -= 1

    chance = random.Random(1)
    own = pushed = 0
    stop = threading.Event()

    def shoot() -> None:
        while not stop.wait(chance.random() / 1000):
            if nested < 10:  # on a slow machine they would come faster than they are handled
                os.kill(os.getpid(), signal.SIGUSR1)

    with on_signal(handle):
        shooter = threading.Thread(target=shoot)
        shooter.start()
        try:
            end = time.monotonic() + LIMIT
            while handled[0] < 500 and time.monotonic() < end:
                own = store.add("own", 1)
                store.queue_push("q", "own")
                pushed += 1
                store.multi_set(["k1", "k2", "k3"], ["a", "b", "c"])
                store.append("k2", "d")
                if own % 10 == 0:
                    store.delete_key("k3")
        finally:
            stop.set()
            shooter.join()
    assert store.add("n", 0) == handled[0] >= 500
    assert store.add("own", 0) == own
    assert store.queue_len("q") == pushed + handled[0]
