"""The server as a process: its descriptors, its socket options, its signals, its end."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.fault_helpers import I64, Watch, connect, program, server_under, until
from support import LIMIT, TORCH_SERVER, RawPeer, Server, blob, keys, refused, tcpstore_server

pytestmark = [pytest.mark.interpreted, pytest.mark.needs_proc]

BACKLOG = 65_535
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


@contextmanager
def connections(port: int, count: int) -> Iterator[list[RawPeer]]:
    """Open this number of connections, each of them served."""
    peers: list[RawPeer] = []
    try:
        for _ in range(count):
            peer = connect(port)
            assert peer is not None, f"only {len(peers)} connections were taken"
            peers.append(peer)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def idle(server: Server) -> bool:
    """Return whether the server uses next to no CPU for half a second; a spinning one uses all it gets."""
    watch = Watch(server.process.pid)
    before = watch.cpu()
    time.sleep(0.5)
    return watch.cpu() - before < 0.1


def test_few_descriptors(backend: str) -> None:
    """Beyond the number that the log names, connections are rejected at once and cheaply, and the others are served."""
    with server_under(["prlimit", "--nofile=100:160"], "--backend", backend) as server:
        watch = Watch(server.process.pid)
        assert watch.file_limit() == (160, 160), "the soft limit is raised to the hard one"
        found = re.search(r"up to (\d+) connections", server.log())
        assert found
        limit = int(found[1])
        assert 50 <= limit <= 160 - 64
        with connections(server.port, limit) as peers:
            before = watch.cpu()
            for i in range(300):
                assert connect(server.port) is None
                peers[i % limit].ping()
            assert watch.cpu() - before < 0.5
            assert idle(server)
            assert f"connection limit {limit} reached" in server.log()
        until(lambda: watch.files() <= 160 - 64, "their descriptors are closed")


OUT_OF_DESCRIPTORS = """
import asyncio, logging, os, sys, tcpstore_async, uvloop
logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def main():
    loop = asyncio.get_running_loop()
    async with tcpstore_async.serve(backend=sys.argv[1]) as server:
        print(server.port, flush=True)
        taken = []
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line == "take\\n":
                try:
                    while True:
                        taken.append(os.dup(0))
                except OSError:
                    pass
            while line == "give\\n" and taken:
                os.close(taken.pop())
            print("done", flush=True)

