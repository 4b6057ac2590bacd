"""Connecting: the deadline is kept whatever a resolver or a peer does, and the error names the cause."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from client.fakes import STOCK, exactly, fake_server, greet
from support import LIMIT, free_port, run_python, tcpstore_server
from tcpstore_async import AsyncTCPStore, DistNetworkError, DistStoreError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.client.connect import _Tries, keep_alive
from tcpstore_async.client.servers import Servers

pytestmark = pytest.mark.interpreted

MARGIN = 5.0
"""Seconds over the deadline that a busy machine may take; usually it is some milliseconds, which `-s` shows."""


async def _connect_and_close(host: str, port: int, timeout: float) -> None:
    await (await AsyncTCPStore.connect(host, port, timeout=timeout)).close()


def connect_async(host: str, port: int, timeout: float) -> None:
    asyncio.run(_connect_and_close(host, port, timeout))


def connect(host: str, port: int, timeout: float) -> None:
    TCPStore(host, port, timeout=timeout).close()


both = pytest.mark.parametrize("how", [connect, connect_async])
How = Callable[..., None]


def fails_in_time(how: How, host: str, port: int, cause: str, timeout: float = 0.3) -> None:
    began = time.monotonic()
    with pytest.raises(DistNetworkError) as caught:
        how(host, port, timeout)
    spent = time.monotonic() - began
    print(f"{how.__name__} {host}: {1000 * (spent - timeout):.0f} ms over")
    text = str(caught.value)
    assert text.startswith(
        f"The client socket has timed out after {timeout * 1000:.0f}ms while trying to connect to ({host}, {port})."
    )
    assert " s; last error: " in text
    assert cause in text.partition("last error: ")[2]
    assert spent < timeout + MARGIN


@pytest.fixture
def unused() -> Iterator[int]:
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture(autouse=True)
def names_of_peers_are_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("a reverse look-up")

    for name in ("getnameinfo", "gethostbyaddr", "getfqdn"):
        monkeypatch.setattr(socket, name, refuse)


@both
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_listens(how: How, host: str, unused: int) -> None:
    fails_in_time(how, host, unused, "refused" if host == "127.0.0.1" else "")


@pytest.mark.parametrize(("seconds", "cause"), [(0.02, "[Rr]efused"), (10.0, "no answer")])
def test_a_last_try_of_little_time_does_not_hide_why_others_failed(seconds: float, cause: str) -> None:
    tries = _Tries(Servers(("host", 1)), Deadline(60.0), False)
    tries.limit()
    tries.after(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))
    tries.deadline = Deadline(60.0, time.monotonic() - 60.0 + seconds)
    tries.limit()
    tries.deadline = Deadline(60.0, time.monotonic() - 60.0)
    with pytest.raises(DistNetworkError, match=f"last error: .*{cause}"):
        tries.after(TimeoutError())


@both
def test_nobody_accepts(how: How) -> None:
    """A full backlog: the kernel drops connection attempts, as a black hole does."""
    with full(socket.AF_INET) as port:
        fails_in_time(how, "127.0.0.1", port, "no answer")


@both
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_peer_that_never_answers(how: How, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fails_in_time(how, host, listener.getsockname()[1], "no answer")


@both
def test_a_resolver_that_hangs(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(LIMIT) and [])
    try:
        fails_in_time(how, "hangs.invalid", 1, "no answer")
    finally:
        released.set()


@both
def test_a_name_that_does_not_exist(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    fails_in_time(how, "dnsnotexist", 1, "Name or service not known")


@both
def test_a_timeout_of_0_is_one_try(how: How, unused: int) -> None:
    with pytest.raises(DistNetworkError, match="timed out after 0ms"):
        how("127.0.0.1", unused, 0)
    with tcpstore_server() as server:
        how("127.0.0.1", server.port, 0)
        how("localhost", server.port, 0)


@both
def test_what_may_pass_is_tried_again(how: How) -> None:
    """Two peers that close and one of a wrong nonce, then a server."""
    peers = iter(["close", "nonce", "close", "garbage"])

    def talk(peer: socket.socket) -> None:
        ticket = next(peers, "server")
        if ticket == "server":
            greet(peer)
            peer.recv(1)
        elif ticket != "close":
            exactly(peer, 10)
            peer.sendall(b"\0\0\0\0" if ticket == "nonce" else b"220 smtp ready\r\n")

    with fake_server(talk) as fake:
        how("127.0.0.1", fake.port, LIMIT)
        assert fake.connections == 5


@both
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_comes_up_late(how: How, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts when it has been tried in vain."""
    port, after = free_port(), _Tries.after
    with ExitStack() as stack:

        def start(tries: _Tries, error: Exception) -> float:
            monkeypatch.setattr(_Tries, "after", after)
            stack.enter_context(tcpstore_server("--port", str(port)))
            return after(tries, error)

        monkeypatch.setattr(_Tries, "after", start)
        how(host, port, LIMIT)
        assert _Tries.after is after


