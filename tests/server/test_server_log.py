"""The log of a server process, and how the process ended, reach its owner's logging."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from faults.fault_helpers import until
from faults.owner_programs import seen
from support import LIMIT, RawPeer, blob, run_python, u64
from tcpstore_async import DistNetworkError, DistStoreError, TCPStore
from tcpstore_async.server import listen_socket, master
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.master import host
from tcpstore_async.server.process import log_reader, parent
from tcpstore_async.server.process.parent import ServerProcess, start
from tcpstore_async.server.process.pidfd import Process
from tcpstore_async.server.process.protocol import LogLine, encode

pytestmark = [pytest.mark.slow, pytest.mark.interpreted, pytest.mark.needs_proc]


@pytest.fixture
def server(backend: str) -> Iterator[ServerProcess]:
    server = start(listen("::", 0), backend=backend)
    yield server
    server.stop()


@pytest.fixture(params=["uv", "threaded"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Return what the server has logged so far."""
    records = [record for record in caplog.records if record.name == "tcpstore_async.server"]
    return [record.getMessage() for record in records if record.levelno == level]


OFFENCES = {
    "key_bytes": b"\x03" + u64(8193),
    "value_bytes": b"\x01" + blob(b"k") + u64((8 << 20) + 1),
    "limit exceeded: keys": b"\x05" + u64((128 << 10) + 1),
    "unknown opcode 200": b"\xc8",
}


@pytest.mark.parametrize("said", OFFENCES)
# quirk: server-log
def test_what_a_peer_did_wrong(said: str, server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with RawPeer(server.port) as peer:
        peer.ping(123)
        peer.send(OFFENCES[said])
        assert peer.closed()
    until(lambda: lines(caplog, logging.WARNING), "it is logged here")
    (line,) = lines(caplog, logging.WARNING)
    assert said in line
    assert "pid 123" in line


def test_the_listening_address_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT) as store:
        pass
    assert any(f":{store.port}, up to" in line for line in lines(caplog, logging.INFO))
    assert not lines(caplog, logging.ERROR)
    assert not lines(caplog, logging.WARNING)


DEATHS = [(signal.SIGSEGV, "crashed: Fatal Python error: Segmentation fault"), (signal.SIGKILL, "was killed")]


@pytest.mark.parametrize(("number", "said"), DEATHS)
# quirk: server-crash
def test_a_server_that_dies_is_one_error_line(
    number: signal.Signals, said: str, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with seen(server.pid) as process, RawPeer(server.port) as peer:
        peer.ping()
        process.signal(number)
        assert peer.closed()
        until(lambda: lines(caplog, logging.ERROR), "it is logged at once")
    (line,) = lines(caplog, logging.ERROR)
    assert line.startswith(server.crash())
    assert "File " not in server.crash()  # the stack is in the log only
    server.stop()
    assert lines(caplog, logging.ERROR) == [line]
    assert f"the server process for port {server.port} (pid {server.pid}) {said}" in line
    assert "\n" not in line
    assert not lines(caplog, logging.WARNING)


@pytest.mark.parametrize("noticed", [False, True], ids=["by the call", "before the call"])
@pytest.mark.parametrize(("number", "said"), DEATHS)
# quirk: server-crash
def test_rank_0s_next_call_says_of_what_its_server_died(
    number: signal.Signals, said: str, noticed: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "_LOG_TIMEOUT", LIMIT)  # a busy machine
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, use_libuv=backend == "uv") as store,
        TCPStore("127.0.0.1", store.port, timeout=LIMIT) as other,
    ):
        client, hosted = store._client, store._hosted
        assert client is not None
        assert hosted is not None
        if noticed:  # a store without calls is not watched
            store.set("key", "value")
        with seen(hosted.pid) as process:
            process.signal(number)
            assert process.ended()
        if noticed:
            until(lambda: client._lost, "the loss is noticed")
        cause = f": the server process for port {store.port} (pid {hosted.pid}) {said}"
        for _ in range(2):
            with pytest.raises(DistNetworkError) as raised:
                store.get("key")
            assert cause in str(raised.value)
        with pytest.raises(DistNetworkError) as raised:
            other.get("key")
        assert cause not in str(raised.value)


FEW_FILES = ("prlimit", "--nofile=150:150")

