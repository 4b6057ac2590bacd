"""Stores with names, on sessions in memory."""

from __future__ import annotations

import gc
import json
import math
from typing import Any

import pytest

from conformance.frames import (
    CANCEL_FETCH,
    END,
    NO_VALUE,
    delete,
    enter,
    get,
    i64,
    join,
    lease,
    meet,
    multi_set,
    push,
    queue_len,
    set_,
    wait,
)
from properties.session_driver import take
from support import HANDSHAKE, blob
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import BudgetError, NotAllowedError, PeerError, ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client.admission import admission
from tcpstore_async.client.store_name import StoreName
from tcpstore_async.observe.history import History, history_of
from tcpstore_async.observe.monitor import Monitor
from tcpstore_async.serving import build
from tcpstore_async.session.auth import ALL
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.identity import MAX_ADDRESSES, identity, read_identity
from tcpstore_async.session.named_stores import PORT_BYTES, NamedStore, NamedStores, StoreEnded
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.commands import SERVER_KEY
from tcpstore_async.wire.values import EMPTY, unpack


class Server:
    """A store whose sessions are flushed and closed as by a server."""

    def __init__(self, portion: int = 1000, limits: Limits | None = None) -> None:
        self.store = Store(limits or Limits(), portion)
        self.store.identify(identity("the server", "uv"))
        self.named = NamedStores(self.store, "the server")
        self.closed: dict[Peer, str] = {}
        self.port = 0

    def connect(self, access: Access | None = None) -> ServerSession:
        """Return a session, with a token if need be."""
        self.port += 1
        session = ServerSession(self.store, None, "10.0.0.7", self.port, 0.0)
        session.receive(HANDSHAKE)
        if access is not None:
            session.grant_access(access)
        return session

    def say(self, session: ServerSession, data: bytes) -> bytes:
        """Return the replies at once, those included that take steps."""
        session.receive(data)
        while session.stalled():
            session.receive(b"")
        return take(session)

    def enter(self, session: ServerSession, name: str, **items: object) -> dict[str, Any]:
        return reply(self.say(session, enter(name, **items)))

    def owner(self, name: str, owner: str = "o", access: Access | None = None, **items: object) -> ServerSession:
        return self.rank(name, access, owner=owner, pid=77, host="n1", **items)

    def rank(self, name: str, access: Access | None = None, **items: object) -> ServerSession:
        session = self.connect(access)
        assert self.enter(session, name, **items)["status"] == "entered"
        return session

    def leave(self, session: ServerSession) -> None:
        session.leave()
        self.work()

    def work(self) -> None:
        """Do what is left for later, and close evicted sessions."""
        more = True
        while more:
            if self.store.keyspace.work:
                self.store.activate()
                self.store.keyspace.step()
            more = self.named.work()
            evicted = self.store.hub.evicted
            while evicted:
                session, error = next(iter(evicted.items()))
                self.closed[session] = str(error)
                session.leave()
            self.store.hub.pending_flush.clear()
            more = more or bool(self.store.keyspace.work)


