"""Make PyTorch use our stores without a change to the program.

This module replaces entries of PyTorch's table of rendezvous handlers and, on request, its store classes; `uninstall`
restores PyTorch. It must not know how stores work, how servers are started, or when stores are closed.
"""

import functools
import importlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as dist

from ..base import errors
from ..base.coercion import Timeout, in_milliseconds, to_seconds
from ..server.master import NoServerError
from ..stacks import responder, switch
from ..stores import rendezvous_url as plain
from ..stores import tcp
from . import gloo_advice, lifetimes, pytorchs_server, stores, tcpstore_patch
from .cpp_client import for_ourselves, open_native
from .errors import DistNetworkError, joint
from .monkeypatch import Monkeypatch

_CLASSES: Final = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
_CLIENTS: Final = ("native", "python")

_rendezvous: Final = importlib.import_module("torch.distributed.rendezvous")
"""The module; in `torch.distributed` its name means its function."""

_CppTCPStore: Final[Any] = dist.TCPStore
"""PyTorch's class, which `install(classes=True)` replaces."""

Found = tuple[dist.Store, int, int]

_replaced: Final = Monkeypatch()

log = logging.getLogger("tcpstore_async.torch")


def install(client: str = "native", classes: bool = False) -> None:
    """Make `init_process_group`, `init_device_mesh` and `init_rpc` use our stores for tcp://, env:// and file://.

    Rank 0 hosts our server in a process of its own. PyTorch gets its own C++ client or, with `client="python"`, ours.
    Wherever else PyTorch's own `TCPStore` would host a server, as in torchrun's agent, it becomes a client of our
    server instead. With `classes`, ours replace `torch.distributed.TCPStore` and the other store classes, for programs
    that create stores themselves. May be called again, also with other arguments. Not every rank of a world needs it.
    Unless TCPSTORE_STACKS is 0, a thread tells `tcpstore stacks` where this process is.
    Raises ValueError if `client` is neither "native" nor "python".
    """
    if client not in _CLIENTS:
        raise ValueError(f"client must be native or python, not {client!r}")
    _replaced.restore()
    for scheme, handler in plain.make_handlers(functools.partial(_open, client), _open_file).items():
        _replaced.replace(_rendezvous._rendezvous_handlers, scheme, handler)
    _replaced.replace(_CppTCPStore, "__init__", tcpstore_patch.constructor(vars(_CppTCPStore)["__init__"]))
    if classes:
        for name in _CLASSES:
            _replaced.replace(dist, name, getattr(stores, name))
    gloo_advice.follow_groups(_replaced)
    lifetimes.follow_starts(_replaced)
    lifetimes.follow_ends()
    switch.start(default=True)


def uninstall() -> None:
    """Restore PyTorch as it was before `install`.

    Process groups and RPC that use our stores continue: until the last of them has ended, `destroy_process_group` and
    `rpc.shutdown` still close the stores that were opened for them.
    """
    _replaced.restore()
    lifetimes.stop_following()
    if not switch.wanted():
        responder.stop()


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Found]:
    """Meet as `tcpstore_async.rendezvous` does; the stores are `torch.distributed.Store`s with our client.

    The caller closes the store; nothing else does before the process exits.
    """
    return _as_torch_stores(plain.rendezvous(url, rank, world_size, **options))


def _as_torch_stores(found: Iterator[plain.Found]) -> Iterator[Found]:
    while True:
        try:
            store, found_rank, found_size = next(found)
        except errors.DistError as error:
            raise joint(error) from error.__cause__
        except StopIteration:
            return
        yield stores.of(store), found_rank, found_size


# The rendezvous handlers


def _open(client: str, place: plain.Place, timeout: Timeout) -> dist.Store:
    """Return the store of a place: ours, or PyTorch's client of our server.

    Raises DistNetworkError and DistStoreError as TCPStore does, but at once if the timeout is 0 or negative.
    """
    lifetimes.close_ended()
    switch.start(default=True)  # a forked rank has none yet
    seconds = to_seconds("timeout", timeout)
    if seconds <= 0:  # our client would wait for ever where PyTorch's raises at once
        text = f"The client socket has timed out after {in_milliseconds(seconds)}ms while trying to connect to"
        raise DistNetworkError(f"{text} ({place.host}, {place.port}).")
    try:
        if client == "python":
            plain_store = plain.open_store(place, timeout)
            ours = stores.of(plain_store)
            lifetimes.opened(ours, stores.close_with_clones)
            if isinstance(plain_store, tcp.TCPStore):
                plain_store._connection().forming = True
                _warn_if_foreign(place, plain_store)
            return ours
        native, server = open_native(place, timeout, functools.partial(_warn_if_foreign, place))
    except (errors.DistError, NoServerError) as error:
        if not (place.hosts() and pytorchs_server.can_replace(error, place.port, shares=True, tls=place.tls)):
            raise joint(error) from error.__cause__
        why = str(error)
    else:
        if server is not None:
            lifetimes.opened(native, lambda _: server.release())
        return native
    # As PyTorch's own handlers do, with PyTorch's server.
    where = (place.host, place.port, place.world_size, True, timedelta(seconds=seconds))
    with for_ourselves():
        store: Any = _CppTCPStore(*where, multi_tenant=True, use_libuv=place.use_libuv)
    pytorchs_server.started(store.port, why)
    return cast(dist.Store, store)


def _warn_if_foreign(place: plain.Place, store: tcp.TCPStore) -> None:
    """Warn on rank 0 if the server is PyTorch's, because a launcher hosts it without our package."""
    if not (place.rank or place.prefix or pytorchs_server.is_known(place.port) or store._connection().extended()):
        log.warning(
            "%s:%d is PyTorch's own server instead of tcpstore_async's: torchrun's agent hosts it and was started "
            "without TCPSTORE_INSTALL=1; set it for the launcher",
            place.host,
            place.port,
        )


def _open_file(place: plain.FilePlace, timeout: Timeout) -> dist.Store:
    lifetimes.close_ended()
    store = stores.FileStore(place.path, place.world_size, timeout=timeout, new_round=True)
    lifetimes.opened(store, stores.close_with_clones, stores.keep_file)
    return store


# The environment

_WORDS: Final = frozenset({"0", "1", "classes", *_CLIENTS})


def from_environment() -> None:
    """Install as TCPSTORE_INSTALL says: 1, python or classes, or several of them separated by commas.

    0 and an empty value leave PyTorch alone. `native`, an older word for 1, logs a warning. Raises ValueError for
    unknown and for contradictory words.
    """
    text = os.environ.get("TCPSTORE_INSTALL", "")
    words = {word.strip() for word in text.lower().split(",")} - {""}
    if not words <= _WORDS:
        raise ValueError(f"expected 1, python or classes, got {text!r}")
    if len(words & {"0", *_CLIENTS}) > 1 or words > {"0"}:
        raise ValueError(f"conflicting values: 0 excludes all others, and native excludes python: {text!r}")
    if "native" in words:
        log.warning("TCPSTORE_INSTALL=native means 1, and a later version will not know it: use 1")
    if words - {"0"}:
        install("python" if "python" in words else "native", "classes" in words)
