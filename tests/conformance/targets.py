"""The servers a script is played to: sessions in memory, our running servers, PyTorch's own.

Nothing here sleeps and hopes. On sockets, "the server has dealt with that" is known by round trips on a connection of
its own: a server of one thread serves its connections in the order in which their bytes arrived, so what was sent
before has been executed and answered when the second pong is here. (A PING on the connection under test would be a
command like any other, and could change what happens.) Of a server with a thread for each connection the first pong
says only that those bytes have arrived: that they have been dealt with shows when, between the two round trips, all
threads of its process are seen asleep at the same moment; see `resting`.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest

import persisted
from conformance.script import Answer, Deed, Script, in_order
from support import LIMIT, RawPeer, resting
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.server.features import attach_features
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store


class Target(Protocol):
    def connect(self, peer: str) -> None: ...
    def say(self, peer: str, data: bytes) -> None: ...
    def hear(self, peer: str, expected: Answer) -> Answer: ...
    def half_close(self, peer: str) -> None: ...
    def close(self, peer: str) -> None: ...
    def stop_server(self) -> None: ...


def play(script: Script, target: Target, *, torch: bool = False) -> None:
    """Play a script to a target; it must give our answers, or PyTorch's."""
    connected: list[str] = []
    for number, step in enumerate(script.steps):
        if step.deed is Deed.CONNECT:
            target.connect(step.peer)
            connected.append(step.peer)
        elif step.deed is Deed.SAY:
            target.say(step.peer, step.data)
        elif step.deed is Deed.HALF_CLOSE:
            target.half_close(step.peer)
        elif step.deed is Deed.CLOSE:
            target.close(step.peer)
            connected.remove(step.peer)
        elif step.deed is Deed.STOP_SERVER:
            target.stop_server()
        else:
            expected = step.torch if torch else step.ours
            actual = target.hear(step.peer, expected)
            same = actual.closed == expected.closed and (
                in_order(actual.data, step.listed) == in_order(expected.data, step.listed)
            )
            assert same, f"{script.name}, step {number}: {step.peer} hears {actual}, not {expected}"
    if not script.stops_server:
        for peer in connected:
            last = target.hear(peer, Answer())
            assert not last.data, f"{script.name}: at the end {peer} still hears {last}"


# Sessions in memory

Cut = Callable[[bytes], list[bytes]]

_EDGE = 1024


def whole(data: bytes) -> list[bytes]:
    return [data]


def byte_by_byte(data: bytes) -> list[bytes]:
    """Single bytes; of long data, those at both ends."""
    if len(data) > 4 * _EDGE:
        middle = data[_EDGE:-_EDGE]
        return [*byte_by_byte(data[:_EDGE]), middle, *byte_by_byte(data[-_EDGE:])]
    return [data[at : at + 1] for at in range(len(data))]


def at_random(seed: str) -> Cut:
    """Pieces of random sizes, the same ones for the same seed."""
    generator = random.Random(seed)

    def cut(data: bytes) -> list[bytes]:
        last = min(len(data), 40)
        cuts = sorted(generator.randrange(len(data) + 1) for _ in range(generator.randint(0, last)))
        return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < stop]

    return cut


def demand_nothing_left(store: Store) -> None:
    """Nothing may be registered, or held, for peers once they have all left."""
    keyspace = store.keyspace
    assert (keyspace.waiters, keyspace.counters, keyspace.handoffs, keyspace.parked) == ({}, {}, {}, 0)
    assert store.budget.unfinished == 0


class EngineTarget:
    """A store without connections: a peer receives what its session puts out."""

    def __init__(self, cut: Cut = whole, *, bulk: bool = False, limits: Limits | None = None) -> None:
        self.store = Store(limits or Limits())
        attach_features(self.store, "a store", "none")
        self.cut = cut
        self.bulk = bulk
        """Receive large values into their own buffer, as the running server does."""
        self.sessions: dict[str, ServerSession] = {}
        self.closed: set[str] = set()
        self.pending: dict[str, bytearray] = {}
        self.refusals: list[PeerError] = []

    def connect(self, peer: str) -> None:
        assert peer not in self.sessions
        self.sessions[peer] = ServerSession(self.store, peer, "127.0.0.1", 1, 0.0)
        self.pending[peer] = bytearray()

    def say(self, peer: str, data: bytes) -> None:
        for piece in self.cut(data):
            if peer in self.closed:
                return
            self._receive(peer, piece)

    def hear(self, peer: str, expected: Answer) -> Answer:
        data = bytes(self.pending[peer])
        self.pending[peer].clear()
        return Answer(data, peer in self.closed)

    def half_close(self, peer: str) -> None:
        self.close(peer)

    def close(self, peer: str) -> None:
        if peer not in self.closed:
            self.closed.add(peer)
            self.sessions[peer].leave()
            self._flush_others()

    def stop_server(self) -> None:
        raise AssertionError("a store has no server to stop")

    def finish(self) -> None:
        """Everybody leaves; nothing of them may stay behind."""
        for peer in self.sessions:
            self.close(peer)
        demand_nothing_left(self.store)

    def _receive(self, peer: str, piece: bytes) -> None:
        session = self.sessions[peer]
        try:
            bulk = session.large_value() if self.bulk else None
            while bulk is not None and piece:
                with bulk.free_space() as space:
                    count = min(len(space), len(piece))
                    space[:count] = piece[:count]
                bulk.fill(count)
                piece = piece[count:]
                session.receive(b"")
                self._flush(session)
                bulk = session.large_value()
            if piece:
                session.receive(piece)
            self._flush(session)
            while session.stalled():
                session.receive(b"")
                self._flush(session)
        except PeerError as error:
            self.refusals.append(error)
            self._flush(session)
            self.close(peer)
        self._flush_others()

    def _flush(self, session: Peer) -> None:
        assert isinstance(session.owner, str)
        self.pending[session.owner] += b"".join(session.out)
        session.out.clear()
        session.unsent = 0

    def _flush_others(self) -> None:
        while self.store.keyspace.work:
            self.store.keyspace.step()
        while self.store.hub.pending_flush:
            session = self.store.hub.pending_flush.pop()
            if session.owner is not None:
                self._flush(session)


