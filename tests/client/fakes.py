"""Servers that are no servers: scripted ones, frozen ones, and a proxy that records what is said."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support import LIMIT, Server, keys, tcpstore_server

PROBE = b"\x05" + keys(b"tcpstore_async/server")
"""With which a client asks whether a server has the extension."""

STOCK = b"\x01"
"""What PyTorch's servers answer to that."""

TRY = b"tcpstore_async/try/"
"""In the key with which a client tries, on a connection of its own, whether a server knows BARRIER or queues."""

Talk = Callable[[socket.socket], None]


def exactly(peer: socket.socket, count: int) -> bytes:
    """So many bytes; EOFError if the client closes before."""
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


def answer_try(peer: socket.socket) -> None:
    """What a server says that knows what a client tries on this connection: BARRIER, queues or LIST_KEYS."""
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
    """A server whose every connection is handled by a function, in a thread each."""

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
    """Answer the greeting and nothing else."""
    greet(peer)
    while peer.recv(65536):
        pass


class Proxy(Fake):
    """Passes bytes on, keeps what was said in both directions, and can cut."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.said: list[bytearray] = []
        """What clients said, by connection."""
        self.turns: list[list[str]] = []
        """Who spoke, by connection: `c` and `s`, each run of one side once."""
        self.cut_before: bytes | None = None
        """A request that begins so is passed on; then the connection is cut, before the answer."""
        super().__init__(self._pass_on, socket.create_server(("127.0.0.1", 0), backlog=128))

    def _pass_on(self, peer: socket.socket) -> None:
        number = len(self.said)
        self.said.append(bytearray())
        self.turns.append([])
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
                        self.said[number] += data
                        server.sendall(data)
                        if self.cut_before is not None and data.startswith(self.cut_before):
                            return
                    else:
                        self._note(number, "s")
                        peer.sendall(data)

    def _note(self, number: int, who: str) -> None:
        turns = self.turns[number]
        if not turns or turns[-1] != who:
            turns.append(who)

    def all_said(self) -> bytes:
        return b"".join(map(bytes, self.said))


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
        os.waitid(os.P_PID, self._server.process.pid, os.WSTOPPED | os.WNOWAIT)

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
