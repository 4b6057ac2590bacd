"""TLS at a server: its certificate, the handshakes under way, and the plaintext of one connection.

The stream itself, which both ends use, is in `session/tls.py`; the client's end is `client/tls.py`.

It knows certificate files and how a connection is read and written. It must not know sessions or commands.

Invariants: nothing is allocated for TLS before a peer's first byte asks for it. At most `MOST_HANDSHAKES` handshakes
are under way. Plaintext counts as sent once the kernel has taken its ciphertext, so that unsent bytes are counted as on
plain connections. A certificate that cannot be loaded leaves the previous one in use.
"""

import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

from ..auth.secret_files import TlsFiles, load_certificates
from ..base.errors import DistNetworkError, ProtocolError
from ..session.tls import TlsStream
from ..session.transport import Transport

MOST_HANDSHAKES: Final = 512
"""Handshakes under way at once; beyond that, the oldest is closed."""

TLS_BYTES: Final = 64 * 1024
"""Bytes counted for TLS on one connection, besides the connection itself. Measured: 16 KiB after the handshake, 30 to
43 KiB during it, and 46 KiB once it has carried large values."""

CIPHERTEXT: Final = 17 * 1024
"""Bytes read at once: the largest record fits."""

CIPHERTEXT_ON: Final = 128 * 1024
"""Bytes read at once within a large value."""

_RECORD: Final = 16 * 1024

_CHUNK: Final = 64 * 1024
"""Bytes encrypted at once, whose ciphertext is kept if the kernel does not take it."""

log = logging.getLogger("tcpstore_async.server")


class ServerTls:
    """The certificate of one server, and its handshakes under way."""

    def __init__(self, files: TlsFiles, required: bool = False) -> None:
        """Raises DistNetworkError if a file cannot be used."""
        self.files = files
        self.required = required
        """Whether peers must use TLS."""
        self.context = make_context(files)
        self.handshakes: dict[Transport, bool] = {}
        """Connections with a handshake under way, oldest first."""

    def reload(self) -> None:
        """Reload the files, for new connections; if that fails, log it and keep the previous context."""
        try:
            self.context = make_context(self.files)
        except DistNetworkError as error:
            log.error("%s; the previous certificate stays in use", error)
        else:
            log.info("reloaded the certificate %s", self.files.cert)

    def begin(self, connection: Transport) -> Transport | None:
        """Count a handshake; if there are too many, return the oldest connection for the caller to close."""
        handshakes = self.handshakes
        handshakes[connection] = True
        return next(iter(handshakes)) if len(handshakes) > MOST_HANDSHAKES else None

    def end(self, connection: Transport) -> None:
        """Stop counting a handshake. Idempotent."""
        self.handshakes.pop(connection, None)


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server. Raises DistNetworkError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # clients do not resume TLS sessions, and each ticket costs a write
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    load_certificates(context, files)
    return context


class TlsChannel:
    """The plaintext of one connection, read and written like a non-blocking descriptor."""

    def __init__(self, context: ssl.SSLContext, send: Callable[[Any], int]) -> None:
        """`send` writes to the connection: it returns how many bytes the kernel took, or raises OSError."""
        self.stream = TlsStream(context)
        self.send = send
        self._ciphertext: Any = None
        """Ciphertext that the kernel has not taken: bytes or a memoryview, or None."""
        self._owed: int = 0
        """Bytes of plaintext in `_ciphertext`, not yet reported as written."""

    def behind(self) -> bool:
        """Return whether the kernel has not taken all ciphertext."""
        return self._ciphertext is not None

    def shake_hands(self) -> bool:
        """Continue the handshake; return whether it is complete. Raises TlsError and OSError."""
        try:
            return self.stream.shake_hands()
        finally:
            try:
                self.push()
            except BlockingIOError:
                pass  # the caller checks `behind`

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of plaintext, b"" if there is none. Raises TlsError."""
        stream = self.stream
        data = stream.read(size)
        if not stream.readable or len(data) >= size:
            return data
        parts = [data]
        left = size - len(data)
        while left > 0 and stream.readable:
            data = stream.read(left)
            parts.append(data)
            left -= len(data)
        return b"".join(parts)

    def read_into(self, space: memoryview) -> int:
        """Read plaintext into a buffer; return the number of bytes. Raises TlsError."""
        stream = self.stream
        count = 0
        while count < len(space) and stream.readable:
            count += stream.read_into(space[count:] if count else space)
        return count

    def write(self, pieces: list[Any]) -> int:
        """Write; return the number of plaintext bytes whose ciphertext the kernel took.

        The next call must begin with the bytes that were not taken. Raises BlockingIOError if none were, and OSError.
        """
        taken = 0
        if self._owed or self._ciphertext is not None:
            self.push()
            taken = min(self._owed, sum([len(piece) for piece in pieces]))
            self._owed -= taken
        fits = not taken and len(pieces) == 1 and 0 < len(pieces[0]) <= _RECORD  # most do
        for chunk in pieces if fits else _chunks(pieces, taken):
            self._encrypt(chunk)
            try:
                self.push()
            except BlockingIOError:
                self._owed = len(chunk)
                if not taken:
                    raise
                return taken
            taken += len(chunk)
        return taken

    def _encrypt(self, chunk: Any) -> None:
        stream = self.stream
        try:
            if len(chunk) <= _RECORD:
                stream.write(chunk)
                return
            view = memoryview(chunk)
            made = []
            for at in range(0, len(view), _RECORD):
                stream.write(view[at : at + _RECORD])
                made.append(stream.outgoing())  # after each record, because OpenSSL's buffer never shrinks
            self._ciphertext = b"".join(made)
        except ProtocolError as error:
            raise ConnectionResetError(str(error)) from None

    def push(self) -> None:
        """Send all ciphertext. Raises BlockingIOError if the kernel does not take all of it, and OSError."""
        kept = self._ciphertext
        if kept is not None:
            self._push(kept)
        made = self.stream.outgoing()
        if made:
            self._push(made)

    def _push(self, data: Any) -> None:
        self._ciphertext = data
        size: int = len(data)
        while (count := self.send(data)) < size:
            data = self._ciphertext = memoryview(data)[count:]
            size -= count
        self._ciphertext = None

    def finish(self) -> None:
        """Send close_notify, if the kernel takes it at once."""
        if self.stream.established and self._ciphertext is None:
            self.stream.finish()
            try:
                self.push()
            except OSError:
                pass  # the end of the connection says the same


def _chunks(pieces: list[Any], skipped: int) -> Any:
    """Yield the bytes after the first `skipped`, in chunks of up to `_CHUNK` bytes."""
    joined: list[Any] = []
    size = 0
    for piece in pieces:
        view = memoryview(piece)
        if skipped:
            cut = min(skipped, len(view))
            skipped -= cut
            view = view[cut:]
        while view:
            part = view[: _CHUNK - size]
            view = view[len(part) :]
            joined.append(part)
            size += len(part)
            if size == _CHUNK:
                yield joined[0] if len(joined) == 1 else b"".join(joined)
                joined = []
                size = 0
    if joined:
        yield joined[0] if len(joined) == 1 else b"".join(joined)
