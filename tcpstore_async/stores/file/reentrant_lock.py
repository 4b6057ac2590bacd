"""Whose turn it is with a locked file, in a process whose calls may interrupt each other.

Knows: which calls of which thread hold a file's lock, and how it is given up. Must not know: what is in the file.
Invariant: no thread ever waits for a lock that it holds itself.

A signal handler, or a finalizer that the garbage collector calls, may use a store while its own thread is in the middle
of something, with the file locked: waiting for that lock would be for ever. So it takes the lock from the call that it
interrupts and does without the common replica; the interrupted call finds its descriptor dead and starts again.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final


class FileLock:
    """The file, open and locked for one call."""

    def __init__(self) -> None:
        self.fd = -1
        self.lost = False
        """Another call, which has interrupted this one, has taken the lock."""
        self.written = False

    def give_up(self) -> None:
        """Let go of the lock, whatever the interrupted call is about to do with its descriptor."""
        self.lost = True
        if self.fd < 0:
            return
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.fd, inheritable=False)
        os.close(nothing)


_held: Final[dict[int, list[FileLock]]] = {}
"""Of every thread, those that are under way: several if one has interrupted another."""


@contextmanager
def locked() -> Iterator[FileLock]:
    """A turn of this thread. Those that it interrupts are lost."""
    thread = threading.get_ident()
    locks = _held.setdefault(thread, [])
    for other in locks:
        other.give_up()
    lock = FileLock()
    locks.append(lock)
    try:
        yield lock
    finally:
        # Unlocked before it is forgotten, for one that interrupts this to find; not by closing alone, for a forked
        # child may have a copy.
        if lock.fd >= 0:
            fcntl.flock(lock.fd, fcntl.LOCK_UN)
        locks.remove(lock)
        if not locks:
            _held.pop(thread, None)
        if lock.fd >= 0:
            os.close(lock.fd)


def _after_fork_in_child() -> None:
    """The turns of the parent's other threads are not this process's, and their locks are theirs to give back."""
    here = threading.get_ident()
    for thread, locks in list(_held.items()):
        for lock in locks:
            if thread == here:
                lock.give_up()
            elif lock.fd >= 0:
                os.close(lock.fd)
        if thread != here:
            del _held[thread]


os.register_at_fork(after_in_child=_after_fork_in_child)
