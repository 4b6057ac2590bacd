"""One TLS connection without its I/O: ciphertext in and out on one side, plaintext on the other.

Both ends use it: the server on its poller, `client/tls.py` for clients and relays, which load the certificates.

It knows OpenSSL's stream and says in plain words why a handshake failed. It must not know how bytes travel, or what the
plaintext means.

Invariants: every byte that is fed can be read before more is asked for, so that no plaintext is left where a poller
cannot see it. Plaintext counts as sent once the kernel has taken its ciphertext, so that unsent bytes are counted as on
plain connections. The end of the connection counts as the end of the stream, with or without close_notify, as on plain
TCP.
"""

import errno
import ssl
from collections.abc import Callable
from typing import Any, Final

from ..base.errors import ProtocolError

HANDSHAKE: Final = 0x16
"""The first byte that a TLS client sends; that of every other peer is the opcode of VALIDATE."""

MISMATCH: Final = bytes((0x15, 3, 3, 0, 2, 2, 10))
"""The alert `unexpected_message`: what a server sends to a peer that uses TLS where there is none, or does not use it
where it is required, so that the peer can say what is wrong. As a store's reply it makes no sense: it is too short for
one with eight bytes, and shorter ones do not begin so."""

CIPHERTEXT: Final = 17 * 1024
"""Bytes received, or given to OpenSSL, at once: one record of the largest size fits."""

_RECORD: Final = 16 * 1024

_CHUNK: Final = 64 * 1024
"""Bytes encrypted at once, whose ciphertext is kept if the kernel does not take it."""

_MOST_ANSWERS: Final = 64 * 1024
"""Bytes that TLS itself may have to say to a peer: what is written does not stay where these are collected. An answer
is as long as what asks for it, so nothing is looked at before so many bytes have been fed."""

_REASONS: Final = (
    ("UNSUPPORTED_PROTOCOL", "the peer does not offer TLS 1.3"),
    ("ALERT_PROTOCOL_VERSION", "the peer does not accept TLS 1.3"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "the peer did not send the required certificate"),
    ("ALERT_CERTIFICATE_REQUIRED", "the peer requires a certificate (TCPSTORE_CERT and TCPSTORE_KEY)"),
    ("ALERT_UNKNOWN_CA", "the peer does not trust our certificate's CA"),
    ("ALERT_CERTIFICATE_EXPIRED", "the peer says that our certificate has expired"),
    ("ALERT_BAD_CERTIFICATE", "the peer rejected our certificate"),
    ("ALERT_CERTIFICATE_UNKNOWN", "the peer rejected our certificate"),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "the peer rejected our certificate"),
    ("NO_SHARED_CIPHER", "the peer offers no TLS 1.3 cipher"),
    ("WRONG_VERSION_NUMBER", "the peer sent something that is not TLS"),
    ("HTTP_REQUEST", "the peer sent something that is not TLS"),
    ("UNKNOWN_PROTOCOL", "the peer sent something that is not TLS"),
    ("PACKET_LENGTH", "the peer sent something that is not TLS"),
    ("BAD_RECORD_TYPE", "the peer sent something that is not TLS"),
    ("ALERT_UNEXPECTED_MESSAGE", "the peer does not use TLS"),
    ("UNEXPECTED_MESSAGE", "the peer sent something that is not TLS"),
)
"""Parts of OpenSSL's error names, and what they mean to the reader of the log."""

_FINAL: Final = (
    "CERTIFICATE",
    "UNKNOWN_CA",
    "PROTOCOL",
    "WRONG_VERSION",
    "BAD_RECORD_TYPE",
    "ALERT_UNEXPECTED_MESSAGE",
)
"""Parts of the names of errors that do not pass by themselves."""


class TlsError(ProtocolError):
    """What the peer sent is refused by TLS, or it refuses what this side sent."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final
        """Whether another attempt would end the same way, as with a certificate that is not trusted."""


def reason_of(error: ssl.SSLError) -> str:
    """Return what was wrong with the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate was not accepted: certificate verify failed: {error.verify_message}"
    name = _name_of(error)
    for part, text in _REASONS:
        if part in name:
            return text
    return name.replace("_", " ").lower() or str(error)


def _name_of(error: Any) -> str:
    """Return OpenSSL's name of an error; "" if it has none, though its type says otherwise."""
    return error.reason or ""