@pytest.mark.needs_proc
@both
@pytest.mark.parametrize("there", ["127.0.0.1", "::1"])
def test_a_name_of_both_families(how: How, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one address has a server; the other refuses, or is a black hole."""
    family = socket.AF_INET6 if there == "::1" else socket.AF_INET
    if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6")
    with (
        tcpstore_server("--host", there) as server,
        full(socket.AF_INET if family == socket.AF_INET6 else socket.AF_INET6) as hole,
    ):
        real = socket.getaddrinfo

        def both_families(host: str, port: int, *args: Any, **options: Any) -> Any:
            if host != "two.invalid":
                return real(host, port, *args, **options)
            found = []
            for kind, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")):
                where = server.port if address == there else hole
                rest = (0, 0) if kind == socket.AF_INET6 else ()
                found.append((kind, socket.SOCK_STREAM, 6, "", (address, where, *rest)))
            return found

        monkeypatch.setattr(socket, "getaddrinfo", both_families)
        began = time.monotonic()
        how("two.invalid", server.port, LIMIT)
        assert time.monotonic() - began < LIMIT / 2


@contextmanager
def full(family: int) -> Iterator[int]:
    """A port with a full backlog, where nothing accepts."""
    address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((address, 0), family=family, backlog=0) as listener:
        waiting = [socket.socket(family) for _ in range(3)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            yield listener.getsockname()[1]
        finally:
            for one in waiting:
                one.close()


@both
@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"])
def test_literal_addresses_are_not_looked_up(how: How, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def numeric_only(*args: Any, **options: Any) -> Any:
        assert options.get("flags", 0) & socket.AI_NUMERICHOST or (len(args) > 5 and args[5] & socket.AI_NUMERICHOST)
        return real(*args, **options)

    with tcpstore_server("--host", "::") as server:
        monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
        how(host, server.port, LIMIT)


@both
def test_brackets_around_an_address(how: How) -> None:
    """As in URLs, where programs cut addresses from. What else is in brackets is a name, and none that there can be."""
    with tcpstore_server("--host", "::1") as server:
        how("[::1]", server.port, LIMIT)
    fails_in_time(how, "[localhost]", 1, "")


@both
def test_hosts_that_cannot_be_meant(how: How) -> None:
    for host in (None, 5, b"localhost"):
        with pytest.raises(TypeError, match=r"^host(_name)? must be a str"):
            how(host, 1, 1)
    with pytest.raises(ValueError, match=r"^host(_name)? must not contain NUL"):
        how("local\0host", 1, 1)
    for port in (-1, 65536):
        with pytest.raises(TypeError, match=r"^port must be from 0 to 65535"):
            how("127.0.0.1", port, 1)
    for wrong in ("1", 1.5, None):
        with pytest.raises(TypeError, match=r"^port must be an int"):
            how("127.0.0.1", wrong, 1)
    fails_in_time(how, "a" * 64 + ".invalid", 1, "is not a valid host name")
    fails_in_time(how, "127.0.0.1", 0, "")


@pytest.mark.needs_proc
@both
def test_nothing_is_left_of_what_failed(how: How, unused: int) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(DistNetworkError):
                how(host, unused, 0.05)
    end = time.monotonic() + LIMIT
    while (threading.active_count(), len(os.listdir("/proc/self/fd"))) != before:
        assert time.monotonic() < end
        time.sleep(0.001)


async def test_a_caller_inside_a_loop() -> None:
    """The synchronous client in a coroutine blocks its loop, but works."""
    with tcpstore_server() as server, TCPStore("localhost", server.port, timeout=LIMIT) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"


async def test_connecting_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for host in ("127.0.0.1", "localhost"):
            task = asyncio.create_task(AsyncTCPStore.connect(host, listener.getsockname()[1], timeout=-1))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def test_one_deadline_for_all_that_a_constructor_does() -> None:
    """A server that replies late, but within the timeout, does not get the whole timeout again for the next request."""

    def late(peer: socket.socket) -> None:
        greet(peer)
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and select.select([peer], [], [], LIMIT)[0]:
            request = peer.recv(65536)
            if not request:
                return
            answered.append(request)
            if len(answered) > 1:
                continue  # the last word is the client's
            assert request.startswith(b"\x05")
            slow.wait(0.7)
            peer.sendall(STOCK)

    answered: list[bytes] = []
    slow = threading.Event()
    seen: list[float] = []
    real = Deadline.left

    def left(deadline: Deadline) -> float | None:
        found = real(deadline)
        if found is not None:
            seen.append(deadline.began + deadline.timeout)
        return found

    with fake_server(late) as fake, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Deadline, "left", left)
        began = time.monotonic()
        with pytest.raises((DistStoreError, DistNetworkError)):
            TCPStore("127.0.0.1", fake.port, 2, timeout=1.0)
    assert len(answered) == 2  # the extension, and the join
    assert max(seen) - began < 1.5


@both
def test_a_host_that_is_gone_without_a_word_is_noticed(how: How) -> None:
    found: list[dict[str, int]] = []
    real = socket.socket.setsockopt

    def setsockopt(peer: socket.socket, *arguments: Any) -> None:
        real(peer, *arguments)
        if arguments[:2] == (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", -1)):
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            options = {name: peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
            found.append({"SO_KEEPALIVE": peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), **options})

    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no such option")
    with tcpstore_server() as server, pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "setsockopt", setsockopt)
        how("127.0.0.1", server.port, LIMIT)
    (options,) = found
    assert options["SO_KEEPALIVE"] == 1
    silence = options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
    assert silence == options["TCP_USER_TIMEOUT"] / 1000 == 300


def test_a_host_of_several_is_given_up_soon_after_another_can_have_taken_over() -> None:
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no such option")
    with socket.socket() as peer:
        keep_alive(peer, of_several=True)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        idle, interval, count, given_up = [peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert idle + interval * count == given_up / 1000 == 3


DEAD_HOST = """
import ctypes, fcntl, json, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000) and libc.unshare(0x50000000):  # CLONE_NEWNET, with CLONE_NEWUSER if need be
    sys.exit(77)
