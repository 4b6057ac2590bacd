"""The file of a run, while it runs.

Knows the file's name, and that it is there after whatever ends us. Must not know what is in it.
Invariant: at any moment there is a whole run under that name, or none.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bench import records
from bench.records import Run

SAMPLED = "run.json"


class Keeper:
    """Writes a run again and again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SAMPLED
        self._part = folder / f"{SAMPLED}.part"

    def check(self) -> None:
        """Make the folder. Raises OSError if the file cannot be written there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._part.touch()
        self._part.unlink()

    def write(self, run: Run) -> None:
        """Instead of what was written before. Raises OSError."""
        records.write(run, self._part)
        self._part.replace(self.path)
