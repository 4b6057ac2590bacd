"""Some schedules of each kind end without a finding. `run.py` runs more of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulation import real
from simulation.hogs import perform
from simulation.run import KINDS, across, fault, portion
from simulation.schedule import chosen
from simulation.stage import Choices

SEEDS = {
    "sessions": range(0, 5000, 500),
    "stores": range(0, 2000, 500),
    "links": range(50, 150, 50),
    "journal": range(0, 400, 100),
    "replicated": range(0, 200, 50),
    "real": range(0, 500, 100),
    "hogs": range(0, 40, 10),
    "tokens": range(0, 300, 30),
    "ranks": range(0, 40, 10),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [(kind, first) for kind, seeds in SEEDS.items() for first in seeds])
def test_schedules_have_no_finding(kind: str, first: int) -> None:
    _, total, failures = portion(kind, range(first, first + SEEDS[kind].step))
    assert not failures, f"python tests/simulation/run.py --kind {kind} --seed {failures[0][0]}: {failures}"
    assert total > 0


def test_every_kind_is_tried() -> None:
    assert set(SEEDS) | {"proxied"} == set(KINDS)


def test_every_kind_is_explained() -> None:
    page = (Path(__file__).parent / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| .+\|.+\|.+\|$", page, re.MULTILINE)) == set(KINDS)


def test_an_evicted_peer_that_goes_on_sending() -> None:
    perform(7_000_348)


@pytest.mark.parametrize("seed", range(8))
def test_who_is_evicted_is_evicted_again_at_the_same_point(seed: int) -> None:
    assert fault("ranks", seed) is None


def test_a_seed_means_one_schedule() -> None:
    assert chosen(7) == chosen(7) != chosen(8)


def test_a_seed_means_one_run_of_the_clients() -> None:
    taken = [Choices([], 3), Choices([], 3)]
    for choices in taken:
        real.perform(choices)
    assert taken[0].taken == taken[1].taken


def test_a_finding_of_the_clients_shrinks() -> None:
    def differs(given: list[int]) -> object:
        return True if sum(given) > 10 and given[:1] == [1] else None

    short = real.shrink([1, 2, 3, 0, 4, 5, 6], differs)
    assert differs(short)
    assert len(short) < 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sessions", "stores", "links", "tokens"])
def test_recordings_are_the_same_in_other_processes(kind: str) -> None:
    assert not across(kind, range(700, 706))
