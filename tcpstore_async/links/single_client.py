"""The client's end of a single link: the bytes sent and received on a connection, so that another can replace it.

Without I/O. It must not know how bytes travel, what time it is, or what they mean.

Invariant: after `resume`, both ends get every byte once and in order, or `resume` raises. `sent` is changed by steps
that call nothing in between, so that an interrupt finds it consistent.
"""

import errno
import secrets
from typing import Final

from ..base.errors import ProtocolError
from ..session.client import PendingCall
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD
from ..wire.link import VERSION
from .frames import NEW, RESUMED, UNKNOWN
from .link_client import link_fields, read_reply

ACKNOWLEDGED_BYTES: Final = 1024
"""Bytes of replies, which the server keeps, after which the next request acknowledges them."""

ACKNOWLEDGED_AT_ONCE: Final = 64 * 1024
"""Bytes of replies acknowledged without waiting for a request."""

UNANSWERED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of requests, which the client keeps, after which it asks for a reply."""

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
"""Errors of a broken connection. EPIPE is not one: the peer had closed the connection."""


def is_break(error: BaseException | None) -> bool:
    """Return whether a connection is broken, as opposed to closed by the server."""
    return isinstance(error, OSError) and error.errno in _BREAKS


class ClientSingleLink:
    def __init__(self) -> None:
        self.grace: float = 0.0
        """Seconds for which the server keeps the session of a broken connection."""
        self.durable = False
        """Whether the server, if it comes back, knows the session."""
        self.sent: list[tuple[int, bytes, PendingCall | None]] = [(0, b"", None)]
        """Requests sent, at least in part, in order, each with its call. The first item stands for the bytes that the
        server is known to have taken, and starts with their number; the others start with 0."""
        self.unanswered: int = 0
        """Approximate number of bytes of requests sent since the last reply."""
        self.received: int = 0
        """Bytes of replies since LINK."""
        self._identity = secrets.token_bytes(16)
        self._secret = secrets.token_bytes(16)
        self._instance = ""
        self._attempts: int = 0
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
            items.update(instance=self._instance.encode(), taken=b"%d" % self.received)
        return link_fields(items)

    def begun(self, raw: bytes) -> bool:
        """Handle the reply to the first LINK; return whether there is a link. Raises ProtocolError."""
        reply = read_reply(raw)
        self._instance = reply.instance
        self.grace = reply.grace
        self.durable = reply.durable
        return reply.status == NEW

    def breaks(self, error: BaseException | None) -> bool:
        """Return whether the link can be resumed after an error of its connection, or after its end (None)."""
        return is_break(error) or (self.durable and (error is None or isinstance(error, ConnectionError)))

    def is_unknown_elsewhere(self, raw: bytes) -> bool:
        """Return whether, by the reply to a later LINK, another server than the link's does not know it."""
        reply = read_reply(raw)
        return reply.status == UNKNOWN and reply.instance != self._instance

    def resume(self, raw: bytes) -> bytes:
        """Handle the reply to a later LINK; return the bytes to send again. Raises ProtocolError."""
        reply = read_reply(raw)
        sent = list(self.sent)
        at = sent[0][0]
        total = at + sum([len(data) for _, data, _ in sent])
        if reply.status != RESUMED or not at <= reply.taken <= total:
            why = reply.reason or f"it has restarted, or there was no connection for {self.grace:.0f} s"
            raise ProtocolError(f"the server did not keep the session: {why}")
        self._told = self.received
        rest: list[bytes] = []
        for _, data, _ in sent:
            if at + len(data) > reply.taken:
                rest.append(data[max(0, reply.taken - at) :])
            at += len(data)
        return b"".join(rest)

    # Sending and receiving

    def note(self, data: bytes, call: PendingCall | None = None) -> None:
        """Note that data was sent, at least in part."""
        self.sent.append((0, data, call))

    def answered(self, call: PendingCall) -> None:
        """Note that the server has taken everything up to the request of a call, as it has replied to that."""
        total = 0
        if len(self.sent) == 2:  # the common case
            _, data, owner = self.sent[1]
            if owner is call:
                self.sent[0] = (self.sent[0][0] + len(data), b"", None)
                del self.sent[1]
                self.unanswered = 0
            return
        for number, (before, data, owner) in enumerate(self.sent):
            total += before + len(data)
            if owner is call:
                self.sent[: number + 1] = [(total, b"", None)]
                self.unanswered = 0
                return

    def acknowledgement(self, least: int = ACKNOWLEDGED_BYTES) -> bytes:
        """Return a TAKEN to send before the next request, or b"" if fewer than `least` bytes arrived since the last."""
        if self.received - self._told < least:
            return b""
        self._told = self.received
        taken = BY_METHOD["taken"]
        return taken.prefix + taken.request.encode((self.received,))
