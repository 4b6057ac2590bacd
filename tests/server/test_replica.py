"""Servers that share a log: one serves at a time, and nothing that it says can be contradicted by the next one."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from conformance.frames import add, get, set_, wait
from memory_log import Memory, MemoryLog
from support import HANDSHAKE, LIMIT, u64
from tcpstore_async import AsyncTCPStore
from tcpstore_async.base.limits import Limits
from tcpstore_async.log import records as records_module
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.etcd import Holder, Standby
from tcpstore_async.log.records import FORMAT, REPLAY, Snapshot, alone
from tcpstore_async.server import replica as replica_module
from tcpstore_async.server import replication as replication_module
from tcpstore_async.server.listen_socket import listen, prepare
from tcpstore_async.server.replica import SERVER, STANDBY, Replica
from tcpstore_async.server.replication import Replication
from tcpstore_async.server.uv import UvServer


@asynccontextmanager
async def _nobody_looks(server: UvServer) -> AsyncIterator[None]:
    yield


class Process:
    """What one process of a replicated store does."""

    def __init__(self, memory: Memory, name: str) -> None:
        listener = listen("127.0.0.1", 0)
        prepare(listener)
        self.port: int = listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.log = MemoryLog(memory, Holder(self.address, "1", REPLAY, name))
        self.roles: asyncio.Queue[str] = asyncio.Queue()
        self._listener = listener
        self._serving = AsyncExitStack()
        self._entering: asyncio.Future[UvServer] | None = None
        self._peers: list[Peer] = []
        self.replica = Replica(
            self.log,  # type: ignore[arg-type]
            {},
            lambda instance: UvServer(listener.dup(), Limits(), instance=instance),
            _nobody_looks,
            self._announce,
        )

    async def _announce(self, server: UvServer, role: str) -> None:
        self.roles.put_nowait(role)

    @property
    def server(self) -> UvServer:
        assert self.replica.server is not None
        return self.replica.server

    def server_log(self) -> Replication:
        assert isinstance(self.server.persistence, Replication)
        return self.server.persistence

    async def become(self, role: str) -> None:
        """Stand by from now on, and wait until the process has this role."""
        if self._entering is None:
            self._entering = asyncio.ensure_future(self._serving.enter_async_context(self.replica.serving()))
        found = ""
        while found != role:
            told = asyncio.ensure_future(self.roles.get())
            either: list[asyncio.Future[Any]] = [told, self._entering]
            await asyncio.wait(either, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                told.cancel()
                await self._entering
                raise AssertionError(f"it has not become a {role}")
            found = told.result()

    def peer(self) -> Peer:
        """Return a new connection."""
        self._peers.append(Peer(self.port))
        return self._peers[-1]

    async def leave(self) -> None:
        if self._entering is not None:
            if not self._entering.done():
                self._entering.cancel()
                with suppress(asyncio.CancelledError):
                    await self._entering
            self._entering = None
            await self._serving.aclose()

    async def close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
        await self.leave()
        self.log.close()
        self._listener.close()


class Peer:
    """A stock client."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, count - len(data)), LIMIT)
            if not part:
                break
            data += part
        return data

    async def ask(self, request: bytes, count: int) -> bytes:
        await self.send(request)
        return await self.receive(count)

    def hears_nothing(self) -> bool:
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False


@asynccontextmanager
async def processes(count: int) -> AsyncIterator[tuple[Memory, list[Process]]]:
    memory = Memory()
    found = [Process(memory, name) for name in "abc"[:count]]
    try:
        await found[0].become(SERVER)
        for one in found[1:]:
            await one.become(STANDBY)
        yield memory, found
    finally:
        for one in found:
            await one.close()


