"""Our stores as `torch.distributed.Store`s: every method is the plain store's.

PyTorch's C++ side may keep a store after Python has dropped it, but it keeps the C++ half only, calls the methods of
the Python half, and never reports when it lets go. So this module keeps every store until it is closed: by the program,
by `lifetimes` if a rendezvous under `install()` has opened it, or at the latest when the process exits.

It knows the names that PyTorch's C++ side looks up on a Python store, and the arguments it passes; it must not know
what a method does.
"""

import atexit
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base import errors
from ..base.coercion import Text, Timeout, to_seconds
from ..base.deadline import Deadline
from ..client.store_name import StoreTakenError, name_of
from ..server.master import NoServerError
from ..stores import base, file, hash, tcp
from ..stores import prefix as plain_prefix
from . import pytorchs_server
from .cpp_client import for_ourselves
from .errors import DistNetworkError, DistStoreError, forget_locals, joint

S = TypeVar("S", bound="Store")
P = ParamSpec("P")

_Init = Callable[..., None]

_CPP_CLASSES: Final[dict[str, Any]] = {
    name: getattr(dist, name) for name in ("TCPStore", "FileStore", "HashStore", "PrefixStore")
}
"""PyTorch's classes, which `install(classes=True)` replaces."""

_open: Final[set["Store"]] = set()
"""The stores that are not closed, which these references keep alive."""


@atexit.register
def close_all() -> None:
    """Close every store that is still open."""
    for store in list(_open):
        store.close()


def close_with_clones(store: "Store") -> None:
    """Close a store and its clones: PyTorch makes some that nothing else closes."""
    for one in list(_open):
        if one is store or one._origin is store:
            one.close()


def keep_file(store: "FileStore") -> None:
    """Keep the file of a store when it is closed, as PyTorch keeps that of RPC."""
    store._plain._keep_file()


_timeout_in_cpp: Final[Callable[[Any], timedelta]] = cast(Any, dist.Store).timeout.fget

_FORWARDED: Final = tuple(
    name
    for name in dir(base.Store)
    if callable(getattr(base.Store, name))
    and not name.startswith("_")
    and name not in ("clone", "close", "set_timeout")
)
"""The methods that only call the plain store's; new methods of `base.Store` are among them."""


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
    _Methods = base.Store  # for the signatures; at run time our stores are not `tcpstore_async.Store`s
else:
    _Methods = type("_Methods", (), {name: _method(name) for name in (*_FORWARDED, "_absent")})


class _Kind(type(dist.Store)):  # type: ignore[misc]
    """Make `isinstance` and `issubclass` take PyTorch's stores for ours: `isinstance(cpp_store, ours.TCPStore)`.

    `_StandsFor` does the reverse. Subclasses of our classes stand for none of PyTorch's.
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

    It lives until `close()`, even if the program drops it, because PyTorch may still use it. A store that a rendezvous
    under `install()` has opened is closed when its process group or RPC ends, any other when the process exits.
    """

    def __init__(self, plain: base.Store) -> None:
        super().__init__()
        self._plain: Any = plain
        self._known_timeout: timedelta | None = None
        """The plain store's timeout. PyTorch changes that of the C++ half without notice."""
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

    # Names that C++ looks up:
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
        plain = vars(self).get("_plain")  # a debugger may call this before it is set
        return object.__repr__(self) if plain is None else repr(plain)


