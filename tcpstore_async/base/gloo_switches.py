"""Environment variables that make a gloo group send fewer requests to its store.

Each member of a gloo group of n fetches the addresses of all n members, one after the other: 3n² requests in all. The
variables must be set, for all ranks, before the group is made.
"""

from collections.abc import Mapping
from typing import Final

LARGE: Final = 64
"""Ranks of a group above which setting them pays."""

BATCHED: Final = "GLOO_ENABLE_STORE_V2_API"
SHORT: Final = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"
LAZY: Final = "TORCH_GLOO_LAZY_INIT"


def is_batched(environ: Mapping[str, str]) -> bool:
    """Return whether a group fetches up to 128 addresses with one request; gloo reads its variables as exactly this."""
    return environ.get(BATCHED) in ("1", "True")


def is_short(environ: Mapping[str, str]) -> bool:
    """Return whether the size of what a rank publishes is independent of the group's."""
    return environ.get(SHORT) in ("1", "True")


def is_lazy(environ: Mapping[str, str]) -> bool:
    """Return whether addresses are fetched when two ranks first communicate; PyTorch ignores case here."""
    return environ.get(LAZY, "").lower() in ("1", "true", "yes", "t", "y")


def requests(ranks: int) -> int:
    """Return how many requests a group of this many ranks sends if no variable is set."""
    return 3 * ranks * ranks
