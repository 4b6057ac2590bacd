"""Runs a server with a journal under load for long, and ends it now and then: memory, disk and descriptors stay flat.

    python tests/faults/soak.py --minutes 60 [--rest 20]

The load is that of `kills.py`, and so are the checks. Every `rest` seconds the server is killed, told to end, or
replaced, in turn. Prints one line of JSON: the peaks of the first and the second half of the time. The exit status is 1
if anything was wrong, if a peak of the second half is above the first's by a quarter, or if the disk held more than
three times a snapshot and 64 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from faults.kills import GRACE, Server, free_port, relay, run

_SECONDS = 0.25
"""Between two looks."""

_GROWTH = 1.25
_ALLOWED = 64 << 10
"""KiB that a journal may have besides three times its snapshot."""

_WAYS = ("kill", "term", "replace")


class Ending(Server):
    """A server that is ended in one way after the other."""

    def restart(self) -> None:
        self.how = _WAYS[self.started % len(_WAYS)]
        super().restart()


def look(pid: int) -> dict[str, int]:
    """The memory, in KiB, and the descriptors of a process; nothing once it has ended."""
    with suppress(OSError, StopIteration):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        memory = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return {"memory": memory, "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}
    return {}


async def watch(server: Server, relays: list[int], peaks: list[dict[str, int]], seconds: float) -> None:
    """Note the peaks of each half of the time."""
    began = time.monotonic()
    while True:
        half = peaks[time.monotonic() - began > seconds / 2]
        seen = {f"server {name}": value for name, value in look(server.process.pid).items()}
        for pid in relays:
            seen |= {f"relay {name}": value for name, value in look(pid).items()}
        with suppress(OSError):
            sizes = {path.name: path.stat().st_size for path in (server.folder / "journal").iterdir()}
            snapshot = max([size for name, size in sizes.items() if name.startswith("snapshot")], default=0)
            seen["disk beyond"] = max(0, (sum(sizes.values()) >> 10) - (3 * snapshot >> 10) - _ALLOWED)
        for name, value in seen.items():
            half[name] = max(half.get(name, 0), value)
        await asyncio.sleep(_SECONDS)


async def soak(server: Server, url: str, ports: list[int], relays: list[int], minutes: float, rest: float) -> Any:
    peaks: list[dict[str, int]] = [{}, {}]
    seconds = minutes * 60
    watching = asyncio.ensure_future(watch(server, relays, peaks, seconds))
    found = await run(server, url, ports, max(1, round(seconds / (rest + 1))), 1, [], rest)
    watching.cancel()
    grown = {name: (peaks[0][name], value) for name, value in peaks[1].items() if value > _GROWTH * peaks[0][name]}
    beyond = max(half.get("disk beyond", 0) for half in peaks)
    if beyond:
        grown["disk beyond"] = (0, beyond)
    return found | {"first half": peaks[0], "second half": peaks[1], "grown": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds from one end of the server to the next")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server = Ending(folder, free_port(), ["--link-grace", GRACE], dict(os.environ), "kill", [])
        stack.callback(lambda: server.kill())
        server.ready()
        url = f"tcp://127.0.0.1:{server.port}"
        port, pid = stack.enter_context(relay(folder, url, dict(os.environ)))
        found = asyncio.run(soak(server, url, [server.port, port], [pid], given.minutes, given.rest))
        if found["wrong"]:
            found["log"] = (folder / "server.log").read_text()[-3000:]
        print(json.dumps(found), flush=True)
        sys.exit(1 if found["wrong"] or found["grown"] else 0)


if __name__ == "__main__":
    main()
