"""The async client: typed methods over lanes.

Knows: which method is which command, when a call may share a connection and when it needs one of its own, deadlines.
Must not know: bytes on the wire, sockets.
Invariants: a call that waits keeps no other call waiting. What a store has written is there for whatever it asks next,
on whichever connection. Cancelling a call leaves every connection in step.
"""

import asyncio
import warnings
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from typing import Any, cast

from ..coercion import Text, Timeout, to_host, to_port, to_seconds
from ..deadline import DEFAULT_TIMEOUT, IDLE_SECONDS, MIN_ROUND_TRIP, Deadline
from ..errors import DistNetworkError, QueueEmptyError, StoreTimeoutError
from ..session.client import PendingCall
from ..session.identity import Identity, read_identity
from ..values import Framed, unpack
from . import capabilities, exchanges, requests
from .async_connection import AsyncConnection
from .client_info import introduction
from .connect import connect
from .requests import ANOTHER, Request

_PAUSE = 0.05
"""Seconds until it is tried again what a server knows."""


class _CallDeadline(Deadline):
    """How long a call may take, and what it says then. 0 means one look: that takes what a round trip takes."""

    def __init__(self, ask: Request, seconds: float, began: float | None = None) -> None:
        super().__init__(seconds or MIN_ROUND_TRIP, began)
        self.one_look = seconds == 0
        self._ask = ask
        self._seconds = seconds

    def error(self) -> StoreTimeoutError:
        return StoreTimeoutError(requests.timeout_message(self._ask, self._seconds))


