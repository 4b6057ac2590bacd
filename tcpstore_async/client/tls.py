"""TLS for a client: a plain connection on loopback, whose other end is bridged to the TLS connection.

The stream itself, which both ends use, is in `session/tls.py`; the server's end is `server/tls.py`.

It knows certificates of clients, and sockets. It must not know the bytes it carries, or their sender.

All code that uses a connection counts bytes, is interrupted, forks and polls descriptors as on plain TCP; so it gets
plain TCP, from a loop of this process to itself. The loop is the running one for an asynchronous store or a relay, and
the background loop (`background.py`) for synchronous stores.

Invariants: only this process is at the other end of the pair. An orderly end is passed on as one, and a break as a
reset. A peer that stops reading is not written to. Data written before a connection is closed is sent within a second,
as the kernel would. A forked child keeps no copy.
"""

import asyncio
import functools
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from typing import Final, Protocol

from ..auth.secret_files import TlsFiles, load_certificates
from ..base.callbacks import weakly
from ..base.errors import AccessDeniedError, DistNetworkError
from ..session.tls import TlsError, TlsStream
from . import background
from .tls_settings import CERT, KEY

_READ: Final = 128 * 1024

_LAST_SECONDS: Final = 1.0
"""Seconds for sending the rest of the data before closing."""

_PAIR_SECONDS: Final = 5.0

_LINGER_SECONDS: Final = 10.0
"""Seconds for which the server may still send after the client's orderly end."""

_RESET: Final = struct.pack("ii", 1, 0)

_NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
"""For sends in a caller's thread; the loop's thread blocks signals."""

log = logging.getLogger("tcpstore_async.client")


