"""Starts PyTorch's servers quickly: PyTorch is imported once, and each server is a fork of that process.

Knows PyTorch's TCPStore. Must not know what is measured.
Invariant: a fork owns one server and nothing else; it ends when its line on standard input ends, or is killed.

    python -m bench.torch_host      each line of standard input, `libuv` or `legacy`, is answered by `PORT PID`

A server that needs a process of its own, for its resolver or its busy main thread: `--once libuv [--busy]`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any


def serve(kind: str) -> Any:
    """PyTorch's server on a port that the kernel chooses."""
    import datetime

    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", 0, None, True, datetime.timedelta(seconds=300), wait_for_workers=False, use_libuv=kind == "libuv"
    )


def compute() -> None:
    """Keep the interpreter busy without pause, as a trainer's main thread does."""
    number = 1
    while True:
        number = number * 1_103_515_245 % 2_147_483_647 + 12_345


def _fork(kind: str) -> None:
    """In the fork: say where the server is, and stay until killed."""
    store = serve(kind)
    sys.stdout.write(f"{store.port} {os.getpid()}\n")
    sys.stdout.flush()
    while True:
        signal.pause()


def main() -> None:
    if "--once" in sys.argv:
        store = serve(sys.argv[sys.argv.index("--once") + 1])
        print(store.port, os.getpid(), flush=True)
        if "--busy" in sys.argv:
            compute()
        sys.stdin.read()
        return
    import torch.distributed  # noqa: F401  (what a fork then has)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    for line in sys.stdin:
        if os.fork() == 0:
            _fork(line.strip())


if __name__ == "__main__":
    main()
