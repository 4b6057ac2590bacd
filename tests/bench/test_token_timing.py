"""The statistics of the measurement; its figures depend on the machine."""

from __future__ import annotations

import random
import sys

import pytest

from bench import token_timing
from tcpstore_async.tokens import TokenKeys


def test_superiority() -> None:
    assert token_timing.superiority([1, 2, 3], [1, 2, 3]) == 0.5
    assert token_timing.superiority([4, 5], [1, 2, 3]) == 1.0
    assert token_timing.superiority([1], [2]) == 0.0
    assert token_timing.superiority([1, 3], [2, 2]) == 0.5
    assert token_timing.superiority([2, 3], [2, 2]) == 0.75


def test_a_difference_is_found() -> None:
    rng = random.Random(1)
    these, those = ([int(rng.gauss(6000, 100)) for _ in range(4000)] for _ in range(2))
    found, half = token_timing.compare(these, those)
    assert abs(found - 0.5) <= half < 0.05
    found, half = token_timing.compare([one + 20 for one in these], those)
    assert found - half > 0.5


def test_forged_tokens_have_the_length_of_valid_ones_and_are_refused() -> None:
    keys = TokenKeys([("k1", b"one"), ("k2", b"two")])
    token = keys.create(prefix="job/").encode()
    for name, (part, other) in token_timing.kinds(token).items():
        forged = bytearray(token)
        forged[part] = other
        assert len(forged) == len(token), name
        assert isinstance(keys.check(bytes(forged), 0), str), name


def test_it_prints_a_line_for_each_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["token_timing", "--tries", "40"])
    token_timing.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all("median" in line for line in lines[1:])