class Gate:
    """Holds appends back."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.reached = threading.Event()
        self.opened = threading.Event()
        log.before_append = self._hold

    def _hold(self, number: int) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT)

    async def reach(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, LIMIT)

    def open(self) -> None:
        self.log.before_append = lambda number: None
        self.opened.set()


def _without_ticks(memory: Memory) -> list[bytes]:
    return [record for record in memory.records.values() if b"tick" not in record]


async def _pass_the_loop(count: int = 20) -> None:
    """Let the loop do what it has to do."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_leaves_before_its_record_is_appended() -> None:
    async with processes(1) as (_memory, (one,)):
        peer, other = one.peer(), one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        assert await other.ask(HANDSHAKE + add(b"n", 0), 8) == u64(1)
        gate = Gate(one.log)
        await peer.send(add(b"n", 1))
        await gate.reach()
        late = one.peer()
        await late.send(HANDSHAKE + add(b"n", 1))
        await other.send(get(b"n"))  # it may not see what is not durable
        await _pass_the_loop()
        assert peer.hears_nothing()
        assert other.hears_nothing()
        assert late.hears_nothing()
        gate.open()
        assert await peer.receive(8) == u64(2)
        assert await late.receive(8) == u64(3)
        assert await other.receive(9) in (u64(1) + b"2", u64(1) + b"3")


async def test_waits_that_end_meanwhile() -> None:
    async with processes(1) as (_memory, (one,)):
        waiter, peer, third = one.peer(), one.peer(), one.peer()
        assert await waiter.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        assert await third.ask(HANDSHAKE + add(b"n", 1), 8) == u64(2)
        await waiter.send(wait(b"key"))
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(3)
        gate = Gate(one.log)
        await peer.send(set_(b"key", b"value"))
        await gate.reach()
        third.socket.close()
        await _pass_the_loop()
        assert waiter.hears_nothing()
        gate.open()
        assert await waiter.receive(1) == b"\0"
        assert await peer.ask(add(b"n", 1), 8) == u64(4)


async def test_what_is_read_leaves_at_once_while_the_lease_is_held_and_else_behind_a_record() -> None:
    async with processes(1) as (memory, (one,)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        count = len(_without_ticks(memory))
        assert await peer.ask(get(b"n"), 9) == u64(1) + b"1"
        assert len(_without_ticks(memory)) == count
        one.log.certain_until = 0.0
        one.server.cut_off = True  # and nobody is cut off for that in this test
        gate = Gate(one.log)
        await peer.send(get(b"n"))
        await gate.reach()
        assert peer.hears_nothing()
        gate.open()
        assert await peer.receive(9) == u64(1) + b"1"
        assert len(_without_ticks(memory)) == count + 1


async def test_a_server_that_has_lost_its_epoch_answers_nothing_and_stands_by() -> None:
    async with processes(2) as (memory, (one, two)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        gate = Gate(one.log)
        await peer.send(add(b"n", 1))
        await gate.reach()
        memory.end_lease()
        await two.become(SERVER)
        other = two.peer()
        assert await other.ask(HANDSHAKE + add(b"n", 5), 8) == u64(6)
        gate.open()
        await asyncio.wait_for(one.replica.over.wait(), LIMIT)
        await one.leave()
        with suppress(ConnectionResetError):
            assert await peer.receive(8) == b""
        await one.become(STANDBY)
        assert one.server.links.elsewhere == two.address
        assert await other.ask(add(b"n", 0), 8) == u64(6)


async def test_a_server_that_is_cut_off_closes_connections_and_goes_on_where_it_was() -> None:
    async with processes(1) as (memory, (one,)):
        peer, writer = one.peer(), one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        assert await writer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(2)
        memory.silence(False)
        await writer.send(add(b"n", 1))
        one.log.certain_until = -60.0  # the last answer was a minute ago
        for cut in (peer, writer):
            with suppress(ConnectionResetError):
                assert await cut.receive(8) == b""
        late = one.peer()
        with suppress(OSError):
            assert await late.receive(1) == b""
        assert "etcd" in one.server.store.hub.why_held
        memory.silence(True)
        one.log.hold()
        while one.server.cut_off:
            await asyncio.sleep(0.01)
        again = one.peer()
        assert await again.ask(HANDSHAKE + add(b"n", 0), 8) == u64(3)  # executed once, though nobody was answered


async def test_handing_over() -> None:
    async with processes(2) as (_memory, (one, two)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + set_(b"key", b"value") + add(b"n", 7), 8) == u64(7)
        while one.server.why_not_promote():  # until it has seen the other one
            await asyncio.sleep(0.01)
        assert "serves; ask that one" in two.server.why_not_promote()
        one.server.on_promote()
        await asyncio.wait_for(one.replica.over.wait(), LIMIT)
        await one.leave()
        await two.become(SERVER)
        await one.become(STANDBY)
        other = two.peer()
        assert await other.ask(HANDSHAKE + get(b"key"), 13) == u64(5) + b"value"
        assert two.replica.status() == f"serving at {two.address}, 1 client"
        assert one.replica.status() == f"this server stands by: {two.address} serves"


async def test_a_handover_leaves_nothing_of_closed_connections_in_the_log() -> None:
    """Their sessions had ended for whoever served next, and with them the stores of owners without a link."""
    async with processes(1) as (memory, (first,)):
        assert await first.peer().ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        before = _without_ticks(memory)
        await first.leave()
        assert _without_ticks(memory) == before


async def test_standbys_make_snapshots_with_which_others_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replica_module, replication_module):
        monkeypatch.setattr(module, "SNAPSHOT_BYTES", 10_000)
    async with processes(2) as (memory, (one, two)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + set_(b"key", bytes(20_000)) + add(b"n", 7), 8) == u64(7)
        while memory.snapshot is None:
            await asyncio.sleep(0.01)
        assert min(memory.records, default=memory.snapshot.number) >= memory.snapshot.number
        assert await peer.ask(add(b"n", 1), 8) == u64(8)
        third = Process(memory, "c")
        try:
            await third.become(STANDBY)
            await one.leave()
            await two.leave()
            await third.become(SERVER)
            other = third.peer()
            assert await other.ask(HANDSHAKE + get(b"key"), 20_008) == u64(20_000) + bytes(20_000)
            assert await other.ask(add(b"n", 0), 8) == u64(8)
        finally:
            await third.close()


async def test_another_version_begins_with_a_snapshot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes(1) as (memory, (one,)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 7), 8) == u64(7)
        newer = Process(memory, "b")
        newer.log.holder.replay = REPLAY + 1
        reading = records_module.read_alone

        def read_alone(data: bytes, chain: records_module.Chain) -> records_module.Record:
            if threading.current_thread().name.startswith("asyncio"):
                raise records_module.OtherReplay("record 0 was written by another version")
            return reading(data, chain)

        monkeypatch.setattr(replication_module, "read_alone", read_alone)
        try:
            await newer.become(STANDBY)
            newer.log.announce(0)
            await one.leave()
            assert memory.snapshot is not None
            await newer.become(SERVER)
            other = newer.peer()
            assert await other.ask(HANDSHAKE + add(b"n", 0), 8) == u64(7)
        finally:
            await newer.close()


