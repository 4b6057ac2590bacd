"""`python -m bench`: `scale` measures, `compare` compares two runs.

Knows options, exit codes and where results go. Must not know how anything is measured or drawn.
Invariant: whatever ends a run, its JSON file is written; exit status 0 only for a complete run.
"""

from __future__ import annotations

from bench import builds

builds.use()

from bench.command import main  # noqa: E402  (the path comes first)

if __name__ == "__main__":
    main(prog_name="python -m bench")
