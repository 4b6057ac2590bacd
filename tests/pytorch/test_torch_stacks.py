"""What can be seen of ranks with PyTorch's own client, and which collectives they have entered."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from support import LIMIT, until
from tcpstore_async.stacks import examine as examining
from tcpstore_async.stacks import flight_recorder, py_spy
from tcpstore_async.stacks.examine import examine
from tcpstore_async.stacks.report import Group
from versions import QUIET, since

pytestmark = pytest.mark.needs_proc

WORLD = 4

PROGRAM = """
import sys, time, torch, torch.distributed as dist
from tcpstore_async.autoload import autoload
autoload()
dist.init_process_group("gloo")
ones = torch.ones(4, 5)
dist.all_reduce(ones)

def loads_data(): time.sleep(1000)

print("ready", flush=True)
if dist.get_rank() == 2:
    loads_data()
dist.broadcast(ones, 0) if sys.argv[1] == "other" and dist.get_rank() == 1 else dist.all_reduce(ones)
dist.barrier()
"""
"""Rank 2 is asleep while the others wait for it, perhaps one of them in another collective."""


def recorded() -> bool:
    """Return whether this PyTorch's flight recorder has the form that is known, and gloo's collectives."""
    return hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")


@pytest.fixture
def world(port: int, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Yield the pids of ranks."""
    with ExitStack() as stack:
        started = []
        for rank in range(WORLD):
            env = {
                **os.environ,
                "TCPSTORE_STACKS": "1",
                "TORCH_FR_BUFFER_SIZE": "100",
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, *QUIET, "-c", PROGRAM, request.param]
            one = subprocess.Popen(command, cwd=tempfile.gettempdir(), env=env, stdout=subprocess.PIPE, text=True)
            stack.enter_context(one)
            stack.callback(one.kill)
            started.append(one)
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield [one.pid for one in started]


def looked(pids: list[int]) -> list[Group]:
    return examine(pids, 2 * LIMIT).groups


def has(group: Group, name: str) -> bool:
    return any(frame.startswith(f"{name} (") for frame in group.doing.frames)


@pytest.fixture(autouse=True)
def only_responders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "_GIL_SECONDS", LIMIT)
    monkeypatch.setattr(py_spy, "find", lambda: "")


@since(2, 5, "autoload")
@pytest.mark.parametrize("world", ["same"], indirect=True)
def test_a_rank_asleep_is_alone(world: list[int]) -> None:
    until(lambda: len(found := looked(world)) == 2 and has(found[1], "all_reduce"))
    odd, others = looked(world)
    assert odd.pids == [world[2]]
    assert odd.doing.frames[0].startswith("loads_data (")
    assert sorted(others.pids) == sorted({*world} - {world[2]})
    assert others.doing.source == "responder"
    if recorded():
        (before,), (now,) = odd.doing.collectives, others.doing.collectives
        assert (before.group, before.name, before.number) == ("default_pg", "all_reduce", 1)
        assert (now.group, now.name, now.number, now.sizes) == ("default_pg", "all_reduce", 2, "[4, 5]")
        assert before.since >= 0


@pytest.mark.skipif(not recorded(), reason="this PyTorch's flight recorder is another")
@pytest.mark.parametrize("world", ["other"], indirect=True)
def test_a_rank_in_another_collective(world: list[int]) -> None:
    """By name: its number is the same."""
    wanted = {"all_reduce": (2, 2), "broadcast": (1, 2), "": (1, 1)}

    def found() -> dict[str, tuple[int, int]]:
        return {
            one.doing.collectives[0].name if one.doing.collectives[0].number > 1 else "": (
                len(one.pids),
                one.doing.collectives[0].number,
            )
            for one in looked(world)
        }

    until(lambda: found() == wanted)


@pytest.mark.skipif(not recorded(), reason="this PyTorch's flight recorder is another")
def test_the_form_of_the_recorders_dump() -> None:
    """Else nothing is said about collectives, and whoever sees this fail makes `flight_recorder` read the new one."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.barrier(dist.new_group([0]))
from tcpstore_async.stacks.flight_recorder import last_collectives
print(*[(one.group, one.name, one.number, one.sizes) for one in last_collectives()], sep="\\n")
"""
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    done = subprocess.run([sys.executable, *QUIET, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["('default_pg', 'all_reduce', 1, '[3]')", "('1', 'barrier', 1, '')"]


def test_without_groups_there_are_no_collectives() -> None:
    assert flight_recorder.last_collectives() == ()
