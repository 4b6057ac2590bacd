"""What is said of who is missing stays what is recorded: changes of the record are to be explained."""

from __future__ import annotations

import re
from pathlib import Path

from unit.diagnosis.scenes import RECORD, told

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "hangs.md"


def test_what_is_said_is_recorded() -> None:
    assert told() == RECORD.read_text()


def outline(line: str) -> str:
    """A line without its names and numbers."""
    line = re.sub(r"\([^()]*pid \d+\)", "(PROCESS)", line.strip())
    line = re.sub(r"\branks? [\d, -]+", "RANKS ", line)
    line = re.sub(r"\b(barrier|since) [^\s:]+(:\d+(?=:))?", r"\1 KEY", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def test_the_page_shows_what_is_said() -> None:
    said = {outline(line.split(":", 1)[1]) for line in told().splitlines() if line.startswith("who:")}
    (shown,) = re.findall(r"\$ tcpstore who --missing .*\n((?:.*\n)*?)```", PAGE.read_text())
    assert shown.count("\n") > 5
    assert {outline(line) for line in shown.splitlines()} <= said
