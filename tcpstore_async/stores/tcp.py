"""TCPStore: a store whose keys are kept by a server.

It knows PyTorch's constructor, which rank hosts the server, how ranks join, and which methods block. It must not know
bytes on the wire or sockets. Invariant: a store that was created has joined the server of its own round; a constructor
that fails leaves nothing behind.
"""

import functools
import logging
import os
import random
import re
import socket
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from ..auth.secret_files import TOKEN, TOKEN_FILE, TlsFiles
from ..auth.tokens import HostTokens, read_keys
from ..base.addresses import unbracketed
from ..base.coercion import (
    Text,
    Timeout,
    call_seconds,
    in_milliseconds,
    to_bool,
    to_host,
    to_int64,
    to_port,
    to_world_size,
)
from ..base.deadline import DEFAULT_TIMEOUT, Deadline
from ..base.errors import DistNetworkError, QueueEmptyError, StoreTimeoutError
from ..base.keys import caller_keys, decode_keys, stored_key, stored_keys
from ..client import background, capabilities, exchanges, explanation, requests
from ..client.client_info import introduction
from ..client.connect import always, leave_rest_to_parent
from ..client.credentials import find_token
from ..client.requests import Request
from ..client.server_url import Address, ServerUrl
from ..client.servers import Servers
from ..client.store_name import (
    StoreName,
    StoreTakenError,
    attempt_from_environment,
    find_server,
    is_local,
    process_id,
)
from ..client.sync_client import TCPClient
from ..client.tls import checked
from ..client.tls_settings import CERT, KEY, files_from_environment, wants_tls
from ..client.url_variables import advice_for_stores
from ..server.master import ServerHandle, check_host_tokens, host
from ..session.auth import ALL, REMOTE
from ..stacks import switch
from ..wire.commands import WORKERS_KEY
from ..wire.values import unpack
from .base import Store
from .held_port import HeldPort, hold
from .own_address import OwnAddress
from .rank import YES, Rank

log = logging.getLogger("tcpstore_async.stores")

TOKEN_KEYS: Final = "TCPSTORE_TOKEN_KEYS"
"""Environment variable: the file of the keys with which a master's server checks tokens."""

_COUNT_SECONDS: Final = 0.2
"""Seconds beyond the timeout for asking how many ranks have joined."""

_POLL_SECONDS: Final = 0.01
"""Seconds between a master's requests for the number of ranks on PyTorch's server, as in PyTorch."""

_FREE_NAMES: Final = 64
"""Names that a master of port 0 tries."""

_CHECKS_AT_ONCE: Final = 512
"""Requests of one batch, whose replies fit any socket buffer: PyTorch's legacy server stops reading from a peer that
does not read."""


