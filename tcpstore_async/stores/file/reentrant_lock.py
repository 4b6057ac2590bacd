"""The lock on a store's file, in a process whose calls may interrupt each other.

Invariant: no thread ever waits for a lock that it holds itself. This module must not know what is in the file.

A signal handler, or a finalizer that the garbage collector calls, may use a store while its own thread is in the middle
of a call that has locked the file, so that waiting for the lock would never end. The handler's call takes the lock from
the call that it interrupts, and does not use the shared replica; the interrupted call finds its lock lost and starts
again.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final


class FileLock:
    """The file as one call has opened and locked it."""

    def __init__(self) -> None:
        self.fd = -1
        self.lost = False
        """Whether a call that interrupted this one has taken the lock."""
        self.written = False

    def give_up(self) -> None:
        """Release the lock, and make the descriptor harmless for the interrupted call's next step."""
        self.lost = True
        if self.fd < 0:
            return
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, self.fd, inheritable=False)
        os.close(null)


_held: Final[dict[int, list[FileLock]]] = {}
"""The locks of each thread's calls in progress; several if one call has interrupted another."""


@contextmanager
def locked() -> Iterator[FileLock]:
    """Register a call of this thread; calls that it interrupts lose their locks."""
    thread = threading.get_ident()
    for other in _held.get(thread, ()):
        other.give_up()
    lock = FileLock()
    while lock not in _held.get(thread, ()):  # a call that interrupts this line removes the list when it ends
        _held.setdefault(thread, []).append(lock)
    locks = _held[thread]
    try:
        yield lock
    finally:
        # Unlock while a call that interrupts this one can still find the lock. Closing does not suffice, as a forked
        # child may hold a copy of the descriptor.
        if lock.fd >= 0:
            fcntl.flock(lock.fd, fcntl.LOCK_UN)
        locks.remove(lock)
        if not locks:
            _held.pop(thread, None)
        if lock.fd >= 0:
            os.close(lock.fd)


def _after_fork_in_child() -> None:
    """Drop the parent's locks: only the parent may release those of its other threads."""
    forking_thread = threading.get_ident()
    for thread, locks in list(_held.items()):
        for lock in locks:
            if thread == forking_thread:
                lock.give_up()
            elif lock.fd >= 0:
                os.close(lock.fd)
        if thread != forking_thread:
            del _held[thread]


os.register_at_fork(after_in_child=_after_fork_in_child)
