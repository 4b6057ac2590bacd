"""`tcpstore who`, `waiters` and `clients`: what they print, and how they fail."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result

from commands import run_command
from conformance.frames import introduce
from support import RawPeer, Server, blob, free_port, keys, tcpstore, tcpstore_server
from tcpstore_async.diagnosis.missing import Pending
from tcpstore_async.diagnosis.stock_ranks import number_ranges
from tcpstore_async.relay.process import RelayProcess
from tcpstore_async.server import admin_path
from tcpstore_async.tools.look.asking import in_seconds_or_more
from tcpstore_async.tools.look.who import _pending_lines

STRANGE = b"/evil\x1b[31m\nkey"


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    """A server with three clients: one wrote two keys, and two wait, one of them for a key nearly the same."""
    with (
        tcpstore_server() as server,
        RawPeer(server.port) as one,
        RawPeer(server.port) as two,
        RawPeer(server.port) as three,
    ):
        one.send(introduce((b"rank", b"0"), (b"world_size", b"4"), (b"host", b"node\x1b[0m"), (b"pid", b"77")))
        one.send(b"\x01" + blob(b"/step_5") + blob(b"x") + b"\x01" + blob(STRANGE) + blob(b"x"))
        one.ping()
        two.ping(os.getpid())
        two.send(b"\x06" + keys(b"/step_8") + b"\x0d" + b"abcd")
        two.read(4)
        three.send(b"\x12" + blob(b"/here") + struct.pack("<q", 4) + b"\x0d" + b"abcd")
        three.read(4)
        yield server


def test_who(server: Server) -> None:
    lines = run_command(server, "who").stdout.splitlines()
    assert lines[0].split() == ["RANK", "HOST", "PORT", "PID", "JOINED", "COMMAND", "DOES", "SINCE"]
    assert len(lines) == 4
    assert lines[1].startswith("0     node\\x1b[0m")
    found = json.loads(run_command(server, "who", "-o", "json").stdout)
    fields = "host port pid rank joined command waits_for since does address known_by store"
    assert {tuple(one) for one in found} == {tuple(fields.split())}
    assert [one["rank"] for one in found] == [0, None, None]
    assert {tuple(one["waits_for"]) for one in found} == {(), ("step_8",), ("here",)}
    assert {one["command"] for one in found} == {"PING"}


def test_more_have_joined_than_are_expected(module_sockets: Path) -> None:
    """It said "2 of 1 ranks have joined"."""
    with tcpstore_server() as server, RawPeer(server.port) as one, RawPeer(server.port) as two:
        one.join(1)
        two.join(1)
        text = run_command(server, "who", "--missing", "--world-size", "1").stdout
        assert text.splitlines()[0] == (
            "2 have joined, 1 expected: some joined again, or this is the server of torchrun's agents"
        )


def test_who_is_missing(server: Server) -> None:
    found = json.loads(run_command(server, "who", "--missing", "-o", "json").stdout)
    assert found["world_size"] == 4
    kinds = {one["kind"]: one for one in found["waits"]}
    assert kinds["barrier"]["key"] == "here"
    assert (kinds["barrier"]["arrived"], kinds["barrier"]["expected"]) == (1, 4)
    assert {one["pid"] for one in kinds["barrier"]["elsewhere"]} == {77, os.getpid()}
    text = run_command(server, "who", "--missing", "--world-size", "5").stdout
    assert "of 5 ranks have joined" in text
    assert "barrier here: 1 of 4 have arrived, 1 waiting for" in text
    assert ", pid 77) is connected but has sent nothing since PING (last request" in text


def test_a_rank_that_two_claim_and_a_wait_that_is_nobodys(module_sockets: Path) -> None:
    with tcpstore_server("--host", "::") as server, RawPeer(server.port) as one, RawPeer(server.port) as two:
        for number, peer in enumerate((one, two)):
            peer.send(introduce((b"rank", b"1"), (b"pid", b"700000%d" % number)))
            peer.ping()
        one.send(b"\x06" + keys(b"/nobody knows") + b"\x0d" + b"abcd")
        one.read(4)
        done = run_command(server, "who", "--missing")
        lines = done.stdout.splitlines()
        assert "rank 1 is claimed by 2 processes: 127.0.0.1, pid 7000000; 127.0.0.1, pid 7000001" in lines
        assert lines[2:5] == [
            "no rank is missing from any pending barrier or key exchange; collectives do not pass through the store",
            "1 session is waiting: see 'tcpstore waiters'",
            "cannot tell whether the job hangs",
        ]
        assert done.exit_code == 1
        who = json.loads(run_command(server, "who", "-o", "json").stdout)
        assert {(one["rank"], one["known_by"], one["address"]) for one in who} == {(None, "", "127.0.0.1")}


def test_what_may_be_connected() -> None:
    pending = Pending("keys", "/pg/0", 0, 1, [0], [], 2, 7, 1.0, unidentified=1)
    assert list(_pending_lines(pending))[-2:] == [
        "  2 of them not connected",
        "  1 may be connected, but its connection is not known",
    ]


def test_waiters(server: Server) -> None:
    found = {one["key"]: one for one in json.loads(run_command(server, "waiters", "-o", "json").stdout)}
    assert found.keys() == {"step_8", "here"}
    near = found["step_8"]["nearest"][0]
    assert near["key"] == "step_5"
    assert near["by"].startswith("rank 0 (node")
    assert near["age"] >= 0
    assert set(found["step_8"]) >= {"key", "ranks", "since", "nearest"}
    text = run_command(server, "waiters").stdout
    assert "step_8: 1 waiting for" in text
    assert "  step_5 exists, written" in text


def test_clients(server: Server) -> None:
    found = json.loads(run_command(server, "clients", "-o", "json").stdout)
    assert [one["waits"] for one in found].count(True) == 2
    lines = run_command(server, "clients").stdout.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_another_path(server: Server, module_sockets: Path) -> None:
    path = module_sockets / f"{server.port}.sock"
    assert run_command(None, "who", "--admin", str(path)).stdout.startswith("RANK")


def fails(done: Result, text: str, status: int = 4) -> None:
    assert (done.exit_code, done.stdout) == (status, "")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_there_is_none() -> None:
    with tcpstore_server("--admin", "") as server:
        fails(run_command(server, "who"), f"there is no admin socket for port {server.port} in ")
    done = run_command(server, "who", "-o", "json")
    assert json.loads(done.stderr)["status"] == 4


def test_what_listens_instead() -> None:
    """The error was the same for a wrong port, a relay's and that of PyTorch's server."""
    url = f"tcp://127.0.0.1:{free_port()}"
    fails(run_command(None, "who", "--url", url), ": nothing listens on that port: check it")
    with tcpstore_server("--admin", "") as server:
        fails(run_command(server, "who"), f": pid {server.process.pid} (")
        fails(
            run_command(server, "who"), "listens there: check that it is a tcpstore_async server (PyTorch's cannot be"
        )
        with closing(RelayProcess(f"tcp://127.0.0.1:{server.port}")) as relay:
            url = f"tcp://127.0.0.1:{relay.port}"
            fails(run_command(None, "who", "--url", url), ") is a relay: ask its server")


def test_where_nothing_tells_what_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc the error said that nothing listens."""
    monkeypatch.setattr("tcpstore_async.tools.look.asking.PROC", Path("/nowhere"))
    monkeypatch.setattr("tcpstore_async.tools.look.asking.find_holder", lambda *_: None)
    fails(run_command(None, "who", "--url", "tcp://127.0.0.1:1"), ": check that what listens there is a tcpstore_async")


