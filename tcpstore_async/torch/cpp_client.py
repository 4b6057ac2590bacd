"""PyTorch's own C++ client on our server.

Our side hosts and joins. This module must not know PyTorch's rendezvous. Two invariants: the server is never a thread
of this process, because two methods of PyTorch's client hold the GIL while they wait and would wait for ever; and the
C++ client connects before this rank is counted, so that both are on the server of the same round.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ..base.addresses import format_address
from ..base.coercion import Timeout, to_seconds
from ..base.deadline import Deadline
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError
from ..client.brief_join import BriefJoin
from ..client.credentials import find_token
from ..client.server_url import ServerUrl
from ..client.store_name import StoreName
from ..client.store_port import direct_address
from ..client.sync_client import TCPClient
from ..client.tls_settings import wants_tls
from ..relay.named_ports import open_port
from ..relay.shared import RELAY, shared_relay
from ..server.listen_socket import listen
from ..stores.rank import Rank, new_token
from ..stores.rendezvous_url import Place
from ..stores.tcp import TCPStore
from .native_server import NativeServer, Sockets, sockets_to

log = logging.getLogger("tcpstore_async.torch")

_CppTCPStore: Final = dist.TCPStore
"""PyTorch's class, which `install(classes=True)` replaces."""

_CppPrefixStore: Final = dist.PrefixStore
"""PyTorch's class, which `install(classes=True)` replaces."""

_thread: Final = threading.local()


@contextmanager
def for_ourselves() -> Iterator[None]:
    """Bypass `install` in this thread: PyTorch's `TCPStore` has PyTorch's own constructor."""
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = False


def is_for_ourselves() -> bool:
    """Return whether this thread bypasses `install`."""
    return getattr(_thread, "plain", False)


class _Joining(TCPStore):
    """A store that hosts and joins, with a C++ client beside its own that connects before it joins."""

    _may_be_thread = False

    def __init__(
        self,
        make: Callable[..., Any],
        *given: Any,
        began: float | None = None,
        rank_token: bytes = b"",
        all_have_two: bool = False,
        **named: Any,
    ) -> None:
        """`make` takes the arguments of PyTorch's constructor.

        `all_have_two` is whether every rank joins as this one does, with a connection of ours beside the C++ client's.
        """
        self._make = make
        self._all_have_two = all_have_two
        self._began = began
        self._rank_token = rank_token
        self.native: Any = None
        self._sockets: Sockets = frozenset()
        self._listener: socket.socket | None = None
        """For a named store with port 0, the listener whose port is part of the name."""
        self._asked = format_address(*given[:2]) if len(given) > 1 else "HOST:PORT"
        try:
            super().__init__(*given, **named)
        finally:
            if self._listener is not None:
                self._listener.close()

    def _most_connections(self, ranks: int) -> int:
        # Ours lasts until all ranks have joined. The others close theirs once counted, so one more serves them all.
        return ranks + (2 if self._all_have_two and ranks > 1 else 1)

    def _free_number(self) -> int:
        # The program may publish the C++ client's port, so it must be the one in the name.
        if self._listener is not None:
            self._listener.close()
        self._listener = listen("127.0.0.1", 0)
        return int(self._listener.getsockname()[1])

    def _check_tls(self) -> None:
        if self._server is not None:
            return  # the port that stands for the named store uses TLS to the server
        raise DistNetworkError(
            f"PyTorch's C++ client cannot use TLS, which tcps:// or TCPSTORE_TLS=1 requires: use our client "
            f'(install(client="python") or TCPSTORE_INSTALL=python), or run `tcpstore relay --upstream '
            f"tcps://{self._asked}` on this host and have the ranks use its address, without TCPSTORE_TLS"
        )

    def _check_tokens(self) -> None:
        raise AccessDeniedError(
            "PyTorch's C++ client cannot present a token, but this rank's server would require one because of "
            "TCPSTORE_TOKEN or TCPSTORE_TOKEN_KEYS: use our client "
            '(install(client="python") or TCPSTORE_INSTALL=python), or run `tcpstore serve --token-keys` and relays '
            "that have a token, and unset both variables for the ranks"
        )

    def _connect(self, ranks: int | None, deadline: Deadline) -> TCPClient:
        if self._server is None and ranks is None:
            self._connect_native()
        client = super()._connect(ranks, deadline)
        if self._server is not None and ranks is None:
            self._connect_native(client)
        return client

    def _joins(self, client: TCPClient, rank: Rank) -> bool:
        # Check first: the C++ client would log that the previous round's server closes its connection.
        if not rank.may_join(client):
            return False
        self._connect_native(client)
        return super()._joins(client, rank)

    def _connect_native(self, client: TCPClient | None = None) -> None:
        """Create the C++ client of the server or, for a named store, of a port that stands for the store of `client`.

        That is the port of this host's relay if the server is to survive its end, else the server's port for the
        store, if this host can reach one, else a port on loopback.
        """
        host, port = self.host, self.port
        if self._server is not None and client is not None and client.name is not None:
            found = self._find_relay(self._server, client.name, client)
            found = found or direct_address(self._server, client.name, self._timeout)
            host, port = found or ("127.0.0.1", self._open_port(self._server, client.name))
            if self._listener is not None:
                self._listener.close()
        hosts = self._hosted is not None or self._owns
        before = sockets_to(port) if hosts else frozenset()
        with for_ourselves():
            self.native = self._make(
                host, port, None, False, self.timeout, wait_for_workers=False, use_libuv=self.libuvBackend
            )
        self._sockets = sockets_to(port) - before if hosts else frozenset()

    def _find_relay(self, server: ServerUrl, name: StoreName, client: TCPClient) -> tuple[str, int] | None:
        """Return the address of this host's relay if clients can survive the end of the server; None without one."""
        if os.environ.get(RELAY) == "0" or not client.extended() or not client.durable:
            return None
        try:
            return shared_relay(server, name, client.local_host(), Deadline(self._timeout))
        except DistNetworkError as error:
            log.warning("%s; this process loses its store when the server ends", error)
            return None

    def _open_port(self, server: ServerUrl, name: StoreName) -> int:
        """Open a port on loopback that stands for a named store."""
        listener, self._listener = self._listener or listen("127.0.0.1", 0), None
        return open_port(server, name, listener)

    def detach_server(self, store: Any) -> NativeServer | None:
        """Close our own connections; if this rank hosts, leave the server to the C++ client `store`."""
        self.native = None
        self._make = _CppTCPStore  # the given one may refer to `store`, which must not live as long as this object
        if self._owns:
            return NativeServer(store, _Owned(self), self._sockets)
        handle = self._leave_server()
        return None if handle is None else NativeServer(store, handle, self._sockets)


