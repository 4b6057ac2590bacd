"""Compare the coverage of each module with its minimum: `make coverage` runs this on what it has measured.

Coverage is of lines and branches, in percent, rounded down. The minimums in tests/coverage_minimums.json are what was
measured when they were last written, less a point for what depends on timing. A module without one needs 80.

    python tools/coverage_minimums.py build/coverage.json            # exit status 1 if a module is below its minimum
    python tools/coverage_minimums.py build/coverage.json --write    # take what was measured as the new minimums
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MINIMUMS = Path(__file__).parent.parent / "tests" / "coverage_minimums.json"
NEW = 80
"""The minimum of a module that has none yet."""
SLACK = 1
"""Points by which a minimum is below what was measured."""


def measured(report: str) -> dict[str, int]:
    """Percent of each module, from a JSON report of coverage."""
    files = json.loads(report)["files"]
    return {name: int(files[name]["summary"]["percent_covered"]) for name in sorted(files)}


def problems(found: dict[str, int], minimums: dict[str, int]) -> list[str]:
    """What is below its minimum, and minimums of what is not there any more."""
    low = [
        f"{name}: {percent} % are covered, the minimum is {minimums.get(name, NEW)} %"
        for name, percent in found.items()
        if percent < minimums.get(name, NEW)
    ]
    return low + [f"{name}: was not measured; is it gone?" for name in sorted(set(minimums) - set(found))]


def minimums_from(found: dict[str, int]) -> dict[str, int]:
    return {name: max(0, percent - SLACK) if percent < 100 else 100 for name, percent in found.items()}


def main(report: Path, *options: str) -> int:
    found = measured(report.read_text())
    if options == ("--write",):
        MINIMUMS.write_text(json.dumps(minimums_from(found), indent=2) + "\n")
        return 0
    wrong = problems(found, json.loads(MINIMUMS.read_text()))
    for problem in wrong:
        print(problem, file=sys.stderr)
    if wrong:
        print("add tests, or lower the minimums on purpose: make coverage MINIMUMS=--write", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
