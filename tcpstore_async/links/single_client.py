"""The client's end of a single link: what was sent and received on a connection, so that another can take its place.

Without I/O. It must not know how bytes travel, what time it is, or what they mean.

Invariant: after `resume` the server gets every byte that was sent once and in order, and so does the client; or
`resume` raises. `sent` is changed by one step of C code at a time, or by two between which no interrupt can strike, so
that an interrupt finds it as it is.
"""

import errno
import secrets
from typing import Final

from ..base.errors import ProtocolError
from ..session.client import PendingCall
from ..session.identity import build
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD
from ..wire.link import VERSION
from .link import NEW, RESUMED
from .link_client import link_fields, read_reply

_COMPILED: Final = build() == "compiled"

ACKNOWLEDGED_BYTES: Final = 1024
"""Bytes of replies after which the next request acknowledges them: the server keeps them until then."""

ACKNOWLEDGED_AT_ONCE: Final = 64 * 1024
"""Bytes of replies that are acknowledged without waiting for a request."""

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
        self.sent: list[tuple[int, bytes, PendingCall | None]] = [(0, b"", None)]
        """What was sent, in part at least, in order, and the call that each request is for. The first item stands for
        what the server is known to have taken, and starts with the number of those bytes; in others that is 0."""
        self.unanswered: int = 0
        """About how many bytes of requests without a reply were sent since the last reply."""
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
        """Take the reply to the first LINK. Returns whether there is a link. Raises ProtocolError."""
        reply = read_reply(raw)
        self._instance = reply.instance
        self.grace = reply.grace
        return reply.status == NEW

    def resume(self, raw: bytes) -> bytes:
        """Take the reply to a later LINK, and return what has to be sent again. Raises ProtocolError."""
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
        """Data was sent, in part at least."""
        self.sent.append((0, data, call))

    def answered(self, call: PendingCall) -> None:
        """The server has taken everything up to the end of this call's request, as it has replied to that."""
        total = 0
        if _COMPILED and len(self.sent) == 2:  # no interrupt finds one of the steps below alone
            _, data, owner = self.sent[1]
            if owner is call:
                self.sent[0] = (self.sent[0][0] + len(data), b"", None)
                self.sent.pop()
                self.unanswered = 0
            return
        for number, (before, data, owner) in enumerate(self.sent):
            total += before + len(data)
            if owner is call:
                self.sent[: number + 1] = [(total, b"", None)]
                self.unanswered = 0
                return

    def acknowledgement(self, least: int = ACKNOWLEDGED_BYTES) -> bytes:
        """Return what to send before the next request; nothing if fewer bytes were received since the last one."""
        if self.received - self._told < least:
            return b""
        self._told = self.received
        taken = BY_METHOD["taken"]
        return taken.prefix + taken.request.encode((self.received,))
