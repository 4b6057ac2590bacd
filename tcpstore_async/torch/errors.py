"""Exceptions that derive from PyTorch's classes and from ours, so that a program can catch either."""

import traceback
from contextlib import suppress
from typing import Any, Final

import torch.distributed as dist

from ..base import errors


class DistError(errors.DistError, dist.DistError):
    """As `torch.distributed.DistError`."""


class DistNetworkError(errors.DistNetworkError, DistError, dist.DistNetworkError):
    """As `torch.distributed.DistNetworkError`."""


class DistStoreError(errors.DistStoreError, DistError, dist.DistStoreError):
    """As `torch.distributed.DistStoreError`."""


class AccessDeniedError(errors.AccessDeniedError, DistStoreError):
    """The client's token does not allow the call, or the server refused it; a `torch.distributed.DistStoreError`."""


class ConnectionDeniedError(errors.ConnectionDeniedError, AccessDeniedError, DistNetworkError):
    """The server closed the connection for lack of access; a `torch.distributed.DistNetworkError`, too."""


class StoreTimeoutError(errors.StoreTimeoutError, DistStoreError):
    """A store operation timed out; a `torch.distributed.DistStoreError`."""


_QUEUE_EMPTY: Any = getattr(dist, "QueueEmptyError", dist.DistStoreError)  # since PyTorch 2.8


class QueueEmptyError(errors.QueueEmptyError, DistStoreError, _QUEUE_EMPTY):  # type: ignore[misc]
    """As `torch.distributed.QueueEmptyError`."""


_JOINT: Final[dict[type[errors.DistError], type[errors.DistError]]] = {
    errors.ConnectionDeniedError: ConnectionDeniedError,
    errors.AccessDeniedError: AccessDeniedError,
    errors.StoreTimeoutError: StoreTimeoutError,
    errors.QueueEmptyError: QueueEmptyError,
    errors.DistStoreError: DistStoreError,
    errors.DistNetworkError: DistNetworkError,
    errors.DistError: DistError,
}


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of our frames in an error's tracebacks, so that a debugger does not print a store.

    Printing one of PyTorch's C++ objects whose constructor failed crashes. Frames that are still being executed are
    left alone.
    """
    seen = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        errors += (one.__cause__, one.__context__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith("tcpstore_async."):
                with suppress(RuntimeError):  # it is being executed
                    frame.clear()


def joint(error: Exception) -> Exception:
    """Return the error as an instance of PyTorch's class, too, if there is one."""
    if isinstance(error, dist.DistError):
        return error
    for kind in type(error).__mro__:
        if kind in _JOINT:
            found = _JOINT[kind](*error.args)
            found.__dict__.update(error.__dict__)
            return found
    return error
