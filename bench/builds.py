"""Which package is measured: that of the compiled build, if `make compile` has made it and no source is newer.

Knows folders, and which of them a process looks into first. Must not import the package: whoever asks has not done so
yet.
Invariant: the package of the folder that was chosen is the one that is imported, here after `use` and in every process
that is started with `environment`, wherever either runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"


def chosen() -> Path:
    """`build/compiled`, or the checkout: with BENCH_BUILD=interpreted, and where there is no build of its sources."""
    if os.environ.get("BENCH_BUILD") == "interpreted" or not list(COMPILED.glob("*.so")):
        return ROOT
    if _up_to_date():
        return COMPILED
    text = f"{COMPILED} is not made of these sources, which run interpreted: `make compile` makes it"
    with suppress(OSError):  # nobody may read standard error any more
        print(text, file=sys.stderr)
    return ROOT


def _up_to_date() -> bool:
    """As Make sees it: the mark that it leaves is as new as every source."""
    sources = [*(ROOT / "tcpstore_async").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "setup.py"]
    try:
        made = (COMPILED / ".made").stat().st_mtime
        return all(source.stat().st_mtime <= made for source in sources)
    except OSError:
        return False


def use() -> None:
    """Import the package that is to be measured, here and in all processes started here."""
    tree = chosen()
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = environment(tree)["PYTHONPATH"]


def environment(tree: Path | None = None) -> dict[str, str]:
    """For processes that import `bench`, and the package of this folder or, without one, what this process imports.

    The checkout comes last: its plain sources must not hide a compiled build.
    """
    first = [str(tree.absolute())] if tree else []
    path = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