def reply(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(unpack(raw))
    return found


@pytest.fixture
def server() -> Server:
    return Server()


def test_keys_are_visible_in_their_store_only(server: Server) -> None:
    stock, first, second = server.connect(), server.owner("a"), server.owner("b")
    for number, session in enumerate((stock, first, second)):
        server.say(session, set_(b"/k", b"%d" % number))
    rank = server.rank("a")
    assert [server.say(one, get(b"/k"))[8:] for one in (stock, first, second, rank)] == [b"0", b"1", b"2", b"1"]
    assert server.say(server.connect(), get(b"/k"))[8:] == b"0"


def test_a_rank_waits_for_the_owner(server: Server) -> None:
    ranks = [server.connect() for _ in range(3)]
    for rank in ranks:
        assert server.say(rank, enter("a")) == b""
    owner = server.owner("a")
    assert server.say(owner, set_(b"/k", b"v")) == b""
    server.work()
    replies = [reply(take(rank)) for rank in ranks]
    assert [one["status"] for one in replies] == ["entered"] * 3
    assert len({one["incarnation"] for one in replies}) == 1
    assert [server.say(rank, get(b"/k"))[8:] for rank in ranks] == [b"v"] * 3


def test_waiting_ranks_are_answered_in_order_of_arrival(server: Server) -> None:
    ranks = [server.connect() for _ in range(3)]
    for rank in ranks:
        server.say(rank, enter("a"))
    server.say(server.connect(), enter("a", owner="o"))
    server.store.keyspace.step()
    assert [one for one in server.store.hub.pending_flush if one in ranks] == ranks


def test_a_wait_for_a_store_can_be_given_up(server: Server) -> None:
    rank, other = server.connect(), server.connect()
    assert server.say(rank, enter("a")) == b""
    assert server.say(other, enter("a")) == b""
    assert server.say(rank, CANCEL_FETCH) == NO_VALUE
    server.leave(other)
    assert server.say(rank, set_(b"/k", b"v") + get(b"/k"))[8:] == b"v"  # still in the store without a name
    owner = server.owner("a")
    server.work()
    assert take(rank) == b""
    assert list(server.named.stores["a"].sessions) == [owner]
    assert server.enter(rank, "a")["status"] == "entered"
    assert not server.named.entries
    assert not server.named.waiting


def test_who_gives_up_while_others_are_let_in_is_answered_before(server: Server) -> None:
    """As a wake-up that is on its way: the client reads both replies."""
    server = Server(portion=1)
    first, second = server.connect(), server.connect()
    server.say(first, enter("a"))
    server.say(second, enter("a"))
    server.say(server.connect(), enter("a", owner="o"))
    assert server.store.keyspace.work
    said = server.say(second, CANCEL_FETCH)
    assert said.endswith(NO_VALUE)
    assert reply(said[: -len(NO_VALUE)])["status"] == "entered"


def test_commands_behind_enter_are_for_the_new_store(server: Server) -> None:
    session = server.connect()
    said = server.say(session, enter("a", owner="o") + set_(b"/k", b"v") + get(b"/k"))
    assert said.endswith(blob(b"v"))
    assert server.say(server.connect(), get(b"/k")) == EMPTY


def test_a_second_owner_is_told_who_the_first_is(server: Server) -> None:
    clock = server.named.clock
    clock.now = 100.0
    server.owner("a")
    clock.now += 2.5
    other = server.connect()
    refused = server.enter(other, "a", owner="another")
    assert refused == {
        "status": "taken",
        "reason": "the store 'a' already has an owner (host n1, pid 77), which created it 2.5 s ago",
    }
    assert server.say(other, set_(b"/k", b"v") + get(b"/k"))[8:] == b"v"
    assert server.enter(other, "b", owner="another")["status"] == "entered"


def test_nothing_that_a_client_says_breaks_a_line_of_the_log(server: Server) -> None:
    first = server.connect()
    server.enter(first, "a\nb", owner="o", host="n\n1", pid="1\n\x1b[2J", attempt="1\n")
    for items in ({"owner": "other"}, {"attempt": "2\n"}):
        assert server.enter(server.connect(), "a\nb", **items)["reason"].isprintable()
    rank = server.rank("a\nb")
    server.leave(first)
    assert server.closed[rank].isprintable()


def test_a_store_ends_with_its_owner_at_once(server: Server) -> None:
    owner, rank = server.owner("a"), server.rank("a")
    server.say(rank, set_(b"/k", b"v"))
    server.leave(owner)
    assert server.closed == {rank: "the store 'a' ended: its owner (host n1, pid 77) left"}
    again = server.owner("a", "next")
    assert server.say(again, get(b"/k")) == EMPTY


def test_an_owner_of_several_connections_leaves_with_the_last(server: Server) -> None:
    first = server.owner("a")
    incarnation = server.named.stores["a"].incarnation
    second = server.owner("a", incarnation=incarnation)
    server.leave(first)
    assert not server.closed
    assert server.rank("a")
    server.leave(second)
    assert "a" not in server.named.stores


def test_owners_can_share(server: Server) -> None:
    first, second = server.owner("a", "1", shares="us"), server.owner("a", "2", shares="us")
    server.say(first, END)
    server.leave(first)
    assert server.say(server.rank("a"), get(b"/k")) == EMPTY
    server.leave(second)
    assert "a" not in server.named.stores


class Broken(Transport):
    """What stands for the connection of a session on a link while that is broken."""

    def __init__(self) -> None:
        pass

    def awaited_since(self) -> float:
        return math.inf


def test_nobody_new_enters_while_the_owner_may_be_dead(server: Server) -> None:
    """Of a new job, they would be in the store of the job before, which is about to end."""
    owner = server.owner("a", shares="us")
    incarnation = server.named.stores["a"].incarnation
    late, rival, known, other = (server.connect() for _ in range(4))
    owner.owner = Broken()
    lost = {
        "status": "lost",
        "reason": "the store 'a' has lost its owner (host n1, pid 77) and will end unless the owner comes back",
    }
    assert server.enter(late, "a") == lost
    assert server.enter(rival, "a", owner="another") == lost
    assert server.enter(known, "a", incarnation=incarnation)["status"] == "entered"
    owner.owner = None
    owner.came_back()
    assert server.enter(late, "a")["status"] == "entered"
    assert server.enter(rival, "a", owner="another")["status"] == "taken"
    owner.owner = Broken()
    assert server.enter(other, "a", owner="p", shares="us")["status"] == "entered"
    assert server.enter(rival, "a", owner="another")["status"] == "taken"


class Counted(Broken):
    """Counts how often it is looked at."""

    looks = 0

    def awaited_since(self) -> float:
        Counted.looks += 1
        return super().awaited_since()


@pytest.mark.parametrize("portion", [1000, 7])
def test_the_connections_of_a_lost_owner_are_looked_at_once(portion: int) -> None:
    """Each ENTER would take milliseconds, were they very many; and other peers are served while it looks."""
    server = Server(portion)
    owners = [server.owner("a") for _ in range(100)]
    for owner in owners:
        owner.owner = Counted()
    Counted.looks = 0
    late = server.connect()
    late.receive(enter("a"))
    steps = 0
    while late.stalled():
        looks = Counted.looks
        late.receive(b"")
        assert Counted.looks - looks <= portion
        steps += 1
    assert steps == (1 if portion == 1000 else 15)
    assert reply(take(late))["status"] == "lost"
    assert server.enter(late, "a")["status"] == "lost"
    assert Counted.looks == 100
    owners[50].owner = None
    owners[50].came_back()
    assert server.enter(late, "a")["status"] == "entered"


def test_end_gives_the_ranks_time(server: Server) -> None:
    released: list[object] = []
    server.named.on_released = released.append
    owner, rank = server.owner("a"), server.rank("a")
    server.say(rank, set_(b"/k", b"v"))
    assert server.say(owner, END) == i64(1)
    server.leave(owner)
    assert not server.closed
    assert server.say(rank, get(b"/k"))[8:] == b"v"
    [store] = server.named.ending
    assert released == [store]
    assert server.say(server.owner("a", "next"), get(b"/k")) == EMPTY
    server.named.close(store)
    server.work()
    assert server.closed == {rank: "the store 'a' ended: its owner (host n1, pid 77) has closed it"}
    assert not server.named.ending


def test_an_owner_that_has_ended_its_store_is_not_lost(server: Server) -> None:
    owner, rank = server.owner("a", joins=2), server.rank("a")
    for number, session in enumerate((owner, rank)):
        assert server.say(session, join(b"init/", b"r%d" % number)) == i64(number + 1)
    server.say(owner, END)
    server.leave(owner)
    assert server.say(rank, join(b"init/", b"")) == i64(2)


@pytest.mark.parametrize("token", [b"", b"good"])
def test_a_client_asks_once_who_the_server_is(server: Server, token: bytes) -> None:
    """In one message, and knows what a server would answer in the store that it has entered."""
    if token:
        server.store.hub.auth.require_auth = ALL
        server.store.hub.auth.authenticate = lambda _: Access("t1", store="a")
    session, peer = ClientSession(), server.connect()
    sent = []
    for data, call in admission(session, "::1", 1, token, StoreName("a", owner="o")):
        sent.append(data)
        session.receive(server.say(peer, data))
        assert call.done
    assert [bool(data) for data in sent] == [True, False, *([True] if token else []), True]
    assert session.identity == read_identity(unpack(server.say(peer, get(SERVER_KEY))))
    assert session.identity is not None
    assert (session.identity.store, session.identity.requires) == ("a", "")


def test_nothing_lasts_of_a_store_that_all_have_left(server: Server) -> None:
    owner, rank = server.owner("a"), server.rank("a")
    server.say(owner, END)
    server.leave(owner)
    server.leave(rank)
    assert not server.named.ending
    assert not server.named.stores


def test_a_known_incarnation_is_the_only_one_entered(server: Server) -> None:
    owner = server.owner("a")
    known = server.named.stores["a"].incarnation
    assert server.rank("a", incarnation=known)
    server.leave(owner)
    server.owner("a", "next")
    late = server.connect()
    assert server.enter(late, "a", incarnation=known) == {
        "status": "ended",
        "reason": "the store 'a' ended: its owner (host n1, pid 77) left",
    }
    assert server.enter(late, "a", incarnation="of another server")["reason"] == "the store 'a' ended"


def test_attempts(server: Server) -> None:
    server.owner("a", attempt=2)
    late, early, other = server.connect(), server.connect(), server.connect()
    assert server.enter(late, "a", attempt=1) == {
        "status": "ended",
        "reason": "the store 'a' belongs to attempt 2, but this rank belongs to attempt 1",
    }
    assert server.enter(other, "a", attempt="x")["status"] == "ended"
    assert server.rank("a", attempt=2)
    assert server.rank("a")
    assert server.say(early, enter("a", attempt=3)) == b""
    assert server.named.drop("a", "an administrator dropped it")
    server.work()
    server.owner("a", "next", attempt=3)
    server.work()
    assert reply(take(early))["status"] == "entered"


def test_who_does_not_want_to_wait(server: Server) -> None:
    found = server.enter(server.connect(), "a", wait=0)
    assert found == {"status": "ended", "reason": "there is no store 'a'"}
    server.owner("a")
    server.owner("b", "another")
    for name in "ab":
        assert server.named.drop(name, f"an administrator dropped {name}")
    server.work()
    found = server.enter(server.connect(), "a", wait=0)
    assert found == {"status": "ended", "reason": "the store 'a' ended: an administrator dropped a"}


def test_the_identity_names_the_store(server: Server) -> None:
    rank = server.owner("a")
    found = reply(server.say(rank, get(b"tcpstore_async/server")))
    assert (found["store"], found["instance"]) == ("a", server.named.stores["a"].incarnation)


def test_an_owner_can_announce_ranks(server: Server) -> None:
    owner, rank = server.owner("a", joins=4), server.rank("a")
    assert server.say(rank, get(b"tcpstore_async/joins"))[8:] == b"4"
    assert server.say(server.connect(), get(b"tcpstore_async/joins")) == EMPTY
    assert server.say(rank, join(b"init/", b"r1")) == i64(1)
    server.say(owner, END)
    assert server.say(rank, get(b"tcpstore_async/joins"))[8:] == b"0"


def test_waiters_and_queues_belong_to_their_store(server: Server) -> None:
    first, second = server.owner("a"), server.owner("b")
    server.say(first, wait(b"/q"))
    server.say(second, push(b"/q", b"x"))
    assert take(first) == b""
    server.say(server.rank("a"), push(b"/q", b"x"))
    assert take(first) == b"\0"


def test_enter_must_come_first(server: Server) -> None:
    for before in (enter("b", owner="o"), join(b"init/", b"t"), wait(b"/k")):
        session = server.connect()
        server.say(session, before)
        with pytest.raises(ProtocolError, match="ENTER from a connection"):
            server.say(session, enter("a", owner="o"))


@pytest.mark.parametrize(("said", "left"), [
    (join(b"init/", b"t"), 0), (push(b"/q", b"item") + lease(b"/q", 1), 1),
])  # fmt: skip
def test_who_waits_for_a_store_does_nothing_that_binds_it_to_the_first(server: Server, said: bytes, left: int) -> None:
    """What it has joined or leased would never be given up."""
    rank = server.connect()
    server.say(rank, enter("a"))
    server.say(rank, said)
    owner = server.owner("a")
    server.work()
    assert list(server.closed) == [rank]
    assert "ENTER from a connection that is waiting, has joined, represents an agent" in server.closed[rank]
    assert list(server.named.stores["a"].sessions) == [owner]
    other = server.connect()
    assert server.say(other, join(b"init/", b"")) == i64(0)  # without those that have left
    assert server.say(other, queue_len(b"/q")) == i64(left)


def test_an_agent_enters_no_store(server: Server) -> None:
    agent = server.connect()
    server.say(agent, meet(b"rounds", b"me", 1, 1))
    with pytest.raises(ProtocolError, match="ENTER from a connection"):
        server.say(agent, enter("a", owner="o"))


def test_end_takes_an_owner(server: Server) -> None:
    server.owner("a")
    for session in (server.rank("a"), server.connect()):
        with pytest.raises(ProtocolError, match="owns no store"):
            server.say(session, END)


# Tokens


def refused(server: Server, session: ServerSession, request: bytes) -> str:
    """Return why a request is refused, which the reply says before the connection is closed."""
    with pytest.raises(NotAllowedError) as error:
        server.say(session, request)
    found = reply(take(session))
    assert found["status"] == "refused"
    assert str(error.value) == f"not allowed: {found['reason']}"
    session.leave()
    return str(found["reason"])


def test_another_token_presented_while_it_waits_for_a_store(server: Server) -> None:
    session = server.connect(Access("t", store="a"))
    assert server.say(session, enter("a")) == b""
    session.grant_access(Access("u", store="b"))
    server.owner("a")
    server.work()
    assert server.closed[session] == "not allowed: token u is only for the store 'b', not for 'a'"


def test_a_token_for_a_store_opens_that_one_only(server: Server) -> None:
    session = server.connect(Access("t", store="a"))
    assert refused(server, session, enter("b", owner="o")) == "token t is only for the store 'a', not for 'b'"
    for command in (set_(b"/k", b"v"), get(b"/k"), b"\x07"):
        other = server.connect(Access("t", store="a"))
        with pytest.raises(NotAllowedError, match="token t is only for the store 'a'"):
            server.say(other, command)
    session = server.owner("a", access=Access("t", store="a"))
    assert server.say(session, set_(b"/k", b"v") + get(b"/k"))[8:] == b"v"


def test_a_token_that_reads_owns_no_store(server: Server) -> None:
    session = server.connect(Access("t", "read"))
    assert (
        refused(server, session, enter("a", owner="o"))
        == "token t grants only read access, but the owner of a store needs write access"
    )
    server.owner("a")
    session = server.rank("a", Access("t", "read"))
    with pytest.raises(NotAllowedError):
        server.say(session, set_(b"/k", b"v"))


@pytest.mark.parametrize("access", [Access("t", prefix="17/"), Access("t", "admin", "17/")])
def test_a_token_for_a_prefix_owns_no_store(server: Server, access: Access) -> None:
    """Or its holder could take the name of another job's store, and end that."""
    session = server.connect(access)
    assert (
        refused(server, session, enter("node7:4711", owner="evil"))
        == "token t is only for keys with the prefix '17/'; to own 'node7:4711' takes a token for that store or for "
        "all keys"
    )
    assert not server.named.stores
    for allowed in (Access("t", store="node7:4711"), Access("t"), Access("t", store="node7:4711", prefix="17/")):
        session = server.owner("node7:4711", access=allowed)
        server.rank("node7:4711", access)
        server.leave(session)


def test_the_limits_of_a_token_count_in_all_stores(server: Server) -> None:
    token = Access("t", max_keys=3)
    for name in ("a", "b"):
        session = server.owner(name, access=token)
        server.say(session, set_(b"/1", b""))
    server.say(session, set_(b"/2", b""))
    with pytest.raises(NotAllowedError, match="3 of the 3 allowed for token"):
        server.say(session, set_(b"/3", b""))


def test_a_token_that_was_forgotten_counts_again_in_a_store_that_it_was_in(server: Server) -> None:
    token = Access("t", max_keys=3)
    server.owner("a")
    for _ in range(2):
        session = server.rank("a", token)
        server.say(session, set_(b"/1", b"") + delete(b"/1"))
        server.leave(session)
        assert not server.store.hub.auth.usage
    inside, outside = server.connect(), server.connect()
    inside.grant_access(token)
    outside.grant_access(token)
    assert server.enter(inside, "a")["status"] == "entered"
    server.say(inside, set_(b"/1", b"") + set_(b"/2", b""))
    assert server.store.hub.auth.usage["t"].keys == 2
    server.say(outside, set_(b"/1", b""))
    with pytest.raises(NotAllowedError, match="3 of the 3 allowed for token"):
        server.say(outside, set_(b"/2", b""))


def test_who_enters_a_store_does_not_escape_that_its_token_is_revoked(server: Server) -> None:
    others = [server.connect() for _ in range(100)]
    session, waiting = server.connect(), server.connect()
    for one in (session, waiting, *others):
        one.grant_access(Access("t"))
    server.owner("a")
    assert server.say(waiting, enter("b")) == b""
    session.receive(enter("a"))
    server.owner("b")
    server.store.hub.end_invalid(lambda access: "token t is revoked" if access.identity == "t" else "")
    while session.stalled():
        session.receive(b"")
    with pytest.raises(NotAllowedError, match="token t is revoked"):
        session.receive(set_(b"/k", b"v"))
    server.leave(session)
    assert {server.closed.get(one) for one in (waiting, *others)} == {"not allowed: token t is revoked"}


def test_what_is_counted_for_a_token_lasts_while_its_only_session_enters_a_store(server: Server) -> None:
    session = server.connect(Access("t", max_sessions=1))
    usage = server.store.hub.auth.usage["t"]
    server.owner("a")
    assert server.enter(session, "a")["status"] == "entered"
    assert server.store.hub.auth.usage["t"] is usage
    server.leave(session)
    assert not server.store.hub.auth.usage


def test_what_ends_with_a_store_counts_for_no_token(server: Server) -> None:
    token = Access("t", max_keys=3)
    nameless = server.connect(token)
    server.say(nameless, set_(b"/1", b""))
    for _ in range(3):
        owner = server.owner("a", access=token)
        server.say(owner, set_(b"/1", b"") + set_(b"/2", b""))
        server.leave(owner)
    assert server.store.hub.auth.usage["t"].keys == 1
    server.say(nameless, delete(b"/1"))
    server.leave(nameless)
    assert not server.store.hub.auth.usage


# Memory


def test_a_store_for_which_there_is_no_memory_is_not_created() -> None:
    """It would have no owner, with whom it could end."""
    limits = Limits(budget_bytes=8 * 1024 * 1024 + 64 * 1024)
    server = Server(limits=limits)
    budget = server.store.budget
    owners = []
    with pytest.raises(BudgetError):
        for number in range(1000):
            owners.append(server.connect())
            assert server.enter(owners[-1], f"a{number}", owner="o")["status"] == "entered"
    server.leave(owners.pop())
    assert len(server.named.stores) == len(owners)
    assert budget.used() <= budget.limit
    for owner in owners:
        server.leave(owner)
    assert not server.named.stores
    assert budget.used() == 0


def test_everything_is_counted_and_released(server: Server) -> None:
    budget = server.store.budget
    idle = budget.used()
    sessions = [server.owner("a"), server.owner("b"), server.rank("a"), server.connect()]
    waiting = server.connect()
    server.say(waiting, enter("c"))
    for number, session in enumerate(sessions):
        for key in range(10 * number):
            server.say(session, set_(b"/%d" % key, bytes(100)))
    stored = sum(one.keyspace.size for one in server.named.stores.values()) + server.store.keyspace.size
    assert stored > 50 * 100
    assert budget.used() > idle + stored
    server.say(sessions[0], get(b"/0"))
    assert budget.used() == budget.others + server.named.stores["a"].keyspace.size
    for session in (sessions[0], sessions[1], sessions[3], waiting):
        server.leave(session)
    assert list(server.closed) == [sessions[2]]
    server.leave(server.connect())
    assert budget.used() - idle == server.store.keyspace.size
    assert budget.lists == 0


def test_what_a_leaving_session_releases_is_released_at_once(server: Server) -> None:
    """Even if the last command was for another store."""
    budget = server.store.budget
    server.owner("a")
    rank, other = server.rank("a"), server.connect()
    server.say(rank, wait(*[b"/%d" % number for number in range(500)]))
    server.say(other, set_(b"/k", b"v"))
    keyspace = server.named.stores["a"].keyspace
    used, size = budget.used(), keyspace.size
    server.leave(rank)
    assert size - keyspace.size > 10_000
    assert budget.used() <= used - (size - keyspace.size)


def test_the_largest_holder_goes_whichever_store_it_is_in() -> None:
    server = Server(limits=Limits(budget_bytes=16 * 1024 * 1024))
    hog, honest = server.owner("a"), server.owner("b")
    with pytest.raises(PeerError):
        for number in range(100):
            server.say(hog, set_(b"/%d" % number, bytes(256 * 1024)))
    server.leave(hog)
    server.say(honest, set_(b"/k", b"v"))
    for number in range(40):  # a second one, while another store is served in between
        other = server.owner(f"c{number}")
        server.say(other, set_(b"/k", bytes(1024 * 1024)))
        server.say(honest, get(b"/k"))
        server.work()
    assert honest not in server.closed
    assert server.closed
    assert server.store.budget.used() <= 16 * 1024 * 1024


def stores_in_memory() -> int:
    return sum(isinstance(one, NamedStore) for one in gc.get_objects())


@pytest.mark.parametrize("portion", [1000, 5])
def test_a_store_is_freed_though_the_last_to_leave_had_many_waits(portion: int) -> None:
    """At once, without the garbage collector, and in steps if there are many registrations."""
    server = Server(portion)
    owner = server.owner("a:1")
    rank = server.rank("a:1")
    server.say(rank, wait(*[b"k%d" % number for number in range(40)]))
    gc.collect()
    before = stores_in_memory()
    gc.disable()
    try:
        server.leave(owner)
        server.closed.clear()
        del owner, rank
        assert stores_in_memory() == before - 1
    finally:
        gc.enable()


def test_who_waits_for_a_store_and_is_refused_with_a_long_request_incomplete(server: Server) -> None:
    waiting = server.connect()
    server.say(waiting, enter("a:1"))
    server.say(waiting, join(b"init/", b"t"))  # which binds it to the unnamed store
    request = multi_set(*[(b"/%d" % number, b"") for number in range(3000)])
    server.say(waiting, request[:-30])
    server.owner("a:1")
    with pytest.raises(PeerError):
        server.say(waiting, request[-30:])


@pytest.mark.parametrize("observed", [False, True])
def test_thousands_of_stores_leave_nothing(observed: bool) -> None:
    server = Server()
    if observed:
        server.named.on_created = lambda store: store.observe(History(store))

    def live(number: int) -> None:
        name = f"10.0.0.7:{number}"
        early = server.connect()
        server.say(early, enter(name))
        owner, rank = server.owner(name), server.rank(name)
        server.work()
        for session in (early, owner, rank):
            server.say(session, set_(b"/%d" % session.port, b"v") + get(b"/k"))
        if number % 2:
            server.say(owner, END)
        for session in (owner, early, rank):
            if session.store.name:
                server.leave(session)
        server.closed.clear()

    gc.collect()
    gc.disable()
    try:
        live(0)
        used, tracked = server.store.budget.used(), len(gc.get_objects())
        for number in range(10_000 if build() == "compiled" else 2_500):
            live(number)
        assert server.store.budget.used() == used
        assert len(gc.get_objects()) < tracked + 3_000  # `ended` remembers 1,024
    finally:
        gc.enable()


def test_an_observed_store_does_the_same(server: Server) -> None:
    server.named.on_created = lambda store: store.observe(History(store))
    used = server.store.budget.used()
    owner = server.owner("a")
    server.say(owner, set_(b"/k", b"v"))
    history = history_of(server.named.stores["a"])
    assert history is not None
    assert history.last_write(b"/k") is not None
    assert history.held
    assert isinstance(server.named.stores["a"].error(), StoreEnded)
    server.leave(owner)
    assert not server.named.stores
    assert server.store.budget.used() == used


class Ports:
    """The ports of a server, without sockets."""

    def __init__(self, server: Server, *numbers: int | str) -> None:
        self.server = server
        self.numbers = list(numbers)
        """What is returned for the next stores that need one."""
        self.open: dict[int | str, NamedStore] = {}
        server.named.open_port = self._open
        server.named.close_port = self._close

    def _open(self, store: NamedStore) -> int | str:
        number = self.numbers.pop(0)
        if isinstance(number, int):
            self.open[number] = store
        return number

    def _close(self, store: NamedStore) -> None:
        self.open = {number: one for number, one in self.open.items() if one is not store}

    def connect(self, number: int) -> ServerSession:
        """Return a session whose connection has come to a port; it has sent nothing."""
        store = self.open[number]
        self.server.port += 1
        session = ServerSession(store, None, "10.0.0.8", self.server.port, 0.0)
        self.server.named.arrive(session, store)
        return session


def test_a_store_gets_a_port_when_it_is_needed(server: Server) -> None:
    """Once, whoever asks; nobody else is told of it."""
    ports = Ports(server, 41_000)
    owner, rank, other = server.connect(), server.connect(), server.connect()
    assert server.enter(owner, "n1:4711", owner="o") == {"status": "entered", "incarnation": "the server/1"}
    assert not ports.open
    assert server.enter(rank, "n1:4711", server="head")["port"] == 41_000
    assert server.enter(other, "n1:4711", server="head.example.org")["port"] == 41_000
    assert list(ports.open) == [41_000]
    server.leave(owner)
    assert not ports.open
    assert not server.named.ports


def test_who_comes_by_a_port_is_in_the_store(server: Server) -> None:
    """And says VALIDATE first, as everywhere."""
    ports = Ports(server, 41_000)
    owner = server.owner("n1:4711", server="head")
    server.say(owner, set_(b"/k", b"v"))
    stock = ports.connect(41_000)
    assert stock.expected() == "VALIDATE"
    assert server.say(stock, HANDSHAKE + get(b"/k")) == blob(b"v")
    known = read_identity(unpack(server.say(stock, get(SERVER_KEY))))
    assert known is not None
    assert (known.store, known.instance) == ("n1:4711", "the server/1")
    with pytest.raises(ProtocolError, match="ENTER from a connection in the store 'n1:4711'"):
        server.say(stock, enter("n1:4711"))
    wrong = ports.connect(41_000)
    with pytest.raises(ProtocolError, match="VALIDATE"):
        wrong.receive(get(b"/k"))
    counts = server.store.hub.counts()
    assert counts["VALIDATE"] == 2
    late, silent = ports.connect(41_000), ports.connect(41_000)
    server.say(late, HANDSHAKE)
    for session in (stock, wrong, owner):
        server.leave(session)
    assert list(server.closed) == [silent, late]
    assert not server.named.ending


def test_waits_of_who_comes_by_a_port_end(server: Server) -> None:
    ports = Ports(server, 41_000)
    owner = server.owner("n1:4711", server="head")
    stock = ports.connect(41_000)
    assert server.say(stock, HANDSHAKE + wait(b"/k")) == b""
    server.say(owner, set_(b"/k", b"v"))
    assert stock in server.store.hub.pending_flush
    assert take(stock) == b"\0"


def test_the_address_of_a_port_is_a_name_too(server: Server) -> None:
    """Of the server as its clients spell that, and of the host in the store's own name: programs tell others both."""
    Ports(server, 41_000, 42_000)
    owner = server.owner("n1:4711", server="head")
    server.owner("n1:4712", owner="p", server="head")
    assert server.enter(server.connect(), "n1:4711", server="10.0.0.1")["status"] == "entered"
    for address in ("head:41000", "10.0.0.1:41000", "n1:41000"):
        rank = server.rank(address, wait=0)
        assert rank.store is owner.store
        taken = server.enter(server.connect(), address, owner="q")
        assert (taken["status"], taken["reason"][:38]) == ("taken", "the store 'n1:4711' already has an own")
    for address in ("n2:41000", "head:4711", "10.0.0.1:42000"):
        assert server.enter(server.connect(), address, wait=0)["status"] == "ended"
    server.leave(owner)
    server.work()
    assert server.enter(server.connect(), "head:41000", wait=0)["status"] == "ended"


def test_the_name_of_a_store_is_no_address_of_another(server: Server) -> None:
    """Who is told an address is led to its store, or to none."""
    Ports(server, 41_000)
    first = server.owner("head:41000")
    waiting = server.connect()
    server.say(waiting, enter("other:41000"))
    for spelled in ("head", "other"):
        answer = server.enter(server.connect(), "n1:4711", owner="p", shares="s", server=spelled)
        assert answer["no_port"] == f"{spelled}:41000 is also the name of another store"
    assert server.rank("head:41000").store is first.store
    assert server.enter(server.connect(), "n1:4711", server="10.0.0.1")["port"] == 41_000


def test_a_store_without_a_port_works(server: Server) -> None:
    """Its owner is told why it has none; it is tried again for the next one who needs it."""
    owner = server.connect()
    assert server.enter(owner, "n1:4711", owner="o", server="head")["no_port"] == "this server offers none"
    Ports(server, "no number is free", 41_000)
    answer = server.enter(server.connect(), "n1:4711", server="head")
    assert (answer["status"], answer["no_port"]) == ("entered", "no number is free")
    assert server.enter(server.connect(), "n1:4711", server="head")["port"] == 41_000


def test_ports_are_counted_and_leave_nothing(server: Server) -> None:
    ports = Ports(server, *range(41_000, 41_100))
    budget = server.store.budget
    used = budget.used()
    for number in range(100):
        owner = server.owner("n1:4711", server="head")
        for spelled in range(20):
            server.leave(server.rank("n1:4711", server=f"head{spelled}"))
        held = budget.used()
        store = server.named.stores["n1:4711"]
        assert len(store.hosts) <= 6
        stock = ports.connect(41_000 + number)
        server.say(stock, HANDSHAKE + set_(b"/k", b"v"))
        assert budget.used() > held
        server.say(owner, END)
        assert not ports.open
        for session in (owner, stock):
            server.leave(session)
    assert budget.used() == used
    bare, listening = Server(), Server()
    Ports(listening, 41_000)
    bare.owner("n1:4711")
    listening.owner("n1:4711", server="head")
    assert listening.store.budget.used() == bare.store.budget.used() + PORT_BYTES


def test_monitors_note_who_comes_by_a_port(server: Server) -> None:
    """Like all others; and when they have gone, nobody is noted any more."""
    ports = Ports(server, 41_000)
    server.owner("n1:4711", server="head")
    monitor = Monitor(lambda: 0.0, 1, False)
    server.store.hub.watch(monitor.note)
    server.say(ports.connect(41_000), HANDSHAKE + set_(b"/k", b"v"))
    server.connect()
    assert [sample[5] for sample in monitor.take()] == ["VALIDATE", "SET", "VALIDATE"]
    server.store.hub.unwatch(monitor.note)
    assert server.store.first.executing() is server.store.first.call


ANY = "n1-id/localhost:4711 10.0.0.1:4711"
"""What the owner of a store for any address sends."""


def test_a_store_is_found_at_the_addresses_of_its_host(server: Server) -> None:
    server.owner("n1-id/7/localhost:4711", addresses=ANY)
    incarnation = server.named.stores["n1-id/7/localhost:4711"].incarnation
    for addresses in ("10.0.0.1:4711", "n1-id/localhost:4711", "10.0.0.9:4711 10.0.0.1:4711"):
        rank = server.connect()
        assert server.enter(rank, "n1:4711", addresses=addresses) == {
            "status": "entered",
            "incarnation": incarnation,
            "store": "n1-id/7/localhost:4711",
        }
    assert server.say(server.connect(), enter("n1:4711", addresses="10.0.0.1:4712")) == b""
    assert server.say(server.connect(), enter("10.0.0.1:4711")) == b""


def test_an_exact_spelling_is_found_first(server: Server) -> None:
    server.owner("any:4711", addresses=ANY)
    server.owner("n1:4711", "other")
    found = server.enter(server.connect(), "n1:4711", addresses="10.0.0.1:4711")
    assert found["incarnation"] == server.named.stores["n1:4711"].incarnation


def test_ranks_that_wait_for_an_address_are_let_in(server: Server) -> None:
    ranks = [server.connect() for _ in range(3)]
    for number, rank in enumerate(ranks):
        assert server.say(rank, enter(f"n{number}:4711", addresses="10.0.0.1:4711 10.0.0.2:4711")) == b""
    given_up = server.connect()
    server.say(given_up, enter("n1:4711", addresses="10.0.0.1:4711") + CANCEL_FETCH)
    server.owner("any:4711", addresses=ANY)
    server.work()
    assert [reply(take(rank))["store"] for rank in ranks] == ["any:4711"] * 3
    assert take(given_up) == b""
    server.leave(given_up)
    assert not server.named.seeking
    assert not server.named.waiting
    assert not server.named.entries


def test_an_address_of_several_stores_is_that_of_none(server: Server) -> None:
    """Many hosts have a bridge with the same address. Which of two stores is meant is clear when one has ended."""
    first = server.owner("any:4711", addresses="172.17.0.1:4711 10.0.0.1:4711")
    server.owner("all:4711", "other", addresses="172.17.0.1:4711 10.0.0.2:4711")
    rank, both = server.connect(), server.connect()
    assert server.say(rank, enter("n1:4711", addresses="172.17.0.1:4711")) == b""
    assert server.say(both, enter("n1:4711", addresses="10.0.0.1:4711 10.0.0.2:4711")) == b""
    found = server.enter(server.connect(), "n1:4711", addresses="172.17.0.1:4711 10.0.0.2:4711")
    assert found["store"] == "all:4711"
    server.say(first, END)
    server.work()
    assert [reply(take(one))["store"] for one in (rank, both)] == ["all:4711"] * 2


def test_who_finds_no_store_is_told_which_there_are(server: Server) -> None:
    for number in range(6):
        server.owner(f"n{number}:4711", f"o{number}")
    server.owner("n1-id/7/localhost:4711", "any", addresses=ANY)
    server.owner("n1:4712", "other")
    found = server.enter(server.connect(), "n9:4711", wait=0)
    assert (found["status"], found["reason"]) == ("ended", "there is no store 'n9:4711'")
    assert found["others"] == [
        f"{name}:4711 (host n1, pid 77)" for name in ("0.0.0.0", "n5", "n4", "n3")
    ]  # the newest ones


def test_a_token_for_one_store_tells_of_no_other(server: Server) -> None:
    server.owner("any:4711", addresses=ANY)
    session = server.connect(Access("t", store="n1:4711"))
    found = server.enter(session, "n1:4711", addresses="10.0.0.1:4711", wait=0)
    assert found == {"status": "ended", "reason": "there is no store 'n1:4711'"}


def test_addresses_are_counted_and_leave_nothing(server: Server) -> None:
    many = " ".join(f"10.0.0.{number}:4711" for number in range(MAX_ADDRESSES))
    used = server.store.budget.used()
    for _ in range(50):
        rank = server.connect()
        before = server.store.budget.used()
        assert server.say(rank, enter("n1:4711", addresses=many)) == b""
        assert server.store.budget.used() - before > MAX_ADDRESSES * 512
        server.leave(rank)
        owner = server.owner("any:4711", addresses=many)
        assert server.store.budget.used() - used > MAX_ADDRESSES * 512
        server.leave(owner)
        assert server.store.budget.used() == used
    named = server.named
    assert not any((named.seeking, named.addresses, named.of_port, named.waiting))
    with pytest.raises(ProtocolError, match=r"ENTER with 33 addresses \(max 32\)"):
        server.say(server.connect(), enter("n1:4711", addresses=f"{many} 10.0.1.1:4711"))
