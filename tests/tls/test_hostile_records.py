"""Records that an ordinary peer does not send: no peer is left hanging, and no other is disturbed."""

from __future__ import annotations

import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from conformance.frames import get, ping, set_
from support import HANDSHAKE, LIMIT, RawPeer, Server, blob, tcpstore_server, until
from tls.certificates import certificates
from tls.peers import TlsPeer, context
from tls.test_server import client_hello

HANDSHAKE_RECORD, ALERT, CHANGE_CIPHER_SPEC, DATA = 22, 21, 20, 23


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with tcpstore_server(*certificates().serving()) as found:
        yield found


def record(kind: int, content: bytes) -> bytes:
    return struct.pack(">BHH", kind, 0x0303, len(content)) + content


# Instead of the handshake, or within it

WITHIN = {
    "a fatal alert": record(ALERT, b"\x02\x28"),
    "a fatal alert that has no name": record(ALERT, b"\x02\x5c"),
    "warnings": record(ALERT, b"\x01\x5a") * 100,
    "the end, as an alert": record(ALERT, b"\x01\x00"),
    "an alert of no bytes": record(ALERT, b""),
    "handshake records of no bytes": record(HANDSHAKE_RECORD, b"") * 1000,
    "data of no bytes": record(DATA, b""),
    "changes of cipher without end": record(CHANGE_CIPHER_SPEC, b"\x01") * 100_000,
    "a record that is too long": struct.pack(">BHH", DATA, 0x0303, 0xFFFF) + bytes(0xFFFF),
    "a second ClientHello": client_hello(),
    "a handshake message of 16 MiB": record(HANDSHAKE_RECORD, b"\x0b\xff\xff\xff" + bytes(10_000)) * 1000,
}


def send_all(peer: RawPeer, data: bytes) -> None:
    """Whether or not the server reads it."""
    try:
        peer.send(data)
    except OSError:
        pass


def end(peer: RawPeer) -> None:
    """Wait until the server has closed the connection."""
    try:
        while peer.socket.recv(1 << 16):
            pass
    except ConnectionError:
        pass


def check_that_it_ends(server: Server, peer: RawPeer, other: RawPeer) -> None:
    """Check that the server closes a connection with one line in its log at most, and serves another one."""
    other.ping()
    end(peer)
    other.ping()
    here = peer.socket.getsockname()[1]
    lines = [line for line in server.log().splitlines() if f"127.0.0.1:{here}" in line]
    assert len(lines) <= 1, lines
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("name", WITHIN)
def test_within_the_handshake(server: Server, name: str) -> None:
    with TlsPeer(server.port) as other, RawPeer(server.port, validate=False) as peer:
        peer.send(client_hello())
        send_all(peer, WITHIN[name])
        check_that_it_ends(server, peer, other)


class Tunnel:
    """TLS whose records pass through here, so that others can be put between them."""

    def __init__(self, port: int) -> None:
        self.peer = RawPeer(port, validate=False)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context().wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.peer.send(self.outgoing.read())
                self.incoming.write(self.peer.socket.recv(1 << 16))
        self.peer.send(self.outgoing.read())

    def encrypt(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self.outgoing.read()

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                data += self.tls.read(count - len(data))
            except ssl.SSLWantReadError:
                received = self.peer.socket.recv(1 << 16)
                if not received:
                    raise EOFError from None
                self.incoming.write(received)
        return data


@pytest.mark.parametrize("name", ["a renegotiation", *WITHIN])
def test_after_the_handshake(server: Server, name: str) -> None:
    """What is not encrypted by the connection's keys ends it; what was asked for before is answered."""
    tunnel = Tunnel(server.port)
    with TlsPeer(server.port) as other, tunnel.peer as peer:
        peer.send(tunnel.encrypt(HANDSHAKE + ping(b"abcd")))
        assert tunnel.read(4) == b"abcd"
        send_all(peer, client_hello() if name == "a renegotiation" else WITHIN[name])
        check_that_it_ends(server, peer, other)


def test_the_end_in_the_middle_of_a_record_and_of_a_request(server: Server) -> None:
    """Half-closed in either way: what is complete is answered, and the rest forgotten."""
    large = set_(b"/k", bytes(100_000))
    with TlsPeer(server.port) as other:
        for cut in (1, 5, 1000, 60_000):
            tunnel = Tunnel(server.port)
            with tunnel.peer as peer:
                peer.send(tunnel.encrypt(HANDSHAKE + ping(b"abcd")) + tunnel.encrypt(large)[:-cut])
                peer.socket.shutdown(socket.SHUT_WR)
                assert tunnel.read(4) == b"abcd"
                end(peer)
            tunnel = Tunnel(server.port)
            with tunnel.peer as peer:
                data = tunnel.encrypt(HANDSHAKE + ping(b"abcd") + large[:-cut])
                with pytest.raises(ssl.SSLWantReadError):
                    tunnel.tls.unwrap()  # says that nothing follows, and goes on reading
                peer.send(data + tunnel.outgoing.read())
                assert tunnel.read(4) == b"abcd"
                end(peer)
            other.ping()
        assert other.ask(b"\x07", 8) == bytes(8), "no key was set"


def test_records_of_one_byte(server: Server) -> None:
    tunnel = Tunnel(server.port)
    with tunnel.peer as peer:
        data = HANDSHAKE + set_(b"/k", b"v") + get(b"/k")
        peer.send(b"".join(tunnel.encrypt(data[at : at + 1]) for at in range(len(data))))
        assert tunnel.read(9) == blob(b"v")


# KeyUpdate, which Python's module cannot send


class Openssl:
    """`openssl s_client`, which sends what it reads, and KeyUpdates if that begins with k or K."""

    def __init__(self, port: int, errors: Path) -> None:
        self.errors = errors
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", certificates().ours.ca]
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0
            )
        self.seen = b""

    def send(self, data: bytes) -> None:
        stdin: IO[bytes] | None = self.process.stdin
        assert stdin is not None
        stdin.write(data)

    def expect(self, text: bytes) -> None:
        assert self.process.stdout is not None
        while text not in self.seen:
            chunk = self.process.stdout.read(1 << 16)
            assert chunk, self.seen + self.errors.read_bytes()
            self.seen += chunk

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT)


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl command")
@pytest.mark.parametrize("letter", [b"k", b"K"], ids=["of its own", "of both"])
def test_new_keys(server: Server, letter: bytes, tmp_path: Path) -> None:
    """The server goes on with the new keys, and sends its own if it is asked to, also with large values."""
    peer = Openssl(server.port, tmp_path / "errors")
    try:
        peer.send(HANDSHAKE + ping(b"<00>"))
        peer.expect(b"<00>")
        for number in range(1, 20):
            peer.send(letter + b"\n")
            until(lambda number=number: peer.errors.read_bytes().count(b"KEYUPDATE") == number)  # type: ignore[misc]
            value = b"x" * 50_000 + b"<%02d>" % number
            peer.send(set_(b"/k", value) + get(b"/k"))
            peer.expect(b"<%02d>" % number)
            peer.seen = b""
            with TlsPeer(server.port) as other:
                other.ping()
    finally:
        peer.end()
    assert "closed the connection" not in server.log()
