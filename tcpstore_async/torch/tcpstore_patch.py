"""Have PyTorch's own `TCPStore` host our server wherever it would host PyTorch's, or use a named store.

Every launcher, library and program calls this constructor, however it has imported the class. The class and its objects
stay PyTorch's: they are clients of our server. This module must not know rendezvous or launchers.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ..base import errors
from ..base.addresses import unbracketed
from ..base.coercion import to_host, to_int64, to_port, to_seconds, to_world_size
from ..client.store_name import StoreTakenError, find_server
from ..server.master import NoServerError
from ..stores.tcp import TCPStore
from . import native_server, pytorchs_server
from .cpp_client import host_native, is_for_ourselves
from .errors import forget_locals, joint

log = logging.getLogger("tcpstore_async.torch")


def _unbracketed(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Remove a URL's brackets from an IPv6 address, which PyTorch would try to resolve as a name until its timeout."""
    if given and isinstance(given[0], str):
        return unbracketed(given[0]), *given[1:]
    if isinstance(named.get("host_name"), str):
        named["host_name"] = unbracketed(named["host_name"])
    return given


_LAUNCHER: Final = "torch.distributed.elastic."

_PARAMETERS: Final = inspect.Signature(
    [one for one in inspect.signature(TCPStore).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
)
"""Parameters of PyTorch's constructor, which ours has, too: `inspect` cannot read PyTorch's."""

_MASTER: Final = list(_PARAMETERS.parameters).index("is_master")

Init = Callable[..., None]


def constructor(stock: Init) -> Init:
    """Wrap PyTorch's constructor `stock` so that a master hosts our server and is a client of it.

    With TCPSTORE_SERVER_URL, every store is a client of the named store instead. Where our server cannot be hosted,
    PyTorch's is, and one log line gives the reason.
    """

    @functools.wraps(stock)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        try:
            options = None if is_for_ourselves() else _our_options(given, named, _is_launchers(inspect.currentframe()))
            if options is None:
                stock(self, *_unbracketed(given, named), **named)
            else:
                _host(stock, self, given, named, options)
        except BaseException as error:
            forget_locals(error)
            del self  # no frame may show an object that is half made, as with the C++ constructor
            raise

    return __init__


def _is_launchers(constructor: FrameType | None) -> bool:
    """Return whether torchrun creates the store: its agents and workers reach it by address, so it has no name.

    The calling module tells, as the arguments do not differ from those of other stores.
    """
    caller = constructor and constructor.f_back
    return caller is not None and str(caller.f_globals.get("__name__", "")).startswith(_LAUNCHER)


def _our_options(given: tuple[Any, ...], named: dict[str, Any], launchers: bool) -> dict[str, Any] | None:
    """Return the arguments of a master or a named store, but None if they are such that PyTorch's constructor raises.

    None for other clients, too. Raises ValueError for a wrong TCPSTORE_SERVER_URL.
    """
    is_master = bool(given[_MASTER] if len(given) > _MASTER else named.get("is_master"))
    if (launchers or find_server(None) is None) and not is_master:
        return None  # before `bind`, which takes longer than the rest of this for a client
    try:
        options = dict(_PARAMETERS.bind(*given, **named).arguments)
        options["is_master"] = is_master
        if to_seconds("timeout", options.get("timeout", 1)) <= 0:
            return None
        to_host("host_name", options["host_name"])
        to_port("port", options["port"])
        to_world_size("world_size", options.get("world_size"))
        if options.get("master_listen_fd") is not None:
            to_int64("master_listen_fd", options["master_listen_fd"])
    except (TypeError, ValueError):
        return None
    return {"use_libuv": True, **options, "server": "" if launchers else None}


def _host(stock: Init, store: Any, given: tuple[Any, ...], named: dict[str, Any], options: dict[str, Any]) -> None:
    native_server.stop_unused()
    try:
        hosted = host_native(store, functools.partial(stock, store), **options)
    except (errors.DistError, NoServerError) as error:
        listen_fd, shares = options.get("master_listen_fd"), bool(options.get("multi_tenant"))
        # A server of PyTorch's in this process may have taken the port; its constructor shares that, or raises.
        taken = shares and "EADDRINUSE" in str(error) and not isinstance(error, StoreTakenError)
        if not (taken or pytorchs_server.can_replace(error, options["port"], False, listen_fd, options["server"])):
            raise joint(error) from error.__cause__
        why = str(error)
    else:
        if hosted is not None and hosted.pid != os.getpid():  # a named store has this process's pid
            log.info(
                "hosting a tcpstore_async server for PyTorch's TCPStore on port %d (pid %d)", hosted.port, hosted.pid
            )
        return
    stock(store, *_unbracketed(given, named), **named)
    pytorchs_server.started(store.port, why)
