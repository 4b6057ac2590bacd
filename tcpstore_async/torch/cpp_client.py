"""PyTorch's own C++ client on our server.

Knows: how to have our side do the hosting and the joining for it. Must not know: PyTorch's rendezvous.
Invariants: the server is never a thread of this process: two methods of PyTorch's client hold the interpreter's lock
while they wait, and would wait for ever. The C++ client has connected before this rank is counted, so that it belongs
to the round that it is counted in.
"""

from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from ..client.pool import TCPClient
from ..coercion import Timeout
from ..deadline import Deadline
from ..rendezvous_url import Place
from ..server.master import ServerHandle
from ..stores.joining import Rank
from ..stores.tcp import TCPStore

_CppTCPStore: Final = dist.TCPStore
_CppPrefixStore: Final = dist.PrefixStore
"""As they are now: `install(classes=True)` puts others in their place."""


class _Joining(TCPStore):
    """Hosts and joins, with a C++ client beside its own that is there before it joins."""

    _may_be_thread = False

    def __init__(self, make: Callable[..., Any], *given: Any, **named: Any) -> None:
        """`make` takes the arguments of PyTorch's constructor."""
        self._make = make
        self.native: Any = None
        super().__init__(*given, **named)

    def _connect(self, ranks: int | None, deadline: Deadline) -> TCPClient:
        if ranks is None:
            self._connect_native()
        return super()._connect(ranks, deadline)

    def _joins(self, client: TCPClient, rank: Rank) -> bool:
        # A look first: what the last round's server closes when it goes is not to be a C++ client, which logs that.
        if not rank.may_join(client):
            return False
        self._connect_native()
        return super()._joins(client, rank)

    def _connect_native(self) -> None:
        self.native = self._make(
            self.host, self.port, None, False, self.timeout, wait_for_workers=False, use_libuv=self.libuvBackend
        )


def open_native(place: Place, timeout: Timeout) -> tuple[dist.Store, ServerHandle | None]:
    """The C++ client of a place and, on the rank that hosts, the server, which is the caller's to release.

    Raises DistNetworkError and DistStoreError as TCPStore, RuntimeError if the server could be a thread only.
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
    store, joining.native = joining.native, None
    return (_CppPrefixStore(place.prefix, store) if place.prefix else store), joining._leave_server()


def host_native(make: Callable[..., Any], *given: Any, **named: Any) -> ServerHandle | None:
    """The server of a master, which is the caller's to release, once `make` has connected the C++ client to it.

    The arguments are those of TCPStore, and so are the errors. None if torchrun's agent hosts at this address.
    """
    joining = _Joining(make, *given, **named)
    joining.native = None
    return joining._leave_server()
