"""The scenario `start`: what ranks send, over sockets and in memory."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest

from bench import processes
from bench.scale import in_memory
from bench.scale.in_memory import measure_start, without_sockets
from bench.scale.scenarios import start
from bench.scale.servers import Host, Impossible, Point, load_cores
from bench.scale.start import BACKENDS, GROUP, PRESETS, Group, Pattern, in_order_of_arrival, playing, traffic
from support import LIMIT
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.tools.load.generator import LoadError
from tcpstore_async.wire.commands import BY_OPCODE

GROUPS = (Group(2, 4, "nccl2"), Group(1, 130, "nccl"), Group(2, 3, "gloo"))


def commands(pattern: Pattern, ranks: int, rank: int) -> Counter[str]:
    """Return what a rank sends after it has joined."""
    names = [BY_OPCODE[action.request[0]] for action in traffic(pattern, ranks).actions if action.sent_by(rank)]
    return Counter(command.name for command in names if command)


@pytest.mark.parametrize(
    ("pattern", "ranks", "root", "other"),
    [
        (Pattern("nccl2"), 100, {"SET": 1, "WAIT": 2, "MULTI_GET": 1}, {"WAIT": 2, "MULTI_GET": 1}),
        (Pattern("nccl2"), 1000, {"SET": 1, "WAIT": 2, "MULTI_GET": 1}, {"WAIT": 2, "MULTI_GET": 1}),
        (Pattern("nccl"), 100, {"SET": 1}, {"WAIT": 1, "GET": 1}),
        (Pattern("nccl"), 1000, {"SET": 1, "WAIT": 1, "MULTI_GET": 1}, {"WAIT": 1, "MULTI_GET": 1}),
        (Pattern("gloo"), 10, {"SET": 1, "WAIT": 20, "GET": 10}, {"SET": 1, "WAIT": 20, "GET": 10}),
        (
            PRESETS["megatron"].pattern, 16_384,
            {"SET": 15, "WAIT": 26 + 2048, "MULTI_GET": 13, "GET": 1024},
            {"SET": 2, "WAIT": 26 + 2048, "MULTI_GET": 13, "GET": 1024},
        ),
    ],
)  # fmt: skip
def test_what_a_rank_sends(pattern: Pattern, ranks: int, root: dict[str, int], other: dict[str, int]) -> None:
    assert commands(pattern, ranks, 0) == root
    assert commands(pattern, ranks, 5) == other


def test_replies_of_a_large_job() -> None:
    """768 IDs of 128 bytes, with their lengths, for each of 98,304 ranks."""
    reply = max(action.reply_bytes for action in traffic(Pattern(), 98_304).actions)
    assert reply == 768 * 136


def test_members_of_a_group_have_names_of_their_own() -> None:
    requests = [
        action for action in traffic(Pattern("nccl2", (Group(1, 4, "gloo"),)), 10).actions if GROUP in action.request
    ]
    assert b"/default_pg/0//0.0.00000001//cpu//0/00000003" in requests[0].of(7)
    assert len({requests[0].of(rank) for rank in range(8)}) == 8
    assert not requests[0].sent_by(8)  # two ranks make no group


def test_every_rank_but_0_arrives_once() -> None:
    for roots_last in (False, True):
        assert sorted(in_order_of_arrival(1000, roots_last)) == list(range(1, 1000))
    assert sorted(in_order_of_arrival(1000, True)[-7:]) == [128, 256, 384, 512, 640, 768, 896]


def test_a_pattern_is_parsed_as_it_is_written() -> None:
    pattern = Pattern.of("nccl", "12x128,2x512:gloo")
    assert pattern == Pattern("nccl", (Group(12, 128, "nccl"), Group(2, 512, "gloo")))
    assert Pattern.of(*pattern.words) == pattern


@pytest.mark.parametrize(
    ("backend", "groups"), [("mpi", ""), ("nccl2", "x4"), ("nccl2", "0x4"), ("nccl2", "1x4:mpi"), ("torchrun", "1x4")]
)
def test_a_wrong_pattern(backend: str, groups: str) -> None:
    with pytest.raises(ValueError, match=r"is not (one of|COUNTxSIZE)"):
        Pattern.of(backend, groups)


@pytest.mark.parametrize("roots_last", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_in_memory(backend: str, roots_last: bool) -> None:
    ranks = 20 if backend == "gloo" else 300
    found = measure_start(Pattern(backend, GROUPS if ranks > 130 and backend != "torchrun" else ()), ranks, roots_last)
    assert found["operations"] == ranks
    assert found["parked"] == ranks - 1
    assert found["cpu"] > 0
    assert found["copy_cpu"] > 0


def test_a_group_larger_than_the_job(host: Host) -> None:
    pattern = Pattern("nccl2", (Group(1, 8, "gloo"),))
    with pytest.raises(Impossible, match="4 ranks are less than a group of 8"):
        start(Point(host, "uvloop", 4, LIMIT), pattern)
    with pytest.raises(Impossible, match="4 ranks are less than a group of 8"):
        without_sockets("start", 4, LIMIT, pattern.words)


@pytest.mark.parametrize(
    ("backend", "server"), [*((backend, "uvloop") for backend in BACKENDS), ("nccl2", "libuv"), ("torchrun", "libuv")]
)
def test_a_start_over_sockets(host: Host, backend: str, server: str) -> None:
    if server == "libuv":
        pytest.importorskip("torch")
    ranks = 20 if backend == "gloo" else 300
    pattern = Pattern(backend, GROUPS if ranks > 130 and backend != "torchrun" else ())
    [found] = start(Point(host, server, ranks, LIMIT), pattern, 0.1)
    assert found.operations == ranks
    assert found.wall > 0
    assert found.server_cpu > 0


def test_a_wrong_reply_ends_a_start(host: Host) -> None:
    plan = traffic(Pattern(), 4)
    wrong = [plan.joining[0]._replace(reply=b"nope"), *plan.joining[1:]]
    with (
        host.running("uvloop") as server,
        pytest.raises(LoadError, match="the load generator failed: wrong reply: Protocol error"),
        playing(server.port, wrong, 3, 0.0, load_cores()) as player,
    ):
        player.result(LIMIT)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(processes, "load_generator", missing)
    with pytest.raises(LoadError, match="the load generator needs a C compiler"), playing(1, [], 3, 0.0, {0}):
        pass


def test_a_start_in_memory_fails_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "Limits", lambda: Limits(budget_bytes=9 * MIB))
    with pytest.raises(SystemExit, match=r"a limit was reached: .*budget_bytes="):
        measure_start(Pattern(), 10_000, True)
