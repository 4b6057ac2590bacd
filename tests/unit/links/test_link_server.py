"""The server's end of links."""

from __future__ import annotations

import json
import random
import struct

import pytest

from conformance.frames import (
    CANCEL_WAIT,
    add,
    append,
    check,
    get,
    i64,
    introduce,
    link,
    multi_get,
    multi_set,
    ping,
    pop,
    push,
    set_,
    wait,
)
from conformance.link_target import LinkPeer, LinkTarget, tick
from conformance.script import Answer
from support import HANDSHAKE, blob
from tcpstore_async.base.errors import BudgetError, PeerError, ProtocolError
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.link_server import LINK_BYTES, ServerLink
from tcpstore_async.session.budget import SESSION_BYTES
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.link import (
    CLOSE,
    END_OF_FILE,
    LINK,
    REPLY_CREDIT_BYTES,
    REQUEST_CREDIT_BYTES,
    VALUE_CREDIT_BYTES,
    WINDOW_BYTES,
)

ID, SECRET = bytes(range(16)), bytes(16)


class Reply:
    """The reply to a LINK, and the connection that sent it."""

    def __init__(self, registry: LinkRegistry, frame: bytes) -> None:
        self.session = ServerSession(registry.store, None, "10.0.0.7", 1, 0.0)
        self.session.receive(HANDSHAKE + frame)
        out = b"".join(self.session.out)
        self.session.out.clear()
        self.session.unsent = 0
        assert len(out) >= 8
        size = int.from_bytes(out[:8], "little")
        members = json.loads(out[8 : 8 + size])
        self.status, self.taken, self.reason = members["status"], members["taken"], members["reason"]


def ask(registry: LinkRegistry, **items: bytes) -> Reply:
    given = {"version": b"2", "id": ID, "secret": SECRET, **items}
    return Reply(registry, link(*[(name.encode(), value) for name, value in given.items()]))


@pytest.fixture
def registry() -> LinkRegistry:
    return LinkRegistry(Store(Limits(links=2, sessions=2)), "this server", 30.0)


@pytest.fixture
def target() -> LinkTarget:
    return LinkTarget()


def greeted(target: LinkTarget, *names: str) -> None:
    for name in names:
        target.connect(name)
        target.say(name, HANDSHAKE)


def heard(target: LinkTarget, peer: str) -> bytes:
    answer = target.hear(peer, Answer())
    assert not answer.closed
    return answer.data


def server_end(target: LinkTarget) -> ServerLink:
    return target.registry.links[target.link.identity]


def stream(*frames: tuple[int, int, bytes]) -> bytes:
    return b"".join(struct.pack("<II", one, len(data) | kind << 24) + data for kind, one, data in frames)


def ack(taken: int) -> bytes:
    return stream((7, 0, struct.pack("<Q", taken)))


def take_all(carrier: ServerSession) -> None:
    """Let a connection take what it holds back, as its replies leave."""
    while True:
        carrier.out.clear()
        carrier.unsent = 0
        if not carrier.stalled():
            return
        carrier.receive(b"")


OPEN = struct.pack("<H", 4711) + b"127.0.0.1"


# LINK


# quirk: links
def test_more_links_than_allowed_are_refused(registry: LinkRegistry) -> None:
    for number in range(2):
        assert ask(registry, id=bytes([number] * 16)).status == "new"
    reply = ask(registry, id=bytes([2] * 16))
    assert (reply.status, "the `links` limit" in reply.reason) == ("refused", True)
    reply.session.receive(ping(b"pong"))
    assert reply.session.out == [b"pong"]


# quirk: sessions
def test_more_sessions_than_allowed_are_refused(registry: LinkRegistry) -> None:
    carrier = ask(registry).session
    carrier.receive(stream(*[(1, number, OPEN) for number in range(1, 1001)]))
    out = b"".join(carrier.out)
    assert (registry.sessions, out.count(b"\1\0\0\2\2")) == (2, 998)
    carrier.receive(stream((0, 500, HANDSHAKE), (2, 1, b"\1"), (1, 2000, OPEN)))
    assert registry.sessions == 2


def test_a_version_that_the_server_does_not_know(registry: LinkRegistry) -> None:
    assert ask(registry, version=b"1").status == "refused"
    assert not registry.links


def test_a_wrong_secret_changes_nothing(registry: LinkRegistry) -> None:
    first = ask(registry)
    assert ask(registry, secret=b"x" * 16).status == "refused"
    assert ask(registry, secret=b"x" * 16, instance=b"this server", taken=b"0", told=b"0").status == "refused"
    assert registry.links[ID].connection is first.session


