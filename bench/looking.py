"""Measure how long it takes to see who is missing from an exchange of keys, of 98,304 ranks on links.

    python -m bench.looking [--ranks 98304] [--missing 7] [--rounds 7] [--waits one|own] [--hosts 12288]

Each rank does what PyTorch's client does, joins, sets a key of its own, and waits: for the key of the first rank that
is missing (`--waits one`), or each for a key of its own that nobody sets (`--waits own`). The ranks are those of six
links, and only the keys that they write say which one each is. Then `tcpstore who --missing -o json` runs in a process
of its own, on the core that the server does not use. Shown is the wall time of the process, from its start to its end,
its CPU time and the server's.

The compiled build is measured if it is up to date; otherwise, and with BENCH_BUILD=interpreted, the checkout.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import processes

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from bench.processes import apart, cpu_seconds, started
from bench.stats import spread
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.serving import build
from tcpstore_async.session.client import ClientSession
from tcpstore_async.tools.load.scripts import encode_request
from tcpstore_async.wire.values import pack

LINKS = 6
TIMEOUT = 300.0


class Rank(Stream):
    """A rank of which nobody reads the replies."""

    def __init__(self, link: ClientLink) -> None:
        super().__init__()
        self._link = link

    def received(self, data: bytes) -> None:
        self._link.consume(self, len(data))

    def credited(self) -> None:
        pass

    def closed(self) -> None:
        raise ProtocolError("the server has closed a session")


def _link(port: int, stack: ExitStack) -> tuple[ClientLink, socket.socket]:
    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT))
    link = ClientLink()
    peer.sendall(link.request())
    replies = peer.makefile("rb")
    link.answered(replies.read(struct.unpack("<Q", replies.read(8))[0]))
    return link, peer


def _exchange(link: ClientLink, peer: socket.socket, lock: threading.Lock) -> None:
    """Read what comes, until the connection is closed."""
    try:
        while data := peer.recv(1 << 18):
            with lock:
                link.receive(data)
                link.seal()
    except OSError:
        pass


def _stay(link: ClientLink, peer: socket.socket, lock: threading.Lock) -> None:
    """Show that the link is alive, until the connection is closed."""
    try:
        while True:
            with lock:
                link.acknowledge()
                out, link.out = link.out, []
                peer.sendall(b"".join(out))
            time.sleep(1)
    except OSError:
        pass


def _script(rank: int, awaited: bytes) -> bytes:
    hello = ClientSession().hello(1000 + rank)[0]
    own = encode_request("set", b"/exchange/0/%d" % rank, pack(b"x" * 16))
    return hello + encode_request("add", b"init/", 1) + own + encode_request("wait", [awaited])


@contextmanager
def _job(port: int, options: argparse.Namespace, absent: frozenset[int]) -> Iterator[None]:
    """All ranks that have come, with what they wait for."""
    with ExitStack() as stack:
        links = [_link(port, stack) for _ in range(LINKS)]
        for number, (link, peer) in enumerate(links):
            lock = threading.Lock()
            threading.Thread(target=_exchange, args=(link, peer, lock), daemon=True).start()
            for rank in range(number, options.ranks, LINKS):
                if rank in absent:
                    continue
                awaited = b"/exchange/%d" % rank if options.waits == "own" else b"/exchange/0/%d" % min(absent)
                host = rank * options.hosts // options.ranks
                stream = Rank(link)
                while not link.has_room():
                    time.sleep(0.001)
                with lock:
                    link.open(stream, f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}", 20_000 + rank % 40_000)
                    link.send(stream, _script(rank, awaited))
                    link.seal()
                    out, link.out = link.out, []
                    peer.sendall(b"".join(out))
            with lock:
                link.seal()
            threading.Thread(target=_stay, args=(link, peer, lock), daemon=True).start()
        yield


def _settle(server: int) -> None:
    """Return when the server has nothing to do."""
    before = -1.0
    while (now := cpu_seconds(server)) > before + 0.01:
        before = now
        time.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=98_304)
    parser.add_argument("--missing", type=int, default=7)
    parser.add_argument("--hosts", type=int, default=12_288)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--waits", choices=("one", "own"), default="one")
    options = parser.parse_args(arguments)
    absent = frozenset(options.ranks * (2 * one + 1) // (2 * options.missing) for one in range(options.missing))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        admin = str(Path(folder) / "admin")
        port, server = stack.enter_context(started("serve", "--admin", admin))
        stack.enter_context(_job(port, options, absent))
        _settle(server)
        stack.enter_context(apart(server))
        command = [sys.executable, "-m", "tcpstore_async", "who", "--missing", "-o", "json", "--admin", admin]
        walls, cpus, servers = [], [], []
        for number in range(options.rounds + 1):
            used, theirs = _children(), cpu_seconds(server)
            began = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=folder)
            wall = time.perf_counter() - began
            found = [one["missing_ranks"] for one in json.loads(done.stdout)["waits"]]
            if options.waits == "one" and found != [sorted(absent)]:
                raise SystemExit(f"these are missing: {sorted(absent)}; found: {found}")
            if number:  # the first one may have compiled what it imports
                walls.append(wall)
                cpus.append(_children() - used)
                servers.append(cpu_seconds(server) - theirs)
        print(
            f"{build()}, {options.ranks} ranks, --waits {options.waits}: wall {spread(walls, ' s')}, "
            f"CPU {spread(cpus, ' s')}, server's {spread(servers, ' s')}"
        )


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
