"""The environment variables with which a gloo group sends fewer requests to its store.

Each member of a gloo group of n fetches the addresses of all n members, one after the other: 3n² requests in all. The
variables must be set, for all ranks, before the group is made.
"""

from collections.abc import Mapping
from typing import Final

LARGE: Final = 64
"""Groups of more ranks are worth advice."""

BATCHED: Final = "GLOO_ENABLE_STORE_V2_API"
SHORT: Final = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"
LAZY: Final = "TORCH_GLOO_LAZY_INIT"


def is_batched(environ: Mapping[str, str]) -> bool:
    """Whether a group fetches up to 128 addresses with one request; gloo reads its variables as exactly this."""
    return environ.get(BATCHED) in ("1", "True")


def is_short(environ: Mapping[str, str]) -> bool:
    """Whether what a rank publishes does not grow with the group."""
    return environ.get(SHORT) in ("1", "True")


def is_lazy(environ: Mapping[str, str]) -> bool:
    """Whether addresses are fetched when two ranks first talk to each other; PyTorch reads its own in any case."""
    return environ.get(LAZY, "").lower() in ("1", "true", "yes", "t", "y")


def requests(ranks: int) -> int:
    """Return how many requests a group of so many ranks sends without any of them."""
    return 3 * ranks * ranks
