"""`bench/looking.py` measures what it says: the ranks that are missing are found, or it fails."""

from __future__ import annotations

import pytest

from bench import looking


@pytest.mark.parametrize("waits", ["one", "own"])
def test_it_measures_the_command(waits: str, capfd: pytest.CaptureFixture[str]) -> None:
    looking.main(["--ranks", "48", "--hosts", "6", "--missing", "3", "--rounds", "1", "--waits", waits])
    assert f"48 ranks, --waits {waits}: wall " in capfd.readouterr().out
