"""The command `tcpstore`, on a disk that fails: `python bad_disk.py FILE WORDS...`.

While FILE exists, writing to a journal is an I/O error. The file says how: `write`, `torn` (a part is written) or
`sync`. For machines without a device mapper, and users who may not use it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tcpstore_async.__main__ import main


def failing(file: Path, call: Callable[..., Any], *kinds: str) -> Callable[..., Any]:
    """Return a function of `os` that fails while the disk does."""

    def called(fd: int, *given: Any) -> Any:
        try:
            kind = file.read_text()
        except FileNotFoundError:
            kind = ""
        if kind not in kinds:
            return call(fd, *given)
        if kind == "torn":
            data, at = given
            call(fd, data[: len(data) // 2], at)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return called


if __name__ == "__main__":
    bad = Path(sys.argv.pop(1))
    os.pwrite = failing(bad, os.pwrite, "write", "torn")
    os.fdatasync = failing(bad, os.fdatasync, "sync")
    main()
