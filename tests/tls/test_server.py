"""TLS at a server: who is refused and how that reads, what an unfinished handshake costs others, reload and drain."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import pytest

from conformance.frames import get
from support import HANDSHAKE, LIMIT, RawPeer, Server, blob, tcpstore_server, until
from tcpstore_async.auth.secret_files import TlsFiles
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.base.limits import Limits
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.poller import READ, Poller, Report
from tcpstore_async.server.tls import MOST_HANDSHAKES, ServerTls, make_context
from tcpstore_async.server.uv import UvServer
from tcpstore_async.session.tls import TlsStream
from tls.certificates import Pair, certificates
from tls.peers import TlsPeer, context

MIB = 1 << 20


def refused(server: Server, using: ssl.SSLContext, host: str = "127.0.0.1") -> Exception:
    """What a client is told by a server, or by its own verification. The refusal of a certificate comes late."""
    with (
        pytest.raises((ssl.SSLError, ConnectionError)) as told,
        TlsPeer(server.port, using=using, host=host) as peer,
    ):
        peer.ping()
    return told.value


def logged(server: Server, text: str) -> str:
    """Wait for a line of the log, and return it."""
    until(lambda: text in server.log())
    [line] = [line for line in server.log().splitlines() if text in line]
    return line


def old_version() -> ssl.SSLContext:
    using = context()
    using.maximum_version = ssl.TLSVersion.TLSv1_2
    return using


def test_plain_and_encrypted_peers_on_one_port() -> None:
    with tcpstore_server(*certificates().serving()) as server:
        with TlsPeer(server.port) as encrypted, RawPeer(server.port) as plain:
            for peer in (encrypted, plain, encrypted):
                peer.ping()
        assert "closed the connection" not in server.log()


def test_what_is_no_tls() -> None:
    with tcpstore_server(*certificates().serving()) as server:
        with RawPeer(server.port, validate=False) as peer:
            peer.send(b"\x16" + b"GET / HTTP/1.1\r\n\r\n")
            while peer.socket.recv(100):  # an alert
                pass
        assert "the peer sent something that is not TLS" in logged(server, "TLS handshake failed")


def test_a_server_without_tls() -> None:
    with tcpstore_server() as server:
        refused(server, context())
        assert "it began a TLS handshake, but this server does not use TLS" in logged(server, "closed the connection")


def test_a_peer_that_ends_in_the_handshake_is_no_news() -> None:
    """A scan of ports, say."""
    with tcpstore_server(*certificates().serving()) as server:
        with RawPeer(server.port, validate=False) as peer:
            peer.send(b"\x16\x03\x01")
        with TlsPeer(server.port) as other:
            other.ping()
        assert "closed the connection" not in server.log()


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    waiting = context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        waiting.do_handshake()
    return outgoing.read()


def test_handshakes_that_stop_are_bounded() -> None:
    """The oldest are closed; who comes last, and who is connected, is served."""
    more = 20
    hello = client_hello()
    with tcpstore_server(*certificates().serving()) as server, TlsPeer(server.port) as before:
        stopped = []
        try:
            for _ in range(MOST_HANDSHAKES + more):
                peer = RawPeer(server.port, validate=False)
                peer.send(hello)
                assert peer.socket.recv(1) == b"\x16"  # the server's answer: its handshake is under way
                stopped.append(peer)
            for peer in stopped[:more]:
                while peer.socket.recv(1 << 16):
                    pass
            before.ping()
            with TlsPeer(server.port) as after:
                after.ping()
            stopped[-1].socket.setblocking(False)
            stopped[-1].socket.recv(1 << 16)
            with pytest.raises(BlockingIOError):
                stopped[-1].socket.recv(1)
        finally:
            for peer in stopped:
                peer.close()
        logged(server, f"too many TLS handshakes under way (max {MOST_HANDSHAKES})")


def test_a_handshake_byte_by_byte_has_the_time_limit() -> None:
    options = ["--limit", "validate_seconds=1", *certificates().serving()]
    with tcpstore_server(*options) as server, RawPeer(server.port, validate=False) as peer:
        for byte in client_hello()[:-1]:
            peer.send(bytes([byte]))
        assert peer.closed()
        logged(server, "TLS handshake not finished within 1 s")


def test_who_has_to_use_tls_and_sends_nothing_has_not_finished_the_handshake() -> None:
    options = ["--limit", "validate_seconds=1", *certificates().serving(), "--require-tls"]
    with tcpstore_server(*options) as server, RawPeer(server.port, validate=False) as peer:
        assert peer.closed()
        logged(server, "TLS handshake not finished within 1 s")


def test_a_slow_handshake_succeeds() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(tcpstore_server(*certificates().serving()))
        with (
            TlsPeer(server.port, using=context()) as quick,
            socket.create_connection(("127.0.0.1", server.port), LIMIT) as slow,
        ):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    for byte in outgoing.read():
                        slow.sendall(bytes([byte]))
                        quick.ping()
                    incoming.write(slow.recv(1 << 16))
            tls.write(bytes.fromhex("00cef7853c") + b"\x0d" + struct.pack("<I", 9))
            slow.sendall(outgoing.read())
            incoming.write(slow.recv(100))
            assert tls.read(10) == struct.pack("<I", 9)


@pytest.mark.parametrize("cut", [1, 1000, 16_385, MIB], ids=str)
def test_a_large_value_both_ways(cut: int) -> None:
    size = 3 * MIB + 1 if cut > 1 else 3000
    value = os.urandom(size)
    with tcpstore_server(*certificates().serving()) as server, TlsPeer(server.port) as peer:
        request = b"\x01" + blob(b"/large") + blob(value)
        for at in range(0, len(request), cut):
            peer.send(request[at : at + cut])
        assert peer.ask(get(b"/large"), 8 + size) == struct.pack("<Q", size) + value


@pytest.mark.needs_proc
def test_a_value_of_256_mib_in_bounded_memory() -> None:
    """One copy in the store, and little beside it, in either direction."""
    size = 200 * MIB
    limits = {"value_bytes": size, "request_bytes": 3 * size, "budget_bytes": 4 * size}
    options = [word for name, number in limits.items() for word in ("--limit", f"{name}={number}")]
    chunk = os.urandom(MIB)
    with tcpstore_server(*options, *certificates().serving()) as server, TlsPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/large") + struct.pack("<Q", size))
        for _ in range(size // MIB):
            peer.send(chunk)
        peer.ping()
        assert peer.ask(get(b"/large"), 8) == struct.pack("<Q", size)
        for _ in range(size // MIB):
            assert peer.read(MIB) == chunk
        assert most_memory(server) < 1.5 * size


def most_memory(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_a_peer_that_reads_nothing_is_not_read_from() -> None:
    """Unsent bytes count as those of plain connections do, and come when the peer reads."""
    size = 4 * MIB
    count = 40
    with tcpstore_server(*certificates().serving()) as server, TlsPeer(server.port) as peer:
        value = os.urandom(size)
        peer.send(b"\x01" + blob(b"/large") + blob(value))
        peer.send(get(b"/large") * count)
        with TlsPeer(server.port) as other:
            other.ping()
        for _ in range(count):
            assert peer.read(8 + size)[8:] == value


def replace(pair: Pair, by: Pair) -> None:
    shutil.copyfile(by.cert, pair.cert)
    shutil.copyfile(by.key, pair.key)


def serial(port: int, own: Pair | None = None) -> int:
    """The number of the certificate that a new connection gets."""
    plain = socket.create_connection(("127.0.0.1", port), LIMIT)
    with context(own).wrap_socket(plain, server_hostname="127.0.0.1") as tls:
        found = tls.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


def test_reload_on_sighup(tmp_path: Path) -> None:
    known = certificates()
    pair = Pair(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    Path(pair.key).touch(0o600)
    replace(pair, known.server)
    with tcpstore_server(*known.serving(pair)) as server, TlsPeer(server.port) as before:
        first = serial(server.port)
        replace(pair, known.renewed)
        assert serial(server.port) == first
        server.process.send_signal(signal.SIGHUP)
        logged(server, "reloaded the certificate")
        assert serial(server.port) != first
        before.ping()
        Path(pair.cert).write_text("broken")
        server.process.send_signal(signal.SIGHUP)
        line = logged(server, "the previous certificate stays in use")
        assert pair.cert in line
        assert serial(server.port) != first
        before.ping()


def test_sigterm_drains() -> None:
    with tcpstore_server(*certificates().serving()) as server, TlsPeer(server.port) as peer:
        server.process.send_signal(signal.SIGTERM)
        peer.ping()
        peer.close()
        assert server.process.wait(LIMIT) == 0


def test_the_server_says_goodbye() -> None:
    """A TLS client that insists on close_notify does not take the end for an attack."""
    with tcpstore_server(*certificates().serving()) as server:
        plain = socket.create_connection(("127.0.0.1", server.port), LIMIT)
        with context().wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as tls:
            tls.sendall(b"\xff")
            assert tls.recv(1) == b""


@pytest.mark.parametrize("wrong", ["no file", "no certificate", "another key", "encrypted"])
def test_files_that_cannot_be_used(wrong: str, tmp_path: Path) -> None:
    known = certificates()
    cert, key = known.server
    if wrong == "no file":
        key = str(tmp_path / "missing.pem")
    elif wrong == "no certificate":
        cert = str(tmp_path / "empty.pem")
        Path(cert).touch()
    elif wrong == "another key":
        key = known.renewed.key
    else:
        key = str(tmp_path / "encrypted.pem")
        command = f"openssl pkey -in {known.server.key} -aes256 -passout pass:secret -out {key}"
        if not shutil.which("openssl") or os.system(command):
            pytest.skip("the program openssl makes the key")
    with pytest.raises(DistNetworkError, match="cannot load"):
        make_context(TlsFiles(cert=cert, key=key))


def test_a_key_that_others_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = certificates()
    key = str(tmp_path / "key.pem")
    shutil.copyfile(known.server.key, key)
    os.chmod(key, 0o640)
    make_context(TlsFiles(cert=known.server.cert, key=key))
    assert (
        f"the private key {key} is accessible to users other than its owner (mode 0640): run chmod 600" in caplog.text
    )


class Reported:
    """A poller that reports what the test says, each event once, as an edge-triggered one does."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.fds: list[int] = []

    def watch(self, fd: int) -> None:
        self.fds.append(fd)

    def watch_writing(self, fd: int, wanted: bool) -> None: ...
    def pause(self, fd: int) -> None: ...
    def resume(self, fd: int) -> None: ...
    def forget(self, fd: int) -> None: ...
    def close(self) -> None: ...

    def ready(self) -> None:
        self.report([(self.fds[-1], READ)])


