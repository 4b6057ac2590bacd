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


class Turn:
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


_turns: Final[dict[int, list[Turn]]] = {}
"""Of every thread, those that are under way: several if one has interrupted another."""


@contextmanager
def taken_turn() -> Iterator[Turn]:
    """A turn of this thread. Those that it interrupts are lost."""
    thread = threading.get_ident()
    turns = _turns.setdefault(thread, [])
    for other in turns:
        other.give_up()
    turn = Turn()
    turns.append(turn)
    try:
        yield turn
    finally:
        # Unlocked before it is forgotten, for one that interrupts this to find; not by closing alone, for a forked
        # child may have a copy.
        if turn.fd >= 0:
            fcntl.flock(turn.fd, fcntl.LOCK_UN)
        turns.remove(turn)
        if not turns:
            _turns.pop(thread, None)
        if turn.fd >= 0:
            os.close(turn.fd)


def _after_fork_in_child() -> None:
    """The turns of the parent's other threads are not this process's, and their locks are theirs to give back."""
    here = threading.get_ident()
    for thread, turns in list(_turns.items()):
        for turn in turns:
            if thread == here:
                turn.give_up()
            elif turn.fd >= 0:
                os.close(turn.fd)
        if thread != here:
            del _turns[thread]


os.register_at_fork(after_in_child=_after_fork_in_child)
