"""Relays in front of the server under test, and the benchmark that is about them."""

from __future__ import annotations

import pytest

from bench import processes, relays
from bench.scale.scenarios import SCENARIOS
from bench.scale.servers import RANKS_PER_RELAY, Connection, Host, Impossible, Point, hosting, relayed
from bench_factories import run_program
from support import LIMIT
from tcpstore_async.tools.load.scripts import hello


@pytest.mark.parametrize("name", ["init", "barrier-opcode"])
def test_relays_are_a_way_of_the_scale_benchmark(host: Host, name: str) -> None:
    (found,) = SCENARIOS[name].measure(Point(host, "relay", 20, LIMIT))
    assert found.server_cpu > 0
    assert found.relay_cpu is not None
    assert found.relay_cpu > 0


def test_one_process_plays_a_start(host: Host) -> None:
    with pytest.raises(Impossible, match=r"one process plays all ranks, and one relay holds 14,336"):
        SCENARIOS["start"].measure(Point(host, "relay", RANKS_PER_RELAY + 2, LIMIT))


def test_eight_ranks_share_a_link(host: Host) -> None:
    with host.running("uvloop") as server, relayed(server, 32) as behind:
        peers = [Connection(behind.port, LIMIT) for _ in range(32)]
        for peer in peers:
            for step in hello():
                peer.call(step.request, step.reply)
        others = processes.open_files(server.pid) - len(peers) // 8
        assert others < 20
        for peer in peers:
            peer.__exit__()


def test_all_parts_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    with hosting("libuv") as host:
        relays.many(host, 48, 1)
        relays.ratios(host, 24, 2)
        relays.bursts(host, 24, 1)
        relays.relay_processes(host, 64, 1)
        relays.latency(host, 1, 50)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    parts = ["init", "store_based_barrier", "BARRIER"]
    ways = ["libuv, direct", "ours, direct", "1 link", "6 links of 8"]
    assert [(row[1], row[3]) for row in rows if row[0] == "| 1"] == [(way, part) for way in ways for part in parts]
    for name in ("direct", "links of 8", "relay processes of 64", "relay processes of 8", "through a relay"):
        assert any(row[0] == f"| {name}" for row in rows), name


def test_its_options_are_explained() -> None:
    done = run_program("-m", "bench.relays", "--help")
    assert "\n* processes: compares relay processes" in done.stdout
    assert "Must not" not in done.stdout
    assert "Invariant" not in done.stdout
