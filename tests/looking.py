"""Worlds of simulated clients in memory, and what an observer of their server learns."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from support import HANDSHAKE, blob, keys
from tcpstore_async.base.limits import Limits
from tcpstore_async.diagnosis.facts import Facts, read_facts
from tcpstore_async.diagnosis.missing import Missing, awaited, find_missing
from tcpstore_async.diagnosis.nearest import Waiting, find_waiting
from tcpstore_async.diagnosis.stock_ranks import Ranks
from tcpstore_async.observe.history import History
from tcpstore_async.observe.inspection import Inspection
from tcpstore_async.observe.missing import Inquiries
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store


class World:
    """An observed store with stock clients, each with a number that the test chooses."""

    def __init__(self, most_bytes: int = 2**30, root: World | None = None, observed: bool = True) -> None:
        """Limit the history to `most_bytes`; `root` is the world of the same server's unnamed store."""
        self.store: Store = Store(Limits(), hub=None if root is None else root.store.hub)
        self.store.begin_sessions()
        self.history = History(self.store, most_bytes)
        if observed:
            self.store.observe(self.history)
        self.inquiries: Inquiries = Inquiries() if root is None else root.inquiries
        self.store.hub.register("missing", lambda _: self.inquiries.ask)
        self.sessions: dict[int, ServerSession] = {}

    def connect(self, client: int, *, pid: int | None = None, host: str = "10.0.0.1", joins: bool = True) -> None:
        """Connect as PyTorch's client does. The pid is the client's number plus 1,000, unless it is given."""
        self.sessions[client] = ServerSession(self.store, None, host, 20_000 + client % 40_000, 0.0)
        self.send(client, HANDSHAKE + b"\x0d" + struct.pack("<I", 1_000 + client if pid is None else pid))
        if joins:
            self.add(client, b"init/")

    def send(self, client: int, data: bytes) -> None:
        session = self.sessions[client]
        session.receive(data)
        session.out.clear()
        session.unsent = 0

    def set(self, client: int, key: bytes, value: bytes = b"value") -> None:
        self.send(client, b"\x01" + blob(key) + blob(value))

    def add(self, client: int, key: bytes, amount: int = 1) -> None:
        self.send(client, b"\x04" + blob(key) + struct.pack("<q", amount))

    def wait(self, client: int, *names: bytes) -> None:
        self.send(client, b"\x06" + keys(*names))

    def fetch(self, client: int, key: bytes) -> None:
        self.send(client, b"\x40" + blob(key))

    def barrier(self, client: int, key: bytes, size: int) -> None:
        self.send(client, b"\x12" + blob(key) + struct.pack("<q", size))

    def delete(self, client: int, key: bytes) -> None:
        self.send(client, b"\x08" + blob(key))

    def introduce(self, client: int, **items: str) -> None:
        encoded = b"".join(blob(name.encode()) + blob(text.encode()) for name, text in items.items())
        self.send(client, b"\x43" + struct.pack("<Q", len(items)) + encoded)

    def ask(self, client: int, *names: bytes, counter: bytes = b"", expected: int = 0) -> dict[str, Any]:
        """Return the reply to MISSING for these keys, or for a counter."""
        pairs = [(name, b"") for name in names] + ([(counter, b"%d" % expected)] if counter else [])
        request = b"\x4f" + struct.pack("<Q", len(pairs)) + b"".join(blob(key) + blob(said) for key, said in pairs)
        found: dict[str, Any] = json.loads(self.reply(client, request))
        return found

    def reply(self, client: int, request: bytes) -> bytes:
        """Return the reply, a value, to a request that may take several steps."""
        self.sessions[client].receive(request)
        return self.finish(client)

    def finish(self, client: int) -> bytes:
        """Return the reply, a value, to the request that is being carried out in steps."""
        session = self.sessions[client]
        while session.stalled():
            session.receive(b"")
        reply = b"".join(session.out)
        session.out.clear()
        session.unsent = 0
        return reply[8:]

    def leave(self, client: int) -> None:
        self.sessions.pop(client).leave()

    def store_based_barrier(self, clients: Iterable[int], name: bytes = b"default_pg") -> None:
        for client in clients:
            self.add(client, b"/store_based_barrier_key:" + name)
            self.wait(client, b"/store_based_barrier_key:" + name + b":last_worker")

    def lines(self) -> list[bytes]:
        """Return the reply of the admin socket."""
        inspection = Inspection(self.store, self.history, self.history.clock.now)
        facts = [{"server": inspection.summary()}]
        for part in (inspection.sessions(), inspection.counters(), inspection.keys()):
            facts += part
        return [msgspec.json.encode(fact) for fact in [*facts, {"end": True}]]

    def facts(self) -> Facts:
        return read_facts(self.lines())

    def ranks(
        self, world_size: int | None = None, environments: Mapping[int, Mapping[str, str]] | None = None
    ) -> Ranks:
        """Return the ranks; `environments` are keyed by the client's number."""
        by_id = {self.history.serial(self.sessions[client]): one for client, one in (environments or {}).items()}
        return Ranks(self.facts(), by_id, world_size)

    def missing(
        self, world_size: int | None = None, environments: Mapping[int, Mapping[str, str]] | None = None
    ) -> Missing:
        ranks = self.ranks(world_size, environments)
        return find_missing(ranks.facts, ranks, awaited(ranks.facts))

    def waiting(self, world_size: int | None = None) -> list[Waiting]:
        ranks = self.ranks(world_size)
        return find_waiting(ranks.facts, ranks, awaited(ranks.facts))


def environments(clients: Iterable[int], world_size: int) -> dict[int, dict[str, str]]:
    """Return environments as torchrun sets them; the rank is the client's number."""
    return {client: {"RANK": str(client), "WORLD_SIZE": str(world_size)} for client in clients}