@pytest.mark.parametrize(
    ("instance", "taken", "told"),
    [("another server", 0, 0), ("this server", 0, 100), ("this server", 1, 10), ("this server", 10**18 - 1, 10)],
)
def test_a_link_whose_ends_have_lost_what_they_took_is_not_resumed(
    registry: LinkRegistry, instance: str, taken: int, told: int
) -> None:
    """And ends, with its sessions."""
    carrier = ask(registry).session
    carrier.receive(stream((1, 1, OPEN)))
    assert ask(registry, instance=instance.encode(), taken=b"%d" % taken, told=b"%d" % told).status == "unknown"
    while registry.work():
        pass
    assert (registry.links, registry.sessions) == ({}, 0)
    assert carrier in registry.store.hub.evicted


def test_a_link_whose_client_has_forgotten_replies_is_not_resumed(registry: LinkRegistry) -> None:
    carrier = ask(registry).session
    carrier.receive(stream((1, 1, OPEN), (0, 1, HANDSHAKE + ping(b"pong"))))
    carrier.receive(ack(registry.links[ID].sent))
    assert ask(registry, instance=b"this server", taken=b"0", told=b"1").status == "unknown"


def test_a_link_that_is_unknown(registry: LinkRegistry) -> None:
    assert ask(registry, instance=b"this server", taken=b"0", told=b"0").status == "unknown"


@pytest.mark.parametrize("number", [b"", b"x", b"-1", b"1" * 19])
def test_numbers_that_are_none(registry: LinkRegistry, number: bytes) -> None:
    ask(registry)
    with pytest.raises(ProtocolError, match="invalid number"):
        ask(registry, instance=b"this server", taken=number, told=b"0")
    assert ID in registry.links


def test_a_link_that_was_delayed_changes_nothing(registry: LinkRegistry) -> None:
    """The client has connected again, and been sent replies, before its earlier requests arrive."""
    ask(registry, attempt=b"1")
    second = ask(registry, attempt=b"2").session
    second.receive(stream((1, 1, OPEN), (0, 1, HANDSHAKE + ping(b"pong"))))
    last = ask(registry, instance=b"this server", taken=b"0", told=b"0", attempt=b"4").session
    last.receive(ack(registry.links[ID].sent))
    link = registry.links[ID]
    for delayed in (
        ask(registry, attempt=b"1"),
        ask(registry, instance=b"this server", taken=b"0", told=b"0", attempt=b"3"),
        ask(registry, instance=b"this server", taken=b"0", told=b"0", attempt=b"4"),
    ):
        assert (delayed.status, "attempt 4" in delayed.reason) == ("refused", True)
        assert delayed.session not in registry.store.hub.evicted
    assert (registry.links, link.connection, len(link.sessions)) == ({ID: link}, last, 1)


def test_a_link_that_its_client_closes_is_over_and_not_waited_for(registry: LinkRegistry) -> None:
    carrier = ask(registry).session
    carrier.receive(stream((1, 1, OPEN), (0, 1, HANDSHAKE)))
    assert registry.sessions == 1
    carrier.receive(stream((CLOSE, LINK, END_OF_FILE)))
    assert not registry.links
    while registry.work():
        pass
    assert registry.sessions == 0


def test_a_client_that_does_not_number_its_attempts_may_begin_to(registry: LinkRegistry) -> None:
    ask(registry)
    for number in ({}, {}, {"attempt": b"1"}):
        assert ask(registry, instance=b"this server", taken=b"0", told=b"0", **number).status == "resumed"


def test_attempts_of_a_client_have_numbers() -> None:
    link = ClientLink()
    for number in range(1, 4):
        assert blob(b"attempt") + blob(b"%d" % number) in link.request()


def test_a_client_that_never_heard_of_its_link_begins_anew(registry: LinkRegistry) -> None:
    first = ask(registry)
    assert ask(registry).status == "new"
    assert first.session in registry.store.hub.evicted
    assert len(registry.links) == 1


def test_a_link_takes_the_place_of_the_one_before(registry: LinkRegistry) -> None:
    """Even if there are as many as allowed."""
    ended: list[tuple[str, str]] = []
    registry.on_end = lambda link, reason: ended.append((str(link), reason))
    ask(registry, id=bytes([1] * 16))
    ask(registry, place=b"node7:29400").session.receive(stream((1, 1, OPEN)))
    assert ask(registry, id=bytes([2] * 16), place=b"node7:29400").status == "new"
    assert [*registry.links] == [bytes([1] * 16), bytes([2] * 16)]
    assert ended == [("the link of node7:29400 from 10.0.0.7 (1 session)", "another link has taken its place")]
    assert ask(registry, id=bytes([3] * 16), place=b"node7:29401").status == "refused"


def test_a_link_within_a_link_is_refused(target: LinkTarget) -> None:
    greeted(target, "a")
    target.say("a", link((b"version", b"2"), (b"id", ID), (b"secret", SECRET)))
    assert b"refused" in heard(target, "a")
    target.say("a", ping(b"pong"))
    assert heard(target, "a") == b"pong"


