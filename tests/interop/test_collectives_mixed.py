"""Our ranks and PyTorch's in one barrier, one gather, one sum: the keys are the same."""

from __future__ import annotations

import pytest

from support import LIMIT, server_of
from tcpstore_async import MissingRanksError, TCPStore
from tcpstore_async.collectives import StoreCollectives, barrier, store_based_barrier, synchronize
from torch_forker import Program

THEIRS = """
import datetime, sys, torch, torch.distributed as dist
from torch.distributed.elastic.utils import store as elastic
try:
    from torch._C._distributed_c10d import _StoreCollectives
except ImportError:
    _StoreCollectives = None  # gone in 2.14
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, datetime.timedelta(seconds=60))
dist.distributed_c10d._store_based_barrier(0, store, "g", 2, datetime.timedelta(seconds=60))
elastic.barrier(store, 2, "elastic", 60)
assert elastic.synchronize(store, b"theirs", 0, 2, "sync", 60) == [b"theirs", b"ours"]
store.set("collectives", str(_StoreCollectives is not None))
if _StoreCollectives is not None:
    world = _StoreCollectives(store, 0, 2)
    world.barrier("b")
    world.broadcast_send("cast", "news")
    assert world.gather_recv("gather", "theirs") == [b"theirs", b"ours"]
    assert world.scatter_send("scatter", ["a", "b"]) == b"a"
    assert world.all_gather("all", "theirs") == [b"theirs", b"ours"]
    assert world.all_sum("sum", 3) == 7
print("done")
"""


def meet(world: StoreCollectives) -> None:
    world.barrier("b", LIMIT)
    assert world.broadcast_recv("cast", LIMIT) == b"news"
    world.gather_send("gather", "ours")
    assert world.scatter_recv("scatter", LIMIT) == b"b"
    assert world.all_gather("all", "ours", LIMIT) == [b"theirs", b"ours"]
    assert world.all_sum("sum", 4, LIMIT) == 7


def test_missing_ranks_on_a_store_of_pytorchs() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    for rank in (1, 2, 4):
        store.set(f"b/{rank}", "joined")
    with pytest.raises(MissingRanksError) as caught:
        StoreCollectives(store, 0, 6).barrier("b", 0.05)
    assert caught.value.ranks == [3, 5]


@pytest.mark.parametrize("server", ["ours", "libuv"])
def test_one_world(server: str) -> None:
    with (
        server_of(server) as port,
        Program(THEIRS, port) as theirs,
        TCPStore("127.0.0.1", port, timeout=LIMIT) as store,
    ):
        store_based_barrier(1, store, "g", 2, LIMIT)
        barrier(store, 2, "elastic", LIMIT)
        assert synchronize(store, "ours", 1, 2, "sync", LIMIT) == [b"theirs", b"ours"]
        if store.get("collectives") == b"True":
            meet(StoreCollectives(store, 1, 2))
        assert (theirs.output(), theirs.errors()) == ("done\n", "")
