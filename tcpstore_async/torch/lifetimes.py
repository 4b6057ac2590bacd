"""Close the stores that a rendezvous under `install()` opened when their process group or RPC ends.

Stores are assigned where PyTorch passes them on: `init_process_group` is the only caller of `rendezvous` in its module,
and `init_rpc` gives its store to `_init_rpc_backend`. Functions that record the store replace both names. A store of a
program's own rendezvous is not closed here.

It knows the functions of PyTorch that start and end process groups and RPC; it must not know how stores work or are
opened.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base.locks import RLock
from . import native_server
from .monkeypatch import Monkeypatch

Closer = Callable[[Any], None]

_rpc: Final = cast(Any, dist.rpc)

_GROUP: Final = "process group"
_RPC: Final = "rpc"

_IS_ACTIVE: Final[dict[str, Callable[[], bool]]] = {
    _GROUP: dist.is_initialized,
    _RPC: lambda: bool(_rpc._is_current_rpc_agent_set()),
}

_closers: Final[WeakKeyDictionary[Any, tuple[Closer, Closer | None]]] = WeakKeyDictionary()
"""For each store that our rendezvous handlers have opened: how to close it, and how to make it outlast RPC."""


class _Use:
    """A store that a process group or RPC uses."""

    def __init__(self, purpose: str, store: Any, close: Closer, keep: Closer | None) -> None:
        self.purpose = purpose
        self.kept = purpose == _RPC and keep is not None
        """Whether it is closed only at the next rendezvous, because PyTorch would keep it."""
        self.pinned = True
        """Whether PyTorch is starting its group or RPC, or shrinking the group."""
        self._store = store
        self._close = close
        self._thread = get_ident()
        if purpose == _RPC and keep is not None:
            keep(store)

    def has_ended(self) -> bool:
        """Return whether the group or RPC has ended, or was never completed.

        A thread that asks for another store has left the function that pinned this one, even if an exception still
        refers to that function's frame.
        """
        return (not self.pinned or self._thread == get_ident()) and not _IS_ACTIVE[self.purpose]()

    def close(self) -> None:
        self._close(self._store)


_uses: Final[list[_Use]] = []
_lock: Final = RLock()  # reentrant: a garbage collection may close a store meanwhile


def opened(store: dist.Store, close: Closer, keep: Closer | None = None) -> None:
    """Register a store that a rendezvous of ours has opened, and how to close it.

    PyTorch never lets go of the last store of RPC. With `keep`, which is then called with it, `rpc.shutdown` does not
    close it, either.
    """
    with _lock:
        _closers[store] = close, keep


@contextmanager
def _starting(purpose: str, store: Any) -> Iterator[None]:
    """Pin a store while its group or RPC starts. Does nothing for a store that is not ours to close."""
    with _lock:
        use = _Use(purpose, store, *_closers.pop(store)) if store in _closers else None
        if use is not None:
            _uses.append(use)
    try:
        yield
    finally:
        if use is not None:
            use.pinned = False


def close_ended() -> None:
    """Close the stores whose process group or RPC has ended, before the next rendezvous."""
    _close(_Use.has_ended)


def _end(purpose: str) -> None:
    _close(lambda use: use.purpose == purpose and not use.pinned and not use.kept)


def _close(ended: Callable[[_Use], bool]) -> None:
    with ExitStack() as closing:  # closes all of them, even if one raises
        closing.callback(_restore)
        closing.callback(native_server.stop_unused)
        with _lock:
            for use in [use for use in _uses if ended(use)]:
                _uses.remove(use)
                closing.callback(use.close)


# The start of process groups and RPC


def follow_starts(patch: Monkeypatch) -> None:
    """Replace the functions through which process groups and RPC get their stores."""
    patch.replace(distributed_c10d, "rendezvous", _group_rendezvous(distributed_c10d.rendezvous))
    if _rpc.is_available():
        patch.replace(_rpc, "_init_rpc_backend", _rpc_start(_rpc._init_rpc_backend))


def _group_rendezvous(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    # `init_process_group` keeps the iterator, and with it the context entered here, until it returns or raises.
    def follow(found: Iterator[Any]) -> Iterator[Any]:
        for one in found:
            with _starting(_GROUP, one[0]):
                yield one

    @functools.wraps(rendezvous)
    def replacement(*given: Any, **named: Any) -> Iterator[Any]:
        return follow(rendezvous(*given, **named))

    return replacement


def _rpc_start(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def replacement(backend: Any, store: Any, *given: Any, **named: Any) -> Any:
        with _starting(_RPC, _opened_below(store)):
            return start(backend, store, *given, **named)

    return replacement


def _opened_below(store: Any) -> Any:
    """Return the store under PyTorch's prefixes that a rendezvous of ours has opened, else the innermost one."""
    while store not in _closers and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


# Their end

_ends: Final = Monkeypatch()
_following = False


def follow_ends() -> None:
    """Replace the functions in which process groups and RPC end."""
    global _following
    _following = True
    if _ends:
        return
    # Programs may have imported `destroy_process_group` by name already; this is the last function that it calls.
    _replace_end(distributed_c10d, "_unregister_all_process_groups", _GROUP)
    if "_finalize_shrunk_group" in vars(distributed_c10d):
        _ends.replace(distributed_c10d, "_finalize_shrunk_group", _keeping(distributed_c10d._finalize_shrunk_group))
    if _rpc.is_available():
        _replace_end(_rpc, "shutdown", _RPC)


def _replace_end(owner: Any, name: str, purpose: str) -> None:
    end = getattr(owner, name)

    @functools.wraps(end)
    def replacement(*given: Any, **named: Any) -> Any:
        try:
            return end(*given, **named)
        finally:
            _end(purpose)

    _ends.replace(owner, name, replacement)


def _keeping(shrink: Callable[..., Any]) -> Callable[..., Any]:
    # Shrinking the default group destroys it and creates another one on the same store.
    @functools.wraps(shrink)
    def replacement(*given: Any, **named: Any) -> Any:
        with _lock:
            kept = [use for use in _uses if use.purpose == _GROUP and not use.pinned]
            for use in kept:
                use.pinned = True
        try:
            return shrink(*given, **named)
        finally:
            for use in kept:
                use.pinned = False

    return replacement


def stop_following() -> None:
    """Restore these functions once the stores that were opened before are closed."""
    global _following
    _following = False
    close_ended()


def _restore() -> None:
    if not _following and all(use.has_ended() for use in _uses):
        _ends.restore()