class TlsStream:
    """One end of a TLS connection."""

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host` is the name or address that the server's certificate must have; None for the server itself."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object: Any = context.wrap_bio(self._incoming, self._outgoing, host is None, host)
        self._waiting = b""
        """What has been fed, and not been given to OpenSSL yet."""
        self._unanswered: int = 0
        """Bytes fed, since the output was taken last, to which TLS itself may have answered."""
        self._eof = False
        """Whether the connection brings no more. OpenSSL is not told: it would send an alert, not what follows."""
        self.established = False
        self.ended = False
        """Whether the end of what the peer sends has been read."""
        self.readable = False
        """Whether there may be something to read without further ciphertext; if not, OpenSSL has read all it got."""

    def feed(self, chunk: bytes) -> None:
        """Take what the connection has brought; nothing stands for its end."""
        size = len(chunk)
        self._unanswered += size
        if not size:
            self._eof = True
        elif not self.readable and not self._waiting and size <= CIPHERTEXT:
            self._incoming.write(chunk)
        else:
            self._waiting = self._waiting + chunk if self._waiting else chunk
            if not self._incoming.pending:
                self._refill()
        self.readable = True

    def _refill(self) -> bool:
        """Pass fed data on to OpenSSL; return False if none is left.

        Little at a time: its buffers never shrink.
        """
        waiting = self._waiting
        if not waiting:
            return False
        if len(waiting) <= CIPHERTEXT:
            self._incoming.write(waiting)
            self._waiting = b""
        else:
            self._incoming.write(waiting[:CIPHERTEXT])
            self._waiting = waiting[CIPHERTEXT:]
        return True

    def outgoing(self) -> bytes:
        """Return the ciphertext for the connection, which has to be sent before that of later calls."""
        self._unanswered = len(self._waiting)
        return self._outgoing.read()

    def shake_hands(self) -> bool:
        """Continue the handshake; return whether it is complete. There may be output, even after an error.

        Raises TlsError, and ConnectionError if the peer closed the connection.
        """
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            if self._refill():
                return self.shake_hands()
            if self._eof:
                raise ConnectionResetError("it closed the connection during the TLS handshake") from None
            self.readable = False
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError("it closed the connection during the TLS handshake") from None
        except ssl.SSLError as error:
            raise TlsError(f"TLS handshake failed: {reason_of(error)}", _is_final(error)) from None
        self.established = True
        return True

    def certified(self) -> bool:
        """Return whether the peer has shown a certificate, which was verified."""
        return bool(self._object.getpeercert(True))

    def read_into(self, space: memoryview) -> int:
        """Read plaintext into a buffer; return the number of bytes, 0 as `read` returns none. Raises TlsError."""
        count: int = self.read(len(space), space) or 0
        return count

    def read(self, size: int, space: memoryview | None = None) -> Any:
        """Return up to `size` bytes of plaintext; none if ciphertext is missing, or at the end. Raises TlsError.

        With `space`, read into that, and return the number of bytes.
        """
        if self._unanswered > _MOST_ANSWERS and self._outgoing.pending > _MOST_ANSWERS:
            raise TlsError("TLS failed: the peer keeps requesting key updates", False)
        try:
            found = self._object.read(size, space)
        except ssl.SSLWantReadError:
            if self._refill():
                return self.read(size, space)
            self.readable = False
            self.ended = self._eof
            return b""
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._end()
            return b""
        except ssl.SSLError as error:
            raise TlsError(f"TLS failed: {reason_of(error)}", _is_final(error)) from None
        count = len(found) if space is None else found
        if not count:
            self._end()
        elif count < size and not self._incoming.pending and not self._waiting:
            self.readable = False
            self.ended = self._eof
        return found

    def write(self, data: Any) -> None:
        """Encrypt bytes, at least one: all of them are in `outgoing` then. Raises ConnectionResetError."""
        try:
            self._object.write(data)
        except ssl.SSLError as error:
            raise ConnectionResetError(errno.ECONNRESET, f"TLS failed: {reason_of(error)}") from None

    def finish(self) -> None:
        """Tell the peer that nothing follows."""
        try:
            self._object.unwrap()
        except (ssl.SSLError, OSError, ValueError):
            pass  # it waits for the peer to say so too, which is not needed

    def _end(self) -> None:
        self.ended = True
        self.readable = False


class TlsChannel:
    """The plaintext of one connection, read and written like a non-blocking descriptor."""

    def __init__(self, stream: TlsStream, send: Callable[[Any], int]) -> None:
        """`send` writes to the connection: it returns how many bytes the kernel took, or raises OSError."""
        self.stream = stream
        self.send = send
        self._ciphertext: Any = None
        """Ciphertext that the kernel has not taken: bytes or a memoryview, or None."""
        self.owed: int = 0
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
        data: bytes = stream.read(size)
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
        if self._ciphertext is None and not self.owed and len(pieces) == 1 and 0 < len(pieces[0]) <= _RECORD:
            self.stream.write(pieces[0])  # the common case, inlined
            made = self._ciphertext = self.stream.outgoing()
            self.owed = len(pieces[0])
            count = self.send(made)
            if count == len(made):
                taken, self.owed = self.owed, 0
                self._ciphertext = None
                return taken
            self._ciphertext = memoryview(made)[count:]
        if self.owed or self._ciphertext is not None:
            self.push()
            taken = min(self.owed, sum([len(piece) for piece in pieces]))
            self.owed -= taken
        for chunk in _chunks(pieces, taken):
            made = self._encrypt(chunk)
            try:
                self._push(made)
            except BlockingIOError:
                self.owed = len(chunk)
                if not taken:
                    raise
                return taken
            taken += len(chunk)
        return taken

    def _encrypt(self, chunk: Any) -> bytes:
        """Return the ciphertext, after that of answers of TLS itself, such as to a key update."""
        stream = self.stream
        view = memoryview(chunk)
        made = []
        for at in range(0, len(view), _RECORD):
            stream.write(view[at : at + _RECORD])
            made.append(stream.outgoing())  # after each record, because OpenSSL's buffer never shrinks
        return b"".join(made)

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


def is_mismatch(reply: bytes) -> bool:
    """Return whether these are the first bytes of an alert of TLS, where a store's reply was expected."""
    return MISMATCH.startswith(reply[:2]) and len(reply) > 0


def _is_final(error: ssl.SSLError) -> bool:
    """Whether the error is about certificates or versions, which do not change by themselves."""
    name = _name_of(error)
    return isinstance(error, ssl.SSLCertVerificationError) or any(part in name for part in _FINAL)


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
