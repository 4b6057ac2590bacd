"""What one command costs in our own code, without system calls.

    python bench/micro.py                                    the tree it is in, interpreted
    PYTHONPATH=build/compiled python bench/micro.py          the compiled build
    python bench/micro.py --save before.json                 for a change that is to be judged:
    python bench/micro.py --against before.json              ... the ratios to what was saved

Every row is the least of so many runs, in nanoseconds: what else the machine does only ever adds. `shapes` decodes the
fields of one request, `session` takes one request in and makes its reply, `client` makes one request and decodes its
reply, `calls` makes what is asked from what a user passes. Whole calls are measured by `bench/clients.py`.
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tcpstore_async.blob import pack
from tcpstore_async.client import calls
from tcpstore_async.daemon import build
from tcpstore_async.limits import Limits
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.wire.commands import BY_METHOD

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
"""Does something so many times and returns the seconds that it took."""


def request(method: str) -> bytes:
    return ClientSession().request(BY_METHOD[method], REQUESTS[method])[0]


def shape(method: str) -> Row:
    decode = BY_METHOD[method].request.decode
    data = request(method)
    end = len(data)

    def nothing(*fields: object) -> None:
        pass

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            decode(nothing, data, 1, end, LIMITS)
        return time.perf_counter() - began

    return run


def session(method: str, cut: int = 0) -> Row:
    """With `cut`, the request comes in pieces of so many bytes."""
    engine = Engine(LIMITS)
    one = ServerSession(engine, None, "host", 1, 0.0)
    one.receive(ClientSession().hello(1)[0] + request("multi_set") + request("set"))
    data = request(method)
    chunks = [data[at : at + cut] for at in range(0, len(data), cut)] if cut else [data]

    def run(count: int) -> float:
        out = one.out
        began = time.perf_counter()
        for _ in range(count):
            for chunk in chunks:
                one.receive(chunk)
            one.unread = 0
            out.clear()
        return time.perf_counter() - began

    return run


def client(method: str) -> Row:
    command, fields, reply = BY_METHOD[method], REQUESTS[method], REPLIES.get(method)

    def run(count: int) -> float:
        one = ClientSession()
        began = time.perf_counter()
        for _ in range(count):
            one.request(command, fields)
            if reply is not None:
                one.receive(reply)
        return time.perf_counter() - began

    return run


def call() -> Row:
    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            calls.add("counter", 1)
        return time.perf_counter() - began

    return run


ROWS: dict[str, Row] = {
    **{f"shapes   {method}": shape(method) for method in REQUESTS},
    **{f"session  {method}": session(method) for method in REQUESTS},
    "session  multi_get, in pieces of 16 KiB": session("multi_get", 16 * 1024),
    **{f"client   {method}": client(method) for method in ("set", *REPLIES)},
    "calls    add": call(),
}


def nanoseconds(row: Row, runs: int) -> float:
    """The least of the runs, each of them long enough for the clock."""
    count = 1
    while (spent := row(count)) < 0.01:
        count *= 4
    return min(spent, *(row(count) for _ in range(runs))) / count * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="only rows with one of these words")
    parser.add_argument("--runs", type=int, default=20, help="runs of each row (20)")
    parser.add_argument("--save", type=Path, help="write the figures here")
    parser.add_argument("--against", type=Path, help="print the ratios to what was saved there")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    found = {}
    print(f"package: {build()}")
    for name, row in ROWS.items():
        if options.rows and not any(word in name for word in options.rows):
            continue
        found[name] = nanoseconds(row, options.runs)
        ratio = f"   {found[name] / before[name]:.2f}×" if name in before else ""
        print(f"{name:42} {found[name]:10.0f} ns{ratio}", flush=True)
    if options.save:
        options.save.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
