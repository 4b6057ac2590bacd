"""Snapshots of a journal while its server serves, made by another process; and servers that take over."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from server.test_persistence import KINDS, Restarting, calling, closed, connected
from simulation.journal import SETTINGS
from support import LIMIT, free_port, listening, tcpstore, tcpstore_relay
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.journal import Journal, segments_of, snapshots_of
from tcpstore_async.server import persistence, snapshots
from tcpstore_async.server.owned_process import OwnedProcess
from tcpstore_async.server.snapshots import make_snapshot
from tcpstore_async.serving import serve

pytestmark = pytest.mark.slow


async def fill(store: AsyncTCPStore, megabytes: int) -> None:
    for number in range(megabytes):
        await store.set(f"large/{number % 3}", b"%d" % number + bytes(1 << 20))


async def trimmed(folder: Path, beyond: int) -> None:
    """Wait until the segments before this one are gone."""
    while segments_of(folder) and int(segments_of(folder)[0].name[-8:]) < beyond:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restart_behind_a_snapshot(kind: str, tmp_path: Path) -> None:
    """Everything that was there before it is there, waits and leases too."""
    folder = tmp_path / "journal"
    with Restarting(folder) as restarting, tcpstore_relay(restarting.port) as relay:
        port = relay.port if kind == "relay" else restarting.port
        store, other = await connected(kind, port), await connected(kind, port)
        call = calling(store)
        await call("queue_push", "queue", "item")
        await call("set", "key", "value")
        assert await call("add", "count", 3) == 3
        awaited = asyncio.ensure_future(calling(other)("wait", ["later"], 60.0))
        async with await AsyncTCPStore.connect("127.0.0.1", restarting.port) as filler:
            await fill(filler, 40)
        await trimmed(folder, 1)
        restarting.restart()
        assert "read a snapshot and executed " in restarting.server.log()
        assert await call("add", "count", 1) == 4
        assert await call("get", "key") == b"value"
        assert await call("queue_pop", "queue") == b"item"
        assert (await call("get", "large/2")).startswith(b"38")
        await call("set", "later", b"")
        await awaited
        for one in (store, other):
            await closed(one)


@pytest.mark.interpreted("it sets a constant")
async def test_a_start_that_took_long_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server that dies before its snapshots are made would take longer each time."""
    folder = tmp_path / "journal"
    monkeypatch.setattr(persistence, "_LONG_START", 0.0)
    with Restarting(folder) as restarting:
        store = await connected("async", restarting.port)
        assert await store.add("count", 3) == 3
        restarting.kill()
        async with serve("127.0.0.1", restarting.port, persist=folder) as server:
            assert server.persistence is not None
            assert server.persistence.records > 0
            assert len(snapshots_of(folder)) == 1
            assert await store.add("count", 1) == 4
            assert len(segments_of(folder)) == 1
            server.stop(for_good=False)
        restarting.start()
        assert await store.add("count", 1) == 5
        await store.close()


async def test_a_process_that_fails_costs_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says so once; the next process makes the snapshot."""
    folder = tmp_path / "journal"
    tried: list[list[str]] = []

    def start(arguments: list[str]) -> OwnedProcess:
        tried.append(arguments)
        if len(tried) == 1:
            raise OSError(12, "Cannot allocate memory")
        return OwnedProcess([*arguments[:2], str(tmp_path / "none") if len(tried) == 2 else arguments[2]])

    monkeypatch.setattr(snapshots, "OwnedProcess", start)
    async with serve(persist=folder) as server, await AsyncTCPStore.connect("127.0.0.1", server.port) as store:
        with caplog.at_level(logging.WARNING):
            while len(tried) < 3:
                await fill(store, 4)
        await trimmed(folder, 1)
        said = [record.message for record in caplog.records if "cannot make a snapshot" in record.message]
        assert len(said) == 1
        assert said[0].endswith("cannot start a process: Cannot allocate memory")
        assert await store.get("large/0")


def test_nothing_is_made_of_a_damaged_segment(tmp_path: Path) -> None:
    """Else it would be removed, and what is behind it would fit to nothing."""
    journal = Journal(tmp_path, False, {**SETTINGS, "tokens": "False"}, 1000)
    for _ in range(100):
        journal.append(0.0, 0, b"")
    journal.close()
    assert make_snapshot(tmp_path) == ""
    assert [path.name for path in snapshots_of(tmp_path)] == [f"snapshot-{len(segments_of(tmp_path)) - 1:08}"]
    snapshots_of(tmp_path)[0].unlink()
    second = segments_of(tmp_path)[1]
    data = second.read_bytes()
    end = len(data.rstrip(b"\0"))
    second.write_bytes(data[: end - 1] + bytes(len(data) - end + 1))
    with pytest.raises(JournalError, match=f"{second}: the record at byte .* is damaged, and later segments follow"):
        make_snapshot(tmp_path)
    assert snapshots_of(tmp_path) == []


async def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """It ends with its server, and what it had begun is ignored."""
    folder = tmp_path / "journal"
    with Restarting(folder) as restarting:
        async with await AsyncTCPStore.connect("127.0.0.1", restarting.port) as store:
            await fill(store, 20)
            while not (folder / "snapshot").exists() and not snapshots_of(folder):
                await fill(store, 1)
            restarting.restart()
            assert await store.get("large/1")


async def test_a_server_that_ends_leaves_a_snapshot_only(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with Restarting(folder) as restarting:
        store = await AsyncTCPStore.connect("127.0.0.1", restarting.port, timeout=60.0)
        assert await store.add("count", 1) == 1
        restarting.server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(restarting.server.process.wait, LIMIT)
        assert len(snapshots_of(folder)) == 1
        assert segments_of(folder) == []
        assert b"1 segment" not in tcpstore("journal", "verify", str(folder)).stdout
        restarting.start()
        assert await store.add("count", 1) == 2
        await store.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_takes_over(kind: str, tmp_path: Path) -> None:
    """It has the listening socket, so nobody is refused meanwhile; the first one ends as told by SIGTERM."""
    with Restarting(tmp_path / "journal") as restarting, tcpstore_relay(restarting.port) as relay:
        store = await connected(kind, relay.port if kind == "relay" else restarting.port)
        call = calling(store)
        assert await call("add", "count", 1) == 1
        waiting = asyncio.ensure_future(call("queue_pop", "queue"))
        first = restarting.server.process
        with listening([*restarting.options, "--replace"]) as second:
            assert await asyncio.to_thread(first.wait, LIMIT) == 0
            assert second.port == restarting.port
            async with await AsyncTCPStore.connect("127.0.0.1", restarting.port) as other:
                await other.queue_push("queue", "item")
            assert await waiting == b"item"
            assert await call("add", "count", 1) == 2
            said = restarting.server.log()
            assert "another server takes over: ending" in said
            await closed(store)


async def test_who_may_not_take_over(tmp_path: Path) -> None:
    port = str(free_port())
    with listening(["serve", "--port", port, "--persist", str(tmp_path / "one"), "--replace"]):
        done = tcpstore("serve", "--port", port, "--persist", str(tmp_path / "two"), "--replace")
        assert done.returncode == 1
        assert f"this server keeps its stores in {os.path.realpath(tmp_path / 'one')}, not in".encode() in done.stderr
        assert done.stderr.count(b"\n") == 1
    with listening(["serve", "--port", port]):
        done = tcpstore("serve", "--port", port, "--persist", str(tmp_path / "two"), "--replace")
        assert b"this server has no journal that another one could continue" in done.stderr
    assert tcpstore("serve", "--replace").returncode == 2
