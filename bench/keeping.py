"""The file of a run, while it runs.

Knows the file's name, and that it is there after whatever ends us. Must not know what is in it.
Invariant: at any moment there is a whole run under that name, or none; samples of another run are never lost.
"""

from __future__ import annotations

import errno
import os
from datetime import datetime, timezone
from pathlib import Path

from bench import records
from bench.records import Run

SAMPLED = "run.json"


class Keeper:
    """Writes a run again and again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SAMPLED
        self._part = folder / f"{SAMPLED}.part"
        self._ours = False

    def check(self) -> None:
        """Make the folder. Raises OSError if the file cannot be written there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._part.touch()
        self._part.unlink()

    def write(self, run: Run) -> None:
        """Instead of what was written before; another run's file goes aside, or stays if this one has nothing.

        Raises OSError.
        """
        if not self._ours and self.path.exists():
            if not run.samples:
                return
            self.path.rename(_aside(self.path))
        records.write(run, self._part)
        self._part.replace(self.path)
        self._ours = True


def _aside(path: Path) -> Path:
    """A name that is free, with the time when that run began, or the file was written if it is no run of ours."""
    try:
        began = datetime.fromisoformat(records.read(path).began)
    except ValueError:
        began = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    names = (f"{path.stem}-{began:%Y%m%dT%H%M%S}{more}{path.suffix}" for more in ("", *map("-{}".format, range(2, 99))))
    return next(found for name in names if not (found := path.with_name(name)).exists())
