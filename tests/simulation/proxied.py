"""The real clients and a real server, through a proxy that cuts, resets and delays at bytes chosen by a seed.

The same operations and the same book as on the stage (see `real`), with a kernel between: slower, and what a seed means
depends on the machine, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter

from simulation.real import OPERATIONS, Book, Operation, Script
from tcpstore_async.base.errors import DistNetworkError, QueueEmptyError, StoreTimeoutError
from tcpstore_async.client import requests
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.stores.tcp import TCPStore
from tcpstore_async.wire.commands import WORKERS_KEY
from tcpstore_async.wire.values import unpack

LIMIT = 20.0
"""Seconds for a connection through the proxy, which cuts some in the midst of their handshake."""
SHORT = 0.1
"""Timeout of calls that wait, in seconds."""
WAITING = ("get", "get_other", "wait", "pop", "pop_now")
_JOINED = requests.get(WORKERS_KEY)
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens on `port`; each connection has a fate of its own. `losses` counts those that it has cut."""

    def __init__(self, server: int, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.losses = 0
        self.quiet = False
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(LIMIT)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.server))
            rng = self.rng
            for one, other in ((client, server), (server, client)):
                fate = -1 if self.quiet or rng.random() < 0.6 else rng.randrange(600)
                given = (one, other, fate, rng.random() < 0.5, rng.random() < 0.3)
                thread = threading.Thread(target=self._pump, args=given, daemon=True)
                self.threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, fate: int, reset: bool, slow: bool) -> None:
        """Carry bytes one way; after `fate` of them, unless that is negative, the connection ends."""
        try:
            while data := source.recv(16 if slow else 4096):
                if slow:
                    time.sleep(0.001)
                if 0 <= fate <= len(data):
                    self.losses += 1
                    sink.sendall(data[:fate])
                    break
                fate -= len(data) if fate >= 0 else 0
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                if reset:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            source.close()


class Caller(threading.Thread):
    """A caller with its own store, in a thread."""

    dead = False
    losses = 0

    def __init__(self, name: str, book: Book, port: int, operations: list[Operation], uses_loop: bool) -> None:
        super().__init__(name=name)
        self.script = Script(self, book, operations)
        self.port = port
        self.uses_loop = uses_loop
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self.uses_loop:
                asyncio.run(self._on_loop())
            else:
                self._in_thread()
        except BaseException as error:
            self.error = error

    def _in_thread(self) -> None:
        book, store = self.script.book, None
        for name, timeout in self.script.operations:
            try:
                if store is None:
                    book.perhaps_stores += 1
                    store = TCPStore("127.0.0.1", self.port, 10**6, False, timeout=LIMIT)
                    book.perhaps_stores -= 1
                    book.stores += 1
                self.script.do(store, name, timeout)
            except StoreTimeoutError:
                self.script.sure = False
            except DistNetworkError:
                self.script.sure = False
                if store is not None:
                    store.close()
                store = None
        if store is not None:
            store.close()

    async def _on_loop(self) -> None:
        store: AsyncTCPStore | None = None
        for count, (name, timeout) in enumerate(self.script.operations):
            try:
                if store is None:
                    store = await AsyncTCPStore.connect("127.0.0.1", self.port, timeout=LIMIT)
                work = asyncio.ensure_future(self.script.do_async(store, name, timeout))
                if count % 3 == 2:
                    asyncio.get_running_loop().call_later(0.002 * count, work.cancel)
                await work
            except (StoreTimeoutError, asyncio.CancelledError):
                pass
            except DistNetworkError:
                if store is not None:
                    await store.close()
                store = None
        if store is not None:
            await store.close()


def _joined(store: TCPStore) -> int:
    return int(unpack(store._connection().call(_JOINED)) or b"0")


def perform(server: int, seed: int) -> Proxy:
    """Run a seed on the server at this port, which must have no other clients. Raises Difference."""
    rng = random.Random(seed)
    book = Book()
    with TCPStore("127.0.0.1", server, timeout=LIMIT) as direct:
        book.queue, book.sum = f"q{seed}", f"sum{seed}"
        joined = _joined(direct)
        proxy = Proxy(server, seed)
        callers = []
        for number in range(2 + rng.randrange(2)):
            names = [rng.choice(OPERATIONS) for _ in range(3 + rng.randrange(6))]
            operations = [(name, rng.choice((0.0, 0.02, SHORT, SHORT)) if name in WAITING else LIMIT) for name in names]
            callers.append(Caller(f"{seed}-{number}", book, proxy.port, operations, rng.random() < 0.5))
        try:
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(120)
                if caller.error is not None:
                    raise caller.error
        finally:
            proxy.quiet = True
            proxy.close()
        queued: Counter[bytes] = Counter()
        with contextlib.suppress(QueueEmptyError):
            while True:
                queued[direct.queue_pop(book.queue, False)] += 1
        total = int(direct.get(book.sum)) if direct.check([book.sum]) else 0
        book.pushed.update(book.confirmed | set(book.returned) | set(queued))
        book.judge_items(queued, may_lose=False, forgive=proxy.losses > 0)
        book.judge_sums(total, _joined(direct) - joined)
    return proxy
