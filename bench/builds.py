"""Choose the build to measure: `build/compiled` if it is up to date, otherwise the checkout.

Must not import the package: callers import it afterwards.
Invariant: after `use`, this process and every process started with `environment` import the same package.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"


def chosen() -> Path:
    """Return `build/compiled`, or the checkout if BENCH_BUILD=interpreted or the build is missing or stale."""
    if os.environ.get("BENCH_BUILD") == "interpreted" or not list(COMPILED.glob("*.so")):
        return ROOT
    if _up_to_date():
        return COMPILED
    text = f"{COMPILED} is older than the sources; measuring the interpreted checkout (`make compile` rebuilds it)"
    with suppress(OSError):  # standard error may be closed
        print(text, file=sys.stderr)
    return ROOT


def _up_to_date() -> bool:
    """Apply Make's rule: no source is newer than the build's stamp."""
    sources = [*(ROOT / "tcpstore_async").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "setup.py"]
    try:
        made = (COMPILED / ".made").stat().st_mtime
        return all(source.stat().st_mtime <= made for source in sources)
    except OSError:
        return False


def use() -> None:
    """Import the chosen package from now on, here and in child processes."""
    tree = chosen()
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = environment(tree)["PYTHONPATH"]


def environment(tree: Path | None = None) -> dict[str, str]:
    """Return the environment for a process that imports `bench` and the package in `tree` (default: this process's).

    The checkout comes last: its sources must not hide a compiled build.
    """
    first = [str(tree.absolute())] if tree else []
    path = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