ADOPTED = """
import ctypes, logging, os, signal, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: as the first process of a container is
from tcpstore_async.server.master import host
logging.basicConfig(stream=sys.stdout, format="%(message)s")
hosted = host(0)
pid = hosted.pid
os.kill(pid, signal.SIGKILL)
hosted.release()
try:
    os.waitpid(pid, os.WNOHANG)
except ChildProcessError:
    print("none left")
"""


# quirk: os-wait
def test_an_owner_that_adopts_its_server_waits_for_it_and_hears_of_what_it_died() -> None:
    done = run_python(ADOPTED)
    assert "was killed by SIGKILL" in done
    assert done.endswith("none left\n")


# Capacity

WORLD = """
import logging, sys, time
from tcpstore_async import TCPStore, DistStoreError
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
began = time.monotonic()
try:
    TCPStore("127.0.0.1", 0, int(sys.argv[1]), True, 600)
except DistStoreError as error:
    print("raised", error)
print("soon" if time.monotonic() - began < 300 else "late")
"""


@pytest.mark.parametrize("where", ["process", "thread"])
# quirk: open-files
def test_a_world_that_does_not_fit_is_an_error_at_once(where: str) -> None:
    logged, raised, soon = run_python(WORLD, 100, prefix=FEW_FILES, TCPSTORE_SERVER=where).splitlines()
    assert logged.startswith("ERROR the server on port ")
    assert raised.removeprefix("raised ") == logged.removeprefix("ERROR ")
    assert ("ulimit -Hn: 150" if where == "process" else "ulimit -Sn: 150") in raised
    assert soon == "soon"


def test_a_world_that_is_not_waited_for_is_logged_too() -> None:
    said = run_python(NOT_WAITED_FOR, 100, prefix=FEW_FILES).splitlines()
    assert said[0].startswith("ERROR the server on port ")
    assert said[1:] == ["made"]


NOT_WAITED_FOR = """
import logging, sys
from tcpstore_async import TCPStore
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", level=logging.ERROR)
with TCPStore("127.0.0.1", 0, int(sys.argv[1]), True, 60, wait_for_workers=False):
    print("made")
"""


def test_with_the_limit_that_it_names_the_world_fits() -> None:
    said = run_python(ANNOUNCES, 100, prefix=FEW_FILES)
    needed = re.search(r"a limit of at least (\d+)", said)
    assert needed
    assert run_python(ANNOUNCES, 100, prefix=("prlimit", f"--nofile={needed[1]}:{needed[1]}")) == "fits\n"
    assert "cannot accept 100 ranks" in run_python(ANNOUNCES, 100, prefix=("prlimit", f"--nofile={int(needed[1]) - 1}"))


ANNOUNCES = """
import logging, sys
from tcpstore_async.server.master import host
logging.basicConfig(stream=sys.stdout)
hosted = host(0)
try:
    hosted.announce(int(sys.argv[1]))
    print("fits")
except RuntimeError as error:
    print(error)
hosted.release()
"""


def test_the_capacity_is_that_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = host(0)
    capacity = hosted._counted.server.max_connections
    assert capacity > 10
    with pytest.raises(DistStoreError, match=f"cannot accept {capacity + 1} ranks"):
        hosted.announce(capacity + 1)
    monkeypatch.setattr(master, "log_short_backlog", lambda ranks: None)
    hosted.announce(capacity)
    hosted.release()


@pytest.mark.parametrize(("ranks", "level"), [(None, "DEBUG"), (128, None), (129, "WARNING")])
def test_a_short_backlog_is_warned_of_if_the_world_is_larger(
    ranks: int | None, level: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(Path, "read_text", lambda path: "128\n")
    listen_socket.log_short_backlog(ranks)
    assert [record.levelname for record in caplog.records] == ([] if level is None else [level])


SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


@pytest.mark.parametrize("waits", [True, False], ids=["is waited for", "is not waited for"])
@pytest.mark.parametrize(("ranks", "warned"), [(128, False), (129, True)])
def test_rank_0_warns_of_a_backlog_that_is_shorter_than_its_world(
    ranks: int, warned: bool, waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *how: "128\n" if path == SOMAXCONN else read(path, *how))
    with pytest.raises(DistStoreError, match=r"^Timed out after 0 seconds") if waits else nullcontext():
        TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=0, wait_for_workers=waits).close()
    text = f"net.core.somaxconn is 128, but {ranks} ranks are expected: connections may be reset"
    assert [line.startswith(text) for line in lines(caplog, logging.WARNING)] == [True] * warned


