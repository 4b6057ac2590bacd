"""Runs schedules by the number, and shows what fails as short as it gets.

    python tests/simulation/run.py --schedules 1000000 --jobs 2     sessions in memory, seeds 0 to 999,999
    python tests/simulation/run.py --kind real --schedules 10000    the real clients on a stage
    python tests/simulation/run.py --kind hogs --schedules 1000     peers that want all the memory there is
    python tests/simulation/run.py --kind proxied --schedules 1000  and real servers, through a proxy
    python tests/simulation/run.py --kind links --schedules 10000   sessions on links that break
    python tests/simulation/run.py --kind stores --schedules 10000  owners and ranks of stores with names
    python tests/simulation/run.py --kind tokens --schedules 1000   tokens with limits, and what is counted for them
    python tests/simulation/run.py --kind real --seed 4711          one of them: what happens, and what is wrong
    python tests/simulation/run.py --plant "a waiter is not fired"  with a defect, to see how soon it is found

Which build runs is for PYTHONPATH to say: `PYTHONPATH=build/compiled`, which is faster. Defects can be put into the
interpreted one only.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Container
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from properties import limited, linked
from simulation import real, stores
from simulation.hogs import perform as perform_hogs
from simulation.planted import LIMITED, LINKED, NAMED, PLANTED, REAL, planted
from simulation.proxied import perform as perform_proxied
from simulation.schedule import chosen, fault, run, shrink
from simulation.stage import Choices
from support import tcpstore_server
from tcpstore_async.serving import build

Failure = tuple[int, str]
PORTIONS = {"sessions": 1000, "real": 100, "hogs": 20, "proxied": 20, "links": 100, "stores": 500, "tokens": 50}
"""Seeds that a process runs before it reports."""


def portion(kind: str, seeds: range) -> tuple[int, int, list[Failure]]:
    """Run these seeds: how many, how many commands or moves, what failed."""
    moves = 0
    failures: list[Failure] = []
    backend = ("uv", "threaded")[seeds.start // len(seeds) % 2]
    with tcpstore_server("--backend", backend) if kind == "proxied" else contextlib.nullcontext() as server:
        for seed in seeds:
            try:
                if server is not None:
                    moves += perform_proxied(server.port, seed).losses
                elif kind == "hogs":
                    moves += perform_hogs(seed)
                elif kind == "real":
                    moves += real.perform(Choices([], seed)).moved
                elif kind == "links":
                    moves += linked.run(*linked.chosen(seed)).broken
                elif kind == "stores":
                    moves += stores.run(stores.chosen(seed)).done
                elif kind == "tokens":
                    moves += limited.run(seed)
                else:
                    moves += run(chosen(seed)).done
            except Exception as error:  # the package's own, too
                failures.append((seed, repr(error)))
    return len(seeds), moves, failures


def explain(kind: str, seed: int) -> int:
    """Show one schedule, cut down if it fails; the status to exit with."""
    if kind in ("proxied", "hogs", "tokens"):
        print(portion(kind, range(seed, seed + 1))[2])
        return 0
    if kind == "real":
        return explain_real(seed)
    if kind == "links":
        return explain_links(seed)
    if kind == "stores":
        return explain_stores(seed)
    schedule = chosen(seed)
    wrong = fault(schedule)
    if wrong is None:
        print(f"seed {seed}: nothing is wrong")
    else:
        schedule = shrink(schedule)
        print(f"seed {seed}: {wrong!r}\ncut down: {fault(schedule)!r}")
    print(f"{schedule.clients} clients, soft limit {schedule.soft}, pipelines {schedule.pipelines:b}")
    for step in schedule.steps:
        print(f"    {step!r},")
    return wrong is not None


def explain_links(seed: int) -> int:
    links, steps, part = linked.chosen(seed)
    wrong = linked.fault(links, steps, part)
    print(f"seed {seed}: {'nothing is wrong' if wrong is None else repr(wrong)}")
    if wrong is not None:
        steps = linked.shrink(links, steps, part)
        print(f"cut down: {linked.fault(links, steps, part)!r}")
    print(f"{links} links, portions of {part}")
    for step in steps:
        print(f"    {step!r},")
    return wrong is not None


def explain_stores(seed: int) -> int:
    schedule = stores.chosen(seed)
    wrong = stores.fault(schedule)
    print(f"seed {seed}: {'nothing is wrong' if wrong is None else repr(wrong)}")
    if wrong is not None:
        schedule = stores.shrink(schedule)
        print(f"cut down: {stores.fault(schedule)!r}")
    print(f"{schedule.clients} clients, portions of {schedule.portion}")
    for step in schedule.steps:
        print(f"    {step!r},")
    return wrong is not None


def explain_real(seed: int) -> int:
    choices = Choices([], seed)
    try:
        real.perform(choices)
    except Exception as error:
        print(f"seed {seed}: {error!r}")
    else:
        print(f"seed {seed}: nothing is wrong")
        return 0
    numbers = real.shrink(choices.taken)
    print(f"cut down: {real.fault(numbers)!r}\n{numbers}")
    with contextlib.suppress(Exception):
        real.perform(Choices(numbers, None), tell=print)
    return 1


def many(kind: str, first: int, count: int, jobs: int, most: int) -> int:
    """Run so many schedules; the status to exit with."""
    began = told = time.monotonic()
    size = PORTIONS[kind]
    parts = [(kind, range(at, min(at + size, first + count))) for at in range(first, first + count, size)]
    done = moves = 0
    failures: list[Failure] = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for schedules, moved, failed in pool.imap_unordered(_portion, parts):
            done += schedules
            moves += moved
            failures += failed
            for seed, error in failed:
                print(f"seed {seed}: {error}", flush=True)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{done:,} of {count:,}, {done / (told - began):,.0f} a second", file=sys.stderr, flush=True)
            if len(failures) >= most:
                break
    seconds = time.monotonic() - began
    what = {
        "sessions": "commands",
        "stores": "commands",
        "tokens": "commands",
        "real": "moves",
        "hogs": "peers removed",
        "proxied": "connections cut",
    }.get(kind, "links broken")
    print(
        f"{done:,} schedules, {moves:,} {what}, {len(failures)} findings; "
        f"{build()} build, {jobs} processes, {seconds:,.0f} s"
    )
    for seed, _ in sorted(failures)[:3]:
        explain(kind, seed)
    return bool(failures)


def _portion(given: tuple[str, range]) -> tuple[int, int, list[Failure]]:
    return portion(*given)


_KINDS: dict[str, Container[str]] = {"real": REAL, "links": LINKED, "stores": NAMED, "tokens": LIMITED}
"""By kind of schedule, the defects that it finds; `sessions` finds the others."""


def find(name: str, most: int) -> int:
    """How soon a planted defect is found; the status to exit with."""
    with planted(name):
        for seed in range(most):
            if name in LINKED:
                wrong = linked.fault(*linked.chosen(seed))
            elif name in NAMED:
                wrong = stores.fault(stores.chosen(seed))
            elif name in LIMITED:
                wrong = limited.fault(seed)
            else:
                wrong = real.fault([], seed) if name in REAL else fault(chosen(seed))
            if wrong is not None and (name not in REAL or REAL[name].finding in str(wrong)):
                kind = next((kind for kind, planted in _KINDS.items() if name in planted), "sessions")
                return 0 * explain(kind, seed)
    print(f"not found in {most:,} schedules")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=PORTIONS, default="sessions", help="what is run")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=10, help="findings after which it ends")
    parser.add_argument("--seed", type=int, help="this one only, in full")
    parser.add_argument(
        "--plant",
        choices=[*PLANTED, *REAL, *LINKED, *NAMED, *LIMITED],
        help="put in a defect, and look how soon it is found",
    )
    given = parser.parse_args()
    if given.plant:
        return find(given.plant, given.schedules)
    if given.seed is not None:
        return explain(given.kind, given.seed)
    return many(given.kind, given.first, given.schedules, given.jobs, given.most)


if __name__ == "__main__":
    sys.exit(main())
