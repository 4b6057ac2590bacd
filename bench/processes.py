"""Processes of benchmarks: which build they import, how they are started and measured, and what servers run in.

A server or relays under test run in

    python -m bench.processes uvloop|threaded|libuv|legacy     one server
    python -m bench.processes KIND --busy                      a trainer that owns one and never pauses
    python -m bench.processes --pytorch    each line of standard input, `libuv`, `legacy` or empty, replaces the server:
                                           importing torch takes seconds
    python -m bench.processes --relays SERVER_PORT RANKS_PER_LINK RANKS    many relays, as many hosts have them

Each is announced by the line of `tcpstore serve` or by `PORT PID`, the process that serves, and ends with its standard
input, which its parent holds open, so none outlives the benchmark. Serving in a process that has served before favours
PyTorch, except for its table of open files, which is shrunk: rank 0 of a job begins with a small one.

Must not import the package before it is used: programs choose the build first.
Invariant: after `use_build`, this process and every process started with `environment` import the same package.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"
CHILD = (sys.executable, "-W", "ignore", "-m", "bench.processes")
"""This module as a program."""


# The build


def chosen_build() -> Path:
    """Return `build/compiled`, or the checkout if BENCH_BUILD=interpreted or the build is missing or stale."""
    if os.environ.get("BENCH_BUILD") == "interpreted" or not is_compiled(COMPILED):
        return ROOT
    if _up_to_date():
        return COMPILED
    text = f"{COMPILED} is older than the sources; measuring the interpreted checkout (`make compile` rebuilds it)"
    with suppress(OSError):  # standard error may be closed
        print(text, file=sys.stderr)
    return ROOT


def _up_to_date() -> bool:
    """Apply Make's rule: no source is newer than the build's stamp."""
    sources = [*(ROOT / "tcpstore_async").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "setup.py"]
    try:
        made = (COMPILED / ".made").stat().st_mtime
        return all(source.stat().st_mtime <= made for source in sources)
    except OSError:
        return False


def is_compiled(tree: Path) -> bool:
    return bool(list(tree.glob("*.so")))


def tree_of(name: str) -> Path:
    """Return the folder of a build: `name` is that folder, or a git revision, which is compiled unless it has been.

    Raises ValueError if it is neither, and CalledProcessError if it cannot be compiled.
    """
    folder = Path(name).resolve()
    if (folder / "tcpstore_async" / "__init__.py").is_file():
        return folder
    git = ["git", "-C", str(ROOT)]
    asked = [*git, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    commit = subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not commit:
        raise ValueError(f"{name}: neither a folder with the package nor a git revision")
    tree = ROOT / "build" / "against" / commit
    if tree.exists():
        return tree
    print(f"compiling {name} into {tree}", file=sys.stderr)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as workplace:
        source, made = Path(workplace, "source"), Path(workplace, "made")
        source.mkdir()
        archive = subprocess.run([*git, "archive", commit], stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(made), str(source)]
        subprocess.run(pip, env={**os.environ, "TCPSTORE_PURE": "0"}, check=True)
        made.rename(tree)
    return tree


def use_build() -> None:
    """Import the chosen package from now on, here and in child processes."""
    tree = chosen_build()
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = environment(tree)["PYTHONPATH"]


def environment(tree: Path | None = None) -> dict[str, str]:
    """Return the environment for a process that imports `bench` and the package in `tree` (default: this process's).

    The checkout comes last: its sources must not hide a compiled build.
    """
    first = [str(tree.absolute())] if tree else []
    path = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


# Programs and what they start


def parser(text: str | None, parts: Collection[str] = ()) -> argparse.ArgumentParser:
    """Return a parser for a program with this docstring, and these parts, of which all run unless some are named."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def part(word: str) -> str:
        if word not in parts:
            raise argparse.ArgumentTypeError(f"invalid choice: {word!r} (choose from {', '.join(parts)})")
        return word

    if parts:
        about = f"{', '.join(parts)} (default: all)"
        made.add_argument("parts", nargs="*", type=part, default=list(parts), metavar="PART", help=about)
    return made


@contextmanager
def announced(command: Sequence[str], **options: Any) -> Iterator[tuple[int, int]]:
    """Start a process that announces a server; yield the server's port and process."""
    # Not in the checkout: with `-m`, what is in the working directory would be imported first.
    folder, pipe = tempfile.gettempdir(), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=folder, **options) as process:
        try:
            assert process.stdout is not None
            yield announcement(process.stdout.readline())
        finally:
            process.kill()


