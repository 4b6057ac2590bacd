"""A server that is none: an admin socket with a fixed reply, and `tcpstore http` in front of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from support import LIMIT, Server, listening
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.peer_user import PeerUsers
from tcpstore_async.tools.web.answers import Answers
from tcpstore_async.tools.web.http import HttpServer
from tcpstore_async.tools.web.looking import Looker

SERVER = {
    "host": "::1", "port": 29500, "pid": 1, "version": "0.0", "build": "stub", "accepting": True, "connections": 9,
    "max_connections": 100,
}  # fmt: skip


def stats(uptime: float = 100.0, **changed: object) -> dict[str, object]:
    """The counters of a server; each has a value of its own."""
    histogram = {"bounds": [0.001, 0.1], "counts": [5, 3, 2], "sum": 7.5}
    found: dict[str, object] = {
        "time": 1_000_000.0 + uptime, "uptime": uptime, "cpu": 12.5, "resident_bytes": 4096,
        "commands": {"SET": 10, "GET": 20, "WAIT": 0}, "traffic": {"received_bytes": 300, "sent_bytes": 400},
        "connections": {"open": 9, "max": 100, "accepted": 50, "rejected": 6, "closed_for": {"protocol": 2, "tls": 1}},
        "sessions": {"open": 30, "unvalidated": 4, "waiting": 7, "unsent_bytes": 123},
        "links": {"open": 3, "sessions": 21, "single": 8, "suspended": 5},
        "keys": 77, "queues": 11, "awaited_keys": 13,
        "budget": {"limit": 1000, "used": 150, "store": 10, "waiters": 20, "requests": 30, "key_lists": 40,
                   "connections": 50},
        "joins": {"joined": 990, "expected": 0, "world_size": 1000}, "accept_queue": {"length": 14, "limit": 4096},
        "lag": histogram, "service": histogram, "turns": histogram,
    }  # fmt: skip
    return {**found, **changed}


def named_store(name: str, **changed: object) -> dict[str, object]:
    """A store with a name."""
    found: dict[str, object] = {
        "name": name, "host": "node7", "pid": "4711", "attempt": "", "age": 90.0, "joined": 2, "expected": 8,
        "sessions": 3, "keys": 5, "bytes": 700, "ended": "",
    }  # fmt: skip
    return {**found, **changed}


COUNTERS = ["stats", "oldest_stores"]
"""What is asked for each second."""


class AdminStub:
    """Replies to a request for counters with `stats`, to any other with `facts`."""

    def __init__(self, path: Path, facts: list[bytes]) -> None:
        self.path = path
        self.facts = facts
        self.stats = stats()
        self.server: dict[str, object] = SERVER
        self.oldest: list[dict[str, object]] = []
        self.others = 0
        self.asked: list[list[str]] = []
        self.said: list[dict[str, object]] = []
        self.stores: list[str | None] = []
        """Which stores it was asked to look into."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> AdminStub:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(LIMIT)
                said = json.loads(peer.makefile("rb").readline())
                self.said.append(said)
                request = said["ask"]
                self.asked.append(request)
                stores = {"oldest": self.oldest, "others": {"stores": self.others}}
                lines = [{"server": self.server}, {"stats": self.stats}, stores, {"end": True}]
                reply = [msgspec.json.encode(line) for line in lines]
                if request != COUNTERS:
                    self.stores.append(said.get("store"))
                    reply = self.facts
                try:
                    peer.sendall(b"\n".join(reply) + b"\n")
                except OSError:
                    pass  # who asked has ended


@contextmanager
def watched(admin: Path, *options: str) -> Iterator[Server]:
    """`tcpstore http` about the server with this admin socket, which need not be there."""
    with listening(["http", "--admin", str(admin), "--listen", "127.0.0.1:0", *options]) as process:
        yield process


@contextmanager
def answering(admin: Path, *, same_user: bool = False) -> Iterator[int]:
    """What that command answers with, in this process; yields its port."""
    listener = listen("127.0.0.1", 0)
    users = PeerUsers() if same_user else None
    looker = Looker(lambda: admin)
    server = HttpServer(listener, Answers(looker), frozenset({"localhost", socket.gethostname().lower()}), users)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    looker.start()
    serving.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.shutdown()
        serving.join()
        looker.close()
        listener.close()
        if users is not None:
            users.close()
        for thread in looker.threads:
            thread.join(LIMIT)
