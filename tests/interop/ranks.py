"""Imports PyTorch once and forks ranks: reads one JSON job a line, answers each with the results of its ranks.

A job is {"scenario": name, "world": number of ranks, "port": of the server}. A rank that raises answers with its text.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MINUTE = timedelta(seconds=60)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def client(port: int, **options: Any) -> Any:
    return dist.TCPStore("127.0.0.1", port, None, False, MINUTE, wait_for_workers=False, **options)


def exercise(rank: int, world: int) -> Any:
    """What a job does with a process group."""
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    dist.barrier()
    pair = dist.new_group([0, 1])
    other = torch.tensor([10.0 * (rank + 1)])
    if rank < 2:
        dist.all_reduce(other, group=pair)
    gathered = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    dist.monitored_barrier(timeout=MINUTE)  # last: with DETAIL, PyTorch's own count differs on rank 0 after it
    if VERSION >= (2, 8):  # before, gloo hangs in it every now and then, on PyTorch's own server too
        dist.destroy_process_group()
    return [tensor.item(), other.item(), [one.item() for one in gathered]]


def group(rank: int, world: int, port: int) -> Any:
    store = client(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=MINUTE)
    return exercise(rank, world)


def group_with_store_barrier(rank: int, world: int, port: int) -> Any:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    result = group(rank, world, port)
    store = client(port)
    assert store.get("store_based_barrier_key:0") == str(world).encode()
    store.wait(["store_based_barrier_key:0:last_worker"], MINUTE)
    return result


def group_with_debug(rank: int, world: int, port: int) -> Any:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    return group(rank, world, port)


def group_with_store_v2(rank: int, world: int, port: int) -> Any:
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"
    return group(rank, world, port)


def stock_world(rank: int, world: int, port: int) -> Any:
    """`env://` as under torchrun: every rank is a client, announces itself and goes on."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    dist.init_process_group("gloo", timeout=MINUTE)
    return exercise(rank, world)


def barrier(store: Any, key: str, world: int) -> None:
    """The store's, which PyTorch has since 2.12, or what is like it."""
    if hasattr(store, "barrier"):
        store.barrier(key, world)
    elif store.add(key, 1) == world:
        store.set(f"{key}/last_member", "1")
    else:
        store.wait([f"{key}/last_member"])


def push(store: Any, key: str, item: str) -> None:
    """Queues are there since PyTorch 2.8; before, a key takes their place."""
    (store.queue_push if hasattr(store, "queue_push") else store.set)(key, item)


def pop(store: Any, key: str) -> Any:
    return (store.queue_pop if hasattr(store, "queue_pop") else store.get)(key)


def master_waits(rank: int, world: int, port: int) -> Any:
    """Rank 0 finds the port in use, becomes a client of the agent's store and waits for all workers."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="1", MASTER_PORT=str(port))
    store: Any = dist.TCPStore("127.0.0.1", port, world, rank == 0, MINUTE)
    joined = store.num_keys()
    barrier(store, "joined", world)
    assert "server=<nullptr>" in repr(store)
    return joined


def blocked(rank: int, world: int, port: int) -> Any:
    """Ranks above 0 block in one call each; rank 0 wakes them once they are parked, as far as can be seen."""
    store = client(port)
    if rank == 0:
        store.wait([f"rank {i}" for i in range(1, world)])
        for i in range(1, world):
            wait_until_polling(int(store.get(f"rank {i}")))
        store.set("first", "1")
        store.set("value", "got")
        push(store, "queue", "item")
        store.set("second", "2")
        barrier(store, "meet", 2)
        store.append("appended", "a")
        store.add("added", 3)
        store.multi_set(["many 1", "many 2"], ["x", "y"])
        return "woke"
    store.set(f"rank {rank}", str(os.getpid()))
    calls: list[Callable[[], Any]] = [
        lambda: store.get("value").decode(),
        lambda: store.wait(["first", "second"]),
        lambda: pop(store, "queue").decode(),
        lambda: barrier(store, "meet", 2),
        lambda: store.get("appended").decode(),
        lambda: store.get("added").decode(),
        lambda: [value.decode() for value in store.multi_get(["many 1", "many 2"])],
    ]
    return calls[rank - 1]()


def wait_until_polling(pid: int) -> None:
    """Wait until the process is inside poll(2), where PyTorch's client waits; not at all where that cannot be seen."""
    with contextlib.suppress(OSError):
        path = f"/proc/{pid}/syscall"
        poll = {"x86_64": "7", "aarch64": "73"}.get(os.uname().machine)
        while poll is not None:
            with open(path) as file:
                if file.read().split()[0] == poll:
                    return


SCENARIOS = {
    function.__name__: function
    for function in (
        group,
        group_with_store_barrier,
        group_with_debug,
        group_with_store_v2,
        stock_world,
        master_waits,
        blocked,
    )
}


def run(scenario: str, world: int, ports: list[int]) -> list[Any]:
    ranks = []
    for rank in range(world):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                answer: Any = {"result": SCENARIOS[scenario](rank, world, ports[rank % len(ports)])}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            with os.fdopen(writing, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(writing)
        ranks.append((pid, reading))
    answers = []
    for pid, reading in ranks:
        with os.fdopen(reading) as file:
            text = file.read()
        os.waitpid(pid, 0)
        answers.append(json.loads(text) if text else {"error": "the rank died"})
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # where gloo says who is connected, since PyTorch 2.8 or so
        for line in sys.stdin:
            print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
