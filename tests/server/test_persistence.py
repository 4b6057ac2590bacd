"""A server with a journal that ends in whatever way comes back, and its clients go on."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tcpstore_async
from conformance.frames import NUM_KEYS, get, push, set_, wait
from faults.kills import kills
from log.digests import look
from support import (
    HANDSHAKE,
    LIMIT,
    Server,
    free_port,
    listening,
    secret_file,
    tcpstore,
    tcpstore_relay,
    tcpstore_server,
    u64,
)
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.errors import AccessDeniedError, DistNetworkError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client.connect import connect_blocking
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.store_name import StoreName, name_of
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.log import journal as journal_module
from tcpstore_async.log.encoding import JournalError, encode
from tcpstore_async.log.events import OPENED, RECEIVE, Event, Reference
from tcpstore_async.log.journal import Journal, read_records, segments_of, snapshots_of
from tcpstore_async.log.records import Reader
from tcpstore_async.server.persistence import JournalPersistence
from tcpstore_async.serving import serve
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import unpack

pytestmark = pytest.mark.slow

KINDS = ["async", "sync", "relay"]


class Restarting:
    """A server at one port that can be ended and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.options = ["serve", "--port", str(self.port), "--persist", str(folder), *options]
        self._listening = listening(self.options)
        self.server: Server = self._listening.__enter__()

    def start(self) -> None:
        self._listening = listening(self.options)
        self.server = self._listening.__enter__()

    def kill(self) -> None:
        self._listening.__exit__(None, None, None)

    def restart(self) -> None:
        self.kill()
        self.start()

    def __enter__(self) -> Restarting:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


Call = Callable[..., Awaitable[Any]]


def calling(store: Any) -> Call:
    """Return a function that calls a method of a store of either kind."""

    async def call(method: str, *given: Any) -> Any:
        found = getattr(store, method)
        if isinstance(store, tcpstore_async.AsyncTCPStore):
            return await found(*given)
        return await asyncio.to_thread(found, *given)

    return call


async def connected(kind: str, port: int) -> Any:
    if kind == "async":
        store: Any = await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0)
    else:
        store = await asyncio.to_thread(functools.partial(tcpstore_async.TCPStore, "127.0.0.1", port, timeout=60.0))
    await calling(store)("num_keys")  # from its first call on, it survives its connection
    return store


def waiters(port: int, *options: str) -> list[Any]:
    url = f"tcp://127.0.0.1:{port}"
    found: list[Any] = json.loads(tcpstore("waiters", "-o", "json", "--url", url, *options).stdout)
    return found


async def closed(store: Any) -> None:
    await calling(store)("close")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", ["process", "always"])
async def test_what_was_there_is_there_again(kind: str, sync: str, tmp_path: Path) -> None:
    """Values, counters, queues in order, and waits; each client's calls are executed once."""
    with Restarting(tmp_path / "journal", "--sync", sync) as restarting, tcpstore_relay(restarting.port) as relay:
        port = relay.port if kind == "relay" else restarting.port
        store, other = await connected(kind, port), await connected(kind, port)
        call = calling(store)
        await call("set", "key", b"value")
        await call("append", "text", b"one ")
        for number in range(3):
            await call("queue_push", "queue", str(number))
        assert await call("add", "count", 5) == 5
        awaited = asyncio.ensure_future(calling(other)("wait", ["later"], 60.0))
        while not await asyncio.to_thread(waiters, restarting.port):
            pass
        for turn in range(2):
            restarting.restart()
            assert await call("add", "count", 1) == 6 + turn
            assert await call("get", "key") == b"value"
            assert await call("queue_pop", "queue") == str(turn).encode()
            await call("append", "text", b"more ")
        assert await call("get", "text") == b"one more more "
        assert not awaited.done()
        await call("set", "later", b"")
        await awaited
        for one in (store, other):
            await closed(one)


async def test_what_a_stock_client_was_told_is_kept(tmp_path: Path) -> None:
    """Its connection, and what it waited for, end."""
    with Restarting(tmp_path / "journal") as restarting:
        url = ("--url", f"tcp://127.0.0.1:{restarting.port}")
        assert tcpstore("add", "count", "1", *url).stdout == b"1\n"
        assert tcpstore("set", "key", "value", *url).returncode == 0
        restarting.restart()
        assert tcpstore("add", "count", "1", *url).stdout == b"2\n"
        assert tcpstore("get", "key", *url).stdout == b"value"


