"""TCPStore: the store whose keys a server keeps.

Knows: PyTorch's constructor, who hosts the server, how ranks join, which method waits. Must not know: bytes on the
wire, sockets.
Invariant: a store that has been made has joined the server of its own round; one that could not be made holds nothing.
"""

import functools
import logging
import os
import re
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..client import capabilities, requests
from ..client.client_info import introduction
from ..client.pool import TCPClient
from ..client.requests import Request
from ..coercion import Text, Timeout, in_milliseconds, to_bool, to_bytes, to_host, to_int64, to_port, to_world_size
from ..deadline import DEFAULT_TIMEOUT, Deadline
from ..errors import DistNetworkError, DistStoreError, QueueEmptyError, StoreTimeoutError
from ..server.master import ServerHandle, host
from ..values import EMPTY, unpack
from ..wire.commands import WORKERS_KEY
from .base import Store
from .joining import Rank

log = logging.getLogger("tcpstore_async.stores")

_LAST_LOOK: Final = 0.2
"""Seconds over the timeout that it may take to say how many have joined."""

_POLL_SECONDS: Final = 0.01
"""How often a master asks a stock server who has joined, as PyTorch's does."""

_CHECKS_AT_ONCE: Final = 512
"""Their replies fit any socket's buffer: PyTorch's legacy server reads no further while a peer takes no replies."""


