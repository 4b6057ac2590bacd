"""The client's end of a single link: what was sent and received on a connection, so that another can take its place.

Without I/O. It must not know how bytes travel, what time it is, or what they mean.

Invariant: after `resume` the server gets every byte that was sent once and in order, and so does the client; or
`resume` raises. An interrupt between a system call and its count makes the counts inexact, which is noticed: then the
link cannot be resumed any more, and nothing else changes.
"""

import errno
import secrets
from typing import Final

from ..errors import ProtocolError
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD
from ..wire.link import VERSION
from .client import PendingCall
from .link import NEW, RESUMED
from .link_client import link_fields, read_reply

_TOLD_EVERY: Final = 1024
"""Bytes of replies after which they are acknowledged: the server keeps them until then."""

UNANSWERED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of requests without a later reply from which on a client asks for one: it keeps them until then."""

_BREAKS: Final = frozenset(
    (
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
    )
)
"""Errors of a connection that breaks. EPIPE is none: the peer has closed the connection before."""


def is_break(error: BaseException | None) -> bool:
    """Return whether a connection is broken, as opposed to closed by the server."""
    return isinstance(error, OSError) and error.errno in _BREAKS


class ClientSingleLink:
    """The client's end of one single link."""

    def __init__(self) -> None:
        self.grace: float = 0.0
        """Seconds for which the server keeps the session of a broken connection."""
        self.writing = False
        """Whether something is being sent that is not noted yet."""
        self.reading = False
        """Whether something is being received that is not counted yet."""
        self._identity = secrets.token_bytes(16)
        self._secret = secrets.token_bytes(16)
        self._instance = ""
        self._attempts: int = 0
        self._exact = True
        self._sent: list[tuple[int, bytes]] = [(0, b"")]
        """What was sent, each with the number of bytes up to its end. The server has taken the first one."""
        self._received: int = 0
        self._told: int = 0

    # LINK

    def fields(self) -> Fields:
        """Return the fields of LINK: for a new link, or to resume it."""
        self._attempts += 1
        items = {
            "version": b"%d" % VERSION,
            "single": b"1",
            "id": self._identity,
            "secret": self._secret,
            "attempt": b"%d" % self._attempts,
        }
        if self._instance:
            items.update(instance=self._instance.encode(), taken=b"%d" % self._received)
        return link_fields(items)

    def begun(self, raw: bytes) -> bool:
        """Take the reply to the first LINK. Returns whether there is a link. Raises ProtocolError."""
        reply = read_reply(raw)
        self._instance = reply.instance
        self.grace = reply.grace
        return reply.status == NEW

    def resume(self, raw: bytes) -> bytes:
        """Take the reply to a later LINK, and return what has to be sent again. Raises ProtocolError."""
        reply = read_reply(raw)
        sent = self._sent
        if reply.status != RESUMED or not sent[0][0] <= reply.taken <= sent[-1][0]:
            raise ProtocolError(f"the server has not kept the session ({reply.status})")
        self._told = self._received
        rest: list[bytes] = []
        for end, data in sent[1:]:
            if end > reply.taken:
                rest.append(data[max(0, len(data) - (end - reply.taken)) :])
        return b"".join(rest)

    def can_resume(self) -> bool:
        """Return whether it is known what was sent and received."""
        return self._exact and not self.writing and not self.reading

    # Sending

    def begin_writing(self) -> None:
        """Something is about to be sent: call `note`, or reset `writing` if nothing of it was."""
        if self.writing:  # an interrupt kept what was sent before from being noted, or delays that
            self._exact = False
        self.writing = True

    def note(self, data: bytes, call: PendingCall | None = None) -> None:
        """Data was sent, in part at least, and belongs to a call."""
        end = self._sent[-1][0] + len(data)
        self._sent.append((end, data))
        if call is not None:
            call.end = end
        self.writing = False

    def answered(self, end: int) -> None:
        """The server has taken everything up to this byte, as it has replied to that."""
        sent = self._sent
        count = 0
        for at, _ in sent:
            if at > end:
                break
            count += 1
        if count > 1:
            sent[:count] = [(end, b"")]

    def unanswered(self) -> int:
        """Return the number of bytes that are kept."""
        return self._sent[-1][0] - self._sent[0][0]

    # Receiving

    def begin_reading(self) -> None:
        """Something may be about to be received: call `count`, or reset `reading` if nothing was."""
        if self.reading:
            self._exact = False
        self.reading = True

    def count(self, size: int) -> None:
        """So many bytes were received."""
        self._received += size
        self.reading = False

    def acknowledgement(self) -> bytes:
        """Return a request to send, or nothing while little was received since the last one."""
        if self._received - self._told < _TOLD_EVERY:
            return b""
        self._told = self._received
        taken = BY_METHOD["taken"]
        return taken.prefix + taken.request.encode((self._received,))
