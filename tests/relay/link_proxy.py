"""A proxy between a relay and its server that cuts the link at chosen bytes, or holds everything up."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support import LIMIT

_RESET = struct.pack("ii", 1, 0)

Fate = Callable[[random.Random], int]
"""Chooses after how many bytes of one direction a connection is cut."""


class LinkProxy:
    """Listens on `port`."""

    def __init__(self, server: int, seed: int, fate: Fate | None) -> None:
        self.server = server
        self.fate = fate
        """None: nothing is cut any more."""
        self.cuts = 0
        self.resets = 0
        """How many of the cuts are resets; the others end the connection in order."""
        self.connections = 0
        self.open = threading.Event()
        """Cleared: new connections are closed at once."""
        self.open.set()
        self.frozen = threading.Event()
        """Set: connections made so far carry nothing any more, but last."""
        self.flowing = threading.Event()
        """Cleared: what is sent, on old and on new connections, arrives only when it is set again."""
        self.flowing.set()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(LIMIT)
        self.cut()
        self.flowing.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(LIMIT)

    def cut(self, reset: bool = False) -> None:
        """Cut all connections now, with what is held up."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.end(reset)

    def _accept(self) -> None:
        while True:
            try:
                relay, _ = self._listener.accept()
                if not self.open.is_set():
                    raise ConnectionError
                server = socket.create_connection(("127.0.0.1", self.server))
            except ConnectionError:
                relay.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                relay.close()
                continue
            except OSError:
                return
            pair = _Pair(relay, server)
            reset = self._random.random() < 0.5
            with self._lock:
                self.connections += 1
                self._pairs.add(pair)
                for source, sink in ((relay, server), (server, relay)):
                    fate = -1 if self.fate is None else self.fate(self._random)
                    thread = threading.Thread(target=self._pump, args=(pair, source, sink, fate, reset), daemon=True)
                    self._threads.add(thread)
                    thread.start()

    def _pump(self, pair: _Pair, source: socket.socket, sink: socket.socket, fate: int, reset: bool) -> None:
        """Carry bytes one way; after `fate` of them, unless that is negative, the connection ends."""
        frozen = False
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self.flowing.wait()
                if pair.over:
                    break
                frozen = frozen or self.frozen.is_set()
                if frozen:
                    continue
                if 0 <= fate <= len(data) and self.fate is not None:
                    with self._lock:
                        self.cuts += 1
                        self.resets += reset
                    sink.sendall(data[:fate])
                    pair.end(reset)
                    break
                fate -= len(data)
                sink.sendall(data)
        self.flowing.wait()
        pair.end(False)
        with self._lock:
            self._threads.discard(threading.current_thread())
            pair.pumps -= 1
            if not pair.pumps:
                self._pairs.discard(pair)
                pair.close()


class _Pair:
    """Both halves of a connection."""

    def __init__(self, *both: socket.socket) -> None:
        self.both = both
        self.pumps = 2
        self.over = False
        for one in both:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def end(self, reset: bool) -> None:
        """Have both pumps end; with a reset, nothing is sent before the last of them closes."""
        if self.over:
            return
        if reset:  # before any pump can see that it is over, and close
            for one in self.both:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.over = True
        for one in self.both:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self.both:
            one.close()


@contextmanager
def link_proxy(server: int, seed: int = 0, fate: Fate | None = None) -> Iterator[LinkProxy]:
    proxy = LinkProxy(server, seed, fate)
    try:
        yield proxy
    finally:
        proxy.close()
