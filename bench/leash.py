"""What lets no process of ours outlive the benchmark, however that ends: a standard input that nobody writes to.

Knows pipes. Must not know what the processes do.
Invariant: when the last process that holds the other end is gone, so is the one that has called `end_with_parent`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def end_with_parent() -> None:
    """End this process, at once, when its standard input ends."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


@contextmanager
def leash() -> Iterator[int]:
    """A standard input for a process, which ends with the context and with us."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)