class TCPStore(Store):
    """A client of a TCPStore server and, with `is_master`, the server. A drop-in for `torch.distributed.TCPStore`.

    The server runs in a process of its own, on every interface, until the last store that owns it is closed or the
    owner ends. With `world_size` and `wait_for_workers`, a master's constructor returns when so many have joined, and
    other ranks' when they have. Everything happens within `timeout`, which is also that of later calls.

    Raises DistNetworkError if the server cannot be reached or its address is in use, DistStoreError if not all have
    joined in time.
    """

    _may_be_thread = True
    """Whether the server may be a thread of this process."""

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
    ) -> None:
        self._client: TCPClient | None = None
        self._hosted: ServerHandle | None = None
        _remember(self)
        super().__init__(timeout)
        host_name = to_host("host_name", host_name)
        bind_host = None if bind_host is None else to_host("bind_host", bind_host)
        master_listen_fd = None if master_listen_fd is None else to_int64("master_listen_fd", master_listen_fd)
        port = to_port("port", port)
        ranks = to_world_size("world_size", world_size)
        multi_tenant = to_bool("multi_tenant", multi_tenant)
        wait_for_workers = to_bool("wait_for_workers", wait_for_workers)
        self._libuv = _use_libuv(use_libuv)
        deadline = Deadline(self._timeout)
        try:
            if to_bool("is_master", is_master):
                backend = "uv" if self._libuv else "threaded"
                self._hosted = _host(
                    port, bind_host, master_listen_fd, multi_tenant, backend, self._may_be_thread, deadline.left()
                )
            hosted = self._hosted
            self.host = host_name
            self.port = port if hosted is None else hosted.port
            if hosted is not None and ranks is not None:
                if wait_for_workers:
                    hosted.announce(ranks)
                else:  # perhaps not all come, or not at once: what keeps them out is logged only
                    hosted.check_capacity(ranks)
            self._client = self._connect(ranks if wait_for_workers else None, deadline)
            if hosted is not None and ranks is not None and wait_for_workers:
                _wait_for_workers(self._client, ranks, deadline)
                hosted.complete()
        except BaseException:
            self.close()
            raise

    def _connect(self, ranks: int | None, deadline: Deadline) -> TCPClient:
        """Connect and, if there is a number of ranks to complete, join them.

        A connection that is lost in between may have led to a server of the last round that was about to go, and a
        server of ours counts a rank once: so this is the one command that is sent again.
        """
        rank = None if ranks is None else Rank(ranks, self._hosted is not None, deadline)
        while True:
            try:
                client = TCPClient(self.host, self.port, self._timeout, introduction(ranks), deadline.began)
            except DistNetworkError as error:
                raise (error if rank is None else rank.blame(error)) from None
            try:
                if rank is None or self._joins(client, rank):
                    client.timeout = self._timeout
                    return client
                client.close()
            except DistNetworkError as error:
                client.close()
                assert rank is not None
                rank.pause(error)
            except BaseException:
                client.close()
                raise

    def _leave_server(self) -> ServerHandle | None:
        """Close the connections; the server, if this store owns one, is the caller's to release."""
        hosted, self._hosted = self._hosted, None
        self.close()
        return hosted

    def _joins(self, client: TCPClient, rank: Rank) -> bool:
        """Join; whether the server turns out to be that of this store's round."""
        return rank.join(client)

    @classmethod
    def _of(cls, client: TCPClient, libuv: bool) -> "TCPStore":
        """A store without a server, on connections of its own."""
        store = cls.__new__(cls)
        _remember(store)
        Store.__init__(store, client.timeout)
        store.host = client.host
        store.port = client.port
        store._client = client
        store._hosted = None
        store._libuv = libuv
        return store

    @property
    def libuvBackend(self) -> bool:
        """Whether the backend that was chosen is the event-driven one."""
        return self._libuv

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._connection().timeout = self._timeout

    def clone(self) -> "TCPStore":
        """A store of its own connections to the same server, with the same timeout; it does not own the server."""
        return TCPStore._of(self._connection().clone(), self._libuv)

    def close(self) -> None:
        """Close the connections and stop the server, if this is the last store that owns it.

        Calls under way in other threads fail. The port is free on return; ranks that are connected get 10 seconds to
        finish what they do.
        """
        client, hosted = self._client, self._hosted
        if client is not None:
            client.close()
        self._hosted = None
        if hosted is not None:
            hosted.release()

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None and not client.closed:
            warnings.warn(f"a TCPStore was not closed: {self!r}", ResourceWarning, source=self, stacklevel=1)
            self.close()

    def __repr__(self) -> str:
        client = self._client
        server = "<nullptr>" if self._hosted is None else f"TCPServer(port={self.port})"
        return f"TCPStore(client=TCPClient({client.describe() if client else '<nullptr>'}), server={server})"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'TCPStore' object: make one in the other process, or clone() it")

    # Values

    def set(self, key: Text, value: Text) -> None:
        self._connection().call(requests.set_(key, value))

    def get(self, key: Text) -> bytes:
        client = self._connection()
        name = requests.key_of(key)
        ask, seconds, began = requests.wait([name]), self._timeout, time.monotonic()
        if client.extended(ask, seconds, began) and seconds:  # one look must not be canceled when it has seen something
            return unpack(client.call_blocking(requests.fetch(name), seconds, began=began))
        return unpack(client.call_blocking(ask, seconds, requests.get(name), began))

    def add(self, key: Text, amount: int) -> int:
        total: int = self._connection().call(requests.add(key, amount))
        return total

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return unpack(self._connection().call(requests.compare_set(key, expected, desired)))

    def check(self, keys: Iterable[Text]) -> bool:
        present: bool = self._connection().call(requests.check(requests.keys_of(keys)))
        return present

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._park(requests.wait(requests.keys_of(keys)), self._seconds(timeout))

    def delete_key(self, key: Text) -> bool:
        return bool(self._connection().call(requests.delete_key(key)) == 1)

    def num_keys(self) -> int:
        number: int = self._connection().call(requests.NUM_KEYS)
        return number

    def list_keys(self) -> list[str]:
        return requests.texts_of(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return requests.names_of(self._knowing(capabilities.LIST_KEYS, requests.LIST_KEYS).call(requests.LIST_KEYS))

    def append(self, key: Text, value: Text) -> None:
        self._connection().call(requests.append(key, value))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        names = requests.keys_of(keys)
        return [unpack(blob) for blob in self._park(requests.wait(names), self._timeout, requests.multi_get(names))]

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        self._connection().call(requests.multi_set(keys, values))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        """By CHECKs, which every server knows and no value makes long, many in a round trip."""
        asks = [requests.check([name]) for name in requests.keys_of(keys)]
        absent: list[int] = []
        for start in range(0, len(asks), _CHECKS_AT_ONCE):
            try:
                found = self._connection().ask_all(asks[start : start + _CHECKS_AT_ONCE], deadline)
            except StoreTimeoutError:
                return absent, False
            absent += [start + place for place, present in enumerate(found) if not present]
        return absent, True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        ask = requests.queue_push(key, value)
        self._queues(ask).call(ask)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = requests.key_of(key)
        ask = requests.wait([name]) if block else requests.queue_pop(name)
        seconds, began = self._timeout, time.monotonic()
        client = self._queues(ask, began)
        if not client.extended(ask, seconds, began):
            return self._pop_from_pytorchs(client, name, block, began)
        lease = requests.lease(name, bool(block) and seconds != 0)
        popped: list[bytes | None] = []
        try:
            # When a call returns an interrupt may strike before its result is anywhere; not before it is in a list.
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
            raise StoreTimeoutError(requests.timeout_message(ask, seconds))
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
            if not block or self._is_plain(client, name, doubts):
                raise QueueEmptyError("queue is empty")

    def _is_plain(self, client: TCPClient, name: bytes, doubts: int) -> bool:
        """Whether a wait for a queue of this name ends because of a value that is no item.

        What is not empty is one for certain. What lists the keys, and only values, says so of an empty one, but costs
        the most, so it is asked when that has been in doubt for long; of an older server, which cannot, it is not.
        """
        if len(client.call(requests.get(name))) > len(EMPTY):
            return True
        if doubts < requests.DOUBTS or not client.call(requests.check([name])) or client.call(requests.queue_len(name)):
            return False
        return not client.knows(capabilities.LIST_KEYS, requests.LIST_KEYS) or name in client.call(requests.LIST_KEYS)

    def queue_len(self, key: Text) -> int:
        ask = requests.queue_len(requests.key_of(key))
        length: int = self._queues(ask).call(ask)
        return length

    # Meeting

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        ask, seconds, began = requests.barrier(key, world_size), self._seconds(timeout), time.monotonic()
        if self._connection().knows(capabilities.BARRIER, ask, seconds, began):
            self._park(ask, seconds, began=began)
        else:
            self._barrier_over_keys(to_bytes("key", key), ask, seconds, began)

    def _barrier_over_keys(self, name: bytes, ask: Request, seconds: float, began: float) -> None:
        """As the base class, with one timeout for all of it."""
        client = self._connection()
        _, world_size = ask[1]
        deadline = Deadline.of_a_call(seconds, began)
        try:
            if client.call(requests.add(name + requests.BARRIER_MEMBERS, 1), deadline) >= world_size:
                client.call(requests.set_(name + requests.BARRIER_LAST, b"1"), deadline)
            client.call_blocking(requests.wait([requests.key_of(name + requests.BARRIER_LAST)]), seconds, began=began)
        except StoreTimeoutError:
            raise StoreTimeoutError(requests.timeout_message(ask, seconds)) from None

    # Helpers

    def _connection(self) -> TCPClient:
        if self._client is None:
            raise DistNetworkError("the store has not been made")
        return self._client

    def _park(self, ask: Request, seconds: float, then: Request | None = None, began: float | None = None) -> Any:
        """A call that waits; the server is asked who it is before, so that a further connection can be checked."""
        client = self._connection()
        began = time.monotonic() if began is None else began
        client.extended(ask, seconds, began)
        return client.call_blocking(ask, seconds, then, began)

    def _queues(self, ask: Request, began: float | None = None) -> TCPClient:
        """The connections, if queues are to be had."""
        if not self._libuv and not self._connection().extended(ask, began=began):
            raise NotImplementedError("queues not implemented on legacy TCPStore backend")
        return self._knowing(capabilities.QUEUES, ask, began)

    def _knowing(self, what: str, ask: Request, began: float | None = None) -> TCPClient:
        """The connections, if the server knows what the call `ask` needs: asking one that does not would lose them."""
        client = self._connection()
        if not client.knows(what, ask, began=began):
            raise capabilities.lacks(what, client.host, client.port)
        return client


_stores: Final[dict[int, "weakref.ref[TCPStore]"]] = {}
"""All of this process. A plain dictionary can be copied in one step while another thread makes a store."""


def _remember(store: TCPStore) -> None:
    # A C function forgets it, in which no interrupt can strike: what a callback raises is lost.
    me = id(store)
    _stores[me] = weakref.ref(store, functools.partial(_stores.pop, me))


def _forked() -> None:
    """In a forked child: its stores get connections of their own."""
    for reference in list(_stores.values()):
        store = reference()
        if store is not None and store._client is not None:
            store._client.forked()


os.register_at_fork(after_in_child=_forked)


def _use_libuv(given: bool | None) -> bool:
    """The argument or, if there is none, USE_LIBUV, of which only exactly 1 means yes, as in PyTorch."""
    if given is None:
        return os.environ.get("USE_LIBUV", "1") == "1"
    return to_bool("use_libuv", given)


def _host(
    port: int,
    bind_host: str | None,
    listen_fd: int | None,
    multi_tenant: bool,
    backend: str,
    may_be_thread: bool,
    timeout: float | None,
) -> ServerHandle | None:
    """Host a server; None if torchrun's agent does at this address, as in PyTorch."""
    try:
        return host(
            port,
            bind_host=bind_host,
            listen_fd=listen_fd,
            multi_tenant=multi_tenant,
            backend=backend,
            may_be_thread=may_be_thread,
            timeout=timeout,
        )
    except DistNetworkError:
        if _agent_hosts(port) and listen_fd is None:
            return None
        raise


_YES: Final = ("1", "t", "true", "y", "yes")
_NO: Final = ("0", "f", "false", "n", "no")


def _agent_hosts(port: int) -> bool:
    """Whether torchrun's agent hosts the server of this port. Raises RuntimeError, as PyTorch, for what it cannot read.

    A rendezvous reads the same variables in another way: see `rendezvous_url`.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "0").lower()
    if agent not in _YES + _NO:
        raise RuntimeError("Invalid value for environment variable: TORCHELASTIC_USE_AGENT_STORE")
    number = re.match(r"\s*([+-]?[0-9]{1,9})(?![0-9])", os.environ.get("MASTER_PORT", "0"))
    if number is None:
        raise RuntimeError("Invalid value for environment variable: MASTER_PORT")
    return agent in _YES and int(number[1]) == port


def _wait_for_workers(client: TCPClient, ranks: int, deadline: Deadline) -> None:
    """Until all have joined: an event on our servers, a poll on PyTorch's. Raises DistStoreError."""
    name = WORKERS_KEY
    try:
        if client.extended(seconds=deadline.timeout, began=deadline.began):
            left = deadline.left()
            client.call_blocking(requests.wait_count(name, ranks), -1.0 if left is None else left)
            return
        while _joined(client, deadline) < ranks:
            if deadline.passed():
                raise StoreTimeoutError
            time.sleep(_POLL_SECONDS)
    except StoreTimeoutError:
        seconds = -(-in_milliseconds(deadline.timeout) // 1000)
        try:
            joined = str(_joined(client, Deadline(_LAST_LOOK)))
        except StoreTimeoutError:
            joined = "?"
        raise DistStoreError(
            f"Timed out after {seconds} seconds waiting for clients. {joined}/{ranks} clients joined."
        ) from None


def _joined(client: TCPClient, deadline: Deadline) -> int:
    return int(unpack(client.call(requests.get(WORKERS_KEY), deadline)) or b"0")
