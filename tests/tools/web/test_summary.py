"""What the page is told of a job."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from web.scenes import large_reply

from looking import World
from tcpstore_async.diagnosis.facts import read_facts
from tcpstore_async.diagnosis.stock_ranks import Ranks, number_ranges
from tcpstore_async.tools.web.summary import MOST_RANKS, Summary


def summary(world: World) -> Summary:
    facts = world.facts()
    return Summary(facts, Ranks(facts, {}, None))


def look(world: World) -> Any:
    return json.loads(summary(world).encoded)


def job(ranks: range, size: int) -> World:
    world = World()
    for rank in ranks:
        world.connect(rank)
        world.introduce(rank, rank=str(rank), world_size=str(size), host=f"node-{rank // 4}")
    return world


def test_a_state_for_each_rank() -> None:
    world = job(range(1, 8), 10)
    world.leave(7)
    world.set(1, b"/step_1")
    world.store_based_barrier(range(1, 6))
    world.wait(6, b"/step_2")
    found = look(world)
    assert (found["world_size"], found["joined"]) == (10, 7)
    assert found["ranks"] == "m1w5l1m3"
    assert found["counts"] == {"j": 0, "w": 5, "l": 1, "m": 4, "g": 0, "n": 0}
    join, barrier = found["pending"]
    assert (join["kind"], join["missing"]) == ("join", "0, 8–9")
    assert (barrier["key"], barrier["missing"]) == ("store_based_barrier_key:default_pg", "0, 6–9")
    [rank] = barrier["elsewhere"]
    assert (rank["rank"], rank["host"], rank["does"]) == (6, "node-1", "is waiting for step_2")
    near = next(one for one in found["waits"] if one["key"] == "step_2")
    assert near["nearest"][0]["key"] == "step_1"


def test_who_does_not_wait_and_who_has_left() -> None:
    world = job(range(4), 4)
    world.leave(2)
    found = summary(world)
    assert json.loads(found.encoded)["ranks"] == "j2g1j1"
    connected, left = found.detail(1), found.detail(2)
    assert connected is not None
    assert left is not None
    assert (connected.host, connected.does) == ("node-0", "has sent nothing since INTRODUCE")
    assert left.does == "has left"
    assert found.detail(4) is None


def test_numbers_in_a_group_are_not_taken_for_ranks_of_the_job() -> None:
    world = job(range(8), 8)
    for rank in (4, 5):
        world.set(rank, b"/group/exchange/%d" % (rank - 4))
        world.wait(rank, b"/group/exchange/0", b"/group/exchange/1", b"/group/exchange/2")
    found = look(world)
    assert found["ranks"] == "j4w2j2"
    assert [one["missing"] for one in found["pending"]] == ["2"]


def test_processes_whose_rank_is_not_known() -> None:
    world = World()
    for client in range(5):
        world.connect(client)
    world.wait(3, b"/never")
    found = look(world)
    assert (found["world_size"], found["ranks"], found["unnamed"]) == (None, "", "j4w1")


def test_an_empty_server() -> None:
    found = look(World())
    assert (found["ranks"], found["pending"], found["waits"]) == ("", [], [])


@pytest.mark.parametrize("size", ["262145", "999999999"])
def test_a_size_that_a_peer_has_made_up(size: str) -> None:
    world = World()
    world.connect(0)
    world.introduce(0, rank="0", world_size=size)
    found = look(world)
    assert (found["world_size"], found["ranks"]) == (None, "j1")


def test_a_rank_that_a_peer_has_made_up() -> None:
    world = World()
    world.connect(0)
    world.introduce(0, rank="999999999")
    assert sum(look(world)["counts"].values()) == MOST_RANKS


def test_what_is_sent_is_bounded() -> None:
    """However many keys are waited for, however long they are."""
    world = World()
    for client in range(600):
        world.connect(client)
        world.wait(client, b"/%d/" % client + b"<k>" * 2000 + b"/" + b"x" * client)
    found = summary(world)
    assert len(found.encoded) < 200_000
    answer = json.loads(found.encoded)
    assert answer["more_waits"] == 600 - len(answer["waits"])
    assert all(len(one["key"]) <= 301 for one in answer["waits"])


def test_98304_ranks() -> None:
    absent = frozenset({5, 77, 4000, 50_000, 50_001, 60_000, 98_303})
    facts = read_facts(large_reply(98_304, absent))
    found = Summary(facts, Ranks(facts, {}, None))
    answer = json.loads(found.encoded)
    assert len(found.encoded) < 4000
    assert answer["counts"] == {"j": 0, "w": 98_297, "l": 0, "m": 7, "g": 0, "n": 0}
    assert answer["ranks"] == "w5m1w71m1w3922m1w45999m2w9998m1w38302m1"
    assert {one["missing"] for one in answer["pending"]} == {"5, 77, 4000, 50000–50001, 60000, 98303"}
    assert [found.detail(number) is None for number in (0, 5, 6, 98_302, 98_303)] == [False, True, False, False, True]


def test_ranges() -> None:
    assert number_ranges([]) == ""
    assert number_ranges([3]) == "3"
    assert number_ranges([5, 0, 1, 2, 7, 6, 4], "–") == "0–2, 4–7"
    assert number_ranges(range(0, 100, 2)).endswith("62 and 18 more ranges")


def test_text_is_json_whatever_it_is() -> None:
    world = World()
    world.connect(0)
    strange = '/"</script>\x00\x1b[31m\u202e\ufeff'
    world.wait(0, strange.encode())
    assert look(world)["waits"][0]["key"] == strange[1:]
    assert msgspec.json.decode(summary(world).encoded)
