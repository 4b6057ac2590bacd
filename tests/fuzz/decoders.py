"""What reads the bytes of others: each with its invariant, run on any bytes.

What a function here raises is a finding.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hmac
import os
import ssl
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from fuzz.machine import Broken, run
from fuzz.programs import PROGRAMS
from tcpstore_async.auth.access import Access
from tcpstore_async.auth.secret_files import TlsFiles
from tcpstore_async.auth.tokens import TokenKeys, parse_keys
from tcpstore_async.base.errors import AccessDeniedError, DistStoreError, PeerError, ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client import tls as client_tls
from tcpstore_async.links.link_client import ClientLink, Stream, read_reply
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.encoding import decode as decode_events
from tcpstore_async.log.encoding import encode as encode_events
from tcpstore_async.log.journal import read_instance, read_snapshot, segments_of
from tcpstore_async.log.records import REPLAY, Chain, Reader
from tcpstore_async.log.replay import Replayer
from tcpstore_async.log.snapshot import load
from tcpstore_async.server import tls as server_tls
from tcpstore_async.server.process import protocol
from tcpstore_async.server.process.child import Owner
from tcpstore_async.server.process.protocol import Event, LineReader
from tcpstore_async.server.snapshots import engine_of
from tcpstore_async.session.auth import ALL
from tcpstore_async.session.client import ClientSession, PendingCall
from tcpstore_async.session.identity import Identity, read_auth_reply, read_identity
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.tls import MISMATCH, TlsError, TlsStream
from tcpstore_async.session.transport import Transport
from tcpstore_async.stores.file.records import next_record, record
from tcpstore_async.stores.file.replica import Replica
from tcpstore_async.stores.file.store import FileStore
from tcpstore_async.wire.commands import BY_METHOD, COMMANDS, Command
from tcpstore_async.wire.values import ABSENT, pack
from tls.certificates import certificates


def sessions(program: bytes) -> None:
    """Whatever arrives, the server's sessions answer or raise PeerError, and memory stays within Limits."""
    run(program)


# The client's session

ASKED = [command for command in COMMANDS if command.method != "validate"]


def _fields(command: Command, count: int) -> tuple[Any, ...]:
    """Return fields for a command; so many items, if one is a list."""
    if command.method == "enter":
        return ([(b"name", pack(b"a")), (b"owner", pack(b"o"))],)
    keys, pairs = [b"/k"] * count, [(b"/k", pack(b"v"))] * count
    samples = {"u": 7, "n": 3, "k": b"/k", "v": pack(b"v"), "t": pack(b"t"), "l": keys, "i": pairs, "m": pairs}
    return tuple(samples[kind] for kind in command.request.kinds)


