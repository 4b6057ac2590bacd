"""Single links without I/O: what is kept, for how long, and for whom."""

from __future__ import annotations

import gc

import pytest

from conformance.frames import (
    CANCEL_FETCH,
    NUM_KEYS,
    add,
    append,
    delete,
    get,
    i64,
    lease_later,
    push,
    set_,
    taken,
)
from conformance.link_target import tick
from conformance.script import NO_REPLY
from conformance.single_target import VALIDATE, SinglePeer, SingleTarget, Wire
from properties.fleet import Command
from support import blob
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import BudgetError, ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.single_client import ClientSingleLink, is_break
from tcpstore_async.links.single_link import MOST_PIECES, SingleLink
from tcpstore_async.session.client import PendingCall
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack

LINK = BY_METHOD["link"]


def peer_of(target: SingleTarget, name: str = "a") -> SinglePeer:
    target.connect(name)
    target.say(name, VALIDATE)
    return target.peers[name]


def heard(target: SingleTarget, name: str = "a") -> bytes:
    return target.hear(name, NO_REPLY).data


def cut(target: SingleTarget, peer: SinglePeer) -> SingleLink:
    link = peer.wire.single
    assert isinstance(link, SingleLink)
    peer.wire.end(True)
    target.serve()
    return link


def ask(target: SingleTarget, items: ClientSingleLink) -> bytes:
    """Send LINK on a connection of its own; return the reply."""
    wire = Wire(target.store)
    wire.session.receive(VALIDATE + LINK.prefix + LINK.request.encode(items.fields()))
    wire.flush()
    target.serve()
    reply = bytes(wire.down[8:])
    wire.close()
    target.serve()
    return reply


def test_what_was_not_acknowledged_is_sent_again_and_what_was_is_not_kept() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", add(b"k", 1) + add(b"k", 1))
    others = target.store.budget.others
    assert heard(target) == i64(1) + i64(2)
    target.say("a", taken(8))
    link = cut(target, peer)
    assert not link.stream.can_resume(0, 0)
    assert not link.stream.can_resume(17, 0)
    assert link.stream.can_resume(8, 0)
    peer.dial()
    assert heard(target) == b""
    target.say("a", taken(16))
    target.say("a", taken(8))  # as it comes again when it was under way
    assert target.store.budget.others < others, "nothing is kept any more"
    target.finish()


def test_replies_reach_a_client_that_has_received_a_part() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", set_(b"k", b"v" * 100_000) + get(b"k"))
    peer.bring(50)
    cut(target, peer)
    peer.dial()
    assert heard(target) == blob(b"v" * 100_000)
    target.finish()


def test_a_reply_is_sent_again_as_it_was() -> None:
    """Though the value has grown since."""
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", set_(b"k", b"v" * 1000) + append(b"k", b"w" * 1000) + get(b"k") + append(b"k", b"x" * 1000))
    cut(target, peer)
    target.connect("b")
    target.say("b", VALIDATE + append(b"k", b"y" * 1000))
    heard(target, "b")
    peer.dial()
    assert heard(target) == blob(b"v" * 1000 + b"w" * 1000)
    target.finish()


def test_an_item_is_not_offered_while_the_connection_is_broken() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    other = peer_of(target, "b")
    target.say("a", lease_later(b"q", 7))
    target.say("b", lease_later(b"q", 8))
    cut(target, peer)
    target.say("b", push(b"q", b"1"))
    assert heard(target, "b") == i64(1) + blob(b"1"), "it went to the second one"
    cut(target, other).close()
    peer_of(target, "c")
    target.say("c", push(b"q", b"2"))
    peer.dial()
    assert heard(target) == i64(2) + blob(b"1"), "which the second one did not confirm"
    target.finish()


@pytest.mark.parametrize("portion", [1000, 2])
def test_a_value_ends_waits_for_an_item_whose_connections_are_broken(portion: int) -> None:
    """None of them is given the item, which goes to who asks next: perhaps nobody comes back."""
    target = SingleTarget()
    peers = [peer_of(target, name) for name in "abcd"]
    for name in "abcd":
        target.say(name, lease_later(b"q", 7))
    for peer in peers:
        cut(target, peer)
    peer_of(target, "e")
    target.store.keyspace.portion = portion
    target.say("e", push(b"q", b"1") + set_(b"q", b"v"))
    while target.store.keyspace.working:
        target.store.keyspace.step()
    target.store.keyspace.portion = 1000
    for peer in peers:
        peer.dial()
    assert [heard(target, name) for name in "abcd"] == [i64(0)] * 4
    target.say("c", lease_later(b"q", 8))
    assert heard(target, "c") == i64(1) + blob(b"1")
    target.finish()


