"""Has PyTorch take its stores from here, without a change to the program.

Knows: PyTorch's table of rendezvous handlers, the functions that end what a rendezvous began. Must not know: how a
store works, how a server is started.
Invariants: `uninstall` leaves PyTorch as it was. Whatever was opened for a process group or for RPC is closed when that
ends, when the same address is met at again, or with the process.
"""

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import errors
from .. import rendezvous_url as plain
from ..arguments import Timeout
from ..stores.file import FileStore
from ..stores.prefix import PrefixStore
from . import stores
from .errors import joint
from .native import NativeClient

_SCHEMES: Final = ("tcp", "env", "file")
_CLASSES: Final = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
_CLIENTS: Final = ("native", "python")

_rendezvous: Final = importlib.import_module("torch.distributed.rendezvous")
"""The module, whose name in `torch.distributed` is its function's."""

Found = tuple[dist.Store, int, int]


class Opened:
    """What one rendezvous opened, until the group it was for is gone."""

    def __init__(self, place: plain.Place | None, purpose: str, close: Callable[[], None]) -> None:
        self.address = None if place is None else (place.host, place.port)
        self.purpose = purpose
        self.close = close


class _Installation:
    """What was put in whose place, and what has been opened since."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.replaced: list[tuple[Any, Any, Any]] = []
        self.opened: list[Opened] = []
        self.purpose = "group"
        """What is being set up: a process group, or RPC."""

    def replace(self, owner: Any, name: str, new: Any) -> None:
        if isinstance(owner, dict):
            self.replaced.append((owner, name, owner[name]))
            owner[name] = new
        else:
            self.replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)

    def restore(self) -> None:
        for owner, name, old in reversed(self.replaced):
            if isinstance(owner, dict):
                owner[name] = old
            else:
                setattr(owner, name, old)
        self.replaced.clear()

    def close(self, purpose: str | None = None) -> None:
        """Close what was opened for one purpose, or all."""
        closing = [one for one in self.opened if purpose in (None, one.purpose)]
        self.opened = [one for one in self.opened if one not in closing]
        for one in closing:
            one.close()

    def make_way(self, place: plain.Place) -> None:
        """Close what an earlier group, which is gone, had opened at the same address."""
        if self.purpose == "group" and not dist.is_initialized():
            gone = [one for one in self.opened if one.purpose == "group" and one.address == (place.host, place.port)]
            self.opened = [one for one in self.opened if one not in gone]
            for one in gone:
                one.close()


_installed: _Installation | None = None


def install(client: str = "native", classes: bool = False) -> None:
    """Have `init_process_group`, `init_device_mesh` and `init_rpc` take tcp://, env:// and file:// from here.

    The server is ours, in a process of its own on rank 0. The client that PyTorch gets is its own C++ one or, with
    `client="python"`, ours. With `classes`, `torch.distributed.TCPStore` and the others are ours too, for programs that
    make stores themselves. May be called again, also with other arguments; some ranks of a world may do without.
    """
    global _installed
    if client not in _CLIENTS:
        raise ValueError(f"client must be native or python, not {client!r}")
    if _installed is not None:
        _installed.restore()
        opened = _installed.opened
    else:
        opened = []
    _installed = installation = _Installation(client)
    installation.opened = opened
    for scheme in _SCHEMES:
        installation.replace(
            _rendezvous._rendezvous_handlers, scheme, functools.partial(_HANDLERS[scheme], installation)
        )
    _follow_ends(installation)
    if classes:
        for name in _CLASSES:
            installation.replace(dist, name, getattr(stores, name))


def uninstall() -> None:
    """Leave PyTorch as it was before `install`. What is open stays open until the process ends."""
    global _installed
    if _installed is not None:
        _installed.restore()
        _installed = None


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Found]:
    """As `tcpstore_async.rendezvous`; the stores are `torch.distributed.Store`s with our client."""
    for store, found_rank, found_size in plain.rendezvous(url, rank, world_size, **options):
        yield _as_torch(store), found_rank, found_size


def _as_torch(store: Any) -> stores.Store:
    """A plain store as one of PyTorch's."""
    if isinstance(store, PrefixStore):
        return stores.PrefixStore._of(store)
    if isinstance(store, FileStore):
        return stores.FileStore._of(store)
    return stores.TCPStore._of(store)


# The handlers


def _open(installation: _Installation, place: plain.Place, timeout: Timeout) -> dist.Store:
    """The store of a place, ours or PyTorch's client of our server."""
    installation.make_way(place)
    try:
        if installation.client == "python":
            store: Any = _as_torch(plain.open_store(place, timeout))
            installation.opened.append(Opened(place, installation.purpose, store.close))
            return cast(dist.Store, store)
        native = NativeClient(place, timeout)
    except errors.DistError as error:
        raise joint(error) from error.__cause__
    installation.opened.append(Opened(place, installation.purpose, native.close))
    return cast(dist.Store, native.store)


def _tcp(
    installation: _Installation, url: str, timeout: timedelta = plain.DEFAULT_TIMEOUT, **_: Any
) -> Iterator[Found]:
    place = plain.read_tcp(url)
    yield _open(installation, place, timeout), place.rank, place.world_size
    raise RuntimeError("Unable to perform re-rendezvous using tcp:// method")


def _env(
    installation: _Installation, url: str, timeout: timedelta = plain.DEFAULT_TIMEOUT, **_: Any
) -> Iterator[Found]:
    place = plain.read_env(url)
    yield _open(installation, place, timeout), place.rank, place.world_size
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")


def _file(
    installation: _Installation, url: str, timeout: timedelta = plain.DEFAULT_TIMEOUT, **_: Any
) -> Iterator[Found]:
    place = plain.read_file(url)
    store = stores.FileStore(place.path, place.world_size)
    store.set_timeout(timeout)
    installation.opened.append(Opened(None, installation.purpose, store.close))
    yield store, place.rank, place.world_size
    raise RuntimeError("Unable to perform rerendezvous using file:// method")


_HANDLERS: Final[dict[str, Callable[..., Iterator[Found]]]] = {"tcp": _tcp, "env": _env, "file": _file}


# When what was opened is over


def _follow_ends(installation: _Installation) -> None:
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*given: Any, **named: Any) -> Any:
        result = destroy(*given, **named)
        if not dist.is_initialized():
            installation.close("group")
        return result

    installation.replace(distributed_c10d, "destroy_process_group", destroy_process_group)
    installation.replace(dist, "destroy_process_group", destroy_process_group)
    if cast(Any, dist.rpc).is_available():
        _follow_rpc(installation)


def _follow_rpc(installation: _Installation) -> None:
    rpc: Any = dist.rpc
    init_rpc, shutdown = rpc.init_rpc, rpc.shutdown

    @functools.wraps(init_rpc)
    def init(*given: Any, **named: Any) -> Any:
        installation.purpose = "rpc"
        try:
            return init_rpc(*given, **named)
        finally:
            installation.purpose = "group"

    @functools.wraps(shutdown)
    def end(*given: Any, **named: Any) -> Any:
        try:
            return shutdown(*given, **named)
        finally:
            installation.close("rpc")

    installation.replace(rpc, "init_rpc", init)
    installation.replace(rpc, "shutdown", end)


def from_environment() -> None:
    """Install as TCPSTORE_INSTALL says: 1, native, python, or classes; more than one with commas between them."""
    words = set(filter(None, os.environ.get("TCPSTORE_INSTALL", "").lower().split(",")))
    if words - {"0"}:
        install("python" if "python" in words else "native", "classes" in words)