class TCPStore(Store):
    """A client of a TCPStore server and, with `is_master`, the server: a drop-in for `torch.distributed.TCPStore`.

    The server runs in a separate process and listens on `bind_host`, by default on every interface, until the last
    store that owns it is closed or its owner ends. With `world_size` and `wait_for_workers`, the master's constructor
    returns once that many ranks have joined, and every other rank's once that rank has. The constructor takes at most
    `timeout` (a timedelta or seconds), which also applies to later calls.

    Every connection presents the `token`, if there is one; by default it is that of TCPSTORE_TOKEN, or of the file
    TCPSTORE_TOKEN_FILE. A master's server then admits only clients with the same token, or that of the environment.
    With `token_keys`, by default the file that TCPSTORE_TOKEN_KEYS names, it admits tokens signed by a key of that
    file, and a master without a token makes its own. `require_auth` says which clients need a token: `all`, those from
    other hosts (`remote`), or none (empty). With the token "" and without keys, the server checks nothing.

    `tls` encrypts the connections of this store, and has a master's server offer TLS beside plain connections; None
    means if the environment variable TCPSTORE_TLS is 1. TCPSTORE_CA, TCPSTORE_CERT and TCPSTORE_KEY name the files.

    With `server`, by default that of TCPSTORE_SERVER_URL, `tcp://HOST:PORT` or `tcps://HOST:PORT` (of a replicated
    store, several HOST:PORT separated by commas), the address of the store is a name on that server: nothing is bound,
    the master owns the store, and the other ranks wait until it exists. `bind_host` has no effect then,
    `master_listen_fd` is closed, and for port 0 a free name is chosen. If the server has a port for the store, for
    clients on other hosts that cannot enter a named store, `host` and `port` are that port's; not if the server's
    address is on loopback and the store's is not. With an empty `server` the address is an address.

    Raises DistNetworkError if the server cannot be reached or its address or name is in use, StoreTimeoutError if it
    does not reply, DistStoreError if not all ranks have joined in time, and AccessDeniedError if the server refuses the
    token or the file of a token or of keys cannot be used.
    """

    _may_be_thread = True
    """Whether the server may run in a thread of this process."""

    _began: float | None = None
    """When the timeout of the constructor began, on the monotonic clock; None means now."""

    _rank_token = b""
    """Token with which the rank may have been counted already; empty if it was not."""

    _server: ServerUrl | None = None
    """The server on which this store has a name, if it has one."""

    _others: tuple[Address, ...] = ()
    """Further servers of a store without a name."""

    _owns = False
    """Whether this store owns the named store."""

    _refused_is_final = False
    """Whether a refused connection means that the server is gone, not that it is still to come."""

    _shares = ""
    """Key under which stores of this process share the ownership (`multi_tenant`)."""

    _held: HeldPort | None = None
    """Keeps the port of that name from being taken for free on this host."""

    _ending: "weakref.finalize[Any, TCPStore] | None" = None
    """Ends the named store with the process, if this store owns it."""

    _client: TCPClient | None = None
    _tls: TlsFiles | None = None
    _hosted: ServerHandle | None = None

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
        require_auth: str = ALL,
        server: str | None = None,
    ) -> None:
        _remember(self)
        switch.start()
        super().__init__(timeout)
        self._token = find_token(token)
        host_name = to_host("host_name", host_name)
        bind_host = None if bind_host is None else to_host("bind_host", bind_host)
        master_listen_fd = None if master_listen_fd is None else to_int64("master_listen_fd", master_listen_fd)
        port = to_port("port", port)
        ranks = to_world_size("world_size", world_size)
        multi_tenant = to_bool("multi_tenant", multi_tenant)
        wait_for_workers = to_bool("wait_for_workers", wait_for_workers)
        self._libuv = _use_libuv(use_libuv)
        deadline = Deadline(self._timeout, self._began)
        is_master = to_bool("is_master", is_master)
        of_agent = _is_agent_server(host_name, port)
        self._server = None if of_agent else find_server(server)
        wanted = None if tls is None else to_bool("tls", tls)
        files = files_from_environment() if wants_tls(wanted, self._server) else None
        if files is not None:
            self._check_tls()
            self._tls = checked(files)
        try:
            if self._server is not None:
                self.host = host_name
                self._owns = is_master
                self._shares = process_id() if multi_tenant else ""
                self._use_name(port, ranks if wait_for_workers else None, deadline, master_listen_fd)
                return
            if is_master:
                tokens = self._host_tokens(port, token_keys, require_auth)
                self._hosted = self._host(port, bind_host, master_listen_fd, multi_tenant, deadline, files, tokens)
            hosted = self._hosted
            self.host = host_name
            self.port = port if hosted is None else hosted.port
            if hosted is not None and ranks is not None:
                if wait_for_workers:
                    hosted.announce(ranks, self._most_connections(ranks))
                else:  # not all ranks may come, or not at once, so a lack of capacity is only logged
                    hosted.check_capacity(ranks, self._most_connections(ranks))
            self._client = self._connect(ranks if wait_for_workers else None, deadline)
            if hosted is not None:
                self._client.server_crash = hosted.crash
            if hosted is not None and ranks is not None and wait_for_workers:
                _wait_for_workers(self._client, ranks, deadline)
                hosted.complete()
        except BaseException as error:
            self.close()
            if type(error) is DistNetworkError and server is None and not of_agent and (advice := advice_for_stores()):
                raise DistNetworkError(f"{error} {advice}") from None
            raise

    def _use_name(self, port: int, ranks: int | None, deadline: Deadline, listen_fd: int | None) -> None:
        """Join, or create, the store that has this address as its name. For port 0, choose a free name."""
        self.port = port
        tries = _FREE_NAMES if self._owns and port == 0 else 1
        while self._client is None:
            if tries > 1:
                self.port = self._free_number()
            try:
                self._client = self._connect(ranks, deadline)
            except StoreTakenError:
                tries -= 1
                if tries <= 1:
                    raise
        if listen_fd is not None:
            os.close(listen_fd)
        if self._owns and self._client.name is not None and self._client.name.address is not None:
            self._held = hold(self.port)
            if self._held is not None:
                self._held.reset_peers()
        self._publish(self._client)
        if self._owns:
            # Otherwise the end of the process would look like its loss, which gives the ranks no time to leave.
            self._ending = weakref.finalize(self, self._client.close)
            if ranks is not None:
                _wait_for_workers(self._client, ranks, deadline)

    def _publish(self, client: TCPClient) -> None:
        """Set `host` and `port` to the store's port at the server, unless more hosts can use the store's name."""
        name = client.name
        if self._server is None or name is None or not name.port:
            return
        if not is_local(client.host) or is_local(self.host):
            self.host, self.port = client.host, name.port

    def _free_number(self) -> int:
        """Return a port number for a name, in place of port 0, that is probably not in use."""
        with suppress(OSError), socket.create_server(("", 0)) as free:
            return int(free.getsockname()[1])
        return random.randrange(1024, 65536)

    def _name(self, ranks: int | None) -> StoreName | None:
        """Return the name of this store for a new client, if it has one."""
        if self._server is None:
            return None
        name = StoreName.at(self.host, self.port, self._owns, attempt_from_environment())
        name.wants_port = True
        if self._owns:
            name.shares = self._shares
            name.joins = ranks or 0
        return name

    def _connect(self, ranks: int | None, deadline: Deadline) -> TCPClient:
        """Connect and, with a number of ranks, join.

        If the connection is lost in between, it may have been to the previous round's server as it stopped, or to one
        that comes back. Our servers count a rank once, so the join is sent again, and know an owner again.
        """
        hosts = self._hosted is not None
        rank = Rank(ranks or 0, self._owns or hosts, deadline, self._rank_token, hosts)
        owner = self._name(ranks) if self._owns else None
        given = [(self.host, self.port), *self._others] if self._server is None else self._server.all()
        servers = Servers(*given)
        own = None if self._hosted is None else OwnAddress(self.host, self.port)
        while True:
            try:
                name = owner or self._name(ranks)
                client = TCPClient(
                    servers,
                    self._timeout,
                    introduction(ranks),
                    deadline.began,
                    self._token,
                    self._tls,
                    name,
                    joins=ranks is not None,
                    refused_is_final=self._refused_is_final,
                    wanted=always if own is None else own.wait,
                )
            except DistNetworkError as error:
                if own is not None and own.fault:
                    raise DistNetworkError(f"{error} {own.fault}") from None
                raise rank.blame(error) from None
            client.joining = True
            if self._server is not None:  # which has the server first that serves
                self._server = servers.url(self._server.tls)
            try:
                if self._owns:
                    client.extended(began=deadline.began)  # from now on a reset connection does not end the store
                if ranks is None or self._joins(client, rank):
                    client.timeout = self._timeout
                    client.joining = False
                    if client.durable:  # the session must be resumed though no call is made
                        background.defer(client.watch)
                    return client
                client.close()
            except DistNetworkError as error:
                client.close()
                if not rank.pause():
                    raise rank.blame(error) from None
            except StoreTimeoutError as error:
                client.close()
                raise StoreTimeoutError(f"no reply from {client.host}:{client.port} while joining: {error}") from None
            except BaseException:
                client.close()
                raise

    def _most_connections(self, ranks: int) -> int:
        """Return the number of connections that this many ranks need at once."""
        return ranks

    def _check_tls(self) -> None:
        """Raise DistNetworkError if this store cannot use TLS."""

    def _check_tokens(self) -> None:
        """Raise AccessDeniedError if this store cannot present a token to a server that requires one."""

    def _host(
        self,
        port: int,
        bind_host: str | None,
        listen_fd: int | None,
        multi_tenant: bool,
        deadline: Deadline,
        files: TlsFiles | None,
        tokens: HostTokens | None,
    ) -> ServerHandle | None:
        """Host a server; return None if torchrun's agent hosts one at this address, as in PyTorch."""
        try:
            if files is not None and not (files.cert and files.key):
                raise DistNetworkError(
                    f"a server with TLS needs a certificate and its key: set {CERT} and {KEY} for the rank that hosts "
                    "it"
                )
            hosted = host(
                port,
                bind_host=bind_host,
                listen_fd=listen_fd,
                multi_tenant=multi_tenant,
                backend="uv" if self._libuv else "threaded",
                may_be_thread=self._may_be_thread,
                timeout=deadline.left(),
                tls=files,
                tokens=tokens,
            )
            log.info(
                "the store on port %d ends with this process: `tcpstore serve --persist DIR` keeps stores that do not, "
                "for ranks with TCPSTORE_SERVER_URL=tcp://HOST:PORT (docs/survive.md)",
                hosted.port,
            )
            return hosted
        except DistNetworkError:
            if _is_agent_port(port) and listen_fd is None:
                return None
            raise

    def _host_tokens(self, port: int, given: str | os.PathLike[str] | None, require_auth: str) -> HostTokens | None:
        """Return the tokens and keys that this master's server checks, and have this store present a token."""
        if require_auth not in ("", REMOTE, ALL):
            raise ValueError(f"require_auth must be '', {REMOTE!r} or {ALL!r}, not {require_auth!r}")
        keys = os.path.abspath(os.fspath(given)) if given else ""
        if given is None and os.environ.get(TOKEN_KEYS):
            keys = os.path.abspath(os.environ[TOKEN_KEYS])
        if not keys and not self._token:
            if os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE):
                log.warning(
                    "this store's server admits clients without a token: the store was given token='', which "
                    "overrides $%s",
                    TOKEN,
                )
            return None
        if not _is_agent_port(port):
            self._check_tokens()
        accepted = {self._token} | ({found} if (found := find_token()) else set())
        tokens = HostTokens(keys, frozenset(accepted), require_auth)
        check_host_tokens(tokens)
        if not self._token:
            self._token = read_keys(keys).create().encode()
        return tokens

    def _leave_server(self) -> ServerHandle | None:
        """Close the connections; return the server, if this store owns one, for the caller to release."""
        hosted, self._hosted = self._hosted, None
        self.close()
        return hosted

    def _joins(self, client: TCPClient, rank: Rank) -> bool:
        """Join; return whether the server is that of this store's round."""
        return rank.join(client)

    @classmethod
    def _of(cls, client: TCPClient, libuv: bool) -> "TCPStore":
        """Return a store that uses this client and owns no server."""
        store = cls.__new__(cls)
        _remember(store)
        Store.__init__(store, client.timeout)
        store.host = client.host
        store.port = client.port
        store._client = client
        store._libuv = libuv
        return store

    @property
    def libuvBackend(self) -> bool:
        """Whether the event-driven backend was chosen."""
        return self._libuv

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._connection().timeout = self._timeout

    def clone(self) -> "TCPStore":
        """Return a store with its own connections and the same timeout, which does not own the server."""
        clone = TCPStore._of(self._connection().clone(), self._libuv)
        clone.host, clone.port, clone._server = self.host, self.port, self._server
        return clone

    def close(self) -> None:
        """Close the connections and stop the server, if this is the last store that owns it.

        Calls in progress in other threads fail. The port is free on return; ranks that are still connected have 10
        seconds to finish. A server of ours has executed all writes on return; if it does not answer within a second,
        that is logged.
        """
        client, hosted = self._client, self._hosted
        if self._held is not None:  # first: the next store of that name holds the number
            self._held.close()
        if client is not None:
            client.close()
        if self._ending is not None:
            self._ending.detach()
        self._hosted = None
        if hosted is not None:
            hosted.release()

    def __del__(self) -> None:
        if self._client is not None and not self._client.closed:
            warnings.warn(f"a TCPStore was not closed: {self!r}", ResourceWarning, source=self, stacklevel=1)
            self.close()

    def __repr__(self) -> str:
        client = self._client
        server = "<nullptr>" if self._hosted is None else f"TCPServer(port={self.port})"
        return f"TCPStore(client=TCPClient({client.describe() if client else '<nullptr>'}), server={server})"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'TCPStore' object: create one in the other process, or clone() it")

    # Values

    def set(self, key: Text, value: Text) -> None:
        self._connection().call(requests.set_(key, value))

    def get(self, key: Text) -> bytes:
        client = self._connection()
        name = stored_key(key)
        request, seconds, began = requests.wait([name]), self._timeout, time.monotonic()
        # A timeout of 0 is a single check: cancelling a FETCH would drop a value that is on its way.
        if client.extended(request, seconds, began) and seconds:
            return unpack(client.call_blocking(requests.fetch(name), seconds, began=began))
        return unpack(client.call_blocking(request, seconds, requests.get(name), began))

    def add(self, key: Text, amount: int) -> int:
        total: int = self._connection().call(requests.add(key, amount))
        return total

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return unpack(self._connection().call(requests.compare_set(key, expected, desired)))

    def check(self, keys: Iterable[Text]) -> bool:
        present: bool = self._connection().call(requests.check(stored_keys(keys)))
        return present

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._call_blocking(requests.wait(stored_keys(keys)), call_seconds(timeout, self._timeout))

    def delete_key(self, key: Text) -> bool:
        return bool(self._connection().call(requests.delete_key(key)) == 1)

    def num_keys(self) -> int:
        return int(self._connection().call(requests.NUM_KEYS))

    def list_keys(self) -> list[str]:
        return decode_keys(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return caller_keys(self._supporting(capabilities.LIST_KEYS, requests.LIST_KEYS).call(requests.LIST_KEYS))

    def append(self, key: Text, value: Text) -> None:
        self._connection().call(requests.append(key, value))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        names = stored_keys(keys)
        values = self._call_blocking(requests.wait(names), self._timeout, requests.multi_get(names))
        return [unpack(value) for value in values]

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        self._connection().call(requests.multi_set(keys, values))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        """Find missing keys with CHECKs, many per round trip: every server has CHECK, and the replies are short."""
        batch = [requests.check([name]) for name in stored_keys(keys)]
        absent: list[int] = []
        for start in range(0, len(batch), _CHECKS_AT_ONCE):
            try:
                found = self._connection().call_all(batch[start : start + _CHECKS_AT_ONCE], deadline)
            except StoreTimeoutError:
                return absent, False
            absent += [start + place for place, present in enumerate(found) if not present]
        return absent, True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        request = requests.queue_push(key, value)
        self._queues(request).call(request)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = stored_key(key)
        request = requests.wait([name]) if block else requests.queue_pop(name)
        seconds, began = self._timeout, time.monotonic()
        client = self._queues(request, began)
        if not client.extended(request, seconds, began):
            return self._pop_from_pytorchs(client, name, block, began)
        lease = requests.lease(name, bool(block) and seconds != 0)
        popped: list[bytes | None] = []
        try:
            # `+=` stores the item in the step that returns it, so that no interrupt loses it.
            popped += map(client.pop, (lease,), (seconds,), (began,))
            if popped[0] is not None:
                return popped[0]
        except BaseException:
            if popped and popped[0] is not None:
                client.call(requests.queue_push(key, popped[0]))
            raise
        if (
            block
            and seconds == 0
            and (not client.call(requests.check([name])) or client.call(requests.queue_len(name)))
        ):
            raise StoreTimeoutError(requests.timeout_message(request, seconds))
        raise QueueEmptyError("queue is empty")

    def _pop_from_pytorchs(self, client: TCPClient, name: bytes, block: bool, began: float) -> bytes:
        doubts = 0
        while True:
            item = client.pop_unconfirmed(
                requests.queue_pop(name), self._timeout, began, requests.wait([name]) if block else None
            )
            if item is not None:
                return item
            doubts += 1
            if not block or _is_plain(client, name, doubts):
                raise QueueEmptyError("queue is empty")

    def queue_len(self, key: Text) -> int:
        request = requests.queue_len(stored_key(key))
        length: int = self._queues(request).call(request)
        return length

    # Barriers

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        request, seconds, began = (
            requests.barrier(key, world_size),
            call_seconds(timeout, self._timeout),
            time.monotonic(),
        )
        if self._connection().supports(capabilities.BARRIER, request, seconds, began):
            self._call_blocking(request, seconds, began=began)
        else:
            self._barrier_over_keys(key, request, seconds, began)

    def _barrier_over_keys(self, key: Text, request: Request, seconds: float, began: float) -> None:
        """Do as the base class does, with one timeout for all requests."""
        client = self._connection()
        deadline = Deadline.of_a_call(seconds, began)
        try:
            wait = exchanges.run(lambda request: client.call(request, deadline), exchanges.arrive(key, request[1][1]))
            client.call_blocking(wait, seconds, began=began)
        except StoreTimeoutError:
            raise StoreTimeoutError(requests.timeout_message(request, seconds)) from None

    # Helpers

    def _connection(self) -> TCPClient:
        if self._client is None:
            raise DistNetworkError("the store was not initialized")
        return self._client

    def _call_blocking(
        self, request: Request, seconds: float, then: Request | None = None, began: float | None = None
    ) -> Any:
        """Identify the server, so that a further connection can be verified, and make a blocking call."""
        client = self._connection()
        began = time.monotonic() if began is None else began
        client.extended(request, seconds, began)
        return client.call_blocking(request, seconds, then, began)

    def _queues(self, request: Request, began: float | None = None) -> TCPClient:
        """Return the client if the server has queues. Raises NotImplementedError."""
        if not self._libuv and not self._connection().extended(request, began=began):
            raise NotImplementedError("queues not implemented on legacy TCPStore backend")
        return self._supporting(capabilities.QUEUES, request, began)

    def _supporting(self, what: str, request: Request, began: float | None = None) -> TCPClient:
        """Return the client if the server has what `request` needs; without it, it would close the connection."""
        client = self._connection()
        if not client.supports(what, request, began=began):
            raise capabilities.lacks(what, client.host, client.port)
        return client


_stores: Final[dict[int, "weakref.ref[TCPStore]"]] = {}
"""All stores of this process. A plain dict can be copied atomically while another thread creates a store."""


def _remember(store: TCPStore) -> None:
    # A C function, so that no interrupt strikes in the callback: Python ignores the exceptions of callbacks.
    me = id(store)
    _stores[me] = weakref.ref(store, functools.partial(_stores.pop, me))


def _reset_after_fork() -> None:
    """Have every store open its own connections in a forked child."""
    for reference in list(_stores.values()):
        store = reference()
        if store is not None and store._client is not None:
            store._client.reset_after_fork()
    leave_rest_to_parent()


os.register_at_fork(after_in_child=_reset_after_fork)


def _use_libuv(given: bool | None) -> bool:
    """Return the argument or, without one, whether USE_LIBUV is exactly 1, as in PyTorch."""
    if given is None:
        return os.environ.get("USE_LIBUV", "1") == "1"
    return to_bool("use_libuv", given)


def _is_agent_server(host: str, port: int) -> bool:
    """Return whether torchrun's agent hosts a server at this address, which then stands for no name."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() not in YES:
        return False
    return (host, str(port)) == (unbracketed(os.environ.get("MASTER_ADDR", "")), os.environ.get("MASTER_PORT"))


_NO: Final = ("0", "f", "false", "n", "no")


def _is_agent_port(port: int) -> bool:
    """Return whether torchrun's agent hosts the server of this port, by the rule of PyTorch's TCPStore.

    A rendezvous has another rule: `rendezvous_url._is_agent_address`. Raises RuntimeError as PyTorch does if a variable
    cannot be parsed.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "0").lower()
    if agent not in YES + _NO:
        raise RuntimeError("Invalid value for environment variable: TORCHELASTIC_USE_AGENT_STORE")
    number = re.match(r"\s*([+-]?[0-9]{1,9})(?![0-9])", os.environ.get("MASTER_PORT", "0"))
    if number is None:
        raise RuntimeError("Invalid value for environment variable: MASTER_PORT")
    return agent in YES and int(number[1]) == port


