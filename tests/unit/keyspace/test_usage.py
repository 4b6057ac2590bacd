"""What tokens with limits are charged for. Most of it is a property, in tests/properties/test_limits.py."""

from __future__ import annotations

import pytest

from conformance.frames import (
    add,
    attend,
    barrier,
    confirm,
    delete,
    give_back,
    lease,
    lease_later,
    meet,
    pop,
    push,
    set_,
    wait,
)
from support import HANDSHAKE
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import NotAllowedError, ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.session.identity import identity
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport

TOKEN = Access("t", max_keys=10, max_bytes=100_000)


def store(portion: int = 1000) -> Store:
    made = Store(Limits(), portion)
    made.identify(identity("this server", "uv"))
    return made


def session(of: Store, access: Access = TOKEN) -> ServerSession:
    made = ServerSession(of, None, "10.0.0.7", 1, 0.0)
    made.grant_access(access)
    made.receive(HANDSHAKE)
    return made


def finish(of: Store, *sessions: ServerSession) -> None:
    while of.keyspace.work or any(one.running is not None for one in sessions):
        if of.keyspace.work:
            of.keyspace.step()
        for one in sessions:
            if one.running is not None:
                one.receive(b"")


def measured(of: Store) -> tuple[int, int]:
    return of.keyspace.count_keys(), of.keyspace.size - of.keyspace.parked


def in_use(of: Store) -> tuple[int, int]:
    usage = of.hub.auth.usage["t"]
    return usage.keys, usage.bytes


@pytest.mark.parametrize("evicted", [False, True])
def test_what_goes_back_to_its_queue_counts(evicted: bool) -> None:
    of = store()
    keeper, leaver = session(of), session(of)
    for number in range(9):
        keeper.receive(push(b"/q%d" % number, bytes(9000)))
    before = in_use(of)
    for number in range(9):
        leaver.receive(lease(b"/q%d" % number, number))
    if evicted:
        leaver.evict(ProtocolError("for this test"))
    leaver.leave()
    assert in_use(of) == measured(of) == before


def test_limits_hold_while_items_are_leased() -> None:
    """A queue counts until none of its items can go back."""
    of = store()
    keeper, worker = session(of), session(of)
    for number in range(10):
        keeper.receive(push(b"/q%d" % number, b""))
        worker.receive(lease(b"/q%d" % number, number))
    with pytest.raises(NotAllowedError, match="QUEUE_PUSH would add 1 key; 10 of the 10 allowed"):
        session(of).receive(push(b"/new", b""))
    keeper.receive(push(b"/q0", b"another"))
    worker.receive(confirm(1) + give_back(2))
    assert in_use(of) == measured(of)
    assert in_use(of)[0] == 9
    keeper.receive(push(b"/new", b""))
    worker.leave()
    assert in_use(of) == measured(of)
    assert in_use(of)[0] == 10
    for queue in list(of.keyspace.queues):
        keeper.receive(pop(queue) * 2)
    assert in_use(of) == measured(of) == (0, 0)


def test_what_a_command_does_once_its_registrations_are_dropped_counts() -> None:
    of = store(portion=2)
    peer, other = session(of), session(of)
    peer.receive(wait(*[b"/%d" % number for number in range(5)]))
    finish(of, peer)
    peer.receive(wait(b"/x"))
    other.receive(set_(b"/x", b""))
    peer.receive(barrier(b"/b", 9))
    assert peer.running is not None
    finish(of, peer)
    assert b"/b" in of.keyspace.values
    assert in_use(of) == measured(of) == (2, of.keyspace.size - of.keyspace.parked)


def test_silent_agents_that_are_removed_in_steps_are_given_back() -> None:
    of = store()
    token = Access("t", max_bytes=10_000_000)
    agents = [session(of, token) for _ in range(250)]
    for number, agent in enumerate(agents):
        agent.receive(meet(b"/r", b"%03d" % number, 999, 999))
    for _ in range(2):
        agents[0].receive(attend(b"/r", b"000", 1, 1))
    assert of.keyspace.work
    agents[0].leave()
    finish(of)
    assert len(of.keyspace.rounds[b"/r"].agents) < 10
    assert in_use(of) == measured(of)


class Away(Transport):
    """A connection that is broken at first."""

    away = True

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        return self.away


def test_an_item_that_is_offered_when_its_waiter_is_back_counts() -> None:
    of = store()
    owner = Away(of, "10.0.0.7", 1, 0.0)
    owner.session.grant_access(TOKEN)
    owner.session.receive(HANDSHAKE + lease_later(b"/q", 1))
    session(of).receive(push(b"/q", bytes(100)))
    before = in_use(of)
    owner.away = False
    assert of.keyspace.offer(b"/q")
    assert of.keyspace.leased == {b"/q": 1}
    assert in_use(of) == measured(of) != before


def test_others_keys_that_are_deleted_are_not_given_back() -> None:
    of = store()
    peer, other = session(of), session(of, Access("u", max_keys=5))
    other.receive(set_(b"/theirs", bytes(1000)))
    peer.receive(set_(b"/mine", b"") + delete(b"/theirs") + add(b"/mine2", 1))
    assert in_use(of)[0] == 1
    assert of.hub.auth.usage["u"].keys == 1


def test_an_item_that_is_leased_to_anothers_waiter_counts_for_that() -> None:
    of = store()
    pusher, waiter = session(of), session(of, Access("u", max_keys=5))
    waiter.receive(set_(b"/theirs", b"") + lease_later(b"/q", 1))
    theirs = of.hub.auth.usage["u"].bytes
    pusher.receive(push(b"/q", bytes(100)))
    assert of.hub.auth.usage["u"].bytes > theirs
    waiter.receive(give_back(1))
    assert of.hub.auth.usage["u"].bytes == theirs
    pusher.receive(pop(b"/q"))
    assert in_use(of) == (0, 0)


def test_nobody_is_locked_out_by_what_others_have_deleted() -> None:
    """The store bounds what its holders have stored, whoever emptied it."""
    of = store()
    peer, admin = session(of), session(of, Access("u"))
    for _ in range(3):
        for number in range(10):
            peer.receive(set_(b"/%d" % number, bytes(5000)))
        for number in range(10):
            admin.receive(delete(b"/%d" % number))
    peer.receive(set_(b"/k", b""))
    assert in_use(of) == measured(of)
    peer.receive(push(b"/q", bytes(90_000)))
    with pytest.raises(NotAllowedError, match="QUEUE_PUSH would add 90,"):
        peer.receive(push(b"/q", bytes(90_000)))
