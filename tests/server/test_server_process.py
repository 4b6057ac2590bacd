"""The parent side of a server process."""

import errno
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.frames import i64, join
from faults.fault_helpers import until
from faults.owner_programs import Seen, port_is_free, seen
from support import LIMIT, RawPeer
from tcpstore_async.base import python_process
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.process import parent
from tcpstore_async.server.process.parent import ServerProcess, StartError, start

pytestmark = [pytest.mark.slow, pytest.mark.interpreted, pytest.mark.needs_proc]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = start(listen("::", 0))
    yield server
    server.stop()


@pytest.fixture
def process(server: ServerProcess) -> Iterator[Seen]:
    with seen(server.pid) as process:
        yield process


def zombies() -> list[str]:
    """Children of this process that have ended and were not waited for."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if line.startswith("Z")]


def test_a_server(server: ServerProcess, process: Seen) -> None:
    assert server.alive()
    with RawPeer(server.port) as peer:
        peer.ping()
    server.stop()
    assert port_is_free(server.port)
    assert not process.running(), "nobody was there: it has ended"
    assert not server.alive()
    assert not zombies()


def test_the_listener_is_closed_here() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = start(listener)
    assert listener.fileno() == -1
    assert server.port == port
    server.stop()


def test_stop_may_be_called_again_and_by_many(server: ServerProcess) -> None:
    def stop() -> None:
        server.stop()
        with socket.socket() as peer:
            refusals.append(peer.connect_ex(("127.0.0.1", server.port)))

    refusals: list[int] = []
    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert refusals == [errno.ECONNREFUSED] * 8
    assert port_is_free(server.port)
    server.stop()
    server.announce(3)
    server.complete()


def test_a_crashed_server_is_an_end_of_file_and_stops_at_once(server: ServerProcess, process: Seen) -> None:
    with RawPeer(server.port) as peer:
        peer.ping()
        process.signal(signal.SIGKILL)
        assert peer.closed()
    assert process.ended()
    assert not server.alive()
    server.announce(1)
    server.complete()
    server.stop()
    assert port_is_free(server.port)
    assert not zombies()


def test_a_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "STOP_TIMEOUT", 0.2)
    server = start(listen("::", 0))
    with seen(server.pid) as process:
        process.signal(signal.SIGSTOP)
        server.stop()
        assert not process.running()
    assert port_is_free(server.port)


def test_stop_does_not_wait_for_the_grace(server: ServerProcess, process: Seen) -> None:
    with RawPeer(server.port) as peer:
        peer.ping()
        server.stop()
        assert process.running()
        peer.ping()
    assert process.ended()
    start(listen("::", 0)).stop()
    assert not zombies()


def test_dropping_it_leaves_no_warning() -> None:
    server = start(listen("::", 0))
    with seen(server.pid) as process, RawPeer(server.port) as peer:
        peer.ping()
        server.stop()
        del server
        gc.collect()
        peer.close()
        assert process.ended()


# The grace


def ask(port: int, pid: int) -> RawPeer:
    """Return a connection whose peer has sent its process id."""
    peer = RawPeer(port)
    peer.ping(pid)
    return peer


def test_after_the_world_is_complete_connections_belong_to_a_next_round(server: ServerProcess, process: Seen) -> None:
    with ask(server.port, 1) as early, ask(server.port, 2) as parked:
        parked.send(b"\x06" + bytes.fromhex("0100000000000000 0200000000000000") + b"/k")
        server.announce(2)
        early.join(2)
        server.complete()
        with ask(server.port, 3) as late, ask(server.port, 1) as clone, RawPeer(server.port) as nameless:
            nameless.ping(-1 % 2**32)
            server.stop()
            assert port_is_free(server.port)
            assert late.closed()
            assert nameless.closed()
            clone.ping(1)
            early.ping(1)
            parked.socket.settimeout(0.1)
            with pytest.raises(TimeoutError):
                parked.read(1)
            parked.socket.settimeout(LIMIT)
            clone.send(b"\x01" + bytes.fromhex("0200000000000000") + b"/k" + bytes(8))
            assert parked.read(1) == b"\0"
            assert process.running()
    assert process.ended()


def test_a_clone_whose_first_connection_has_gone_is_of_a_next_round(server: ServerProcess) -> None:
    with ask(server.port, 1) as early, ask(server.port, 2) as other:
        server.complete()
        with ask(server.port, 1) as clone:
            early.close()
            until(lambda: count(server) == 2, "the server has seen it")
            server.stop()
            assert clone.closed()
            other.ping(2)


def count(server: ServerProcess) -> int:
    """Return how many connections a server has open: sockets other than its listener and control socket."""
    links = [os.readlink(path) for path in Path("/proc", str(server.pid), "fd").iterdir() if path.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    established = 0
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            established += fields[3] != "0A" and fields[9] in inodes
    return established


def test_another_store_on_the_server_waits_for_its_ranks(server: ServerProcess, process: Seen) -> None:
    """Connections accepted in between belong to it until it is complete."""
    with ask(server.port, 1) as first:
        server.announce(1)
        first.join(1)
        server.complete()
        server.announce(1)
        with ask(server.port, 2) as second:
            server.stop()
            second.ping(2)
    assert process.ended()


def test_a_store_whose_ranks_have_yet_to_come_is_not_complete(server: ServerProcess, process: Seen) -> None:
    """Its master was sent that by the ranks of an earlier store."""
    with ask(server.port, 1) as first:
        server.announce(2)
        first.join(2)
        server.complete()
        server.announce(2)
        first.join(1)
        server.complete()
        with ask(server.port, 2) as second:
            second.join(1)
            server.stop()
            second.ping(2)
    assert process.ended()


@pytest.mark.parametrize("announced", [0, 2])
def test_no_rank_joins_a_round_that_is_over(announced: int, server: ServerProcess, process: Seen) -> None:
    """It would wait here for ranks that join the next round's server, and they for it."""
    if announced:
        server.announce(announced)
    with ask(server.port, 1) as peer:
        assert peer.ask(join(b"init/", b"first"), 8) == i64(1)
        server.stop()
        assert peer.ask(join(b"init/", b""), 8) == i64(1)
        if announced:
            peer.send(join(b"init/", b"first"))
            assert peer.closed()
        else:
            assert peer.ask(join(b"init/", b"second"), 8) == i64(2)
    assert process.ended()


