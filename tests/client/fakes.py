"""Test doubles of servers: scripted ones, frozen ones, and a proxy that records the traffic."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support import LIMIT, Server, keys, tcpstore_server

PROBE = b"\x05" + keys(b"tcpstore_async/server")
"""A client's request whether the server has our extension."""

STOCK = b"\x01"
"""The reply of PyTorch's servers to it."""

TRY = b"tcpstore_async/try/"
"""Prefix of the keys with which a client probes, on a separate connection, for BARRIER or queues."""

Talk = Callable[[socket.socket], None]


def exactly(peer: socket.socket, count: int) -> bytes:
    """Receive so many bytes. Raises EOFError if the client closes before."""
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def greet(peer: socket.socket) -> bytes:
    """Answer a client's first bytes, and return them."""
    hello = exactly(peer, 10)
    peer.sendall(hello[6:])
    return hello


def answer_probe(peer: socket.socket) -> None:
    """Reply as PyTorch's servers do to a client's request whether the server has our extension."""
    assert exactly(peer, len(PROBE)) == PROBE
    peer.sendall(STOCK)


def answer_try(peer: socket.socket) -> None:
    """Reply to a probe for BARRIER, queues or LIST_KEYS as a server that has them."""
    opcode = exactly(peer, 1)
    if opcode == b"\x11":
        peer.sendall((0).to_bytes(8, "little"))
        return
    name = exactly(peer, 8 + len(TRY) + 16)
    assert name[8:].startswith(TRY)
    if opcode == b"\x10":
        peer.sendall((0).to_bytes(8, "little"))
        return
    assert opcode + exactly(peer, 8) == b"\x12" + (1).to_bytes(8, "little")
    peer.sendall(b"\x00")
    for key in (name[8:], name[8:] + b"/last_member"):
        assert exactly(peer, 9 + len(key)) == b"\x08" + len(key).to_bytes(8, "little") + key
        peer.sendall((1).to_bytes(8, "little"))


class Fake:
    """A server that handles each connection by a function, in a thread each."""

    def __init__(self, talk: Talk, listener: socket.socket) -> None:
        self._talk = talk
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self.errors: list[BaseException] = []
        self.connections = 0
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            peer.settimeout(LIMIT)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers.append(peer)
            thread = threading.Thread(target=self._run, args=(peer,))
            self._threads.append(thread)
            thread.start()

    def _run(self, peer: socket.socket) -> None:
        with peer:
            try:
                self._talk(peer)
            except (OSError, EOFError):
                pass  # the client, or the test, has ended it
            except BaseException as error:
                self.errors.append(error)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(LIMIT)
        if self.errors:
            raise self.errors[0]


@contextmanager
def fake_server(talk: Talk) -> Iterator[Fake]:
    """`talk` handles each connection, from its first byte on."""
    fake = Fake(talk, socket.create_server(("127.0.0.1", 0), backlog=128))
    try:
        yield fake
    finally:
        fake.stop()


def silent(peer: socket.socket) -> None:
    """Reply to the handshake and to nothing else."""
    greet(peer)
    while peer.recv(65536):
        pass


class Proxy(Fake):
    """Forwards bytes, records both directions, and can cut connections."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.sent: list[bytearray] = []
        """What clients sent, by connection."""
        self.senders: list[list[str]] = []
        """Who sent, by connection: `c` and `s`, once for each run of one side."""
        self.cut_before: bytes | None = None
        """A request that begins so is forwarded; then the connection is cut, before the reply."""
        super().__init__(self._pass_on, socket.create_server(("127.0.0.1", 0), backlog=128))

    def _pass_on(self, peer: socket.socket) -> None:
        number = len(self.sent)
        self.sent.append(bytearray())
        self.senders.append([])
        with socket.create_connection(("127.0.0.1", self.target), LIMIT) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                ready, _, _ = select.select([peer, server], [], [], LIMIT)
                for end in ready:
                    data = end.recv(1 << 20)
                    if not data:
                        return
                    if end is peer:
                        self._note(number, "c")
                        self.sent[number] += data
                        server.sendall(data)
                        if self.cut_before is not None and data.startswith(self.cut_before):
                            return
                    else:
                        self._note(number, "s")
                        peer.sendall(data)

    def _note(self, number: int, who: str) -> None:
        senders = self.senders[number]
        if not senders or senders[-1] != who:
            senders.append(who)

    def all_sent(self) -> bytes:
        return b"".join(map(bytes, self.sent))


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.stop()


class Freezer:
    """A server process that can be stopped and continued."""

    def __init__(self, server: Server) -> None:
        self.port = server.port
        self._server = server

    def freeze(self) -> None:
        os.kill(self._server.process.pid, signal.SIGSTOP)
        stat = Path("/proc", str(self._server.process.pid), "stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        if self._server.process.poll() is None:
            os.kill(self._server.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._server.stop(signal.SIGKILL)


@contextmanager
def freezable() -> Iterator[Freezer]:
    with tcpstore_server() as server:
        freezer = Freezer(server)
        try:
            yield freezer
        finally:
            freezer.thaw()