async def test_back_soon_and_for_good(tmp_path: Path) -> None:
    """SIGTERM leaves the stores to the next server; SIGINT removes them, and clients are told at once."""
    folder = tmp_path / "journal"
    with Restarting(folder, "--link-grace", "60") as restarting:
        store, sync = await connected("async", restarting.port), await connected("sync", restarting.port)
        assert json.loads(restarting.server.ready)["persist"] == str(folder)
        assert await store.add("count", 1) == 1
        assert await asyncio.to_thread(restarting.server.stop, signal.SIGTERM) == 0
        restarting.restart()
        assert await store.add("count", 1) == 2
        assert await calling(sync)("add", "count", 1) == 3
        began = time.monotonic()
        assert await asyncio.to_thread(restarting.server.stop, signal.SIGINT) == 0
        for one in (store, sync):
            with pytest.raises(DistNetworkError, match="the server is stopping"):
                await calling(one)("add", "count", 1)
        assert time.monotonic() - began < 30  # not only when the grace period is over
        restarting.restart()
        async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", restarting.port) as fresh:
            assert await fresh.num_keys() == 0
        for one in (store, sync):
            await closed(one)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_server_that_does_not_come_back(kind: str, tmp_path: Path) -> None:
    with Restarting(tmp_path / "journal", "--link-grace", "1") as restarting:
        store = await connected(kind, restarting.port)
        restarting.kill()
        with pytest.raises(DistNetworkError, match=r"Connection refused"):
            await calling(store)("add", "count", 1)
        await closed(store)


async def test_owners_come_back_to_their_stores(tmp_path: Path) -> None:
    """Ranks that enter meanwhile wait for them."""
    with Restarting(tmp_path / "journal") as restarting:
        url = f"tcp://127.0.0.1:{restarting.port}"
        make = functools.partial(tcpstore_async.TCPStore, "job", 29500, server=url, timeout=60.0)
        owner = await asyncio.to_thread(make, is_master=True)
        await asyncio.to_thread(owner.set, "key", "value")
        waiting = asyncio.ensure_future(asyncio.to_thread(owner.wait, ["later"]))
        while not await asyncio.to_thread(waiters, restarting.port, "--store", "job:29500"):
            pass
        await asyncio.to_thread(restarting.restart)
        rank = await asyncio.to_thread(make)
        [found] = await asyncio.to_thread(waiters, restarting.port, "--store", "job:29500")
        assert found["key"] == "later"
        shown = json.loads(tcpstore("who", "-o", "json", "--url", url).stdout)
        assert {(one["pid"], one["store"]) for one in shown} == {(os.getpid(), "job:29500")}
        await asyncio.to_thread(rank.set, "later", "")
        await waiting
        assert await asyncio.to_thread(rank.get, "key") == b"value"
        await asyncio.to_thread(rank.close)
        await asyncio.to_thread(owner.close)
        assert json.loads(tcpstore("stores", "-o", "json", "--url", url).stdout) == []


async def test_a_store_without_calls_comes_back_too(tmp_path: Path) -> None:
    """Else the owner's session, and the store with it, would end with the grace period."""
    port = free_port()
    async with serve("127.0.0.1", port, persist=tmp_path / "journal") as server:
        make = functools.partial(tcpstore_async.TCPStore, "job", 29500, 2, timeout=60.0)
        opened = [
            asyncio.to_thread(functools.partial(make, is_master=rank == 0, server=f"tcp://127.0.0.1:{port}"))
            for rank in range(2)
        ]
        ranks = await asyncio.gather(*opened)
        server.stop(for_good=False)
    async with serve("127.0.0.1", port, persist=tmp_path / "journal") as server:
        assert len(server.links.suspended) == 2
        while server.links.suspended:
            await asyncio.sleep(0.01)
        for rank in ranks:
            await asyncio.to_thread(rank.close)


