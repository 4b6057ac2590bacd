"""Run many schedules, and shrink and show those with a finding.

    python tests/simulation/run.py --schedules 1000000              sessions in memory, seeds 0 to 999,999
    python tests/simulation/run.py --kind real --schedules 10000    the real clients on a stage
    python tests/simulation/run.py --kind hogs --schedules 1000     peers that want all the memory there is
    python tests/simulation/run.py --kind ranks --schedules 1000    ranks behind a relay, and too little memory
    python tests/simulation/run.py --kind proxied --schedules 1000  and real servers, through a proxy
    python tests/simulation/run.py --kind links --schedules 10000   sessions on links that break
    python tests/simulation/run.py --kind stores --schedules 10000  owners and ranks of named stores
    python tests/simulation/run.py --kind tokens --schedules 1000   tokens with limits, and what is counted for them
    python tests/simulation/run.py --kind journal --schedules 1000  a server that ends and is started again
    python tests/simulation/run.py --kind replicated                servers that share a log in etcd
    python tests/simulation/run.py --scale 0.1                      all kinds, a tenth of what `make simulate` runs
    python tests/simulation/run.py --kind real --seed 4711          one of them: what happens, and what is wrong
    python tests/simulation/run.py --scale 0.01 --across            executed again in other processes, from their events
    python tests/simulation/run.py --plant "a waiter is not fired"  with a defect, to see how soon it is found

PYTHONPATH=build/compiled runs the compiled build, which is faster. Only the interpreted one takes planted defects.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from properties import limited, linked
from properties.shrinking import shrink
from replaying import Beginning, Elsewhere, Noted, replayed
from simulation import hogs, journal, proxied, ranks, real, replicated, schedule, stores
from simulation.planted import (
    CROWDED,
    HOGGED,
    JOURNALED,
    LIMITED,
    LINKED,
    NAMED,
    PLANTED,
    REAL,
    REPLAYED,
    REPLICATED,
    planted,
)
from simulation.stage import Choices
from support import tcpstore_server
from tcpstore_async.serving import build

Failure = tuple[int, str]

_TOGETHER = 50
"""Recordings that are sent to another process at once."""


class Kind(NamedTuple):
    """A kind of schedule."""

    perform: Callable[[int], int]
    """Run the schedule of a seed and return a count. Raises what is wrong."""
    counted: str
    portion: int
    """Seeds that a process runs before it reports."""
    schedules: int
    """Schedules that `make simulate` runs."""
    defects: Iterable[str] = ()
    """Planted defects that it finds."""
    steps: Any = None
    """The module whose schedules are lists of steps, and can be shrunk."""
    states: int = 40
    """Events of a run between two looks at the state, when the run is executed again from its events."""


KINDS = {
    "sessions": Kind(
        lambda seed: schedule.run(schedule.chosen(seed)).done, "commands", 1000, 200_000, PLANTED, schedule, states=8
    ),
    "stores": Kind(lambda seed: stores.run(stores.chosen(seed)).done, "commands", 500, 200_000, NAMED, stores),
    "links": Kind(
        lambda seed: linked.run(linked.chosen(seed)).broken, "links broken", 100, 100_000, [*LINKED, *REPLAYED], linked
    ),
    "journal": Kind(
        lambda seed: journal.run(journal.chosen(seed)).crashes, "ends of servers", 50, 10_000, JOURNALED, journal
    ),
    "replicated": Kind(
        lambda seed: replicated.run(replicated.chosen(seed)).started, "processes", 20, 5_000, REPLICATED, replicated
    ),
    "real": Kind(lambda seed: real.perform(Choices([], seed)).moved, "moves", 100, 20_000, REAL),
    "hogs": Kind(hogs.perform, "peers removed", 20, 5_000, HOGGED, states=2000),
    "ranks": Kind(ranks.perform, "sessions lost", 10, 1_000, CROWDED, states=20),
    "tokens": Kind(limited.run, "commands", 50, 2_000, LIMITED),
    "proxied": Kind(lambda seed: _through_proxy(seed), "connections cut", 20, 200),
}

_port = 0
"""Of the server behind the proxy."""


def _through_proxy(seed: int) -> int:
    return proxied.perform(_port, seed).losses


def fault(kind: str, seed: int) -> Exception | None:
    """Return what is wrong with the schedule of a seed, if anything, with a look after every step."""
    given = KINDS[kind]
    if given.steps is not None:
        found: Exception | None = given.steps.fault(given.steps.chosen(seed))
        return found
    try:
        with replayed(given.states):
            given.perform(seed)
    except Exception as error:  # the package's own, too
        return error
    return None


def portion(kind: str, seeds: range) -> tuple[int, int, list[Failure]]:
    """Run these seeds and return how many they are, the sum of what they count, and the failures."""
    global _port
    total = 0
    failures: list[Failure] = []
    backend = ("uv", "threaded")[seeds.start // len(seeds) % 2]
    with tcpstore_server("--backend", backend) if kind == "proxied" else contextlib.nullcontext() as server:
        _port = server.port if server is not None else 0
        for seed in seeds:
            try:
                with replayed(KINDS[kind].states):
                    total += KINDS[kind].perform(seed)
            except Exception as error:  # the package's own, too
                failures.append((seed, repr(error)))
    return len(seeds), total, failures


def _keep(found: list[tuple[Beginning, list[Noted]]], start: Beginning, noted: list[Noted]) -> None:
    found.append((start, noted))


def across(kind: str, seeds: range) -> bool:
    """Execute the recordings of these seeds again in other processes. Return True if anything is not the same.

    The processes have three orders of sets, and both builds if there is a compiled one.
    """
    root = Path(__file__).parents[2]
    paths = [str(path) for path in (root, root / "build/compiled") if (path / "tcpstore_async").exists()]
    others = [Elsewhere(path, order) for path in paths for order in (0, 1, 4711)]
    wrong: list[str] = []
    events = 0
    for at in range(0, len(seeds), _TOGETHER):
        found: list[tuple[Beginning, list[Noted]]] = []
        for seed in seeds[at : at + _TOGETHER]:
            with replayed(KINDS[kind].states, partial(_keep, found)):
                KINDS[kind].perform(seed)
        events += sum(len(noted) for _, noted in found)
        data = pickle.dumps(found)
        for other in others:
            other.send(data)
        wrong += filter(None, [other.answer() for other in others])
    for other in others:
        other.close()
    print(
        f"{kind}: {len(seeds):,} schedules, {events:,} events in {len(others)} other processes; {len(wrong)} findings"
    )
    print(*wrong[:3], sep="\n")
    return bool(wrong)


def explain(kind: str, seed: int) -> bool:
    """Show one schedule, shrunk if it fails. Return True if it does."""
    if kind == "real":
        return explain_real(seed)
    module = KINDS[kind].steps
    if module is None:
        failures = portion(kind, range(seed, seed + 1))[2]
        print(failures or f"seed {seed}: nothing is wrong")
        return bool(failures)
    schedule = module.chosen(seed)
    wrong = module.fault(schedule)
    print(f"seed {seed}: {'nothing is wrong' if wrong is None else repr(wrong)}")
    if wrong is not None:
        schedule = shrink(schedule, module.fault)
        print(f"cut down: {module.fault(schedule)!r}")
    print(schedule._replace(steps=[]))
    for step in schedule.steps:
        print(f"    {step!r},")
    return wrong is not None


def explain_real(seed: int) -> bool:
    choices = Choices([], seed)
    try:
        real.perform(choices)
    except Exception as error:
        print(f"seed {seed}: {error!r}")
    else:
        print(f"seed {seed}: nothing is wrong")
        return False
    numbers = real.shrink(choices.taken)
    print(f"cut down: {real.fault(numbers)!r}\n{numbers}")
    with contextlib.suppress(Exception):
        real.perform(Choices(numbers, None), tell=print)
    return True


def many(kind: str, seeds: range, jobs: int, most: int) -> bool:
    """Run the schedules of these seeds, print a line and explain what fails. Return True if anything does."""
    began = told = time.monotonic()
    size = KINDS[kind].portion
    parts = [(kind, seeds[at : at + size]) for at in range(0, len(seeds), size)]
    done = total = 0
    failures: list[Failure] = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for schedules, counted, failed in pool.imap_unordered(_portion, parts):
            done += schedules
            total += counted
            failures += failed
            for seed, error in failed:
                print(f"{kind}, seed {seed}: {error}", flush=True)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{done:,} of {len(seeds):,}, {done / (told - began):,.0f} a second", file=sys.stderr, flush=True)
            if len(failures) >= most:
                break
    seconds = time.monotonic() - began
    print(
        f"{kind}: {done:,} schedules, {total:,} {KINDS[kind].counted}, {len(failures)} findings; "
        f"{build()} build, {jobs} processes, {seconds:,.0f} s",
        flush=True,
    )
    for seed, _ in sorted(failures)[:3]:
        explain(kind, seed)
    return bool(failures)


def _portion(given: tuple[str, range]) -> tuple[int, int, list[Failure]]:
    return portion(*given)


def first_seed(name: str, most: int) -> tuple[str, int] | None:
    """Return the kind of schedule that is to find a planted defect and the first seed that does, or None."""
    kind = next(kind for kind, given in KINDS.items() if name in given.defects)
    finding = REAL[name].finding if name in REAL else ""
    for seed in range(most):
        wrong = fault(kind, seed)
        if wrong is not None and finding in str(wrong):
            return kind, seed
    return None


def find(name: str, most: int) -> bool:
    """Show how soon a planted defect is found. Return True if it is not."""
    with planted(name):
        found = first_seed(name, most)
        if found is not None:
            explain(*found)
        else:
            print(f"not found in {most:,} schedules")
    return found is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="sessions", help="what is run")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many")
    parser.add_argument("--scale", type=float, help="run all kinds, as many schedules as `make simulate` times this")
    parser.add_argument(
        "--across",
        action="store_true",
        help="execute them again in processes with other orders of sets and other builds",
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per processor)")
    parser.add_argument("--most", type=int, default=10, help="findings after which it ends")
    parser.add_argument("--seed", type=int, help="this one only, in full")
    parser.add_argument(
        "--plant",
        choices=[name for given in KINDS.values() for name in given.defects],
        help="plant a defect, and see how soon it is found",
    )
    given = parser.parse_args()
    if given.plant:
        return find(given.plant, given.schedules)
    if given.seed is not None:
        return explain(given.kind, given.seed)
    counts = {given.kind: given.schedules}
    if given.scale is not None:
        counts = {kind: round(one.schedules * given.scale) for kind, one in KINDS.items()}
    if given.across:
        for kind in ("proxied", "journal", "replicated"):  # their servers are real ones
            counts.pop(kind, None)
        return max(across(kind, range(given.first, given.first + count)) for kind, count in counts.items())
    failed = [
        many(kind, range(given.first, given.first + count), given.jobs, given.most) for kind, count in counts.items()
    ]
    return any(failed)


if __name__ == "__main__":
    sys.exit(main())