def test_a_link_without_sessions_is_resumed() -> None:
    """What its client has sent meanwhile is not lost."""
    target = LinkTarget()
    target.cut_off()
    assert server_end(target).connection is None
    target.dial()
    greeted(target, "a")
    assert heard(target, "a") == b""


# What must not be


@pytest.mark.parametrize(
    "frames",
    [
        [(0, 2, b"x")],
        [(0, 0, b"x")],
        [(3, 2, bytes(4))],
        [(3, 1, bytes(3))],
        [(3, 1, b"\xff\xff\xff\xff")],
        [(3, 1, b"\xff\xff\xff\x7f")],
        [(3, 1, struct.pack("<I", 2**31 - REPLY_CREDIT_BYTES))],
        [(2, 2, b"\1")],
        [(2, 1, b"")],
        [(2, 1, b"\7")],
        [(1, 1, OPEN)],
        [(1, 0, OPEN)],
        [(1, 2, b"\0\0")],
        [(1, 2, bytes(257))],
        [(4, 0, b"")],
        [(6, 0, b"rank=1")],
        [(6, 2, b"rank=1")],
        [(6, 1, bytes(1025))],
        [(7, 0, b"")],
        [(8, 0, bytes(8))],
        [(9, 0, bytes(4))],
        [(9, 1, bytes(5))],
    ],
    ids=str,
)
def test_frames_that_must_not_be_end_the_link(target: LinkTarget, frames: list[tuple[int, int, bytes]]) -> None:
    """And nothing else."""
    greeted(target, "a")
    other = ask(target.registry).session
    before = len(target.store.budget.holders)
    with pytest.raises(ProtocolError):
        target.carrier.session.receive(stream(*frames))
    target.carrier.close()
    target.serve()
    assert (list(target.registry.links), target.registry.sessions) == ([ID], 0)
    assert len(target.store.budget.holders) == before - 3
    other.receive(stream((1, 1, OPEN), (0, 1, HANDSHAKE + ping(b"pong"))))
    assert b"pong" in b"".join(other.out)


def test_a_rank_is_described(target: LinkTarget) -> None:
    """By the client of the link, unless the rank says more; what that holds is counted, and released."""
    greeted(target, "a", "b")
    described = stream(
        (6, 1, b"rank=3\0world_size=8\0host=node\xff\0job="),
        (0, 2, introduce((b"rank", b"7"))),
        (6, 2, b"rank=4"),
    )
    sessions = [linked.session for linked in server_end(target).sessions.values()]
    target.carrier.session.receive(described)
    assert [session.peer for session in sessions] == [
        {"rank": "3", "world_size": "8", "host": "node�", "job": ""},
        {"rank": "7"},
    ]
    assert sessions[0].introduction_bytes() > 0
    target.carrier.session.receive(stream((2, 1, b"\1"), (6, 1, b"rank=5")))
    target.serve()
    assert list(server_end(target).sessions) == [2]


def test_a_relay_is_asked_what_its_ranks_do(registry: LinkRegistry) -> None:
    """What it answers is handed on as it is. Whether it can, it says with each LINK."""
    answers: list[tuple[bytes, int, bytes]] = []
    registry.on_examined = lambda link, number, report: answers.append((link.carrier.identity, number, report))
    ask(registry)
    link = registry.links[ID]
    assert not link.examines
    session = ask(registry, examines=b"1", instance=b"this server", taken=b"0", told=b"0").session
    assert link.examines
    link.examine(2**32 - 1, 1500)
    while registry.work():
        pass
    assert b"".join(session.out) == struct.pack("<IIII", 0, 8 | 8 << 24, 2**32 - 1, 1500)
    session.receive(stream((9, 0, b"\1\0\0\0{}"), (9, 0, b"\2\0\0\0?")))
    assert answers == [(ID, 1, b"{}"), (ID, 2, b"?")]


def test_more_data_than_there_is_credit_for(target: LinkTarget) -> None:
    greeted(target, "a")
    target.say("a", set_(b"k", b"v" * 300_000) + get(b"k"))
    heard(target, "a")
    session = target.session("a")
    session.receive(set_(b"k", b"v" * 300_000)[: session.allowed])
    with pytest.raises(ProtocolError, match="exceeds its credit"):
        session.receive(bytes(VALUE_CREDIT_BYTES + 1))


