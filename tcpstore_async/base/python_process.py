"""Command line and environment of our child processes: this interpreter, without settings for the user's program.

Must not know what a child does.
"""

import os
import sys
from typing import Final

_KEPT: Final = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"})
"""Variables by which an interpreter finds its parts. Others, such as PYTHONINSPECT, are for the user's program."""


def command(program: str) -> list[str]:
    """Return the command that runs a program's source text, without `site`; append the arguments."""
    return [sys.executable, "-S", *(["-B"] if sys.dont_write_bytecode else []), "-c", program]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that are for the user's program."""
    return {name: text for name, text in os.environ.items() if name[:6] != "PYTHON" or name in _KEPT}
