"""`python -m bench`: `scale` measures, `compare` compares two runs.

Knows options, exit codes and where results go. Must not know how anything is measured or drawn.
Invariant: whatever ends a run, its JSON file is written; exit status 0 only for a complete run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"


def _prefer_compiled() -> None:
    """Measure the compiled build, if `make compile` has made it, here and in all processes started here."""
    if list(COMPILED.glob("*.so")) and os.environ.get("BENCH_BUILD") != "interpreted":
        sys.path.insert(0, str(COMPILED))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(COMPILED), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


_prefer_compiled()

from bench.command import main  # noqa: E402  (the path comes first)

if __name__ == "__main__":
    main(prog_name="python -m bench")
