"""A proxy between a relay and its server that cuts the link at chosen bytes, or holds everything up."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support import LIMIT

_RESET = struct.pack("ii", 1, 0)


class LinkProxy:
    """Listens on `port`. Each connection is cut after `most` bytes of one direction at the latest, if that is given."""

    def __init__(self, server: int, seed: int, most: int) -> None:
        self.server = server
        self.most = most
        """0: nothing is cut any more."""
        self.cuts = 0
        self.connections = 0
        self.open = threading.Event()
        """Cleared: new connections are closed at once."""
        self.open.set()
        self.frozen = threading.Event()
        """Set: connections made so far carry nothing any more, but last."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(LIMIT)
        for one in self._sockets:
            one.close()

    def cut(self, reset: bool = False) -> None:
        """Cut all connections now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _end(pair, reset)

    def _accept(self) -> None:
        while True:
            try:
                relay, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(relay)
            if not self.open.is_set():
                _end((relay, relay), True)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.server))
            except OSError:
                _end((relay, relay), True)
                continue
            self._sockets.append(server)
            self.connections += 1
            for one in (relay, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((relay, server))
            for source, sink in ((relay, server), (server, relay)):
                fate = self._random.randrange(self.most) if self.most else -1
                thread = threading.Thread(target=self._pump, args=(source, sink, fate, self._random.random() < 0.5))
                thread.daemon = True
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, fate: int, reset: bool) -> None:
        """Carry bytes one way; after `fate` of them, unless that is negative, the connection ends."""
        frozen = False
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if self.frozen.is_set():
                    frozen = True
                if frozen:
                    continue
                if 0 <= fate <= len(data) and self.most:
                    self.cuts += 1
                    sink.sendall(data[:fate])
                    break
                fate -= len(data)
                sink.sendall(data)
        _end((source, sink), reset)


def _end(pair: tuple[socket.socket, socket.socket], reset: bool) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def link_proxy(server: int, seed: int = 0, most: int = 0) -> Iterator[LinkProxy]:
    proxy = LinkProxy(server, seed, most)
    try:
        yield proxy
    finally:
        proxy.close()