def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", up))  # SIOCSIFFLAGS
try:
    loopback(1)
except OSError:
    sys.exit(77)
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.client import connect
connect._KEEP_ALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 2000))
serve = [sys.executable, "-m", "tcpstore_async", "serve", "--host", "127.0.0.1", "--port", "0", "--link-grace", "1"]
kill_with_parent = lambda: libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
server = subprocess.Popen(serve, stdout=subprocess.PIPE, preexec_fn=kill_with_parent)
port = json.loads(server.stdout.readline())["port"]
with TCPStore("127.0.0.1", port, timeout=-1) as store:
    store.set("a", "")
    assert store.get("a") == b""
    tick = threading.Event()
    if sys.argv[1] == "idle":
        loopback(0)
        while not store._client._lost:  # by the background loop
            tick.wait(0.01)
    def cut():
        while not any(connection.parked for connection in store._client._connections):
            tick.wait(0.01)
        loopback(0)
    if sys.argv[1] == "parked":
        threading.Thread(target=cut).start()
    try:
        store.wait(["never"])
    except DistNetworkError as error:
        print("noticed:", error)
server.kill()
server.wait()
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
@pytest.mark.parametrize("state", ["parked", "idle"])
# quirk: lost-host
def test_a_host_that_is_gone_is_noticed(state: str) -> None:
    """By a call without a timeout, and without any call."""
    command = [sys.executable, "-c", DEAD_HOST, state]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, timeout=LIMIT, check=False)
    if done.returncode == 77:
        pytest.skip("no network of its own for a process here")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"noticed:")


FORKS_WHILE_CONNECTING = """
import os, socket, threading
from tcpstore_async import DistNetworkError, TCPStore

def copies():
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                found += [fd] if one.getpeername() == listener.getsockname() else []
        except OSError:
            pass
    return found

def open_store(host):
    try:
        TCPStore(host, listener.getsockname()[1], timeout=60)
    except DistNetworkError:
        pass

def fork(*_):
    child = os.fork()
    if child == 0:
        os._exit(len(copies()))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

codes = []
with socket.create_server(("127.0.0.1", 0)) as listener:
    for host in ("127.0.0.1", "localhost"):
        opening = threading.Thread(target=open_store, args=(host,), daemon=True)
        opening.start()
        with listener.accept()[0] as peer:  # it waits for the reply to its handshake
            assert peer.recv(1)
            fork()
assert codes == [0, 0], codes
print("good")
"""


@pytest.mark.unmeasured
@pytest.mark.needs_proc
def test_a_forked_child_has_no_copy_of_what_another_thread_opens() -> None:
    assert run_python(FORKS_WHILE_CONNECTING) == "good\n"