# Running servers

OUR_SERVERS = (
    persisted.PROGRAM
    + """
import asyncio, sys
from contextlib import AsyncExitStack
from tcpstore_async.serving import run_loop, serve

async def main():
    running = {}
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        if line == "new\\n":
            stack = AsyncExitStack()
            port = (await stack.enter_async_context(serve(backend=sys.argv[1]))).port
            running[port] = stack
        else:
            port = int(line)
            await running.pop(port).aclose()
        print(port, flush=True)

run_loop(main())
"""
)

# PyTorch looks up the names of everybody who connects, and stands still until DNS has answered. On an IPv4 socket the
# address is 127.0.0.1, which /etc/hosts has; on the IPv6 socket that it would open it is ::ffff:127.0.0.1. (Its own
# client looks that up all the same: hence RES_OPTIONS, for a machine whose DNS is slow.)
TORCH_SERVERS = """
import datetime, socket, sys, torch
running = {}
for line in sys.stdin:
    if line == "new\\n":
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        running[port] = torch.distributed.TCPStore(
            "127.0.0.1", port, None, True, datetime.timedelta(seconds=300), wait_for_workers=False, use_libuv=True,
            master_listen_fd=listener.detach())
    else:
        port = int(line)
        del running[port]
    print(port, flush=True)
"""


class Servers:
    """A process that starts an empty server whenever asked: one for each script, without the price of a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self) -> int:
        return self._ask("new")

    def stop(self, port: int) -> None:
        self._ask(str(port))

    def _ask(self, request: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def servers(program: str, *arguments: str) -> Iterator[Servers]:
    # The working directory must not be the checkout, whose plain sources would hide a compiled build.
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
            text=True,
        ) as process,
    ):
        try:
            yield Servers(process)
        finally:
            process.kill()


class SocketTarget:
    """A server on a port."""

    def __init__(self, port: int, stop: Callable[[], object], threads_of: int | None = None) -> None:
        self.port = port
        self.stop = stop
        self.threads_of = threads_of
        """The server's process, if it has more than one thread."""
        self.stopped = False
        self.peers: dict[str, RawPeer] = {}
        self.control = RawPeer(port)
        self.executed = True

    def __enter__(self) -> SocketTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        for peer in self.peers.values():
            peer.close()
        self.stop_server()

    def connect(self, peer: str) -> None:
        assert peer not in self.peers
        self.peers[peer] = RawPeer(self.port, validate=False)
        self._fence()

    def say(self, peer: str, data: bytes) -> None:
        if not self.executed:
            self._fence()
        self.executed = False
        try:
            self.peers[peer].send(data)
        except ConnectionError:
            pass  # The server has closed, which what the peer hears will tell.

    def hear(self, peer: str, expected: Answer) -> Answer:
        connection = self.peers[peer].socket
        heard = bytearray()
        try:
            while expected.closed or len(heard) < len(expected.data):
                part = connection.recv(1 << 20 if expected.closed else len(expected.data) - len(heard))
                if not part:
                    return Answer(bytes(heard), closed=True)
                heard += part
            self._fence()
            connection.settimeout(0)
            while part := connection.recv(1 << 20):
                heard += part
        except BlockingIOError:
            return Answer(bytes(heard))
        except TimeoutError:
            raise AssertionError(f"after {LIMIT} s {peer} has heard {Answer(bytes(heard))}, not {expected}") from None
        except ConnectionError:
            pass
        finally:
            connection.settimeout(LIMIT)
        return Answer(bytes(heard), closed=True)

    def half_close(self, peer: str) -> None:
        self.peers[peer].socket.shutdown(socket.SHUT_WR)
        self._fence()

    def close(self, peer: str) -> None:
        if not self.executed:
            self._fence()
        self.peers[peer].close()
        self._fence()

    def stop_server(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.stop()

    def _fence(self) -> None:
        self.control.ping()
        if self.threads_of is not None:
            resting(self.threads_of)
        self.control.ping()
        self.executed = True


def playable(backend: str) -> str:
    """Return the backend, or skip the test where it cannot be told when such a server is done."""
    if backend == "threaded" and sys.platform != "linux":
        pytest.skip("when a server with threads is done is seen in /proc")
    return backend


def play_to_a_new_server(script: Script, running: Servers, *, torch: bool = False, threads: bool = False) -> None:
    """Play a script to a server of its own, which has a thread for each connection if `threads`."""
    port = running.start()
    with SocketTarget(port, lambda: running.stop(port), running.process.pid if threads else None) as target:
        play(script, target, torch=torch)