class TlsFailed(ConnectionError):
    """The TLS handshake failed, or a certificate was not accepted."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final
        """Whether another attempt would end the same way."""


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


class Waiting(Protocol):
    """The deadline of an attempt to connect, in a thread without a loop."""

    def wait_for(self, peer: socket.socket, event: int) -> None:
        """Wait for an event of a socket. Raises TimeoutError, among others."""
        ...


class ClientTls:
    """The TLS connections of one store or relay: how to make them, and their bridges."""

    def __init__(self, files: TlsFiles, in_background: bool = False) -> None:
        """`in_background` is for synchronous stores. Raises DistNetworkError if a file cannot be used."""
        self.files = files
        self.in_background = in_background
        self.bridges: set[Bridge] = set()
        self.failure: TlsFailed | None = None
        """Why the server has ended the last connection that failed."""
        make_context(files)

    def renewed(self) -> "ClientTls":
        """Return a copy without bridges, for a forked child or a clone."""
        renewed = ClientTls.__new__(ClientTls)
        renewed.files = self.files
        renewed.in_background = self.in_background
        renewed.bridges = set()
        renewed.failure = None
        return renewed

    def cause(self) -> TlsFailed | None:
        """Return why the server has ended a connection, if that is known, and forget it."""
        failure, self.failure = self.failure, None
        return failure

    async def wrap(self, peer: socket.socket, host: str) -> socket.socket:
        """Shake hands on a connection to this host, which is taken over; return the end of a pair that stands for it.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        try:
            stream = self._stream(host)
            while True:
                done, data = _step(stream)
                if data:
                    await loop.sock_sendall(peer, data)
                if done:
                    return self._bridged(peer, stream, loop)
                stream.feed(await loop.sock_recv(peer, _READ))
        except BaseException:
            peer.close()
            raise

    def wrap_blocking(self, peer: socket.socket, host: str, waiting: Waiting) -> socket.socket:
        """Wrap as `wrap` does, in a thread without a loop, a socket that does not block."""
        try:
            stream = self._stream(host)
            while True:
                done, data = _step(stream)
                while data:
                    waiting.wait_for(peer, select.POLLOUT)
                    data = data[peer.send(data, _NO_SIGPIPE) :]
                if done:
                    return self._bridged(peer, stream, None)
                waiting.wait_for(peer, select.POLLIN)
                stream.feed(peer.recv(_READ))
        except BaseException:
            peer.close()
            raise

    def _stream(self, host: str) -> TlsStream:
        self.failure = None
        try:
            return TlsStream(make_context(self.files), host.partition("%")[0])
        except (DistNetworkError, ValueError) as error:
            raise TlsFailed(str(error), True) from None

    def _bridged(self, peer: socket.socket, stream: TlsStream, loop: asyncio.AbstractEventLoop | None) -> socket.socket:
        outer, inner = _pair()
        bridge = Bridge(self, peer, stream, inner)
        self.bridges.add(bridge)
        try:
            if loop is not None and not self.in_background:
                bridge.keep(loop)
            elif not background.add_service(bridge):
                raise OSError("cannot start the thread that TLS requires")
        except BaseException:
            bridge.abandon()
            outer.close()
            raise
        return outer

    async def close(self) -> None:
        """Wait, up to a second, until all data has been sent; every connection is closed already."""
        tasks = [bridge.task for bridge in self.bridges if bridge.task is not None]
        if tasks:
            for bridge in list(self.bridges):
                bridge.unwatched()
            _, late = await asyncio.wait(tasks, timeout=_LAST_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def close_blocking(self) -> None:
        """Close as `close` does, for a synchronous store."""
        end = time.monotonic() + _LAST_SECONDS
        for bridge in list(self.bridges):
            bridge.unwatched()
        for bridge in list(self.bridges):
            if not bridge.ended.wait(max(0.0, end - time.monotonic())):
                background.call_soon(bridge.finish)
                bridge.ended.wait(2 * _LAST_SECONDS)
        background.await_idle_loops()


def _step(stream: TlsStream) -> tuple[bool, bytes]:
    """Continue a handshake; return whether it is complete, and the bytes to send. Raises TlsFailed."""
    try:
        return stream.shake_hands(), stream.outgoing()
    except TlsError as error:
        raise TlsFailed(str(error), error.final) from None
    except ConnectionError:
        raise TlsFailed("the server closed the connection during the TLS handshake: does it use TLS?", False) from None


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection on loopback; other peers that connect are closed. Raises OSError."""
    with socket.socket() as listener:
        listener.settimeout(_PAIR_SECONDS)
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        outer = socket.socket()
        try:
            outer.settimeout(_PAIR_SECONDS)
            outer.connect(listener.getsockname())
            here = outer.getsockname()
            while True:
                inner, address = listener.accept()
                if address == here:
                    break
                inner.close()
        except BaseException:
            outer.close()
            raise
    for end in (outer, inner):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return outer, inner


class Bridge:
    """Forwards the data of one connection in both directions. Used by the thread of one loop at a time."""

    def __init__(self, tls: ClientTls, peer: socket.socket, stream: TlsStream, inner: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ended = threading.Event()
        self.task: asyncio.Task[None] | None = None
        """On an asynchronous store's loop, the task that closes the bridge with the loop."""
        self._tls = tls
        self._peer = peer
        self._inner = inner
        self._stream = stream
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[None] | None = None
        self._to_server: memoryview | None = None
        """Ciphertext that the kernel has not taken yet."""
        self._to_client: memoryview | None = None
        """Plaintext that the kernel has not taken yet."""
        self._waits_for_client = False
        """Whether the loop watches the client's end for writing."""
        self._client_ended = False
        self._server_ended = False
        self._unwatched = False
        """Whether the client reads no more, because it has closed its end or is about to."""
        _bridges.add(self)

    # Watching the descriptors

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on the running loop until either end closes the connection, or the loop ends."""
        self._over = loop.create_future()
        self.task = loop.create_task(self._keep(self._over))
        self.attach(loop)

    async def _keep(self, over: "asyncio.Future[None]") -> None:
        try:
            await over
        finally:
            self.finish()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on this loop. Idempotent."""
        if self._loop is not None or self.ended.is_set():
            return
        self._loop = loop
        if self._to_client is None and not self._server_ended:
            loop.add_reader(self._peer, self._from_server)
        self._waits_for_client = self._to_client is not None
        if self._to_client is not None:
            loop.add_writer(self._inner, self._more_to_client)
        if self._to_server is None and not self._client_ended:
            loop.add_reader(self._inner, self._from_client)
        if self._to_server is not None:
            loop.add_writer(self._peer, self._more_to_server)
        if self._stream.readable:
            loop.call_soon(self._from_stream)

    def detach(self) -> None:
        """Stop serving, for now or for good."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for end in (self._peer, self._inner):
                loop.remove_reader(end)
                loop.remove_writer(end)

    def unwatched(self) -> None:
        """End as soon as the client's data is sent, as it reads no more. From any thread."""
        self._unwatched = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._check_end)
            except RuntimeError:
                pass  # the loop is closed

    def close_inherited(self) -> None:
        """Close the copies of the descriptors in a forked child; the parent still uses them."""
        self._loop = None
        self.ended = threading.Event()
        self.ended.set()
        for end in (self._peer, self._inner):
            end.close()

    # From the client to the server

    def _from_client(self) -> None:
        try:
            data = self._inner.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abandon()
            return
        self._encrypt(data)
        self._more_to_server()

    def _encrypt(self, data: bytes) -> None:
        """Encrypt the client's data, or its end."""
        if data:
            self._stream.write(data)
        else:
            self._client_ended = True
            if self._loop is not None:
                self._loop.remove_reader(self._inner)
            self._stream.finish()

    def _more_to_server(self) -> None:
        """Send ciphertext as far as the kernel takes it; read nothing from the client until it has taken all."""
        waited = self._to_server is not None
        data = self._to_server
        while True:
            if data is None or not data:
                made = self._stream.outgoing()
                if not made:
                    break
                data = memoryview(made)
            try:
                data = data[self._peer.send(data) :]
            except (BlockingIOError, InterruptedError):
                self._to_server = data
                loop = self._loop
                if not waited and loop is not None:
                    loop.remove_reader(self._inner)
                    loop.add_writer(self._peer, self._more_to_server)
                return
            except OSError:
                self._server_broke()
                return
        self._to_server = None
        loop = self._loop
        if waited and loop is not None:
            loop.remove_writer(self._peer)
            if not self._client_ended:
                loop.add_reader(self._inner, self._from_client)
        if self._client_ended:
            self._end_to_server()

    def _end_to_server(self) -> None:
        try:
            self._peer.shutdown(socket.SHUT_WR)
        except OSError:
            self.abandon()
            return
        self._check_end()
        if self._loop is not None and not self.ended.is_set():
            self._loop.call_later(_LINGER_SECONDS, weakly(self.abandon))

    def _server_broke(self) -> None:
        """After a failed write, read what the server may have sent before: an alert says why it has ended."""
        try:
            while chunk := self._peer.recv(_READ):
                self._stream.feed(chunk)
                while self._stream.readable:
                    self._stream.read(_READ)
        except TlsError as error:
            self._tls.failure = TlsFailed(str(error), error.final)
        except OSError:
            pass
        self.abandon()

    # From the server to the client

    def _from_server(self) -> None:
        try:
            chunk = self._peer.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abandon()
            return
        self._stream.feed(chunk)
        self._from_stream()

    def _from_stream(self) -> None:
        if self.ended.is_set() or self._server_ended:
            return
        stream = self._stream
        parts: list[bytes] = []
        try:
            while stream.readable:
                parts.append(stream.read(_READ))
        except TlsError as error:
            self._tls.failure = TlsFailed(str(error), error.final)
            self.abandon()
            return
        data = b"".join(parts)
        if stream.ended:
            self._server_ended = True
            if self._loop is not None:
                self._loop.remove_reader(self._peer)
        if data:
            self._to_client = memoryview(data)
            self._more_to_client()
        elif stream.ended:
            self._end_to_client()
        if stream.has_output() and self._to_server is None and not self.ended.is_set():
            self._more_to_server()  # of TLS itself, such as a key update

    def _more_to_client(self) -> None:
        """Write plaintext as far as the kernel takes it; read nothing from the server until it has taken all."""
        data = self._to_client
        loop = self._loop
        while data:
            try:
                data = self._to_client = data[self._inner.send(data) :]
            except (BlockingIOError, InterruptedError):
                if loop is not None and not self._waits_for_client:
                    self._waits_for_client = True
                    loop.remove_reader(self._peer)
                    loop.add_writer(self._inner, self._more_to_client)
                return
            except OSError:
                self.abandon()
                return
        self._to_client = None
        if loop is not None and self._waits_for_client:
            self._waits_for_client = False
            loop.remove_writer(self._inner)
            if not self._server_ended:
                loop.add_reader(self._peer, self._from_server)
        if self._server_ended:
            self._end_to_client()

    def _end_to_client(self) -> None:
        try:
            self._inner.shutdown(socket.SHUT_WR)
        except OSError:
            self.abandon()
            return
        self._check_end()

    # The end

    def _check_end(self) -> None:
        """Close both connections once no more data can arrive or be used."""
        if self._client_ended and self._to_server is None and (self._unwatched or self._server_ended):
            self._close()

    def abandon(self) -> None:
        """Reset both connections. Idempotent."""
        if not self.ended.is_set():
            for end in (self._peer, self._inner):
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                except OSError:
                    pass  # it is not connected any more
            self._close()

    def finish(self) -> None:
        """Without a loop, send the client's data, within a second, and close. Idempotent."""
        if self.ended.is_set():
            return
        self.detach()
        end = time.monotonic() + _LAST_SECONDS
        try:
            self._send_waiting(end)
            while not self._client_ended:
                self._encrypt(self._inner.recv(_READ))
                self._send_waiting(end)
        except BlockingIOError:
            self._end_now(end)
        except (OSError, TlsError):
            pass
        self._close()

    def _end_now(self, end: float) -> None:
        try:
            self._encrypt(b"")
            self._send_waiting(end)
        except OSError:
            pass

    def _send_waiting(self, end: float) -> None:
        data = self._to_server or b""
        self._to_server = None
        made = b"".join([data, self._stream.outgoing()])
        if made:
            self._peer.settimeout(max(0.001, end - time.monotonic()))
            self._peer.sendall(made, _NO_SIGPIPE)

    def _close(self) -> None:
        self.detach()
        self._peer.close()
        self._inner.close()
        self._tls.bridges.discard(self)
        self.ended.set()
        if self._over is None:
            background.remove_service(self)
        elif not self._over.done():
            self._over.set_result(None)


_bridges: Final[weakref.WeakSet[Bridge]] = weakref.WeakSet()


def _close_inherited() -> None:
    for bridge in list(_bridges):
        bridge.close_inherited()
    _bridges.clear()


os.register_at_fork(after_in_child=_close_inherited)
