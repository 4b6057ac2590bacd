"""Has PyTorch's own `TCPStore` host our server, wherever it would host PyTorch's.

Knows: the constructor of PyTorch's class, which every launcher, library and program calls by whatever name it imported
it; who holds a store. Must not know: rendezvous, launchers.
Invariants: the class stays PyTorch's, and so do its objects: they are clients of our server. The server lives as long
as the store does, on either side, Python's or C++'s.
"""

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from .. import errors
from ..coercion import to_seconds
from ..server.master import ServerHandle
from .cpp_client import host_native
from .errors import joint
from .held import Hold

_CppPrefixStore: Final[Any] = dist.PrefixStore
"""As it is now: `install(classes=True)` puts another in its place."""

log = logging.getLogger("tcpstore_async.torch")


def _as_called(
    host_name: Any,
    port: Any,
    world_size: Any = None,
    is_master: Any = False,
    timeout: Any = None,
    wait_for_workers: Any = True,
    multi_tenant: Any = False,
    master_listen_fd: Any = None,
    use_libuv: Any = True,
) -> None:
    """The parameters of PyTorch's constructor; it has no signature that `inspect` can read."""


_PARAMETERS: Final = inspect.signature(_as_called)

Init = Callable[..., None]


def constructor(stock: Init) -> Init:
    """PyTorch's constructor `stock`, but a master hosts our server and is a client of that.

    Where our server cannot be hosted PyTorch's is, and one log line says why.
    """

    @functools.wraps(stock)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        options = _master_options(given, named)
        if options is None:
            stock(self, *given, **named)
        else:
            _host(stock, self, given, named, options)

    return __init__


def _master_options(given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a master; None for a client, and where PyTorch's own refuses at once."""
    try:
        options = dict(_PARAMETERS.bind(*given, **named).arguments)
        if not options.get("is_master") or to_seconds("timeout", options.get("timeout", 1)) <= 0:
            return None
    except (TypeError, ValueError):
        return None
    return {"use_libuv": True, **options, "is_master": True}


def _host(stock: Init, store: Any, given: tuple[Any, ...], named: dict[str, Any], options: dict[str, Any]) -> None:
    close_let_go()
    try:
        hosted = host_native(functools.partial(stock, store), **options)
    except errors.DistError as error:
        if not (options.get("multi_tenant") and "EADDRINUSE" in str(error)):
            raise joint(error) from error.__cause__
        why: Exception = error  # a server of PyTorch's in this process may be shared, too
    except dist.DistError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        why = error
    else:
        if hosted is not None:
            log.info("hosting the server of PyTorch's TCPStore at port %d, in process %d", hosted.port, hosted.pid)
            _Owner(store, hosted)
        return
    stock(store, *given, **named)
    log.warning("the server at port %d is PyTorch's, not ours: %s", store.port, why)


# Until nobody holds the store


class _Owner:
    """Holds the server of a store of PyTorch's until nobody holds that store."""

    def __init__(self, store: Any, hosted: ServerHandle) -> None:
        self._hosted = hosted
        self._view: Any = _CppPrefixStore("", store)
        """Keeps the C++ half there when Python drops the other one, so that it can be asked who else holds it."""
        self._left: Hold | None = None
        self._watch = weakref.ref(store, self._dropped)
        _owners[id(self)] = self

    def _dropped(self, _: Any, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Python has dropped the store; at the end of the interpreter, the server goes by itself."""
        if not _finalizing():
            self._left, self._view = Hold(self._view.underlying_store), None
            self.let_go()

    def let_go(self) -> None:
        """Close the client and then the server, if neither Python nor C++ holds the store any more."""
        if self._left is not None and self._left.is_last():
            self._left = None
            _owners.pop(id(self), None)
            self._hosted.release()


_owners: Final[dict[int, _Owner]] = {}


def close_let_go() -> None:
    """Stop the servers of stores that C++ held last, which tells nobody when it lets go of them."""
    for owner in list(_owners.values()):
        owner.let_go()
