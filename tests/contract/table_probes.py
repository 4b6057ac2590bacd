"""Probes of the table of methods in docs/compatibility.md: calls that are made on PyTorch's stores and on ours.

The program `table_probes.py ours|torch` makes every call on every kind of store of one side, each kind in forked
processes of its own, and prints each outcome as a line of JSON. Every call gets an empty store.

A call that may wait for ever on one side is made in a thread and ended from outside. Calls that read invalid memory or
crash the process in PyTorch are left out; the docstring of tools/make_reference.py lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

KINDS = ("tcp", "file", "hash", "prefix-tcp", "prefix-file", "prefix-hash")
CLASSES = {"tcp": "TCPStore", "file": "FileStore", "hash": "HashStore", "prefix": "PrefixStore"}

PATIENCE = timedelta(seconds=20)
MOMENT = timedelta(milliseconds=50)
"""The timeout of a call that must time out."""

WHILE = timedelta(seconds=2)
"""The timeout of a call that times out on one side only, or that must have reached the server when it times out."""

SOON = timedelta(seconds=5)
"""The timeout of a call that must not time out."""

HOLD = 1.0
"""Seconds after which an unfinished call counts as waiting; one that checks once takes microseconds."""

BOTH = "k", "l"

SIGNALLED = "freed by a signal's handler"
"""Must run in the main thread; all others run concurrently."""

RACE = "timeout 0, there"
"""Not for TCPStore: PyTorch's does not wait for the reply, which sometimes arrives in time."""

LEGACY = "legacy"
"""Only for TCPStore."""


class World:
    """Further stores that a call needs; they are closed afterwards."""

    def __init__(self, side: Any, kind: str, stack: ExitStack) -> None:
        self._side = side
        self._stack = stack
        self.another = self._start(kind)
        """Makes another store on the same keys."""

    def _start(self, kind: str) -> Callable[[], Any]:
        outer, _, inner = kind.partition("-")
        if outer == "prefix":
            make = self._start(inner)
            return lambda: self._side.PrefixStore("p", make())
        if outer == "hash":
            store = self._side.HashStore()
            store.set_timeout(PATIENCE)
            return lambda: store
        if outer == "file":
            path = str(Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "store"))
            return lambda: self._made(self._side.FileStore(path))
        master = self._made(
            self._side.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False, use_libuv=True)
        )
        first = [master]  # the master is used as the first client: each connection costs PyTorch's server a look-up
        return lambda: first.pop() if first else self._client(master.port, True)

    def _client(self, port: int, libuv: bool) -> Any:
        client = self._side.TCPStore("127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False, use_libuv=libuv)
        return self._made(client)

    def _made(self, store: Any) -> Any:
        store.set_timeout(PATIENCE)
        return self.closed(store)

    def closed(self, store: Any) -> Any:
        """Keep a store alive until the end, then close it; PyTorch's cannot be closed."""
        self._stack.callback(_close, store)
        return store

    def legacy(self, store: Any) -> Any:
        """Make a client for PyTorch's legacy server, which this server is not."""
        return self._client(store.port, False)


def _close(store: Any) -> None:
    if hasattr(store, "close"):
        store.close()


Act = Callable[[Any, World], Any]


def held(world: World, call: Callable[[], Any], free: Callable[[Any], Any]) -> Any:
    """Return the result of a call; if it waits, end it through another store and say so."""
    ended: list[Callable[[], Any]] = []

    def run() -> None:
        try:
            ended.append(partial(lambda result: result, call()))
        except Exception as error:
            ended.append(partial(_raise, error))

    other = world.another()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HOLD)
    waits = not ended
    if waits:
        free(other)
        thread.join(PATIENCE.total_seconds())
    result = ended[0]()
    return ("waits", result) if waits else result


