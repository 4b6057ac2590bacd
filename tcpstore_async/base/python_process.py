"""How a process that runs a program of ours is started: by this interpreter, without what is for the user's program.

Must not know what ours does.
"""

import os
import sys
from typing import Final

_KEPT: Final = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"})
"""Variables by which an interpreter finds its parts. Others, such as PYTHONINSPECT, are for the user's program."""


def command(program: str) -> list[str]:
    """Return how to run a program's source text without `site`; its arguments follow."""
    return [sys.executable, "-S", *(["-B"] if sys.dont_write_bytecode else []), "-c", program]


def environment() -> dict[str, str]:
    """Return this process's environment, less what is for the user's program."""
    return {name: text for name, text in os.environ.items() if name[:6] != "PYTHON" or name in _KEPT}
