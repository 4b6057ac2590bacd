"""Relays under test, many in one process: as many hosts have them, on one machine.

    python -m bench.relay_process SERVER_PORT RANKS_PER_LINK RANKS

Listens on one port, and gives every RANKS_PER_LINK connections in a row a relay with a link of its own; 0: all of them
one relay. The links are up when the line `PORT PID` is printed.
Invariant: the process ends with its standard input, which its parent holds open, so none outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from functools import partial

from bench.processes import die_with_parent
from tcpstore_async.relay.core import LINKED, Relay
from tcpstore_async.relay.upstream import Upstream
from tcpstore_async.server.listen_socket import CONNECTION_ERRORS, listen, raise_file_limit
from tcpstore_async.serving import run_loop, tune_gc
from tcpstore_async.session.link_client import ClientLink

_WINDOW = 64
"""Relays that connect concurrently."""


async def main(server_port: int, ranks_per_link: int, ranks: int) -> None:
    raise_file_limit()
    listener = listen("127.0.0.1", 0)
    count = -(-ranks // ranks_per_link) if ranks_per_link else 1
    relays = [Relay(listener, partial(ClientLink, f"bench/{os.getpid()}/{number}")) for number in range(count)]
    for relay in relays:
        relay.max_files = ranks + 1
    tasks = []
    for number in range(0, count, _WINDOW):
        some = relays[number : number + _WINDOW]
        tasks += [asyncio.create_task(Upstream(relay, [("127.0.0.1", server_port)]).run()) for relay in some]
        while any(relay.state != LINKED for relay in some):
            await asyncio.sleep(0.01)
    tune_gc()
    arrivals = itertools.count()

    def accept() -> None:
        for _ in range(128):
            try:
                fd, (host, port) = listener._accept()  # type: ignore[attr-defined]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in CONNECTION_ERRORS:
                    continue
                raise
            arrival = next(arrivals)
            relays[arrival // ranks_per_link % count if ranks_per_link else 0]._serve(fd, host, port)

    asyncio.get_running_loop().add_reader(listener.fileno(), accept)
    print(listener.getsockname()[1], os.getpid(), flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    die_with_parent()
    run_loop(main(*map(int, sys.argv[1:])))
