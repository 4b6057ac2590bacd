"""Results of checks."""

from typing import Final, NamedTuple

OK: Final = "ok"
"""No problem."""
WARN: Final = "warn"
"""It works, but badly, or not everywhere."""
FAIL: Final = "fail"
"""The job will not start."""
SKIP: Final = "skip"
"""This system cannot tell."""


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: str
    text: str
    fix: str = ""
    """A command, or other advice; "" if nothing needs to be done."""
