"""PyTorch's own C++ client on our server.

Hosting and joining are done by our side; PyTorch's rendezvous is unknown here. Two invariants: the server is never a
thread of this process, because two methods of PyTorch's client hold the GIL while they wait and would wait for ever;
and the C++ client has connected before this rank is counted, so that it belongs to the round in which it is counted.
"""

from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from ..client.pool import TCPClient
from ..coercion import Timeout
from ..deadline import Deadline
from ..rendezvous_url import Place
from ..stores.rank import Rank
from ..stores.tcp import TCPStore
from .native_server import NativeServer, Sockets, sockets_to

_CppTCPStore: Final = dist.TCPStore
_CppPrefixStore: Final = dist.PrefixStore
"""As they are now: `install(classes=True)` replaces them."""


class _Joining(TCPStore):
    """Hosts and joins, with a C++ client beside its own that has connected before it joins."""

    _may_be_thread = False

    def __init__(self, make: Callable[..., Any], *given: Any, **named: Any) -> None:
        """`make` takes the arguments of PyTorch's constructor."""
        self._make = make
        self.native: Any = None
        self._sockets: Sockets = frozenset()
        super().__init__(*given, **named)

    def _connect(self, ranks: int | None, deadline: Deadline) -> TCPClient:
        if ranks is None:
            self._connect_native()
        return super()._connect(ranks, deadline)

    def _joins(self, client: TCPClient, rank: Rank) -> bool:
        # Check first: a C++ client logs when the server of the previous round closes its connection.
        if not rank.may_join(client):
            return False
        self._connect_native()
        return super()._joins(client, rank)

    def _connect_native(self) -> None:
        hosts = self._hosted is not None
        before = sockets_to(self.port) if hosts else frozenset()
        self.native = self._make(
            self.host, self.port, None, False, self.timeout, wait_for_workers=False, use_libuv=self.libuvBackend
        )
        self._sockets = sockets_to(self.port) - before if hosts else frozenset()

    def detach_server(self, store: Any) -> NativeServer | None:
        """Close our own connections; if this rank hosts, leave the server to the C++ client `store`."""
        self.native = None
        handle = self._leave_server()
        return None if handle is None else NativeServer(store, handle, self._sockets)


def open_native(
    place: Place, timeout: Timeout, joined: Callable[[TCPStore], object]
) -> tuple[dist.Store, NativeServer | None]:
    """Return the C++ client of a place and, on the rank that hosts, the server that runs as long as it exists.

    `joined` is called with our own store, which is closed after that.

    Raises DistNetworkError and DistStoreError as TCPStore does, and RuntimeError if the server could only be a thread.
    """
    joining = _Joining(
        _CppTCPStore,
        place.host,
        place.port,
        None if place.prefix else place.world_size,
        place.hosts(),
        timeout,
        multi_tenant=True,
        use_libuv=place.use_libuv,
    )
    store = joining.native
    joined(joining)
    server = joining.detach_server(store)
    return (_CppPrefixStore(place.prefix, store) if place.prefix else store), server


def host_native(store: Any, make: Callable[..., Any], *given: Any, **named: Any) -> NativeServer | None:
    """Host the server of a master and have `make` connect its C++ client `store` to it.

    The server runs as long as that client exists. The other arguments are those of TCPStore, and so are the errors.
    Returns None if torchrun's agent hosts at this address.
    """
    return _Joining(make, *given, **named).detach_server(store)