def woken(world: World, wait: Callable[[], Any], change: Callable[[Any], Any]) -> bool:
    """Whether a change wakes a waiter of a key; if not, end the wait by setting the key."""
    other = world.another()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(HOLD)
    change(other)
    thread.join(HOLD)
    woke = not thread.is_alive()
    other.set("k", "v")
    thread.join(PATIENCE.total_seconds())
    return woke


def _raise(error: Exception) -> None:
    raise error


def with_timeout(store: Any, timeout: Any) -> Any:
    store.set_timeout(timeout)
    return store


def signalled(store: Any, world: World, call: Callable[[], Any], free: Callable[[Any], Any]) -> Any:
    """Make a call that a signal handler ends, if one may run before the timeout."""
    other = world.another()
    store.set_timeout(timedelta(seconds=HOLD))
    before = signal.signal(signal.SIGALRM, lambda *_: free(other))
    try:
        # Repeated: a signal that arrives just before poll(2) is handled only when that returns.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.3)
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def under(store: Any) -> Any:
    """Return the store under a view; any other store itself."""
    return getattr(store, "underlying_store", store)


def caught(call: Callable[[], Any]) -> Any:
    """Make a call and ignore its failure."""
    with contextlib.suppress(Exception):
        call()


def waiting(call: Callable[[Any], Any], free: Callable[[Any], Any]) -> dict[str, Act]:
    """Return the probes of a method that waits: `call` ends after `free`."""
    return {
        "nothing there": lambda s, w: call(with_timeout(s, MOMENT)),
        "timeout 0": lambda s, w: held(w, lambda: call(with_timeout(s, timedelta(0))), free),
        RACE: lambda s, w: (free(s), call(with_timeout(s, timedelta(0)))),
        "timeout below 0": lambda s, w: held(w, lambda: call(with_timeout(s, timedelta(seconds=-1))), free),
        "timeout below 0, there": lambda s, w: (free(s), call(with_timeout(s, timedelta(seconds=-1)))),
        "freed by another": lambda s, w: held(w, lambda: call(s), free),
        SIGNALLED: lambda s, w: signalled(s, w, lambda: call(s), free),
    }


