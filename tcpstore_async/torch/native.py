"""PyTorch's own C++ client on our server.

Knows: how to have our side do the hosting and the joining for it. Must not know: PyTorch's rendezvous.
Invariants: the server is never a thread of this process: two methods of PyTorch's client hold the interpreter's lock
while they wait, and would wait for ever. The C++ client has connected before this rank is counted, so that it belongs
to the round that it is counted in.
"""

from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ..arguments import Timeout, to_seconds
from ..rendezvous_url import Place
from ..stores.tcp import TCPStore

_CppTCPStore: Final = dist.TCPStore
_CppPrefixStore: Final = dist.PrefixStore
"""As they are now: `install(classes=True)` puts others in their place."""


class _Joining(TCPStore):
    """Hosts and joins, with a C++ client beside its own that is there before it joins."""

    _may_be_thread = False
    native: Any = None

    def _before_joining(self) -> None:
        timeout = self.timeout
        self.native = _CppTCPStore(
            self.host, self.port, None, False, timeout, wait_for_workers=False, use_libuv=self.libuvBackend
        )


class NativeClient:
    """The C++ client of a place and, on the rank that hosts, the server."""

    def __init__(self, place: Place, timeout: Timeout) -> None:
        seconds = timedelta(seconds=to_seconds("timeout", timeout))
        world_size = None if place.prefix else place.world_size
        joining = _Joining(
            place.host,
            place.port,
            world_size,
            place.hosts(),
            seconds,
            multi_tenant=True,
            use_libuv=place.use_libuv,
        )
        native, joining.native = joining.native, None
        self.store = _CppPrefixStore(place.prefix, native) if place.prefix else native
        self._hosted = joining._leave_server()

    def close(self) -> None:
        """Stop the server, if this rank hosts it. The C++ client goes when PyTorch lets go of it."""
        self.store = None
        if self._hosted is not None:
            self._hosted.release()
