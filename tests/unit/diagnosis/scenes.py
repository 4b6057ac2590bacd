"""Situations in which a rank times out, and what is said about each: by the error, and by `tcpstore who --missing`.

    python -m unit.diagnosis.scenes > tests/unit/diagnosis/scenes.txt

writes the record that `test_scenes.py` compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from looking import World, environments
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import StoreTimeoutError
from tcpstore_async.client.explanation import explain, question
from tcpstore_async.keyspace.waiter_types import IDLE
from tcpstore_async.session.identity import decode_identity, identity
from tcpstore_async.tools.load.scripts import encode_request
from tcpstore_async.tools.look.who import _missing_lines
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack

RECORD = Path(__file__).with_name("scenes.txt")
OURS = decode_identity(identity("i", "uv"))
NCCL = b"/default_pg/0//cuda//pg/nccl_storekey_%d"

_LINES = 16
"""Lines kept of what `who` prints."""

SCENES: dict[str, Callable[[], Iterator[str]]] = {}


def scene(function: Callable[..., Iterator[str]], *given: Any) -> None:
    name = " ".join([function.__name__, *map(str, given)]).replace("_", " ")
    SCENES[name] = lambda: function(*given)


def world_of(ranks: Iterable[int], size: int, clients: str, world: World | None = None) -> World:
    """Connect ranks that join at second 0; `clients` are `ours`, which introduce themselves, or `stock`."""
    world = world or World()
    for rank in ranks:
        world.connect(rank, host=f"10.0.0.{1 + rank // 8 % 250}")
        if clients == "ours":
            world.introduce(rank, rank=str(rank), world_size=str(size), host=f"node{rank // 8}", pid=str(1000 + rank))
    return world


def late(world: World, client: int, method: str, *fields: Any) -> Iterator[str]:
    """Yield what the error of a call says that a client gives up, which it may have sent before."""
    request = BY_METHOD[method], fields
    if world.sessions[client].state == IDLE:
        world.reply(client, encode_request(method, *fields))
    world.reply(client, encode_request("cancel_fetch" if method == "fetch" else "cancel_wait"))
    asked = question(request, 60.0, OURS)
    assert asked is not None
    error = StoreTimeoutError(f"{method} timeout")
    explain(error, asked, pack(world.reply(client, encode_request("missing", *asked[1]))))
    yield f"error: {error}"
    for name in ("missing_keys", "nearest_keys", "missing_ranks", "elsewhere"):
        if found := getattr(error, name):
            yield f"  {name}: {_shown(found)}"


def who(world: World, size: int | None = None, known: Mapping[int, Mapping[str, str]] | None = None) -> Iterator[str]:
    """Yield what `who --missing` prints."""
    for line in list(_missing_lines(world.missing(size, known), None))[:_LINES]:
        yield f"who: {line}"


def _shown(found: Any) -> str:
    if isinstance(found, dict):
        return "; ".join(
            f"{name} ~ {', '.join(f'{key} {age} {by}' for key, age, by in near)}" for name, near in found.items()
        )
    return ", ".join(map(str, found[:10])) + (f", … ({len(found)})" if len(found) > 10 else "")


def joining(clients: str) -> Iterator[str]:
    world = world_of({*range(16)} - {3, 7}, 16, clients)
    world.connect(99, joins=False)
    world.history.clock.now = 30.0
    yield from late(world, 0, "wait_count", b"init/", 16)
    yield from who(world, 16 if clients == "stock" else None)


def barrier(kind: str, clients: str) -> Iterator[str]:
    """Of 64 ranks, three are not connected, two are elsewhere, and one of the others has left again."""
    size, absent, hanging = 64, {3, 17, 40}, {8, 9}
    world = world_of({*range(size)} - absent, size, clients)
    world.history.clock.now = 5.0
    world.fetch(9, b"/weights")
    for rank in sorted({*range(size)} - absent - hanging):
        if kind == "BARRIER":
            world.barrier(rank, b"/all here", size)
        else:
            counter, last = {
                "store based": (b"/store_based_barrier_key:pg", b"/store_based_barrier_key:pg:last_worker"),
                "elastic": (b"/step/num_members", b"/step/last_member"),
                "collectives": (b"/step/num_members", b"/step/last_members"),
            }[kind]
            world.add(rank, counter)
            world.wait(rank, last)
    world.leave(12)
    world.leave(8)
    world.history.clock.now = 65.0
    yield from late(world, 0, *("barrier", b"/all here", size) if kind == "BARRIER" else ("wait", [last]))
    yield from who(world)


def part(clients: str) -> Iterator[str]:
    """A barrier of four ranks of eight."""
    world = world_of(range(8), 8, clients)
    for rank in (4, 5):
        world.barrier(rank, b"/half", 4)
    yield from late(world, 4, "barrier", b"/half", 4)
    yield from who(world)


def named_store() -> Iterator[str]:
    root = world_of(range(4), 4, "ours")
    world = world_of(range(2), 4, "ours", World(root=root))
    world.barrier(0, b"/b", 4)
    yield from late(world, 0, "barrier", b"/b", 4)
    yield from who(world)


def elastic_agents() -> Iterator[str]:
    world = world_of(range(6), 6, "ours")
    for rank in range(3):
        world.add(rank, b"/torchelastic/agent/terminal_state/num_members")
    world.set(1, b"/torchelastic/role_info/1")
    world.set(2, b"/torchelastic/role_info/2")
    yield from late(world, 0, "wait", [b"/torchelastic/agent/terminal_state/last_member"])
    yield from late(world, 0, "wait", [b"/torchelastic/role_info/%d" % rank for rank in range(3)])
    yield from who(world)


def exchange(clients: str, known: bool) -> Iterator[str]:
    """Each of eight ranks writes a key and waits for all; two have not. Nothing says who they are but these keys."""
    world = world_of(range(8), 8, clients)
    names = [b"/address/%d" % rank for rank in range(8)]
    for rank in (0, 1, 2, 4, 5, 6):
        world.set(rank, names[rank])
        world.wait(rank, *names)
    world.wait(3, b"/never")
    world.history.clock.now = 70.0
    yield from late(world, 0, "wait", names)
    yield from who(world, 8, environments(range(8), 8) if known else None)


def gathering() -> Iterator[str]:
    world = world_of(range(6), 6, "ours")
    for rank in (1, 2, 4):
        world.set(rank, b"/gathered/%d" % rank)
    yield from late(world, 0, "wait", [b"/gathered/%d" % rank for rank in range(1, 6)])
    yield from who(world)


def written_by_one() -> Iterator[str]:
    """Numbers that are not ranks."""
    world = world_of(range(8), 8, "ours")
    for number in range(4):
        world.set(5, b"/shard/%d" % number)
    names = [b"/shard/%d" % number for number in range(6)]
    world.wait(1, *names)
    yield from late(world, 0, "wait", names)
    yield from who(world)


def group_of_ranks() -> Iterator[str]:
    """Ranks 4 to 7 are 0 to 3 of their group."""
    world = world_of(range(8), 8, "ours")
    for rank in (4, 5, 6):
        world.set(rank, b"/group/%d" % (rank - 4))
    yield from late(world, 4, "wait", [b"/group/%d" % rank for rank in range(4)])
    yield from who(world)


def nccl(key: bytes) -> Iterator[str]:
    world = world_of(range(4), 4, "ours")
    world.set(0, NCCL % 5)
    world.history.clock.now = 180.0
    for rank in (1, 2, 3):
        world.fetch(rank, key)
    yield from late(world, 1, "fetch", key)
    yield from who(world)


def single_key(clients: str) -> Iterator[str]:
    """Ranks wait for the key of the first that is missing."""
    world = world_of(range(8), 8, clients)
    for rank in (0, 1, 2, 4, 5, 6):
        world.set(rank, b"/pg/0//cpu//0/%d" % rank, bytes(154 + 64))
        world.wait(rank, b"/pg/0//cpu//0/3")
    yield from late(world, 0, "wait", [b"/pg/0//cpu//0/3"])
    yield from who(world, 8)


def similar(wanted: bytes, *existing: bytes) -> Iterator[str]:
    world = world_of(range(2), 2, "ours")
    for number, key in enumerate(existing):
        world.history.clock.now = float(number)
        world.set(number % 2, key)
    world.history.clock.now = 100.0
    yield from late(world, 0, "wait", [wanted])


def nobody_missing() -> Iterator[str]:
    world = world_of(range(4), 4, "ours")
    world.set(1, b"/go")
    yield from late(world, 0, "wait", [b"/go"])
    for rank in range(4):
        world.barrier(rank, b"/b", 4)
    yield from late(world, 0, "wait", [b"/nor=that"])
    yield from who(world)


def prefix_token() -> Iterator[str]:
    world = world_of(range(4), 4, "ours")
    world.store.identify(identity("i", "uv"))
    for rank in (0, 1, 3):
        world.set(rank, b"/mine/rank%d" % rank)
    world.set(1, b"/others/rank9")
    world.wait(2, b"/others/secret")
    world.store.guards.grant(world.sessions[0], Access("t", "write", "mine/"))
    world.sessions[0].table = world.store.guards.table_of(world.sessions[0])
    yield from late(world, 0, "wait", [b"/mine/rank%d" % rank for rank in range(4)])
    yield from late(world, 0, "wait", [b"/mine/rank9"])


def large(clients: str) -> Iterator[str]:
    """Of 3,000 ranks, seven have not come to a barrier; then half of them have not come to another one."""
    size = 3_000
    absent = {*range(100, size, 450)}
    world = world_of({*range(size)} - {1000}, size, clients)
    for rank in sorted({*range(size)} - absent - {1000}):
        world.barrier(rank, b"/first", size)
    world.history.clock.now = 60.0
    yield from late(world, 0, "barrier", b"/first", size)
    for rank in range(0, size, 2):
        if rank != 1000:
            world.barrier(rank, b"/second", size)
    world.history.clock.now = 120.0
    yield from late(world, 0, "barrier", b"/second", size)
    for rank in range(size):
        if rank not in absent and rank != 1000:
            world.set(rank, b"/list/%d" % rank)
    yield from late(world, 2, "wait", [b"/list/%d" % rank for rank in range(size)])
    yield from who(world)


def without_history() -> Iterator[str]:
    world = world_of(range(4), 4, "ours", World(observed=False))
    world.set(0, b"/k_5")
    yield from late(world, 0, "wait", [b"/k_6"])
    yield from late(world, 0, "wait", [b"/k_5", b"/k_6"])
    world.barrier(1, b"/b", 4)
    yield from late(world, 0, "barrier", b"/b", 4)


for _clients in ("ours", "stock"):
    scene(joining, _clients)
    for _kind in ("BARRIER", "store based", "elastic", "collectives"):
        scene(barrier, _kind, _clients)
    scene(part, _clients)
    for _known in (True, False):
        scene(exchange, _clients, _known)
    scene(single_key, _clients)
    scene(large, _clients)
for _scene in (
    *(named_store, elastic_agents, gathering, written_by_one, group_of_ranks, nobody_missing, prefix_token),
    without_history,
):
    scene(_scene)
scene(nccl, NCCL % 8)
scene(nccl, b"/default_pg/0//cuda//0")
scene(nccl, b"/pg/UniqueNCCLID:0")
for _wanted, _existing in (
    (NCCL % 8, [NCCL % 5, b"/default_pg/0//cuda//other", b"/ready"]),
    (b"/comm/world_c4", [b"/comm/world_c0", b"/comm/world", b"/world_c7/x"]),
    (b"/attempt_2/worker/ready", [b"/worker/ready", b"/worker/done", b"/attempt_2/worker/done"]),
    (b"/pg/0//3//cpu//0/2", [b"/pg/0//2//cpu//0/2", *[b"/pg/0//cpu//0/%d" % rank for rank in range(9)]]),
    (b"/job/attempt_1/rank0/address", [b"/job/attempt_0/rank0/address", b"/job/attempt_0/rank0/port"]),
    (b"/worker/raedy", [b"/worker/ready", b"/worker/done", b"/x"]),
    (b"/rendevouz/workr", [b"/rendezvous/worker", b"/x", b"/y", *[b"/k%d" % number for number in range(30)]]),
    (b"/epoch/99/rank/5", [b"/epoch/%d/rank/%d" % (at // 8, at % 8) for at in range(400)]),
    (b"/epoch/99/rank/5", [b"/epoch/%d/rank/%d" % (at // 40, at % 40) for at in range(2_000)]),
    (b"/step/1000", [b"/step/3", b"/step/10", b"/other/1"]),
    (b"/+=+=+=+", [b"/step/3", b"/step/10", b"/other/1"]),
):
    scene(similar, _wanted, *_existing)


def told() -> str:
    """Return the record."""
    found = []
    for name, tell in SCENES.items():
        found.append(f"== {name[:100]}\n" + "\n".join(tell()) + "\n")
    return "\n".join(found)


if __name__ == "__main__":
    print(told(), end="")
