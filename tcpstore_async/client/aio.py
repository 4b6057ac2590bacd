"""The async client: typed methods over shared connections.

It knows the command of each method, when a call may share a connection and when it needs its own, and deadlines. It
must not know bytes on the wire or sockets.

Invariants: a blocked call delays no other call. What a store has written is visible to its later requests, on whichever
connection. Cancelling a call leaves every connection in step.
"""

import asyncio
import functools
import logging
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from datetime import timedelta
from typing import Any, cast

from ..auth.secret_files import TlsFiles
from ..base.callbacks import weakly
from ..base.coercion import Text, Timeout, call_seconds, to_host, to_port, to_seconds
from ..base.deadline import DEFAULT_TIMEOUT, IDLE_SECONDS, MIN_ROUND_TRIP, Deadline
from ..base.errors import DistError, DistNetworkError, ProtocolError, QueueEmptyError, StoreTimeoutError
from ..base.keys import caller_keys, decode_keys, stored_key, stored_keys
from ..session.client import PendingCall
from ..session.identity import SINGLE_LINKS, Identity, check_admitted, granted_access, read_identity
from ..stacks import switch
from ..wire.commands import PARKS
from ..wire.values import Framed, unpack
from . import capabilities, exchanges, explanation, requests
from .async_connection import AsyncConnection
from .client_info import introduction
from .connect import connect, lost_error
from .credentials import find_token
from .requests import ANOTHER, Request
from .resume import resume
from .servers import Servers
from .store_name import StoreEndedError, StoreName, find_server
from .tls import checked, serve
from .tls_settings import files_from_environment, wants_tls
from .url_variables import advice_for_stores

log = logging.getLogger("tcpstore_async.client")

_RETRY_SECONDS = 0.05
"""Seconds until a probe is repeated that ended with another call's deadline."""


class _CallDeadline(Deadline):
    """The deadline of one call, and its timeout error. A timeout of 0 still allows one round trip."""

    def __init__(self, request: Request, seconds: float, began: float | None = None) -> None:
        super().__init__(seconds or MIN_ROUND_TRIP, began)
        self.once = seconds == 0
        self._request = request
        self._seconds = seconds

    def error(self) -> StoreTimeoutError:
        return StoreTimeoutError(requests.timeout_message(self._request, self._seconds))