def test_a_session_ends_with_the_grace_period_and_at_once_with_an_orderly_end() -> None:
    for orderly in (True, False):
        target = SingleTarget()
        peer = peer_of(target)
        peer_of(target, "b")
        target.say("a", lease_later(b"q", 7))
        target.say("b", push(b"q", b"1") + lease_later(b"q", 8))
        heard(target, "b")
        if orderly:
            peer.wire.close()
            target.serve()
        else:
            cut(target, peer)
            tick(target.registry, 29.0)
            target.serve()
            assert heard(target, "b") == b""
            tick(target.registry, 31.0)
            target.serve()
        assert heard(target, "b") == i64(1) + blob(b"1"), "the lease went back"
        assert list(target.registry.singles.values()) == [target.peers["b"].wire.single]
        if not orderly:
            assert peer.link is not None
            assert b"unknown" in ask(target, peer.link)
        target.finish()


def test_a_link_is_resumed_by_its_own_client_only() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    cut(target, peer)
    assert peer.link is not None
    secret = peer.link._secret
    peer.link._secret = bytes(16)
    assert b"wrong secret" in ask(target, peer.link)
    peer.link._secret = secret
    peer.dial()
    target.say("a", add(b"k", 1))
    assert heard(target) == i64(1)
    target.finish()


def test_a_delayed_attempt_changes_nothing() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    link = peer.link
    assert link is not None
    delayed = LINK.prefix + LINK.request.encode(link.fields())
    cut(target, peer)
    peer.dial()
    target.say("a", add(b"k", 1) + add(b"k", 1))
    assert heard(target) == i64(1) + i64(2)
    target.say("a", taken(16))
    wire = Wire(target.store)
    wire.session.receive(VALIDATE + delayed)
    wire.flush()
    target.serve()
    assert b"attempt 2 is stale: the link is already at attempt 3" in wire.down
    wire.close()
    target.say("a", add(b"k", 1))
    assert heard(target) == i64(3)
    target.finish()


def test_a_client_that_starts_over_ends_its_session_and_connection() -> None:
    """It has not got the reply to its first LINK; what that connection holds must not stay with it."""
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", push(b"q", b"1") + lease_later(b"q", 7))
    assert heard(target) == i64(1) + blob(b"1")
    old, client = peer.wire, peer.link
    assert client is not None
    client._instance = ""
    wire = Wire(target.store)
    wire.session.receive(VALIDATE + LINK.prefix + LINK.request.encode(client.fields()))
    wire.flush()
    target.serve()
    assert b'"new"' in wire.down
    assert old.is_closed
    other = peer_of(target, "b")
    target.say("b", lease_later(b"q", 8))
    assert heard(target, "b") == i64(1) + blob(b"1"), "the item has gone back"
    wire.close()
    other.wire.close()
    target.serve()


def test_one_link_for_a_connection() -> None:
    """And it is gone when the connection is before it took the reply."""
    target = SingleTarget()
    wire = Wire(target.store)
    for number in range(2):
        wire.session.receive(VALIDATE * (not number) + LINK.prefix + LINK.request.encode(ClientSingleLink().fields()))
    wire.flush()
    assert b"this connection already has a link" in wire.down
    link = next(iter(target.registry.attaching))
    wire.close()
    link.abandon()
    target.finish()


def test_a_connection_whose_end_the_server_has_not_noticed_is_closed() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    old = peer.wire
    target.say("a", add(b"k", 1))
    peer.dial()
    assert old.is_closed
    assert heard(target) == i64(1)
    target.say("a", NUM_KEYS)
    assert heard(target) == i64(1)
    target.finish()


def test_unsent_bytes_of_such_a_connection_are_sent_once() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    session: ServerSession = peer.wire.session
    target.say("a", add(b"k", 1))
    refused = bytes(peer.wire.down)  # as if the kernel had not accepted it
    session.keep_unsent([refused], 0)
    session.unsent += len(refused)
    peer.dial()
    assert (session.backlog, session.unsent) == (None, 0)
    assert heard(target) == i64(1)
    target.say("a", taken(8) + delete(b"k"))
    assert heard(target) == i64(1)
    target.finish()


