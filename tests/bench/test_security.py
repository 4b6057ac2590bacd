"""What measures TLS runs, with small numbers; the statistics of forged tokens, whose figures depend on the machine."""

from __future__ import annotations

import random
import shutil

import pytest

from bench import security
from tcpstore_async.auth.tokens import TokenKeys


@pytest.mark.skipif(not shutil.which("openssl"), reason="the program openssl makes the certificate")
@pytest.mark.parametrize("part", [part for part in security.PARTS if part != "tokens"])
def test_every_part_reports(part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(security, "RANKS", 4)
    monkeypatch.setattr(security, "STOPPED", 20)
    monkeypatch.setattr(security, "COUNTS", {"link": 5, "relay": 500, "client": 20, "handshake": 20, "stopped": 200})
    security.main([part, "--rounds", "1"])
    assert capsys.readouterr().out.startswith(f"{part}: ")


def test_superiority() -> None:
    assert security.superiority([1, 2, 3], [1, 2, 3]) == 0.5
    assert security.superiority([4, 5], [1, 2, 3]) == 1.0
    assert security.superiority([1], [2]) == 0.0
    assert security.superiority([1, 3], [2, 2]) == 0.5
    assert security.superiority([2, 3], [2, 2]) == 0.75


def test_a_difference_is_found() -> None:
    rng = random.Random(1)
    these, those = ([int(rng.gauss(6000, 100)) for _ in range(4000)] for _ in range(2))
    found, half = security.compare(these, those)
    assert abs(found - 0.5) <= half < 0.05
    found, half = security.compare([one + 20 for one in these], those)
    assert found - half > 0.5


def test_forged_tokens_have_the_length_of_valid_ones_and_are_refused() -> None:
    keys = TokenKeys([("k1", b"one"), ("k2", b"two")])
    token = keys.create(prefix="job/").encode()
    for name, (part, other) in security.kinds(token).items():
        forged = bytearray(token)
        forged[part] = other
        assert len(forged) == len(token), name
        assert isinstance(keys.check(bytes(forged), 0), str), name


def test_it_prints_a_line_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    security.main(["tokens", "--tries", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all("median" in line for line in lines[1:])
