"""Worlds of real ranks under `install()`: they form, train, and end without a word, whoever leaves first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from marks import exhaustive, thinned
from support import tcpstore_server

Results = Callable[..., list[Any]]

CLIENTS = ["native", "python"]
WAYS_TO_ASK: list[dict[str, Any]] = [{"env": {"USE_LIBUV": "0"}}, {"options": {"query": "?use_libuv=0"}}]
STORES = {"native": "torch._C._distributed_c10d.TCPStore", "python": "tcpstore_async.torch.stores.TCPStore"}


def check(found: list[Any], kinds: list[str]) -> None:
    """Whether a world of `group` or `exercise` has done what it should."""
    world = len(found)
    for rank, (kind, total, paired, gathered) in enumerate(found):
        assert kind == kinds[rank]
        assert total == sum(range(1, world + 1))
        assert paired == (30.0 if rank < 2 else 10.0 * (rank + 1))
        assert gathered == list(range(world))


@pytest.mark.parametrize(
    ("client", "scheme", "last"),
    [
        *product(["native"], ["tcp"], [0, 3]),
        ("python", "tcp", 0),
        exhaustive("python", "tcp", 3),
        exhaustive("native", "env", 0),
        ("python", "env", 3),
        *product(["native"], ["file"], [0, 3]),
    ],
)
def test_a_world_ends_quietly_whoever_leaves_last(results: Results, client: str, scheme: str, last: int) -> None:
    kind = "tcpstore_async.torch.stores.FileStore" if scheme == "file" else STORES[client]
    found = results("group", 4, scheme, options={"last": last}, install={"client": client})
    check(found, [kind] * 4)


def test_eight_ranks_train_to_the_same_losses_as_on_stock_stores(results: Results) -> None:
    stock = results("train", 8)
    assert len({tuple(losses) for losses in stock}) == 8
    for scheme in ("tcp", "file"):  # env:// is tcp:// with another rank 0 and size, as the worlds above show
        assert results("train", 8, scheme, install={"client": "native"}) == stock


@pytest.mark.parametrize(
    ("client", "stock"),
    [("native", [0, 3]), ("python", [1, 3]), exhaustive("native", [1, 3]), exhaustive("python", [0, 3])],
)
def test_a_mixed_world(results: Results, client: str, stock: list[int]) -> None:
    kinds = [STORES["native" if rank in stock else client] for rank in range(4)]
    check(results("group", 4, stock=stock, install={"client": client}), kinds)


@pytest.mark.parametrize(
    ("client", "scheme", "who"),
    [
        *product(CLIENTS, ["tcp"], [{"slow": 0}]),
        ("python", "env", {"slow": 2}),
        ("native", "file", {"slow": 1}),
        exhaustive("native", "env", {"slow": 2}),
        exhaustive("python", "file", {"slow": 1}),
    ],
)
def test_jobs_in_a_row_on_one_address(results: Results, client: str, scheme: str, who: dict[str, Any]) -> None:
    """The fast ranks of a round come before the master has left the last one."""
    assert results("again", 3, scheme, options=who, install={"client": client}) == [[False] * 3] * 3


@pytest.mark.parametrize("client", CLIENTS)
def test_the_next_job_after_one_that_was_killed(ranks: Any, results: Results, client: str) -> None:
    assert [answer["status"] for answer in ranks("killed", 3, install={"client": client})] == [-9] * 3
    check(results("group", 3, install={"client": client}), [STORES[client]] * 3)


@pytest.mark.parametrize(
    ("client", "scheme"), [*product(CLIENTS, ["tcp"]), ("native", "file"), exhaustive("python", "file")]
)
def test_a_group_that_is_never_destroyed(results: Results, client: str, scheme: str, tmp_path: Path) -> None:
    assert results("left_open", 2, scheme, install={"client": client}) == [3.0, 3.0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("client", CLIENTS)
def test_a_device_mesh(results: Results, client: str) -> None:
    module = STORES[client].rpartition(".")[0]
    found = results("meet", 4, "env", install={"client": client})
    assert found == [[module, 1.0], [module, 1.0], [module, 5.0], [module, 5.0]]


@pytest.mark.parametrize(
    ("scheme", "destroy_first", "install"),
    [
        ("tcp", True, {"client": "native"}),
        ("env", False, {"client": "native"}),
        ("tcp", False, {"client": "python"}),
        ("file", True, {"client": "python"}),
        ("env", True, {"classes": True}),
    ],
)
def test_a_group_and_rpc_at_the_same_address(
    results: Results, scheme: str, destroy_first: bool, install: dict[str, Any]
) -> None:
    options = {"destroy_first": destroy_first}
    assert results("group_and_rpc", 3, scheme, options=options, install=install) == [0, 2, 4]


@pytest.mark.parametrize("client", CLIENTS)
def test_rpc_in_a_world_of_unknown_size(results: Results, client: str) -> None:
    assert results("rpc_without_a_size", 1, install={"client": client}) == [0]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_programs_own_rendezvous_keeps_its_store(results: Results, client: str) -> None:
    assert results("own_rendezvous", 3, install={"client": client}) == [6.0] * 3


def test_stores_made_by_a_program_under_classes(results: Results) -> None:
    found = results("direct", 3, install={"classes": True})
    check([["", *one] for one in found], [""] * 3)


@pytest.mark.parametrize("client", CLIENTS)
def test_two_jobs_on_one_running_server(results: Results, client: str) -> None:
    """Every rank is a client; name and attempt keep the jobs apart."""
    with tcpstore_server() as server:
        for job, attempt in (("a", "0"), ("a", "1"), ("b", "0")):
            env = {"TCPSTORE_JOIN": "1", "TCPSTORE_JOB": job, "TCPSTORE_ATTEMPT": attempt}
            found = results("group", 3, options={"port": server.port}, env=env, install={"client": client})
            check(found, [STORES[client]] * 3)


@pytest.mark.parametrize(
    ("client", "way"), thinned(product(CLIENTS, WAYS_TO_ASK), [("native", WAYS_TO_ASK[0]), ("python", WAYS_TO_ASK[1])])
)
def test_the_backend_that_was_asked_for(results: Results, client: str, way: dict[str, Any]) -> None:
    assert results("backend", 1, "env", install={"client": client}, **way) == [[False, "threaded"]]
    more = {**way, "options": {"query": "?use_libuv=1"}}
    assert results("backend", 1, install={"client": client}, **more) == [[True, "uv"]]


def test_a_server_in_a_thread_is_for_our_client_only(ranks: Any, results: Results) -> None:
    env = {"TCPSTORE_SERVER": "thread"}
    (answer,) = ranks("group", 1, env=env, install={"client": "native"})
    assert "using PyTorch's own server" in answer["printed"]
    assert results("left_open", 2, env=env, install={"client": "python"}) == [3.0, 3.0]


# Stores of ours, given to PyTorch

WAYS = {
    "plain": {},
    "store v2": {"GLOO_ENABLE_STORE_V2_API": "1"},
    "store barrier": {"TORCH_DIST_INIT_BARRIER": "1"},
    "debug": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *product(["tcp"], WAYS),
        *product(["prefix", "cpp prefix", "file", "over cpp"], ["plain"]),
        ("cpp prefix", "store v2"),
        exhaustive("prefix", "store v2"),
        exhaustive("file", "debug"),
    ],
)
def test_a_group_over_a_dropped_store(results: Results, kind: str, way: str) -> None:
    with tcpstore_server() as server:
        found = results("given", 3, options={"kind": kind, "port": server.port, "env": WAYS[way]})
    check([["", *one] for one in found], [""] * 3)


@pytest.mark.parametrize("way", ["plain", "store barrier"])
def test_a_hash_store(results: Results, way: str) -> None:
    assert results("given_alone", 1, options={"kind": "hash", "env": WAYS[way]}) == [1.0]
