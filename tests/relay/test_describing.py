"""What a relay says of the ranks of its machine, which PyTorch's clients do not say themselves."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.fault_helpers import program, until
from support import HANDSHAKE, RawPeer, Server, free_port, tcpstore_relay, tcpstore_server
from tcpstore_async.client.admin import ask
from tcpstore_async.diagnosis.facts import Facts, read_facts
from tcpstore_async.relay.describing import describer

pytestmark = pytest.mark.needs_proc

_OLD_SERVER = """
import sys
from tcpstore_async.session import identity
identity.EXTENSION = 6
from tcpstore_async.cli import main
main(["serve", "--port", sys.argv[1], "--admin", sys.argv[2]])
"""


@contextmanager
def process_with(own: dict[str, str]) -> Iterator[int]:
    """A process with these variables, once they can be read: for a moment after its start they cannot."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **own}) as process:
        try:
            until(lambda: b"RANK=" in Path(f"/proc/{process.pid}/environ").read_bytes(), "its environment is there")
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that is rank 3 of 8."""
    own = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "job", "OTHER": "secret"}
    with process_with(own) as pid:
        yield pid


def ping(pid: int) -> bytes:
    return b"\x0d" + struct.pack("<I", pid)


def sessions(path: Path) -> Facts:
    return read_facts(ask(path, ["sessions"], 60.0))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with tcpstore_server("--admin", str(tmp_path / "admin")) as server:
        yield server


@pytest.mark.parametrize("cut", [1, 5, 7, 10, 11])
def test_the_server_knows_what_the_environment_says(server: Server, tmp_path: Path, pid: int, cut: int) -> None:
    data = HANDSHAKE + ping(pid) + b"\x07"
    with tcpstore_relay(server.port) as relay, socket.create_connection(("127.0.0.1", relay.port)) as rank:
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank.sendall(data[:cut])
        until(
            lambda: any(session.link is not None for session in sessions(tmp_path / "admin").sessions),
            "the session is opened",
        )
        rank.sendall(data[cut:])
        assert rank.recv(12, socket.MSG_WAITALL) == struct.pack("<Iq", pid, 0)
        (found,) = [session for session in sessions(tmp_path / "admin").sessions if session.link is not None]
        assert found.pid == pid
        assert found.peer == {
            "host": socket.gethostname(),
            "rank": "3",
            "world_size": "8",
            "local_rank": "1",
            "job": "job",
        }


def test_a_server_that_does_not_understand_it_is_not_told(tmp_path: Path, pid: int) -> None:
    port = free_port()
    with program(_OLD_SERVER, str(port), str(tmp_path / "admin")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with tcpstore_relay(port) as relay, RawPeer(relay.port) as rank:
            rank.ping(pid)
            (found,) = [session for session in sessions(tmp_path / "admin").sessions if session.link is not None]
            assert (found.pid, found.peer) == (pid, {})


def test_who_is_not_known_is_not_described(pid: int) -> None:
    describe = describer()
    known, description = describe(HANDSHAKE + ping(pid), "127.0.0.1")
    assert (known, description["rank"]) == (pid, "3")
    assert describe(HANDSHAKE + ping(pid), "192.0.2.1") == (0, {})
    assert describe(HANDSHAKE + b"\x07" * 5, "127.0.0.1") == (0, {})
    assert describe(b"\x07" * 10, "127.0.0.1") == (0, {})
    assert describe(HANDSHAKE + ping(2**32 - 1), "::1") == (2**32 - 1, {"host": socket.gethostname()})


def test_long_values_are_cut() -> None:
    with process_with({"RANK": "9" * 100_000}) as pid:
        assert describer()(HANDSHAKE + ping(pid), "127.0.0.1")[1]["rank"] == "9" * 200
