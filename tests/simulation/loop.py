"""A loop without a selector, on the world's clock. The one thread of a server, which may end in any call."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.journal import World

_monotonic, _perf_counter = time.monotonic, time.perf_counter


class Loop(asyncio.AbstractEventLoop):
    """Calls what is due when it is told to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.soon: deque[asyncio.Handle] = deque()
        self.timers: list[asyncio.TimerHandle] = []
        self.readers: dict[int, None] = {}
        self.writers: dict[int, None] = {}

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Any, *given: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, given, self)
        self.soon.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *given: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(self.world.now + delay, callback, given, self)
        self.timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def add_reader(self, fd: Any, callback: Any, *given: Any) -> None:  # type: ignore[override]
        self.readers[fd] = None

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, self) is None

    def add_writer(self, fd: Any, callback: Any, *given: Any) -> None:  # type: ignore[override]
        self.writers[fd] = None

    def remove_writer(self, fd: Any) -> bool:
        return self.writers.pop(fd, self) is None

    def run_once(self) -> bool:
        """Call what was scheduled up to now; return whether there was anything."""
        soon, self.soon = self.soon, deque()
        for handle in soon:
            call(handle)
        return len(soon) > 0

    def next_timer(self, until: float) -> asyncio.TimerHandle | None:
        """Take the first timer that is due by then."""
        due = [timer for timer in self.timers if timer.when() <= until]
        if not due:
            return None
        timer = min(due, key=asyncio.TimerHandle.when)
        self.timers.remove(timer)
        return timer


def call(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._callback(*handle._args)  # type: ignore[attr-defined]  # `_run` would keep a Crash


class Errors(logging.Handler):
    """Keeps the errors that a server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self.found.append(record.getMessage() + cause)


@contextmanager
def machine(world: World) -> Iterator[None]:
    """Give this thread the world's time, and the world the server's errors."""
    thread = threading.get_ident()
    log = logging.getLogger("tcpstore_async")
    propagates = log.propagate

    def now() -> float:
        if threading.get_ident() != thread:
            return _monotonic()
        world.now += 0.0001  # no two turns are at one time
        return world.now

    def passed() -> float:
        return _perf_counter() if threading.get_ident() != thread else 0.0

    places: list[tuple[Any, str, Any]] = [(time, "monotonic", now), (time, "perf_counter", passed)]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, virtual in places:
        setattr(owner, name, virtual)
    log.addHandler(world.errors)
    log.propagate = False
    try:
        yield
    finally:
        for (owner, name, _), real in zip(places, before, strict=True):
            setattr(owner, name, real)
        log.removeHandler(world.errors)
        log.propagate = propagates
        world.close()
