"""Measure what one command costs in our own code, without system calls.

    python bench/micro.py                            the compiled build if it is up to date, otherwise the checkout
    BENCH_BUILD=interpreted python bench/micro.py    the checkout
    python bench/micro.py --tree OLD --tree NEW      judge a change: the ratios, NEW over OLD

A tree is a checkout, which runs interpreted, or a `build/compiled`; its package is measured by the rows defined here. A
figure is CPU time: the median over the rounds, in each of which a new process for each tree takes the minimum of
several runs, because other load only ever adds. The trees alternate. A ratio is the median of the rounds' ratios; in
brackets is its interval of at least 99 % confidence.

`codecs` decodes the fields of a request, `session` receives a request and encodes its reply, `client` encodes a request
and decodes its reply, `calls` prepares a request from a user's arguments. `bench/clients.py` measures whole calls.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

from bench import processes, stats
from tcpstore_async.base.limits import Limits
from tcpstore_async.client import requests
from tcpstore_async.serving import build
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack

CONFIDENCE = 0.99
"""More than elsewhere: a table has some twenty rows."""
RUN = 0.002
"""Minimum duration of a run in seconds, for the clock's resolution."""

KEY = b"/default_pg/0//key"
VALUE = pack(bytes(100))
MANY = [b"/default_pg/0//key/%d" % number for number in range(1000)]
LIMITS = Limits()

REQUESTS: dict[str, tuple[object, ...]] = {
    "set": (KEY, VALUE),
    "get": (KEY,),
    "add": (KEY + b"n", 1),
    "check": ([KEY],),
    "multi_get": (MANY,),
    "multi_set": ([(key, VALUE) for key in MANY],),
    "fetch": (KEY,),
}
REPLIES = {
    "get": VALUE,
    "add": struct.pack("<q", 5),
    "check": b"\0",
    "multi_get": VALUE * 1000,
}

Row = Callable[[int], float]
"""Repeats something so many times and returns the CPU seconds."""


class Impossible(Exception):
    """What was asked for cannot be measured or compared."""


class Found(NamedTuple):
    """What one process measured."""

    build: str
    nanoseconds: dict[str, float]


def request(method: str) -> bytes:
    return ClientSession().request(BY_METHOD[method], REQUESTS[method])[0]


