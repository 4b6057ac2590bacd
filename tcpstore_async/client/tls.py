"""TLS for a client: a socket that encrypts, the handshake before it, and a transport for event loops.

What both ends of a connection use is in `session/tls.py`; the server's end is `server/tls.py`.

It knows certificates of clients, sockets and transports. It must not know the bytes that it carries, or their sender.

Invariants: nothing is read or written but when the user of the connection reads or writes. An interrupt during a system
call loses nothing; one in between leaves the stream unusable, and the user knows where that may strike. A connection
that is closed says so to the server, unless closing resets it. TLS that fails counts as a break of the connection.
"""

import asyncio
import errno
import functools
import os
import socket
import ssl
import struct
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final, cast

from ..auth.secret_files import TlsFiles, load_certificates
from ..base.errors import AccessDeniedError, DistNetworkError
from ..session.tls import TlsChannel, TlsError, TlsStream
from .tls_settings import CERT, KEY

_READ: Final = 128 * 1024

_LEAST: Final = 479
"""Bytes of ciphertext to receive at least. Longer than most records; see `sync_connection._SHORT`."""

_LINGER: Final = struct.Struct("ii")

_RESET: Final = _LINGER.pack(1, 0)

_FLAGS: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""The program may have SIGPIPE at its default, which would kill it when the server is gone."""

_UNCHANGED: Final = (
    *("abort", "get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_write_buffer_limits"),
)
"""Methods of a transport that are the same with TLS."""

_receive: Final = socket.socket.recv


class TlsFailed(ConnectionResetError):
    """The handshake failed, a certificate was not accepted, or what arrived is not TLS."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(errno.ECONNRESET, text)
        self.final = final
        """Whether another attempt would end the same way."""

    def __str__(self) -> str:
        return str(self.strerror)


def tls_required() -> AccessDeniedError:
    """Return the error of a client without TLS at a server that requires it."""
    return AccessDeniedError("the server requires TLS: use tcps://, or set TCPSTORE_TLS=1", final=True)


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context, which is shared until a file changes. Raises DistNetworkError if a file cannot be used."""
    return _context(files, tuple(_changed(path) for path in files if path))


def _changed(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DistNetworkError(f"cannot load {path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ino


@functools.lru_cache(maxsize=8)
def _context(files: TlsFiles, changed: tuple[tuple[int, int], ...]) -> ssl.SSLContext:
    if bool(files.cert) != bool(files.key):
        raise DistNetworkError(f"a client certificate needs its key: set both {CERT} and {KEY}, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not files.ca:
        context.load_default_certs()
    load_certificates(context, files)
    return context


def checked(files: TlsFiles) -> TlsFiles:
    """Return the files. Raises DistNetworkError if one cannot be used."""
    make_context(files)
    return files


class TlsSocket(socket.socket):
    """A connected socket whose `send`, `sendall` and `recv` take and return plaintext.

    A poll says nothing about plaintext that is `buffered`.
    """

    def __init__(self, peer: socket.socket, stream: TlsStream) -> None:
        """Take over a connection that has shaken hands."""
        timeout = peer.gettimeout()
        super().__init__(fileno=peer.detach())
        self.settimeout(timeout)
        self.channel = TlsChannel(stream, self._send)
        self._arrived: list[bytes] = []
        """Ciphertext. `recv` puts it here in one atomic step, so that no interrupt loses it."""
        self._drained = False

    def _send(self, data: Any) -> int:
        return socket.socket.send(self, data, _FLAGS)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send without waiting; return how many bytes the kernel took. The next call must begin with the others.

        What has been encrypted stays so: of bytes of which the kernel took none, all but the last count as taken, and
        the last follows once it has taken the rest of their ciphertext. Raises BlockingIOError if there are no others.
        """
        channel = self.channel
        try:
            return channel.write([data])
        except BlockingIOError:
            taken = channel.owed - 1
            if taken <= 0:
                raise
            channel.owed = 1
            return taken

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send without waiting. Raises BlockingIOError if the kernel does not take all."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def recv(self, size: int, flags: int = 0) -> bytes:
        while True:
            self.fetch(size, flags)
            if self._arrived:
                self._drained = len(self._arrived[0]) < size
            with suppress(BlockingIOError):  # of a record only a part has arrived
                return self.decrypt(size)

    def drained(self) -> bool:
        """Return whether the last `recv` has left nothing, buffered or in the kernel."""
        return self._drained and not self.buffered()

    def buffered(self) -> bool:
        """Return whether there may be plaintext to `recv` without further ciphertext."""
        return self.channel.stream.readable or bool(self._arrived)

    def fetch(self, size: int, flags: int = 0) -> None:
        """Receive ciphertext, unless something is buffered. An interrupt loses nothing."""
        stream = self.channel.stream
        if not (stream.readable or self._arrived or stream.ended):
            self._arrived += map(_receive, (self,), (size if size > _LEAST else _LEAST,), (flags,))

    def decrypt(self, size: int) -> bytes:
        """Return up to `size` bytes of what has been received; b"" at the end. Raises BlockingIOError, TlsFailed."""
        stream = self.channel.stream
        try:
            if self._arrived:
                stream.feed(self._arrived.pop())
            data: bytes = stream.read(size)
            if stream.readable and len(data) < size:
                data += self.channel.read(size - len(data))
        except TlsError as error:
            raise TlsFailed(str(error), error.final) from None
        if not data and not stream.ended:
            raise BlockingIOError
        return data

    def why(self, error: ConnectionError) -> ConnectionError:
        """Return the server's alert, which says why it has ended the connection, or else the error of `send`."""
        try:
            while self.recv(_READ, _FLAGS):
                pass
        except TlsFailed as failed:
            return failed
        except OSError:
            pass
        return error

    def adopt(self, other: "TlsSocket") -> None:
        """Use another connection's stream, whose descriptor has replaced this one's."""
        other.channel.send = self._send
        self._arrived[:] = other._arrived
        self.channel, other.channel = other.channel, self.channel
        other.channel.stream.established = False  # closing it says nothing

    def finish(self) -> None:
        """Tell the server that nothing follows, unless closing resets the connection."""
        if self.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size) != _RESET:
            self.channel.finish()

    def close(self) -> None:
        if self.fileno() >= 0:
            self.finish()
        super().close()


