"""What PyTorch's NCCL backends send to the store, as their sources say: a machine without a GPU cannot run them.

`nccl` of PyTorch up to 2.14 (ProcessGroupNCCL.cpp: broadcastUniqueNCCLID, allgatherUniqueNCCLIDs) and `nccl2`, which is
`nccl` since 2.15 (nccl2/NCCLBootstrap.cpp: exchangeUniqueIds; nccl2/ReconfigureNCCL.cpp). `Store.get` is WAIT and GET
on the wire, `multiGet` WAIT and MULTI_GET. PyTorch's libuv server is the control.
"""

from __future__ import annotations

from conformance.frames import (
    READY,
    WOKEN,
    barrier,
    check,
    compare_set,
    get,
    multi_get,
    set_,
    wait,
)
from conformance.script import NO_REPLY, Peer, Script, Writer
from support import blob

ID_BYTES = 128
"""Length of an ncclUniqueId."""

RANKS_PER_ROOT = 128
"""The default of TORCH_NCCL_RANKS_PER_ROOT: groups above it have several roots."""

WORLD = b"/default_pg/0//cuda//"
"""The prefix of the world's keys: of the default group, its name and the device, each by a PrefixStore."""


def unique_id(index: int) -> bytes:
    """A value like an ncclUniqueId: a network address and random bytes, among them zeros."""
    return (b"\x02\x00" + index.to_bytes(4, "big") + bytes(range(256)))[:ID_BYTES]


