"""PyTorch's servers, in a process that has PyTorch imported.

    python -m bench.torch_host      each line of standard input, `libuv`, `legacy` or nothing, replaces the server
    python -m bench.torch_host --once libuv [--busy]    one server; busy: and then a main thread that computes

Each server is announced by `PORT PID`. Knows PyTorch's TCPStore. Must not know what is measured.
Invariant: the process ends with its standard input. There is one server at a time, a new TCPStore. Its process may have
served before, because importing PyTorch takes seconds: what that makes faster is to PyTorch's advantage, but not a
table of open files that has grown already, which no job's first rank has.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from typing import Any

from bench.leash import end_with_parent

_CLONE_FILES = 0x400


def serve(kind: str) -> Any:
    """PyTorch's server on a port that the kernel chooses."""
    import datetime

    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", 0, None, True, datetime.timedelta(seconds=300), wait_for_workers=False, use_libuv=kind == "libuv"
    )


def forget_file_table() -> None:
    """Have a table of open files as small as a new process's, where the system allows: not in every container.

    Linux's never shrinks, and growing it takes a server as long again as 1,000 ranks. A copy is made to measure, but
    only of a table that another thread uses, too.
    """
    copied = threading.Event()
    other = threading.Thread(target=copied.wait)
    other.start()
    ctypes.CDLL(None).unshare(_CLONE_FILES)
    copied.set()
    other.join()


def compute() -> None:
    """Keep the interpreter busy without pause, as a trainer's main thread does."""
    number = 1
    while True:
        number = number * 1_103_515_245 % 2_147_483_647 + 12_345


def main() -> None:
    if "--once" in sys.argv:
        store = serve(sys.argv[sys.argv.index("--once") + 1])
        print(store.port, os.getpid(), flush=True)
        if "--busy" in sys.argv:
            end_with_parent()
            compute()
        sys.stdin.read()
        return
    store = None
    for line in sys.stdin:
        del store
        gc.collect()
        forget_file_table()
        store = serve(line.strip()) if line.strip() else None
        print(store.port if store else 0, os.getpid(), flush=True)


if __name__ == "__main__":
    main()