class _Owned:
    """A named store that lasts as long as the C++ client of its owner."""

    def __init__(self, store: TCPStore) -> None:
        self.port = store.port
        self.pid = os.getpid()
        self._store = store

    def release(self) -> None:
        if os.getpid() == self.pid:
            self._store.close()


def open_native(
    place: Place, timeout: Timeout, joined: Callable[[TCPStore], object]
) -> tuple[dist.Store, NativeServer | None]:
    """Return the C++ client of a place and, on the rank that hosts, the server that runs as long as the client exists.

    `joined` is called with our own store, which is then closed; not under torchrun's agent if our server is there
    already.

    Raises DistNetworkError and DistStoreError as TCPStore does, and RuntimeError if the server could only be a thread.
    """
    deadline = Deadline(to_seconds("timeout", timeout))
    rank_token = new_token()
    if place.agent_hosts() and place.world_size > 0 and not place.prefix and not wants_tls(place.tls):
        native = _join_agents_server(place, deadline, rank_token)
        if native is not None:
            return native, None
    joining = _Joining(
        _CppTCPStore,
        place.host,
        place.port,
        None if place.prefix else place.world_size,
        place.hosts(),
        timeout,
        multi_tenant=True,
        use_libuv=place.use_libuv,
        tls=place.tls,
        began=deadline.began,
        rank_token=rank_token,
        all_have_two=True,
        server="" if place.prefix else None,  # TCPSTORE_JOIN names keys, not a store
    )
    store = joining.native
    joined(joining)
    server = joining.detach_server(store)
    return (_CppPrefixStore(place.prefix, store) if place.prefix else store), server


def _join_agents_server(place: Place, deadline: Deadline, rank_token: bytes) -> Any:
    """Return the C++ client of the server of torchrun's agent; None if the server is not ours, or on any failure.

    That server starts before its workers and outlives them, so it cannot be that of another round, and half the round
    trips of `_Joining` suffice.
    """
    try:
        with BriefJoin(place.host, place.port, deadline, find_token()) as brief:
            native = _CppTCPStore(
                place.host,
                place.port,
                None,
                False,
                timedelta(seconds=deadline.timeout),
                wait_for_workers=False,
                use_libuv=place.use_libuv,
            )
            return native if brief.join(rank_token, place.world_size) else None
    except (OSError, ProtocolError):
        return None


def host_native(store: Any, make: Callable[..., Any], *given: Any, **named: Any) -> NativeServer | None:
    """Host the server of a master and have `make` connect its C++ client `store` to it.

    The server runs as long as that client exists. The other arguments and the errors are those of TCPStore. Returns
    None if torchrun's agent hosts at this address.
    """
    return _Joining(make, *given, **named).detach_server(store)
