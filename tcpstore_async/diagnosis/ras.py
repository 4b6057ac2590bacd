"""What NCCL says of a job: the replies of its RAS subsystem (NCCL 2.28 or later), which knows all ranks.

Knows the reply's form, the JSON of `SET FORMAT json`. Must not know sockets. Invariant: a reply of any other form says
nothing, and neither does what changes from one reply to the next.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from .stock_ranks import Rank, Ranks, number_ranges

REQUEST: Final = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nSTATUS\n"
"""For one connection, which ends with the reply."""

_ACCEPTED: Final = 3
"""Lines before the JSON."""

_BETWEEN_TWO: Final = ("Send", "Recv")
"""Beginnings of the names of operations that not all ranks of a communicator make."""


_MOST_OPERATIONS: Final = 64
"""NCCL has fewer."""


class _Member(msgspec.Struct):
    rank: int
    host: str
    """Its address."""
    pid: int
    collective_counts: dict[str, int]


class _State(msgspec.Struct):
    considered_dead: bool


class _Absent(msgspec.Struct):
    rank: int
    host: str
    pid: int
    status: _State


class _Communicator(msgspec.Struct):
    hash: str
    size: int
    ranks: list[_Member]
    missing_ranks: list[_Absent]


class Ras(msgspec.Struct):
    """A reply."""

    communicators: list[_Communicator] = []


def read_ras(raw: bytes) -> Ras:
    """Decode a reply; an empty one stands for any other form."""
    *lines, text = raw.split(b"\n", _ACCEPTED)
    if not lines or not lines[0].startswith(b"SERVER PROTOCOL ") or lines[1:] != [b"OK", b"OK"]:
        return Ras()
    try:
        return msgspec.json.decode(text, type=Ras)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Ras()


def compare_ras(first: Ras, second: Ras, ranks: Ranks) -> Iterator[str]:
    """Yield, in words, which ranks lag behind in a communicator, or do not answer, in both replies."""
    before = {one.hash: one for one in first.communicators}
    by_pid: dict[int | None, list[Rank]] = defaultdict(list)
    for rank in ranks.all:
        by_pid[rank.pid].append(rank)
    for one in second.communicators:
        was = before.get(one.hash)
        if was is None:
            continue
        of = f"of NCCL's communicator {one.hash} ({one.size} ranks)"
        silent = {(absent.host, absent.pid) for absent in was.missing_ranks}
        for absent in one.missing_ranks:
            if (absent.host, absent.pid) in silent:
                does = "is dead" if absent.status.considered_dead else "does not answer"
                yield f"{_name(absent, by_pid)} {of} {does}"
        yield from _behind(was.ranks, one.ranks, of, by_pid)


def _behind(was: list[_Member], now: list[_Member], of: str, by_pid: dict[int | None, list[Rank]]) -> Iterator[str]:
    counted = {member.rank: member.collective_counts for member in was}
    for operation in islice(now[0].collective_counts if now else (), _MOST_OPERATIONS):
        counts = {member.rank: member.collective_counts.get(operation, 0) for member in now}
        most = max(counts.values())
        if operation.startswith(_BETWEEN_TWO) or any(
            counted.get(rank, {}).get(operation) != count for rank, count in counts.items()
        ):
            continue
        late: dict[int, list[_Member]] = defaultdict(list)
        for member in now:
            if counts[member.rank] < most:
                late[counts[member.rank]].append(member)
        for count, members in late.items():
            who = _name(members[0], by_pid)
            if len(members) > 1:
                who = f"ranks {number_ranges(member.rank for member in members)}"
            yield f"{who} {of}: {count:,} {operation}, others {most:,}"


def _name(member: _Member | _Absent, by_pid: dict[int | None, list[Rank]]) -> str:
    """Return the name of the process, with its rank in the job if the store knows it, else with that in NCCL."""
    found = by_pid.get(member.pid, [])
    there = [rank for rank in found if any(member.host in (one.host, one.link) for one in rank.sessions)]
    if len(there or found) == 1:  # a host has several addresses
        return str((there or found)[0])
    return f"rank {member.rank} ({member.host}, pid {member.pid})"