def test_a_command_under_way_is_completed_without_a_connection() -> None:
    target = SingleTarget()
    target.store.keyspace.portion = 10
    peer = peer_of(target)
    session: ServerSession = peer.wire.session
    names = [b"w%d" % number for number in range(1100)]
    for name in names:
        target.store.keyspace.set(name, pack(b""))
    session.receive(Command("wait", names).frame)
    assert session.running is not None
    link = cut(target, peer)
    assert session.running is None
    assert link.stream.sent == 1, "the reply is kept"
    link.close()
    target.finish()


def test_what_is_held_back_comes_again_on_the_next_connection() -> None:
    """So the server has taken what it has executed, and its events say the same."""
    target = SingleTarget()
    target.store.keyspace.portion = 10
    peer = peer_of(target)
    names = [b"w%d" % number for number in range(1100)]
    for name in names:
        target.store.keyspace.set(name, pack(b""))
    waiting = Command("wait", names).frame
    data = waiting + add(b"k", 1)
    link = peer.wire.single
    assert isinstance(link, SingleLink)
    assert peer.link is not None
    before = link.stream.taken
    peer.link.note(data)
    link.received(len(data))
    peer.wire.session.receive(data)
    assert peer.wire.session.stalled()
    cut(target, peer)
    assert link.stream.taken == before + len(waiting)
    peer.dial()
    assert heard(target) == b"\0" + i64(1)
    target.finish()


def test_limits_and_a_server_that_stops() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    cut(target, peer)
    target.registry.go_away()
    target.serve()
    assert peer.link is not None
    assert b"unknown" in ask(target, peer.link)
    assert b"refused" in ask(target, ClientSingleLink())


def test_sessions_without_a_connection_count_for_their_token() -> None:
    """A new one ends the oldest of them; one that resumes is not new."""
    target = SingleTarget()
    token = Access("t", max_sessions=2)
    ended: list[str] = []
    target.registry.on_end = lambda link, reason: ended.append(reason)

    def come(name: str) -> SinglePeer:
        target.connect(name)
        peer = target.peers[name]
        peer.wire.session.grant_access(token)
        peer.wire.session.receive(VALIDATE)
        peer.dial()
        return peer

    first, second = come("a"), come("b")
    links = [cut(target, first), cut(target, second)]
    assert target.store.hub.auth.crowded(token) == ""
    third = come("c")
    assert (links[0].over, links[1].over) == (True, False)
    assert ended == ["a new session has taken its place (token t allows 2)"]
    usage = target.store.hub.auth.usage["t"]
    assert (len(usage.sessions), list(usage.suspended)) == (2, [links[1].carrier.identity])
    wire = Wire(target.store)
    wire.session.receive(VALIDATE)
    wire.session.grant_access(token)
    assert "already has 2 sessions" in target.store.hub.auth.crowded(token)
    wire.session.leave()
    cut(target, third)
    for number in range(9):
        cut(target, come(f"d{number}"))
    assert len(target.registry.singles) == len(usage.sessions) == len(usage.suspended) == 2
    for identity in list(target.registry.suspended):
        target.registry.singles[identity].end("")
    assert not target.store.hub.auth.usage


def test_who_never_acknowledges_is_evicted_for_what_is_kept() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    link = peer.wire.single
    assert isinstance(link, SingleLink)
    target.say("a", set_(b"k", b"v" * 10_000))
    held = target.store.budget.used()
    target.say("a", get(b"k"))
    assert target.store.budget.used() - held > 10_000
    link.carrier.evict(BudgetError(1, 1, 1, 1))
    target.serve()
    assert peer.wire.is_closed
    assert target.registry.singles == {}
    target.finish()


def test_a_link_keeps_no_more_pieces_than_can_be_acknowledged_at_once() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    link = peer.wire.single
    assert isinstance(link, SingleLink)
    target.say("a", set_(b"k", b"v" * 100) + set_(b"large", b"v" * 5000))
    for _ in range(2 * MOST_PIECES):  # short ones are copied together, in the end
        target.say("a", get(b"k"))
    assert peer.wire.single is link
    answers = len(heard(target))
    for _ in range(MOST_PIECES):
        target.say("a", get(b"large"))
    assert link.over
    assert target.registry.singles == {}
    target.say("a", taken(answers) + get(b"k"))
    assert len(heard(target)) == MOST_PIECES * 5008 + 108, "the session goes on, without the link"
    peer.wire.end(True)
    assert peer.wire.session.owner is None, "and ends with the connection"
    target.finish()


def test_a_session_without_a_connection_keeps_no_more_pieces_either() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", set_(b"large", b"v" * 5000))
    link = cut(target, peer)
    link.session.out.extend([b"v" * 5000] * (MOST_PIECES + 1))
    link.flush()
    target.serve()
    assert target.registry.singles == {}
    target.finish()


