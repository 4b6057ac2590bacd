"""One of the demo's plain Python processes: no PyTorch, only a store through which the ranks find each other.

python plain_rank.py PORT RANK WORLD_SIZE; rank 0 hosts the server and, given port 0, prints which one it got. Prints
one line of JSON.
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
    """Show that somebody is at home there."""
    host, port = address.split(":")
    socket.create_connection((host, int(port)), timeout=60.0).close()


main(*map(int, sys.argv[1:]))
