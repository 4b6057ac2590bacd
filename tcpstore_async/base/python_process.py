"""How our child processes are started: with this interpreter and its path, without settings for the user's program.

Must not know what a child does.
"""

import os
import sys
from pathlib import Path
from typing import Final

_KEPT: Final = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"})
"""Variables by which an interpreter finds its parts. Others, such as PYTHONINSPECT, are for the user's program."""

_ROOT: Final = os.path.abspath(Path(__file__).parent.parent.parent)
"""Where this package is: a directory or a zip file. Determined on import, as the working directory may change."""


_PATH: Final = """
import os, sys
first = int(sys.argv.pop())
sys.path[:] = [entry for entry in sys.path if entry] + sys.argv[first:]
del sys.argv[first:]
"""
"""Sets the path of a child, after `site` was left out. The standard library comes first, so that no file of the user's
shadows one of its modules."""


def command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs a program's source text, whose first line, a comment, identifies it in `ps`."""
    name, _, rest = program.partition("\n")
    options = ["-S", *(["-B"] if sys.dont_write_bytecode else [])]
    return [sys.executable, *options, "-c", name + _PATH + rest, *arguments, *_path(), str(1 + len(arguments))]


def _path() -> list[str]:
    """Return the path of a child: this package's directory, then the path of this process.

    The current directory is left out, unless the package is there: it may contain anything.
    """
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    entries = [os.path.abspath(entry) if here else entry for entry in sys.path if entry]
    return [_ROOT, *(entry for entry in entries if entry != here)]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that are for the user's program."""
    return {name: text for name, text in os.environ.items() if name[:6] != "PYTHON" or name in _KEPT}
