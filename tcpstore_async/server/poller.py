"""Report which connections can be read or written.

Knows events of file descriptors. Must not know the protocol, or who owns a descriptor.
Invariant: an edge is reported once, so the reader of a descriptor reads until the kernel has no more, or schedules
itself again.

On Linux the loop watches one descriptor, an epoll set of our own, instead of one per connection. Compared with a
callback protocol on uvloop this saves three quarters of the memory of a connection and a third of the cost of its start
(figures: `docs/performance.md`). Elsewhere the loop watches every descriptor, and reports levels, not edges.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Final

READ: Final = 0x001
WRITE: Final = 0x004
_HANG_UP: Final = 0x2000
_EDGE: Final = 1 << 31
_BATCH: Final = 256

Report = Callable[[list[tuple[int, int]]], None]
"""Called with pairs of a file descriptor and its events: READ, WRITE, and others that the kernel reports."""


class Poller:
    """Reports the events of descriptors that it watches."""

    def watch(self, fd: int) -> None:
        """Report when `fd` is readable."""
        raise NotImplementedError

    def watch_writing(self, fd: int, wanted: bool) -> None:
        """Report, or no longer report, when `fd` is writable."""
        raise NotImplementedError

    # epoll needs none of these: it does not repeat an edge, and the kernel removes closed descriptors.

    def pause(self, fd: int) -> None:
        """Stop reporting that `fd` is readable."""

    def resume(self, fd: int) -> None:
        """Report again that `fd` is readable. For what arrived in between, read once without an event."""

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, which is about to be closed."""

    def close(self) -> None:
        """Stop watching everything."""
        raise NotImplementedError


class EpollPoller(Poller):
    """An edge-triggered epoll set nested in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        self._loop = loop
        self._report = report
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._poll)

    def _poll(self) -> None:
        self._report(self._epoll.poll(0, _BATCH))

    def watch(self, fd: int) -> None:
        self._epoll.register(fd, READ | _HANG_UP | _EDGE)

    def watch_writing(self, fd: int, wanted: bool) -> None:
        self._epoll.modify(fd, READ | _HANG_UP | _EDGE | (WRITE if wanted else 0))

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


class LoopPoller(Poller):
    """The loop itself, watching every descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        self._loop = loop
        self._report = report
        self._watched: set[int] = set()

    def watch(self, fd: int) -> None:
        self._watched.add(fd)
        self._loop.add_reader(fd, self._report, [(fd, READ)])

    def watch_writing(self, fd: int, wanted: bool) -> None:
        if wanted:
            self._loop.add_writer(fd, self._report, [(fd, WRITE)])
        else:
            self._loop.remove_writer(fd)

    def pause(self, fd: int) -> None:
        self._loop.remove_reader(fd)

    def resume(self, fd: int) -> None:
        self._loop.add_reader(fd, self._report, [(fd, READ)])

    def forget(self, fd: int) -> None:
        self._watched.discard(fd)
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def close(self) -> None:
        for fd in list(self._watched):
            self.forget(fd)


WatchWith = Callable[[asyncio.AbstractEventLoop, Report], Poller]


def make_poller(loop: asyncio.AbstractEventLoop, report: Report) -> Poller:
    """Return the best poller of this system."""
    return EpollPoller(loop, report) if hasattr(select, "epoll") else LoopPoller(loop, report)