PROBES: dict[str, dict[str, Act]] = {
    "add": {
        "numbers": lambda s, w: (s.add("k", 5), s.add("k", -7), s.get("k"), s.add("k", True)),
        "beyond 64 bits": lambda s, w: (s.add("k", 2**63 - 1), s.add("k", 1)),
        "an amount beyond 64 bits": lambda s, w: s.add("k", 2**63),
        "to a number as text": lambda s, w: (s.set("k", " +5.9"), s.add("k", 1)),
        "to the empty value": lambda s, w: (s.set("k", ""), s.add("k", 1)),
        "to text": lambda s, w: (s.set("k", "text"), s.add("k", 1)),
        "to text, and then": lambda s, w: (s.set("k", "t"), caught(lambda: s.add("k", 1)), s.get("k")),
        "a fraction": lambda s, w: s.add("k", 1.5),
        "a text": lambda s, w: s.add("k", "1"),
        "no key": lambda s, w: s.add(None, 1),
        "keys": lambda s, w: (s.add("", 1), s.add(b"b", 1), s.add("ü", 1), s.get("b"), s.get("ü".encode())),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.add("k", 1)),
        "by name": lambda s, w: s.add(key="k", amount=1),
    },
    "append": {
        "values": lambda s, w: (s.append("k", "a"), s.append("k", b"b"), s.append("k", ""), s.get("k")),
        "the present value": lambda s, w: (s.set("k", "a"), s.append("k", "a"), s.get("k")),
        "nothing to nothing": lambda s, w: (s.append("k", ""), s.check(["k"])),
        "to the empty value": lambda s, w: (s.set("k", ""), s.append("k", "a"), s.get("k")),
        "empty key": lambda s, w: (s.append("", "a"), s.append(b"", "b"), s.get("")),
        "a number": lambda s, w: s.append("k", 1),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.append("k", "a")),
        "by name": lambda s, w: s.append(key="k", value="v"),
    },
    "barrier": {
        "of one": lambda s, w: (s.barrier("b", 1), s.barrier("b", 1)),
        "of none": lambda s, w: (s.barrier("b", 0, WHILE), s.barrier("b", -1, WHILE)),
        "of fewer than are there": lambda s, w: (
            caught(lambda: s.barrier("b", 3, WHILE)),
            s.barrier("b", 1, WHILE),
        ),
        "of two": lambda s, w: held(w, lambda: s.barrier("b", 2), lambda o: o.barrier("b", 2)),
        "after it was complete": lambda s, w: (
            held(w, lambda: s.barrier("b", 2), lambda o: o.barrier("b", 2)),
            s.barrier("b", 2, SOON),
        ),
        "larger, after it was complete": lambda s, w: (s.barrier("b", 1), s.barrier("b", 9, WHILE)),
        "not complete": lambda s, w: s.barrier("b", 2, MOMENT),
        "not complete, the store's timeout": lambda s, w: held(
            w, lambda: with_timeout(s, MOMENT).barrier("b", 2), lambda o: o.barrier("b", 2, SOON)
        ),
        "timeout None": lambda s, w: s.barrier("b", 1, None),
        "whoever gave up counts": lambda s, w: (
            caught(lambda: s.barrier("b", 2, WHILE)),
            s.barrier("b", 2, SOON),
        ),
        "timeout 0": lambda s, w: held(w, lambda: s.barrier("b", 2, timedelta(0)), lambda o: o.barrier("b", 2, SOON)),
        "timeout below 0": lambda s, w: held(
            w, lambda: s.barrier("b", 2, timedelta(seconds=-1)), lambda o: o.barrier("b", 2, SOON)
        ),
        SIGNALLED: lambda s, w: signalled(
            s, w, lambda: s.barrier("b", 2, timedelta(seconds=HOLD)), lambda o: o.barrier("b", 2)
        ),
        "its key is there": lambda s, w: (s.barrier("b", 1), s.check(["b"])),
        "its keys": lambda s, w: (s.barrier("b", 1), s.check(["b/num_members", "b/last_member"])),
        "empty key": lambda s, w: (s.barrier("", 1), s.barrier(b"", 1)),
        "timeout in seconds": lambda s, w: s.barrier("b", 1, 1),
        "timeout in fractions": lambda s, w: s.barrier("b", 1, 60.5),
        "a text for a size": lambda s, w: s.barrier("b", "1"),
        "by name": lambda s, w: s.barrier(key="b", world_size=1, timeout=timedelta(seconds=1)),
    },
    "check": {
        "keys": lambda s, w: (s.set("k", ""), s.check(["k"]), s.check(["k", "l"]), s.check(["l"])),
        "no keys": lambda s, w: (s.check([]), s.check(())),
        "empty key": lambda s, w: (s.check([""]), s.set("", "v"), s.check([""]), s.check([b""])),
        "bytes": lambda s, w: (s.set(b"\xff", "v"), s.check([b"\xff"])),
        "one twice": lambda s, w: (s.set("k", "v"), s.check(["k", "k"])),
        "a text": lambda s, w: s.check("k"),
        "some bytes": lambda s, w: s.check(b"k"),
        "numbers": lambda s, w: s.check([1]),
        "nothing": lambda s, w: s.check(None),
        "a set": lambda s, w: s.check({"k"}),
        "a generator": lambda s, w: s.check(key for key in BOTH),
        "a dict": lambda s, w: s.check({"k": "v"}),
        "by name": lambda s, w: s.check(keys=["k"]),
    },
    "clone": {
        "class": lambda s, w: type(w.closed(s.clone())).__name__,
        "same keys": lambda s, w: (w.closed(s.clone()).set("k", "v"), s.get("k")),
        "timeout": lambda s, w: w.closed(with_timeout(s, SOON).clone()).timeout,
        "is another": lambda s, w: w.closed(s.clone()) is s,
        "timeout of its own": lambda s, w: (w.closed(s.clone()).set_timeout(MOMENT), s.timeout),
    },
    "compare_set": {
        "nothing, as expected": lambda s, w: (s.compare_set("k", "", "new"), s.get("k")),
        "nothing, other than expected": lambda s, w: (s.compare_set("k", "old", "new"), s.check(["k"])),
        "as expected": lambda s, w: (s.set("k", "old"), s.compare_set("k", b"old", "new"), s.get("k")),
        "other than expected": lambda s, w: (s.set("k", "x"), s.compare_set("k", "old", "new"), s.get("k")),
        "there, nothing expected": lambda s, w: (s.set("k", "x"), s.compare_set("k", "", "new"), s.get("k")),
        "the empty value": lambda s, w: (s.set("k", ""), s.compare_set("k", "", "new"), s.get("k")),
        "the empty value, other": lambda s, w: (s.set("k", ""), s.compare_set("k", "x", "new"), s.get("k")),
        "nothing for nothing": lambda s, w: (s.compare_set("k", "", ""), s.check(["k"])),
        "back to nothing": lambda s, w: (s.set("k", "x"), s.compare_set("k", "x", ""), s.get("k")),
        "empty key": lambda s, w: (s.compare_set("", "", "new"), s.get(b"")),
        "a number": lambda s, w: s.compare_set("k", "", 1),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.compare_set("k", "", "v")),
        "that failed wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.compare_set("k", "other", "v")),
        "by name": lambda s, w: s.compare_set(key="k", expected="", desired="v"),
    },
    "delete_key": {
        "there": lambda s, w: (s.set("k", "v"), s.delete_key("k"), s.check(["k"])),
        "not there": lambda s, w: s.delete_key("k"),
        "twice": lambda s, w: (s.set("k", "v"), s.delete_key("k"), s.delete_key("k")),
        "and set again": lambda s, w: (s.set("k", "v"), s.delete_key("k"), s.set("k", "w"), s.get("k")),
        "empty key": lambda s, w: (s.set("", "v"), s.delete_key(b""), s.check([""])),
        "a number": lambda s, w: s.delete_key(1),
        "by name": lambda s, w: (s.set("k", "v"), s.delete_key(key="k")),
    },
    "get": {
        **waiting(lambda s: s.get("k"), lambda s: s.set("k", "v")),
        "values": lambda s, w: [(s.set("k", value), s.get("k")) for value in ("", "ü", b"\x00\xff", bytearray(b"v"))],
        "type": lambda s, w: (s.set("k", "v"), type(s.get("k")).__name__),
        "keys": lambda s, w: [(s.set(key, "v"), s.get(key)) for key in ("", "/", "a\0b", b"\xff", bytearray(b"x"))],
        "a lone surrogate": lambda s, w: s.get("\ud800"),
        "a number": lambda s, w: s.get(1),
        "by name": lambda s, w: (s.set("k", "v"), s.get(key="k")),
    },
    "has_extended_api": {"asked": lambda s, w: s.has_extended_api()},
    "host": {"asked": lambda s, w: s.host, "given": lambda s, w: setattr(s, "host", "elsewhere")},
    "libuvBackend": {
        "asked": lambda s, w: s.libuvBackend,
        LEGACY: lambda s, w: w.legacy(s).libuvBackend,
        "given": lambda s, w: setattr(s, "libuvBackend", False),
    },
    "list_keys": {
        "none": lambda s, w: s.list_keys(),
        "some": lambda s, w: (s.multi_set(["k", "l", ""], ["1", "2", "3"]), sorted(s.list_keys())),
        "deleted": lambda s, w: (s.set("k", "v"), s.set("l", "v"), s.delete_key("k"), s.list_keys()),
        "beside a queue": lambda s, w: (s.set("k", "v"), caught(lambda: s.queue_push("q", "v")), s.list_keys()),
        "no text": lambda s, w: (s.set(b"\xff", "v"), s.list_keys()),
        "beside others": lambda s, w: (under(s).set("other", "v"), s.set("k", "v"), sorted(s.list_keys())),
        "beside a longer prefix": lambda s, w: (under(s).set("pp/other", "v"), s.set("k", "v"), sorted(s.list_keys())),
    },
    "multi_get": {
        **waiting(lambda s: s.multi_get(["k", "l"]), lambda s: s.multi_set(["k", "l"], ["v", "w"])),
        "values": lambda s, w: (s.set("k", "v"), s.set("l", ""), s.multi_get(["k", b"l", "k"])),
        "one missing": lambda s, w: (s.set("k", "v"), with_timeout(s, MOMENT).multi_get(["k", "l"])),
        "no keys": lambda s, w: s.multi_get([]),
        "empty key": lambda s, w: (s.set("", "v"), s.multi_get([""])),
        "a text": lambda s, w: s.multi_get("k"),
        "numbers": lambda s, w: s.multi_get([1]),
        "a set": lambda s, w: (s.set("k", "v"), s.multi_get({"k"})),
        "a generator": lambda s, w: (s.set("k", "v"), s.multi_get(key for key in "k")),
        "by name": lambda s, w: (s.set("k", "v"), s.multi_get(keys=["k"])),
    },
    "multi_set": {
        "values": lambda s, w: (s.multi_set(["k", b"l"], ["1", b""]), s.get("k"), s.get("l")),
        "one key twice": lambda s, w: (s.multi_set(["k", "k"], ["1", "2"]), s.get("k")),
        "no keys": lambda s, w: s.multi_set([], []),
        "empty key": lambda s, w: (s.multi_set([""], ["1"]), s.get("")),
        "more values than keys": lambda s, w: s.multi_set(["k"], ["1", "2"]),
        "a text": lambda s, w: s.multi_set("k", "v"),
        "numbers": lambda s, w: s.multi_set(["k"], [1]),
        "a generator": lambda s, w: s.multi_set((key for key in "k"), ["v"]),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.multi_set(["k"], ["v"])),
        "by name": lambda s, w: s.multi_set(keys=["k"], values=["v"]),
    },
    "num_keys": {
        "none": lambda s, w: s.num_keys(),
        "some": lambda s, w: (s.set("k", "v"), s.add("l", 1), s.num_keys()),
        "deleted": lambda s, w: (s.set("k", "v"), s.delete_key("k"), s.num_keys()),
        "beside a queue": lambda s, w: (caught(lambda: s.queue_push("q", "v")), s.num_keys()),
        "beside others": lambda s, w: (under(s).set("other", "v"), s.set("k", "v"), s.num_keys()),
    },
    "path": {"asked": lambda s, w: Path(s.path).name, "given": lambda s, w: setattr(s, "path", "elsewhere")},
    "port": {"asked": lambda s, w: type(s.port).__name__, "given": lambda s, w: setattr(s, "port", 1)},
    "queue_len": {
        "none": lambda s, w: s.queue_len("q"),
        "some": lambda s, w: (s.queue_push("q", "1"), s.queue_push("q", "2"), s.queue_len("q"), s.queue_pop("q")),
        "emptied": lambda s, w: (s.queue_push("q", "1"), s.queue_pop("q"), s.queue_len("q")),
        "of a value": lambda s, w: (s.set("q", "v"), s.queue_len("q")),
        "empty key": lambda s, w: (s.queue_push("", "1"), s.queue_len(b"")),
        "a number": lambda s, w: s.queue_len(1),
        LEGACY: lambda s, w: w.legacy(s).queue_len("q"),
        "by name": lambda s, w: s.queue_len(key="q"),
    },
    "queue_pop": {
        **waiting(lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v")),
        "items": lambda s, w: (s.queue_push("q", "1"), s.queue_push("q", "2"), s.queue_pop("q"), s.queue_pop("q")),
        "none, without block": lambda s, w: s.queue_pop("q", False),
        "one, without block": lambda s, w: (s.queue_push("q", ""), s.queue_pop("q", block=False)),
        "of a value": lambda s, w: (s.set("q", "v"), with_timeout(s, SOON).queue_pop("q")),
        "of a value, without block": lambda s, w: (s.set("q", "v"), s.queue_pop("q", False)),
        "empty key": lambda s, w: (s.queue_push("", "1"), s.queue_pop(b"")),
        "a number": lambda s, w: s.queue_pop(1),
        LEGACY: lambda s, w: w.legacy(s).queue_pop("q", False),
        "by name": lambda s, w: (s.queue_push("q", "1"), s.queue_pop(key="q", block=True)),
        "a number for block": lambda s, w: (s.queue_push("q", "1"), s.queue_pop("q", 0)),
        "None for block": lambda s, w: (s.queue_push("q", "1"), s.queue_pop("q", None)),
    },
    "queue_push": {
        "an item": lambda s, w: (s.queue_push("q", "1"), s.check(["q"])),
        "beside a value": lambda s, w: (s.set("q", "v"), s.queue_push("q", "1"), s.get("q"), s.queue_pop("q")),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["q"]), lambda o: o.queue_push("q", "1")),
        "deleted": lambda s, w: (s.queue_push("q", "1"), s.delete_key("q"), s.queue_len("q")),
        "a number": lambda s, w: s.queue_push("q", 1),
        LEGACY: lambda s, w: w.legacy(s).queue_push("q", "1"),
        "by name": lambda s, w: s.queue_push(key="q", value="1"),
    },
    "set": {
        "values": lambda s, w: [(s.set("k", value), s.get("k")) for value in ("", "ü", b"\x00\xff", bytearray(b"v"))],
        "keys": lambda s, w: [(s.set(key, "v"), s.check([key])) for key in ("", "/", "a\0b", b"\xff", bytearray(b"x"))],
        "again": lambda s, w: (s.set("k", "v"), s.set("k", "w"), s.get("k")),
        "a number": lambda s, w: s.set("k", 1),
        "nothing": lambda s, w: s.set("k", None),
        "a lone surrogate": lambda s, w: s.set("\ud800", "v"),
        "wakes": lambda s, w: woken(w, lambda: s.wait(["k"]), lambda o: o.set("k", "v")),
        "by name": lambda s, w: s.set(key="k", value="v"),
    },
    "set_timeout": {
        "a timedelta": lambda s, w: (s.set_timeout(MOMENT), s.timeout),
        "microseconds": lambda s, w: (s.set_timeout(timedelta(microseconds=1999)), s.timeout),
        "0": lambda s, w: (s.set_timeout(timedelta(0)), s.timeout),
        "below 0": lambda s, w: (s.set_timeout(timedelta(seconds=-2)), s.timeout),
        "a day": lambda s, w: (s.set_timeout(timedelta(days=1)), s.timeout),
        "the longest": lambda s, w: (s.set_timeout(timedelta.max), s.timeout),
        "an int": lambda s, w: (s.set_timeout(2), s.timeout),
        "a float": lambda s, w: (s.set_timeout(0.5), s.timeout),
        "nothing": lambda s, w: s.set_timeout(None),
        "a text": lambda s, w: s.set_timeout("1"),
        "by name": lambda s, w: s.set_timeout(timeout=MOMENT),
    },
    "timeout": {
        "asked": lambda s, w: (s.timeout, type(s.timeout).__name__),
        "given": lambda s, w: setattr(s, "timeout", MOMENT),
    },
    "underlying_store": {
        "class": lambda s, w: type(s.underlying_store).__name__,
        "same keys": lambda s, w: (s.set("k", "v"), s.underlying_store.get("p/k")),
        "given": lambda s, w: setattr(s, "underlying_store", None),
    },
    "wait": {
        **waiting(lambda s: s.wait(["k"]), lambda s: s.set("k", "v")),
        "nothing there, its own timeout": lambda s, w: s.wait(["k"], MOMENT),
        "some missing": lambda s, w: (s.set("k", "v"), s.wait(["k", "l", "m"], MOMENT)),
        "its own timeout 0": lambda s, w: held(w, lambda: s.wait(["k"], timedelta(0)), lambda o: o.set("k", "v")),
        "its own timeout below 0": lambda s, w: held(
            w, lambda: s.wait(["k"], timedelta(seconds=-1)), lambda o: o.set("k", "v")
        ),
        "there": lambda s, w: (s.set("k", "v"), s.wait(["k"]), s.wait(["k", "k"], SOON)),
        "no keys": lambda s, w: (s.wait([]), s.wait([], SOON)),
        "empty key": lambda s, w: (s.set("", "v"), s.wait([""], SOON)),
        "timeout None": lambda s, w: (s.set("k", "v"), s.wait(["k"], None)),
        "timeout in seconds": lambda s, w: (s.set("k", "v"), s.wait(["k"], 1)),
        "timeout in fractions": lambda s, w: (s.set("k", "v"), s.wait(["k"], 60.5)),
        "a text": lambda s, w: s.wait("k", MOMENT),
        "numbers": lambda s, w: s.wait([1], MOMENT),
        "a set": lambda s, w: (s.set("k", "v"), s.wait({"k"}, SOON)),
        "a generator": lambda s, w: (s.set("k", "v"), s.wait((key for key in "k"), SOON)),
        "by name": lambda s, w: (s.set("k", "v"), s.wait(keys=["k"])),
    },
}
"""The probes by method and name."""


