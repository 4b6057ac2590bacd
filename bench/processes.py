"""The processes that servers under test run in.

    python -m bench.processes uvloop|threaded|libuv|legacy     one server
    python -m bench.processes KIND --busy                      a trainer that owns one and never pauses
    python -m bench.processes --pytorch    each line of standard input, `libuv`, `legacy` or empty, replaces the
                                                server: importing torch takes seconds

A server is announced by the line of `tcpstore serve` or by `PORT PID`, the process that serves. Serving in a process
that has served before favours PyTorch, except for its table of open files, which is shrunk: rank 0 of a job begins with
a small one.
Invariant: the process ends with its standard input, which its parent holds open, so none outlives the benchmark.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import threading
from typing import Any

_CLONE_FILES = 0x400


def die_with_parent() -> None:
    """End this process as soon as its standard input ends."""
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def pytorch_server(kind: str) -> Any:
    """Return a PyTorch store that serves on a port chosen by the kernel."""
    import datetime

    from torch.distributed import TCPStore

    timeout = datetime.timedelta(seconds=300)
    return TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False, use_libuv=kind == "libuv")


def serve(kind: str, busy: bool) -> None:
    """Serve until standard input ends."""
    die_with_parent()
    backend = {"uvloop": "uv"}.get(kind, kind)
    if kind in ("libuv", "legacy"):
        store = pytorch_server(kind)
        print(store.port, os.getpid(), flush=True)
    elif busy:
        from tcpstore_async.server.master import host  # what TCPStore(is_master=True) calls

        hosted = host(0, bind_host="127.0.0.1", backend=backend)
        print(hosted.port, hosted.pid, flush=True)
    else:
        from tcpstore_async.cli import main as tcpstore

        tcpstore(["serve", "--port", "0", "--backend", backend])
    if busy:
        compute()
    threading.Event().wait()


def compute() -> None:
    """Keep the interpreter busy, as a trainer's main thread does."""
    number = 1
    while True:
        number = number * 1_103_515_245 % 2_147_483_647 + 12_345


def serve_pytorch_in_turn() -> None:
    """Replace PyTorch's server by the one that each line of standard input names."""
    store = None
    for line in sys.stdin:
        del store
        gc.collect()
        shrink_file_table()
        store = pytorch_server(line.strip()) if line.strip() else None
        print(store.port if store else 0, os.getpid(), flush=True)


def shrink_file_table() -> None:
    """Replace the table of open files by a small copy, where unshare is allowed (not in every container).

    Linux never shrinks one, and growing it costs a server as much as 1,000 ranks do. unshare copies only a table that
    another thread shares.
    """
    copied = threading.Event()
    other = threading.Thread(target=copied.wait)
    other.start()
    ctypes.CDLL(None).unshare(_CLONE_FILES)
    copied.set()
    other.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", choices=["uvloop", "threaded", "libuv", "legacy"])
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--pytorch", action="store_true")
    options = parser.parse_args()
    if options.pytorch:
        serve_pytorch_in_turn()
    else:
        serve(options.kind, options.busy)


if __name__ == "__main__":
    main()
