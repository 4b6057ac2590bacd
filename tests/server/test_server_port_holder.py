"""Who holds a port: read from /proc, of this machine and of one that is made up."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tcpstore_async
from support import LIMIT
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.port_holder import PROC, Holder, by_holder, find_holder

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc here"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the holder for as long as it takes, which is long on a busy machine."""
    monkeypatch.setattr(find_holder, "__defaults__", (PROC, LIMIT))


HOLD = """
import socket, sys
held = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def held(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A port that another process listens on, and that process."""
    command = [sys.executable, "-c", HOLD, request.param, "--held\x1b-by-me"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.communicate(timeout=LIMIT)


def test_the_error_names_the_process(held: tuple[int, int]) -> None:
    port, pid = held
    with pytest.raises(DistNetworkError) as caught:
        listen("127.0.0.1", port)
    text = str(caught.value)
    assert text.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use by pid {pid} ({sys.executable} ")
    assert text.isprintable()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_the_error_of_a_master_names_the_process(held: tuple[int, int], use_libuv: bool) -> None:
    port, pid = held
    with pytest.raises(DistNetworkError) as caught:
        tcpstore_async.TCPStore("localhost", port, is_master=True, use_libuv=use_libuv)
    assert f"; port {port} is in use by pid {pid} (" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_that_the_holder_does_not_have(held: tuple[int, int]) -> None:
    port, pid = held
    found = find_holder("127.0.0.2", port)
    assert found is None or found.pid == pid  # in the second case it listens on every address


def test_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"):
            assert str(find_holder(host, port)) == f"this process, pid {os.getpid()}"


def test_a_connection_that_uses_the_port() -> None:
    """As one does whose port the kernel has taken from the range for outgoing connections.

    From an address of its own: others' connections from 127.0.0.1 may have the same port.
    """
    mine = "127.0.0.77"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), LIMIT, (mine, 0)) as client,
    ):
        port = client.getsockname()[1]
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(DistNetworkError, match=f"in use by this process, .* for a connection to {where}"):
            listen(mine, port)


FREE_IT = (
    "close it, or drop all references to it, before another one takes its port, or share its server "
    r"\(multi_tenant=True for both\)$"
)


@pytest.mark.parametrize("use_libuv", [True, False])
@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_store_of_this_process(where: str, use_libuv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a group is made again on the port of one that was not destroyed."""
    monkeypatch.setenv("TCPSTORE_SERVER", where)
    with tcpstore_async.TCPStore("127.0.0.1", 0, None, True, LIMIT, use_libuv=use_libuv) as store:
        text = rf"; port {store.port} is in use by another store of this process, whose server is pid \d+: {FREE_IT}"
        with pytest.raises(DistNetworkError, match=text):
            tcpstore_async.TCPStore("127.0.0.1", store.port, None, True, LIMIT, use_libuv=use_libuv)
        port = store.port
    tcpstore_async.TCPStore("127.0.0.1", port, None, True, LIMIT, use_libuv=use_libuv).close()


def test_another_socket_of_this_process() -> None:
    with socket.create_server(("", 0)) as mine:
        port = mine.getsockname()[1]
        text = rf"; port {port} is in use by this process, pid {os.getpid()}: if it is a store, {FREE_IT}"
        with pytest.raises(DistNetworkError, match=text):
            tcpstore_async.TCPStore("127.0.0.1", port, None, True, LIMIT)


def test_other_errors_name_nobody() -> None:
    assert by_holder(OSError(errno.EACCES, "denied"), "127.0.0.1", 80) == ""
    assert by_holder(OSError(errno.EADDRINUSE, "in use"), "127.0.0.1", 0) == ""
    assert by_holder(OSError(errno.EADDRINUSE, "in use"), "no address", 80) == ""


# A machine that is made up

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
IS_LITTLE = sys.byteorder == "little"
LOOPBACK = "0100007F" if IS_LITTLE else "7F000001"
LOOPBACK_6 = "000000000000000000000000" + ("01000000" if IS_LITTLE else "00000001")
REST = "00000000:00000000 00:00000000 00000000"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    tables = {
        "tcp": [f"0: {LOOPBACK}:733C 00000000:0000 0A {REST}  1000  0 77 1 0\n"],
        "tcp6": [
            f"0: {LOOPBACK_6}:0050 {'0' * 32}:0000 0A {REST}     0  0 78 1 0\n",
            f"1: {LOOPBACK_6}:0051 {LOOPBACK_6}:0052 06 {REST}     0  0 0 1 0\n",  # TIME_WAIT
            f"2: {LOOPBACK_6}:0051 {LOOPBACK_6}:0053 01 {REST}     0  0 79 1 0\n",
        ],
    }
    for name, sockets in tables.items():
        (tmp_path / "net" / name).write_text(HEADER + "".join(sockets))
    (tmp_path / "4711" / "fd").mkdir(parents=True)
    (tmp_path / "4711" / "fd" / "3").symlink_to("socket:[77]")
    (tmp_path / "4711" / "cmdline").write_bytes(b"python\0train.py\0\x1b[2J" + b"x" * 500 + b"\0")
    (tmp_path / "self").mkdir()
    return tmp_path


def test_a_made_up_machine(proc: Path) -> None:
    found = find_holder("127.0.0.1", 29500, proc)
    assert found is not None
    assert (found.pid, found.uid, found.peer) == (4711, 1000, "")
    assert found.command.startswith("python train.py ?[2Jxxx")
    assert len(found.command) == 100
    assert find_holder("127.0.0.1", 29501, proc) is None
    assert find_holder("10.0.0.1", 29500, proc) is None


def test_a_program_on_the_command_line(proc: Path) -> None:
    (proc / "4711" / "cmdline").write_bytes(b"python\0-c\0\nimport sys\nsys.exit()\n\0-x\0")
    assert str(find_holder("0.0.0.0", 29500, proc)) == "pid 4711 (python -c import sys … -x)"


def test_a_process_of_another_user(proc: Path) -> None:
    assert find_holder("::", 80, proc) == Holder("", 0)


def test_a_process_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root is not told that it may not see it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert str(Holder("", 0)) == "a process of uid 0 that was not found (only that user, and root, can see which)"
    for user in (0, 1000):
        text = f"a process of uid {user} that was not found (it may be in another container)"
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert str(Holder("", user)) == text
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "another container" in str(Holder("", 1000))


def test_only_what_is_open_is_an_obstacle(proc: Path) -> None:
    assert find_holder("::1", 81, proc) == Holder("[::1]:83", 0)


def test_a_kernel_thread_or_a_renamed_process(proc: Path) -> None:
    (proc / "4711" / "cmdline").write_bytes(b"")
    (proc / "4711" / "comm").write_text("nfsd\n")
    assert str(find_holder("0.0.0.0", 29500, proc)) == "pid 4711 (nfsd)"
    (proc / "4711" / "cmdline").unlink()
    assert str(find_holder("0.0.0.0", 29500, proc)) == "pid 4711"


def test_there_may_be_no_time_and_no_proc(proc: Path, tmp_path: Path) -> None:
    assert find_holder("127.0.0.1", 29500, proc, seconds=-1) is None
    assert find_holder("127.0.0.1", 29500, tmp_path / "nowhere") is None
    (proc / "net" / "tcp").write_text("nonsense\n")
    assert find_holder("127.0.0.1", 29500, proc) is None
