"""Names of keys with a known meaning: one key per rank, counters of barriers, IDs of NCCL.

Knows how PyTorch, gloo and NCCL name keys, in stored form. Must not know sessions.
"""

import re
from typing import Final

from ..base.keys import BARRIER_LAST, BARRIER_MEMBERS, COLLECTIVE_LAST, GROUP_BARRIER, GROUP_BARRIER_LAST
from ..observe.similar_keys import Family
from ..wire.commands import WORKERS_KEY

JOIN_COUNTER: Final = WORKERS_KEY.decode()

_MEMBERS: Final = BARRIER_MEMBERS.decode()
_LAST: Final = (BARRIER_LAST.decode(), COLLECTIVE_LAST.decode())
_GROUP: Final = GROUP_BARRIER.decode()
_GROUP_LAST: Final = GROUP_BARRIER_LAST.decode()

_NCCL2: Final = re.compile(r"(.*/nccl_storekey_\d+)(?:_(\d+))?", re.DOTALL | re.ASCII)
_NCCL_ID: Final = re.compile(r"(.*UniqueNCCLID:)(\d+)", re.DOTALL | re.ASCII)

_GLOO: Final = "//cpu//"
"""Part of the keys that the ranks of a gloo group publish."""

_GLOO_BYTES: Final = 154
"""Bytes of the value of such a key, besides eight for each member."""

_AGENTS: Final = "torchelastic/"
"""Part of the keys of torchrun's agents."""

RANKS_PER_ROOT: Final = 128
"""NCCL's default number of ranks per root."""


def nccl_id(key: str) -> tuple[str, int] | None:
    """Return which list of IDs a key of an NCCL root belongs to, and the number of the root; None for other keys."""
    if "nccl_storekey_" not in key and "UniqueNCCLID:" not in key:
        return None
    found = _NCCL2.fullmatch(key)
    if found is not None:
        return found[1], int(found[2] or 0)
    found = _NCCL_ID.fullmatch(key)
    return None if found is None else (found[1], int(found[2]))


def is_nccl_counter(key: str) -> bool:
    """Return whether a key may hold the ID of an NCCL group with one root: its number counts communicators."""
    before, _, last = key.rpartition("/")
    return last.isdecimal() and before.endswith(("//cuda/", "/cuda"))


def root_rank(index: int, ranks: int, roots: int) -> int:
    """Return the rank that is root `index`: the first one of its share of the ranks; larger shares come first."""
    share, larger = divmod(ranks, roots)
    return index * share + min(index, larger)


def gloo_size(family: Family, value_bytes: int) -> int:
    """Return the size of a gloo group, from the size of a value that a rank has published; 0 if unknown."""
    members, rest = divmod(value_bytes - _GLOO_BYTES, 8)
    return members if _GLOO in family.before and not family.after and members > 0 and not rest else 0


def names_ranks(family: Family) -> bool:
    """Return whether the numbers of a family are certainly ranks of the whole job."""
    return family.before.endswith("/rank") and not family.after


def may_name_ranks(family: Family) -> bool:
    """Return whether the numbers of a family may be ranks: those of torchrun's agents and of NCCL are not."""
    return _AGENTS not in family.before and nccl_id(family.key(0)) is None and not is_nccl_counter(family.key(0))


def opened_counter(key: str) -> str | None:
    """Return the counter of the barrier that this key opens; None if it opens none."""
    if key.endswith(_LAST):  # one test that rules out most keys
        for last in _LAST:
            if key.endswith(last):
                return key[: -len(last)] + _MEMBERS
    if _GROUP in key and key.endswith(_GROUP_LAST):
        return key[: -len(_GROUP_LAST)]
    return None


def is_for_agents(counter: str) -> bool:
    """Return whether a counter is that of a barrier of torchrun's agents."""
    return _AGENTS in counter
