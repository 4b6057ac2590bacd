"""What the fuzzer begins with, and what it found, replayed without it, and changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fuzz.decoders import DECODERS, SEEDS
from fuzz.machine import run

FOUND = Path(__file__).parent / "found"
"""One folder per decoder: inputs for which something was mended, and those that reach the most."""

INPUTS = [(name, seed, data) for name, seeds in SEEDS.items() for seed, data in seeds.items()]
INPUTS += [(path.parent.name, path.name, path.read_bytes()) for path in sorted(FOUND.glob("*/*"))]
IDS = [f"{name}-{seed}" for name, seed, _ in INPUTS]


@pytest.mark.parametrize(("name", "seed", "data"), INPUTS, ids=IDS)
def test_replay(name: str, seed: str, data: bytes) -> None:
    DECODERS[name](data)


@pytest.mark.parametrize("name", DECODERS)
def test_replay_changed(name: str) -> None:
    """Bytes changed, dropped and doubled, with a fixed seed."""
    rng = random.Random(name)
    for _, _, data in [given for given in INPUTS if given[0] == name]:
        for _ in range({"file_records": 8, "sessions": 20}.get(name, 40)):
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(changed) + 1)
                match rng.randrange(3):
                    case 0:
                        changed[at : at + 1] = rng.randbytes(1)
                    case 1:
                        del changed[at : at + rng.randrange(9)]
                    case _:
                        changed[at:at] = changed[max(0, at - 20) : at]
            DECODERS[name](bytes(changed))


def test_programs_reach_refusals_and_replies() -> None:
    machines = [run(data) for name, _, data in INPUTS if name == "sessions"]
    assert sum(one.refused for one in machines) > 20
    assert sum(one.sent for one in machines) > 1000
