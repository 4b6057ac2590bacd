"""Records a journal of this version, which later versions have to read: a snapshot, and records behind it.

    python tests/log/make_golden.py

Writes `goldens/N`, where N is REPLAY: the journal of a server that was ended and killed under a little of everything,
and what its state means, with the records and without.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.kills import Load, form_rounds, use_a_named_store
from log.digests import look
from server.test_persistence import Restarting, waiters
from support import tcpstore_relay
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.log.journal import segments_of
from tcpstore_async.log.records import REPLAY

GOLDEN = Path(__file__).parent / "goldens" / str(REPLAY)


async def use(store: AsyncTCPStore, other: AsyncTCPStore, name: str) -> None:
    for number in range(5):
        await store.add("sum", number)
        await store.set(f"{name}/{number}", bytes([number]) * 40)
        await store.append(f"{name}/text", b"%d," % number)
        await store.compare_set("swapped", b"", name.encode())
        for item in range(3):
            await store.queue_push("queue", f"{name}/{number}/{item}")
        assert await other.queue_pop("queue")
        await store.multi_set([f"{name}/many/{key}" for key in range(20)], [b"%d" % number] * 20)
        await asyncio.gather(store.barrier(f"{name}/all/{number}", 2), other.barrier(f"{name}/all/{number}", 2))


async def form(ports: list[int]) -> None:
    """Form some rounds, then close them."""
    load = Load(0)
    rounds = asyncio.ensure_future(asyncio.to_thread(form_rounds, load, ports, [None, None]))
    while load.calls < 8:
        await asyncio.sleep(0.01)
    load.over = True
    await rounds


async def record(restarting: Restarting, relay: int, part: str) -> None:
    url = f"tcp://127.0.0.1:{restarting.port}"
    ports = [restarting.port, relay, restarting.port, relay]
    stores = [await AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0) for port in ports]
    for number, store in enumerate(stores[:3]):
        await use(store, stores[number + 1], f"{part}/{number}")
    await asyncio.to_thread(use_a_named_store, url, f"{part}:29500", 3, part)
    if part == "second":
        await form(ports[:2])
    waiting = [asyncio.ensure_future(store.wait([f"{part}/later/{number}"])) for number, store in enumerate(stores)]
    while len(await asyncio.to_thread(waiters, restarting.port)) < len(stores) * (1 if part == "first" else 2):
        pass
    if part == "first":
        restarting.server.process.terminate()
        restarting.server.process.wait()
        restarting.start()
        await record(restarting, relay, "second")
    else:
        restarting.kill()
        copy(restarting.folder)
        restarting.start()
    await asyncio.gather(*(store.set(f"{part}/later/{number}", b"") for number, store in enumerate(stores)))
    await asyncio.gather(*waiting)
    for store in stores:
        await store.close()


def copy(folder: Path) -> None:
    """Keep a journal, without the zeros behind its records."""
    (GOLDEN / "journal").mkdir(parents=True)
    for path in folder.iterdir():
        if path.name not in ("LOCK", "next"):
            (GOLDEN / "journal" / path.name).write_bytes(path.read_bytes().rstrip(b"\0"))


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "journal"
        with Restarting(folder) as restarting, tcpstore_relay(restarting.port) as relay:
            asyncio.run(record(restarting, relay.port, "first"))
    (GOLDEN / "whole.json").write_text(json.dumps(look(GOLDEN / "journal", meaning=True), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(GOLDEN / "journal", Path(name) / "journal")
        for segment in segments_of(Path(name) / "journal"):
            segment.unlink()
        found = look(Path(name) / "journal", meaning=True)
    (GOLDEN / "snapshot.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{GOLDEN}: {sum(path.stat().st_size for path in GOLDEN.rglob('*'))} bytes")


if __name__ == "__main__":
    main()
