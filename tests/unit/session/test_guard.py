"""What a session may do with a token, for every command of the table: refused before anything changes, or as without.

A new command is tested here without being listed.
"""

from __future__ import annotations

from typing import Any

import pytest

from conformance.frames import (
    LIST_KEYS,
    NUM_KEYS,
    READY,
    add,
    append,
    auth,
    check,
    confirm,
    delete,
    get,
    i64,
    lease,
    multi_set,
    ping,
    pop,
    popped,
    push,
    set_,
    wait,
)
from properties.session_driver import take
from support import HANDSHAKE, blob
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import AccessDeniedError, NotAllowedError, PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.server.features import attach_features
from tcpstore_async.session.auth import ALL, REMOTE
from tcpstore_async.session.identity import (
    REFUSED,
    TOKEN,
    auth_refusal,
    auth_reply,
    check_admitted,
    decode_identity,
    encode_identity,
    granted_access,
    identity,
    read_auth_reply,
    read_identity,
    with_requirement,
)
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire import codecs
from tcpstore_async.wire.commands import COMMANDS, MUTATES, SERVER_KEY, STORES, WHOLE, Command
from tcpstore_async.wire.values import pack

IDENTITY = identity("this server", "uv")
MANY = 30

JOB = Access("t1", prefix="job/")
READER = Access("t2", rights="read")
WRITER = Access("t3", rights="write")
ADMIN = Access("t4", rights="admin")


def store() -> Store:
    made = Store(Limits())
    attach_features(made, "this server", "uv")
    return made


def session(of: Store, access: Access | None = None, host: str = "10.0.0.7", greets: bool = True) -> ServerSession:
    made = ServerSession(of, None, host, 1, 0.0)
    if access is not None:
        made.grant_access(access)
    if greets:
        made.receive(HANDSHAKE)
    return made


def ask(peer: ServerSession, data: bytes) -> bytes:
    peer.receive(data)
    return take(peer)


def fields_of(command: Command, key: bytes, others: bytes) -> list[tuple[Any, ...]]:
    """Return requests of a command that name this key, at every place where one may be; else those that name none."""
    value = pack(b"v")
    by_codec: dict[int, list[tuple[Any, ...]]] = {
        id(codecs.NOTHING): [()],
        id(codecs.U32): [(0x3C85F7CE,)],
        id(codecs.I64): [(1,)],
        id(codecs.KEY): [(key,)],
        id(codecs.KEY_I64): [(key, 1)],
        id(codecs.KEY_VALUE): [(key, value), (key, pack(bytes(100_000)))],
        id(codecs.KEY_VALUE_VALUE): [(key, pack(b""), value)],
        id(codecs.KEY_VALUE_2_I64): [(key, value, 1, 5)],
        id(codecs.KEY_VALUE_3_I64): [(key, value, 1, 2, -1)],
        id(codecs.KEYS): [
            ([key],),
            ([others, key],),
            ([key, others],),
            ([*[others + b"%d" % n for n in range(MANY)], key],),
            ([*[others + b"%d" % n for n in range(1500)], key],),
        ],
        id(codecs.ITEMS): [
            ([(key, value)],),
            ([(others, value), (key, value)],),
            ([*[(others + b"%d" % n, value) for n in range(1500)], (key, value)],),
        ],
        id(codecs.NAMED_VALUES): [([(b"name", value)],)],
        id(codecs.WHOLE_NAMED_VALUES): [([(b"name", value)],)],
        id(codecs.TOKEN): [(value,)],
    }
    return by_codec[id(command.request)]


def state(of: Store) -> tuple[object, ...]:
    keyspace = of.keyspace
    queues = {key: list(items) for key, items in keyspace.queues.items()}
    return dict(keyspace.values), queues, dict(keyspace.waiters), keyspace.size, dict(of.key_lists.keyspace.reserved)


