"""What measures TLS runs, with small numbers."""

from __future__ import annotations

import shutil

import pytest

from bench import security

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="the program openssl makes the certificate")


@pytest.mark.parametrize("part", security.PARTS)
def test_every_part_reports(part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(security, "RANKS", 4)
    monkeypatch.setattr(security, "STOPPED", 20)
    monkeypatch.setattr(security, "COUNTS", {"link": 5, "relay": 500, "handshake": 20, "stopped": 200})
    security.main([part, "--rounds", "1"])
    assert capsys.readouterr().out.startswith(f"{part}: ")