def test_if_the_world_was_never_complete_all_have_the_grace(server: ServerProcess, process: Seen) -> None:
    with ask(server.port, 1), ask(server.port, 2) as other:
        server.stop()
        other.ping(2)
    assert process.ended()


@pytest.mark.parametrize("grace", [0, 0.2])
def test_the_grace_ends(grace: float) -> None:
    server = start(listen("::", 0), grace=grace)
    with seen(server.pid) as process, RawPeer(server.port) as peer:
        peer.ping()
        server.stop()
        assert peer.closed()
        assert process.ended()


# What keeps it from starting


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with listen("::", 0) as listener:
        with pytest.raises(StartError, match=r"^no Python interpreter found to run it$"):
            start(listener)
        assert listener.fileno() >= 0, "it may be used otherwise"


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with listen("::", 0) as listener, pytest.raises(StartError, match="/nonexistent/python"):
        start(listener)


def test_a_program_that_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with listen("::", 0) as listener, pytest.raises(StartError, match=r"^it exited at once$"):
        start(listener)
    assert not zombies()


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_process, "_path", list)
    with listen("::", 0) as listener, pytest.raises(StartError, match="it exited at once: ModuleNotFoundError"):
        start(listener)


def test_a_socket_it_cannot_listen_on() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(StartError, match=r"it is not a TCP socket$"):
            start(datagrams)
        assert datagrams.fileno() >= 0
    assert not zombies()


def test_a_server_that_is_not_ready_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_PROGRAM", "import time; time.sleep(1000)")
    with listen("::", 0) as listener, pytest.raises(StartError, match=r"^not ready within 0\.2 s$"):
        start(listener, timeout=0.2)
    assert not zombies()


# A forked child


def test_a_forked_child_does_nothing_and_holds_nothing(server: ServerProcess) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            server.announce(1)
            server.complete()
            server.stop()
            sockets = server._control.fileno(), server._log._source.fileno(), server._process._fd
            os.write(writer, b"closed" if sockets == (-1, -1, None) else b"open")
            select.select([], [], [], LIMIT)
        finally:
            os._exit(0)
    try:
        assert os.read(reader, 10) == b"closed"
        with RawPeer(server.port) as peer:
            peer.ping()
        server.stop()
        assert port_is_free(server.port)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
