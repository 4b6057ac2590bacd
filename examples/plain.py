"""Ranks without PyTorch find each other: `python examples/plain.py [PORT]` starts four.

Each rank sets its name and reads those of the others.
"""

import multiprocessing
import sys

import tcpstore_async

WORLD = 4


def rank(number: int, port: int) -> None:
    with tcpstore_async.TCPStore("127.0.0.1", port, WORLD, is_master=number == 0, timeout=60.0) as store:
        store.set(f"name/{number}", f"rank {number}")
        names = store.multi_get([f"name/{other}" for other in range(WORLD)])
        if number == 0:
            print(", ".join(name.decode() for name in names))
        store.barrier("all have read", WORLD)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 29555
    ranks = [multiprocessing.Process(target=rank, args=(number, port)) for number in range(WORLD)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
        if one.exitcode:  # for example, rank 0's port is in use: the others would wait for it
            for other in ranks:
                other.terminate()
    sys.exit(any(one.exitcode for one in ranks))
