"""Imports PyTorch once and forks ranks: reads one JSON job a line, answers each with what its ranks did.

A job is {"scenario": name, "world": number of ranks, "options": of the scenario, "stock": ranks that do without
`install`, "install": its arguments, "env": more environment}. A rank answers with what its scenario returns, with what
it printed, and with its exit status: it ends as any program does, so that what happens at the exit happens here too.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tcpstore_async
import tcpstore_async.torch

rpc: Any = dist.rpc
MINUTE = timedelta(seconds=30)
PATIENCE = 60.0
"""Seconds until the ranks of a job are killed."""


class Rank:
    """Who a rank is, and where its world meets."""

    def __init__(self, rank: int, world: int, options: dict[str, Any]) -> None:
        self.rank = rank
        self.world = world
        self.options = options

    def url(self, more: str = "") -> str:
        scheme, ports = self.options["scheme"], self.options.get("ports", [self.options.get("port")])
        port = ports[self.rank % len(ports)]
        if scheme == "file":
            return f"file://{self.options['path']}"
        if scheme == "env":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world))
            return f"env://{more}"
        return f"tcp://127.0.0.1:{port}{more}"

    def join(self, more: str = "") -> None:
        url = self.url(more or self.options.get("query", ""))
        ranks: Any = {} if url.startswith("env") else {"rank": self.rank, "world_size": self.world}
        dist.init_process_group("gloo", init_method=url, timeout=MINUTE, **ranks)

    def base_store(self) -> Any:
        """The store under those that PyTorch puts around it."""
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store


def leave_together(group: Any = None) -> None:
    """The end of a job, where a group was made last: gloo fails a rank that connects yet to one that has left."""
    dist.barrier(group)
    dist.destroy_process_group()


def exercise(me: Rank) -> list[Any]:
    """What a job does with a process group."""
    tensor = torch.tensor([float(me.rank + 1)])
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1])
    other = torch.tensor([10.0 * (me.rank + 1)])
    if me.rank < 2:
        dist.all_reduce(other, group=pair)
    gathered = [torch.zeros(1) for _ in range(me.world)]
    dist.all_gather(gathered, torch.tensor([float(me.rank)]))
    dist.monitored_barrier(timeout=MINUTE)  # last: with DETAIL, PyTorch's own count differs on rank 0 after it
    return [tensor.item(), other.item(), [one.item() for one in gathered]]


def group(me: Rank) -> Any:
    """A group, some work, and the end; `last` says who leaves last, after the others have."""
    me.join()
    store = type(me.base_store())
    found = exercise(me)
    if me.rank == me.options.get("last"):
        time.sleep(0.5)
    dist.destroy_process_group()
    return [f"{store.__module__}.{store.__name__}", *found]


def train(me: Rank) -> list[float]:
    """The losses of a small DDP training."""
    me.join()
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(me.rank)
    losses = []
    for _ in range(5):
        data = torch.rand(8, 4, generator=generator)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    exercise(me)
    dist.destroy_process_group()
    return losses


def collectives(me: Rank) -> dict[str, Any]:
    """What each collective of gloo gives this rank, in the world's group and in one of all but rank 0."""
    without_numpy()
    me.join()
    store = me.base_store()
    found: dict[str, Any] = {"client": [type(store).__module__, store.host, store.port]}
    others = dist.new_group(list(range(1, me.world)), timeout=MINUTE)
    found["world"] = every_collective(me.rank, list(range(me.world)), None)
    if me.rank:
        found["others"] = every_collective(me.rank, list(range(1, me.world)), others)
        dist.barrier(others)
    dist.monitored_barrier(timeout=MINUTE, wait_all_ranks=True)
    if me.rank:
        dist.destroy_process_group(others)
    leave_together()
    return found


