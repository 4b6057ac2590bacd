"""The client's end of a link, held by a relay: streams of bytes that share a connection.

Without I/O. It knows LINK and what may be sent for each stream. It must not know how bytes travel, what time it is, or
what the bytes mean.

Invariants: bytes travel in both directions in order and once, however often the connection breaks, until the server
gives the link up. No more is sent for a stream than the server has given credit for.
"""

import secrets
from typing import Final

import msgspec

from ..base.errors import ProtocolError, counted
from ..base.mypyc_shim import mypyc_attr
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD, MAGIC
from ..wire.link import (
    CLOSE,
    CREDIT,
    DATA,
    DESCRIBE,
    DESCRIPTION_BYTES,
    END_OF_FILE,
    EXAMINE,
    EXAMINED,
    GOING_AWAY,
    LINK,
    LOST,
    OPEN,
    QUESTION,
    REPLY_CREDIT_BYTES,
    REQUEST_CREDIT_BYTES,
    SESSION_MASK,
    U16,
    U32,
    VERSION,
)
from ..wire.values import pack
from .frames import NEW, RESUMED, Link, LinkReply
from .resume import Uncounted

_ALL: Final = 1 << 60

_MOST_SECONDS: Final = 1e9
"""Longest valid time in a reply to LINK."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Stream:
    """One session, as known to its client. Subclasses handle its bytes."""

    def __init__(self) -> None:
        self.number: int = 0
        self.credit: int = REQUEST_CREDIT_BYTES
        """Bytes that may be sent."""
        self.consumed: int = 0
        """Bytes received and consumed for which the server has not been given credit again."""

    def received(self, data: bytes) -> None:
        """Handle bytes from the server; report with `ClientLink.consume` when they are consumed."""
        raise NotImplementedError

    def credited(self) -> None:
        """Note that more may be sent."""
        raise NotImplementedError

    def closed(self) -> None:
        """Note that the server has closed the session; no more bytes follow."""
        raise NotImplementedError


class ClientLink(Link):
    def __init__(self, place: str = "", describe: dict[str, str] | None = None) -> None:
        """Make a link with a new identity.

        `place` identifies the holder of the link, such as the host and port of a relay: a new link ends the previous
        one of its place. `describe` describes the holder: further items of LINK.
        """
        super().__init__(Uncounted())
        self.identity = secrets.token_bytes(16)
        self.secret = secrets.token_bytes(16)
        self.place = place
        self.description = describe or {}
        self.instance: str = ""
        """The instance of the server that has this link; empty before there is one."""
        self.streams: dict[int, Stream] = {}
        self.going_away = False
        """Whether the server admits no more streams."""
        self.is_over = False
        """Whether the server has ended the link."""
        self.describes = False
        """Whether the server accepts descriptions of ranks."""
        self.question: tuple[int, int] | None = None
        """Number of the server's last question, and within how many milliseconds its holder is to `answer` it."""
        self._attempts: int = 0
        """Number of LINKs sent."""
        self._last: int = 0
        self._rest: list[bytes] = []
        """The beginning of an incomplete frame."""
        self._rest_bytes: int = 0
        self._need: int = 0
        """Bytes that the frame needs to be complete, as far as known."""

    # The connection

    def request(self, validate: bool = True) -> bytes:
        """Return the bytes that open or resume the link: LINK, after VALIDATE if the connection is new."""
        self._attempts += 1
        items: dict[str, bytes] = {
            "version": b"%d" % VERSION,
            "id": self.identity,
            "secret": self.secret,
            "place": self.place.encode(),
            "attempt": b"%d" % self._attempts,
        }
        if self.instance:
            items.update(instance=self.instance.encode(), taken=b"%d" % self.taken, told=b"%d" % self.told())
        items.update({name: text.encode() for name, text in self.description.items()})
        request = BY_METHOD["link"].prefix + BY_METHOD["link"].request.encode(link_fields(items))
        if validate:
            first = BY_METHOD["validate"]
            request = first.prefix + first.request.encode((MAGIC,)) + request
        return request

    def answered(self, raw: bytes) -> LinkReply:
        """Handle the server's reply to LINK, without its length. Raises ProtocolError if it is invalid.

        Afterwards `connected` says whether there is a link.
        """
        reply = read_reply(raw)
        self._rest = []
        self._rest_bytes = self._need = 0
        if reply.status == RESUMED and reply.instance != self.instance:
            raise ProtocolError(f"server {reply.instance} resumed a link that belongs to server {self.instance}")
        if reply.status == (RESUMED if self.instance else NEW):
            self.instance = reply.instance
            self.connect(reply.taken)
        return reply

    # Streams

    def open(self, stream: Stream, host: str, port: int) -> None:
        """Open a stream for a peer at this address."""
        if self._last == SESSION_MASK:
            raise ProtocolError(f"a link can open at most {SESSION_MASK} streams")
        self._last += 1
        stream.number = self._last
        self.streams[self._last] = stream
        self.add(OPEN, self._last, U16.pack(port) + host.encode())

    def describe(self, stream: Stream, known: dict[str, str]) -> None:
        """Send what is known about a rank, if the server accepts that and it is not too long."""
        payload = b"\0".join([f"{name}={text}".encode(errors="replace") for name, text in known.items()])
        if self.describes and 0 < len(payload) <= DESCRIPTION_BYTES and stream.number in self.streams:
            self.add(DESCRIBE, stream.number, payload)

    def send(self, stream: Stream, data: bytes) -> None:
        """Send bytes, no more than `stream.credit`, and only if `has_room`."""
        stream.credit -= len(data)
        self.add_data(stream.number, data)

    def consume(self, stream: Stream, count: int) -> None:
        """Allow the server to send `count` more bytes."""
        stream.consumed += count
        if stream.consumed >= REPLY_CREDIT_BYTES // 2 and stream.number in self.streams:
            self.add(CREDIT, stream.number, U32.pack(stream.consumed))
            stream.consumed = 0

    def end(self, stream: Stream) -> None:
        """Send no more on a stream: the server closes it after the last reply."""
        if stream.number in self.streams:
            self.add(CLOSE, stream.number, END_OF_FILE)

    def close(self, stream: Stream) -> None:
        """Close a stream at once."""
        if self.streams.pop(stream.number, None) is not None:
            self.add(CLOSE, stream.number, LOST)

    def answer(self, number: int, report: bytes) -> None:
        """Answer the question of this number."""
        self.add(EXAMINED, LINK, U32.pack(number) + report)

    def close_link(self) -> None:
        """End the link, with all its streams."""
        self.add(CLOSE, LINK, LOST)
        self.untold = 0  # no acknowledgement may follow it

    # In

    def receive(self, chunk: bytes) -> None:
        """Handle bytes from the connection. Raises ProtocolError."""
        if self._rest_bytes:
            self._rest.append(chunk)
            self._rest_bytes += len(chunk)
            if self._rest_bytes < self._need:
                return
            chunk = b"".join(self._rest)
        at, need = self.take(chunk, 0, len(chunk), _ALL)
        self._rest = [chunk[at:]]
        self._rest_bytes = len(chunk) - at
        self._need = need - at

    def handle(self, kind: int, session: int, payload: bytes) -> None:
        stream = self.streams.get(session)
        if kind == DATA:
            if stream is not None:
                stream.received(payload)
        elif kind == CREDIT:
            if len(payload) != 4:
                raise ProtocolError(f"CREDIT with a payload of {counted(len(payload), 'byte')}")
            if stream is not None:
                stream.credit += U32.unpack(payload)[0]
                stream.credited()
        elif kind == CLOSE:
            if session == LINK:
                self.is_over = True
            elif stream is not None:
                del self.streams[session]
                stream.closed()
        elif kind == GOING_AWAY:
            self.going_away = True
        elif kind == EXAMINE and len(payload) == QUESTION.size:
            number, milliseconds = QUESTION.unpack(payload)
            self.question = number, milliseconds
        else:
            raise ProtocolError(f"unexpected frame of kind {kind}")


def link_fields(items: dict[str, bytes]) -> Fields:
    return ([(name.encode(), pack(value)) for name, value in items.items()],)


def read_reply(raw: bytes) -> LinkReply:
    """Decode a reply to LINK, without its length. Raises ProtocolError if it is invalid."""
    reply: LinkReply | None
    try:
        reply = msgspec.json.decode(raw, type=LinkReply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        reply = None
    if reply is None or not (0 <= reply.keep_alive <= _MOST_SECONDS and 0 <= reply.grace <= _MOST_SECONDS):
        raise ProtocolError(f"invalid reply to LINK: {raw[:100]!r}")
    return reply
