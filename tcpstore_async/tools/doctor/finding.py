"""What a check has found."""

from typing import Final, NamedTuple

OK: Final = "ok"
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
    """A command, or what else to do; "" if there is nothing to be done."""
