"""Our stores as `torch.distributed.Store`s: every method is the plain store's.

PyTorch's C++ side may keep a store after Python has dropped it, but it keeps the C++ half only, calls the methods of
the Python half, and never reports when it lets go. So every store is kept here until it is closed. That is done by the
program, by `lifetimes` for what a rendezvous under `install()` has opened, and at the latest when the process exits.

This module knows which names PyTorch's C++ side looks up on a Python store, and what it passes; what a method does is
the plain store's business.
"""

import atexit
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base import errors
from ..base.coercion import Text, Timeout, to_seconds
from ..base.deadline import DEFAULT_TIMEOUT, Deadline
from ..client.store_name import StoreTakenError, name_of
from ..server.master import NoServerError
from ..stores import base, file, hash, tcp
from ..stores import prefix as plain_prefix
from . import pytorchs_server
from .cpp_client import for_ourselves
from .errors import DistNetworkError, DistStoreError, forget_locals, joint

S = TypeVar("S", bound="Store")

_CPP_CLASSES: Final[dict[str, Any]] = {
    name: getattr(dist, name) for name in ("TCPStore", "FileStore", "HashStore", "PrefixStore")
}
"""As they are now: `install(classes=True)` replaces them."""

_open: Final[set["Store"]] = set()
"""The stores that are not closed: the references that keep them."""


@atexit.register
def close_all() -> None:
    """Close every store that is still open."""
    for store in list(_open):
        store.close()


def close_with_clones(store: "Store") -> None:
    """Close a store and the clones that PyTorch has made of it, which nobody else can close."""
    for one in list(_open):
        if one is store or one._origin is store:
            one.close()


def keep_file(store: "FileStore") -> None:
    """Have the file of a store stay when it is closed, as in PyTorch the file of RPC's."""
    store._plain._keep_file()


_timeout_in_cpp: Final[Callable[[Any], timedelta]] = cast(Any, dist.Store).timeout.fget


_FORWARDED: Final = tuple(
    name
    for name in dir(base.Store)
    if callable(getattr(base.Store, name))
    and not name.startswith("_")
    and name not in ("clone", "close", "set_timeout")
)
"""The methods that call the plain store's and do nothing else; a new one of `base.Store` is one of them."""


def _method(name: str) -> Callable[..., Any]:
    """Return a method that calls the plain store's method `name`, with the timeout that PyTorch may have set."""

    @functools.wraps(getattr(base.Store, name), assigned=("__name__", "__qualname__", "__doc__"))
    def method(self: "Store", *given: Any, **named: Any) -> Any:
        try:
            self._sync_timeout()
            return getattr(self._plain, name)(*given, **named)
        except errors.DistError as error:
            raise joint(error) from error.__cause__

    return method


if TYPE_CHECKING:
    _Methods = base.Store  # for the signatures: at run time our stores are no `tcpstore_async.Store`s
else:
    _Methods = type("_Methods", (), {name: _method(name) for name in (*_FORWARDED, "_absent")})