def test_another_machine() -> None:
    fails(run_command(None, "waiters", "--url", "tcp://192.0.2.1:1"), "192.0.2.1 is not an address of this machine")


def test_several_servers_of_one_port(module_sockets: Path, server: Server) -> None:
    with admin_path.listen(module_sockets / f"{server.port}-1.sock"):
        fails(run_command(server, "clients"), f"several servers use port {server.port}: choose one with --admin (")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fails(run_command(None, "who", "--admin", str(tmp_path / "file")), "cannot use the admin socket")
    fails(run_command(None, "who", "--admin", str(tmp_path / "none")), "is the server running?")


def test_the_server_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    done = run_command(None, "who", "--admin", str(tmp_path / "theirs"))
    fails(done, "belongs to another user: run the command as that user", 5)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with admin_path.listen(tmp_path / "silent"):
        done = run_command(None, "who", "--admin", str(tmp_path / "silent"), "--timeout", "0.05")
        fails(done, "no complete reply", 3)


def test_a_path_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tcpstore("serve", "--port", "0", "--admin", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"it exists and is not a socket" in done.stderr


def test_numbers_and_times_as_text() -> None:
    assert number_ranges([3, 1, 2, 7]) == "1-3, 7"
    assert number_ranges(list(range(0, 200, 2))).endswith("62 and 68 more ranges")
    assert [*map(in_seconds_or_more, (0.04, 99.0, 600.0, 9000.0))] == ["0.0 s", "99.0 s", "10 min", "2.5 h"]
