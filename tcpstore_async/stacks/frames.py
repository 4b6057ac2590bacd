"""How frames are written: innermost first, with the base names of files.

Must not know where frames come from. Invariant: no values and no arguments, and never more than a limit.
"""

import os
from collections.abc import Iterable
from itertools import islice
from typing import Final

_FRAMES: Final = 24
_CHARACTERS: Final = 128
"""Of one frame."""


def written(frames: Iterable[tuple[str, str, int]]) -> tuple[str, ...]:
    """Return what to show of frames: functions, with or without the names of their classes, files and lines."""
    return clipped(
        f"{function.rpartition('.')[2]} ({os.path.basename(file)}:{line})" for function, file, line in frames
    )


def clipped(frames: Iterable[str]) -> tuple[str, ...]:
    """Return no more of frames than is shown, as text that can be encoded: a file's name may be no UTF-8."""
    return tuple(frame[:_CHARACTERS].encode(errors="replace").decode() for frame in islice(frames, _FRAMES))