def codec(method: str) -> Row:
    decode = BY_METHOD[method].request.decode
    data = request(method)
    end = len(data)

    def nothing(*fields: object) -> None:
        pass

    def run(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            decode(nothing, data, 1, end, LIMITS)
        return time.process_time() - began

    return run


def session(method: str, cut: int = 0) -> Row:
    """`cut`: bytes of each chunk of the request; 0: one chunk."""
    store = Store(LIMITS)
    one = ServerSession(store, None, "host", 1, 0.0)
    one.receive(ClientSession().hello(1)[0] + request("multi_set") + request("set"))
    data = request(method)
    chunks = [data[at : at + cut] for at in range(0, len(data), cut)] if cut else [data]

    def run(count: int) -> float:
        out = one.out
        began = time.process_time()
        for _ in range(count):
            for chunk in chunks:
                one.receive(chunk)
            one.unsent = 0
            out.clear()
        return time.process_time() - began

    return run


def client(method: str) -> Row:
    command, fields, reply = BY_METHOD[method], REQUESTS[method], REPLIES.get(method)

    def run(count: int) -> float:
        one = ClientSession()
        began = time.process_time()
        for _ in range(count):
            one.request(command, fields)
            if reply is not None:
                one.receive(reply)
        return time.process_time() - began

    return run


def call() -> Row:
    def run(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            requests.add("counter", 1)
        return time.process_time() - began

    return run


ROWS: dict[str, Row] = {
    **{f"codecs   {method}": codec(method) for method in REQUESTS},
    **{f"session  {method}": session(method) for method in REQUESTS},
    "session  multi_get, in pieces of 16 KiB": session("multi_get", 16 * 1024),
    **{f"client   {method}": client(method) for method in ("set", *REPLIES)},
    "calls    add": call(),
}


def nanoseconds(row: Row, runs: int) -> float:
    """Return the minimum of the runs, per call."""
    count = 1
    while (spent := row(count)) < RUN:
        count *= 4
    return min(spent, *(row(count) for _ in range(runs))) / count * 1e9


def one(words: list[str], runs: int) -> None:
    """The child's part: measure and print."""
    wanted = {name: row for name, row in ROWS.items() if not words or any(word in name for word in words)}
    print(json.dumps(Found(build(), {name: nanoseconds(row, runs) for name, row in wanted.items()})))


def measured(tree: Path, words: list[str], runs: int) -> Found:
    """Measure a tree in a new process. Raises Impossible."""
    if not (tree / "tcpstore_async" / "__init__.py").is_file():
        raise Impossible(f"{tree}: contains no tcpstore_async package")
    done = subprocess.run(
        [sys.executable, __file__, *words, "--one", "--runs", str(runs)],
        capture_output=True,
        check=False,
        cwd=tempfile.gettempdir(),
        env=processes.environment(tree),
    )
    if done.returncode:
        raise Impossible(f"{tree}: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")
    return Found(*json.loads(done.stdout))


def interleaved(trees: list[Path], rounds: int, words: list[str], runs: int) -> Iterator[list[Found]]:
    """Yield what each round measured of each tree; odd rounds begin with the last. Raises Impossible."""
    for number in range(rounds):
        order = -1 if number % 2 else 1
        yield [measured(tree, words, runs) for tree in trees[::order]][::order]


def by_round(found: list[list[Found]], tree: int, name: str) -> dict[int, float]:
    return {number: each[tree].nanoseconds[name] for number, each in enumerate(found)}


def row_text(found: list[list[Found]], name: str) -> str:
    """Format a row: the median of each tree and the ratio of two."""
    sides = [by_round(found, tree, name) for tree in range(len(found[0]))]
    row = f"{name:42} " + " ".join(f"{stats.median(list(side.values())):10.0f} ns" for side in sides)
    if len(sides) < 2:
        return row
    ratios = stats.paired(sides[1], sides[0])
    interval = stats.interval(ratios, CONFIDENCE)
    return f"{row}   {stats.median(ratios):.3f}× ({interval.low:.3f}–{interval.high:.3f})"


def compare(trees: list[Path], rounds: int, words: list[str], runs: int, across_builds: bool) -> None:
    """Measure and print. Raises Impossible."""
    found: list[list[Found]] = []
    for each in interleaved(trees, rounds, words, runs):
        kinds = [one.build for one in each]
        if not found:
            for tree, kind in zip(trees, kinds, strict=True):
                print(f"{tree}: {kind}", flush=True)
        if len(set(kinds)) > 1 and not across_builds:
            raise Impossible(f"one tree is {kinds[0]} and the other {kinds[1]}: --across-builds compares them")
        found.append(each)
    confidence = stats.interval(range(rounds), CONFIDENCE).confidence
    print(f"medians of {rounds} rounds" + (f", intervals of {confidence:.1%}" if len(trees) > 1 else ""))
    for name in found[0][0].nanoseconds:
        print(row_text(found, name))


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("rows", nargs="*", help="only rows with one of these words")
    parser.add_argument("--tree", type=Path, action="append", help="measure the package in this folder; twice: compare")
    parser.add_argument("--rounds", type=int, default=11, help="processes for each tree (11)")
    parser.add_argument("--runs", type=int, default=10, help="runs of each row in each process (10)")
    parser.add_argument("--across-builds", action="store_true", help="compare compiled with interpreted")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.rows, options.runs)
        return
    trees = options.tree or [processes.chosen_build()]
    if len(trees) > 2:
        parser.error("at most two trees can be compared")
    try:
        compare(trees, options.rounds, options.rows, options.runs, options.across_builds)
    except Impossible as impossible:
        parser.exit(2, f"{impossible}\n")


if __name__ == "__main__":
    main()
