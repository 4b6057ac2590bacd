"""The server of a master: addresses, sharing, given sockets, in a process and in a thread."""

import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.owner_programs import port_is_free, seen
from support import LIMIT, RawPeer, alarms, run_python
from tcpstore_async import TCPStore
from tcpstore_async.base.errors import DistNetworkError, DistStoreError
from tcpstore_async.server import listen_socket, master
from tcpstore_async.server.listen_socket import BACKLOG, DEFER_ACCEPT
from tcpstore_async.server.master import ServerHandle, host
from tcpstore_async.server.process import parent

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted, pytest.mark.needs_proc]

IN_USE = (
    "The server socket has failed to listen on any local network address. port: {}, useIpv6: false, "
    "code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.fixture(params=["process", "thread"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    place: str = request.param
    monkeypatch.setenv("TCPSTORE_SERVER", place)
    return place


def serves(hosted: ServerHandle, address: str = "127.0.0.1") -> bool:
    """Return whether it can be reached there."""
    try:
        with socket.create_connection((address, hosted.port), LIMIT) as peer:
            peer.sendall(bytes.fromhex("00cef7853c 0d01020304"))
            return peer.recv(4) == bytes([1, 2, 3, 4])
    except (ConnectionRefusedError, ConnectionResetError):  # it may stop listening in the middle of the handshake
        return False


def test_a_server(where: str) -> None:
    hosted = host(0)
    assert (hosted.pid == os.getpid()) == (where == "thread")
    assert hosted.backend == "uv"
    assert not hosted.shared
    hosted.announce(1)
    with RawPeer(hosted.port) as peer:
        peer.ping()
        hosted.complete()
    hosted.release()
    assert port_is_free(hosted.port)
    hosted.release()
    hosted.announce(1)
    hosted.complete()


def test_it_runs_in_a_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCPSTORE_SERVER", raising=False)
    hosted = host(0)
    assert hosted.pid != os.getpid()
    hosted.release()


@pytest.mark.parametrize("value", ["Process", "threads", "0", " "])
def test_an_unknown_place_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER", value)
    with pytest.raises(ValueError, match=f"^TCPSTORE_SERVER must be process or thread, not '{value}'$"):
        host(0)


def test_another_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^unknown backend 'gloo'; choose uv or threaded$"):
        host(0, backend="gloo")


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(ValueError, match=r"^port must be from 0 to 65535"):
        host(port)


def test_twenty_times_on_one_port(where: str) -> None:
    port = 0
    for _ in range(20):
        hosted = host(port)
        port = hosted.port
        assert serves(hosted)
        hosted.release()
    assert port_is_free(port)


def test_a_thread_closes_every_connection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER", "thread")
    hosted = host(0)
    with RawPeer(hosted.port) as peer:
        peer.ping()
        hosted.release()
        assert peer.closed()


def test_many_threads_host_at_once(where: str) -> None:
    def run() -> None:
        hosted = host(0)
        good.append(serves(hosted))
        hosted.release()
        good.append(port_is_free(hosted.port))

    good: list[bool] = []
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert good == [True] * 16


def test_dropping_it_releases_it(where: str) -> None:
    hosted = host(0)
    port = hosted.port
    del hosted
    gc.collect()
    assert port_is_free(port)


# Addresses


def test_it_listens_on_every_address_of_both_families(where: str) -> None:
    hosted = host(0)
    assert serves(hosted, "127.0.0.1")
    assert serves(hosted, "127.0.0.2")
    if socket.has_ipv6:
        assert serves(hosted, "::1")
    hosted.release()


def test_without_ipv6_it_listens_on_ipv4(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_at(family: int, address: listen_socket.Address) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, address)

    real = listen_socket.listen_at
    monkeypatch.setattr(master, "listen_at", listen_at)
    hosted = host(0)
    assert serves(hosted, "127.0.0.1")
    assert not serves(hosted, "::1")
    hosted.release()


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_an_exact_address(by: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "variable":
        monkeypatch.setenv("TCPSTORE_BIND", "127.0.0.2")
    hosted = host(0, bind_host="127.0.0.2" if by == "argument" else None)
    assert serves(hosted, "127.0.0.2")
    assert not serves(hosted, "127.0.0.1")
    with pytest.raises(DistNetworkError) as caught:
        host(hosted.port, bind_host="127.0.0.2")
    assert str(caught.value).startswith(IN_USE.format(hosted.port))
    hosted.release()


def test_the_argument_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_BIND", "127.0.0.2")
    hosted = host(0, bind_host="127.0.0.3")
    assert serves(hosted, "127.0.0.3")
    assert not serves(hosted, "127.0.0.2")
    hosted.release()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(DistNetworkError, match=r"port: 0, .*, code: -99, name: EADDRNOTAVAIL, message: cannot assign"):
        host(0, bind_host="192.0.2.1")


@pytest.mark.parametrize("first", [False, True], ids=["first not shared", "first shared"])
@pytest.mark.parametrize("second", [False, True], ids=["second not shared", "second shared"])
def test_a_port_in_use(first: bool, second: bool) -> None:
    holder = host(0, multi_tenant=first)
    if first and second:
        host(holder.port, multi_tenant=True).release()
    else:
        with pytest.raises(DistNetworkError) as caught:
            host(holder.port, multi_tenant=second)
        assert str(caught.value).startswith(IN_USE.format(holder.port))
    assert serves(holder)
    holder.release()
    host(holder.port, multi_tenant=second).release()


# Sharing


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_shared_server_ends_with_its_last_holder(order: tuple[int, ...], where: str) -> None:
    first = host(0, multi_tenant=True)
    holders = [first, host(first.port, multi_tenant=True), host(first.port, multi_tenant=True)]
    assert all(holder.shared for holder in holders)
    assert len({(holder.port, holder.pid) for holder in holders}) == 1
    for i in order:
        assert serves(first)
        holders[i].release()
        holders[i].release()
    assert port_is_free(first.port)
    again = host(first.port, multi_tenant=True)
    assert serves(again)
    again.release()


def test_port_0_is_never_shared() -> None:
    one, other = host(0, multi_tenant=True), host(0, multi_tenant=True)
    assert one.port != other.port
    one.release()
    assert serves(other)
    other.release()


def test_a_shared_server_that_crashed_is_not_shared_further() -> None:
    first = host(0, multi_tenant=True)
    with seen(first.pid) as process:
        process.signal(signal.SIGKILL)
        assert process.ended()
    second = host(first.port, multi_tenant=True)
    assert second.pid != first.pid
    first.release()
    third = host(first.port, multi_tenant=True)
    assert third.pid == second.pid
    second.release()
    assert serves(third)
    third.release()
    assert port_is_free(first.port)


def test_many_threads_share_one() -> None:
    def run() -> None:
        hosted = host(first.port, multi_tenant=True)
        pids.append(hosted.pid)
        hosted.release()

    pids: list[int] = []
    first = host(0, multi_tenant=True)
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert pids == [first.pid] * 8
    assert serves(first)
    first.release()


# quirk: shared-bind-host
def test_a_server_of_another_address_is_not_shared(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = host(0, multi_tenant=True)
    with pytest.raises(DistNetworkError) as caught:
        host(everywhere.port, multi_tenant=True, bind_host="127.0.0.2")
    assert str(caught.value) == (
        f"cannot share the server on port {everywhere.port}: it listens on ::, but this store asks for 127.0.0.2; "
        "use the same bind_host (or TCPSTORE_BIND), or another port"
    )
    for same in ("::", "0.0.0.0"):
        host(everywhere.port, multi_tenant=True, bind_host=same).release()
    assert serves(everywhere)
    everywhere.release()
    exact = host(0, multi_tenant=True, bind_host="127.0.0.2")
    with pytest.raises(DistNetworkError, match=r"it listens on 127\.0\.0\.2, but this store asks for ::;"):
        host(exact.port, multi_tenant=True)
    host(exact.port, multi_tenant=True, bind_host="127.0.0.2").release()
    monkeypatch.setenv("TCPSTORE_BIND", "127.0.0.2")
    host(exact.port, multi_tenant=True).release()
    assert serves(exact, "127.0.0.2")
    exact.release()


# Sockets from elsewhere


def bound(family: int = socket.AF_INET, *, listening: bool = False) -> tuple[int, int]:
    """Return the descriptor and port of a socket without an owner."""
    given = socket.socket(family)
    given.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    if listening:
        given.listen(1)
    port: int = given.getsockname()[1]
    return given.detach(), port


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("listening", [False, True], ids=["bound", "listening"])
@pytest.mark.parametrize("exact", [False, True], ids=["port 0", "its port"])
def test_a_socket_from_elsewhere(where: str, family: int, listening: bool, exact: bool) -> None:
    fd, port = bound(family, listening=listening)
    hosted = host(port if exact else 0, listen_fd=fd)
    assert hosted.port == port
    assert serves(hosted, "127.0.0.1" if family == socket.AF_INET else "::1")
    hosted.release()
    assert port_is_free(port)


def test_a_socket_from_elsewhere_is_shared() -> None:
    fd, port = bound()
    first = host(port, listen_fd=fd, multi_tenant=True)
    another, another_port = bound()
    with pytest.raises(DistStoreError):
        host(port, listen_fd=another, multi_tenant=True)
    assert another_port
    second = host(port, multi_tenant=True)
    assert second.pid == first.pid
    first.release()
    second.release()
    assert port_is_free(port)


def test_a_socket_with_another_port() -> None:
    fd, port = bound()
    with pytest.raises(DistStoreError) as caught:
        host(port - 1, listen_fd=fd)
    assert str(caught.value) == f"listen fd {fd} is bound to port {port}, expected to be bound to port {port - 1}"
    assert not is_open(fd)


OPEN = "Failed to open existing socket. socket: {}, code: "


def no_socket() -> int:
    return os.open(os.devnull, os.O_RDWR)


def a_connection() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()).detach()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: 9999, OPEN + "-9, name: EBADF, message: bad file descriptor"),
        (lambda: -1, OPEN + "-9, name: EBADF, message: bad file descriptor"),
        (no_socket, OPEN + "-88, name: ENOTSOCK, message: socket operation on non-socket"),
        (lambda: socket.socket(socket.AF_UNIX).detach(), OPEN + "-9"),
        (lambda: socket.socket(type=socket.SOCK_DGRAM).detach(), OPEN + "-9"),
        (
            a_connection,
            "The server socket has failed to listen on provided socket. socket: {}, code: -22, name: EINVAL, "
            "message: invalid argument",
        ),
    ],
)
def test_what_cannot_be_listened_on(make: Callable[[], int], text: str) -> None:
    fd = make()
    with pytest.raises(DistNetworkError) as caught:
        host(0, listen_fd=fd)
    assert str(caught.value).startswith(text.format(fd))
    assert is_open(fd) == (make is no_socket), "that is not ours"
    if is_open(fd):
        os.close(fd)


