"""What was opened for PyTorch's rendezvous, until that is over which it was for.

Knows: the functions of PyTorch that begin and end what a rendezvous is for. Must not know: how a store works, how one
is found.
Invariant: whatever was opened for a process group or for RPC is closed when that ends, at the next rendezvous if it
ended without notice, or with the process. What a program asked for itself stays until it has let go of it and somebody
meets again.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from threading import RLock, get_ident
from types import FrameType
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import stores, tcpstore_patch
from .held import Hold
from .monkeypatch import Monkeypatch

_GROUP: Final = "init_process_group"
_RPC: Final = "init_rpc"
_SHRINK: Final = "shrink_group"
"""It destroys the default group and makes another over the same store."""

_CALLERS: Final = {
    _GROUP: "torch.distributed.distributed_c10d",
    _SHRINK: "torch.distributed.distributed_c10d",
    _RPC: "torch.distributed.rpc",
}


class Opened:
    """What one rendezvous opened: a store of ours, which knows by itself who holds it, or one of PyTorch's."""

    def __init__(self, store: dist.Store, release: Callable[[], None] | None = None) -> None:
        """`release` is how it is closed, if the store is not one of ours."""
        self.purpose = _purpose(sys._getframe(1))
        self._thread = get_ident()
        self._ours = weakref.ref(store) if release is None else None
        self._theirs = None if release is None else Hold(store)
        self._release = release

    def is_over(self) -> bool:
        """Whether what it was for has ended, also without our notice."""
        if self.is_beginning():
            return False
        if self.purpose == _RPC:
            return not cast(Any, dist.rpc)._is_current_rpc_agent_set()
        if self.purpose == _GROUP:
            return not dist.is_initialized()
        return self._theirs.is_last() if self._theirs is not None else self._our_store() is None

    def _our_store(self) -> dist.Store | None:
        return None if self._ours is None else self._ours()

    def is_beginning(self) -> bool:
        """Whether another thread is in the function still that asked for it."""
        if not self.purpose or self._thread == get_ident():
            return False
        return _purpose(sys._current_frames().get(self._thread)) == self.purpose

    def close(self) -> None:
        if self._release is not None:
            self._release()
        elif (store := self._our_store()) is not None:
            stores.close_with_clones(cast(stores.Store, store))


_opened: Final[list[Opened]] = []
_lock: Final = RLock()  # reentrant: a collection of garbage may end something meanwhile


def _purpose(frame: FrameType | None) -> str:
    """Which function of PyTorch's asks for a store, however the program came by it; empty if the program does."""
    while frame is not None:
        name = frame.f_code.co_name
        if _CALLERS.get(name) == frame.f_globals.get("__name__"):
            return name
        frame = frame.f_back
    return ""


def remember(store: dist.Store, release: Callable[[], None] | None = None) -> None:
    """A rendezvous has opened this store; `release` closes what goes with it, if the store is not one of ours."""
    opened = Opened(store, release)
    with _lock:
        _opened.append(opened)


def make_way() -> None:
    """Close what is over, so that whoever meets next starts clean."""
    _close(Opened.is_over)


def _close(over: Callable[[Opened], bool]) -> None:
    with ExitStack() as closing:  # whatever one of them raises
        closing.callback(_restore)
        closing.callback(stores.close_let_go)
        closing.callback(tcpstore_patch.close_let_go)
        with _lock:
            for one in [one for one in _opened if over(one)]:
                _opened.remove(one)
                closing.callback(one.close)


# The ends

_ends: Final = Monkeypatch()
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
            if _purpose(sys._getframe()) != _SHRINK:
                _close(lambda one: one.purpose == _GROUP and not one.is_beginning())

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
            _close(lambda one: one.purpose == _RPC and not one.is_beginning())

    _ends.replace(dist.rpc, "shutdown", end)


def follow_ends_no_more() -> None:
    """Leave these functions as they were, once they have ended what was opened before."""
    global _following
    _following = False
    _close(Opened.is_over)


def _restore() -> None:
    if not _following and not any(one.purpose for one in _opened):
        _ends.restore()