SERVES = f"""
import pathlib, sys
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *how: "128" if str(path) == {str(SOMAXCONN)!r} else read(path, *how)
from tcpstore_async.cli import main
main(["serve", "--port", "0", "--log-level", sys.argv[1]])
"""


@pytest.mark.parametrize(("level", "said"), [("info", []), ("debug", ["DEBUG"])])
def test_a_server_that_knows_of_no_world_does_not_speak_of_a_short_backlog(level: str, said: list[str]) -> None:
    """Most jobs are small: only for debugging does it say what would be wrong for a large one."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, level], cwd=tempfile.gettempdir(), stdout=pipe, stderr=pipe
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it is ready"
            process.send_signal(signal.SIGINT)
            logged = process.communicate(timeout=LIMIT)[1].decode()
        finally:
            process.kill()
    assert re.findall(r"(?m)^.* ([A-Z]+) net\.core\.somaxconn is 128: ", logged) == said
    assert "WARNING" not in logged


# What it costs


def usage() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and children of this process."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children.stdout.split())


def test_thirty_servers_leave_nothing() -> None:
    host(0).release()
    before = usage()
    for _ in range(30):
        host(0).release()
    assert usage() == before


def test_a_server_in_its_grace_is_logged_until_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host(0).release()
    before = usage()
    server = start(listen("::", 0), grace=0.2)
    with RawPeer(server.port) as peer:
        peer.ping()
        server.stop()
        assert peer.closed()
    until(
        lambda: any("closing 1 connection still open" in line for line in lines(caplog, logging.INFO)),
        "its last line is logged",
    )
    until(lambda: threading.active_count() == before[1], "the thread has ended")
    del server
    assert usage() == before
    assert not lines(caplog, logging.ERROR)


WAITS_FOR_ALL = """
import os, signal
from tcpstore_async.server.master import host
signal.alarm(60)
hosted = host(0)
for _ in range(2):
    if os.fork() == 0:
        os._exit(0)
count = 0
try:
    while True:
        os.wait()
        count += 1
except ChildProcessError:
    print(count)
print(hosted._counted.server.alive())
hosted.release()
"""


# quirk: os-wait
def test_an_owner_may_wait_for_all_its_children() -> None:
    assert run_python(WAITS_FOR_ALL) == "2\nTrue\n"


# Forks


class Slow(logging.Handler):
    """A handler that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.inside = True
        self.entered.set()
        self.go_on.wait(LIMIT)
        self.inside = False


@pytest.fixture
def slow() -> Iterator[Slow]:
    handler = Slow()
    log_reader.log.addHandler(handler)
    yield handler
    log_reader.log.removeHandler(handler)
    handler.go_on.set()


def forked() -> int:
    """Fork; return the child's exit status: 0 if no thread held the lock and it can log, else 1."""
    pid = os.fork()
    if pid == 0:
        handler = next(one for one in log_reader.log.handlers if isinstance(one, Slow))
        inside = handler.inside
        handler.go_on.set()
        with log_reader._logging:
            os._exit(1 if inside else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_fork_happens_while_a_line_is_logged(slow: Slow) -> None:
    server = start(listen("::", 0))
    with RawPeer(server.port) as peer:
        peer.send(b"\xc8")
        assert peer.closed()
    assert slow.entered.wait(LIMIT)
    threading.Timer(0.2, slow.go_on.set).start()
    assert forked() == 0
    server.stop()


def test_a_handler_that_hangs_does_not_hold_up_forks_for_long(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_FORK_TIMEOUT", 0.05)
    server = start(listen("::", 0))
    with RawPeer(server.port) as peer:
        peer.send(b"\xc8")
        assert peer.closed()
    assert slow.entered.wait(LIMIT)
    assert forked() == 1
    slow.go_on.set()
    assert forked() == 0
    server.stop()


# The socket between them


def test_what_is_no_record_is_logged_when_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_reader, "_END_TIMEOUT", 0.0)
    ours, theirs = socket.socketpair()
    log = log_reader.LogReader(ours, Process(os.getpid(), None), 29500)
    with theirs:
        theirs.sendall(b"stray\n words\n")
        theirs.sendall(encode(LogLine(logging.WARNING, "tcpstore_async.server", "a record")))
        theirs.sendall(encode(LogLine(over=True)))
    log.join(LIMIT)
    assert lines(caplog, logging.WARNING) == ["the server process for port 29500 wrote: stray; words", "a record"]
    assert not lines(caplog, logging.ERROR)