def started(*words: str, **options: Any) -> AbstractContextManager[tuple[int, int]]:
    """Run a command of `tcpstore` that listens; yield its port and process."""
    return announced([sys.executable, "-m", "tcpstore_async", *words, "--port", "0"], **options)


def announcement(line: bytes) -> tuple[int, int]:
    """Return the port and process in the line that announces a server. Raises ValueError."""
    if line.startswith(b"{"):
        event = json.loads(line)
        return int(event["port"]), int(event["pid"])
    port, pid = line.split()
    return int(port), int(pid)


@contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Keep servers and clients on different cores: one that shares its client's core sleeps and wakes for less."""
    cores = sorted(os.sched_getaffinity(0))
    for server in servers:
        os.sched_setaffinity(server, {cores[0]})
    os.sched_setaffinity(0, {cores[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, by its clock, which is finer than /proc's. Raises OSError."""
    return time.clock_gettime((~pid << 3) | 2)


def memory(pid: int, row: str = "VmRSS:") -> int:
    """Return the resident bytes of a process, or another row of its status.

    Raises OSError, or IndexError, if it has exited.
    """
    return int(Path(f"/proc/{pid}/status").read_text().split(row)[1].split()[0]) * 1024


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# The load generator in C

_SOURCE = ROOT / "bench" / "loadgen" / "loadgen.c"
_INSIDE = "BENCH_NETNS"
_NAMESPACE = (
    "ip link set lo up; cd /proc/sys/net; echo 65535 > core/somaxconn; echo '1024 65535' > ipv4/ip_local_port_range; "
    'echo 65535 > ipv4/tcp_max_syn_backlog; cd - >/dev/null; exec "$@"'
)


def load_generator() -> Path:
    """Compile the load generator unless this version exists; return its path."""
    generator = Path(tempfile.gettempdir()) / f"tcpstore-loadgen-{os.getuid()}-{_SOURCE.stat().st_mtime_ns}"
    if not generator.exists():
        made = generator.with_suffix(f".{os.getpid()}")
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-w", "-o", made, _SOURCE], check=True, timeout=120)
        made.rename(generator)
    return generator


def enter_namespace() -> None:
    """Start this program anew in a private network namespace, unless it is in one; needs root.

    It has a loopback device, with a backlog and a range of ports large enough for whole jobs.
    """
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", "bash", "-c", _NAMESPACE, "bench", sys.executable, *sys.argv])


# The child side: servers and relays under test

_CLONE_FILES = 0x400
_CONNECTING = 64
"""Relays that connect concurrently."""


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


async def relay(server_port: int, ranks_per_link: int, ranks: int) -> None:
    """Listen on one port, and give every `ranks_per_link` connections in a row a relay with a link of its own.

    0: all of them have one relay. The links are up when the line `PORT PID` is printed.
    """
    import asyncio
    import itertools
    from functools import partial

    from tcpstore_async.links.link_client import ClientLink
    from tcpstore_async.relay.core import LINKED, Relay
    from tcpstore_async.relay.upstream import Upstream
    from tcpstore_async.server.listen_socket import CONNECTION_ERRORS, listen, raise_file_limit
    from tcpstore_async.serving import tune_gc

    raise_file_limit()
    listener = listen("127.0.0.1", 0)
    count = -(-ranks // ranks_per_link) if ranks_per_link else 1
    relays = [Relay(listener, partial(ClientLink, f"bench/{os.getpid()}/{number}")) for number in range(count)]
    for one in relays:
        one.max_files = ranks + 1
    tasks = []
    for number in range(0, count, _CONNECTING):
        some = relays[number : number + _CONNECTING]
        tasks += [asyncio.create_task(Upstream(one, [("127.0.0.1", server_port)]).run()) for one in some]
        while any(one.state != LINKED for one in some):
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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("kind", nargs="?", choices=["uvloop", "threaded", "libuv", "legacy"])
    options.add_argument("--busy", action="store_true")
    options.add_argument("--pytorch", action="store_true")
    options.add_argument("--relays", type=int, nargs=3, metavar=("SERVER_PORT", "RANKS_PER_LINK", "RANKS"))
    given = options.parse_args()
    if given.relays:
        from tcpstore_async.serving import run_loop

        die_with_parent()
        run_loop(relay(*given.relays))
    elif given.pytorch:
        serve_pytorch_in_turn()
    else:
        serve(given.kind, given.busy)


if __name__ == "__main__":
    main()