def test_a_socket_in_place_of_a_standard_stream() -> None:
    text = """
import os, socket
from tcpstore_async.server.master import host
with socket.create_server(("127.0.0.1", 0)) as given:
    os.dup2(given.fileno(), 0)
hosted = host(0, listen_fd=0)
socket.create_connection(("127.0.0.1", hosted.port)).close()
hosted.release()
print("good")
"""
    assert run_python(text) == "good\n"


# Where no process can be started


def test_fallback_to_a_thread_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(master, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"no Python interpreter .* thread: .* 5 ms .* TCPSTORE_SERVER=thread"):
        first = host(0)
    assert first.pid == os.getpid()
    assert serves(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = host(0)
    assert serves(second)
    first.release()
    second.release()
    assert port_is_free(first.port)


def test_the_warning_as_an_error_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(master, "_warned", False)
    fd, port = bound()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            host(port, listen_fd=fd)
    assert not is_open(fd)
    assert port_is_free(port)


@pytest.mark.unmeasured
def test_interrupted_while_it_starts_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_PROGRAM", "import time; time.sleep(1000)")
    fd, port = bound()
    with pytest.raises(KeyboardInterrupt), alarms(signal.default_int_handler, 0.2):
        host(port, listen_fd=fd)
    assert port_is_free(port)


# A start that takes long


@pytest.fixture
def slow_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that starts once a file exists."""
    wrapper, go_on = tmp_path / "python", tmp_path / "go on"
    wrapper.write_text(f'#!/bin/sh\nwhile [ ! -e "{go_on}" ]; do sleep 0.02; done\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    return go_on


@pytest.mark.parametrize("may_be_thread", [True, False])
# quirk: constructor-timeout
def test_a_start_has_no_more_time_than_its_caller(slow_python: Path, may_be_thread: bool) -> None:
    """There is no fallback to a thread: its time is up as well."""
    fd, port = bound()
    with pytest.raises(DistNetworkError, match=rf"server process for port {port}: not ready within 0\.3 s; give"):
        host(port, listen_fd=fd, timeout=0.3, may_be_thread=may_be_thread)
    assert port_is_free(port), "what was started is killed"


def test_a_store_whose_server_starts_too_slowly(slow_python: Path) -> None:
    with pytest.raises(DistNetworkError, match=r"not ready within"):
        TCPStore("127.0.0.1", 0, is_master=True, timeout=0.3)


@pytest.mark.parametrize("timeout", [None, 2 * LIMIT])
# quirk: constructor-timeout
def test_a_start_has_all_the_time_of_its_caller(
    slow_python: Path, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "START_TIMEOUT", 0.1)
    threading.Timer(0.5, slow_python.touch).start()
    hosted = host(0, timeout=timeout)
    assert hosted.pid != os.getpid()
    assert serves(hosted)
    hosted.release()


def test_a_wait_for_another_threads_shared_server_ends_in_time() -> None:
    def hold() -> None:
        with master._shared_lock:
            held.set()
            assert over.wait(LIMIT)

    held, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    with pytest.raises(DistNetworkError, match=r"timed out after 0\.05 s: another store in this process"):
        host(0, multi_tenant=True, timeout=0.05)
    over.set()
    thread.join()
    host(0, multi_tenant=True, timeout=LIMIT).release()


# Forks

FORKED = """
import os, signal, socket, sys
from tcpstore_async.server.master import host
hosted = host(0, multi_tenant=True)
peer = socket.create_connection(("127.0.0.1", hosted.port), 60)
peer.sendall(bytes.fromhex("00cef7853c 0d01020304"))
assert len(peer.recv(4)) == 4
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    signal.alarm(60)
    peer.close()
    hosted.release()
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
peer.sendall(bytes.fromhex("0d01020304"))
assert len(peer.recv(4)) == 4
hosted.release()
with socket.create_server(("127.0.0.1", hosted.port)):
    pass
peer.settimeout(60)
if sys.argv[1] == "thread":
    assert peer.recv(1) == b""
peer.close()
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)
print("good")
"""


@pytest.mark.unmeasured
def test_a_forked_worker_holds_nothing(where: str) -> None:
    assert run_python(FORKED, where) == "good\n"


AT_EXIT = """
from tcpstore_async.server.master import host
hosted = host(0)
print(hosted.port)
"""


def test_the_end_of_the_interpreter_releases_it(where: str) -> None:
    assert port_is_free(int(run_python(AT_EXIT)))


# PyTorch's client


def test_the_backlog_is_that_of_a_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Socket(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            asked.append(backlog)
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Socket)
    host(0).release()
    assert asked == [BACKLOG]


def test_only_a_socket_of_its_own_is_told_to_hold_connections(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[object] = []

    class Socket(socket.socket):
        def setsockopt(self, level: int, option: int, *value: Any) -> None:
            if (level, option) == (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT):
                seconds.extend(value)
            super().setsockopt(level, option, *value)

    monkeypatch.setattr(socket, "socket", Socket)
    host(0, listen_fd=bound()[0]).release()
    assert seconds == []
    host(0).release()
    assert seconds == [DEFER_ACCEPT]