def count_roots(ranks: int) -> int:
    return -(-ranks // RANKS_PER_ROOT) if ranks > RANKS_PER_ROOT else 1


def root_index(rank: int, ranks: int, roots: int) -> int:
    """The number of the ID that a rank makes, or -1: the ranks are spread evenly over the roots, the larger shares
    first, and the first rank of each share is its root."""
    start = 0
    for index in range(roots):
        if rank == start:
            return index
        start += ranks // roots + (index < ranks % roots)
    return -1


def legacy_keys(prefix: bytes, roots: int) -> list[bytes]:
    """The keys of the first communicator of a group: a counter if there is one root, else the roots' numbers."""
    if roots == 1:
        return [prefix + b"0"]
    return [prefix + b"UniqueNCCLID:%d" % index for index in range(roots)]


def nccl2_keys(prefix: bytes, name: bytes, roots: int, generation: int = 0) -> list[bytes]:
    """The keys of one generation of a group's communicator, below a PrefixStore of the group's name."""
    key = prefix + name + b"/nccl_storekey_%d" % generation
    return [key] if roots == 1 else [key + b"_%d" % index for index in range(roots)]


_SCRIPTS: list[Script] = []


def nccl_cases() -> list[Script]:
    return _SCRIPTS


def case(write: Writer) -> Writer:
    """The decorated function writes a case, named after it."""
    script = Script(write.__name__)
    write(script)
    _SCRIPTS.append(script)
    return write


def _exchange(s: Script, ranks: int, keys: list[bytes], *, early: bool, waits: int) -> None:
    """All ranks of interest exchange the IDs: roots, their neighbours, the last rank. `early`: the others wait before
    the roots have set anything. Each rank waits `waits` times before its MULTI_GET."""
    roots = len(keys)
    numbers = {0, 1, ranks - 1} | {rank for rank in range(ranks) if root_index(rank, ranks, roots) >= 0}
    peers = {rank: s.peer(f"rank{rank}") for rank in sorted(numbers)}
    others = [peer for rank, peer in peers.items() if root_index(rank, ranks, roots) < 0]
    if early:
        for peer in others:
            peer.says(wait(*keys))
            peer.hears(NO_REPLY)
    waiting: list[Peer] = []
    for rank, peer in peers.items():
        index = root_index(rank, ranks, roots)
        if index < 0:
            continue
        peer.says(set_(keys[index], unique_id(index)))
        peer.says(wait(*keys))
        if index < roots - 1:
            waiting.append(peer)
    last = [peer for rank, peer in peers.items() if root_index(rank, ranks, roots) == roots - 1]
    for peer in [*waiting, *last]:
        peer.hears(WOKEN)
    for peer in others:
        if early:
            peer.hears(WOKEN)
        else:
            peer.asks(wait(*keys), WOKEN)
    for peer in peers.values():
        for _ in range(waits - 1):
            peer.asks(wait(*keys), WOKEN)
        peer.asks(multi_get(*keys), b"".join(blob(unique_id(index)) for index in range(roots)))


# nccl2


@case
def nccl2_world_of_two(s: Script) -> None:
    _exchange(s, 2, nccl2_keys(WORLD, b"0", 1), early=True, waits=2)


@case
def nccl2_world_of_128(s: Script) -> None:
    """The largest with one root."""
    assert count_roots(128) == 1
    _exchange(s, 128, nccl2_keys(WORLD, b"0", count_roots(128)), early=False, waits=2)


@case
def nccl2_world_of_129(s: Script) -> None:
    """The smallest with two roots."""
    _exchange(s, 129, nccl2_keys(WORLD, b"0", count_roots(129)), early=True, waits=2)


@case
def nccl2_world_of_16384(s: Script) -> None:
    """128 roots; the others wait first."""
    _exchange(s, 16_384, nccl2_keys(WORLD, b"0", count_roots(16_384)), early=True, waits=2)


@case
def nccl2_world_of_98304_after_its_roots(s: Script) -> None:
    """768 roots; the others come when all IDs are there. A request of each kind names them all."""
    roots = count_roots(98_304)
    assert roots == 768
    keys = nccl2_keys(WORLD, b"0", roots)
    a, b, c = s.peers("abc")
    a.says(*(set_(key, unique_id(index)) for index, key in enumerate(keys)))
    expected = b"".join(blob(unique_id(index)) for index in range(roots))
    a.asks(check(*keys), READY)
    for peer in (b, c):
        peer.asks(wait(*keys), WOKEN)
        peer.asks(wait(*keys), WOKEN)
        peer.asks(multi_get(*keys), expected)


@case
def nccl2_generations_and_names_do_not_mix(s: Script) -> None:
    """A communicator that is made again has a generation of its own; a group, a name. IDs of others end no wait."""
    first, second = nccl2_keys(WORLD, b"0", 2), nccl2_keys(WORLD, b"0", 2, generation=1)
    other = nccl2_keys(b"/default_pg/7//cuda//", b"7", 2)
    a, b = s.peers("ab")
    b.says(wait(*second))
    a.says(*(set_(key, unique_id(index)) for index, key in enumerate(first)))
    a.says(*(set_(key, unique_id(9)) for key in other))
    a.asks(wait(*first), WOKEN)
    b.hears(NO_REPLY)
    a.says(set_(second[1], unique_id(3)))
    b.hears(NO_REPLY)
    a.says(set_(second[0], unique_id(2)))
    b.hears(WOKEN)
    b.asks(wait(*second), WOKEN)
    b.asks(multi_get(*second), blob(unique_id(2)) + blob(unique_id(3)))


@case
def nccl2_reconfigure(s: Script) -> None:
    """The new rank 0 claims the identifier of the membership by COMPARE_SET, then sets the ID. A second claim sees who
    was first."""
    prefix = WORLD + b"nccl2_reconfigure/42/"
    claimed, key = prefix + b"claimed", prefix + b"unique_id"
    mine, late = b"nccl2:0:-1:10.0.0.1:29500", b"nccl2:3:-1:10.0.0.1:29500"
    a, b, c = s.peers("abc")
    b.says(wait(key))
    a.asks(compare_set(claimed, b"", mine), blob(mine))
    c.asks(compare_set(claimed, b"", late), blob(mine))
    a.says(set_(key, unique_id(0)))
    b.hears(WOKEN)
    b.asks(wait(key), WOKEN)
    b.asks(get(key), blob(unique_id(0)))


@case
def symmetric_memory(s: Script) -> None:
    """Each tensor of a group: every rank SETs its handle, WAITs for all of them, gets them at once; then a BARRIER.

    Keys are a prefix, a sequence number and the rank.
    """
    ranks = 8
    peers = s.peers("abcdefgh")
    keys = [WORLD + b"CUDASymmetricMemory/0/%d" % rank for rank in range(ranks)]
    for rank, peer in enumerate(peers):
        peer.says(set_(keys[rank], bytes([rank]) * 64))
        peer.says(wait(*keys))
        if rank < ranks - 1:
            peer.hears(NO_REPLY)
    for peer in peers:
        peer.hears(WOKEN)
        peer.asks(multi_get(*keys), b"".join(blob(bytes([rank]) * 64) for rank in range(ranks)))
    for peer in peers[:-1]:
        peer.says(barrier(WORLD + b"CUDASymmetricMemory/1", ranks))
        peer.hears(NO_REPLY)
    peers[-1].asks(barrier(WORLD + b"CUDASymmetricMemory/1", ranks), WOKEN)
    for peer in peers[:-1]:
        peer.hears(WOKEN)


# nccl, up to PyTorch 2.14


@case
def nccl_world_of_two(s: Script) -> None:
    """One root SETs; the others WAIT and GET. So do pairs of ranks that have a communicator of their own."""
    [key] = legacy_keys(WORLD, 1)
    a, b = s.peers("ab")
    b.says(wait(key))
    a.says(set_(key, unique_id(0)))
    b.hears(WOKEN)
    b.asks(get(key), blob(unique_id(0)))


@case
def nccl_world_of_129(s: Script) -> None:
    _exchange(s, 129, legacy_keys(WORLD, count_roots(129)), early=True, waits=1)


@case
def nccl_stale_ids(s: Script) -> None:
    """Keys that are used again, as before pytorch#178493, return the IDs that are there: the store keeps no rounds."""
    keys = legacy_keys(WORLD, 2)
    a, b = s.peers("ab")
    a.says(*(set_(key, unique_id(index)) for index, key in enumerate(keys)))
    a.asks(wait(*keys), WOKEN)
    b.asks(wait(*keys), WOKEN)
    b.asks(multi_get(*keys), blob(unique_id(0)) + blob(unique_id(1)))
    a.says(set_(keys[0], unique_id(2)))
    b.asks(wait(*keys), WOKEN)
    a.asks(multi_get(*keys), blob(unique_id(2)) + blob(unique_id(1)))