@pytest.mark.parametrize("what", ["record", "snapshot"])
async def test_an_older_version_does_not_serve_what_a_newer_one_wrote(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with processes(1) as (memory, (one,)):
        assert await one.peer().ask(HANDSHAKE + add(b"n", 7), 8) == u64(7)
        await one.leave()
        number, data = max(memory.records.items())
        if what == "record":
            newer = struct.pack("<II", FORMAT, REPLAY + 1)
            memory.records[number] = newer + data[len(newer) :]
        else:
            memory.snapshot = Snapshot(0, number, 0, 0.0, b"", REPLAY + 1)
        older = Process(memory, "b")
        serving = asyncio.ensure_future(older.become(SERVER))
        try:
            while "cannot follow the log until there is a snapshot" not in caplog.text:
                assert not serving.done()
                await asyncio.sleep(0.01)
            with memory.changed:
                memory.records[number] = data
                memory.snapshot = None
            await serving
            assert await older.peer().ask(HANDSHAKE + add(b"n", 0), 8) == u64(7)
        finally:
            await older.close()


async def test_stores_that_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has asked for their end, and is told that the next server has them."""
    async with processes(1) as (_memory, (one,)):

        def remove() -> None:
            raise JournalError("no member answers")

        one.log.remove = remove  # type: ignore[method-assign]
        await one.server.dismiss()
        one.server.stop()
        assert "goes on with the log in memory, which cannot be removed: no member answers" in caplog.text


async def test_servers_of_two_versions_follow_the_end_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is kept for another version is in records, too, each with events of one time."""
    async with processes(2) as (memory, (one, two)):
        newer = Process(memory, "c")
        newer.log.holder.replay = REPLAY + 1
        newer.log.announce(0)
        store = await AsyncTCPStore.connect("127.0.0.1", one.port)
        assert await store.add("n", 7) == 7
        waiting = asyncio.ensure_future(store.wait(["key"], LIMIT))
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        await one.leave()
        await two.become(SERVER)
        assert memory.snapshot is not None
        assert memory.snapshot.number <= two.server_log().chain.number
        assert "had another effect" not in caplog.text
        assert not two.server_log().differs
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await store.close()
        await newer.close()


async def test_a_server_knows_of_the_snapshots_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would say that the log grows, as if nobody stood by."""
    for module in (replica_module, replication_module):
        monkeypatch.setattr(module, "SNAPSHOT_BYTES", 10_000)
    monkeypatch.setattr(replica_module, "_KNOWN_SECONDS", 0.01)
    async with processes(2) as (memory, (one, _)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + set_(b"key", bytes(20_000)) + add(b"n", 7), 8) == u64(7)
        while int(str(one.server.facts()["bytes_since_snapshot"])) > 10_000:
            await asyncio.sleep(0.01)
        assert memory.snapshot is not None


async def test_a_standby_outlives_an_etcd_that_is_silent_when_a_snapshot_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (replica_module, replication_module):
        monkeypatch.setattr(module, "SNAPSHOT_BYTES", 10_000)
    async with processes(2) as (_memory, (one, two)):
        asked = threading.Event()

        def standbys() -> list[Standby]:
            asked.set()
            raise JournalError("no member answers")

        monkeypatch.setattr(two.log, "standbys", standbys)
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + set_(b"key", bytes(20_000)) + add(b"n", 7), 8) == u64(7)
        assert await asyncio.to_thread(asked.wait, LIMIT)
        await one.leave()
        await two.become(SERVER)
        assert await two.peer().ask(HANDSHAKE + add(b"n", 0), 8) == u64(7)


async def test_a_server_says_why_it_waits_for_etcd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It said nothing, while its clients waited."""
    monkeypatch.setattr(replica_module, "_SILENT_SECONDS", 0.001)
    async with processes(1) as (_memory, (one,)):
        one.log.trouble = "the database has no space"
        hub = one.server.store.hub
        while not hub.why_held:
            await asyncio.sleep(0.01)
        assert hub.why_held == caplog.messages[-1] == "waiting: the database has no space"
        one.log.trouble = ""
        while hub.why_held:
            await asyncio.sleep(0.01)
        assert caplog.messages[-1] == "etcd answers again"


async def test_who_comes_while_a_record_is_appended_is_closed_when_the_server_is_cut_off() -> None:
    """No descriptor stays open that nobody would serve for as long as etcd does not answer."""
    async with processes(1) as (_memory, (one,)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 1), 8) == u64(1)
        gate = Gate(one.log)
        await peer.send(add(b"n", 1))
        await gate.reach()
        late = [one.peer() for _ in range(3)]
        for other in late:
            await other.send(HANDSHAKE)
        while len(one.server._arrived) < 3:
            await asyncio.sleep(0)
        one.server.cut()
        for other in late:
            with suppress(ConnectionResetError):
                assert await other.receive(1) == b""
        gate.open()


async def test_stores_that_end_for_good_are_not_continued() -> None:
    async with processes(2) as (_memory, (one, two)):
        peer = one.peer()
        assert await peer.ask(HANDSHAKE + add(b"n", 7), 8) == u64(7)
        await one.server.dismiss()
        one.server.stop()
        await one.leave()
        await two.become(SERVER)
        other = two.peer()
        assert await other.ask(HANDSHAKE + add(b"n", 0), 8) == u64(0)


def test_a_record_alone_is_whole_or_refused() -> None:
    chain = records_module.Chain()
    record = alone(chain.record(1.0, 2, b"events"))
    assert records_module.read_alone(record, records_module.Chain()).events == b"events"
    for data in (record[:-1], record[:20], record[:-1] + b"x"):
        with pytest.raises(JournalError):
            records_module.read_alone(data, records_module.Chain())