class _Kind(type(dist.Store)):  # type: ignore[misc]
    """Make `isinstance` and `issubclass` take PyTorch's stores for ours: `isinstance(cpp_store, ours.TCPStore)`.

    `_StandsFor` is the other direction. Subclasses of our classes stand for none of PyTorch's.
    """

    _stands_for: type[Any] | None

    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            return super().__call__(*given, **named)
        except BaseException as error:
            forget_locals(error)
            raise

    def __instancecheck__(cls, instance: Any) -> bool:
        return bool(super().__instancecheck__(instance)) or issubclass(type(instance), cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        theirs = vars(cls).get("_stands_for")
        return bool(super().__subclasscheck__(subclass)) or (theirs is not None and issubclass(subclass, theirs))


class _StandsFor:
    """Make `isinstance` take our stores for PyTorch's: `isinstance(our_store, dist.TCPStore)`."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return vars(type(self)).get("_stands_for") or type(self)


class Store(_Methods, dist.Store, _StandsFor, metaclass=_Kind):
    """A `torch.distributed.Store` whose methods are those of a plain store.

    It lives until `close()`, even if the program drops it: PyTorch may still use it. What a rendezvous under
    `install()` has opened is closed when its process group or RPC ends, everything else when the process exits.
    """

    def __init__(self, plain: base.Store) -> None:
        super().__init__()
        self._plain: Any = plain
        self._known_timeout: timedelta | None = None
        """The timeout that the plain store has. PyTorch changes that of the C++ half without notice."""
        self._origin: Store | None = None
        """The store that this one is a clone of, directly or through other clones."""
        self.set_timeout(plain.timeout)
        _open.add(self)

    @classmethod
    def _of(cls: type[S], plain: base.Store) -> S:
        store = cls.__new__(cls)
        Store.__init__(store, plain)
        return store

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of later calls; a timedelta or seconds."""
        super().set_timeout(timedelta(seconds=to_seconds("timeout", timeout)))

    def _sync_timeout(self) -> None:
        """Give the plain store the timeout of the C++ half, if PyTorch has changed that."""
        timeout = _timeout_in_cpp(self)
        if timeout != self._known_timeout:
            self._plain.set_timeout(timeout)
            self._known_timeout = timeout

    # What C++ calls them:
    deleteKey = _Methods.delete_key
    getNumKeys = _Methods.num_keys

    def clone(self: S) -> S:
        """Return another store on the same keys, which is closed separately."""
        try:
            copy = self._of(self._plain.clone())
        except errors.DistError as error:
            raise joint(error) from error.__cause__
        copy._origin = self if self._origin is None else self._origin
        return copy

    def close(self) -> None:
        """Release what the store holds: connections, files, its server. May be called again."""
        self._plain.close()
        _open.discard(self)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        plain = vars(self).get("_plain")  # not there yet if a debugger, say, asks while it is made
        return object.__repr__(self) if plain is None else repr(plain)


def _make(make: Callable[..., base.Store], *given: Any, **named: Any) -> base.Store:
    try:
        return make(*given, **named)
    except errors.DistError as error:
        raise joint(error) from error.__cause__


class _PlainTCPStore(tcp.TCPStore):
    """Never runs its server as a thread: two methods of PyTorch's C++ client hold the GIL while they wait for it."""

    _may_be_thread = False


def _host(host: str, port: int, make: Callable[[], base.Store]) -> base.Store:
    """Return what `make` does, if need be after closing stores that hold this address and that the program has dropped.

    PyTorch's own stores would have been gone with their last reference: a program that asks for an address again has
    no use for the store that held it before.
    """
    try:
        return make()
    except errors.DistNetworkError as error:
        in_use = isinstance(error, StoreTakenError) or "EADDRINUSE" in str(error)
        dropped = _dropped() if in_use else []
        hosts = [one for one in dropped if isinstance(one, TCPStore) and one._holds(host, port)]
        if not hosts:
            raise
    for one in dropped:
        if _lowest(one) in hosts:
            close_with_clones(one)
    return make()


def _dropped() -> list[Store]:
    """Return the open stores to which Python refers only from here, and that no process group of PyTorch's uses.

    A clone does not need the store that it is a clone of, and no store those below a prefix that was dropped. What else
    in C++ uses one is not known.
    """
    clones = Counter(id(one._origin) for one in _open)
    used = {id(_lowest(store)) for _, store in distributed_c10d._world.pg_map.values()}
    kept = sorted(_open, key=lambda store: len(_chain(store)), reverse=True)
    above: Counter[int] = Counter()
    """References from prefixes that were dropped."""
    alone = [object()]
    fewest = sys.getrefcount(alone[0])  # depends on the interpreter
    dropped: list[Store] = []
    for place in range(len(kept)):
        count = sys.getrefcount(kept[place])
        one = kept[place]
        expected = fewest + 1 + clones[id(one)] + above[id(one)]  # 1: `_open`
        if count == expected and id(_lowest(one)) not in used:
            dropped.append(one)
            if isinstance(one, PrefixStore):
                above[id(one._underlying)] += _FROM_PREFIX
        del one
    return dropped


def host_for_others(host: str, port: int, **named: Any) -> "TCPStore":
    """Return a store that hosts, at best in a process: PyTorch's client in this one must not use the server."""
    return TCPStore._of(_make(_host, host, port, functools.partial(tcp.TCPStore, host, port, is_master=True, **named)))


def _chain(store: Any) -> list[Any]:
    """Return a store and those below it, in order."""
    chain = [store]
    while hasattr(chain[-1], "underlying_store"):
        chain.append(chain[-1].underlying_store)
    return chain


def _lowest(store: Any) -> Any:
    return _chain(store)[-1]


class TCPStore(Store):
    """A `tcpstore_async.TCPStore` that is a `torch.distributed.Store`; the arguments are the same.

    Its server, if it has one, never runs in a thread of this process: RuntimeError under `TCPSTORE_SERVER=thread`. As
    `torch.distributed.TCPStore`, since `install(classes=True)`, it is a client of PyTorch's server then.
    """

    _stands_for = _CPP_CLASSES["TCPStore"]

    _pytorchs: Any = None
    """PyTorch's store that hosts in place of ours."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool | None = None,
        *,
        bind_host: str | None = None,
        token: str | None = None,
        tls: bool | None = None,
        token_keys: str | os.PathLike[str] | None = None,
        require_auth: str = "all",
        server: str | None = None,
    ) -> None:
        flags = (wait_for_workers, multi_tenant, master_listen_fd, use_libuv)
        where = (host_name, port, world_size, is_master, timeout)
        more: dict[str, Any] = {
            "token": token,
            "tls": tls,
            "token_keys": token_keys,
            "require_auth": require_auth,
            "server": server,
        }
        make: Callable[[], base.Store] = functools.partial(_PlainTCPStore, *where, *flags, bind_host=bind_host, **more)
        if not is_master:
            super().__init__(_make(make))
            return
        # A program that means PyTorch's class by this one, since `install(classes=True)`, can do without our server.
        if issubclass(type(self), vars(dist)["TCPStore"]) and not (bind_host or token_keys):
            make = functools.partial(self._make_or_pytorchs, make, *where, *flags, server, tls, token)
        super().__init__(_make(_host, host_name, port, make))

    def _make_or_pytorchs(
        self,
        make: Callable[[], base.Store],
        host: str,
        port: int,
        world_size: int | None,
        is_master: bool,
        timeout: Timeout,
        wait_for_workers: bool,
        multi_tenant: bool,
        listen_fd: int | None,
        use_libuv: bool | None,
        *security: Any,
    ) -> base.Store:
        """Return what `make` does or, if our server cannot be started, our client of PyTorch's."""
        try:
            return make()
        except (errors.DistError, NoServerError) as error:
            shared = multi_tenant and pytorchs_server.may_be_shared(port, error)
            replaced = shared or pytorchs_server.cannot_start(error, listen_fd)
            if not (replaced and pytorchs_server.will_do(*security)):
                raise
            why = str(error)
        libuv = tcp._use_libuv(use_libuv)
        limit = timedelta(seconds=to_seconds("timeout", timeout))
        flags = (wait_for_workers, multi_tenant, listen_fd, libuv)
        try:
            with for_ourselves():
                self._pytorchs = _CPP_CLASSES["TCPStore"](host, port, world_size, True, limit, *flags)
        except dist.DistError as error:
            kind = DistNetworkError if isinstance(error, dist.DistNetworkError) else DistStoreError
            raise kind(str(error)) from None
        pytorchs_server.started(self._pytorchs.port, why)
        return tcp.TCPStore(host, self._pytorchs.port, timeout=timeout, use_libuv=libuv, server="")

    def _holds(self, host: str, port: int) -> bool:
        """Whether this store hosts a server on this port or, if it has a name, owns the one with this address."""
        plain = self._plain
        if plain._owns:
            return bool(plain._connection().name.name == name_of(host, port))
        return (plain._hosted is not None or self._pytorchs is not None) and port == plain.port

    def close(self) -> None:
        super().close()
        self._pytorchs = None

    @property
    def host(self) -> str:
        """The server's host as it was passed or, for a store with a name, as in the server's URL."""
        return str(self._plain.host)

    @property
    def port(self) -> int:
        """The server's port or, for a store with a name, the one that the server has for that."""
        return int(self._plain.port)

    @property
    def libuvBackend(self) -> bool:
        """Whether the event-driven backend was chosen."""
        return bool(self._plain.libuvBackend)


class FileStore(Store):
    """A `tcpstore_async.FileStore` that is a `torch.distributed.Store`; the arguments are the same."""

    _stands_for = _CPP_CLASSES["FileStore"]

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
        new_round: bool = False,
    ) -> None:
        super().__init__(_make(file.FileStore, file_name, world_size, timeout=timeout, new_round=new_round))

    @property
    def path(self) -> str:
        """The file's path."""
        return str(self._plain.path)