def every_collective(rank: int, ranks: list[int], group: Any) -> dict[str, Any]:
    """What this rank receives, where rank n sends n; `ranks` are the group's."""
    first, last, place, size = ranks[0], ranks[-1], ranks.index(rank), len(ranks)

    def mine() -> torch.Tensor:
        return torch.tensor([float(rank)])

    def each() -> list[torch.Tensor]:
        return [torch.zeros(1) for _ in ranks]

    found: dict[str, Any] = {}
    for name in ("SUM", "MAX", "PRODUCT"):
        dist.all_reduce(value := mine(), getattr(dist.ReduceOp, name), group=group)
        found[f"all_reduce {name}"] = value.item()
    dist.broadcast(value := mine(), last, group=group)
    found["broadcast"] = value.item()
    dist.reduce(value := mine(), first, group=group)
    found["reduce"] = value.item() if rank == first else None  # what the others have is not defined
    dist.all_gather(values := each(), mine(), group=group)
    found["all_gather"] = torch.cat(values).tolist()
    collected = each() if rank == last else None
    dist.gather(mine(), collected, last, group=group)
    found["gather"] = None if collected is None else torch.cat(collected).tolist()
    parts = [torch.tensor([10.0 * n]) for n in ranks] if rank == first else None
    dist.scatter(value := mine(), parts, first, group=group)
    found["scatter"] = value.item()
    dist.all_to_all_single(value := torch.zeros(size), mine().repeat(size), group=group)
    found["all_to_all_single"] = value.tolist()
    work = dist.isend(mine(), ranks[(place + 1) % size], group=group)
    dist.recv(value := mine(), ranks[place - 1], group=group)
    assert work is not None
    work.wait()
    found["send, recv"] = value.item()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    found["all_gather_object"] = objects
    objects = [rank]
    dist.broadcast_object_list(objects, first, group=group)
    found["broadcast_object_list"] = objects
    dist.all_reduce(value := mine(), group=group, async_op=True).wait()
    found["async_op"] = value.item()
    return found


def again(me: Rank) -> Any:
    """Several jobs one after the other on the same address; whoever is `slow` comes to the end of each late."""
    seen = []
    for job in range(me.options.get("jobs", 3)):
        me.join()
        store = me.base_store()
        seen.append(store.check(["from the job before"]))
        del store
        found = exercise(me)
        assert found[0] == sum(range(1, me.world + 1)), found
        if me.rank == 1:
            me.base_store().set("from the job before", str(job))
        if me.rank == me.options.get("slow"):
            time.sleep(0.4)
        dist.destroy_process_group()
    return seen


def left_open(me: Rank) -> Any:
    """A job whose group nobody destroys."""
    me.join()
    return exercise(me)[0]


def killed(me: Rank) -> None:
    """A job that dies all at once."""
    me.join()
    exercise(me)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def meet(me: Rank) -> Any:
    """A device mesh that makes the process group."""
    me.url()
    mesh = init_device_mesh("cpu", (2, me.world // 2), mesh_dim_names=("a", "b"))
    tensor = torch.tensor([float(me.rank)])
    dist.all_reduce(tensor, group=mesh.get_group("b"))
    store = type(me.base_store()).__module__
    leave_together()
    return [store, tensor.item()]


class Bytes(bytes):
    """The one thing that RPC wants of a numpy array, which may not be installed."""

    def tobytes(self) -> bytes:
        return self


def without_numpy() -> None:
    if importlib.util.find_spec("numpy") is None:
        cast(Any, torch.Tensor).numpy = lambda tensor, **_: Bytes(tensor.tolist())


def double(number: int) -> int:
    return 2 * number


def group_and_rpc(me: Rank) -> Any:
    """A process group and RPC that meet at the same address."""
    without_numpy()
    me.join()
    options = rpc.TensorPipeRpcBackendOptions(init_method=me.url(), rpc_timeout=60)
    rpc.init_rpc(f"rank{me.rank}", rank=me.rank, world_size=me.world, rpc_backend_options=options)
    found = rpc.rpc_sync(f"rank{(me.rank + 1) % me.world}", double, args=(me.rank,))
    before = me.options.get("destroy_first")
    if before:
        dist.barrier()
        dist.destroy_process_group()
    rpc.shutdown()
    if not before:
        exercise(me)
        dist.destroy_process_group()
    return found


def rpc_without_a_size(me: Rank) -> Any:
    """RPC in a world that grows."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=me.url(), rpc_timeout=60)
    rpc.init_rpc(f"rank{me.rank}", rank=me.rank, rpc_backend_options=options)
    name = f"rank{me.rank}"
    found = rpc.rpc_sync(name, double, args=(me.rank,))
    rpc.shutdown()
    return found


# Stores of ours that are given to PyTorch


def made(me: Rank, kind: str) -> Any:
    """A store of ours of this kind, with no reference but the caller's."""
    if kind == "tcp":
        return tcpstore_async.torch.TCPStore("127.0.0.1", me.options["port"], timeout=MINUTE)
    if kind == "file":
        return tcpstore_async.torch.FileStore(me.options["path"], me.world)
    if kind == "prefix":
        return tcpstore_async.torch.PrefixStore("p", made(me, "tcp"))
    if kind == "cpp prefix":
        return dist.PrefixStore("c", made(me, "tcp"))
    if kind == "over cpp":
        cpp = dist.TCPStore("127.0.0.1", me.options["port"], None, False, MINUTE, wait_for_workers=False)
        return tcpstore_async.torch.PrefixStore("o", cpp)
    assert kind == "hash"
    return tcpstore_async.torch.HashStore()


def join_over(me: Rank) -> None:
    """A group over a store that Python forgets at once."""
    os.environ.update(me.options["env"])
    dist.set_debug_level_from_env()
    store = made(me, me.options["kind"])
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world, timeout=MINUTE)
    del store
    gc.collect()


def given(me: Rank) -> Any:
    join_over(me)
    found = exercise(me)
    leave_together(dist.new_group(list(range(me.world))))
    return found


def given_alone(me: Rank) -> Any:
    join_over(me)
    tensor = torch.tensor([1.0])
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=dist.new_group([0]))
    dist.destroy_process_group()
    return tensor.item()