@pytest.mark.interpreted("its poller is none that compiled code accepts")
async def test_what_arrives_while_reading_is_put_off_is_read() -> None:
    """Its event is the last one, and there is plaintext left of what was read before."""
    pollers: list[Reported] = []

    def watch_with(loop: asyncio.AbstractEventLoop, report: Report) -> Poller:
        pollers.append(Reported(report))
        return cast(Poller, pollers[0])

    tls = ServerTls(TlsFiles("", *certificates().server))
    server = UvServer(listen("127.0.0.1", 0), Limits(), watch_with, tls)
    server.start()
    loop = asyncio.get_running_loop()
    pair = await loop.run_in_executor(None, socket.create_connection, ("127.0.0.1", server.port), LIMIT)
    with pair as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = TlsStream(context(), "127.0.0.1")
        [poller] = pollers
        await eventually(lambda: bool(poller.fds))
        plain.setblocking(False)
        while not client.shake_hands():
            plain.sendall(client.outgoing())
            poller.ready()
            client.feed(await loop.sock_recv(plain, 1 << 16))
        plain.sendall(client.outgoing())
        poller.ready()
        [connection] = server.tls_connections.values()
        await eventually(lambda: not connection.queued)
        request = HANDSHAKE + b"\x01" + blob(b"/k") + blob(bytes(200_000))
        client.write(request[:115_000])
        plain.sendall(client.outgoing())
        poller.ready()
        await eventually(lambda: connection.queued and connection.drained)
        client.write(request[115_000:])
        plain.sendall(client.outgoing())
        poller.ready()
        assert connection.queued
        await eventually(lambda: len(server.store.keyspace.values) == 1)
    server.stop()


async def test_handshakes_begin_one_by_one() -> None:
    """Peers that come together delay nobody, and have time to answer before too many others have begun."""

    async def one_more(tls: ServerTls) -> None:
        before = len(tls.handshakes)
        await asyncio.sleep(0)
        assert len(tls.handshakes) <= before + 1

    count = 40
    hello = client_hello()

    tls = ServerTls(TlsFiles("", *certificates().server))
    server = UvServer(listen("127.0.0.1", 0), Limits(), tls=tls)
    server.start()
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(RawPeer(server.port, validate=False)).send(hello)
        plain = stack.enter_context(RawPeer(server.port))
        plain.send(b"\x0d1234")
        plain.socket.setblocking(False)
        pong = b""
        while not pong:
            await one_more(tls)
            with suppress(BlockingIOError):
                pong = plain.socket.recv(4)
        assert pong == b"1234"
        assert len(tls.handshakes) < count / 2
        while len(tls.handshakes) < count:
            await one_more(tls)
    server.stop()


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)