class AsyncTCPStore:
    """A client of a TCPStore server, for asyncio. Made by `connect`; belongs to the loop that made it.

    The methods are those of `torch.distributed.TCPStore`, with `await`. Every one of them raises StoreTimeoutError, a
    DistStoreError, when the store's timeout has passed, and DistNetworkError when the connection is lost. Calls may be
    made from any number of tasks at once.
    """

    def __init__(self, host: str, port: int, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.host = to_host("host", host)
        self.port = to_port("port", port)
        self.identity: Identity | None = None
        """Who the server is, if it is one of ours and was asked."""
        self._timeout = to_seconds("timeout", timeout)
        self._connections: dict[AsyncConnection, None] = {}
        self._free: dict[AsyncConnection, None] = {}
        """Those on which nothing waits."""
        self._current: AsyncConnection | None = None
        """The one on which calls share a connection; all writes that may not have been executed yet are on it."""
        self._opening: asyncio.Task[None] | None = None
        self._taken = False
        """Whether a call that needs a connection to wait on is looking for one."""
        self._turns: deque[asyncio.Future[None]] = deque()
        """Those that will look after it."""
        self._asking: asyncio.Task[None] | None = None
        self._asked = False
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, bool] = {}
        """What PyTorch's servers have not always known: whether this one does, if that was tried."""
        self._lost: DistNetworkError | None = None
        self._stranded: set[asyncio.Task[None]] = set()
        """Pops whose callers have gone, on servers where they need not be confirmed: their items are pushed back."""

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout: Timeout = DEFAULT_TIMEOUT) -> "AsyncTCPStore":
        """Connect to the server at this address, trying again until the timeout. Raises DistNetworkError.

        The timeout is that of every later call too; negative means for ever, 0 one try.
        """
        store = cls(host, port, timeout)
        await store._open_connection()
        return store

    async def __aenter__(self) -> "AsyncTCPStore":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Calls under way fail; later ones too."""
        if self._stranded and self._lost is None:
            await asyncio.wait(self._stranded, timeout=MIN_ROUND_TRIP)
        self._lose(DistNetworkError("the store has been closed"))
        tasks = [*([self._opening] if self._opening else []), *self._trying.values()]
        if tasks:
            await asyncio.wait(tasks)

    def __del__(self) -> None:
        connections = getattr(self, "_connections", None)
        if connections:
            text = f"an AsyncTCPStore of {self.host}:{self.port} was not closed"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)
            for connection in connections:
                connection.forget()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of later calls; negative means for ever."""
        self._timeout = to_seconds("timeout", timeout)

    async def clone(self) -> "AsyncTCPStore":
        """A store of its own connections to the same server, with the same timeout."""
        if self._lost is not None:
            raise self._lost
        clone = await self.connect(self.host, self.port, timeout=self.timeout)
        if self.identity is not None and await clone.server() != self.identity:
            await clone.close()
            raise DistNetworkError(ANOTHER)
        return clone

    # Values

    async def set(self, key: Text, value: Text) -> None:
        await self._ask(requests.set_(key, value))

    async def get(self, key: Text) -> bytes:
        """The value, as soon as there is one."""
        name = requests.key_of(key)
        ask = requests.wait([name])
        patience = _CallDeadline(ask, self._timeout)
        if self.identity is None and not await self._extended(patience):
            await self._park(ask, patience)
            return unpack(await self._ask_when_free(requests.get(name), patience))
        found = await self._look(name, patience)
        return unpack(await self._park(requests.fetch(name), patience) if found is None else found)

    async def _look(self, name: bytes, patience: _CallDeadline) -> Framed | None:
        """The value if it is there: without a connection that others could not use. Not for servers of PyTorch's, whose
        legacy one closes the connection for a GET of a key that is missing.
        """
        connection = self._ready_connection() or await self._free_connection(patience)
        _, there = connection.call(*requests.check([name]))
        _, value = connection.call(*requests.get(name))
        found: Framed = await self._answer(value, patience)
        if there.result():
            return found
        if patience.one_look:
            raise patience.error()
        return None

    async def add(self, key: Text, amount: int) -> int:
        """Add to a counter, 0 if it is missing, and return the sum."""
        return int(await self._ask(requests.add(key, amount)))

    async def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Set `desired` if the value is `expected`, a missing key being empty; the value afterwards.

        For a missing key that was expected to hold something, `expected` is returned and nothing set, as in PyTorch.
        """
        return unpack(await self._ask(requests.compare_set(key, expected, desired)))

    async def append(self, key: Text, value: Text) -> None:
        await self._ask(requests.append(key, value))

    async def check(self, keys: Iterable[Text]) -> bool:
        """Whether all keys are there."""
        return bool(await self._ask(requests.check(requests.keys_of(keys))))

    async def ping(self) -> None:
        """One round trip: the server is there, and has executed everything that was sent before."""
        await self._ask(requests.NO_KEY)

    async def delete_key(self, key: Text) -> bool:
        """Remove a key; whether it was there."""
        return bool(await self._ask(requests.delete_key(key)) == 1)

    async def num_keys(self) -> int:
        """How many keys there are, PyTorch's own counter of workers included."""
        return int(await self._ask(requests.NUM_KEYS))

    async def list_keys(self) -> list[str]:
        """The names of all keys, in no order, without PyTorch's own. Raises UnicodeDecodeError for a name not UTF-8."""
        await self._need(capabilities.LIST_KEYS, requests.LIST_KEYS)
        return requests.texts_of(requests.names_of(await self._ask(requests.LIST_KEYS)))

    async def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """The values, as soon as all are there."""
        names = requests.keys_of(keys)
        patience = _CallDeadline(requests.wait(names), self._timeout)
        await self._extended(patience)
        await self._park(requests.wait(names), patience)
        return [unpack(value) for value in await self._ask_when_free(requests.multi_get(names), patience)]

    async def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Set all, or none. Raises DistStoreError if there are not as many values as keys."""
        await self._ask(requests.multi_set(keys, values))

    # Waiting

    async def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        """Until all keys are there. The timeout is the store's unless given; 0 means one look, negative for ever."""
        ask = requests.wait(requests.keys_of(keys))
        patience = _CallDeadline(ask, self._seconds(timeout))
        await self._extended(patience)  # so that a further connection can be checked
        await self._park(ask, patience)

    async def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Until `world_size` callers have arrived at this key, each counted once a call; it is never reset."""
        ask = requests.barrier(key, world_size)
        patience = _CallDeadline(ask, self._seconds(timeout))
        if await self._knows(capabilities.BARRIER, patience):
            await self._park(ask, patience)
            return
        arrive = exchanges.arrive(key, ask[1][1])
        wait = await exchanges.run_async(lambda request: self._ask_when_free(request, patience), arrive)
        await self._park(wait, patience)

    # Queues

    async def queue_push(self, key: Text, value: Text) -> None:
        ask = requests.queue_push(key, value)
        await self._need(capabilities.QUEUES, ask)
        await self._ask(ask)

    async def queue_len(self, key: Text) -> int:
        ask = requests.queue_len(requests.key_of(key))
        await self._need(capabilities.QUEUES, ask)
        return int(await self._ask(ask))

    async def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest item; with `block`, as soon as there is one.

        Raises QueueEmptyError without `block`, or if a plain value of that name is there instead. If the caller is
        cancelled, or its time is up, when the item is on its way already, it goes back to the front of the queue; on
        PyTorch's servers to the end.
        """
        name = requests.key_of(key)
        patience = _CallDeadline(requests.wait([name]) if block else requests.queue_pop(name), self._timeout)
        await self._need(capabilities.QUEUES, requests.queue_pop(name), patience if block else None)
        if not await self._extended(patience):
            return await self._pop_from_pytorchs(name, block, patience)
        item = await self._pop(requests.lease(name, block and not patience.one_look), patience)
        if item is not None:
            return unpack(item)
        if block and patience.one_look and not (await self.check([key]) and await self.queue_len(key) == 0):
            raise patience.error()
        raise QueueEmptyError("queue is empty")

    async def _pop(self, lease: Request, patience: _CallDeadline) -> Framed | None:
        """Take the item that a server of ours leases; None if there is none. It is the caller's once this returns."""
        blocks = lease[0].parks
        connection = await (self._connection_to_wait_on(patience) if blocks else self._free_connection(patience))
        try:
            if blocks:
                call, future = self._lease(connection, lease)
                _, item = await self._until(connection, call, future, patience)
            else:
                _, item = await self._answer(connection.call(*lease)[1], patience)
        except BaseException:
            connection.give_back(lease)
            raise
        if item is not None:
            connection.confirm(lease)
        return cast("Framed | None", item)

    async def _pop_from_pytorchs(self, name: bytes, block: bool, patience: _CallDeadline) -> bytes:
        doubts = 0
        while True:
            if block and not patience.one_look:
                await self._park(requests.wait([name]), patience)
            item = await self._pop_unconfirmed(name)
            if item is not None:
                return unpack(item)
            doubts += 1
            if not block or await self._is_plain(name, doubts):
                raise QueueEmptyError("queue is empty")
            if patience.one_look:
                raise patience.error()

    async def _pop_unconfirmed(self, name: bytes) -> Framed | None:
        """Take an item from a server of PyTorch's; None if there is none. If the caller goes, it is pushed back."""
        ask = requests.queue_pop(name)
        patience = _CallDeadline(ask, self._timeout)
        connection = await self._free_connection(patience)
        _, future = connection.call(*ask)
        try:
            _, item = await self._answer(asyncio.shield(future), patience)
        except BaseException:
            stranded = asyncio.ensure_future(self._push_back(name, future))
            self._stranded.add(stranded)
            stranded.add_done_callback(self._stranded.discard)
            raise
        return cast("Framed | None", item)

    async def _push_back(self, name: bytes, popped: "asyncio.Future[Any]") -> None:
        try:
            _, item = await popped
            if item is not None:
                await self._ask_when_free(requests.push_back(name, item))
        except (DistNetworkError, StoreTimeoutError):
            pass  # it was lost with the connection, or its server does not answer any more

    async def _is_plain(self, name: bytes, doubts: int) -> bool:
        """Return whether a plain value, rather than a queue, has this name; in doubt True without LIST_KEYS."""
        plain = await exchanges.run_async(self._ask, exchanges.is_plain(name, doubts))
        if plain is not None:
            return plain
        if not await self._knows(capabilities.LIST_KEYS, _CallDeadline(requests.LIST_KEYS, self._timeout)):
            return True
        return name in await self._ask(requests.LIST_KEYS)

    # Who the server is

    async def server(self) -> Identity | None:
        """Who the server is; None if it is one of PyTorch's, or another that speaks as it."""
        await self._extended(_CallDeadline(requests.HAS_EXTENSION, self._timeout))
        return self.identity

    async def _extended(self, patience: _CallDeadline) -> bool:
        """Whether the server is one of ours. Asks it, once, the first time this is asked."""
        if not self._asked:
            if self._asking is None or self._asking.done():
                self._asking = _shared(self._ask_who())
            await self._outcome(self._asking, patience)
        return self.identity is not None

    async def _knows(self, what: str, patience: _CallDeadline) -> bool:
        """Whether the server knows what older ones of PyTorch's do not: tried once, on a connection of its own."""
        if what not in self._known and await self._extended(patience):
            self._known[what] = True
        while what not in self._known:
            trying = self._trying.get(what)
            if trying is None or trying.done():
                trying = self._trying[what] = _shared(self._find_out(what))
            try:
                await self._outcome(trying, patience)
            except StoreTimeoutError:
                if patience.passed():
                    raise
                await asyncio.sleep(_PAUSE)  # it was another's time, or the store's, that was up
        return self._known[what]

    async def _need(self, what: str, ask: Request, patience: _CallDeadline | None = None) -> None:
        """Raises NotImplementedError if the server does not know what the call `ask` needs."""
        if not self._known.get(what) and not await self._knows(what, patience or _CallDeadline(ask, self._timeout)):
            raise capabilities.lacks(what, self.host, self.port)

    async def _find_out(self, what: str) -> None:
        for _ in range(capabilities.TRIES):
            if await self._try(capabilities.tries(what)):
                self._known[what] = True
                return
            await self._ask(requests.NO_KEY)  # unless the store, or the server, has gone altogether
        self._known[what] = False

    async def _try(self, asks: list[Request]) -> bool:
        peer, session = await connect(self.host, self.port, Deadline(self._timeout))
        connection = AsyncConnection(session, lambda *_: None, lambda _: None)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=peer)
        try:
            for ask in asks:
                await self._answer(connection.call(*ask)[1], _CallDeadline(ask, self._timeout))
        except DistNetworkError:
            return False
        finally:
            connection.close()
        return True

    async def _ask_who(self) -> None:
        if await self._ask(requests.HAS_EXTENSION):
            self.identity = read_identity(unpack(await self._ask(requests.WHO_ARE_YOU)))
        if self.identity is not None:
            await self._ask(requests.introduce(introduction()))
        self._asked = True

    async def _outcome(self, task: "asyncio.Task[None]", patience: _CallDeadline) -> None:
        """Wait for what several calls need, each for as long as it may. Raises what that has raised."""
        await asyncio.wait({task}, timeout=patience.left())
        if self._lost is not None:
            raise self._lost
        if not task.done():
            raise patience.error()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreTimeoutError) or (isinstance(error, DistNetworkError) and self._connections):
            raise patience.error() from error
        if error is not None:
            raise error

    async def _verify(self, connection: AsyncConnection) -> None:
        """A further connection must lead to the same server, where that can be asked."""
        known = self.identity
        if known is None:
            return
        connection.call(*requests.introduce(introduction()))
        _, answer = connection.call(*requests.WHO_ARE_YOU)
        patience = _CallDeadline(requests.WHO_ARE_YOU, self._timeout)
        found = read_identity(unpack(await self._answer(answer, patience)))
        if found is None or found.instance != known.instance:
            error = DistNetworkError(ANOTHER)
            self._connection_lost(connection, error)
            raise error

    # How calls are made

    def _ask(self, ask: Request) -> Awaitable[Any]:
        """A call that the server answers at once, or not at all."""
        connection = self._ready_connection()
        if connection is not None:  # the common case, without a coroutine
            _, future = connection.call(*ask)
            if self._timeout >= 0 and not future.done():
                connection.limit(future, ask, self._timeout)
            return future
        return self._ask_when_free(ask)

    async def _ask_when_free(self, ask: Request, patience: _CallDeadline | None = None) -> Any:
        patience = patience or _CallDeadline(ask, self._timeout)
        connection = await self._free_connection(patience)
        _, future = connection.call(*ask)
        return future.result() if future.done() else await self._answer(future, patience)

    async def _park(self, ask: Request, patience: _CallDeadline) -> Any:
        """A call that is answered when something happens, or canceled when time is up."""
        connection = await self._connection_to_wait_on(patience)
        call, future = self._lease(connection, ask)
        if patience.one_look:
            connection.cancel(call)
        result = await self._until(connection, call, future, patience)
        if call.canceled and not call.woken:
            raise patience.error()
        return result

    def _lease(self, connection: AsyncConnection, ask: Request) -> tuple[PendingCall, "asyncio.Future[Any]"]:
        """Send a call that waits; behind a fence if there are writes that other connections must not overtake."""
        if connection.session.unconfirmed():
            connection.send_fence()
        call, future = connection.call(*ask)
        assert call is not None
        self._free.pop(connection, None)
        return call, future

    async def _until(
        self, connection: AsyncConnection, call: PendingCall, future: "asyncio.Future[Any]", patience: _CallDeadline
    ) -> Any:
        try:
            return await self._answer(future, patience, lambda: connection.cancel(call))
        except asyncio.CancelledError:
            connection.cancel(call)
            raise

    async def _answer(
        self, future: "asyncio.Future[Any]", patience: _CallDeadline, expire: Callable[[], None] = lambda: None
    ) -> Any:
        """What a future brings, unless time is up before."""
        if future.done():
            return future.result()
        left = patience.left()
        if left is None:
            return await future

        def end() -> None:
            expire()
            if not future.done():
                future.set_exception(patience.error())

        timer = asyncio.get_running_loop().call_later(left, end)
        try:
            return await future
        finally:
            timer.cancel()

    def _seconds(self, timeout: Timeout | None) -> float:
        return self._timeout if timeout is None else to_seconds("timeout", timeout)

    # Lanes

    async def _connection_to_wait_on(self, patience: _CallDeadline) -> AsyncConnection:
        """The same for a call that keeps it. Such calls take turns: thousands must not all look at once."""
        await self._take_turn(patience)
        try:
            return await self._free_connection(patience)
        finally:
            self._end_turn()

    async def _take_turn(self, patience: _CallDeadline) -> None:
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await asyncio.wait({turn}, timeout=patience.left())
        except asyncio.CancelledError:
            if not turn.cancel():  # it has come
                self._end_turn()
            raise
        if turn.cancel():
            raise patience.error()

    def _end_turn(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    def _ready_connection(self) -> AsyncConnection | None:
        """The connection that calls share, unless something waits on it."""
        connection = self._current
        return connection if connection is not None and connection.session.waiting is None else None

    async def _free_connection(self, patience: _CallDeadline) -> AsyncConnection:
        """A connection on which nothing waits and on which all that this store has written is there."""
        while True:
            if self._lost is not None:
                raise self._lost
            ready = self._ready_connection()
            if ready is not None:
                return ready
            connection = self._current
            if connection is not None and connection.fence is not None and connection.session.unconfirmed():
                fence = connection.fence  # by the time that it is done the connection may have another
                await asyncio.wait({fence}, timeout=patience.left())
                if not fence.done():
                    raise patience.error()
                continue
            if self._free:
                self._current, _ = self._free.popitem()
                self._free[self._current] = None
                continue
            if self._opening is None or self._opening.done():
                self._opening = _shared(self._open_connection())
            await self._outcome(self._opening, patience)

    async def _open_connection(self) -> None:
        peer, session = await connect(self.host, self.port, Deadline(self._timeout))
        connection = AsyncConnection(session, _weak(self._connection_lost), _weak(self._connection_freed))
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=peer)
        try:
            await self._verify(connection)
        except BaseException:
            connection.close()
            raise
        if self._lost is not None:
            connection.close()
        else:
            if self._connections:
                self._close_later(connection)
            self._connections[connection] = self._free[connection] = None

    def _close_later(self, connection: AsyncConnection) -> None:
        """A connection beside the first is closed when nothing is on it after a while, or after another."""
        asyncio.get_running_loop().call_later(IDLE_SECONDS, _weak(self._close_surplus), connection)

    def _close_surplus(self, connection: AsyncConnection) -> None:
        if connection not in self._connections:
            return
        if connection.idle():
            if not connection.session.unconfirmed():
                self._drop(connection)
                connection.close()
                return
            connection.send_fence()  # so that it can go the next time
        self._close_later(connection)

    def _drop(self, connection: AsyncConnection) -> None:
        """Have no further call take it."""
        self._connections.pop(connection, None)
        self._free.pop(connection, None)
        if connection is self._current:
            self._current = None

    def _connection_freed(self, connection: AsyncConnection) -> None:
        """Nothing waits on it any more."""
        if connection in self._connections:
            self._free[connection] = None

    def _connection_lost(self, connection: AsyncConnection, error: DistNetworkError) -> None:
        """A connection was lost, and with it perhaps what was written on it: the store is lost, as PyTorch's is."""
        self._lose(error)

    def _lose(self, error: DistNetworkError) -> None:
        self._lost = self._lost or error
        for connection in list(self._connections):
            self._drop(connection)
            connection.close(self._lost)
        for task in (self._opening, *self._trying.values()):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _shared(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task on which several calls wait; each of them may go before it ends."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """The same, but it does not keep its object: a store that is forgotten must be seen to go."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        found = reference()
        if found is not None:
            found(*given)

    return call