@pytest.mark.parametrize("size", [40_000, 300_000])
def test_commands_get_less_credit_than_a_long_value(target: LinkTarget, size: int) -> None:
    """What a rank sends is executed before what others send after it; the bytes of a value are only stored."""
    greeted(target, "a")
    stream = target.peers["a"]
    value = set_(b"k", b"v" * size)
    target.say("a", value[:20_000])
    assert stream.credit == min(REQUEST_CREDIT_BYTES + len(value) - 20_000, VALUE_CREDIT_BYTES)
    commands = set_(b"k", b"v") * 100
    target.say("a", value[20_000:] + commands)
    seen = []
    for _ in range(REQUEST_CREDIT_BYTES // len(commands)):
        target.say("a", commands)
        seen.append(stream.credit)
    assert min(seen) > REQUEST_CREDIT_BYTES // 2 - len(commands)
    assert max(seen) <= REQUEST_CREDIT_BYTES


def test_frames_after_the_end_of_the_link(target: LinkTarget) -> None:
    target.link.close_link()
    target.link.seal()
    session = target.carrier.session
    session.receive(bytes(target.link.out.pop()))
    with pytest.raises(ProtocolError, match="after the end"):
        session.receive(stream((1, 1, OPEN)))


def test_what_is_opened_and_refused_is_counted() -> None:
    """A peer that opens without end, and takes nothing, is one of those that the budget evicts."""
    registry = LinkRegistry(Store(Limits(sessions=0, budget_bytes=9 * MIB)), "this server", 30.0)
    carrier = ask(registry).session
    memory = server_bytes = 0
    with pytest.raises(PeerError):
        for number in range(100_000):
            first = 1000 * number
            carrier.receive(stream(*[(1, first + one, OPEN) for one in range(1, 1001)]))
            carrier.out.clear()
            carrier.unsent = 0
            memory = max(memory, registry.links[ID].held_bytes())
            server_bytes = registry.store.budget.used()
    assert 17 * memory > server_bytes - LINK_BYTES > MIB / 2
    assert registry.store.budget.used() < MIB / 4


# Flow


def test_a_rank_that_reads_nothing_stops_itself_only() -> None:
    target = LinkTarget(reads=False)
    greeted(target, "a", "b")
    target.say("a", set_(b"k", b"v" * 100_000) + get(b"k") * 100)
    assert len(heard(target, "a")) == REPLY_CREDIT_BYTES
    linked = target.session("a")
    assert linked.session.stalled()
    assert linked.session.unsent <= MIB + 100_008
    assert server_end(target).held_bytes() == 0
    target.say("a", add(b"n", 1))
    target.say("b", add(b"n", 10))
    assert heard(target, "b") == i64(10)
    got = REPLY_CREDIT_BYTES
    target.reads = True
    target.read("a")
    got += len(heard(target, "a"))
    assert got == 100 * 100_008 + 8
    assert target.store.keyspace.values[b"n"] == 11


def test_bytes_for_a_session_that_is_held_back_are_appended() -> None:
    """In single frames too: what waits is not copied for each."""
    target = LinkTarget(reads=False)
    greeted(target, "a")
    target.say("a", set_(b"k", b"v" * 100_000) + get(b"k") * 20)
    linked = target.session("a")
    buffer = linked.session.input_buffer
    assert linked.session.stalled()
    for byte in ping(b"pong") * 1000:
        linked.receive(bytes([byte]))
    assert linked.session.input_buffer is buffer
    assert target.store.budget.unfinished == linked.session.held > 5000
    target.reads = True
    target.read("a")
    assert heard(target, "a").endswith(b"pong" * 1000)
    assert target.store.budget.unfinished == 0


def test_a_rank_that_ends_still_gets_its_replies() -> None:
    target = LinkTarget(reads=False)
    greeted(target, "a")
    target.say("a", set_(b"k", b"v" * 100_000) + get(b"k") * 30 + add(b"n", 1))
    target.half_close("a")
    got = target.hear("a", Answer()).data
    assert not target.peers["a"].is_closed
    target.reads = True
    target.read("a")
    answer = target.hear("a", Answer())
    assert answer.closed
    assert len(got + answer.data) == 30 * 100_008 + 8
    assert answer.data.endswith(i64(1))


def test_an_error_lets_earlier_replies_out() -> None:
    target = LinkTarget()
    greeted(target, "a")
    target.say("a", set_(b"k", b"v" * 100_000) + get(b"k") * 2 + ping(b"pong") + b"\xff")
    assert target.hear("a", Answer()) == Answer(blob(b"v" * 100_000) * 2 + b"pong", closed=True)


def test_a_window_that_is_full_of_one_rank_is_shared() -> None:
    """Sessions send a piece each in rotation, when the link is free again."""
    target = LinkTarget()
    greeted(target, *"abcdefgh")
    values = {name: random.Random(name).randbytes(250_000) for name in "abcdefgh"}
    for name, value in values.items():
        target.say("a", set_(name.encode(), value))
    for name in values:
        target.link.send(target.peers[name], get(name.encode()))
    target.link.seal()
    carrier = target.carrier.session
    carrier.receive(b"".join(target.link.out))
    target.link.out.clear()
    held = server_end(target).held_bytes()
    assert WINDOW_BYTES <= held < WINDOW_BYTES + 70_000
    credits = sorted(target.session(name).credit for name in "abcdefgh")
    assert credits[-1] - credits[0] <= 32 * 1024
    target.exchange()
    assert all(heard(target, name) == blob(value) for name, value in values.items())


@pytest.mark.parametrize("breaks", [False, True])
def test_commands_with_as_many_keys_as_allowed(breaks: bool) -> None:
    names = [b"%06d" % number for number in range(131_072)]
    data = multi_set(*[(name, name) for name in names]) + check(*names) + multi_get(*names) + wait(*names[1:], b"x")
    direct = Store(Limits())
    alone = ServerSession(direct, None, "h", 1, 0.0)
    alone.receive(HANDSHAKE)
    alone.receive(data)
    while alone.stalled():
        alone.unsent = 0
        alone.receive(b"")
    target = LinkTarget()
    greeted(target, "a", "b")
    if breaks:
        credit = target.peers["a"].credit
        target.link.send(target.peers["a"], data[:credit])
        data = data[credit:]
        target.link.seal()
        target.cut_off()
        target.dial()
        target.exchange()
    target.say("a", data)
    same = heard(target, "a") == b"".join(alone.out)
    assert same
    target.say("b", set_(b"x", b""))
    assert heard(target, "a") == b"\0"


def test_work_is_asked_for_once(registry: LinkRegistry) -> None:
    asked: list[None] = []
    registry.on_work = lambda: asked.append(None)
    carrier = ask(registry).session
    assert len(asked) == 1
    while registry.work():
        pass
    keys = [b"%06d" % number for number in range(1400)]
    carrier.receive(stream((1, 1, OPEN), (0, 1, HANDSHAKE + wait(*keys))))
    assert len(asked) == 2
    assert registry.work()
    assert len(asked) == 2


# Breaking


def test_an_item_is_not_offered_to_a_session_without_a_connection() -> None:
    target = LinkTarget()
    greeted(target, "a", "b")
    target.say("a", wait(b"q"))
    target.say("b", wait(b"q"))
    target.cut_off()
    other = ServerSession(target.store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + push(b"q", b"1") + push(b"q", b"2") + push(b"q", b"3"))
    assert target.store.keyspace.handoffs == {}
    later = ServerSession(target.store, None, "h", 1, 0.0)
    later.receive(HANDSHAKE + pop(b"q"))
    assert later.out
    target.dial()
    target.exchange()
    assert target.store.keyspace.handoffs == {b"q": 2}
    assert heard(target, "a") == heard(target, "b") == b"\0"


def test_a_link_is_not_resumed_when_the_server_is_about_to_stop(registry: LinkRegistry) -> None:
    """Its old connection is still there, but breaks: that ends it."""
    carrier = ask(registry).session
    carrier.receive(stream((1, 1, OPEN)))
    registry.go_away()
    reply = ask(registry, instance=b"this server", taken=b"0", told=b"0")
    assert reply.status == "unknown"
    assert not registry.is_carrying(reply.session)
    assert carrier in registry.store.hub.evicted
    while registry.work():
        pass
    assert (registry.links, registry.sessions) == ({}, 0)


def test_offers_are_made_in_portions() -> None:
    target = LinkTarget()
    names = [str(number) for number in range(1500)]
    for name in names:
        target.link.open(target.peers.setdefault(name, LinkPeer(target)), "127.0.0.1", 1)
        target.link.send(target.peers[name], HANDSHAKE + wait(b"q"))
    target.exchange()
    target.cut_off()
    other = ServerSession(target.store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + push(b"q", b"") * 1500)
    target.dial()
    assert target.registry.work()
    assert target.store.keyspace.handoffs == {b"q": 1000}
    target.exchange()
    assert target.store.keyspace.handoffs == {b"q": 1500}


def test_offers_that_pass_over_many_are_made_in_smaller_portions() -> None:
    """A second link is back; the sessions of the first, which is not, come first in the queue."""
    store = Store(Limits())
    registry = LinkRegistry(store, "this server", 30.0)
    for number in range(2):
        carrier = ask(registry, id=bytes([number] * 16)).session
        carrier.receive(stream(*[(1, one, OPEN) for one in range(1, 1001)]))
        for one in range(1, 1001, 100):
            some = [(0, rank, HANDSHAKE + wait(b"q")) for rank in range(one, one + 100)]
            carrier.receive(stream(*some))
            while carrier.stalled():
                carrier.receive(b"")
        carrier.leave()
    other = ServerSession(store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + push(b"q", b"") * 200)
    assert store.keyspace.handoffs == {}
    ask(registry, id=bytes([1] * 16), instance=b"this server", taken=b"0", told=b"0")
    assert registry.work()
    assert 0 < store.keyspace.handoffs[b"q"] < 20
    while registry.work():
        pass
    assert store.keyspace.handoffs == {b"q": 200}


def test_replies_that_waited_are_sent_in_portions() -> None:
    """All at once when the window opens would take long with many sessions."""
    store = Store(Limits())
    registry = LinkRegistry(store, "this server", 30.0)
    carrier = ask(registry).session
    count = 3000
    (link,) = registry.links.values()
    for first in range(1, count + 1, 1000):
        carrier.receive(stream(*[(1, one, OPEN) for one in range(first, first + 1000)]))
        carrier.receive(stream(*[(0, one, HANDSHAKE) for one in range(first, first + 1000)]))
        take_all(carrier)
    carrier.leave()
    value = random.Random(1).randbytes(WINDOW_BYTES)
    other = ServerSession(store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + set_(b"v", value))
    carrier = ask(registry, instance=b"this server", taken=b"0", told=b"%d" % link.taken).session
    for rank in range(1, 6):
        carrier.receive(stream((0, rank, get(b"v"))))
        registry.work()
        take_all(carrier)
    assert not link.has_room()
    for first in range(6, count, 1000):
        numbers = range(first, min(first + 1000, count + 1))
        carrier.receive(stream(*[(0, one, add(b"n", 1)) for one in numbers]))
        take_all(carrier)
    waiting = len(link._waiting)
    assert waiting > 2900
    carrier.receive(ack(link.sent))
    assert waiting - 1000 <= len(link._waiting) < waiting
    assert registry.work()
    while registry.work():
        pass
    assert [linked.number for linked in link._waiting] == []


def test_a_suspended_link_ends_in_portions_after_the_grace_period() -> None:
    target = LinkTarget()
    for name in range(2500):
        target.link.open(target.peers.setdefault(str(name), LinkPeer(target)), "127.0.0.1", 1)
    target.exchange()
    ended: list[str] = []
    target.registry.on_end = lambda link, reason: ended.append(reason)
    target.cut_off()
    tick(target.registry, 29.0)
    assert target.registry.links
    assert not tick(target.registry, 30.0)
    assert (target.registry.sessions, ended) == (2500, ["it had no connection for 30 s"])
    assert target.registry.work()
    assert target.registry.sessions == 2375
    target.serve()
    assert target.registry.sessions == 0
    assert target.store.budget.others == 0
    with pytest.raises(AssertionError):
        target.dial()


def test_the_grace_period_begins_when_the_connection_is_lost_and_not_with_the_tick_before() -> None:
    """Its client, which was told how long it is, tries to resume the link to the end."""
    target = LinkTarget()
    tick(target.registry, 1.0)
    target.registry.clock.now = 1.9
    target.cut_off()
    tick(target.registry, 31.8)
    assert target.registry.links
    tick(target.registry, 31.9)
    assert not target.registry.links


def test_keep_alive() -> None:
    target = LinkTarget()
    greeted(target, "a")
    session = target.carrier.session
    alive = ack(server_end(target).taken)
    for now, sent in ((1.0, b""), (2.0, b""), (3.0, b""), (4.0, alive), (5.0, b""), (6.0, b""), (7.0, b"")):
        tick(target.registry, now)
        assert b"".join(session.out) == sent
        session.out.clear()
        session.unsent = 0
    target.link.acknowledge()
    session.receive(bytes(target.link.out.pop()))
    tick(target.registry, 21.0)
    assert session not in target.store.hub.evicted
    tick(target.registry, 22.0)
    assert "nothing received on a link for 15 s" in str(target.store.hub.evicted[session])
    assert server_end(target).connection is None
    tick(target.registry, 51.0)
    assert target.registry.links
    tick(target.registry, 52.0)
    assert not target.registry.links


def test_sessions_that_are_woken_together_need_not_be_flushed(target: LinkTarget) -> None:
    greeted(target, "a", "b")
    for name in "ab":
        target.say(name, wait(b"k"))
    other = ServerSession(target.store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + set_(b"k", b""))
    assert target.store.hub.pending_flush == []
    target.serve()
    target.exchange()
    assert [heard(target, name) for name in "ab"] == [b"\0", b"\0"]


@pytest.mark.parametrize(
    "size", [REPLY_CREDIT_BYTES - 8, REPLY_CREDIT_BYTES + 1], ids=["no credit", "replies that wait for credit"]
)
def test_a_session_is_woken_behind_the_replies_that_wait(size: int) -> None:
    target = LinkTarget(reads=False)
    greeted(target, "a", "b")
    target.say("b", set_(b"k", b"v" * size))
    target.say("a", get(b"k") + wait(b"w"))
    target.say("b", set_(b"w", b""))
    assert heard(target, "a") == blob(b"v" * size)[:REPLY_CREDIT_BYTES]
    target.read("a")
    assert heard(target, "a") == blob(b"v" * size)[REPLY_CREDIT_BYTES:] + b"\0"


def test_what_a_suspended_link_is_given_is_kept_and_counted() -> None:
    target = LinkTarget()
    greeted(target, "a", "b")
    target.say("a", wait(b"k"))
    before = target.store.budget.others
    target.cut_off()
    other = ServerSession(target.store, None, "h", 1, 0.0)
    other.receive(HANDSHAKE + set_(b"k", b""))
    target.serve()
    kept = server_end(target).held_bytes()
    assert kept > 0
    other.leave()
    target.dial()
    target.exchange()
    assert heard(target, "a") == b"\0"
    target.link.acknowledge()
    target.exchange()
    assert target.store.budget.others == before


# The budget


def _fill(target: LinkTarget, name: str, count: int) -> None:
    """Have a peer send so many bytes of a request that is not complete."""
    target.say(name, set_(b"k" * 8, bytes(count))[:-1])


def test_a_session_is_evicted_and_its_link_goes_on() -> None:
    target = LinkTarget(store=Store(Limits(budget_bytes=40 * MIB)))
    greeted(target, *"abcdef")
    before = target.store.budget.used()
    target.say("a", multi_set(*[(b"%d" % number, bytes(8 * MIB)) for number in range(2)])[:-1])
    for name in "bcd":
        _fill(target, name, 7 * MIB)
    assert target.peers["a"].is_closed
    assert target.registry.sessions == 5
    target.say("e", ping(b"pong"))
    assert heard(target, "e") == b"pong"
    for name in "bcd":
        target.close(name)
    target.connect("g")
    target.link.acknowledge()
    target.exchange()
    assert target.store.budget.used() == before - 3 * SESSION_BYTES
    assert target.store.budget.unfinished == 0


def test_a_session_that_is_evicted_in_the_middle_of_its_own_request() -> None:
    target = LinkTarget(store=Store(Limits(budget_bytes=20 * MIB)))
    greeted(target, "a", "b")
    before = target.store.budget.used()
    target.say("a", multi_set(*[(b"%d" % number, bytes(8 * MIB)) for number in range(3)])[:-1])
    assert target.peers["a"].is_closed
    target.connect("c")
    target.link.acknowledge()
    target.exchange()
    assert target.store.budget.used() == before


@pytest.mark.parametrize("whose", ["connection", "link"])
def test_what_carries_a_session_is_evicted_by_what_the_session_does(whose: str) -> None:
    """In the middle of many frames: it ends behind the frame that did it, and what is counted is what there is."""
    target = LinkTarget(store=Store(Limits(budget_bytes=16 * MIB)))
    greeted(target, "a", "b")
    before = target.store.budget.used()
    value = set_(b"k", bytes(200_000))
    target.say("a", value[:20_000])  # for which the rest of the value gets credit
    link = server_end(target)
    carrier = target.carrier.session
    if whose == "connection":
        carrier.keep_unsent([bytes(8 * MIB)], 0)
    else:
        link.keep([bytes(8 * MIB)])
        link._count()
    target.link.send(target.peers["a"], value[20_000:])
    target.link.send(target.peers["b"], add(b"n", 1) + ping(b"pong"))
    target.link.seal()
    data = b"".join(target.link.out)
    limit = target.store.budget
    limit.resize(limit.used() + 100_000)
    with pytest.raises(BudgetError):
        carrier.receive(data)
        while carrier.stalled():
            carrier.receive(b"")
    limit.resize(16 * MIB)
    assert link.connection is None
    target.carrier.close()
    target.serve()
    target.link.disconnect()
    if whose == "link":
        assert (target.registry.links, target.registry.sessions) == ({}, 0)
        assert target.store.budget.others == 0
        return
    target.dial()
    target.exchange()
    assert heard(target, "b") == i64(1) + b"pong"
    assert len(target.store.keyspace.values[b"k"]) == 200_008  # type: ignore[arg-type]
    target.link.acknowledge()
    target.exchange()
    assert target.store.budget.others == before


# The end


def test_a_server_that_is_about_to_stop(registry: LinkRegistry) -> None:
    carrier = ask(registry).session
    carrier.receive(stream((1, 1, OPEN)))
    suspended = ask(registry, id=bytes([1] * 16)).session
    suspended.leave()
    registry.go_away()
    while registry.work():
        pass
    assert list(registry.links) == [ID]
    assert b"".join(carrier.out).endswith(struct.pack("<II", 0, 4 << 24))
    carrier.out.clear()
    carrier.receive(stream((1, 2, OPEN)))
    assert struct.pack("<II", 2, 1 | 2 << 24) + b"\2" in b"".join(carrier.out)
    assert ask(registry, id=bytes([2] * 16)).status == "refused"
    carrier.out.clear()
    registry.close_all()
    assert b"".join(carrier.out).endswith(struct.pack("<II", 0, 1 | 2 << 24) + b"\1")
    assert (registry.links, registry.sessions) == ({}, 0)


def test_a_session_that_fails_is_the_only_one_to_go(target: LinkTarget) -> None:
    greeted(target, "a", "b")
    slot = target.store.slot(12)
    assert slot is not None

    def fail() -> bool:
        raise ZeroDivisionError

    slot.call = fail
    failed: list[Transport] = []
    target.registry.on_failure = failed.append
    target.say("a", CANCEL_WAIT)
    assert failed == [target.session("a")]
    failed[0].close()
    target.say("b", ping(b"pong"))
    assert heard(target, "b") == b"pong"
    assert target.peers["a"].is_closed


def test_a_client_that_does_not_know_the_replys_version() -> None:
    client = ClientLink()
    assert client.answered(b'{"status":"refused","reason":"no","more":[1]}').status == "refused"
    assert not client.connected


def test_closing_a_session_frees_no_connection() -> None:
    """So it does not give way to one, though it has to send VALIDATE in time."""
    target = LinkTarget(store=Store(Limits(), session_bytes=65 * 1024))
    before = target.store.budget.used()
    target.registry.clock.now = 7.0
    target.connect("a")
    session = target.session("a").session
    assert session.connected_at == 7.0
    assert target.store.hub.oldest_unvalidated() is None
    assert target.store.hub.overdue(37.0) is None
    assert target.store.hub.overdue_on_links(36.0) == []
    assert target.store.hub.overdue_on_links(37.0) == [session]
    assert target.store.budget.used() == before + SESSION_BYTES
    assert target.registry.is_carrying(target.carrier.session)
    assert not target.registry.is_carrying(session)
    assert target.registry.all_sessions() == [session]


def test_a_frame_for_many_sessions_is_handled_in_several_portions() -> None:
    """More than two: the second one ends where it began, at the start of what is held back."""
    registry = LinkRegistry(Store(Limits()), "this server", 30.0)
    carrier = ask(registry).session
    count = 1024
    numbers = range(1, count + 1)
    carrier.receive(stream(*[(1, number, OPEN) for number in numbers]))
    while carrier.stalled():
        carrier.receive(b"")
    request = HANDSHAKE + add(b"/" + b"k" * 500, 1)
    sessions = struct.pack(f"<{count + 1}I", count, *numbers)
    carrier.receive(stream((5, 0, sessions + request)))
    portions = 1
    while carrier.stalled():
        carrier.receive(b"")
        portions += 1
    assert portions > 3
    assert registry.store.keyspace.values[b"/" + b"k" * 500] == count


def test_a_session_without_a_connection_cannot_send_validate(target: LinkTarget) -> None:
    """So it is not overdue, and has all its time once it is back."""
    target.connect("a")
    target.cut_off()
    store = target.store
    assert store.hub.overdue_on_links(1000.0) == []
    target.registry.clock.now = 1000.0
    target.dial()
    assert store.hub.overdue_on_links(1029.0) == []
    assert store.hub.overdue_on_links(1030.0) == [target.session("a").session]
    target.say("a", HANDSHAKE)
    assert store.hub.overdue_on_links(2000.0) == []


@pytest.mark.parametrize(
    ("said", "host"),
    [
        (b"10.0.0.9", "10.0.0.9"),
        (b"fe80::1%eth0", "fe80::1%eth0"),
        (b"127.0.0.1", "10.0.0.7"),
        (b"::ffff:127.0.0.1", "10.0.0.7"),
        (b"10.0.0.9: fine; closed the connection from 1.1.1.1", "10.0.0.7"),
        (b"10.0.0.9)", "10.0.0.7"),
        (b"a\nb", "10.0.0.7"),
        (b"\xff\xfe", "10.0.0.7"),
    ],
)
def test_the_address_of_a_rank_begins_no_other_log_line(said: bytes, host: str) -> None:
    registry = LinkRegistry(Store(Limits()), "one", 30)
    carrier = ask(registry)
    carrier.session.receive(stream((1, 1, struct.pack("<H", 4711) + said)))
    (rank,) = registry.all_sessions()
    assert rank.host == host


@pytest.mark.parametrize("size", [5_000, 100_000])
def test_a_long_reply_to_a_request_that_travels_once_travels_once(size: int) -> None:
    """Also if handling the request takes several portions."""
    target = LinkTarget()
    target.registry.portion = 20
    names = "abcdefgh"
    greeted(target, *names)
    values = [(b"k%d" % number, random.Random(number).randbytes(size // 50)) for number in range(50)]
    target.say("a", multi_set(*values))
    before = server_end(target).sent
    for name in names:
        target.link.send(target.peers[name], multi_get(*[key for key, _ in values]))
    target.exchange()
    expected = b"".join(blob(value) for _, value in values)
    assert [heard(target, name) for name in names] == [expected] * len(names)
    assert server_end(target).sent - before < 1.5 * len(expected), "not eight times"


def test_replies_with_parts_that_grow_are_not_shared() -> None:
    target = LinkTarget()
    greeted(target, "a", "b")
    target.say("a", set_(b"k", bytes(5000)) + append(b"k", b"x" * 5000))
    for name, grows in (("a", b"1"), ("b", b"2")):
        target.link.send(target.peers[name], multi_get(b"k", b"k") + append(b"k", grows))
    target.exchange()
    value = bytes(5000) + b"x" * 5000
    assert heard(target, "a")[:10008] == blob(value)
    assert heard(target, "b")[:10009] == blob(value + b"1")
