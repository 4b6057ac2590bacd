"""Our servers, in a process that ends with its standard input.

    python -m bench.own_host uvloop|threaded            as `tcpstore serve` starts it
    python -m bench.own_host uvloop|threaded --busy     a trainer, TCPStore(is_master=True), whose main thread computes

Each is announced by a line, `tcpstore serve`'s own or `PORT PID`. Knows how ours are started. Must not know what is
measured.
Invariant: the trainer's server is where TCPStore starts it by default: in a process of its own, which ends with it.
"""

from __future__ import annotations

import os
import sys

from bench.leash import end_with_parent


def serve(kind: str) -> None:
    from tcpstore_async.cli import main as command

    command(["serve", "--port", "0", "--backend", "uv" if kind == "uvloop" else kind])


def train(kind: str) -> None:
    from bench.torch_host import compute
    from tcpstore_async import TCPStore

    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, bind_host="127.0.0.1", use_libuv=kind == "uvloop"
    )
    print(store.port, os.getpid(), flush=True)
    compute()


def main() -> None:
    end_with_parent()
    if "--busy" in sys.argv:
        train(sys.argv[1])
    else:
        serve(sys.argv[1])


if __name__ == "__main__":
    main()