def backend(me: Rank) -> Any:
    """Whether the client has chosen libuv, and what kind of server it got."""
    me.join()
    store = me.base_store()
    (server,) = [json.loads(text) for text in server_info(me)]
    leave_together()
    return [store.libuvBackend, server["backend"]]


def server_info(me: Rank) -> list[str]:
    """What `tcpstore info` prints about the server."""
    url = f"tcp://127.0.0.1:{me.options['port']}"
    command = [sys.executable, "-m", "tcpstore_async", "info", "--url", url, "-o", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()


# Stores of PyTorch's that are ours


def direct(me: Rank) -> Any:
    """Stores that a program makes itself, under `classes`."""
    assert cast(Any, dist.TCPStore) is tcpstore_async.torch.TCPStore
    store = dist.TCPStore("127.0.0.1", me.options["port"], me.world, me.rank == 0, MINUTE)
    assert isinstance(store, dist.Store)
    assert isinstance(store, dist.TCPStore)
    dist.init_process_group("gloo", store=dist.PrefixStore("x", store), rank=me.rank, world_size=me.world)
    del store
    gc.collect()
    found = exercise(me)
    dist.destroy_process_group()
    return found


def own_rendezvous(me: Rank) -> Any:
    """A program that meets by itself, makes a group of the store, and uses the store after the group is gone."""
    store, rank, world = next(dist.rendezvous(me.url(), me.rank, me.world, timeout=MINUTE))
    dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=world)
    found = exercise(me)
    dist.destroy_process_group()
    store.add("after", 1)
    if me.rank == 0:
        while int(store.get("after")) < world:
            time.sleep(0.01)
        store.set("done", "")
    store.wait(["done"])
    return found[0]


# Running them

SCENARIOS: dict[str, Callable[[Rank], Any]] = {
    function.__name__: function
    for function in (
        group,
        train,
        collectives,
        again,
        left_open,
        killed,
        meet,
        group_and_rpc,
        rpc_without_a_size,
        given,
        given_alone,
        backend,
        direct,
        own_rendezvous,
    )
}


def be(me: Rank, job: dict[str, Any], answer: int) -> NoReturn:
    """Be one rank, and end as a program ends."""
    for name, value in job.get("env", {}).items():
        os.environ[name] = value
    try:
        if me.rank not in job.get("stock", []) and "install" in job:
            tcpstore_async.torch.install(**job["install"])
        found: Any = {"result": SCENARIOS[job["scenario"]](me)}
    except BaseException:
        found = {"error": traceback.format_exc()}
    with os.fdopen(answer, "w") as file:
        json.dump(found, file)
    sys.exit("error" in found)


class Forked:
    """One rank, as its parent sees it."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self.printed, name = tempfile.mkstemp()
        os.unlink(name)
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(self.printed, 1)
            os.dup2(self.printed, 2)
            faulthandler.register(signal.SIGUSR1)
            sys.stdin.close()
            be(Rank(rank, job["world"], job.get("options", {})), job, writing)
        os.close(writing)

    def end(self, deadline: float) -> dict[str, Any]:
        """Its answer, once it has ended, which is by force at the deadline."""
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGUSR1)  # it prints its stack
                time.sleep(1)
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        with os.fdopen(self.reading, "rb") as file:
            text = file.read()
        answer: dict[str, Any] = json.loads(text) if text else {}
        os.lseek(self.printed, 0, os.SEEK_SET)
        with os.fdopen(self.printed, "rb") as file:
            answer["printed"] = file.read().decode(errors="replace")
        answer["status"] = os.waitstatus_to_exitcode(ended[1])
        return answer


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # no rank needs to look at what all have in common
    warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")  # RPC's own use of it
    logging.getLogger("tcpstore_async.stores").addFilter(lambda record: "TCPSTORE_JOIN" not in record.msg)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [Forked(rank, job) for rank in range(job["world"])]
        deadline = time.monotonic() + PATIENCE
        print(json.dumps([rank.end(deadline) for rank in ranks]), flush=True)


if __name__ == "__main__":
    main()