def probes_of(kind: str, method: str) -> list[str]:
    """Return the probes of a method on a kind of store."""
    left_out = {RACE} if kind.endswith("tcp") else set()
    return [name for name in PROBES[method] if name not in left_out and (name != LEGACY or kind == "tcp")]


def outcome(side: Any, kind: str, method: str, name: str) -> list[Any]:
    """Return the value as text, or class, text and bases of an error."""
    with ExitStack() as stack:
        world = World(side, kind, stack)
        try:
            return [repr(PROBES[method][name](world.another(), world))]
        except Exception as error:
            return [type(error).__name__, str(error), [base.__name__ for base in type(error).__mro__]]


def try_kind(side: Any, kind: str, signalled: bool) -> None:
    """Print the outcomes of the probes that need the main thread, or of all others."""
    store = getattr(side, CLASSES[kind.partition("-")[0]])
    methods = [method for method in PROBES if hasattr(store, method) or (kind == "tcp" and method in ("host", "port"))]

    def tried(probe: tuple[str, str]) -> None:
        line = json.dumps([kind, *probe, outcome(side, kind, *probe)]) + "\n"
        os.write(1, line.encode())  # in one piece, whoever else writes

    probes = [
        (method, name) for method in methods for name in probes_of(kind, method) if (name == SIGNALLED) == signalled
    ]
    if signalled:
        for probe in probes:
            tried(probe)
        return
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(tried, probes))


def in_a_child(call: Callable[[], None]) -> int:
    """Fork; return the child's pid. The child exits without cleanup: PyTorch's threads would block it."""
    pid = os.fork()
    if not pid:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def main(name: str) -> None:
    side = importlib.import_module({"ours": "tcpstore_async", "torch": "torch.distributed"}[name])
    os.environ["TCPSTORE_SERVER"] = "thread"
    children = [in_a_child(partial(try_kind, side, kind, signalled)) for kind in KINDS for signalled in (False, True)]
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main(sys.argv[1])
