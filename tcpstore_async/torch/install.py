"""Has PyTorch take its stores from here, without a change to the program.

Knows: PyTorch's table of rendezvous handlers, the functions that begin and end what a rendezvous is for. Must not know:
how a store works, how a server is started.
Invariants: `uninstall` leaves PyTorch as it was. Whatever was opened for a process group or for RPC is closed when that
ends, when the same address is met at again, or with the process. What a program asked for itself stays until it has let
go of it and meets at the same address again.
"""

import functools
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import errors
from .. import rendezvous_url as plain
from ..arguments import Timeout
from . import stores
from .errors import joint
from .native import open_native

_SCHEMES: Final = ("tcp", "env", "file")
_CLASSES: Final = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
_CLIENTS: Final = ("native", "python")

_rendezvous: Final = importlib.import_module("torch.distributed.rendezvous")
"""The module, whose name in `torch.distributed` is its function's."""

Found = tuple[dist.Store, int, int]

_GROUP: Final = "init_process_group"
_RPC: Final = "init_rpc"
_CALLERS: Final = {_GROUP: "torch.distributed.distributed_c10d", _RPC: "torch.distributed.rpc"}


class Opened:
    """What one rendezvous opened, until that is over which it was for."""

    def __init__(self, address: Any, store: Any, close: Callable[[], None]) -> None:
        self.address = address
        self.purpose = _purpose()
        self.close = close
        self._store = weakref.ref(store)

    def is_over(self) -> bool:
        """Whether what it was for has ended, also without our notice."""
        if self.purpose == _RPC:
            return not cast(Any, dist.rpc)._is_current_rpc_agent_set()
        return not dist.is_initialized() and (self.purpose == _GROUP or self._store() is None)


_opened: Final[list[Opened]] = []


def _purpose() -> str:
    """Which function of PyTorch's asks for a store, however the program came by it; empty if the program does."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if _CALLERS.get(name) == frame.f_globals.get("__name__"):
            return name
        frame = cast(Any, frame.f_back)
    return ""


def _close(over: Callable[[Opened], bool]) -> None:
    """Close what is over."""
    for one in [one for one in _opened if over(one)]:
        _opened.remove(one)
        one.close()


def _make_way(address: Any) -> None:
    """Close what was opened at the same address for something that is over."""
    _close(lambda one: one.address == address and one.is_over())


class _Installation:
    """What was put in whose place."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.replaced: list[tuple[Any, Any, Any]] = []

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
    _installed = installation = _Installation(client)
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
    found = plain.rendezvous(url, rank, world_size, **options)
    while True:
        try:
            store, found_rank, found_size = next(found)
        except errors.DistError as error:
            raise joint(error) from error.__cause__
        except StopIteration:
            return
        yield stores.of(store), found_rank, found_size


# The handlers


def _open(installation: _Installation, place: plain.Place, timeout: Timeout) -> dist.Store:
    """The store of a place, ours or PyTorch's client of our server."""
    address = (place.host, place.port)
    _make_way(address)
    try:
        if installation.client == "python":
            ours = stores.of(plain.open_store(place, timeout))
            _opened.append(Opened(address, ours, functools.partial(stores.close_with_clones, ours)))
            return ours
        native, hosted = open_native(place, timeout)
    except errors.DistError as error:
        raise joint(error) from error.__cause__
    if hosted is not None:
        _opened.append(Opened(address, native, hosted.release))
    return native


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
    _make_way(place.path)
    store = stores.FileStore(place.path, place.world_size, timeout=timeout, new_round=True)
    _opened.append(Opened(place.path, store, functools.partial(stores.close_with_clones, store)))
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
            _close(lambda one: one.purpose == _GROUP)
        return result

    installation.replace(distributed_c10d, "destroy_process_group", destroy_process_group)
    installation.replace(dist, "destroy_process_group", destroy_process_group)
    if cast(Any, dist.rpc).is_available():
        _follow_rpc(installation)


def _follow_rpc(installation: _Installation) -> None:
    shutdown = cast(Any, dist.rpc).shutdown

    @functools.wraps(shutdown)
    def end(*given: Any, **named: Any) -> Any:
        try:
            return shutdown(*given, **named)
        finally:
            _close(lambda one: one.purpose == _RPC)

    installation.replace(dist.rpc, "shutdown", end)


_WORDS: Final = frozenset({"0", "1", "classes", *_CLIENTS})


def from_environment() -> None:
    """Install as TCPSTORE_INSTALL says: 1, native, python, or classes; more than one with commas between them.

    0 and nothing leave PyTorch alone. Raises ValueError for any other word, and for words that contradict each other.
    """
    text = os.environ.get("TCPSTORE_INSTALL", "")
    words = {word.strip() for word in text.lower().split(",")} - {""}
    if not words <= _WORDS:
        raise ValueError(f"it must be 1, native, python or classes, not {text!r}")
    if len(words & {"0", *_CLIENTS}) > 1 or words > {"0"}:
        raise ValueError(f"of 0, native and python it can be one, and 0 stands alone, not {text!r}")
    if words - {"0"}:
        install("python" if "python" in words else "native", "classes" in words)