uvloop.run(main())
"""


def test_no_descriptor_left_for_accept(backend: str) -> None:
    """In a process that uses its descriptors otherwise, open connections are served and new ones wait."""
    with program(OUT_OF_DESCRIPTORS, backend) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        port = next(int(line) for line in lines if line.strip().isdecimal())
        subprocess.run(["prlimit", f"--pid={process.pid}", "--nofile=100:100"], check=True)
        watch = Watch(process.pid)
        with RawPeer(port) as inside, RawPeer(port) as another:
            inside.ping()
            another.ping()
            print("take", file=process.stdin, flush=True)
            assert next(line for line in lines if "cannot accept" in line or line == "done\n") == "done\n"
            with RawPeer(port) as late_peer:
                late_peer.send(b"\x0dpong")
                assert "cannot accept connections for now" in next(lines)
                before = watch.cpu()
                for _ in range(200):
                    inside.ping()
                    another.ping()
                time.sleep(0.5)
                assert watch.cpu() - before < 0.3, "the server spins"
                print("give", file=process.stdin, flush=True)
                assert late_peer.read(4) == b"pong"


# quirk: file-table
def test_a_thundering_herd_finds_the_file_table_grown(backend: str) -> None:
    """Growing it takes tens of milliseconds each time, in which ranks that connect at once overflow the backlog."""
    with tcpstore_server("--backend", backend, "--limit", "connections=5000") as server:
        assert Watch(server.process.pid).file_table() > 5000


def test_the_file_table_is_not_presized_beyond_the_connection_limit(backend: str) -> None:
    with tcpstore_server("--backend", backend, "--limit", "connections=100") as server:
        assert Watch(server.process.pid).file_table() < 1000


def test_pytorchs_server_grows_its_file_table_while_ranks_wait() -> None:
    pytest.importorskip("torch")
    with program(TORCH_SERVER, "libuv") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        assert Watch(process.pid).file_table() < 5000


@pytest.mark.parametrize("somaxconn", [128, 65_535])
def test_a_short_backlog_is_warned_of(backend: str, somaxconn: int) -> None:
    """In a network namespace of its own, where the kernel's limit can be set."""
    script = f'ip link set lo up; echo {somaxconn} > {SOMAXCONN}; exec "$@"'
    prefix = ["unshare", "-n", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a network namespace needs root")
    with server_under(prefix, "--backend", backend, "--log-level", "debug") as server:
        assert ("somaxconn" in server.log()) == (somaxconn < BACKLOG)
        if shutil.which("nsenter") and shutil.which("ss"):
            listed = subprocess.run(
                ["nsenter", "-n", "-t", str(server.process.pid), "ss", "-ltnH"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert listed.stdout.split()[2] == str(min(BACKLOG, somaxconn))


def test_a_reply_that_ends_in_an_empty_value_is_one_segment(backend: str) -> None:
    """A length that is sent apart from its value makes the value 200 ms late, as on PyTorch's legacy server."""
    with tcpstore_server("--backend", backend) as server, RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/k") + blob(b"") + b"\x0e" + blob(b"/q") + blob(b""))
        peer.ping()
        for request, reply in (
            (b"\x03" + blob(b"/k"), bytes(8)),
            (b"\x03" + blob(b"/missing"), bytes(8)),
            (b"\x0a" + keys(b"/k", b"/missing", b"/k"), bytes(24)),
            (b"\x02" + blob(b"/k") + blob(b"") + blob(b""), bytes(8)),
            (b"\x0f" + blob(b"/q"), I64.pack(1) + bytes(8)),
            (b"\x0f" + blob(b"/q"), bytes(8)),
        ):
            peer.send(request)
            assert peer.socket.recv(100) == reply


# quirk: pipelined-replies
def test_pipelined_requests_are_answered_in_one_segment(backend: str) -> None:
    with tcpstore_server("--backend", backend) as server, RawPeer(server.port) as peer:
        peer.ping()
        peer.send(b"\x07" * 100)
        assert len(peer.socket.recv(1000)) == 800


def test_no_descriptor_is_left_behind(backend: str) -> None:
    """A thousand connections, of several endings, among them parked and paused ones."""
    with tcpstore_server("--backend", backend) as server, RawPeer(server.port) as other:
        other.send(b"\x01" + blob(b"/big") + blob(bytes(1 << 20)))
        other.ping()
        watch = Watch(server.process.pid)
        files = watch.files()
        for i in range(10):
            with connections(server.port, 100) as peers:
                for j, peer in enumerate(peers):
                    if j % 5 == 1:
                        peer.send(b"\x06" + keys(b"/never%d" % i))
                    if j % 25 == 2:
                        peer.send((b"\x03" + blob(b"/big")) * 20)
                    if j % 5 == 3:
                        peer.send(b"\xff")
                    if j % 5 == 4:
                        peer.reset()
                other.ping()
        until(lambda: watch.files() == files, "all are closed")


def test_sigterm_serves_on_until_the_last_has_left(backend: str) -> None:
    with tcpstore_server("--backend", backend, "--grace", "60") as server:
        with RawPeer(server.port) as parked, RawPeer(server.port) as peer:
            parked.send(b"\x06" + keys(b"/k"))
            peer.ping()
            server.process.send_signal(signal.SIGTERM)
            until(lambda: refused(server.port), "the port is free")
            assert server.process.poll() is None
            peer.send(b"\x01" + blob(b"/k") + blob(b"v"))
            assert parked.read(1) == b"\0"
            peer.ping()
        assert server.process.wait(LIMIT) == 0
        assert "still open after" not in server.log()


@pytest.mark.parametrize("grace", ["0", "0.2"])
def test_the_grace_ends(backend: str, grace: str) -> None:
    with tcpstore_server("--backend", backend, "--grace", grace) as server, RawPeer(server.port) as peer:
        peer.ping()
        server.process.send_signal(signal.SIGTERM)
        assert peer.closed()
        assert server.process.wait(LIMIT) == 0
        assert "still open after" in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("drain", [False, True])
def test_sigint_stops_at_once_even_while_draining(backend: str, drain: bool) -> None:
    with tcpstore_server("--backend", backend, "--grace", "3600") as server, RawPeer(server.port) as peer:
        peer.send(b"\x06" + keys(b"/never"))
        peer.ping()
        if drain:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: refused(server.port), "the port is free")
        server.process.send_signal(signal.SIGINT)
        assert peer.closed()
        assert server.process.wait(LIMIT) == 0
        assert "Traceback" not in server.log()


NAMELESS = """
import asyncio, logging, socket, sys, tcpstore_async, uvloop

def forbidden(*arguments, **more):
    print("LOOKED UP", arguments, flush=True)
    raise AssertionError(arguments)

for name in ("getnameinfo", "gethostbyaddr", "getfqdn", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, forbidden)
logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def main():
    limits = tcpstore_async.Limits(connections=1)
    async with tcpstore_async.serve("127.0.0.1", 0, limits=limits, backend=sys.argv[2]) as server:
        print(server.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

(uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(main())
print("over", flush=True)
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
# quirk: peer-names
def test_names_of_peers_are_never_looked_up(loop: str, backend: str) -> None:
    with program(NAMELESS, loop, backend) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        port = next(int(line) for line in lines if line.strip().isdecimal())
        with RawPeer(port) as peer:
            peer.ping()
            assert connect(port) is None
            peer.send(b"\xff")
            assert peer.closed()
        print(file=process.stdin, flush=True)
        rest = "".join(lines)
        assert rest.endswith("over\n")
        assert "LOOKED UP" not in rest
        assert "opcode 255" in rest
        assert "rejected 127.0.0.1:" in rest