async def test_a_rank_that_waits_for_an_owner_without_a_session_enters_when_that_comes_back(tmp_path: Path) -> None:
    """The kill was in the middle of the owner's constructor, which begins anew."""

    def own(port: int) -> socket.socket:
        peer, _ = connect_blocking(
            Servers(("127.0.0.1", port)), Deadline(30.0), name=StoreName(name_of("job", 29500), "first")
        )
        return peer

    async with serve(persist=tmp_path / "journal") as server:
        peer = await asyncio.to_thread(own, server.port)
        server.stop(for_good=False)
        peer.close()
    async with serve(persist=tmp_path / "journal") as server:
        url = f"tcp://127.0.0.1:{server.port}"
        make = functools.partial(tcpstore_async.TCPStore, "job", 29500, server=url, timeout=60.0)
        entering = asyncio.ensure_future(asyncio.to_thread(make))
        while name_of("job", 29500) not in server.named.waiting:
            await asyncio.sleep(0)
        with await asyncio.to_thread(own, server.port):
            rank = await entering
            await asyncio.to_thread(rank.close)


async def test_a_store_that_is_closed_while_there_is_no_server_has_no_name_any_more(tmp_path: Path) -> None:
    with Restarting(tmp_path / "journal") as restarting:
        url = f"tcp://127.0.0.1:{restarting.port}"
        make = functools.partial(tcpstore_async.TCPStore, "job", 29500, server=url, timeout=60.0, is_master=True)
        owner = await asyncio.to_thread(make)
        restarting.kill()
        closing = asyncio.ensure_future(asyncio.to_thread(owner.close))
        done, _ = await asyncio.wait([closing], timeout=1.5)  # longer than for a server that keeps nothing
        assert not done
        await asyncio.to_thread(restarting.start)
        await closing
        following = await asyncio.to_thread(make)
        await asyncio.to_thread(following.close)


async def test_a_store_whose_owner_does_not_come_back_ends(tmp_path: Path) -> None:
    """Who waits for it may own the next one."""
    async with serve(persist=tmp_path / "journal") as server:
        name = StoreName(name_of("job", 29500), owner="first")
        peer, _ = await asyncio.to_thread(
            functools.partial(connect_blocking, Servers(("127.0.0.1", server.port)), Deadline(30.0), name=name)
        )
        server.stop(for_good=False)
        peer.close()
    async with serve(persist=tmp_path / "journal", link_grace=30.0) as server:
        store = server.named.stores[name.name]
        assert not store.owners
        url = f"tcp://127.0.0.1:{server.port}"
        make = functools.partial(tcpstore_async.TCPStore, "job", 29500, server=url, is_master=True, timeout=60.0)
        other = asyncio.ensure_future(asyncio.to_thread(make))
        while name.name not in server.named.waiting:
            await asyncio.sleep(0)
        with server.turn:
            server.named.end_orphans()
        owner = await other
        assert store.ended == f"its owner ({store.creator}) did not come back after the server's restart"
        await asyncio.to_thread(owner.close)


def test_a_start_that_fails_leaves_the_journal_as_it_is(tmp_path: Path) -> None:
    with Restarting(tmp_path / "journal") as restarting:
        url = f"tcp://127.0.0.1:{restarting.port}"
        assert tcpstore("set", "key", "value", "--url", url).returncode == 0
        restarting.kill()
        for wrong in (["--port-file", str(tmp_path / "none" / "file")], ["--admin", str(tmp_path / "none" / "socket")]):
            failed = tcpstore(*restarting.options, *wrong)
            assert failed.returncode == 1
            assert b"none" in failed.stderr
        restarting.start()
        assert tcpstore("get", "key", "--url", url).stdout == b"value"


def test_what_a_tokens_limits_refuse_changes_nothing(tmp_path: Path) -> None:
    """It is in no record: what is counted for the token must be the same again."""
    keys = secret_file(tmp_path / "keys", f"one:{'k' * 40}")
    made = tcpstore("token", "create", "--token-keys", str(keys), "--max-bytes", "3000")
    token = made.stdout.decode().strip()
    with Restarting(tmp_path / "journal", "--token-keys", str(keys)) as restarting:

        def opened(token: str = "") -> tcpstore_async.TCPStore:
            return tcpstore_async.TCPStore("127.0.0.1", restarting.port, timeout=60.0, token=token)

        with opened() as plain, opened(token) as limited, opened(token) as refused:
            limited.set("a", b"a" * 2000)
            assert len(limited.get("a")) == 2000
            plain.delete_key("a")
            with pytest.raises(AccessDeniedError, match="would add"):
                refused.set("b", b"b" * 4000)
                refused.get("b")
            plain.set("p", b"p" * 5000)
            assert len(plain.get("p")) == 5000
            try:
                limited.set("c", b"c" * 1600)
                accepted = len(limited.get("c")) == 1600
            except AccessDeniedError:
                accepted = False
            restarting.restart()
            assert plain.check(["c"]) == accepted
        assert "another effect" not in restarting.server.log()