def _takes(plain: Callable[P, base.Store]) -> Callable[[_Init], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of a plain store's."""

    def decorate(init: _Init) -> Callable[Concatenate[Any, P], None]:
        return functools.wraps(cast(Any, plain).__init__, assigned=(), updated=())(init)

    return decorate


_TCP_PARAMETERS: Final = inspect.signature(tcp.TCPStore)


def _make(make: Callable[..., base.Store], *given: Any, **named: Any) -> base.Store:
    try:
        return make(*given, **named)
    except errors.DistError as error:
        raise joint(error) from error.__cause__


class _PlainTCPStore(tcp.TCPStore):
    """A store whose server is never a thread: two methods of PyTorch's C++ client hold the GIL while they wait."""

    _may_be_thread = False


def _host(host: str, port: int, make: Callable[[], base.Store]) -> base.Store:
    """Return what `make` does; if the address is in use by stores that the program has dropped, close them first.

    PyTorch's own stores end with their last reference, so programs use an address again without closing its store.
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
    """Return the open stores to which only this module refers and that no process group uses.

    References from clones and from prefixes that were dropped do not count. Other uses in C++ are not known.
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
    """Return a store that hosts a server for other processes, perhaps as a thread.

    PyTorch's client in this process must not use it: two of its methods hold the GIL while they wait.
    """
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

    Its server, if it has one, never runs in a thread of this process: under `TCPSTORE_SERVER=thread` it raises
    RuntimeError or, as `torch.distributed.TCPStore` after `install(classes=True)`, uses PyTorch's server.
    """

    _stands_for = _CPP_CLASSES["TCPStore"]

    _pytorchs: Any = None
    """PyTorch's store that hosts the server instead of ours."""

    @_takes(tcp.TCPStore)
    def __init__(self, *given: Any, **named: Any) -> None:
        bound = _TCP_PARAMETERS.bind(*given, **named)
        bound.apply_defaults()
        options = bound.arguments
        make: Callable[[], base.Store] = functools.partial(_PlainTCPStore, *given, **named)
        if not options["is_master"]:
            super().__init__(_make(make))
            return
        # A program that means PyTorch's class by this one, since `install(classes=True)`, can do without our server.
        if issubclass(type(self), vars(dist)["TCPStore"]) and not (options["bind_host"] or options["token_keys"]):
            make = functools.partial(self._make_or_pytorchs, make, options)
        super().__init__(_make(_host, options["host_name"], options["port"], make))

    def _make_or_pytorchs(self, make: Callable[[], base.Store], options: dict[str, Any]) -> base.Store:
        """Return what `make` does or, if our server cannot be started, our client of PyTorch's."""
        port, shares, listen_fd = options["port"], options["multi_tenant"], options["master_listen_fd"]
        try:
            return make()
        except (errors.DistError, NoServerError) as error:
            security = options["server"], options["tls"], options["token"]
            if not pytorchs_server.can_replace(error, port, shares, listen_fd, *security):
                raise
            why = str(error)
        libuv = tcp._use_libuv(options["use_libuv"])
        limit = timedelta(seconds=to_seconds("timeout", options["timeout"]))
        where = (options["host_name"], port, options["world_size"], True, limit)
        flags = (options["wait_for_workers"], shares, listen_fd, libuv)
        try:
            with for_ourselves():
                self._pytorchs = _CPP_CLASSES["TCPStore"](*where, *flags)
        except dist.DistError as error:
            kind = DistNetworkError if isinstance(error, dist.DistNetworkError) else DistStoreError
            raise kind(str(error)) from None
        pytorchs_server.started(self._pytorchs.port, why)
        return tcp.TCPStore(where[0], self._pytorchs.port, timeout=limit, use_libuv=libuv, server="")

    def _holds(self, host: str, port: int) -> bool:
        """Return whether this store hosts a server on this port, or owns the named store of this address."""
        plain = self._plain
        if plain._owns:
            return bool(plain._connection().name.name == name_of(host, port))
        return (plain._hosted is not None or self._pytorchs is not None) and port == plain.port

    def close(self) -> None:
        super().close()
        self._pytorchs = None

    @property
    def host(self) -> str:
        """The server's host as given, or the server's in its URL for a named store with a port there."""
        return str(self._plain.host)

    @property
    def port(self) -> int:
        """The server's port, or the server's port for a named store."""
        return int(self._plain.port)

    @property
    def libuvBackend(self) -> bool:
        """Whether the event-driven backend was chosen."""
        return bool(self._plain.libuvBackend)


class FileStore(Store):
    """A `tcpstore_async.FileStore` that is a `torch.distributed.Store`; the arguments are the same."""

    _stands_for = _CPP_CLASSES["FileStore"]

    @_takes(file.FileStore)
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(_make(file.FileStore, *given, **named))

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
"""References of a `PrefixStore` to the store below: its own and its adapter's."""


class PrefixStore(Store):
    """A `tcpstore_async.PrefixStore` over any `torch.distributed.Store`, and one itself.

    Closing it leaves the underlying store open unless it `owns` that store. Raises ValueError if `store` is None, and
    TypeError if it is not a `torch.distributed.Store`.
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
        """The innermost store, below all prefixes. PyTorch looks up this name."""
        return cast(dist.Store, _lowest(self))

    def clone(self) -> "PrefixStore":
        """Return the same prefix over a clone of the underlying store, which is closed with it."""
        copy = PrefixStore(self._prefix, cast(Any, self._underlying).clone(), owns=True)
        copy._origin = self if self._origin is None else self._origin
        return copy


# PyTorch's own property would stop at a prefix of ours.
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
