"""The corpus of the fuzzer, replayed without it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fuzz.machine import run
from fuzz.make_corpus import CORPUS, PROGRAMS

FILES = sorted(CORPUS.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_replay(path: Path) -> None:
    run(path.read_bytes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_replay_changed(path: Path) -> None:
    """Bytes changed, dropped and doubled, with a fixed seed."""
    program = path.read_bytes()
    rng = random.Random(path.name)
    for _ in range(20):
        changed = bytearray(program)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(3):
                case 0:
                    changed[at : at + 1] = rng.randbytes(1)
                case 1:
                    del changed[at : at + rng.randrange(9)]
                case _:
                    changed[at:at] = changed[max(0, at - 20) : at]
        run(bytes(changed))


def test_the_hand_written_part_is_fresh() -> None:
    assert {path.name.removeprefix("hand-"): path.read_bytes() for path in CORPUS.glob("hand-*")} == PROGRAMS, (
        "run tests/fuzz/make_corpus.py"
    )


def test_the_corpus_reaches_refusals_and_replies() -> None:
    machines = [run(path.read_bytes()) for path in FILES]
    assert sum(machine.refused for machine in machines) > 20
    assert sum(machine.sent for machine in machines) > 1000