async def test_a_reply_before_a_command_that_fails(tmp_path: Path) -> None:
    """What the commands between them have woken is in the same record, as it is when that is executed again."""
    async with serve(persist=tmp_path / "journal") as server:

        def linked() -> socket.socket:
            command = BY_METHOD["link"]
            peer = socket.create_connection(("127.0.0.1", server.port))
            peer.sendall(HANDSHAKE + command.prefix + command.request.encode(ClientSingleLink().fields()))
            assert peer.recv(4096)
            return peer

        with await asyncio.to_thread(linked) as waiting, await asyncio.to_thread(linked) as other:
            await asyncio.to_thread(waiting.sendall, wait(b"/k"))
            while not server.store.keyspace.waiters:
                await asyncio.sleep(0)
            await asyncio.to_thread(other.sendall, NUM_KEYS + set_(b"/k", b"") + b"\xff")
            assert await asyncio.to_thread(waiting.recv, 1) == b"\0"
            assert look(tmp_path / "journal")["wrong"] == []


def test_a_port_of_a_store_that_is_taken_meanwhile_is_not_told(tmp_path: Path) -> None:
    with Restarting(tmp_path / "journal") as restarting:
        url = f"tcp://127.0.0.1:{restarting.port}"
        make = functools.partial(tcpstore_async.TCPStore, "127.0.0.1", 29500, server=url, timeout=60.0)
        with make(is_master=True) as owner:
            assert owner.port != 29500
            restarting.kill()
            with socket.create_server(("127.0.0.1", owner.port)):
                restarting.start()
                with make() as rank:
                    assert rank.port not in (owner.port, 29500)


def test_errors_of_the_command(tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    with tcpstore_server("--persist", folder):
        done = tcpstore("serve", "--port", "0", "--persist", folder)
        assert done.returncode == 1
        assert done.stderr.decode().strip() == f"Error: another server holds {folder}"
    done = tcpstore("serve", "--persist", folder, "--backend", "threaded")
    assert done.returncode == 2
    assert b"leave out --persist" in done.stderr
    done = tcpstore("serve", "--sync", "always")
    assert done.returncode == 2
    assert b"--sync needs --persist" in done.stderr


async def test_limits_are_part_of_a_journal(tmp_path: Path) -> None:
    async with serve(persist=tmp_path) as server:
        async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", server.port) as store:
            await store.set("key", "value")
        server.stop(for_good=False)
    with pytest.raises(JournalError, match=r"with budget_bytes=\d+, and this one has budget_bytes=9000000"):
        async with serve(persist=tmp_path, limits=Limits(budget_bytes=9_000_000)):
            pass


async def test_a_journal_of_before_the_machine_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sync, keys in (("always", 1), ("process", 0)):
        folder = tmp_path / sync
        async with serve(persist=folder, sync=sync) as server:
            async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", server.port) as store:
                await store.set("key", "value")
                await store.num_keys()
            server.stop(for_good=False)
        boot = tmp_path / "boot"
        boot.write_text("another")
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "_BOOT", boot)
            async with serve(persist=folder, sync=sync) as server:
                assert len(server.store.keyspace.values) == keys


