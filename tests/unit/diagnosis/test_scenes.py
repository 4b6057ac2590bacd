"""What is said of who is missing stays what is recorded: changes of the record are to be explained."""

from __future__ import annotations

from unit.diagnosis.scenes import RECORD, told


def test_what_is_said_is_recorded() -> None:
    assert told() == RECORD.read_text()
