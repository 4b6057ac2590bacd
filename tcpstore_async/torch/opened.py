"""What was opened for PyTorch's rendezvous, until that is over which it was for.

Knows: the functions of PyTorch that begin and end what a rendezvous is for. Must not know: how a store works, how one
is found.
Invariant: whatever was opened for a process group or for RPC is closed when that ends, when the same address is met at
again, or with the process. What a program asked for itself stays until it has let go of it and meets at the same
address again.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import stores
from .replaced import Replaced

_GROUP: Final = "init_process_group"
_RPC: Final = "init_rpc"
_CALLERS: Final = {_GROUP: "torch.distributed.distributed_c10d", _RPC: "torch.distributed.rpc"}


class Opened:
    """What one rendezvous opened."""

    def __init__(self, address: Any, store: dist.Store, release: Callable[[], None] | None = None) -> None:
        """`release` is how it is closed, if the store is not one of ours."""
        self.address = address
        self.purpose = _purpose(sys._getframe(1))
        self._thread = get_ident()
        self._store = weakref.ref(store)
        self._release = release

    def is_over(self) -> bool:
        """Whether what it was for has ended, also without our notice."""
        if self._is_beginning():
            return False
        if self.purpose == _RPC:
            return not cast(Any, dist.rpc)._is_current_rpc_agent_set()
        return not dist.is_initialized() and (self.purpose == _GROUP or self._store() is None)

    def _is_beginning(self) -> bool:
        """Whether another thread is in the function still that asked for it."""
        if not self.purpose or self._thread == get_ident():
            return False
        return _purpose(sys._current_frames().get(self._thread)) == self.purpose

    def close(self) -> None:
        if self._release is not None:
            self._release()
        elif (store := self._store()) is not None:
            stores.close_with_clones(cast(stores.Store, store))


_opened: Final[list[Opened]] = []


def _purpose(frame: FrameType | None) -> str:
    """Which function of PyTorch's asks for a store, however the program came by it; empty if the program does."""
    while frame is not None:
        name = frame.f_code.co_name
        if _CALLERS.get(name) == frame.f_globals.get("__name__"):
            return name
        frame = frame.f_back
    return ""


def remember(address: Any, store: dist.Store, release: Callable[[], None] | None = None) -> None:
    """A rendezvous has opened this store; `release` closes what goes with it, if the store is not one of ours."""
    _opened.append(Opened(address, store, release))


def make_way(address: Any) -> None:
    """Close what is over; of what a program asked for itself, only what was opened at the same address."""
    _close(lambda one: bool(one.purpose or one.address == address) and one.is_over())


def _close(over: Callable[[Opened], bool]) -> None:
    for one in [one for one in _opened if over(one)]:
        _opened.remove(one)
        one.close()
    stores.close_let_go()
    _restore()


# The ends

_ends: Final = Replaced()
_following = False


def follow_ends() -> None:
    """Have the functions that end what a rendezvous was for close what was opened for it."""
    global _following
    _following = True
    if _ends:
        return
    # `destroy_process_group` itself may have been imported by name before; this is the last thing that it calls.
    unregister = distributed_c10d._unregister_all_process_groups

    @functools.wraps(unregister)
    def end(*given: Any, **named: Any) -> Any:
        try:
            return unregister(*given, **named)
        finally:
            _close(lambda one: one.purpose == _GROUP)

    _ends.replace(distributed_c10d, "_unregister_all_process_groups", end)
    if cast(Any, dist.rpc).is_available():
        _follow_rpc()


def _follow_rpc() -> None:
    shutdown = cast(Any, dist.rpc).shutdown

    @functools.wraps(shutdown)
    def end(*given: Any, **named: Any) -> Any:
        try:
            return shutdown(*given, **named)
        finally:
            _close(lambda one: one.purpose == _RPC)

    _ends.replace(dist.rpc, "shutdown", end)


def follow_ends_no_more() -> None:
    """Leave these functions as they were, once they have ended what was opened before."""
    global _following
    _following = False
    _close(lambda one: bool(one.purpose) and one.is_over())


def _restore() -> None:
    if not _following and not any(one.purpose for one in _opened):
        _ends.restore()