async def test_a_replay_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No client continues on what may not be its own; who comes anew finds the values."""
    port = free_port()
    async with serve(port=port, persist=tmp_path) as server:
        store = await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=20.0)
        for _ in range(3):
            await store.add("count", 1)
        records = list(read_records(tmp_path, Reader()))
        server.stop(for_good=False)
    (tmp_path / "snapshot-00000001").unlink()
    again = Journal(tmp_path, False, settings_of(tmp_path))
    list(again.read())
    for record in records:
        again.append(record.now, record.outputs ^ (record.number == len(records) - 2), record.events)
    again.close()
    async with serve(port=port, persist=tmp_path) as server:
        assert re.search(r"record \d+ in .* had another effect than before", caplog.text)
        with pytest.raises(DistNetworkError, match="did not keep the session"):
            await store.add("count", 1)
        await store.close()
        async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port) as fresh:
            assert await fresh.add("count", 1) == 4
        server.stop(for_good=False)
    assert segments_of(tmp_path), "no client may continue on a snapshot of this, either"
    assert snapshots_of(tmp_path) == []


def settings_of(folder: Path) -> dict[str, str]:
    settings: dict[str, str] = json.loads((folder / "instance").read_text())["settings"]
    return settings


@pytest.mark.parametrize(("call", "written"), [("pwrite", 1), ("fdatasync", 2)])
async def test_nothing_leaves_that_cannot_be_written(
    call: str, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only syncing fails, the next server finds what nobody was told: it may be on the disk."""
    async with serve(persist=tmp_path / "journal", sync="always", link_grace=1.0) as server:
        lost: list[OSError | None] = []
        server.on_end = lost.append
        store = await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", server.port, timeout=60.0)
        assert await store.add("count", 1) == 1

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            unanswered = asyncio.ensure_future(store.add("count", 1))
            while not lost:
                await asyncio.sleep(0)
        assert lost[0] is not None
        assert lost[0].errno == errno.EIO
        server.stop(for_good=False)
    with pytest.raises(DistNetworkError):
        await asyncio.wait_for(unanswered, 60.0)
    await store.close()
    async with serve(persist=tmp_path / "journal", sync="always", link_grace=1.0) as server:
        assert server.store.keyspace.values[b"/count"] == written


async def test_a_disk_whose_syncs_fail_ends_the_process(tmp_path: Path) -> None:
    port = free_port()
    program = tmp_path / "failing.py"
    program.write_text(_FAILING_SYNCS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), "serve", "--port", str(port), "--sync", "always", "--persist",
        str(tmp_path / "journal"), "--link-grace", "1", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()
    store = await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0)
    with pytest.raises(DistNetworkError):
        for count in range(1, 100):
            assert await store.add("count", 1) == count
    await store.close()
    _, errors = await process.communicate()
    assert process.returncode == 74
    assert b"cannot write the journal" in errors
    assert b"Input/output error" in errors


_FAILING_SYNCS = """
import errno, os, sys
left = 10
sync = os.fdatasync
def fdatasync(fd):
    global left
    left -= 1
    if not left:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    sync(fd)
os.fdatasync = fdatasync
from tcpstore_async.__main__ import main
main()
"""


