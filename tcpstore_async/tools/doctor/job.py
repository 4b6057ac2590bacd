"""Environment variables that determine how many requests a job's start sends to its store.

They must be the same for all ranks, so the ones set here count if ranks start from here. Must not know PyTorch.
"""

from collections.abc import Mapping
from typing import Final

from ...base.gloo_switches import BATCHED, LARGE, LAZY, SHORT, is_batched, is_lazy, is_short, requests
from ...diagnosis.patterns import RANKS_PER_ROOT
from ...session.store import PORTION
from .finding import FAIL, OK, WARN, Finding

_RANKS_PER_ROOT: Final = "TORCH_NCCL_RANKS_PER_ROOT"

_MANY_KEYS: Final = 1_000_000
"""Keys, in the requests of all ranks, that PyTorch's servers take seconds to register."""

_MOST_ROOTS: Final = 64
"""Roots that the advice aims at."""


def check_gloo(environ: Mapping[str, str], ranks: int) -> Finding:
    """Check that a gloo group of all ranks does not flood the store."""
    if ranks <= LARGE:
        return Finding("gloo", OK, f"no settings are needed for {_ranks(ranks)}")
    if is_lazy(environ):
        return Finding("gloo", OK, f"{LAZY} is set: addresses are fetched when they are needed")
    if not is_batched(environ):
        text = f"a gloo group of {ranks} ranks sends {requests(ranks):,} requests to the store"
        return Finding("gloo", WARN, text, f"export {BATCHED}=1 {SHORT}=1 for all ranks, or {LAZY}=1")
    if not is_short(environ):
        text = f"{BATCHED} is set, but what a rank fetches from each of the others still grows by 8 bytes per rank"
        return Finding("gloo", WARN, text, f"export {SHORT}=1 for all ranks")
    return Finding("gloo", OK, f"{BATCHED} and {SHORT} are set")


def check_nccl(environ: Mapping[str, str], ranks: int) -> Finding:
    """Check that the exchange of NCCL's ids does not name too many keys: each rank's request names one per root."""
    given = environ.get(_RANKS_PER_ROOT, "")
    if given and not (given.isdecimal() and int(given)):
        text = f"{_RANKS_PER_ROOT} is {given!r}, which is not a positive number"
        return Finding("NCCL", FAIL, text, f"export {_RANKS_PER_ROOT}={RANKS_PER_ROOT}")
    per_root = int(given) if given else RANKS_PER_ROOT
    roots = -(-ranks // per_root)
    if ranks <= per_root:
        return Finding("NCCL", OK, f"one root creates the id for {_ranks(ranks)}")
    text = f"{roots} roots create ids ({_RANKS_PER_ROOT}={per_root}): {ranks} ranks wait for {ranks * roots:,} keys"
    if ranks * roots <= _MANY_KEYS:
        return Finding("NCCL", OK, text)
    fewer = -(-ranks // _MOST_ROOTS)
    fix = "tcpstore serve (it registers a whole list of keys at once)"
    if roots > PORTION:  # as it does with shorter lists only
        fix = f"export {_RANKS_PER_ROOT}={fewer} for all ranks"
    elif fewer > per_root:
        fix += f", or export {_RANKS_PER_ROOT}={fewer} for all ranks"
    return Finding("NCCL", WARN, f"{text}, which PyTorch's servers register one by one", fix)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