def _is_plain(client: TCPClient, name: bytes, doubts: int) -> bool:
    """Return whether a plain value, rather than a queue, has this name; in doubt True without LIST_KEYS."""
    plain = exchanges.run(client.call, exchanges.is_plain(name, doubts))
    if plain is None:
        request = requests.LIST_KEYS
        return not client.supports(capabilities.LIST_KEYS, request) or name in client.call(request)
    return plain


def _wait_for_workers(client: TCPClient, ranks: int, deadline: Deadline) -> None:
    """Block until all ranks have joined: one request on our servers, polling on PyTorch's. Raises StoreTimeoutError."""
    try:
        if client.extended(seconds=deadline.timeout, began=deadline.began):
            left = deadline.left()
            client.call_blocking(requests.wait_count(WORKERS_KEY, ranks), -1.0 if left is None else left)
            return
        while _joined(client, deadline) < ranks:
            if deadline.passed():
                raise StoreTimeoutError
            time.sleep(_POLL_SECONDS)
    except StoreTimeoutError as late:
        raise _not_all_joined(client, deadline, ranks, late) from None


def _not_all_joined(client: TCPClient, deadline: Deadline, ranks: int, late: StoreTimeoutError) -> StoreTimeoutError:
    """Return the error of a rank whose wait for the others has timed out with `late`."""
    seconds = -(-in_milliseconds(deadline.timeout) // 1000)
    try:
        joined = str(_joined(client, Deadline(_COUNT_SECONDS)))
    except StoreTimeoutError:
        joined = "?"
    text = f"Timed out after {seconds} seconds waiting for clients. {joined}/{ranks} clients joined."
    error = StoreTimeoutError(f"{text} M{explanation.ranks_text(late)[1:]}" if late.missing_ranks else text)
    error.missing_ranks, error.elsewhere = late.missing_ranks, late.elsewhere
    return error


def _joined(client: TCPClient, deadline: Deadline) -> int:
    return int(unpack(client.call(requests.get(WORKERS_KEY), deadline)) or b"0")