class AsyncTCPStore:
    """A client of a TCPStore server for asyncio, created by `connect` and bound to the loop that created it.

    The methods are those of `torch.distributed.TCPStore`, with `await`. Each raises StoreTimeoutError, which is a
    DistStoreError, when the store's timeout passes, and DistNetworkError when the connection is lost. Any number of
    tasks may make calls at once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        name: StoreName | None = None,
    ) -> None:
        self._name = name
        """The named store on that server, if it is one."""
        self.host = to_host("host", host)
        self.port = to_port("port", port)
        self._servers = Servers((self.host, self.port))
        self._token = find_token(token)
        self.identity: Identity | None = None
        """The server's identity, once requested, if the server is one of ours."""
        self._tls = tls
        self._timeout = to_seconds("timeout", timeout)
        self._connections: dict[AsyncConnection, None] = {}
        self._free: dict[AsyncConnection, None] = {}
        """Connections without a blocking call."""
        self._current: AsyncConnection | None = None
        """The connection that calls share; every unconfirmed write is on it."""
        self._opening: asyncio.Task[Exception | None] | None = None
        self._slot_taken = False
        """Whether a blocking call is acquiring a connection."""
        self._slot_waiters: deque[asyncio.Future[None]] = deque()
        """Blocking calls that wait for that one."""
        self._identifying: asyncio.Task[Exception | None] | None = None
        self._identified = False
        self._probing: dict[str, asyncio.Task[Exception | None]] = {}
        self._supported: dict[str, bool] = {}
        """Whether the server has each capability that was probed."""
        self._lost: DistNetworkError | None = None
        self._stranded: set[asyncio.Task[None]] = set()
        """Tasks that push back the items of abandoned pops on PyTorch's servers."""

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
        token: str | None = None,
        tls: bool | None = None,
        tls_files: TlsFiles | None = None,
        server: str | None = None,
    ) -> "AsyncTCPStore":
        """Connect to the server at this address, retrying until the timeout. Raises DistNetworkError.

        The timeout, in seconds or a timedelta, also applies to later calls; negative means none, 0 one attempt. Every
        connection presents the token, if there is one; by default it is that of TCPSTORE_TOKEN, or of the file
        TCPSTORE_TOKEN_FILE. Raises AccessDeniedError if the server refuses it. With `tls`, the connections are
        encrypted; None means if the environment variable TCPSTORE_TLS is 1. `tls_files` replace the files that
        TCPSTORE_CA, TCPSTORE_CERT and TCPSTORE_KEY name. With `server`, by default that of TCPSTORE_SERVER_URL, the
        address names a store on that server, for which this waits; with an empty `server` it is an address.
        """
        url = find_server(server)
        name = None
        servers = Servers((to_host("host", host), to_port("port", port)))
        if url is not None:
            name = StoreName.at(*servers.first)
            servers = Servers(*url.all())
        try:
            return await cls._connect(servers, timeout, token, wants_tls(tls, url), tls_files, name)
        except DistNetworkError as error:
            if type(error) is DistNetworkError and server is None and (advice := advice_for_stores()):
                raise DistNetworkError(f"{error} {advice}") from None
            raise

    @classmethod
    async def _connect(
        cls,
        servers: Servers,
        timeout: Timeout,
        token: str | None,
        tls: bool,
        tls_files: TlsFiles | None,
        name: StoreName | None,
        refused_is_final: bool = False,
    ) -> "AsyncTCPStore":
        """Connect; with `refused_is_final`, raise ConnectionRefusedError at once if all servers refuse."""
        switch.start()
        files = checked(tls_files or files_from_environment()) if tls else None
        store = cls(*servers.first, timeout, token=token, tls=files, name=name)
        store._servers = servers
        await store._open_connection(refused_is_final)
        return store

    async def __aenter__(self) -> "AsyncTCPStore":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Calls in progress fail, and so do later ones.

        A server of ours has executed all writes on return; if it does not answer within a second, that is logged.
        """
        if self._lost is None:
            last: list[asyncio.Future[Any]] = [*self._stranded]
            fence: asyncio.Future[Any] | None = None
            connection = self._current
            waits = connection is not None and connection.session.waiting is not None
            if connection is not None and not waits and connection.link and connection.session.unconfirmed():
                connection.send_fence()  # a connection that breaks is resumed, and sends the writes again
                fence = connection.fence
                assert fence is not None
                last.append(fence)
            if last:
                await asyncio.wait(last, timeout=MIN_ROUND_TRIP)
            if fence is not None and not fence.done():
                log.warning("%s", requests.unconfirmed_at_close(self.host, self.port))
        self._lose(DistNetworkError("the store has been closed"), closed=True)
        tasks = [task for task in (self._opening, self._identifying, *self._probing.values()) if task]
        if tasks:
            await asyncio.wait(tasks)

    def __del__(self) -> None:
        connections = getattr(self, "_connections", None)
        if connections:
            text = f"an AsyncTCPStore connected to {self.host}:{self.port} was not closed"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)
            for connection in connections:
                connection.forget()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of later calls; negative means none."""
        self._timeout = to_seconds("timeout", timeout)

    async def clone(self) -> "AsyncTCPStore":
        """Return a store with its own connections to the same server and the same timeout."""
        if self._lost is not None:
            raise copy(self._lost)
        name = None if self._name is None else self._name.of_a_guest()
        clone = await self._connect(
            self._servers, self.timeout, self._token.decode(), self._tls is not None, self._tls, name
        )
        if self.identity is not None and await clone.server() != self.identity:
            await clone.close()
            raise DistNetworkError(ANOTHER)
        return clone

    # Values

    async def set(self, key: Text, value: Text) -> None:
        await self._call(requests.set_(key, value))

    async def get(self, key: Text) -> bytes:
        """Return the value as soon as the key exists."""
        name = stored_key(key)
        request = requests.wait([name])
        deadline = _CallDeadline(request, self._timeout)
        if self.identity is None and not await self._extended(deadline):  # PyTorch's servers have no FETCH
            await self._call_blocking(request, deadline)
            return unpack(await self._call_when_free(requests.get(name), deadline))
        found = await self._try_get(name, deadline)
        return unpack(await self._call_blocking(requests.fetch(name), deadline) if found is None else found)

    async def _try_get(self, name: bytes, deadline: _CallDeadline) -> Framed | None:
        """Return the value if the key exists, else None, without occupying a connection.

        Not for PyTorch's servers: the legacy one closes the connection on a GET of a missing key.
        """
        connection = self._ready_connection() or await self._free_connection(deadline)
        _, there = connection.call(*requests.check([name]))
        _, value = connection.call(*requests.get(name))
        found: Framed = await self._await_reply(value, deadline)
        if there.result():
            return found
        if deadline.once:
            raise deadline.error()
        return None

    async def add(self, key: Text, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        return int(await self._call(requests.add(key, amount)))

    async def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Set `desired` if the value is `expected`, and return the value afterwards. A missing key counts as empty.

        If the key is missing and `expected` is not empty, nothing is set and `expected` is returned, as in PyTorch.
        """
        return unpack(await self._call(requests.compare_set(key, expected, desired)))

    async def append(self, key: Text, value: Text) -> None:
        await self._call(requests.append(key, value))

    async def check(self, keys: Iterable[Text]) -> bool:
        """Return whether all keys exist."""
        return bool(await self._call(requests.check(stored_keys(keys))))

    async def ping(self) -> None:
        """Make one round trip, after which the server has executed everything sent before."""
        await self._call(requests.NO_KEY)

    async def delete_key(self, key: Text) -> bool:
        """Remove a key; return whether it existed."""
        return bool(await self._call(requests.delete_key(key)) == 1)

    async def num_keys(self) -> int:
        """Return the number of keys, including those that PyTorch keeps for itself, as in PyTorch."""
        return int(await self._call(requests.NUM_KEYS))

    async def list_keys(self) -> list[str]:
        """Return all keys, unordered, without PyTorch's own. Raises UnicodeDecodeError if one is not UTF-8."""
        return decode_keys(await self._list_keys_as_bytes())

    async def _list_keys_as_bytes(self) -> list[bytes]:
        """Return all keys as bytes: one that is not UTF-8 must not hide the others."""
        await self._require(capabilities.LIST_KEYS, requests.LIST_KEYS)
        return caller_keys(await self._call(requests.LIST_KEYS))

    async def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """Return the values as soon as all keys exist."""
        names = stored_keys(keys)
        deadline = _CallDeadline(requests.wait(names), self._timeout)
        await self._extended(deadline)
        await self._call_blocking(requests.wait(names), deadline)
        return [unpack(value) for value in await self._call_when_free(requests.multi_get(names), deadline)]

    async def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Set all keys or none. Raises DistStoreError if the numbers of keys and values differ."""
        await self._call(requests.multi_set(keys, values))

    # Waiting

    async def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        """Block until all keys exist.

        The timeout, in seconds or a timedelta, defaults to the store's; 0 checks once, negative means none.
        """
        request = requests.wait(stored_keys(keys))
        deadline = _CallDeadline(request, call_seconds(timeout, self._timeout))
        await self._extended(deadline)  # so that a further connection can be verified
        await self._call_blocking(request, deadline)

    async def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` calls have arrived at this key. It is never reset: use a new key for every round."""
        request = requests.barrier(key, world_size)
        deadline = _CallDeadline(request, call_seconds(timeout, self._timeout))
        if await self._supports(capabilities.BARRIER, deadline):
            await self._call_blocking(request, deadline)
            return
        arrive = exchanges.arrive(key, request[1][1])
        wait = await exchanges.run_async(lambda request: self._call_when_free(request, deadline), arrive)
        await self._call_blocking(wait, deadline)

    # Queues

    async def queue_push(self, key: Text, value: Text) -> None:
        request = requests.queue_push(key, value)
        await self._require(capabilities.QUEUES, request)
        await self._call(request)

    async def queue_len(self, key: Text) -> int:
        request = requests.queue_len(stored_key(key))
        await self._require(capabilities.QUEUES, request)
        return int(await self._call(request))

    async def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest item; with `block`, as soon as there is one.

        Raises QueueEmptyError without `block`, or if the key holds a plain value. If the call is cancelled or times out
        while the item is on its way, the item returns to the front of the queue; on PyTorch's servers, to the end.
        """
        name = stored_key(key)
        deadline = _CallDeadline(requests.wait([name]) if block else requests.queue_pop(name), self._timeout)
        await self._require(capabilities.QUEUES, requests.queue_pop(name), deadline if block else None)
        if not await self._extended(deadline):
            return await self._pop_from_pytorchs(name, block, deadline)
        item = await self._pop(requests.lease(name, block and not deadline.once), deadline)
        if item is not None:
            return unpack(item)
        # A single check that finds nothing is a timeout, unless a plain value has the key.
        if block and deadline.once and not (await self.check([key]) and await self.queue_len(key) == 0):
            raise deadline.error()
        raise QueueEmptyError("queue is empty")

    async def _pop(self, lease: Request, deadline: _CallDeadline) -> Framed | None:
        """Take an item that a server of ours leases; return None if there is none."""
        blocks = lease[0].flags & PARKS
        connection = await (self._connection_to_wait_on(deadline) if blocks else self._free_connection(deadline))
        connection.pops += 1
        try:
            if blocks:
                call, future = self._lease(connection, lease)
                _, item = await self._await_blocking(connection, call, future, deadline)
            else:
                _, item = await self._await_reply(connection.call(*lease)[1], deadline)
            if item is not None:
                connection.confirm(lease)
        except BaseException:
            connection.give_back(lease)
            raise
        finally:
            connection.pops -= 1
        return cast("Framed | None", item)

    async def _pop_from_pytorchs(self, name: bytes, block: bool, deadline: _CallDeadline) -> bytes:
        doubts = 0
        while True:
            if block and not deadline.once:
                await self._call_blocking(requests.wait([name]), deadline)
            item = await self._pop_unconfirmed(name)
            if item is not None:
                return unpack(item)
            doubts += 1
            if not block or await self._is_plain(name, doubts):
                raise QueueEmptyError("queue is empty")
            if deadline.once:
                raise deadline.error()

    async def _pop_unconfirmed(self, name: bytes) -> Framed | None:
        """Take an item from PyTorch's server; return None if there is none. Push it back if the call is abandoned."""
        request = requests.queue_pop(name)
        deadline = _CallDeadline(request, self._timeout)
        connection = await self._free_connection(deadline)
        _, future = connection.call(*request)
        try:
            _, item = await self._await_reply(asyncio.shield(future), deadline)
        except BaseException:
            stranded = asyncio.ensure_future(self._push_back(name, future))
            self._stranded.add(stranded)
            stranded.add_done_callback(self._stranded.discard)
            raise
        return cast("Framed | None", item)

    async def _push_back(self, name: bytes, popped: "asyncio.Future[Any]") -> None:
        try:
            _, item = await self._await_reply(popped, _CallDeadline(requests.queue_pop(name), -1.0))
            if item is not None:
                await self._call_when_free(requests.push_back(name, item))
        except (DistNetworkError, StoreTimeoutError):
            pass  # the item is lost with the connection, or the server no longer answers

    async def _is_plain(self, name: bytes, doubts: int) -> bool:
        """Return whether a plain value, rather than a queue, has this name; in doubt True without LIST_KEYS."""
        plain = await exchanges.run_async(self._call, exchanges.is_plain(name, doubts))
        if plain is not None:
            return plain
        if not await self._supports(capabilities.LIST_KEYS, _CallDeadline(requests.LIST_KEYS, self._timeout)):
            return True
        return name in await self._call(requests.LIST_KEYS)

    # Server identity and capabilities

    async def server(self) -> Identity | None:
        """Return the server's identity; None for PyTorch's servers and others without our extension."""
        await self._extended(_CallDeadline(requests.HAS_EXTENSION, self._timeout))
        return self.identity

    async def _extended(self, deadline: _CallDeadline) -> bool:
        """Return whether the server is one of ours; the first call asks it."""
        if not self._identified:
            if self._identifying is None or self._identifying.done():
                self._identifying = _shared(self._identify)
            await self._join_task(self._identifying, deadline)
        return self.identity is not None

    async def _supports(self, what: str, deadline: _CallDeadline) -> bool:
        """Return whether the server has a capability; the first call probes it, on a separate connection."""
        if what not in self._supported and await self._extended(deadline):
            self._supported[what] = True
        while what not in self._supported:
            trying = self._probing.get(what)
            if trying is None or trying.done():
                trying = self._probing[what] = _shared(functools.partial(self._probe, what))
            try:
                await self._join_task(trying, deadline)
            except StoreTimeoutError:
                if deadline.passed():
                    raise
                await asyncio.sleep(_RETRY_SECONDS)  # the probe ended with another call's deadline, or the store's
        return self._supported[what]

    async def _require(self, what: str, request: Request, deadline: _CallDeadline | None = None) -> None:
        """Raise NotImplementedError if the server lacks a capability that the call `request` needs."""
        if self._supported.get(what):
            return
        deadline = deadline or _CallDeadline(request, self._timeout)
        if what == capabilities.EXTENSION:
            await self._extended(deadline)
            supported = self.identity is not None and self.identity.extension >= request[0].since
        else:
            supported = await self._supports(what, deadline)
        if not supported:
            raise capabilities.lacks(what, self.host, self.port)

    async def _probe(self, what: str) -> None:
        for _ in range(capabilities.PROBES):
            if await self._probe_once(capabilities.probe(what)):
                self._supported[what] = True
                return
            await self._call(requests.NO_KEY)  # raises if the store, or the whole server, is lost
        self._supported[what] = False

    async def _probe_once(self, batch: list[Request]) -> bool:
        peer, session = await connect(
            self._servers, Deadline(self._timeout), token=self._token, tls=self._tls, name=self._name
        )
        connection = AsyncConnection(session, lambda *_: None, lambda _: None)
        await serve(peer, connection)
        try:
            for request in batch:
                await self._await_reply(connection.call(*request)[1], _CallDeadline(request, self._timeout))
        except DistNetworkError:
            return False
        finally:
            connection.close()
        return True

    async def _identify(self) -> None:
        deadline = _CallDeadline(requests.HAS_EXTENSION, self._timeout)
        if self.identity is None:
            self.identity = (await self._free_connection(deadline)).session.identity
        if self.identity is None and await self._call_when_free(requests.HAS_EXTENSION):
            self.identity = read_identity(unpack(await self._call_when_free(requests.WHO_ARE_YOU)))
        if self.identity is not None:
            check_admitted(self.identity)
            self._restrict(self._connections)
            await self._call_when_free(requests.introduce(introduction()))
            await self._open_link(await self._free_connection(deadline), deadline)
        self._identified = True

    async def _join_task(self, task: "asyncio.Task[Exception | None]", deadline: _CallDeadline) -> None:
        """Wait for a task that calls share, each until its own deadline. Raises the task's error."""
        await asyncio.wait({task}, timeout=deadline.left())
        if self._lost is not None:
            raise copy(self._lost)
        if not task.done():
            raise deadline.error()
        error = None if task.cancelled() else task.result()
        lost = isinstance(error, DistNetworkError) and not isinstance(error, StoreEndedError)
        # The task had the deadline of another call; the store itself is not lost while it has connections.
        if isinstance(error, StoreTimeoutError) or (lost and self._connections):
            raise deadline.error() from error
        if error is not None:
            raise copy(error)

    async def _verify(self, connection: AsyncConnection) -> None:
        """Check that a further connection leads to the same server. Raises DistNetworkError."""
        known = self.identity
        if known is None:
            return
        connection.call(*requests.introduce(introduction()))
        deadline = _CallDeadline(requests.WHO_ARE_YOU, self._timeout)
        found = connection.session.identity
        if found is None:
            _, answer = connection.call(*requests.WHO_ARE_YOU)
            found = read_identity(unpack(await self._await_reply(answer, deadline)))
        if found is not None and found.refused:
            check_admitted(found)
        if found is None or found.instance != known.instance:
            self._connection_lost(connection, DistNetworkError(ANOTHER))
            raise DistNetworkError(ANOTHER)
        self._restrict([connection])
        await self._open_link(connection, deadline)

    def _restrict(self, connections: Iterable[AsyncConnection]) -> None:
        """Restrict connections to the requests that the server allows, as with the token of a relay."""
        if self.identity is not None and not self._token:
            for connection in connections:
                connection.session.access = granted_access(self.identity.access)

    async def _open_link(self, connection: AsyncConnection, deadline: _CallDeadline) -> None:
        """Have the server keep the session when the connection breaks, if it can."""
        if self.identity is not None and self.identity.has_links(SINGLE_LINKS) and connection.link is None:
            opening = connection.open_link()
            await asyncio.wait({opening}, timeout=deadline.left())
            if not opening.done():
                raise deadline.error()
            opening.result()

    # Making calls

    def _call(self, request: Request) -> Awaitable[Any]:
        """Make a call that the server answers at once, or not at all."""
        connection = self._ready_connection() if self._identified else None
        if connection is not None:  # the common case, without a coroutine
            _, future = connection.call(*request)
            if self._timeout >= 0 and not future.done():
                connection.limit(future, request, self._timeout)
            return future
        return self._call_when_free(request) if self._identified else self._call_first(request)

    async def _call_first(self, request: Request) -> Any:
        """Request the server's identity before a call that does not need it.

        Without the identity, the store would not survive a reset connection. A call with a short timeout must not fail
        because of it, and leaves it to a later one.
        """
        deadline = _CallDeadline(request, self._timeout)
        if not 0 <= deadline.timeout < MIN_ROUND_TRIP:
            await self._extended(deadline)
        # A timeout of 0 allows each of them one second.
        return await self._call_when_free(request, None if deadline.once else deadline)

    async def _call_when_free(self, request: Request, deadline: _CallDeadline | None = None) -> Any:
        deadline = deadline or _CallDeadline(request, self._timeout)
        connection = await self._free_connection(deadline)
        _, future = connection.call(*request)
        return await self._await_reply(future, deadline)

    async def _call_blocking(self, request: Request, deadline: _CallDeadline) -> Any:
        """Make a call that the server answers when a condition is met, and cancel it at the deadline.

        After a timeout a server of ours is asked for the reason, which may take a second more; see `StoreTimeoutError`.
        """
        connection = await self._connection_to_wait_on(deadline)
        call, future = self._lease(connection, request)
        if deadline.once:
            connection.cancel(call)
        try:
            result = await self._await_blocking(connection, call, future, deadline)
            if call.canceled and not call.woken:
                raise deadline.error()
        except StoreTimeoutError as error:
            await self._explain(error, request, connection, call, 0.0 if deadline.once else deadline.timeout)
            raise
        return result

    async def _explain(
        self, error: StoreTimeoutError, request: Request, connection: AsyncConnection, call: PendingCall, seconds: float
    ) -> None:
        """Ask the server why a call has timed out, and add the reason to its error, if there is one."""
        asked = explanation.question(request, seconds, self.identity)
        if asked is None:
            return
        limit = _CallDeadline(asked, min(seconds, explanation.MOST_SECONDS))
        try:
            if not call.done:  # wait until this connection is free again, rather than open another one
                await self._await_reply(connection.rest_of(call), limit)
            explanation.explain(error, asked, await self._call_when_free(asked, limit))
        except (DistError, ProtocolError):
            pass  # the next call reports what has happened to the connection

    def _lease(self, connection: AsyncConnection, request: Request) -> tuple[PendingCall, "asyncio.Future[Any]"]:
        """Send a blocking call, behind a fence if there are unconfirmed writes; its connection is no longer free."""
        if connection.session.unconfirmed():
            connection.send_fence()
        call, future = connection.call(*request)
        assert call is not None
        self._free.pop(connection, None)
        return call, future

    async def _await_blocking(
        self, connection: AsyncConnection, call: PendingCall, future: "asyncio.Future[Any]", deadline: _CallDeadline
    ) -> Any:
        try:
            return await self._await_reply(future, deadline, lambda: connection.cancel(call))
        except asyncio.CancelledError:
            connection.cancel(call)
            raise

    async def _await_reply(
        self, future: "asyncio.Future[Any]", deadline: _CallDeadline, expire: Callable[[], None] = lambda: None
    ) -> Any:
        """Return the future's result, or raise the deadline's error.

        It raises a copy: the error's traceback refers to callers' frames, which refer to the future.
        """
        left = deadline.left()
        timer = None
        if left is not None and not future.done():

            def end() -> None:
                expire()
                if not future.done():
                    future.set_exception(deadline.error())

            timer = asyncio.get_running_loop().call_later(left, end)
        try:
            return await future
        except DistError as error:
            raise copy(error.with_traceback(None)) from None
        finally:
            if timer is not None:
                timer.cancel()

    # Connections

    async def _connection_to_wait_on(self, deadline: _CallDeadline) -> AsyncConnection:
        """Return a free connection for a blocking call. One call at a time acquires one, not thousands."""
        await self._acquire_slot(deadline)
        try:
            return await self._free_connection(deadline)
        finally:
            self._release_slot()

    async def _acquire_slot(self, deadline: _CallDeadline) -> None:
        if not self._slot_taken:
            self._slot_taken = True
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slot_waiters.append(slot)
        try:
            await asyncio.wait({slot}, timeout=deadline.left())
        except asyncio.CancelledError:
            if not slot.cancel():  # it was granted just now
                self._release_slot()
            raise
        if slot.cancel():
            raise deadline.error()

    def _release_slot(self) -> None:
        while self._slot_waiters:
            slot = self._slot_waiters.popleft()
            if not slot.done():
                slot.set_result(None)
                return
        self._slot_taken = False

    def _ready_connection(self) -> AsyncConnection | None:
        """Return the shared connection, unless a call is blocked on it, or too many wait for it to be resumed."""
        connection = self._current
        ready = connection is not None and connection.session.waiting is None and connection.space is None
        return connection if ready else None

    async def _free_connection(self, deadline: _CallDeadline) -> AsyncConnection:
        """Return a connection without a blocked call, on which everything that this store has written is visible."""
        while True:
            if self._lost is not None:
                raise copy(self._lost)
            ready = self._ready_connection()
            if ready is not None:
                return ready
            connection = self._current
            first = connection.space if connection is not None else None
            if first is None and connection is not None and connection.session.unconfirmed():
                first = connection.fence  # by the time it is done, the connection may have another one
            if first is not None:
                await asyncio.wait({first}, timeout=deadline.left())
                if not first.done():
                    raise deadline.error()
                continue
            if self._free:
                self._current, _ = self._free.popitem()
                self._free[self._current] = None
                continue
            if self._opening is None or self._opening.done():
                self._opening = _shared(self._open_connection)
            await self._join_task(self._opening, deadline)

    async def _open_connection(self, refused_is_final: bool = False) -> None:
        peer, session = await connect(
            self._servers, Deadline(self._timeout), refused_is_final, self._token, self._tls, self._name
        )
        explained = None
        if self._name is not None or self._token:
            explained = functools.partial(lost_error, self._servers, self._token, self._tls, self._name)
        connection = AsyncConnection(
            session,
            weakly(self._connection_lost),
            weakly(self._connection_freed),
            functools.partial(resume, self._servers, self._token, self._tls),
            explained,
        )
        await serve(peer, connection)
        try:
            await self._verify(connection)
        except BaseException:
            connection.close()
            if connection.is_broken and self._lost is None:
                await self._open_connection()  # nothing was written on the broken one
                return
            raise
        if self._lost is not None:
            connection.close()
        else:
            if self._connections:
                self._close_later(connection)
            self._connections[connection] = self._free[connection] = None

    def _close_later(self, connection: AsyncConnection) -> None:
        """Close a further connection after IDLE_SECONDS if it is idle then, otherwise check again."""
        asyncio.get_running_loop().call_later(IDLE_SECONDS, weakly(self._close_surplus), connection)

    def _close_surplus(self, connection: AsyncConnection) -> None:
        if connection not in self._connections:
            return
        if connection.idle():
            if not connection.session.unconfirmed():
                self._drop(connection)
                connection.close()
                return
            connection.send_fence()  # so that it can be closed the next time
        self._close_later(connection)

    def _drop(self, connection: AsyncConnection) -> None:
        """Remove a connection from those that calls may use."""
        self._connections.pop(connection, None)
        self._free.pop(connection, None)
        if connection is self._current:
            self._current = None

    def _connection_freed(self, connection: AsyncConnection) -> None:
        """Note that no call is blocked on the connection any more."""
        if connection in self._connections:
            self._free[connection] = None

    def _connection_lost(self, connection: AsyncConnection, error: DistNetworkError) -> None:
        """Lose the store with a connection, as PyTorch's is, because writes may be lost with it."""
        if connection in self._connections or not connection.is_broken:
            self._lose(error)

    def _lose(self, error: DistNetworkError, closed: bool = False) -> None:
        self._lost = self._lost or error
        for connection in list(self._connections):
            self._drop(connection)
            connection.close(self._lost, lost=not closed)
        for task in (self._opening, *self._probing.values()):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _shared(work: Callable[[], Awaitable[None]]) -> "asyncio.Task[Exception | None]":
    """Start a task that calls share, so it outlives any of them; it returns its error."""
    return asyncio.ensure_future(_error_of(work))


async def _error_of(work: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        await work()
    except Exception as error:
        return error.with_traceback(None)  # the task is kept, and its frames refer to the store
    return None