commands = pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.method != "validate"], ids=lambda command: command.name
)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.request.names_keys or c.flags & WHOLE], ids=lambda command: command.name
)
@pytest.mark.parametrize("key", [b"/jo", b"job/x", b"init/", b"", b"tcpstore_async/joins"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_prefix_opens_nothing_else(command: Command, key: bytes, cut: bool) -> None:
    of = store()
    ask(session(of, WRITER), set_(b"/other", b"secret") + push(b"/jo", b"item"))
    before = state(of)
    for fields in fields_of(command, key, b"/job/"):
        peer = session(of, JOB)
        data = command.prefix + command.request.encode(fields)
        pieces = [data[:5], data[5:]] if cut else [data]
        with pytest.raises(NotAllowedError, match=f"not allowed: {command.name} .*t1"):
            for piece in pieces:
                peer.receive(piece)
        assert not peer.out
        assert state(of) == before
        peer.leave()
    assert JOB not in of.hub.auth.granted.values()


@commands
def test_a_prefix_opens_the_keys_that_begin_with_it(command: Command) -> None:
    for fields in fields_of(command, b"/job/x", b"/job/"):
        peer = session(store(), JOB)
        if command.flags & WHOLE:
            continue
        try:
            peer.receive(command.prefix + command.request.encode(fields))
        except PeerError as error:
            assert not isinstance(error, NotAllowedError) or command.method == "auth"


@commands
def test_who_may_read_cannot_write(command: Command) -> None:
    of = store()
    ask(session(of, WRITER), set_(b"/k", b"1") + push(b"/q", b"item"))
    before = state(of)
    for key in (b"/k", b"/q", b"/new"):
        for fields in fields_of(command, key, b"/k"):
            peer = session(of, READER)
            data = command.prefix + command.request.encode(fields)
            if command.flags & MUTATES and command.request.names_keys:
                with pytest.raises(NotAllowedError, match=f"{command.name} requires write access; token t2"):
                    peer.receive(data)
                assert state(of) == before
            else:
                try:
                    peer.receive(data)
                except PeerError as error:
                    assert not isinstance(error, NotAllowedError) or command.method == "auth"
            peer.leave()


@commands
@pytest.mark.parametrize("access", [WRITER, ADMIN])
def test_who_may_write_has_the_same_replies_as_without_a_token(command: Command, access: Access) -> None:
    for fields in fields_of(command, b"/k", b"/l"):
        replies: list[tuple[bytes, object, str]] = []
        for of, given in ((store(), None), (store(), access)):
            peer = session(of, given)
            try:
                replies.append((ask(peer, command.prefix + command.request.encode(fields)), peer.parked, ""))
            except PeerError as error:
                replies.append((b"", None, str(error)))
        assert replies[0][0] == replies[1][0]
        assert replies[0][2] == replies[1][2]


def test_rows_that_store_also_mutate() -> None:
    for command in COMMANDS:
        assert command.flags & MUTATES or not command.flags & STORES, command.name
        assert command.request.names_keys or not command.flags & STORES, command.name


@pytest.mark.parametrize("host", ["10.0.0.7", "127.8.8.8", "::1", "::ffff:127.0.0.1", "1::1"])
@pytest.mark.parametrize("required", ["", REMOTE, ALL])
@commands
def test_what_is_allowed_without_a_token(command: Command, host: str, required: str) -> None:
    local = host in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
    of = store()
    of.hub.auth.require_auth = required
    for fields in fields_of(command, b"/k", b"/l"):
        peer = session(of, host=host)
        before = state(of)
        data = command.prefix + command.request.encode(fields)
        free = not required or (required == REMOTE and local)
        assert (peer in of.hub.unvalidated) == (not free)
        if free or command.method in ("ping", "auth"):
            try:
                peer.receive(data)
            except PeerError as error:
                assert not isinstance(error, NotAllowedError) or command.method == "auth"
            peer.leave()
            continue
        with pytest.raises(NotAllowedError, match=f"{command.name}.* requires a client certificate"):
            peer.receive(data)
        assert state(of) == before
        peer.leave()


def test_a_stranger_finds_out_who_the_server_is_and_authenticates() -> None:
    of = store()
    of.hub.auth.require_auth = ALL
    of.hub.auth.authenticate = lambda token: JOB if token == b"good" else "nothing like a token"
    peer = session(of)
    stranger = encode_identity(with_requirement(decode_identity(IDENTITY), TOKEN))
    assert ask(peer, ping(b"abcd") + check(SERVER_KEY) + get(SERVER_KEY)) == b"abcd" + READY + blob(stranger)
    found = read_identity(stranger)
    assert found is not None
    with pytest.raises(AccessDeniedError, match="requires a token"):
        check_admitted(found)
    assert peer in of.hub.unvalidated
    said = b'{"id":"t1","prefix":"job/","rights":"write","status":"ok"}'
    assert ask(peer, auth(b"good")) == blob(said)
    assert peer not in of.hub.unvalidated
    assert ask(peer, set_(b"/job/k", b"v") + get(b"/job/k")) == blob(b"v")
    found = read_identity(ask(peer, get(SERVER_KEY))[8:])
    assert found is not None
    assert granted_access(found.access) == Access("t1", prefix="job/")
    assert "token t1" in str(peer)
    other = session(of)
    with pytest.raises(NotAllowedError, match="not allowed: nothing like a token"):
        other.receive(auth(b"bad") + set_(b"/job/k", b"w"))
    refused = b'{"status":"refused","reason":"nothing like a token"}'
    assert b"".join(map(bytes, other.out)) == blob(refused)
    assert of.keyspace.get(b"/job/k") == pack(b"v")


def test_a_token_for_another_store_is_refused() -> None:
    of = Store(Limits())
    of.hub.auth.authenticate = lambda token: Access("t1", store="theirs")
    with pytest.raises(
        NotAllowedError, match="token t1 is only for the store 'theirs', which this server does not have"
    ):
        session(of).receive(auth(b"x"))


def test_the_last_token_counts() -> None:
    of = store()
    of.hub.auth.authenticate = lambda token: Access(token.decode(), prefix=token.decode())
    peer = session(of)
    peer.receive(auth(b"a") + set_(b"/a1", b"") + auth(b"b") + set_(b"/b1", b""))
    with pytest.raises(NotAllowedError, match="token b grants access only to keys with the prefix 'b'"):
        peer.receive(set_(b"/a2", b""))
    assert list(of.hub.auth.granted.values()) == [Access("b", prefix="b")]


def test_a_certificate_allows_everything() -> None:
    of = store()
    of.hub.auth.require_auth = ALL
    peer = session(of, greets=False)
    peer.grant_access(None)
    peer.receive(HANDSHAKE)
    assert peer not in of.hub.unvalidated
    assert ask(peer, set_(b"init/", b"1") + NUM_KEYS) == i64(1)


def test_without_keys_a_certificate_is_required() -> None:
    of = store()
    of.hub.auth.require_auth = ALL
    found = read_identity(ask(session(of), get(SERVER_KEY))[8:])
    assert found is not None
    with pytest.raises(AccessDeniedError, match="requires a client certificate"):
        check_admitted(found)
    with pytest.raises(NotAllowedError, match="NUMKEYS requires a client certificate"):
        session(of).receive(NUM_KEYS)


def test_little_is_held_before_authentication() -> None:
    """Or strangers could fill the budget, and have those evicted who have stored most."""
    of = store()
    of.hub.auth.require_auth = ALL
    of.hub.auth.authenticate = lambda token: WRITER
    peer = session(of)
    keys = b"".join(blob(bytes(8000)) for _ in range(10))
    with pytest.raises(NotAllowedError, match="CHECK with more than 8192 bytes requires a token"):
        for at in range(0, len(keys), 1000):
            peer.receive((b"\x05" + i64(38_000) if not at else b"") + keys[at : at + 1000])
    peer.leave()
    assert of.budget.unfinished == 0
    peer = session(of)
    peer.keep_unsent([bytes(100)], 0)
    assert "not reading its replies requires a token" in str(of.hub.evicted[peer])
    peer = session(of, WRITER)
    peer.receive(b"\x05" + i64(38_000) + keys)
    assert peer.held > len(keys)


def test_an_evicted_session_is_granted_nothing() -> None:
    of = store()
    peer = session(of)
    peer.evict(NotAllowedError("for this test"))
    peer.grant_access(WRITER)
    assert not of.hub.auth.granted
    with pytest.raises(PeerError, match="from an evicted session"):
        peer.receive(set_(b"/k", b"v"))


def test_all_keys_take_a_token_for_the_whole_store() -> None:
    of = store()
    assert ask(session(of, READER), NUM_KEYS + LIST_KEYS) == i64(0) * 2
    for frame in (NUM_KEYS, LIST_KEYS):
        with pytest.raises(NotAllowedError, match="covers the whole store"):
            session(of, JOB).receive(frame)


def test_a_key_in_a_refusal_cannot_break_the_line() -> None:
    with pytest.raises(NotAllowedError) as raised:
        session(store(), JOB).receive(get(b"/x\n\x1b[2J" + b"y" * 5000))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300


# Limits


def test_keys_of_one_token() -> None:
    of = store()
    token = Access("t", max_keys=2)
    one, two = session(of, token), session(of, token)
    one.receive(set_(b"/a", b"1"))
    two.receive(push(b"/b", b"1"))
    one.receive(set_(b"/a", b"2") + append(b"/a", b"3") + push(b"/b", b"2"))
    before = state(of)
    for frame in (set_(b"/c", b""), add(b"/c", 1), multi_set((b"/a", b"9"), (b"/c", b"9")), push(b"/c", b"")):
        with pytest.raises(NotAllowedError, match=r"would add 1 key; 2 of the 2 allowed for token t are in use"):
            session(of, token).receive(frame)
        assert state(of) == before
    other = session(of, Access("u", max_keys=1))
    other.receive(set_(b"/c", b""))
    assert ask(one, delete(b"/a") + delete(b"/never")) == i64(1) + i64(0)
    one.receive(set_(b"/d", b""))
    with pytest.raises(NotAllowedError):
        one.receive(set_(b"/e", b""))


def test_bytes_of_one_token() -> None:
    of = store()
    token = Access("t", max_bytes=10_000)
    peer = session(of, token)
    peer.receive(set_(b"/a", bytes(6000)))
    assert 6000 < of.hub.auth.usage["t"].bytes < 7000
    with pytest.raises(NotAllowedError, match=r"SET would add 4,\d+ bytes; 6,\d+ of the 10,000 allowed"):
        session(of, token).receive(set_(b"/b", bytes(4000)))
    assert ask(peer, delete(b"/a")) == i64(1)
    assert of.hub.auth.usage["t"].bytes == 0
    peer.receive(push(b"/q", bytes(6000)))
    assert ask(peer, pop(b"/q")) == popped(1, bytes(6000))
    peer.receive(push(b"/q", bytes(6000)))
    assert ask(peer, lease(b"/q", 1)) == popped(1, bytes(6000))
    peer.receive(confirm(1))
    assert of.hub.auth.usage["t"].bytes == 0
    peer.receive(multi_set(*[(b"/%d" % n, b"") for n in range(10)]))
    with pytest.raises(NotAllowedError):
        peer.receive(multi_set(*[(b"/x%d" % n, b"") for n in range(1200)]))


def test_waiting_counts_for_no_token() -> None:
    of = store()
    peer = session(of, Access("t", max_bytes=1000))
    peer.receive(wait(*[b"/%d" % n for n in range(100)]))
    assert of.hub.auth.usage["t"].bytes == 0


def test_a_command_in_portions_is_counted() -> None:
    of = store()
    peer = session(of, Access("t", max_keys=2000))
    peer.receive(multi_set(*[(b"/%d" % n, b"") for n in range(1500)]))
    while peer.running is not None:
        peer.receive(b"")
    assert of.hub.auth.usage["t"].keys == 1500
    with pytest.raises(NotAllowedError, match="1,500 of the 2,000 allowed for token"):
        peer.receive(multi_set(*[(b"/x%d" % n, b"") for n in range(501)]))


def test_one_session_is_singular() -> None:
    one = Access("t", max_keys=1, max_bytes=2000, max_sessions=1)
    assert "max 1 key, max 2,000 bytes, max 1 session)" in str(one)
    of = store()
    of.hub.auth.authenticate = lambda token: one
    first = session(of)
    first.receive(auth(b"x"))
    with pytest.raises(NotAllowedError, match=r"token t already has 1 session \(max 1\)"):
        session(of).receive(auth(b"x"))


def test_sessions_of_one_token() -> None:
    of = store()
    of.hub.auth.authenticate = lambda token: Access("t", max_sessions=2)
    one, two = session(of), session(of)
    one.receive(auth(b"x"))
    two.receive(auth(b"x") + auth(b"x"))
    with pytest.raises(NotAllowedError, match=r"token t already has 2 sessions \(max 2\)"):
        session(of).receive(auth(b"x"))
    two.leave()
    three = session(of)
    three.receive(auth(b"x"))
    three.leave()
    one.leave()
    assert not of.hub.auth.granted
    assert not of.hub.auth.usage


def test_who_has_an_invalid_token_is_refused_at_once_and_closed_in_portions() -> None:
    of = store()
    revoked, valid = Access("r"), Access("v")
    peers, other = [session(of, revoked) for _ in range(200)], session(of, valid)
    of.hub.auth.authenticate = lambda token: valid
    ask(peers[7], auth(b"another"))
    of.hub.end_invalid(lambda access: "token r is revoked" if access.identity == "r" else "")
    with pytest.raises(NotAllowedError, match="token r is revoked"):
        peers[3].receive(ping(b"abcd"))
    assert not of.hub.evicted
    steps = 0
    while of.keyspace.work:
        before = len(of.hub.evicted)
        of.keyspace.step()
        assert len(of.hub.evicted) - before < 70
        steps += 1
    assert steps > 2
    assert len(of.hub.evicted) == 199
    assert str(of.hub.evicted[peers[0]]) == "not allowed: token r is revoked"
    assert ask(other, ping(b"abcd")) == ask(peers[7], ping(b"abcd"))
    of.hub.end_invalid(lambda access: "")
    assert not of.keyspace.work


def test_what_a_reply_to_auth_leaves_out_is_empty_and_what_is_empty_it_leaves_out() -> None:
    short = b'{"id":"one","rights":"read","status":"ok"}'
    assert read_auth_reply(short) == (Access("one", "read", "", "", 0), "")
    assert auth_reply(Access("one", "read")) == short
    assert auth_refusal(REFUSED, "why") == b'{"status":"refused","reason":"why"}'
