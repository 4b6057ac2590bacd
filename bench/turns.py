"""Measure the longest time for which one request holds the event loop, for every command at its worst.

    python -m bench.turns [--runs 5] [COMMAND ...]

Each case prints the longest step in milliseconds, the limit, and whether it is kept. Exit status 1 if one is not. The
compiled build is measured if it is up to date; otherwise, and with BENCH_BUILD=interpreted, the checkout.

A step is what the server does before it serves others: one `receive` of what one read brings, one portion of a long
command or of the work that it leaves, or the flush of one batch of woken sessions. It is timed by this thread's CPU
time, garbage collection included, so that other load does not count. The sessions are real and in memory, because a
process cannot have sockets for as many peers as are woken here; a flush writes to /dev/null instead. The kernel's part,
about 4 µs for each peer, comes on top: `server/uv.py` bounds the peers and bytes of one step.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from bench import processes

if __name__ != "__mp_main__":  # a child process has the path of its parent
    processes.use_build()

from tcpstore_async.auth.access import Access
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.leases import MAX_LEASES
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.links.single_link import MOST_PIECES, SingleLink
from tcpstore_async.observe.history import History
from tcpstore_async.server.features import attach_features
from tcpstore_async.session.identity import build
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import PORTION, Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.codecs import MAX_TOKEN
from tcpstore_async.wire.commands import BY_METHOD, COMMANDS, MAGIC
from tcpstore_async.wire.values import pack

KEYS_PER_REQUEST = 131_072
WAITERS = 100_000
STORED_KEYS = 800_000
APPENDED_MIB = 256
"""Size of a value grown by APPEND."""
SHORT, LONG = 12, 128
"""Lengths of keys, in bytes: with long ones those of a request are as long together as `request_key_bytes` allows."""

STEPWISE_MS, ATOMIC_MS, AT_ONCE_MS, LIMITED_MS = 5.0, 50.0, 25.0, 35.0
"""Limits for commands that are done in steps, for those that must be atomic, and for CHECK, MULTI_GET and MULTI_SET:
without a token, and with one that has a prefix and limits."""

TOKEN = Access("t", prefix="0", max_keys=10**6, max_bytes=10**9)
NEAR = Access("t", prefix="0", max_keys=KEYS_PER_REQUEST, max_bytes=10**9)
"""Tokens that allow the keys of these cases, which begin with zeros."""

# As in server/uv.py.
_READ, _READ_IN_FRAME, _FLUSHES = 16 * 1024, 128 * 1024, 512

Case = Callable[["Loop"], None]
"""Prepares a server and sends the request that is measured."""


def frame(method: str, *fields: Any) -> bytes:
    """Return the bytes of a command; values are framed."""
    command = BY_METHOD[method]
    return command.prefix + command.request.encode(fields)


def names(count: int, length: int = SHORT) -> list[bytes]:
    return [b"/%0*d" % (length - 1, number) for number in range(count)]


class Loop:
    """A server's event loop without sockets; `longest` is its longest step so far, in seconds."""

    def __init__(self) -> None:
        self.store = Store(Limits())
        features = attach_features(self.store, "", "uv")
        self.named, self.links = features.named, features.links
        self.store.announce(0)
        self.longest = 0.0
        self.sink = os.open(os.devnull, os.O_WRONLY)
        self.peer = self.connect()
        self.other = self.connect()

    def observe(self) -> History:
        """Let the server have an admin socket."""
        history = History(self.store)
        self.store.observe(history)
        return history

    def connect(self) -> ServerSession:
        session = ServerSession(self.store, self, "::1", 1, 0.0)
        session.receive(frame("validate", MAGIC))
        return session

    def step(self, do: Callable[..., object], *arguments: object) -> None:
        """Do something and time it."""
        began = time.thread_time()
        try:
            do(*arguments)
        finally:
            self.longest = max(self.longest, time.thread_time() - began)

    def send(self, data: bytes, session: ServerSession | None = None) -> None:
        """Receive this from a peer and do everything that follows from it."""
        gc.freeze()  # preparation is old by now, or none of the server's
        session = session or self.peer
        at = 0
        try:
            while at < len(data):
                size = _READ if session.partial is None and session.input_buffer is None else _READ_IN_FRAME
                bulk = session.large_value()
                if bulk is None:
                    self.step(session.receive, data[at : at + size])
                    at += size
                else:
                    with bulk.free_space() as buffer:
                        count = min(len(buffer), len(data) - at)
                        buffer[:count] = data[at : at + count]
                    bulk.fill(count)
                    at += count
                    self.step(session.receive, b"")
                self.flush([session])
                self.finish(session)
        except PeerError:
            self.disconnect(session)

    def finish(self, session: ServerSession) -> None:
        while session.stalled() or self.store.keyspace.work or self.store.hub.pending_flush:
            if session.stalled():
                self.step(session.receive, b"")
            if self.store.keyspace.work:
                self.step(self.store.keyspace.step)
            self.flush([session])
            pending_flush = self.store.hub.pending_flush
            while pending_flush:
                batch = pending_flush[-_FLUSHES:]
                del pending_flush[-_FLUSHES:]
                self.flush(batch)

    def flush(self, sessions: Sequence[Peer]) -> None:
        self.step(self._flush, sessions)

    def _flush(self, sessions: Sequence[Peer]) -> None:
        for session in sessions:
            if session.out:
                if len(session.out) == 1:
                    os.write(self.sink, session.out[0])
                for piece in session.out:
                    session.unsent -= len(piece)
                session.out.clear()

    def disconnect(self, session: ServerSession) -> None:
        self.step(session.leave)
        self.finish(self.other)

    # Preparation, which is not timed

    def prepare(self, data: bytes, session: ServerSession | None = None) -> None:
        longest = self.longest
        self.send(data, session)
        self.longest = longest

    def grow(self, key: bytes, mebibytes: int = APPENDED_MIB) -> None:
        """Store a value by appending."""
        for _ in range(mebibytes // 8):
            self.prepare(frame("append", key, pack(bytes(8 << 20))))

    def fill(self, keys: list[bytes], value: bytes = b"v") -> None:
        for at in range(0, len(keys), PORTION):
            self.store.keyspace.multi_set([(key, pack(value)) for key in keys[at : at + PORTION]])

    def park(self, *requests: bytes) -> None:
        """Park sessions; each sends one of the requests in turn."""
        for number in range(WAITERS):
            self.connect().receive(requests[number % len(requests)])
        gc.collect()
        gc.freeze()


def woken_by(request: bytes, *waits: bytes) -> Case:
    def case(loop: Loop) -> None:
        loop.park(*waits)
        loop.send(request)

    return case


def sending(request: bytes, *before: bytes) -> Case:
    def case(loop: Loop) -> None:
        for one in before:
            loop.prepare(one)
        loop.send(request)

    return case


def authenticated(loop: Loop) -> None:
    keys = TokenKeys([(f"k{number}", b"a secret") for number in range(64)])
    loop.store.hub.auth.authenticate = lambda token: keys.check(token, 0.0)
    loop.send(frame("auth", pack(b"x" * MAX_TOKEN)))


def let_in(loop: Loop) -> None:
    """Create a store for which all others wait."""
    for _ in range(WAITERS):
        session = loop.connect()
        session.receive(ENTER)
        session.receive(b"")
    loop.send(OWN)


def end_store(loop: Loop) -> None:
    """End a store in which all others are, and close their connections."""
    named = loop.named
    loop.prepare(OWN)
    for _ in range(WAITERS):
        session = loop.connect()
        session.receive(ENTER)
        session.receive(b"")
    store = named.stores["a"]
    loop.send(frame("end_store"))
    named.close(store)
    close_evicted(loop)


def on_large(*requests: bytes) -> Case:
    def case(loop: Loop) -> None:
        loop.grow(b"/big")
        for request in requests:
            loop.send(request)

    return case


def listing(method: str, length: int, exists: bool) -> Case:
    def case(loop: Loop) -> None:
        keys = names(KEYS_PER_REQUEST, length)
        if exists:
            loop.fill([bytes(bytearray(key)) for key in keys])
        loop.send(frame(method, keys))

    return case


def scattered(method: str, *, keys: bool = True) -> Case:
    def case(loop: Loop) -> None:
        stored = names(STORED_KEYS)
        loop.fill(stored)
        if not keys:
            loop.send(frame(method))
            return
        loop.send(
            frame(method, [bytes(bytearray(stored[number * 7919 % STORED_KEYS])) for number in range(KEYS_PER_REQUEST)])
        )

    return case


def set_many(length: int, exists: bool, access: Access | None = None) -> Case:
    """Set many keys; with a token that allows so many more keys only if all exist, these are counted exactly."""

    def case(loop: Loop) -> None:
        keys = names(KEYS_PER_REQUEST, length)
        peer = loop.peer
        if access is not None:
            peer = loop.connect()
            peer.grant_access(access)
        if exists:
            loop.prepare(frame("multi_set", [(bytes(bytearray(key)), pack(b"")) for key in keys]), peer)
        loop.send(frame("multi_set", [(key, pack(b"")) for key in keys]), peer)

    return case


def set_twice(loop: Loop) -> None:
    """Set many keys for which some wait, twice: the second request has to wait."""
    for _ in range(16):
        loop.prepare(frame("wait", names(KEYS_PER_REQUEST)), loop.connect())
    data = frame("multi_set", [(key, pack(b"")) for key in names(KEYS_PER_REQUEST)])
    gc.freeze()
    for session in (loop.other, loop.peer):
        for at in range(0, len(data), _READ):
            loop.step(session.receive, data[at : at + _READ])
    for session in (loop.other, loop.peer):
        loop.finish(session)


def revoked(loop: Loop) -> None:
    """Let the token of all end, and close their connections."""
    access = Access("t")
    for _ in range(WAITERS):
        session = loop.connect()
        session.grant_access(access)
    gc.collect()
    gc.freeze()
    loop.step(loop.store.hub.end_invalid, lambda access: "revoked")
    close_evicted(loop)


def close_evicted(loop: Loop) -> None:
    """Do what is left for later, and close evicted sessions."""
    while loop.store.keyspace.work:
        loop.step(loop.store.keyspace.step)
        evicted = list(loop.store.hub.evicted)
        loop.store.hub.evicted.clear()
        for session in evicted:
            loop.step(session.leave)
        loop.store.hub.pending_flush.clear()


class _Broken(Transport):
    """A connection that is lost."""

    def awaited_since(self) -> float:
        return inf

    def flush(self) -> None:
        self.session.out.clear()

    def close(self) -> None:
        pass


def lost_owner(loop: Loop) -> None:
    """Enter a store whose owner has lost 100,000 connections."""
    for number in range(WAITERS):
        session = _Broken(loop.store, "::1", number % 60_000, 0.0).session
        session.receive(frame("validate", MAGIC) + OWN)
        session.receive(b"")
    gc.collect()
    gc.freeze()
    loop.send(ENTER)
    loop.send(ENTER, loop.other)


def forgotten(loop: Loop) -> None:
    """Have the history forget as many barriers as it may know, for a few keys: many would make dicts grow meanwhile."""
    history = loop.observe()
    for number in range(0, 110_000, 100):
        loop.prepare(b"".join([frame("add", b"%d/num_members" % one, 1) for one in range(number, number + 100)]))
    known = len(history.barriers)
    history._capacity = 10_000
    for number in range(0, 1000, 10):
        loop.send(b"".join([frame("set", b"k%d" % one, V) for one in range(number, number + 10)]))
    assert not history.barriers, f"{known} known at first"
    assert known > 100_000


def set_awaited(peers: int, request: bytes = b"") -> Case:
    """Set many keys for all of which some peers wait; then each of these sends a request, or disconnects."""

    def case(loop: Loop) -> None:
        sessions = [loop.connect() for _ in range(peers)]
        for session in sessions:
            loop.prepare(frame("wait", names(KEYS_PER_REQUEST)), session)
        data = frame("multi_set", [(key, pack(b"")) for key in names(KEYS_PER_REQUEST)])
        gc.freeze()
        for at in range(0, len(data), _READ):
            loop.step(loop.peer.receive, data[at : at + _READ])
        while loop.peer.stalled():
            loop.step(loop.peer.receive, b"")
        for session in sessions:
            if request:
                loop.step(session.receive, request)
            else:
                loop.step(session.leave)
        for session in sessions:
            loop.finish(session)

    return case


def parked(request: bytes, length: int = SHORT) -> Case:
    """Send a request from a session that waits for many keys; without one, disconnect it."""

    def case(loop: Loop) -> None:
        loop.prepare(frame("wait", names(KEYS_PER_REQUEST, length)))
        if request:
            loop.send(request)
        else:
            loop.disconnect(loop.peer)

    return case


def leaving(peers: int, keys: int, alike: int = 1) -> Case:
    """Disconnect peers, in groups of `alike` that wait for the same keys, within one iteration of the loop."""

    def case(loop: Loop) -> None:
        sessions = [loop.connect() for _ in range(peers)]
        for number, session in enumerate(sessions):
            loop.prepare(frame("wait", [b"/%d/%d" % (number // alike, key) for key in range(keys)]), session)

        def leave_all() -> None:
            for session in sessions:
                session.leave()

        gc.collect()
        gc.freeze()
        loop.step(leave_all)
        loop.finish(loop.other)

    return case


def after_wait(request: bytes) -> Case:
    """Send a request from a session whose wait for many keys was replaced and is over."""

    def case(loop: Loop) -> None:
        loop.prepare(frame("wait", names(KEYS_PER_REQUEST)) + frame("wait", [b"/x"]))
        loop.send(frame("set", b"/x", pack(b"")), loop.other)
        loop.send(request)

    return case


def list_keys(loop: Loop) -> None:
    loop.fill(names(STORED_KEYS))
    gc.collect()
    gc.freeze()
    loop.send(frame("list_keys"))


def passed_over(loop: Loop) -> None:
    """Push an item for which everyone waits, but nobody can take it: each waits for another key, too."""
    loop.park(frame("wait", [b"/q", b"/other"]))
    loop.send(frame("queue_push", b"/q", pack(b"")))


def near_misses(loop: Loop) -> None:
    """Ask for 1,000 keys; 800,000 exist, the newest ones of which have the same text, the same end or similar texts."""
    loop.observe()
    loop.fill(names(STORED_KEYS - 45_000))
    loop.fill([b"/job/%d/%d/rank" % (number, number) for number in range(15_000)])
    loop.fill([b"/jab/%s/%d/rink" % (_letters(number), number) for number in range(15_000)])
    loop.fill([b"/x%s/%d/rank_99999999" % (_letters(number), number) for number in range(15_000)])
    loop.send(frame("missing", [(b"/job/99999999/99999999/rank_%d" % number, pack(b"")) for number in range(4)]))
    for at in range(0, 1000, 4):
        others = [b"/job/99999999/%d/rank" % (99_999_999 + number) for number in range(at, at + 4)]
        loop.send(frame("missing", [(key, pack(b"")) for key in [*others, *names(996)]]))


def _letters(number: int) -> bytes:
    return bytes(97 + number // 26**place % 26 for place in range(4))


def missing_ranks(loop: Loop) -> None:
    """Ask who is missing from a barrier of 100,000 that half have entered."""
    loop.observe()
    for rank in range(WAITERS):
        peer = loop.connect()
        about = [(b"rank", pack(b"%d" % rank)), (b"world_size", pack(b"%d" % WAITERS))]
        peer.receive(frame("introduce", about) + frame("join", b"init/", pack(b"%d" % rank)))
        if rank % 2:
            peer.receive(frame("barrier", b"/b", WAITERS))
    gc.collect()
    gc.freeze()
    loop.send(frame("missing", [(b"/b", pack(b"%d" % WAITERS))]))


def listed(request: bytes) -> Case:
    """Park everybody on one list of keys, of which only one is missing, and send a request."""

    def case(loop: Loop) -> None:
        loop.fill(LIST[1:])
        loop.park(frame("wait", LIST))
        loop.send(request)

    return case


def last_of_a_list(loop: Loop) -> None:
    """Disconnect the last waiter of a group."""
    waiting = [loop.connect() for _ in range(3)]
    for session in waiting:
        session.receive(frame("wait", LIST))
    for session in waiting:
        loop.disconnect(session)


def instead_of_others(loop: Loop) -> None:
    """CHECK a list that ends what is kept for many others, each of which names one of its keys."""
    for number in range(PORTION):
        others = [LIST[number], *(b"/%d/%d" % (number, at) for at in range(39))]
        loop.prepare(frame("check", others) * 2)
    loop.send(frame("check", LIST) * 2)


def different_targets(loop: Loop) -> None:
    for number in range(WAITERS):
        loop.connect().receive(frame("wait_count", b"/n", number + 1))
    loop.send(frame("add", b"/n", WAITERS))


def leased(request: bytes) -> Case:
    """Send a request from a session with many leases; without one, disconnect it."""

    def case(loop: Loop) -> None:
        for number in range(MAX_LEASES):
            queue = b"/%d" % number
            loop.peer.receive(frame("queue_push", queue, pack(b"")) + frame("lease", queue, number))
            loop.peer.out.clear()
            loop.peer.unsent = 0
        if request:
            loop.send(request)
        else:
            loop.disconnect(loop.peer)

    return case


def leased_past(peers: int) -> Case:
    """Disconnect a session with many leases of queues for which other peers have waited and do not wait any more."""

    def case(loop: Loop) -> None:
        queues = names(MAX_LEASES)
        loop.prepare(b"".join([frame("queue_push", queue, V) for queue in queues]))
        for number, queue in enumerate(queues):
            loop.prepare(frame("lease", queue, number))
        for _ in range(peers):
            other = loop.connect()
            loop.prepare(frame("wait", queues), other)
            loop.prepare(frame("wait", [b"/other"]), other)
        loop.prepare(frame("set", b"/other", V), loop.other)
        gc.freeze()
        loop.disconnect(loop.peer)
        loop.finish(loop.other)

    return case


def delete_joined(loop: Loop) -> None:
    for number in range(WAITERS):
        loop.connect().receive(frame("join", b"init/", pack(b"%d" % number)))
    loop.send(frame("delete_key", b"init/"))


def agents(most: int, request: bytes, present: int = 0) -> Case:
    """100,000 agents wait; `present` agents have formed a round before. Another peer sends a request."""

    def case(loop: Loop) -> None:
        if present:
            loop.peer.receive(frame("meet", b"/r", pack(b"peer"), 1, 1, -1))
        for number in range(WAITERS):
            loop.connect().receive(frame("meet", b"/r", pack(b"%06d" % number), most, most, -1))
        loop.peer.out.clear()
        loop.peer.unsent = 0
        loop.send(request)

    return case


def silent_agents(loop: Loop) -> None:
    peers = [loop.connect() for _ in range(WAITERS)]
    for number, peer in enumerate(peers):
        peer.receive(frame("meet", b"/r", pack(b"%06d" % number), 2 * WAITERS, 2 * WAITERS, -1))
    loop.send(frame("attend", b"/r", pack(b"000000"), 1, 1), peers[0])


class _Stream(Stream):
    """A rank that ignores its replies."""

    def received(self, data: bytes) -> None:
        pass

    def credited(self) -> None:
        pass

    def closed(self) -> None:
        pass


def link_sessions(alike: bool) -> Case:
    """Have 16,384 sessions on a link add, with the same request or with one of their own."""

    def case(loop: Loop) -> None:
        client = ClientLink()
        loop.prepare(client.request(validate=False))
        client.connect(0)
        streams = [_Stream() for _ in range(16_384)]
        for number, stream in enumerate(streams):
            client.open(stream, "127.0.0.1", number)
            client.send(stream, frame("validate", MAGIC))
        client.seal()
        loop.prepare(b"".join(client.out))
        client.out.clear()
        for number, stream in enumerate(streams):
            client.send(stream, frame("add", b"/all" if alike else b"/%d" % number, 1))
        client.seal()
        loop.send(b"".join(client.out))

    return case


def acknowledged(loop: Loop) -> None:
    """Acknowledge as many replies as a single link keeps."""
    registry = loop.links
    carrier = Transport(loop.store, "::1", 1, 0.0)
    session = carrier.session
    session.receive(frame("validate", MAGIC))
    link = registry.singles[b""] = SingleLink(registry, b"", b"", session)
    registry.attaching[link] = session
    link.attach()
    session.receive(frame("set", b"/k", pack(bytes(4096))))
    for _ in range(MOST_PIECES):
        session.receive(frame("get", b"/k"))
        link.keep(session.out)
        session.out.clear()
        session.unsent = 0
    assert carrier.single is link
    loop.send(frame("taken", link.stream.sent), session)


ENTER = frame("enter", [(b"name", pack(b"a"))])
OWN = frame("enter", [(b"name", pack(b"a")), (b"owner", pack(b"o"))])
WAIT, FETCH, COUNT = frame("wait", [b"/k"]), frame("fetch", b"/k"), frame("wait_count", b"/k", 1)
LATER = frame("lease_later", b"/k", 1)
V = pack(b"7")
SPACES = frame("set", b"/s", pack(b" " * (8 << 20)))
ZEROS = [frame("set", b"/s", pack(b"0" * (8 << 20))), frame("append", b"/s", pack(b"0"))]
EIGHT = pack(bytes(8 << 20))

LIST = names(PORTION)

CASES: dict[str, dict[str, Case]] = {
    "VALIDATE": {"": sending(b"")},
    "SET": {
        "wakes 100,000 WAITs": woken_by(frame("set", b"/k", V), WAIT),
        "wakes 100,000 WAITs for one list": listed(frame("set", LIST[0], V)),
        "wakes 100,000 FETCHes": woken_by(frame("set", b"/k", V), FETCH),
        "wakes all kinds": woken_by(frame("set", b"/k", V), WAIT, FETCH, COUNT, LATER),
        "over 256 MiB": on_large(frame("set", b"/big", V)),
    },
    "COMPARE_SET": {
        "wakes 100,000": woken_by(frame("compare_set", b"/k", pack(b""), V), WAIT),
        "of 256 MiB": on_large(frame("compare_set", b"/big", EIGHT, V)),
    },
    "GET": {"of 256 MiB, APPENDs between": on_large(*[frame("get", b"/big"), frame("append", b"/big", V)] * 3)},
    "ADD": {
        "110,000 barriers are forgotten": forgotten,
        "wakes 100,000": woken_by(frame("add", b"/k", 1), WAIT),
        "reaches 100,000 WAIT_COUNTs": woken_by(frame("add", b"/k", 1), COUNT),
        "reaches 100,000 numbers": different_targets,
        "to 8 MiB of white space": sending(frame("add", b"/s", 1), SPACES),
    },
    "CHECK": {
        "131,072 keys": listing("check", SHORT, True),
        "131,072 longest keys": listing("check", LONG, True),
        "among 800,000": scattered("check"),
        "1,000 keys of 1,000 other lists": instead_of_others,
    },
    "WAIT": {
        "131,072 keys": listing("wait", SHORT, False),
        "131,072 longest keys": listing("wait", LONG, False),
        "keys that exist": listing("wait", SHORT, True),
        "for one list, disconnection of the last": last_of_a_list,
        "disconnection with 131,072": parked(b""),
        "512 with 500 each disconnect at once": leaving(512, 500),
        "512 with 500, in pairs, disconnect": leaving(512, 500, 2),
        "disconnection with 131,072 longest": parked(b"", LONG),
        "131,072 replaced, then PING": after_wait(frame("ping", 1)),
    },
    "GETNUMKEYS": {"of 800,000": scattered("num_keys", keys=False)},
    "DELETE_KEY": {"256 MiB": on_large(frame("delete_key", b"/big"))},
    "APPEND": {
        "wakes 100,000": woken_by(frame("append", b"/k", V), WAIT),
        "862 to 8 MiB of zeros, with waiters": sending(frame("append", b"/s", pack(b"0")) * 862, *ZEROS),
        "to 256 MiB": on_large(frame("append", b"/big", EIGHT)),
    },
    "MULTI_GET": {
        "131,072 keys": listing("multi_get", SHORT, True),
        "131,072 longest keys": listing("multi_get", LONG, True),
        "131,072 missing keys": listing("multi_get", SHORT, False),
        "among 800,000": scattered("multi_get"),
        "of 256 MiB": on_large(frame("multi_get", [b"/big"])),
    },
    "MULTI_SET": {
        "131,072 new keys": set_many(SHORT, False),
        "131,072 keys that exist": set_many(SHORT, True),
        "131,072 new longest keys": set_many(LONG, False),
        "131,072 longest keys that exist": set_many(LONG, True),
        "131,072 new keys, limited token": set_many(SHORT, False, TOKEN),
        "131,072 keys that exist, limited token": set_many(SHORT, True, TOKEN),
        "131,072 that exist, token near its limit": set_many(SHORT, True, NEAR),
        "131,072 new longest keys, limited token": set_many(LONG, False, TOKEN),
        "131,072 longest that exist, limited token": set_many(LONG, True, TOKEN),
        "131,072 keys for which 16 wait, twice": set_twice,
        "131,072 keys for which 16 wait, then PINGs": set_awaited(16, frame("ping", 1)),
        "131,072 keys for which 16 wait, who leave": set_awaited(16),
        "wakes 100,000": woken_by(frame("multi_set", [(b"/k", V)]), WAIT),
    },
    "CANCEL_WAIT": {"of 131,072": parked(frame("cancel_wait"))},
    "PING": {"862": sending(frame("ping", 1) * 862)},
    "QUEUE_PUSH": {
        "wakes one of 100,000": woken_by(frame("queue_push", b"/k", V), WAIT),
        "wakes one of 100,000 for one list": listed(frame("queue_push", LIST[0], V)),
        "passes over 100,000": passed_over,
        "wakes 100,000 FETCHes": woken_by(frame("queue_push", b"/k", V), FETCH),
    },
    "QUEUE_POP": {"8 MiB": sending(frame("queue_pop", b"/q"), frame("queue_push", b"/q", EIGHT))},
    "QUEUE_LEN": {"": sending(frame("queue_len", b"/q"))},
    "LIST_KEYS": {"800,000": list_keys},
    "BARRIER": {"of 100,000": woken_by(frame("barrier", b"/k", WAITERS + 1), frame("barrier", b"/k", WAITERS + 1))},
    "FETCH": {
        "of 256 MiB": on_large(frame("fetch", b"/big")),
        "after a WAIT for 131,072": after_wait(frame("fetch", b"/y")),
    },
    "CANCEL_FETCH": {"after a WAIT for 131,072": parked(frame("cancel_fetch"))},
    "WAIT_COUNT": {
        "862 of 8 MiB of zeros": sending(frame("wait_count", b"/s", 0) * 862, *ZEROS),
        "after a WAIT for 131,072": after_wait(frame("wait_count", b"/y", 1)),
    },
    "INTRODUCE": {"131,072 names": sending(frame("introduce", [(b"", pack(b""))] * KEYS_PER_REQUEST))},
    "LEASE": {
        "4,096 of as many queues, disconnection": leased(b""),
        "the same, 200 have waited for these": leased_past(200),
    },
    "LEASE_LATER": {
        "after a WAIT for 131,072": after_wait(frame("lease_later", b"/y", 1)),
        "100,000, and a value": woken_by(frame("set", b"/k", V), LATER),
    },
    "CONFIRM": {"one of 4,096": leased(frame("confirm", 1))},
    "RETURN": {"one of 4,096": leased(frame("give_back", 1))},
    "LINK": {"16,384 sessions add, each for itself": link_sessions(False), "the same at once": link_sessions(True)},
    "TAKEN": {"of 8,192 pieces": acknowledged},
    "AUTH": {"the longest token, 64 keys": authenticated, "100,000 connections are revoked": revoked},
    "MISSING": {"keys near 800,000": near_misses, "50,000 of 100,000 ranks": missing_ranks},
    "ENTER": {"lets 100,000 in": let_in, "owner has lost 100,000 connections": lost_owner},
    "END_STORE": {"100,000 are in the store": end_store},
    "JOIN": {"100,000, and their counter is deleted": delete_joined},
    "LEAVE": {"": sending(frame("join", b"init/", pack(b"t")) + frame("depart"))},
    "MEET": {
        "forms a round of 100,000": agents(WAITERS + 1, frame("meet", b"/r", pack(b"peer"), 2, WAITERS + 1, -1)),
        "lets 50,000 of 100,000 in": agents(
            WAITERS, frame("meet", b"/r", pack(b"peer"), 1, WAITERS // 2, 0), present=1
        ),
    },
    "ATTEND": {
        "closes, 100,000 wait": agents(WAITERS + 1, frame("attend", b"/r", pack(b""), 3, 0)),
        "removes silent ones of 100,000": silent_agents,
    },
}
"""By command: the worst that one request, or a disconnection after it, can do."""

AT_ONCE = ("CHECK", "MULTI_GET", "MULTI_SET")
ATOMIC = ("LIST_KEYS", "QUEUE_PUSH")
"""Everyone must see all of it or nothing, or all waiters at once: who takes an item depends on those before."""


def longest(name: str, situation: str) -> float:
    """Return the longest step of a case in milliseconds."""
    gc.set_threshold(10_000, 500, 100)  # as in a server
    loop = Loop()
    gc.collect()
    gc.freeze()
    CASES[name][situation](loop)
    return loop.longest * 1e3


def main() -> int:
    parser = processes.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="print the median of this many runs (default: 5)")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="measure only this command; repeatable")
    options = parser.parse_args()
    different = {command.name for command in COMMANDS} ^ CASES.keys()
    if different:
        print(f"commands without a case, or cases without a command: {', '.join(sorted(different))}")
        return 1
    print(f"{build()} build, longest step in ms, median of {options.runs}")
    over = 0
    # Each run in a process of its own: the allocator returns the memory of earlier runs when it pleases.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, cases in CASES.items():
            if options.commands and name not in options.commands:
                continue
            for situation in cases:
                limit = ATOMIC_MS if name in ATOMIC else STEPWISE_MS
                if name in AT_ONCE:
                    limit = LIMITED_MS if "token" in situation else AT_ONCE_MS
                runs = pool.starmap(longest, [(name, situation)] * options.runs, chunksize=1)
                took = statistics.median(runs)
                over += took > limit
                verdict = "ok" if took <= limit else "OVER"
                print(f"{name:<13} {situation:<41} {took:8.2f} {limit:4.0f} {verdict}", flush=True)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