async def test_a_disk_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile waits in the kernel. However much that is, a record has little of it, and so has memory."""
    sizes = []
    async with serve(persist=tmp_path / "journal", sync="always") as server:
        assert isinstance(server.persistence, JournalPersistence)
        append = server.persistence.journal.append

        def slowly(now: float, outputs: int, events: bytes) -> None:
            sizes.append(len(events))
            time.sleep(0.002)
            append(now, outputs, events)

        monkeypatch.setattr(server.persistence.journal, "append", slowly)
        loop = asyncio.get_running_loop()
        peers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(48)]
        requests = memoryview(HANDSHAKE + push(b"/queue", bytes(400_000)) * 2 + b"\x07")
        sent = []
        for peer in peers:  # while the server does nothing
            peer.setblocking(False)
            sent.append(peer.send(requests))
        await asyncio.gather(
            *(loop.sock_sendall(peer, requests[count:]) for peer, count in zip(peers, sent, strict=True))
        )
        for peer in peers:
            assert await loop.sock_recv(peer, 8) == u64(0)
            peer.close()
        assert len(server.store.keyspace.queues[b"/queue"]) == 2 * len(peers)
    assert sum(sizes) > 48 * 800_000
    assert max(sizes) < 2 << 20


async def test_an_older_copy_that_is_put_back(tmp_path: Path) -> None:
    """It is whole, but its clients know more: none of them continues on it."""
    folder, copy = tmp_path / "journal", tmp_path / "copy"
    with Restarting(folder) as restarting:
        store = await connected("async", restarting.port)
        assert await store.add("count", 1) == 1
        # The server may be making its next segment.
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("made", "next"))
        assert await store.add("count", 1) == 2
        restarting.kill()
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        restarting.start()
        with pytest.raises(DistNetworkError, match="did not keep the session"):
            await store.add("count", 1)
        async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", restarting.port) as other:
            assert await other.add("count", 0) == 1
        await store.close()


async def test_a_session_that_is_evicted_when_another_ones_replies_are_kept(tmp_path: Path) -> None:
    """Its own replies of the same turn are in the record nevertheless."""
    folder = tmp_path / "journal"
    link = BY_METHOD["link"]
    async with serve(persist=folder) as server:
        streams = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            streams.append((reader, writer))
            writer.write(HANDSHAKE + link.prefix + link.request.encode(ClientSingleLink().fields()))
            await reader.readuntil(b"}")
        (_, reads), (answers, writes) = streams
        writes.write(set_(b"/one", bytes(30_000)) + set_(b"/two", bytes(30_000)) + NUM_KEYS)
        assert await answers.readexactly(8) == u64(2)
        budget = server.store.budget
        budget.resize((budget.used() + 25_000) * 16 // 14)
        reads.write(get(b"/one"))  # its reply is kept until it is acknowledged
        writes.write(NUM_KEYS)
        with suppress(ConnectionError):
            await asyncio.wait_for(answers.read(), LIMIT)
        assert server.closed_for == {"budget_bytes": 1}
        assert look(folder)["wrong"] == []
        for _, writer in streams:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def test_a_links_secret_that_arrives_in_parts_is_not_in_the_journal(tmp_path: Path) -> None:
    link = BY_METHOD["link"]
    fields = ClientSingleLink().fields()
    (secret,) = [unpack(value) for name, value in fields[0] if name == b"secret"]
    request = HANDSHAKE + link.prefix + link.request.encode(fields)
    async with serve(persist=tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for part in (request[:-1], request[-1:]):
            read = server.received
            writer.write(part)
            while server.received < read + len(part):
                await asyncio.sleep(0)
        assert b"new" in await reader.readuntil(b"}")
        [segment] = segments_of(tmp_path)
        assert secret not in segment.read_bytes()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("sync", ["process", "always"])
def test_kills_under_load(sync: str, secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCPSTORE_TLS", "TCPSTORE_CA", "TCPSTORE_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert kills(3, 1, sync, secure)["wrong"] == []


@pytest.mark.parametrize("how", ["term", "replace"])
def test_servers_that_end_in_order_under_load(how: str) -> None:
    """They leave a snapshot; another one that takes over gets the listening socket too."""
    assert kills(3, 1, "process", False, how=how)["wrong"] == []


async def test_stop(tmp_path: Path) -> None:
    """The command ends a server for good; one that a process has started for itself ends with that."""
    with Restarting(tmp_path / "journal") as restarting:
        store = await connected("async", restarting.port)
        url = ("--url", f"tcp://127.0.0.1:{restarting.port}")
        assert (await asyncio.to_thread(tcpstore, "stop", *url)).returncode == 0
        with pytest.raises(DistNetworkError, match="the server is stopping"):
            await store.add("count", 1)
        assert await asyncio.to_thread(restarting.server.process.wait, 60.0) == 0
        assert {path.name for path in (tmp_path / "journal").iterdir()} == {"LOCK"}
        await store.close()
    async with serve(admin=str(tmp_path / "admin")):
        done = await asyncio.to_thread(tcpstore, "stop", "--admin", str(tmp_path / "admin"))
        assert done.returncode == 1
        assert b"this server ends with the process that started it" in done.stderr


async def test_a_client_that_leaves_before_its_new_link_has_a_connection(tmp_path: Path) -> None:
    """If the server is killed just then, the next one starts nevertheless."""
    folder = tmp_path / "journal"
    async with serve(persist=folder) as server:
        server.stop(for_good=False)
    link = BY_METHOD["link"]
    session = Reference("session", 1)
    request = HANDSHAKE + link.prefix + link.request.encode(ClientSingleLink().fields())
    events = [
        Event(OPENED, Reference("store", ""), ("127.0.0.1", 1, 0.0), 0.0),
        Event(RECEIVE, session, (request,), 0.0),
        Event("leave", session, (), 0.0),
    ]
    journal = Journal(folder, False, settings_of(folder))
    assert list(journal.read()) == []
    journal.append(0.0, 0, encode(events))
    journal.close()
    async with serve(persist=folder) as server:
        assert server.links.clients(0) == 0
