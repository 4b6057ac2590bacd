"""The plaintext of one connection, whatever the sizes in which the kernel gives and takes its ciphertext."""

from __future__ import annotations

import ctypes
import ctypes.util
import random
import socket
import ssl
import threading
from typing import Any

import pytest

from support import LIMIT
from tcpstore_async.auth.secret_files import TlsFiles
from tcpstore_async.server.tls import make_context
from tcpstore_async.session.tls import TlsChannel, TlsError, TlsStream
from tls.certificates import certificates
from tls.peers import context

SIZES = (1, 2, 3, 5, 16, 17, 1000, 16_384, 16_385, 65_536, 200_000)


class Wire:
    """A connection that takes few bytes at a time, or none."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.taken = bytearray()

    def send(self, data: Any) -> int:
        most = self.generator.choice((0, 1, 7, 5000, 100_000))
        if not most:
            raise BlockingIOError
        self.taken += data[:most]
        return min(most, len(data))


def flushed(channel: TlsChannel) -> None:
    while channel.behind():
        try:
            channel.push()
        except BlockingIOError:
            pass


def connected(wire: Wire) -> tuple[TlsChannel, TlsStream]:
    """A server's channel and its client, after the handshake; every byte of it arrived alone."""
    pair = certificates().server
    channel = TlsChannel(TlsStream(make_context(TlsFiles(cert=pair.cert, key=pair.key))), wire.send)
    client = TlsStream(context(), "127.0.0.1")
    while not (client.shake_hands() and channel.stream.established):
        for byte in client.outgoing():
            channel.stream.feed(bytes([byte]))
            if not channel.stream.established:
                channel.shake_hands()
                flushed(channel)
        for byte in bytes(wire.taken):
            client.feed(bytes([byte]))
        wire.taken.clear()
    return channel, client


def read_all(stream: TlsStream) -> bytes:
    parts = []
    while stream.readable:
        parts.append(stream.read(1 << 16))
    return b"".join(parts)


@pytest.mark.parametrize("seed", range(5))
def test_writing_counts_plaintext_exactly(seed: int) -> None:
    """As `writev` does: what was not taken is passed again, perhaps in other pieces."""
    wire = Wire(seed)
    channel, client = connected(wire)
    data = random.Random(seed).randbytes(sum(SIZES))
    sent = 0
    cut = random.Random(seed)
    while sent < len(data):
        rest = data[sent : sent + cut.choice(SIZES)]
        pieces: list[bytes] = []
        while rest:
            size = cut.choice(SIZES)
            pieces.append(rest[:size])
            rest = rest[size:]
        try:
            count = channel.write(pieces)
        except BlockingIOError:
            assert channel.behind()
            continue
        assert 0 < count <= sum(map(len, pieces))
        if count == sum(map(len, pieces)) and not channel.behind():
            assert not channel.stream.outgoing()
        sent += count
    flushed(channel)
    client.feed(bytes(wire.taken))
    assert read_all(client) == data


@pytest.mark.parametrize("size", SIZES)
def test_reading_leaves_nothing_behind(size: int) -> None:
    """Whatever has been fed can be read before more is asked for, also where records and chunks do not match."""
    channel, client = connected(Wire(0))
    data = random.Random(size).randbytes(100_000)
    for at in range(0, len(data), size):
        client.write(data[at : at + size])
    ciphertext = client.outgoing()
    got = bytearray()
    for at in range(0, len(ciphertext), 7001):
        channel.stream.feed(ciphertext[at : at + 7001])
        while channel.stream.readable:
            got += channel.read(4096)
    assert bytes(got) == data


def test_reading_into_a_buffer() -> None:
    channel, client = connected(Wire(0))
    data = random.Random(1).randbytes(50_000)
    client.write(data)
    channel.stream.feed(client.outgoing())
    space = bytearray(30_000)
    assert channel.read_into(memoryview(space)) == 30_000
    assert channel.stream.readable
    assert bytes(space) + channel.read(30_000) == data
    assert not channel.stream.ended


@pytest.mark.parametrize("says_so", [True, False], ids=["close_notify", "only FIN"])
def test_the_end(says_so: bool) -> None:
    channel, client = connected(Wire(0))
    client.write(b"last")
    if says_so:
        client.finish()
    channel.stream.feed(client.outgoing())
    channel.stream.feed(b"")
    assert channel.read(100) == b"last"
    assert channel.read(100) == b""
    assert channel.stream.ended


def test_a_changed_record_is_an_error() -> None:
    channel, client = connected(Wire(0))
    client.write(b"value")
    record = bytearray(client.outgoing())
    record[-1] ^= 1
    channel.stream.feed(bytes(record))
    with pytest.raises(Exception, match=r"TLS failed: .*(bad record mac|decryption failed)"):
        channel.read(100)


def test_only_tls_13() -> None:
    pair = certificates().server
    made = make_context(TlsFiles(cert=pair.cert, key=pair.key))
    assert made.minimum_version is ssl.TLSVersion.TLSv1_3
    assert made.num_tickets == 0


def ask_for_new_keys(peer: socket.socket) -> None:
    """As a TLS client, ask for new keys until the connection ends. Python's module cannot."""
    library = ctypes.CDLL(ctypes.util.find_library("ssl"))
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    using = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    tls = ctypes.c_void_p(library.SSL_new(using))
    library.SSL_set_fd(tls, peer.fileno())
    if library.SSL_connect(tls) == 1:
        while library.SSL_key_update(tls, 1) == 1 and library.SSL_do_handshake(tls) == 1:
            pass
    library.SSL_free(tls)
    library.SSL_CTX_free(using)


@pytest.mark.skipif(not ctypes.util.find_library("ssl"), reason="there is no library of OpenSSL beside Python's")
def test_new_keys_without_end_take_little_memory() -> None:
    """Each is answered: by some bytes that wait for what is written next."""
    stream = TlsStream(make_context(TlsFiles("", *certificates().server)))
    ours, theirs = socket.socketpair()
    asking = threading.Thread(target=ask_for_new_keys, args=(theirs,))
    with theirs:
        with ours:
            ours.settimeout(LIMIT)
            theirs.setblocking(True)
            asking.start()
            while not stream.established:
                stream.feed(ours.recv(1 << 16))
                stream.shake_hands()
                ours.sendall(stream.outgoing())
            most = 0
            with pytest.raises(TlsError, match="the peer keeps requesting key updates"):
                while most < 1 << 20:
                    stream.feed(ours.recv(1 << 16))
                    while stream.readable:
                        stream.read(1)
                    most = max(most, stream._outgoing.pending)
            assert most < 1 << 17
        asking.join(LIMIT)