class HashStore(Store):
    """A `tcpstore_async.HashStore` that is a `torch.distributed.Store`."""

    _stands_for = _CPP_CLASSES["HashStore"]

    def __init__(self) -> None:
        super().__init__(_make(hash.HashStore))

    def clone(self) -> "HashStore":
        """Return this same store, as PyTorch does."""
        return self


_FROM_PREFIX: Final = 2
"""How often a `PrefixStore` refers to the store below: itself and its adapter."""


class PrefixStore(Store):
    """A `tcpstore_async.PrefixStore` over any `torch.distributed.Store`, and one itself.

    Closing it leaves the underlying store open unless it `owns` that store. Raises ValueError without a store, and
    TypeError for one that is no `torch.distributed.Store`.
    """

    _stands_for = _CPP_CLASSES["PrefixStore"]

    def __init__(self, prefix: str, store: dist.Store, *, owns: bool = False) -> None:
        if store is None:
            raise ValueError("store argument cannot be None")
        if not isinstance(store, dist.Store):
            raise TypeError(f"store must be a torch.distributed.Store, not {type(store).__name__}")
        self._prefix = prefix
        self._underlying = store
        super().__init__(plain_prefix.PrefixStore(prefix, _Adapter(store), owns=owns))

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        self._sync_timeout()
        return _timeout_in_cpp(self)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of the underlying store."""
        self._plain.set_timeout(timeout)
        self._sync_timeout_below()

    def _sync_timeout(self) -> None:
        super()._sync_timeout()
        self._sync_timeout_below()

    def _sync_timeout_below(self) -> None:
        timeout: timedelta = self._plain.timeout
        if timeout != self._known_timeout:
            super().set_timeout(timeout)
            self._known_timeout = timeout

    @property
    def underlying_store(self) -> dist.Store:
        """The store that keeps the keys."""
        return self._underlying

    @property
    def _underlying_non_prefix_store(self) -> dist.Store:
        """The first underlying store that is no prefix; PyTorch looks this name up."""
        return cast(dist.Store, _lowest(self))

    def clone(self) -> "PrefixStore":
        """Return the same prefix over a clone of the underlying store, which is closed with it."""
        copy = PrefixStore(self._prefix, cast(Any, self._underlying).clone(), owns=True)
        copy._origin = self if self._origin is None else self._origin
        return copy


# PyTorch's own would stop at a prefix of ours below it.
_CPP_CLASSES["PrefixStore"]._underlying_non_prefix_store = property(_lowest)


class _Adapter(base.Store):
    """Adapts a `torch.distributed.Store`, ours or not, to the plain store that a plain prefix takes."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timedelta(seconds=to_seconds("timeout", timeout)))

    def wait(self, keys: Any, timeout: Timeout | None = None) -> None:
        limit = () if timeout is None else (timedelta(seconds=to_seconds("timeout", timeout)),)
        self._store.wait(keys, *limit)

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        if isinstance(self._store, Store):
            found: tuple[list[int], bool] = self._store._absent(keys, deadline)
            return found
        return super()._absent(keys, deadline)

    def close(self) -> None:
        if isinstance(self._store, Store):
            self._store.close()

    def __repr__(self) -> str:
        return repr(self._store)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: _Adapter, *given: Any) -> Any:
        theirs = getattr(self._store, name, None)
        if theirs is None:
            raise NotImplementedError(f"the {type(self._store).__name__} of PyTorch {torch.__version__} has no {name}")
        return theirs(*given)

    return method


for _name in _FORWARDED:
    if _name not in vars(_Adapter):
        setattr(_Adapter, _name, _forward(_name))


def of(plain: base.Store) -> Store:
    """Wrap a plain store; closing the result closes it."""
    if isinstance(plain, plain_prefix.PrefixStore):
        return PrefixStore(plain._start[:-1].decode(), of(plain.underlying_store), owns=plain._owns)
    for kind, ours in ((tcp.TCPStore, TCPStore), (file.FileStore, FileStore), (hash.HashStore, HashStore)):
        if isinstance(plain, kind):
            return ours._of(plain)
    return Store._of(plain)
