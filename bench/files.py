"""How it is said that a file could not be written.

Knows OSError. Must not know what is in a file.
Invariant: an error that leaves here names the file and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors within are of this file: what fails in writing, as on a full disk, does not say which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
