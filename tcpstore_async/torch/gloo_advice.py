"""Log advice when a large gloo group is about to send many requests that a switch of PyTorch's would avoid.

`base/gloo_switches.py` has the switches and the reasons. This module changes nothing; it must not know how groups are
made, and of stores only whether the requests leave the process.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base.gloo_switches import BATCHED, LARGE, LAZY, SHORT, is_batched, is_lazy, requests
from .monkeypatch import Monkeypatch

log = logging.getLogger("tcpstore_async.torch")


def follow_groups(replaced: Monkeypatch) -> None:
    """Have the constructor of gloo groups log advice, if this PyTorch has gloo."""
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
    if is_batched(os.environ) or is_lazy(os.environ) or _is_within_process(store):
        return
    log.warning(
        "a gloo group of %d ranks sends %s requests to the store; set %s=1 and %s=1 for all ranks, or %s=1 if few of "
        "them exchange data",
        size,
        f"{requests(size):,}",
        BATCHED,
        SHORT,
        LAZY,
    )


def _is_within_process(store: Any) -> bool:
    """Return whether a store is a HashStore, perhaps under prefixes, whose requests stay in this process."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)
