"""Jobs that hang, of ranks that are connections of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from conformance.frames import add, introduce
from support import RawPeer, blob, keys

SIZE = 1000
FIRST_PID = 20_000
ABSENT = (17, 18, 19, 502, 830)
"""Ranks that never come."""
ASTRAY = (8, 641)
"""Ranks that wait for a key that nobody writes: a counter in its name differs."""
AWAITED = b"/epoch_8/ready"
HOSTILE = b"/<img src=x onerror=document.title='taken'>\xe2\x80\xae</script>"


def introduction(rank: int, size: int) -> bytes:
    """What our client says of itself."""
    host = f"node-{rank // 8:03}"
    items = {"rank": str(rank), "world_size": str(size), "host": host, "pid": str(FIRST_PID + rank)}
    return introduce(*((name.encode(), text.encode()) for name, text in items.items()))


@contextmanager
def incident(port: int, *, hostile: bool = False) -> Iterator[None]:
    """Ranks that have joined, and are in a barrier from which seven are missing."""
    with ExitStack() as stack:
        peers = {rank: stack.enter_context(RawPeer(port)) for rank in range(SIZE) if rank not in ABSENT}
        for rank, peer in peers.items():
            peer.send(introduction(rank, SIZE) + add(b"init/", 1))
            peer.read(8)
        first = peers[0]
        for number in range(6):
            first.send(b"\x01" + blob(b"/epoch_%d/ready" % number) + blob(b"yes"))
        first.ping()
        for rank in ASTRAY:
            peers[rank].send(b"\x06" + keys(AWAITED))
        if hostile:
            peers[8].send(b"\x0c")
            peers[8].read(1)
            peers[8].send(b"\x06" + keys(HOSTILE))
        barrier = b"/store_based_barrier_key:default_pg"
        for rank, peer in peers.items():
            if rank not in ASTRAY:
                peer.ask(add(barrier, 1), 8)
                peer.send(b"\x06" + keys(barrier + b":last_worker"))
        yield


def large_reply(size: int, absent: frozenset[int]) -> list[bytes]:
    """What an admin socket replies for a job of so many ranks, behind relays, of which some are absent.

    All others wait in a barrier.
    """
    barrier = "/store_based_barrier_key:default_pg"
    come = [rank for rank in range(size) if rank not in absent]
    lines: list[object] = [{"server": {"host": "::", "port": 29500, "pid": 1, "version": "0", "build": "x"}}]
    for at in range(0, len(come), 500):
        lines.append({"groups": [{"id": 1, "keys": [f"{barrier}:last_worker"]}], "sessions": []})
        for rank in come[at : at + 500]:
            peer = {"rank": str(rank), "world_size": str(size), "host": f"node-{rank // 8:05}"}
            session = {
                "id": rank + 1, "host": f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}", "port": 40000, "joined": 9.5,
                "idle": 4.25, "command": "WAIT", "pid": 1000 + rank, "peer": peer, "link": "10.0.0.1",
                "wait": {"for": "keys", "keys": [], "group": 1},
            }  # fmt: skip
            lines[-1]["sessions"].append(session)  # type: ignore[index]
    for counter in ("init/", barrier):
        for at in range(0, len(come), 5000):
            members = [rank + 1 for rank in come[at : at + 5000]]
            fact = {"key": counter, "value": len(come), "expected": 0, "age": 4.0, "members": members}
            lines.append({"counters": [fact]})
    for at in range(0, len(come), 500):
        lines.append({"keys": [[f"/default_pg/0//cpu//{rank}", 154, 5.0, rank + 1] for rank in come[at : at + 500]]})
    return [msgspec.json.encode(line) for line in [*lines, {"end": True}]]
