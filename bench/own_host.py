"""A trainer that hosts our server: TCPStore(is_master=True), and then a main thread that computes without pause.

    python -m bench.own_host uvloop|threaded

Knows our store. Must not know what is measured.
Invariant: the server is where TCPStore starts it by default, in a process of its own, which ends with this one.
"""

from __future__ import annotations

import os
import sys

from bench.torch_host import compute
from tcpstore_async import TCPStore


def main() -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, bind_host="127.0.0.1", use_libuv=sys.argv[1] == "uvloop"
    )
    print(store.port, os.getpid(), flush=True)
    compute()


if __name__ == "__main__":
    main()