def client_session(program: bytes) -> None:
    """Whatever a server answers, calls are done in order, each once, or ProtocolError is raised; no byte is kept twice.

    An instruction is one byte. 0 to 127: the command of that number, modulo how many there are, is sent; 128 to 191:
    the wait is canceled; from 192: so many bytes, less 192, of what follows arrive, those above 250 as many hundreds
    of zeros.
    """
    session = ClientSession()
    sent: list[PendingCall] = []
    done: list[PendingCall] = []
    heard = at = 0
    while at < len(program):
        instruction = program[at]
        at += 1
        if instruction < 128:
            command = ASKED[instruction % len(ASKED)]
            if session.waiting is None:
                _, call = session.request(command, _fields(command, instruction // len(ASKED)))
                if call is not None and not call.done:
                    sent.append(call)
        elif instruction < 192:
            if session.waiting is not None and not session.waiting.canceled:
                session.cancel(session.waiting)
        else:
            count = instruction - 192
            chunk = program[at : at + count] if instruction <= 250 else bytes(100 * (instruction - 250))
            at += count if instruction <= 250 else 0
            heard += len(chunk)
            try:
                done += session.receive(chunk)
            except ProtocolError:
                return
        if done != sent[: len(done)] or not all(call.done for call in done):
            raise Broken("calls are done out of order")
        if list(session.pending) != sent[len(done) :]:
            raise Broken("what is pending is not what was sent and is not done")
        if session.waiting is not None and session.waiting not in session.pending:
            raise Broken("what waits is not pending")
        if not 0 <= session.confirmed <= session.written:
            raise Broken("more writes are confirmed than were sent")
        kept = getattr(session, "_kept", None)
        if kept is not None and len(kept) > heard:
            raise Broken("more is kept than has come")


# The file of a FileStore


def file_records(data: bytes) -> None:
    """Whatever stands in a file: a replica takes whole records from its beginning, whatever it is cut into, and a store
    that opens the file reads what it then writes, or raises DistStoreError and writes nothing to it.
    """
    at = 0
    while (found := next_record(data, at)) is not None:
        key, value, end = found
        if not at < end <= len(data) or data[at:end] != record(key, value):
            raise Broken("a record is not what it was made from")
        at = end
    replica = Replica()
    replica.apply(data)
    if replica.offset != at:
        raise Broken(f"a replica has read {replica.offset} bytes, {at} are whole records")
    pieces = Replica()
    held = b""
    for start in range(0, len(data), 7):
        held += data[start : start + 7]
        before = pieces.offset
        pieces.apply(held)
        held = held[pieces.offset - before :]
    if pieces.keyspace.values != replica.keyspace.values or pieces.keyspace.queues != replica.keyspace.queues:
        raise Broken("a replica that reads in pieces holds something else")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        path.write_bytes(data)
        try:
            store = FileStore(os.fspath(path), -1)
        except DistStoreError:
            if len(path.read_bytes()) > len(data):
                raise Broken("something was written to a file that is no store's") from None
            return
        store.set("fuzz", "written")
        if store.get("fuzz") != b"written" or not store.check(["fuzz"]):
            raise Broken("a store does not read what it has written")
        store.close()


# The messages between a server's process and its owner


class _Socket:
    """What `Lines` reads from: chunks of lengths that the data itself chooses."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, most: int) -> bytes:
        count = 1 + self.data[0] % 16 if self.data else 0
        chunk, self.data = self.data[:count], self.data[count:]
        return chunk


class _Server:
    """What an owner's words are done to."""

    def announce(self, joins: int) -> None:
        str(joins)

    def all_joined(self) -> bool:
        return True


def control_messages(data: bytes) -> None:
    """However the bytes are cut, the lines are the same; a line is an event, or msgspec says that it is none; the
    owner's words are obeyed, or ValueError is raised and the next lines are read as before.
    """
    source: Any = _Socket(data)
    lines = LineReader(source)
    read: list[bytes] = []
    while (more := lines.read()) is not None:
        read += more
    if [*read, lines.rest] != data.split(b"\n"):
        raise Broken("the lines depend on the cuts")
    types: list[Any] = [getattr(protocol, name) for name in ("Event", "LogLine") if hasattr(protocol, name)]
    for line in read:
        for kind in types:
            try:
                event = msgspec.json.decode(line, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if not isinstance(event, kind):
                raise Broken("an event is something else")
    owner: Any = Owner.__new__(Owner)
    owner._joins, owner._complete, owner._over = 0, None, asyncio.Event()
    owner._unwatch = lambda: None
    for line in read:
        try:
            owner._execute(_Server(), line.decode())
        except ValueError:
            pass


# Who a server says it is


def identity(raw: bytes) -> None:
    """Whatever a server says of itself, it is one of ours or None; nothing is raised."""
    found = read_identity(raw)
    if found is not None and not isinstance(found, Identity):
        raise Broken("it is something else")


# Batches, at both ends of a link


class _Fuzzed(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[object] = []

    def received(self, data: bytes) -> None:
        self.log.append(data)

    def credited(self) -> None:
        self.log.append(self.credit)

    def closed(self) -> None:
        self.log.append("closed")


def link_client(data: bytes) -> None:
    """However the bytes are cut, the same is delivered, or the same ProtocolError is raised."""
    outcomes = []
    for size in (max(1, len(data)), 1, 7):
        link = ClientLink()
        streams = [_Fuzzed() for _ in range(3)]
        for stream in streams:
            link.open(stream, "h", 1)
        link.seal()
        link.answered(b'{"status":"new","instance":"one"}')
        error = ""
        try:
            for at in range(0, len(data), size):
                link.receive(data[at : at + size])
        except ProtocolError as refusal:
            error = str(refusal)
        outcomes.append((error, [stream.log for stream in streams], link.taken, link.kept_bytes, link.is_over))
    if outcomes[1:] != outcomes[:-1]:
        raise Broken(f"{outcomes}")


def link_server(data: bytes) -> None:
    """However the bytes are cut, the same is executed and sent; in the end nothing is held."""
    outcomes = []
    for size in (max(1, len(data)), 1, 11):
        store = Store(Limits(sessions=3))
        registry = LinkRegistry(store, "one", 30.0)
        carrier = ServerSession(store, None, "h", 1, 0.0)
        items = {b"version": b"2", b"id": bytes(16), b"secret": bytes(16)}
        registry.open(carrier, [(name, pack(text)) for name, text in items.items()])
        link = registry.links[bytes(16)]
        error = ""
        try:
            for at in range(0, len(data), size):
                carrier.receive(data[at : at + size])
                while carrier.stalled():
                    carrier.receive(b"")
        except PeerError as refusal:
            error = str(refusal)
        _flush(store, registry)
        carrier.leave()
        sessions = sorted(link.sessions)
        stored = sorted(store.keyspace.values)
        registry.clock.now = 100.0
        registry.tick()
        _flush(store, registry)
        outcomes.append((error, link.taken, sessions, stored))
        if store.budget.others or store.budget.unfinished or registry.sessions or store.keyspace.waiters:
            raise Broken(f"{store.budget.others} bytes are counted for nobody")
    if outcomes[1:] != outcomes[:-1]:
        raise Broken(f"{outcomes}")


def _flush(store: Store, registry: LinkRegistry) -> None:
    more = True
    while more or store.hub.pending_flush:
        while store.hub.pending_flush:
            session = store.hub.pending_flush.pop()
            if isinstance(session.owner, Transport):
                session.owner.flush()
                if session in store.hub.evicted:
                    session.owner.close()
        more = registry.work()


# LINK: its items at the server, and its reply at both kinds of clients

_LINK = BY_METHOD["link"]
_HELLO = bytes.fromhex("00cef7853c")
_KNOWN, _KNOWN_SINGLE, _SECRET = b"the known link..", b"the single link.", b"its only secret."


def _items(**given: bytes) -> bytes:
    return _LINK.prefix + _LINK.request.encode(([(name.encode(), pack(text)) for name, text in given.items()],))


def link_request(data: bytes) -> None:
    """Whatever follows LINK: it is answered, or PeerError is raised, however the bytes are cut. Without the secret,
    links that are there stay as they are. In the end nothing is held.
    """
    outcomes = []
    for size in (max(1, len(data)), 1, 13):
        store = Store(Limits(links=2, sessions=4))
        registry = LinkRegistry(store, "one", 30.0)
        owner = ServerSession(store, None, "h", 1, 0.0)
        owner.receive(_HELLO + _items(version=b"2", id=_KNOWN, secret=_SECRET, place=b"here", attempt=b"3"))
        owner.receive(_frames((1, 1, b"\7\0127.0.0.1"), (0, 1, _HELLO)))
        link = registry.links[_KNOWN]
        stranger = ServerSession(store, None, "h", 2, 0.0)
        stranger.receive(_HELLO)
        stranger.out.clear()
        request = _LINK.prefix + data
        error = reply = ""
        try:
            for at in range(0, len(request), size):
                stranger.receive(request[at : at + size])
            out = b"".join(stranger.out)
            if out:
                reply = str(read_reply(out[8 : 8 + int.from_bytes(out[:8], "little")]))
        except PeerError as refusal:
            error = type(refusal).__name__
        _flush(store, registry)
        if _SECRET not in data and b"here" not in data and (registry.links.get(_KNOWN) is not link or link.over):
            raise Broken("a stranger has ended a link")
        if _SECRET not in data and registry.links.get(_KNOWN) is link and link.connection is not owner:
            raise Broken("a stranger has a link")
        outcomes.append((error, reply, sorted(registry.links), sorted(registry.singles)))
        while registry.attaching:
            next(iter(registry.attaching)).abandon()  # as its connection is lost before it is used
        for session in (stranger, owner):
            session.leave()
        registry.clock.now = 100.0
        registry.tick()
        registry.clock.now = 200.0
        registry.tick()
        _flush(store, registry)
        if store.budget.others or store.budget.unfinished or registry.sessions or registry.links or registry.singles:
            raise Broken(f"{store.budget.others} bytes are counted for nobody")
    if outcomes[1:] != outcomes[:-1]:
        raise Broken(f"{outcomes}")


def _kept(link: ClientLink) -> bytes:
    kept = link.kept
    return b"" if kept is None else b"".join(kept.pieces)[kept.taken :]


def link_reply(raw: bytes) -> None:
    """Whatever a server answers to LINK, first and later: ProtocolError, or a link that goes on, or none."""
    for before in (b"", b'{"status":"new","instance":"one","keep_alive":5,"grace":30}'):
        link = ClientLink()
        stream = _Fuzzed()
        if before:
            link.request()
            link.answered(before)
            link.open(stream, "h", 1)
            link.seal()
            link.disconnect()
        link.request()
        kept = _kept(link)
        try:
            reply = link.answered(raw)
        except ProtocolError:
            if link.connected:
                raise Broken("a link with an invalid reply is connected") from None
            continue
        if not (0 <= reply.keep_alive < 1e9 and 0 <= reply.grace < 1e9):
            raise Broken(f"{reply.keep_alive} s, {reply.grace} s")
        if link.connected and not kept.endswith(_kept(link)):
            raise Broken("other bytes are kept than were sent")
        link.request()
    for count in (0, 1):
        single = ClientSingleLink()
        single.fields()
        if count:
            single.begun(b'{"status":"new","instance":"one","grace":30}')
            single.note(b"a request")
            single.fields()
        try:
            if not count:
                single.begun(raw)
            elif not b"a request".endswith(single.resume(raw)):
                raise Broken("other bytes are sent again than were sent")
        except ProtocolError:
            continue


# Tokens

_KEYS = TokenKeys([("k1", b"the fuzzer's"), ("k2", b"another")])
TOKEN = _KEYS.create(prefix="job/").encode()


def token(data: bytes) -> None:
    """Only what was signed is accepted; claims that were are understood or refused; no reason has the token in it."""
    found = _KEYS.check(data, 0)
    if isinstance(found, Access):
        _demand(data == TOKEN, "a forged token was accepted")
    claims = base64.urlsafe_b64encode(data).rstrip(b"=")
    signed = b"tcps1.k1." + claims
    mac = base64.urlsafe_b64encode(hmac.digest(b"the fuzzer's", signed, "sha256")).rstrip(b"=")
    for reason in (found, _KEYS.check(signed + b"." + mac, 0)):
        _demand(isinstance(reason, Access) or reason.isprintable() or "token" in reason, "no reason")
        _demand(isinstance(reason, Access) or claims not in reason.encode() or len(claims) < 8, "a token is shown")


def auth(data: bytes) -> None:
    """On a server that requires a token with a prefix, nothing else is ever stored, or awaited, whatever is sent."""
    store = Store(Limits())
    store.identify(b'{"server":"tcpstore_async","version":"1","extension":8,"instance":"i"}')
    store.hub.auth.require_auth = ALL
    store.hub.auth.authenticate = lambda given: _KEYS.check(given, 0)
    session = ServerSession(store, None, "10.0.0.7", 1, 0.0)
    try:
        session.receive(bytes.fromhex("00cef7853c") + data)
        while session.running is not None:
            session.receive(b"")
    except PeerError as error:
        _demand(str(error).isprintable(), "a line of the log is broken")
    keyspace = store.keyspace
    for key in (*keyspace.values, *keyspace.queues, *keyspace.waiters):
        _demand(key.startswith(b"/job/"), f"{key!r} is outside of the prefix")
    session.leave()
    _demand(not store.hub.auth.granted and not store.hub.unvalidated, "a session that has left is remembered")


def auth_reply(data: bytes) -> None:
    try:
        read_auth_reply(data)
    except (ProtocolError, AccessDeniedError):
        pass


def token_keys(data: bytes) -> None:
    """A key file is read, or the error names a line but nothing in it."""
    try:
        parse_keys(data.decode(errors="replace"), "the file")
    except ValueError as error:
        _demand(str(error).startswith("the file") and str(error).isascii(), "a file is shown")


# TLS

_PLAIN = bytes(range(100))
_TURNS = 10


@functools.cache
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    known = certificates()
    return client_tls.make_context(known.trusting), server_tls.make_context(TlsFiles("", *known.server))


def tls(program: bytes) -> None:
    """Whatever is done to the bytes between two ends: each reads what the other has written, from its beginning, or
    TlsError or ConnectionError is raised, and nothing is read before the handshake is complete.

    An instruction has three bytes, for what one end sends next: the first one, modulo 5, says whether it arrives as it
    is, with one byte changed, without its end, twice, or is the rest of the program instead; the others say where, and
    what.
    """
    with_client, with_server = _contexts()
    ends = [TlsStream(with_client, "127.0.0.1"), TlsStream(with_server)]
    heard = [b"", b""]
    try:
        ends[0].shake_hands()
        for turn in range(_TURNS):
            sender, receiver = ends[turn % 2], ends[1 - turn % 2]
            if sender.established:
                sender.write(_PLAIN)
            sent = _altered(sender.outgoing(), program[3 * turn : 3 * turn + 3], program[3 * turn + 3 :])
            if sent:
                receiver.feed(sent)
            while receiver.readable:
                if receiver.established:
                    heard[1 - turn % 2] += receiver.read(64)
                else:
                    receiver.shake_hands()
    except (TlsError, ConnectionError):
        pass
    for end, said in zip(ends, heard, strict=True):
        _demand((_PLAIN * _TURNS).startswith(said), "what was read was not written")
        _demand(end.established or not said, "something was read within the handshake")
    _demand(bool(program) or all(heard), "nothing was read although nothing was done to it")


def _altered(sent: bytes, instruction: bytes, rest: bytes) -> bytes:
    if len(instruction) < 3:
        return sent
    at = min(len(sent), instruction[1] * (1 + len(sent) // 256))
    match instruction[0] % 5:
        case 1:
            return sent[:at] + instruction[2:] + sent[at + 1 :]
        case 2:
            return sent[:at]
        case 3:
            return sent + sent
        case 4:
            return rest
    return sent


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def journal(data: bytes) -> None:
    """A segment has whole records in order, or is refused; the events of each are decoded, or refused."""
    reader = Reader()
    try:
        for number, one in enumerate(reader.read(data)):
            assert one.number == number
            decode_events(one.events, one.now)
    except JournalError:
        pass


def events(data: bytes) -> None:
    """What is decoded is encoded to what is decoded to the same."""
    try:
        found = decode_events(data, 1.0)
    except JournalError:
        return
    assert repr(decode_events(encode_events(found), 1.0)) == repr(found)  # NaN differs from itself


def snapshot(data: bytes) -> None:
    """A state is read, and can be written again, or is refused; no checksum is before it here."""
    replayer = Replayer(engine_of(_INSTANCE), lambda session, pieces: None)
    try:
        load(data, replayer)
    except JournalError:
        return


_GOLDEN: Final = Path(__file__).parent.parent / "log" / "goldens" / str(REPLAY) / "journal"
_INSTANCE: Final = read_instance(_GOLDEN)


DECODERS: dict[str, Callable[[bytes], None]] = {
    decode.__name__: decode
    for decode in (
        *(sessions, client_session, file_records, control_messages, identity, link_client, link_server, link_request),
        *(link_reply, token, auth, auth_reply, token_keys, tls, journal, events, snapshot),
    )
}


# What the fuzzer begins with, by hand


def _number(method: str, count: int = 1) -> int:
    return ASKED.index(BY_METHOD[method]) + count * len(ASKED)


def _hear(*pieces: bytes) -> bytes:
    return b"".join(bytes([192 + len(piece)]) + piece for piece in pieces)


def _session_seeds() -> dict[str, bytes]:
    cancel = bytes([128])
    blob = pack(b"value")
    return {
        "get": bytes([_number("get")]) + _hear(blob),
        "get-in-pieces": bytes([_number("get")]) + _hear(blob[:3], blob[3:9], blob[9:]),
        "wait-woken": bytes([_number("wait")]) + _hear(b"\0"),
        "wait-canceled": bytes([_number("wait")]) + cancel + _hear(b"\1"),
        "wait-woken-and-canceled": bytes([_number("wait")]) + cancel + _hear(b"\0", b"\1"),
        "fetch-canceled": bytes([_number("fetch")]) + cancel + _hear(ABSENT),
        "fetch-woken-and-canceled": bytes([_number("fetch")]) + cancel + _hear(blob, ABSENT),
        "lease": bytes([_number("lease_later")]) + _hear(b"\1" + bytes(7) + blob),
        "lease-canceled": bytes([_number("lease_later")]) + cancel + _hear(b"\xff" * 8),
        "popped": bytes([_number("queue_pop")]) + _hear(b"\2" + bytes(7) + blob),
        "multi-get": bytes([_number("multi_get", 2)]) + _hear(blob, blob),
        "list": bytes([_number("list_keys")]) + _hear(b"\2" + bytes(7) + blob + blob),
        "list-endless": bytes([_number("list_keys")]) + _hear(b"\xff" * 8 + blob),
        "large": bytes([_number("get")]) + _hear(b"\0\2" + bytes(6)) + bytes([255]),
        "pipelined": bytes([_number("set"), _number("ping"), _number("check"), _number("add")])
        + _hear(b"\7\0\0\0", b"\0", bytes(8)),
        "unasked": _hear(b"\0"),
        "no-wake": bytes([_number("wait")]) + _hear(b"\7"),
        **{f"answer-{command.method}": bytes([_number(command.method)]) + _hear(bytes(20)) for command in ASKED},
    }


def _file_seeds() -> dict[str, bytes]:
    first, value = record(b"refcount/", b"1"), record(b"/key", b"value")
    return {
        "empty": b"",
        "one": first + value,
        "torn": first + value[:-2],
        "torn-within": first + value[:-2] + value + value,
        "torn-twice": first + value[:-2] + value + value[:-3] + value,
        "queue": first + record(b"+/q", b"item") + record(b"</q", b"") + record(b"</q", b""),
        "gone": first + value + record(b"-/key", b""),
        "no-number": record(b"refcount/", b"x") + record(b"cleanup/", b"y"),
        "endless": b"\xff" * 9,
        "text": b"this is no store\n",
    }


def _line_seeds() -> dict[str, bytes]:
    ready = msgspec.json.encode(Event("ready", port=29500, pid=7, backend="uv"))
    return {
        "empty": b"",
        "ready": ready + b"\n",
        "events": ready + b"\n" + msgspec.json.encode(Event("stopped", remaining=3)) + b'\n{"event":',
        "words": b"joins 3\njoins -1\ncomplete 12.5\nstop\n",
        "no-words": b"joins x\njoins\ncomplete nan\n\xff\nstop now\n",
        "numbers": b"joins " + b"9" * 5000 + b"\ncomplete 1e999\n",
        "deep": b"[" * 2000 + b"\n",
    }


def _identity_seeds() -> dict[str, bytes]:
    ours = msgspec.json.encode(Identity("tcpstore_async", "0.1.0", 1, "one", "uv", "compiled"))
    return {
        "ours": ours,
        "older": ours.replace(b'"extension":1', b'"extension":0'),
        "large": ours.replace(b'"extension":1', b'"extension":1e400'),
        "more": ours[:-1] + b',"more":[{}]}',
        "half": ours[:20],
        "deep": b'{"server":' * 2000,
        "text": b'"\\ud800"',
        "bytes": b"\xff\xfe",
        "empty": b"",
    }


def _frames(*frames: tuple[int, int, bytes]) -> bytes:
    return b"".join(struct.pack("<II", session, len(one) | kind << 24) + one for kind, session, one in frames)


def _token_seeds() -> dict[str, bytes]:
    _, key, claims, _ = TOKEN.split(b".")
    return {
        "empty": b"",
        "ours": TOKEN,
        "cut": TOKEN[:-1],
        "claims": b'{"id":"a","rights":"write","prefix":"p","expires":1}',
        "no-claims": b'{"id":"a","rights":"root"}',
        "huge": b'{"id":"a","rights":"write","expires":' + b"9" * 400 + b"}",
        "surrogate": b'{"id":"a","rights":"write","prefix":"\\ud800"}',
        "deep": b"[" * 2000,
        "points": b"." * 50,
        "other-key": b".".join([b"tcps1", key + b"x", claims, b"mac"]),
    }


def _auth_seeds() -> dict[str, bytes]:
    set_ = b"\x01" + pack(b"/job/k") + pack(b"v")
    return {
        "ours": b"\x4e" + pack(TOKEN) + set_,
        "twice": (b"\x4e" + pack(TOKEN)) * 2 + set_,
        "cut": (b"\x4e" + pack(TOKEN))[:-3],
        "long": b"\x4e" + b"\xff" * 8,
        "other": b"\x4e" + pack(TOKEN[:-1]) + set_,
        "outside": b"\x4e" + pack(TOKEN) + b"\x01" + pack(b"/other") + pack(b"v"),
        "without": set_,
        "identity": b"\x03" + pack(b"tcpstore_async/server") + b"\x0dpong",
        "all": b"".join(
            b"\x4e" + pack(TOKEN) + command.prefix + command.request.encode(_fields(command, 5)) for command in ASKED
        ),
        **{
            command.name: b"\x4e" + pack(TOKEN) + command.prefix + command.request.encode(_fields(command, 5))
            for command in ASKED
        },
    }


def _auth_reply_seeds() -> dict[str, bytes]:
    return {
        "ok": b'{"status":"ok","id":"a","prefix":"p","rights":"read"}',
        "refused": b'{"status":"refused","reason":"why"}',
        "rights": b'{"status":"ok","id":"a","rights":"root"}',
        "bytes": b"\xff",
        "deep": b'{"status":' * 2000,
    }


def _token_key_seeds() -> dict[str, bytes]:
    return {"keys": b"# one\n\nk1:secret\nk2:hush\n", "none": b"", "twice": b"a:1\na:2", "half": b"k1:", "id": b"a b:c"}


def _tls_seeds() -> dict[str, bytes]:
    unchanged = bytes(3)
    return {
        "unchanged": b"",
        **{f"changed-{turn}": unchanged * turn + b"\1\x20\xff" for turn in range(_TURNS)},
        **{f"cut-{turn}": unchanged * turn + b"\2\x40\0" for turn in range(4)},
        **{f"twice-{turn}": unchanged * turn + b"\3\0\0" for turn in range(4)},
        **{f"alert-{turn}": unchanged * turn + b"\4\0\0" + MISMATCH for turn in range(4)},
        "plain": b"\4\0\0" + bytes.fromhex("00cef7853c"),
        "endless": b"\4\0\0" + b"\x16\3\1\xff\xff" + bytes(300),
    }


def _link_seeds() -> dict[str, bytes]:
    same = struct.pack("<III", 2, 1, 2)
    address = b"\7\0127.0.0.1"
    hello = bytes.fromhex("00cef7853c")
    opened = _frames((1, 1, address), (1, 2, address), (5, 0, same + hello))
    return {
        "empty": b"",
        "data": _frames((0, 1, b"one"), (0, 2, b"two")) + _frames((7, 0, struct.pack("<Q", 11)), (0, 3, b"three")),
        "same": _frames((5, 0, same + b"both")),
        "same-of-none": _frames((5, 0, bytes(4))),
        "credit": _frames((3, 1, b"\1\0\0\0"), (3, 2, b"\xff" * 4)),
        "close": _frames((2, 1, b"\1"), (0, 1, b"late"), (2, 0, b"\1")),
        "away": _frames((4, 0, b"")),
        "acknowledged": _frames((7, 0, bytes(8)), (7, 0, struct.pack("<Q", 2**64 - 1))),
        "empty-data": _frames((0, 1, b"")) * 2,
        "long": b"\xff" * 24,
        "opened": opened,
        "ping": opened + _frames((0, 1, b"\x0dpong"), (0, 2, b"\x0dpo"), (0, 2, b"ng")),
        "waiting": opened + _frames((5, 0, same + b"\x06" + struct.pack("<QQ", 1, 1) + b"k"), (2, 1, b"\0")),
        "set": opened + _frames((0, 1, b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 1) + b"v")),
        "wrong": opened + _frames((0, 1, b"\xff"), (0, 1, b"more"), (2, 1, b"\0")),
        "many": _frames(*[(1, number, address) for number in range(1, 9)]) + _frames((2, 0, b"\1")),
        "unopened": opened + _frames((0, 7, b"x")),
    }


def _request_seeds() -> dict[str, bytes]:
    ours = {"version": b"2", "id": bytes(16), "secret": bytes(16)}
    known = {**ours, "id": _KNOWN, "secret": _SECRET}
    resuming = {"instance": b"one", "taken": b"0", "told": b"1", "attempt": b"4"}
    given: dict[str, dict[str, bytes]] = {
        "none": {},
        "new": {**ours, "place": b"there", "attempt": b"1", "host": b"node-1", "pid": b"7"},
        "place-taken": {**ours, "place": b"here"},
        "resume": {**known, **resuming},
        "resume-without-secret": {**ours, "id": _KNOWN, **resuming},
        "resume-delayed": {**known, **resuming, "attempt": b"3"},
        "resume-lost": {**known, **resuming, "taken": b"9"},
        "resume-unknown": {**ours, **resuming},
        "other-server": {**known, **resuming, "instance": b"two"},
        "over": known,
        "single": {**ours, "single": b"1"},
        "single-known": {**known, "single": b"1"},
        "single-resume": {**ours, "id": _KNOWN_SINGLE, "single": b"1", **resuming},
        "version": {**ours, "version": b"2"},
        "short": {**ours, "id": b"short"},
        "numbers": {**known, **resuming, "taken": b"9" * 19, "told": b"-1", "attempt": b"\xc2\xb2"},
    }
    return {name: _items(**items)[1:] for name, items in given.items()} | {
        "twice": _items(**ours)[1:] * 2,
        "many": b"\xff" * 8 + bytes(8),
        "then-ping": _items(version=b"2")[1:] + b"\x0dpong",
    }


def _reply_seeds() -> dict[str, bytes]:
    return {
        "new": b'{"status":"new","instance":"one","taken":0,"keep_alive":5.0,"grace":30.0,"reason":""}',
        "resumed": b'{"status":"resumed","instance":"one","taken":1,"keep_alive":5,"grace":30}',
        "resumed-none": b'{"status":"resumed","instance":"one","taken":0}',
        "resumed-more": b'{"status":"resumed","instance":"one","taken":7}',
        "resumed-less": b'{"status":"resumed","instance":"one","taken":-1}',
        "resumed-huge": b'{"status":"resumed","instance":"one","taken":99999999999999999999}',
        "other": b'{"status":"resumed","instance":"two"}',
        "unknown": b'{"status":"unknown"}',
        "refused": b'{"status":"refused","reason":"\\u001b[2J wrong secret"}',
        "times": b'{"status":"new","instance":"one","keep_alive":-5,"grace":1e308}',
        "no-times": b'{"status":"new","instance":"one","keep_alive":1e999,"grace":null}',
        "new-huge": b'{"status":"new","instance":"one","taken":18446744073709551616}',
        "new-less": b'{"status":"new","instance":"one","taken":-1}',
        "list": b"[]",
        "deep": b'{"reason":' * 2000,
        "bytes": b"\xff",
        "empty": b"",
    }


def _segment() -> bytes:
    return segments_of(_GOLDEN)[0].read_bytes()


def _records() -> list[bytes]:
    chain = Chain()
    return [chain.header(), chain.record(1.0, 2, b""), chain.record(2.0, 0, b"".join(_event_seeds().values()))]


def _event_seeds() -> dict[str, bytes]:
    records = [one.events for one in Reader(read_snapshot(_GOLDEN)).read(_segment())]
    kinds = {event.method: one for one in records for event in decode_events(one, 1.0)}
    return {method.strip("_"): one for method, one in kinds.items()}


def _snapshot_seeds() -> dict[str, bytes]:
    found = read_snapshot(_GOLDEN)
    assert found is not None
    return {"golden": found.state}


SEEDS: dict[str, dict[str, bytes]] = {
    "sessions": PROGRAMS,
    "client_session": _session_seeds(),
    "file_records": _file_seeds(),
    "control_messages": _line_seeds(),
    "identity": _identity_seeds(),
    "link_client": _link_seeds(),
    "link_server": _link_seeds(),
    "link_request": _request_seeds(),
    "link_reply": _reply_seeds(),
    "token": _token_seeds(),
    "auth": _auth_seeds(),
    "auth_reply": _auth_reply_seeds(),
    "token_keys": _token_key_seeds(),
    "tls": _tls_seeds(),
    "journal": {"golden": _segment(), "records": b"".join([*_records()])},
    "events": _event_seeds(),
    "snapshot": _snapshot_seeds(),
}

assert set(SEEDS) == set(DECODERS)
