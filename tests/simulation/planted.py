"""Defects, put in one at a time to see whether the simulator notices. Interpreted build only.

Each replaces one method by one that is wrong in the way that its name says. They rely on names, not on source text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from simulation.processes import Log
from tcpstore_async.base.errors import BudgetError, QueueEmptyError
from tcpstore_async.base.keys import stored_key
from tcpstore_async.base.limits import ENTRY_BYTES, PARKED_BYTES
from tcpstore_async.client import requests
from tcpstore_async.client.async_connection import AsyncConnection
from tcpstore_async.client.sync_client import TCPClient
from tcpstore_async.keyspace.accounts import Usage
from tcpstore_async.keyspace.agents import AgentRegistry
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.rounds import Agent, Rounds
from tcpstore_async.keyspace.waiter_types import AWAITING_VALUE, IDLE, Counter, Handoff, SharedWait, Waiter
from tcpstore_async.links import carrier
from tcpstore_async.links.carrier import Carrier
from tcpstore_async.links.frames import Link
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.link_server import ServerLink
from tcpstore_async.links.linked_session import LinkedSession
from tcpstore_async.links.single_link import SingleLink
from tcpstore_async.links.work import LinkWork
from tcpstore_async.log.events import EventRecorder
from tcpstore_async.log.records import read_alone
from tcpstore_async.log.replay import Replayer
from tcpstore_async.server.persistence import Persistence
from tcpstore_async.server.replication import Replication
from tcpstore_async.server.uv import Connection, UvServer
from tcpstore_async.session.budget import Budget, Holder
from tcpstore_async.session.client import ClientSession, PendingCall
from tcpstore_async.session.named_stores import Entry, NamedStore, NamedStores
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.unsent import Unsent
from tcpstore_async.stores.tcp import TCPStore
from tcpstore_async.wire.values import unpack

Method = Callable[..., Any]
Plant = tuple[Any, str, Callable[[Method], Method]]


def _before(extra: Method) -> Callable[[Method], Method]:
    def plant(real: Method) -> Method:
        def method(*given: Any) -> Any:
            extra(*given)
            return real(*given)

        return method

    return plant


def _after(extra: Method) -> Callable[[Method], Method]:
    def plant(real: Method) -> Method:
        def method(*given: Any) -> Any:
            result = real(*given)
            extra(*given)
            return result

        return method

    return plant


def _instead(wrong: Method) -> Callable[[Method], Method]:
    return lambda real: wrong


def _keeps_promise(store: Keyspace, waiter: Waiter, handoff: Handoff) -> None:
    if waiter.handoff is handoff:
        waiter.handoff = None
    store.handoffs[handoff.queue] -= 1
    if not store.handoffs[handoff.queue]:
        del store.handoffs[handoff.queue]


def _wakes_nobody_else(store: Keyspace, waiter: Waiter) -> bool:
    for key in waiter.parked or ():
        store.waiters[key].clear()
        store.waiters[key][waiter] = None
    store._unpark(waiter)
    return True


def _replies_first(session: ServerSession, value: Any) -> None:
    said = b"\0" if value is None else value
    session.out.insert(0, said)
    session.unsent += len(said)
    session.store.hub.pending_flush.append(session)


def _fires_again(store: Keyspace, waiter: Waiter, ended: int) -> None:
    waiter.fire(None)


def _believes_all(session: ClientSession, call: PendingCall, *_: object) -> None:
    session.confirmed = session.written


def _replies_twice(session: ClientSession, call: PendingCall, *_: object) -> None:
    if call.done:
        session.pending.appendleft(call)


def _newest_first(store: Keyspace, key: bytes) -> None:
    if key in store.queues:
        store.queues[key].rotate(1)


def _pops_and_keeps(store: Keyspace, key: bytes) -> Any:
    queue = store.queues.get(key)
    return (0, None) if queue is None else (len(queue), queue[0])


def _one_too_few(counter: Counter, total: int) -> None:
    counter.targets = [target + 1 for target in counter.targets]
    counter.awaiting = {target + 1: group for target, group in counter.awaiting.items()}
    for group in counter.awaiting.values():
        for waiter in group:
            waiter.number += 1


def _does_it_again(session: ServerSession, chunk: bytes, at: int) -> None:
    session._keep(chunk, 0, 0)


def _begins_again(session: ServerSession, rest: Any, chunk: bytes, at: int, need: int) -> None:
    if rest is not None:
        session.partial = rest
    session._keep(chunk, at, need - at)


def _fetch_eats(store: Keyspace, waiter: Waiter, ended: int) -> None:
    if ended == AWAITING_VALUE and waiter.awaited in store.queues:
        store.queue_pop(waiter.awaited)


def _is_no_more_promised(store: Keyspace, key: bytes, handed_on: bool = False) -> None:
    registered = store.waiters[key]
    for waiter in [waiter for waiter in registered if not isinstance(waiter, Counter)]:
        del registered[waiter]
        ended = store._count_down(waiter, key)
        if ended != IDLE:
            store._fire(waiter, ended)
    if not registered:
        del store.waiters[key]


def _drops_leases(store: Keyspace, waiter: Waiter) -> None:
    for key, item in (waiter.leases or {}).values():
        store.size -= len(key) + ENTRY_BYTES + len(item) + PARKED_BYTES
    waiter.leases = None


_serial = count()


def _ignores_token(real: Method) -> Method:
    def join(store: Keyspace, waiter: Waiter, key: bytes, token: bytes) -> int:
        total: int = real(store, waiter, key, token and b"%d" % next(_serial))
        return total

    return join


def _drops_leases_of(store: Keyspace, waiter: Waiter, ticket: int) -> None:
    for key in list(store.queues):
        if key.startswith(b"/l"):
            store.queue_pop(key)


def _wakes_for_pushes_only(real: Method) -> Method:
    def wake_next(store: Keyspace, key: bytes, handed_on: bool = False) -> None:
        if not handed_on:
            real(store, key)

    return wake_next


def _to_the_end(store: Keyspace, leased: list[tuple[bytes, bytes]]) -> None:
    store.size -= len(leased) * PARKED_BYTES
    for key, item in leased:
        store.size -= len(key) + ENTRY_BYTES + len(item)
        store.queue_push(key, item)


def _keeps_its_place(store: Keyspace, waiter: Waiter) -> None:
    store.represented.pop(waiter).connections -= 1


def _ends_well(real: Method) -> Method:
    def note_end(store: Keyspace, key: bytes, rounds: Rounds, agent: Agent | None, succeeded: bool) -> None:
        real(store, key, rounds, agent, True)

    return note_end


def _outdated(rounds: Rounds, agent: Agent, call: int) -> None:
    if rounds.caller is not None and not rounds.closed:
        rounds._form()


PLANTED: dict[str, Plant] = {
    "a lease goes with its holder": (Keyspace, "leave", _before(_drops_leases)),
    "a lease stays with who has left": (
        Keyspace,
        "leave",
        _before(lambda store, waiter: setattr(waiter, "leases", None)),
    ),
    "an item that is returned is dropped": (Keyspace, "give_back", _after(_drops_leases_of)),
    "an item that is returned goes to the end": (Keyspace, "_restore", _instead(_to_the_end)),
    "an item that is returned wakes nobody": (Keyspace, "wake_next", _wakes_for_pushes_only),
    "a confirmed item comes again": (
        Keyspace,
        "confirm",
        _instead(lambda store, waiter, ticket: store.give_back(waiter, ticket) and None),
    ),
    "a rank that joins again counts twice": (Keyspace, "join", _ignores_token),
    "a hand-off is not passed on": (Keyspace, "end_handoff", _instead(_keeps_promise)),
    "a queue wakes everybody without hand-offs": (Keyspace, "wake_next", _instead(_is_no_more_promised)),
    "a waiter that leaves stays registered": (Keyspace, "leave", _instead(lambda store, waiter: None)),
    "a waiter that leaves keeps its hand-off": (
        Keyspace,
        "leave",
        _instead(lambda store, waiter: store._unpark(waiter)),
    ),
    "a cancel unregisters the others": (Keyspace, "cancel_wait", _instead(_wakes_nobody_else)),
    "a cancel unregisters nobody": (Keyspace, "cancel_wait", _instead(lambda store, waiter: True)),
    "a waiter is fired twice": (Keyspace, "_fire", _after(_fires_again)),
    "a waiter is not fired": (Keyspace, "_fire", _instead(lambda store, waiter, ended: None)),
    "a wake-up overtakes earlier replies": (ServerSession, "fire", _instead(_replies_first)),
    "a wake is not to be flushed": (
        ServerSession,
        "fire",
        _after(lambda session, value: session.store.hub.pending_flush.pop()),
    ),
    "the newest item comes first": (Keyspace, "queue_pop", _before(_newest_first)),
    "an item is popped twice": (Keyspace, "queue_pop", _instead(_pops_and_keeps)),
    "a fetch takes an item": (Keyspace, "_fire", _before(_fetch_eats)),
    "a counter is reached one too late": (Counter, "next_reached", _before(_one_too_few)),
    "a group stays open, whatever happens to its keys": (Keyspace, "close_group", _instead(lambda store, key: None)),
    "a kept reply outlives a change": (Keyspace, "_forget", _instead(lambda store, listed: None)),
    "a member that leaves its group is woken with it": (
        SharedWait,
        "remove",
        _after(lambda group, waiter: group.members.setdefault(waiter)),
    ),
    "an agent that is lost keeps its place": (Keyspace, "lose_agent", _instead(_keeps_its_place)),
    "an outdated last call forms a round": (Rounds, "complete", _instead(_outdated)),
    "a job that has failed is one that ended successfully": (Keyspace, "_note_end", _ends_well),
    "a job whose agents are lost may end successfully": (Rounds, "is_intact", _instead(lambda rounds: rounds.formed)),
    "a delete leaves its size": (
        Keyspace,
        "delete_key",
        _instead(lambda store, key: 0 if store.values.pop(key, None) is None else 1),
    ),
    "bytes of a session that leaves stay counted": (
        ServerSession,
        "leave",
        _before(lambda session: setattr(session, "held", 0)),
    ),
    "a command is done again after a stall": (ServerSession, "_stall", _instead(_does_it_again)),
    "a frame cut in two is read on from its beginning": (ServerSession, "_suspend", _instead(_begins_again)),
    "a client takes a wake-up for the reply to its cancel": (
        ClientSession,
        "_decode_canceled",
        _instead(lambda session, call, byte: None),
    ),
    "a client believes writes too early": (ClientSession, "_complete", _after(_believes_all)),
    "a client gives two replies to one call": (ClientSession, "_complete", _after(_replies_twice)),
}


# What the real clients did in 0.1.0, for `real`


def _pops_without_lease(store: TCPStore, key: str, block: bool = True) -> bytes:
    name = stored_key(key)
    pop, wait = requests.queue_pop(name), requests.wait([name])
    began = time.monotonic()
    client = store._queues(wait if block else pop, began)
    while True:
        _, item = store._call_blocking(wait, store._timeout, pop, began) if block else client.call(pop)
        if item is not None:
            return unpack(item)
        if not block or (
            client.call(requests.check([name]))
            and not client.call(requests.queue_len(name))
            and name in client.call(requests.LIST_KEYS)
        ):
            raise QueueEmptyError("queue is empty")


class Real(NamedTuple):
    """A defect of the clients, and what is said when it is found."""

    owner: Any
    method: str
    plant: Callable[[Method], Method]
    finding: str


REAL: dict[str, Real] = {
    "H1: a late reply to a pop is dropped": Real(TCPStore, "queue_pop", _instead(_pops_without_lease), "is lost"),
    "H2: a join is repeated without a token": Real(
        requests, "join", _instead(lambda token: requests.count(1 if token else 0)), "are counted"
    ),
    "H5: a pop that lost a race reads all keys": Real(
        TCPStore, "queue_pop", _instead(_pops_without_lease), "names of all keys"
    ),
    "H6: a signal handler waits for the call that it interrupts": Real(
        TCPClient, "_within_another", _instead(lambda client, me: False), "a handler of signals timed out"
    ),
    "M13: the item of a cancelled pop stays with its connection": Real(
        AsyncConnection, "give_back", _instead(lambda connection, lease: None), "keeps what nobody asked for"
    ),
    "a pop is confirmed before its reply has arrived": Real(
        ServerSession, "grant", _after(lambda session, length, item: session.leases.clear()), "is lost"
    ),
}


# What the server's budget is for, for `hogs`


def _counts_nothing(unsent: Unsent, replies: list[Any], taken: int = 0) -> None:
    unsent._chunk = None
    unsent.pieces.extend(replies)


def _last_one_goes(real: Method) -> Method:
    def relieve(budget: Budget, holder: Holder) -> None:
        if budget.used() > budget._next:
            raise BudgetError(budget.used(), budget.limit, budget.limit, 0)

    return relieve


HOGGED: dict[str, Plant] = {
    "H3: unsent replies are not counted": (Unsent, "add", _instead(_counts_nothing)),
    "the newest peer is evicted, not the largest": (Budget, "relieve", _last_one_goes),
    "a session that goes stays counted": (
        Budget,
        "forget",
        _instead(lambda budget, holder, size: budget.holders.pop(holder, False)),
    ),
}


# Whom the budget evicts is in the events, for `ranks`

CROWDED: dict[str, Plant] = {
    "whom the budget evicts is not noted": (EventRecorder, "evicts", _instead(lambda recorder, victim, wanted: None)),
}


# What links are for, for `links`


def _takes_again(link: ServerLink, session: ServerSession, taken: int) -> None:
    link.taken = max(0, link.taken - 12)


def _forgets_offers(passed: Carrier, most: int) -> bool:
    passed.queues.clear()
    return True


def _keeps_credit(linked: LinkedSession) -> None:
    if linked.ended:
        linked.close_if_done()


def _needs_no_credit(linked: LinkedSession) -> None:
    linked.credit = max(linked.credit, 1 << 20)


LINKED: dict[str, Plant] = {
    "bytes are taken twice": (ServerLink, "attach", _before(_takes_again)),
    "a byte is lost": (
        ServerLink,
        "attach",
        _before(lambda link, session, taken: setattr(link, "taken", link.taken + 1)),
    ),
    "frames are not sent again": (Link, "connect", _after(lambda link, taken: link.out.clear())),
    "an item is given to a session without a connection": (
        Carrier,
        "pass_over",
        _instead(lambda passed, queue: False),
    ),
    "what a session was passed over for is not offered": (Carrier, "offer_some", _instead(_forgets_offers)),
    "credit is not returned": (LinkedSession, "_allow_or_close", _instead(_keeps_credit)),
    "replies need no credit": (LinkedSession, "flush", _before(_needs_no_credit)),
    "sessions outlive their link": (LinkWork, "end_later", _instead(lambda registry, link: None)),
    "frames are not counted": (ServerLink, "_count", _instead(lambda link: None)),
    "any secret will do": (carrier, "compare_digest", _instead(lambda known, given: True)),
}


# What stores with names are for, for `stores`


def _outlives(registry: NamedStores, session: ServerSession) -> None:
    store = session.store
    if isinstance(store, NamedStore):
        store.owners.pop(session, None)


def _sees_others(store: NamedStore, registry: NamedStores, *_: object) -> None:
    store.keyspace.values = registry.unnamed.keyspace.values


def _enters_any(registry: NamedStores, entry: Entry) -> None:
    entry.incarnation = ""


def _keeps_waiting(registry: NamedStores, session: ServerSession, entry: Entry) -> None:
    registry.park(entry)


NAMED: dict[str, Plant] = {
    "a store outlives its owner": (NamedStores, "leave", _before(_outlives)),
    "a key is visible in another store": (NamedStore, "__init__", _after(_sees_others)),
    "a rank of a store that has ended enters the next one": (NamedStores, "decide", _before(_enters_any)),
    "who waits for a store is not let in": (NamedStores, "_admit", _instead(_keeps_waiting)),
    "who is in a store that has ended stays connected": (NamedStores, "close", _instead(lambda registry, store: None)),
    "who has given up is still waited for": (NamedStores, "_forget_entry", _instead(lambda registry, session: None)),
    "what was in a store stays counted": (Budget, "remove", _instead(lambda budget, share: None)),
}


# What tokens with limits are charged for, for `tokens`


def _forget_end(registry: AgentRegistry, key: bytes) -> None:
    ended = registry.ended.pop(key, None)
    if ended is not None:
        registry.size -= len(key) + ended.cost()


LIMITED: dict[str, Plant] = {
    "what ends with a connection counts for no token": (ServerSession, "account", _instead(lambda session: None)),
    "what a command does in a later step counts for no token": (
        ServerSession,
        "_step_counted",
        _instead(lambda session, command, account: command.step(session.store.keyspace.portion)),
    ),
    "limits of tokens are not checked": (Usage, "demand", _instead(lambda usage, keys, size: None)),
    "a job that is forgotten counts for whoever forgets it": (AgentRegistry, "_forget_end", _instead(_forget_end)),
}


# What replays differently, for `links`


def _reads_a_clock(carrier_: Carrier) -> None:
    carrier_.lost = time.monotonic()


def _loses_order(real: Method) -> Method:
    """In another process, a set has another order."""

    def method(store: Keyspace, key: bytes) -> dict[Waiter, None]:
        taken = real(store, key)
        return dict.fromkeys(reversed(taken)) if isinstance(store.clock.recorder, Replayer) else taken

    return method


def _unrecorded(real: Method) -> Method:
    """Return the method as one that is no event."""

    def method(subject: Any, *given: Any) -> Any:
        of: Any = subject.link if isinstance(subject, LinkedSession) else subject
        recorder = getattr(of, "registry", of).clock.recorder
        if recorder is None or recorder.inside:
            return real(subject, *given)
        recorder.inside = True
        try:
            return real(subject, *given)
        finally:
            recorder.inside = False

    return method


REPLAYED: dict[str, Plant] = {
    "a clock is read": (Carrier, "detach", _after(_reads_a_clock)),
    "the order of a set decides": (Keyspace, "_take_registrations", _loses_order),
    "output leaves before it may": (LinkedSession, "flush", _unrecorded),
    "a tick is no event": (LinkRegistry, "tick", _unrecorded),
    "work is no event": (LinkRegistry, "work", _unrecorded),
}


# What is not kept, for `journal`


def _commits_at_the_end(real: Method) -> Method:
    def commit(server: UvServer, persistence: Persistence, held: list[Connection]) -> bool:
        return len(held) > 0 or real(server, persistence, held)

    return commit


def _commits_for_links(real: Method) -> Method:
    def commit(server: UvServer, persistence: Persistence, held: list[Connection]) -> bool:
        attaching = list(server.links.attaching.values())
        linked = [
            one
            for one in held
            if one.single is not None or one.session in attaching or server.links.is_carrying(one.session)
        ]
        return (len(held) > 0 and not linked) or real(server, persistence, held)

    return commit


def _counts_sessions_anew(replayer: Replayer, sessions: dict[int, ServerSession], *_: object) -> None:
    replayer.opened_sessions = len(sessions)


JOURNALED: dict[str, Plant] = {
    "a reply leaves before its record is written": (UvServer, "_commit", _commits_at_the_end),
    "a read is answered before what it shows is durable": (UvServer, "_commit", _commits_for_links),
    "a tick is in no record": (LinkRegistry, "tick", _unrecorded),
    "a flush is in no record": (LinkedSession, "flush", _unrecorded),
    "a question to a relay is in no record": (ServerLink, "examine", _unrecorded),
    "a token is checked again": (Replayer, "answer", _instead(lambda replayer, ask: ask())),
    "connections of a server that has ended go on": (Persistence, "break_all", _instead(lambda *_: None)),
    "a session takes again what it took before a restart": (
        SingleLink,
        "received",
        lambda real: lambda link, count: None if link.registry.clock.recorder.again else real(link, count),
    ),
    "sessions are counted anew after a snapshot": (Replayer, "resume", _after(_counts_sessions_anew)),
}


# What another server could contradict, for `replicated`


def _does_not_wait(real: Method) -> Method:
    def commit(server: UvServer, persistence: Persistence, held: list[Connection]) -> bool:
        real(server, persistence, held)
        server.committing = server.turn.stands = False
        return True

    return commit


def _believes_its_lease(real: Method) -> Method:
    def commit(replication: Replication, leaves: bool) -> Any:
        etcd = replication.etcd
        certain_until, etcd.certain_until = etcd.certain_until, float("inf")
        try:
            return real(replication, leaves)
        finally:
            etcd.certain_until = certain_until

    return commit


def _accepts_all(log: Log, revision: int, number: int, record: bytes, *given: Any) -> None:
    log.etcd.records[number] = record
    log.etcd.world.appended(number, record, *given)


def _counts_attempts(real: Method) -> Method:
    def attempt(log: Log, revision: int, number: int, record: bytes, *given: Any) -> None:
        real(log, revision, number + (number in log.etcd.records), record, *given)

    return attempt


def _skips(real: Method) -> Method:
    def follow(replication: Replication, records: list[bytes]) -> None:
        for data in records:
            record = read_alone(data, replication.chain)
            if record.number % 16 != 9:
                replication.execute(record)

    return follow


def _goes_on_first(server: UvServer) -> None:
    server.committing = server.turn.stands = False
    reported, server.postponed = list(server.postponed.items()), {}
    server.turn.begin()
    server._serve_reported(reported)
    persistence, server.persistence = server.persistence, None
    server._write_held()
    server.persistence = persistence


REPLICATED: dict[str, Plant] = {
    "a reply leaves before its record is appended": (UvServer, "_commit", _does_not_wait),
    "what is read leaves though the lease may have ended": (Replication, "commit", _believes_its_lease),
    "what is read leaves with a record that was appended before": (
        UvServer,
        "committed",
        _after(lambda server: server._go_on()),
    ),
    "what is executed meanwhile leaves with a record that was appended before": (
        UvServer,
        "committed",
        _before(_goes_on_first),
    ),
    "who comes while a record is appended is forgotten": (
        UvServer,
        "_go_on",
        _before(lambda server: server._arrived.clear()),
    ),
    "a server without the epoch appends": (Log, "attempt", _instead(_accepts_all)),
    "another attempt to append has another number": (Log, "attempt", _counts_attempts),
    "who follows skips a record": (Replication, "follow", _skips),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The package with this defect."""
    simple = {**PLANTED, **HOGGED, **CROWDED, **LINKED, **NAMED, **LIMITED, **REPLAYED, **JOURNALED, **REPLICATED}
    owner, method, plant = simple[name] if name in simple else REAL[name][:3]
    real = getattr(owner, method)
    setattr(owner, method, plant(real))
    try:
        yield
    finally:
        setattr(owner, method, real)
