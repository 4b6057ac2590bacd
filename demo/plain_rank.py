"""A plain Python process of the demo: the ranks find each other through a store, without PyTorch.

    python plain_rank.py PORT RANK WORLD_SIZE

Rank 0 hosts the server and first prints its port. Each rank prints its report. Both are lines of JSON.
"""

import json
import os
import socket
import sys
import time

from tcpstore_async import TCPStore

ROUNDS = 3


def main(port: int, rank: int, world_size: int) -> None:
    began = time.monotonic()
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=60.0)
    with store, socket.create_server(("127.0.0.1", 0)) as server:
        if rank == 0:
            print(json.dumps({"port": store.port}), flush=True)
        store.set(f"address/{rank}", f"127.0.0.1:{server.getsockname()[1]}")
        addresses = [text.decode() for text in store.multi_get([f"address/{other}" for other in range(world_size)])]
        for number in range(ROUNDS):
            store.barrier(f"round/{number}", world_size)
        reach(addresses[(rank + 1) % world_size])
        store.barrier("done", world_size)
        report = {
            "rank": rank,
            "pid": os.getpid(),
            "found": len(set(addresses)),
            "next": addresses[(rank + 1) % world_size],
        }
        print(json.dumps({**report, "seconds": time.monotonic() - began}))


def reach(address: str) -> None:
    """Connect to another rank's address."""
    host, port = address.split(":")
    socket.create_connection((host, int(port)), timeout=60.0).close()


main(*map(int, sys.argv[1:]))
