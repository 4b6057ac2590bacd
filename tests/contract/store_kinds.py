"""Every kind of store that the contract tests cover: how to make one, and how error texts show its keys."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from support import LIMIT, tcpstore_server, torch_server
from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, Store, TCPStore
from tcpstore_async.base.coercion import Text, Timeout

T = TypeVar("T")

Maker = Callable[[], Store]
"""Makes another store on the same keys."""


class Kind:
    """One kind of store. `start` is called once for all tests."""

    def __init__(self, name: str, start: Callable[[ExitStack], Maker], shown: str = "/", *, ours: bool = True) -> None:
        self.name: Final = name
        self.start: Final = start
        self.shown: Final = shown
        """What precedes a key in error texts."""
        self.wait: Final = "Wait" if name.endswith("hash") else "wait"
        """How the text of a timeout begins: PyTorch's HashStore and TCPStore differ."""
        self.ours: Final = ours
        """False on PyTorch's server, with its own quirks."""
        self.is_remote: Final = name.startswith(("tcp", "torch", "async", "prefix-tcp"))


class AsyncStore(Store):
    """The async client behind the synchronous interface: a loop in a thread runs each call."""

    def __init__(self, client: AsyncTCPStore, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.client: Final = client
        self._run: Final = run

    @property
    def timeout(self) -> timedelta:
        return self.client.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self.client.set_timeout(timeout)

    def close(self) -> None:
        self._run(self.client.close())

    def clone(self) -> AsyncStore:
        return AsyncStore(self._run(self.client.clone()), self._run)

    def set(self, key: Text, value: Text) -> None:
        self._run(self.client.set(key, value))

    def get(self, key: Text) -> bytes:
        return bytes(self._run(self.client.get(key)))

    def add(self, key: Text, amount: int) -> int:
        return int(self._run(self.client.add(key, amount)))

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return bytes(self._run(self.client.compare_set(key, expected, desired)))

    def append(self, key: Text, value: Text) -> None:
        self._run(self.client.append(key, value))

    def check(self, keys: Iterable[Text]) -> bool:
        return bool(self._run(self.client.check(keys)))

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._run(self.client.wait(keys, timeout))

    def delete_key(self, key: Text) -> bool:
        return bool(self._run(self.client.delete_key(key)))

    def num_keys(self) -> int:
        return int(self._run(self.client.num_keys()))

    def list_keys(self) -> list[str]:
        return list(self._run(self.client.list_keys()))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return list(self._run(self.client.multi_get(keys)))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        self._run(self.client.multi_set(keys, values))

    def queue_push(self, key: Text, value: Text) -> None:
        self._run(self.client.queue_push(key, value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return bytes(self._run(self.client.queue_pop(key, block)))

    def queue_len(self, key: Text) -> int:
        return int(self._run(self.client.queue_len(key)))

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        self._run(self.client.barrier(key, world_size, timeout))

    def has_extended_api(self) -> bool:
        return True


Connect = Callable[..., Store]


@contextmanager
def either_client(which: str) -> Iterator[Connect]:
    """Yield what connects to a port with the client `sync` or `async`; its stores are closed at the end."""
    with ExitStack() as stack:
        if which == "sync":
            yield lambda port, **given: stack.enter_context(TCPStore("127.0.0.1", port, timeout=LIMIT, **given))
        else:
            run = stack.enter_context(loop_in_a_thread())
            connect = partial(AsyncTCPStore.connect, "127.0.0.1", timeout=LIMIT)
            yield lambda port, **given: stack.enter_context(AsyncStore(run(connect(port=port, **given)), run))


def _hash(_: ExitStack) -> Maker:
    store = HashStore()
    return store.clone


def _file(stack: ExitStack) -> Maker:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store")
    return lambda: FileStore(path)


def _under(prefix: str, start: Callable[[ExitStack], Maker]) -> Callable[[ExitStack], Maker]:
    """Make views that own their stores, as a clone does."""

    def start_under(stack: ExitStack) -> Maker:
        make = start(stack)

        def made() -> Store:
            with make() as store:
                return PrefixStore(prefix, store).clone()

        return made

    return start_under


def _served(*options: str) -> Callable[[ExitStack], Maker]:
    def start(stack: ExitStack) -> Maker:
        port = stack.enter_context(tcpstore_server(*options)).port
        return lambda: TCPStore("127.0.0.1", port)

    return start


def _hosted(where: str, libuv: bool) -> Callable[[ExitStack], Maker]:
    def start(stack: ExitStack) -> Maker:
        before = os.environ.get("TCPSTORE_SERVER")
        os.environ["TCPSTORE_SERVER"] = where
        try:
            master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
        finally:
            del os.environ["TCPSTORE_SERVER"]
            if before is not None:
                os.environ["TCPSTORE_SERVER"] = before
        stack.enter_context(master)
        return lambda: TCPStore("127.0.0.1", master.port, use_libuv=libuv)

    return start


def _torch(stack: ExitStack) -> Maker:
    port = stack.enter_context(torch_server("libuv"))
    return lambda: TCPStore("127.0.0.1", port)


def _async(stack: ExitStack) -> Maker:
    port = stack.enter_context(tcpstore_server()).port
    run = stack.enter_context(loop_in_a_thread())
    return lambda: AsyncStore(run(AsyncTCPStore.connect("127.0.0.1", port)), run)


@contextmanager
def loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yield what runs a coroutine in that loop."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        over = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))  # which also ends the tasks that are left
    thread.start()
    loop, over = started.result(LIMIT)
    try:
        yield lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(LIMIT)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


KINDS: Final = (
    Kind("hash", _hash, ""),
    Kind("file", _file, ""),
    Kind("prefix-hash", _under("p", _hash), "p/"),
    Kind("prefix-file", _under("p", _file), "p/"),
    Kind("prefix-prefix-hash", _under("inner", _under("outer", _hash)), "outer/inner/"),
    Kind("tcp-served-uv", _served()),
    Kind("tcp-served-threaded", _served("--backend", "threaded")),
    Kind("tcp-process-uv", _hosted("process", True)),
    Kind("tcp-process-threaded", _hosted("process", False)),
    Kind("tcp-thread-uv", _hosted("thread", True)),
    Kind("tcp-thread-threaded", _hosted("thread", False)),
    Kind("prefix-tcp", _under("p", _served()), "/p/"),
    Kind("torch-libuv", _torch, ours=False),
    Kind("async", _async),
)
