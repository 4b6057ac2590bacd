"""What follows from replies of NCCL's RAS. They are written after its source: there is no GPU here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from looking import World, environments
from tcpstore_async.diagnosis.ras import Ras, compare_ras, read_ras

ADDRESS = "10.0.0.1"
ACCEPTED = b"SERVER PROTOCOL 2\nOK\nOK\n"


def reply(counts: dict[int, int], absent: dict[int, bool] | None = None, **operations: int) -> bytes:
    """The reply for one communicator; `absent` says of each missing rank whether it is dead."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank, "host": ADDRESS, "pid": 1000 + rank, "cuda_dev": rank, "nvml_dev": rank, "status": status,
            "collective_counts": {"Broadcast": 1, "AllReduce": count, "Send": rank, **operations},
        }
        for rank, count in counts.items()
    ]  # fmt: skip
    missing = [
        {
            "rank": rank, "host": ADDRESS, "pid": 1000 + rank, "cuda_dev": 0, "nvml_dev": 0,
            "status": {"unresponsive": True, "considered_dead": dead},
        }
        for rank, dead in (absent or {}).items()
    ]  # fmt: skip
    communicator = {
        "hash": "0x9c2", "secondary_hash": "0x1:0x2", "size": 8, "ranks_count": len(ranks),
        "missing_ranks_count": len(missing), "ranks": ranks, "missing_ranks": missing,
    }  # fmt: skip
    whole = {
        "nccl_version": "2.29.2", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": "2026-11-28 03:00:00", "communicators_count": 1, "communicators": [communicator],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }  # fmt: skip
    return ACCEPTED + json.dumps(whole, indent=2).encode()


def said(first: bytes, second: bytes, known: bool = True) -> list[str]:
    world = World()
    for client in range(8):
        world.connect(client, host=ADDRESS if known else "10.9.9.9")
    ranks = world.ranks(8, environments(range(8), 8))
    if not known:
        ranks.all = ranks.all * 2
    return list(compare_ras(read_ras(first), read_ras(second), ranks))


def test_a_rank_that_lags_behind() -> None:
    one = reply({rank: 1040 if rank == 5 else 1041 for rank in range(8)})
    text = "of NCCL's communicator 0x9c2 (8 ranks): 1,040 AllReduce, others 1,041"
    assert said(one, one) == [f"rank 5 ({ADDRESS}, pid 1005) {text}"]
    assert said(one, one, known=False) == [f"rank 5 ({ADDRESS}, pid 1005) {text}"]
    several = reply({rank: 1040 if rank in (5, 6, 7) else 1041 for rank in range(8)})
    assert said(several, several) == [f"ranks 5-7 {text}"]


def test_a_rank_that_does_not_answer() -> None:
    one = reply(dict.fromkeys(range(6), 3), {6: False, 7: True})
    of = "of NCCL's communicator 0x9c2 (8 ranks)"
    assert said(one, one) == [
        f"rank 6 ({ADDRESS}, pid 1006) {of} does not answer",
        f"rank 7 ({ADDRESS}, pid 1007) {of} is dead",
    ]


def test_what_changes_says_nothing() -> None:
    first, second = (reply({rank: at + (rank == 5) for rank in range(8)}, {9: False} if at else {}) for at in (0, 1))
    assert said(first, second) == []
    assert said(ACCEPTED + b'{"communicators": []}', second) == []
    empty = reply({})
    assert said(empty, empty) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\nNCCL version 2.24.3 compiled with CUDA 12.8\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n\r\n",
        ACCEPTED + b"Job summary\n",
        ACCEPTED + b'{"communicators": [{"hash": 5}]}',
        ACCEPTED + b'{"communicators": ["\xff"]}',
        ACCEPTED + b'{"more": ' + b"[" * 100_000,
    ],
)
def test_another_form_says_nothing(raw: bytes) -> None:
    assert read_ras(raw) == Ras()