def links_and_sessions(store: Store) -> list[object]:
    """Return those of this store: other tests, and servers in other threads, may leave or make some at any time."""
    found = [one for one in gc.get_objects() if isinstance(one, SingleLink | Wire | ServerSession)]
    return [one for one in found if _store_of(one) is store]


def _store_of(one: SingleLink | Wire | ServerSession) -> Store:
    if isinstance(one, SingleLink):
        return one.registry.store
    return one.store if isinstance(one, ServerSession) else one.session.store


@pytest.mark.parametrize("end", ["closed", "given up", "resumed", "lost"])
def test_a_link_that_has_ended_is_in_no_cycle(end: str) -> None:
    """The server collects seldom: it relies on this."""
    target = SingleTarget()
    gc.collect()
    gc.disable()
    try:
        peer = peer_of(target)
        if end == "given up":
            target.say("a", set_(b"large", b"v" * 5000))
            for _ in range(MOST_PIECES + 1):
                target.say("a", get(b"large"))
        if end in ("resumed", "lost"):
            link = cut(target, peer)
            if end == "lost":
                link.end("")
            else:
                peer.dial()
            del link
        peer.wire.close()
        target.serve()
        target.peers.clear()
        target.store.serving = None
        del peer
        other = Wire(Store(Limits()))  # as another test may have one
        assert links_and_sessions(target.store) == []
        assert links_and_sessions(other.session.store)
    finally:
        gc.enable()
    target.finish()


def test_a_session_of_a_link_has_no_link() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", LINK.prefix + LINK.request.encode(ClientSingleLink().fields()))
    assert b"this connection already has a link" in heard(target)
    assert peer.wire.single is not None
    target.finish()


# The client's end


def begun() -> ClientSingleLink:
    link = ClientSingleLink()
    assert link.begun(b'{"status": "new", "instance": "x", "grace": 30}')
    return link


def test_a_client_sends_again_what_was_not_taken() -> None:
    link = begun()
    call = PendingCall(BY_METHOD["check"], 0, 0, ())
    link.note(b"abc", call)
    link.note(b"defg")
    assert link.resume(b'{"status": "resumed", "taken": 2}') == b"cdefg"
    link.unanswered = 4
    link.answered(PendingCall(BY_METHOD["check"], 0, 0, ()))
    assert link.unanswered == 4
    link.answered(call)
    assert link.unanswered == 0
    link.answered(call)  # a call that is not among them changes nothing
    assert link.resume(b'{"status": "resumed", "taken": 3}') == b"defg"
    assert link.resume(b'{"status": "resumed", "taken": 7}') == b""
    for taken_, status in ((2, "resumed"), (8, "resumed"), (3, "unknown")):
        with pytest.raises(ProtocolError, match="did not keep"):
            link.resume(b'{"status": "%s", "taken": %d}' % (status.encode(), taken_))


def test_a_client_acknowledges_from_time_to_time() -> None:
    link = begun()
    link.received += 1000
    assert link.acknowledgement() == b""
    link.received += 1000
    assert link.acknowledgement() == taken(2000)
    assert link.acknowledgement() == b""


def test_what_counts_as_broken() -> None:
    assert is_break(ConnectionResetError(104, "reset"))
    assert not is_break(BrokenPipeError(32, "pipe"))
    assert not is_break(None)


def test_a_registry_has_nothing_left() -> None:
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", CANCEL_FETCH)
    heard(target)
    registry: LinkRegistry = target.registry
    assert len(registry.singles) == 1
    cut(target, peer)
    assert len(registry.suspended) == 1
    registry.close_all()
    target.serve()
    assert (registry.singles, registry.suspended) == ({}, {})


def test_a_store_grows_though_all_memory_is_kept_for_others() -> None:
    """What a link keeps is given up with its session: nothing else would ever be free again."""
    target = SingleTarget()
    peer = peer_of(target)
    target.say("a", set_(b"large", bytes(200_000)))
    for _ in range(20):
        target.say("a", get(b"large") + append(b"large", b"x" * 9))
        heard(target)
    link = peer.wire.single
    assert isinstance(link, SingleLink)
    budget = target.store.budget
    budget.resize(budget.used() + 1000)
    other = Wire(target.store)
    other.session.receive(VALIDATE + set_(b"more", bytes(500_000)))
    assert link.over
    assert b"/more" in target.store.keyspace.values or b"more" in target.store.keyspace.values
    other.close()
    target.serve()
