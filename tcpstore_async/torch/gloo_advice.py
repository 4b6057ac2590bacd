"""Log that a large gloo group is about to send many requests that a switch of PyTorch's would avoid.

Each member of a gloo group of n fetches the addresses of all n members, one after the other: 3n² requests in all. Three
environment variables reduce that, and they must be set before the group is made. Nothing is changed here; how a group
is made, and what stores do, is not known.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import distributed_c10d

from .monkeypatch import Monkeypatch

LARGE: Final = 64
"""Groups of more ranks are worth advice."""

_BATCHED: Final = "GLOO_ENABLE_STORE_V2_API"
_LAZY: Final = "TORCH_GLOO_LAZY_INIT"
"""Each of these reduces the number of requests."""

log = logging.getLogger("tcpstore_async.torch")


def follow_groups(replaced: Monkeypatch) -> None:
    """Have gloo groups give advice when they are made, if this PyTorch has gloo."""
    group = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if group is not None:
        replaced.replace(group, "__init__", constructor(vars(group)["__init__"]))


def constructor(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of ProcessGroupGloo."""

    @functools.wraps(stock)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        _advise(*given, **named)
        stock(self, *given, **named)

    return __init__


def _advise(store: Any = None, rank: Any = -1, size: Any = 0, *given: Any, **named: Any) -> None:
    """Log one line on the first rank of a large group, unless a switch is set."""
    if rank != 0 or not isinstance(size, int) or size <= LARGE:
        return
    # Gloo reads its variable as exactly this, PyTorch its own in any case.
    if os.environ.get(_BATCHED) in ("1", "True") or os.environ.get(_LAZY, "").lower() in ("1", "true", "yes", "t", "y"):
        return
    log.warning(
        "a gloo group of %d ranks sends %s requests to the store; set GLOO_ENABLE_STORE_V2_API=1 and "
        "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER=1 for all ranks, or TORCH_GLOO_LAZY_INIT=1 if few of them will talk "
        "to each other",
        size,
        f"{3 * size * size:,}",
    )
