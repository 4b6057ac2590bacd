"""Raw peers that use TLS, by the standard library's blocking sockets: nothing here is ours."""

from __future__ import annotations

import socket
import ssl

from support import HANDSHAKE, LIMIT, RawPeer
from tls.certificates import Pair, certificates


def context(pair: Pair | None = None, ca: str = "") -> ssl.SSLContext:
    """What a client uses that trusts our CA, or another one."""
    made = ssl.create_default_context(cafile=ca or certificates().ours.ca)
    if pair is not None:
        made.load_cert_chain(pair.cert, pair.key)
    return made


class TlsSocket:
    """An SSLSocket that behaves like a plain one: half-closes, and says in the same way that there is nothing."""

    def __init__(self, plain: socket.socket, using: ssl.SSLContext, host: str) -> None:
        self._tls = using.wrap_socket(plain, server_hostname=host)

    def sendall(self, data: bytes) -> None:
        try:
            self._tls.sendall(data)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise BrokenPipeError from None

    def recv(self, count: int) -> bytes:
        try:
            return self._tls.recv(count)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)

    def settimeout(self, seconds: float) -> None:
        self._tls.settimeout(seconds)

    def setsockopt(self, *given: object) -> None:
        self._tls.setsockopt(*given)  # type: ignore[call-overload]

    def close(self) -> None:
        self._tls.close()


class TlsPeer(RawPeer):
    """A raw peer that uses TLS."""

    def __init__(
        self, port: int, *, validate: bool = True, using: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.socket = TlsSocket(plain, using or context(), host)  # type: ignore[assignment]
        except BaseException:
            plain.close()
            raise
        if validate:
            self.send(HANDSHAKE)