def encrypted(peer: socket.socket, files: TlsFiles, host: str) -> Generator[bytes | int, Any, TlsSocket]:
    """Shake hands on a connection to this host, which is taken over; return the socket that encrypts.

    Yields bytes to send, and the most bytes to receive next, which it is sent. Raises TlsFailed.
    """
    try:
        stream = TlsStream(make_context(files), host.partition("%")[0])
    except (DistNetworkError, ValueError) as error:
        raise TlsFailed(str(error), True) from None
    while True:
        try:
            done = stream.shake_hands()
        except TlsError as error:
            raise TlsFailed(str(error), error.final) from None
        except ConnectionError:
            text = "the server closed the connection during the TLS handshake: does it use TLS?"
            raise TlsFailed(text, False) from None
        if data := stream.outgoing():
            yield data
        if done:
            return TlsSocket(peer, stream)
        stream.feed((yield _READ))


async def serve(peer: socket.socket, protocol: asyncio.Protocol) -> None:
    """Have the running loop serve a connection, which is taken over, with this protocol."""
    loop = asyncio.get_running_loop()
    if not isinstance(peer, TlsSocket):
        await loop.create_connection(lambda: protocol, sock=peer)
        return
    plain = socket.socket(fileno=peer.detach())
    plain.setblocking(False)
    transport = _Transport(peer.channel, protocol)
    await loop.create_connection(lambda: transport, sock=plain)
    loop.call_soon(transport.deliver)


class _Transport(asyncio.Protocol):
    """A transport to the protocol of the plaintext, and the protocol of the ciphertext's transport."""

    def __init__(self, channel: TlsChannel, protocol: asyncio.Protocol) -> None:
        self._channel = channel
        channel.send = self._send
        self._protocol = protocol
        self._ended = False
        """Whether the protocol knows that the server sends no more."""
        self._failure: TlsFailed | None = None

    # As a transport

    def write(self, data: Any) -> None:
        self._channel.write([data])

    def _send(self, data: Any) -> int:
        self._carrier.write(data)
        return len(data)

    def write_eof(self) -> None:
        self._channel.finish()
        self._carrier.write_eof()

    def close(self) -> None:
        if not self._carrier.is_closing():
            self._channel.finish()
        self._carrier.close()

    # As a protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._carrier = cast(asyncio.Transport, transport)
        for name in _UNCHANGED:
            setattr(self, name, getattr(transport, name))
        self._protocol.connection_made(cast(asyncio.Transport, self))

    def data_received(self, data: bytes) -> None:
        self._channel.stream.feed(data)
        self.deliver()

    def eof_received(self) -> bool | None:
        self._channel.stream.feed(b"")
        return self.deliver()

    def deliver(self) -> bool:
        """Pass on what has arrived; return whether the connection stays open for what the protocol still sends."""
        channel = self._channel
        stream = channel.stream
        parts = []
        try:
            while stream.readable:
                parts.append(channel.read(_READ))
        except TlsError as error:
            self._failure = TlsFailed(str(error), error.final)
            self._carrier.abort()
            return False
        if data := b"".join(parts):
            self._protocol.data_received(data)
        if stream.ended and not self._ended:
            self._ended = True
            if not self._protocol.eof_received():
                self.close()
        return not self._carrier.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(self._failure or error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
