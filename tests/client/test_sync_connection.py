"""A connection of the synchronous client that is replaced: what it sends again, how long it tries, what ends it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from interrupts import Stop, interrupt
from support import LIMIT, blob
from tcpstore_async import DistNetworkError
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.client import resume
from tcpstore_async.client.connect import always
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.sync_connection import SyncConnection
from tcpstore_async.links.single_client import ACKNOWLEDGED_AT_ONCE, ClientSingleLink
from tcpstore_async.session.client import ClientSession
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack

GRACE = 30.0
RESET = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
RESUMED = b'{"status": "resumed", "taken": 0}'
LARGE = 4_000_000
"""More bytes than the kernel takes from one end of a pair that the other end does not read."""


@contextmanager
def linked(peer: socket.socket) -> Iterator[SyncConnection]:
    """Yield a connection with a single link."""
    connection = SyncConnection(peer, ClientSession())
    link = ClientSingleLink()
    assert link.begun(b'{"status": "new", "instance": "x", "grace": %d}' % GRACE)
    connection.link = link
    with peer:
        yield connection


@contextmanager
def broken() -> Iterator[SyncConnection]:
    """Yield one that has just been reset."""
    peer, other = socket.socketpair()
    with other, linked(peer) as connection:
        connection.mark_down(RESET)
        yield connection


def received(peer: socket.socket, into: bytearray) -> None:
    """Receive until the other end closes."""
    while data := peer.recv(1 << 16):
        into += data


# Deadlines


@pytest.mark.parametrize(("timeout", "most"), [(-1.0, GRACE), (1000.0, GRACE), (5.0, 5.0)])
def test_a_call_looks_for_the_session_no_longer_than_the_server_keeps_it(timeout: float, most: float) -> None:
    deadlines: list[float | None] = []

    def reach(_: ClientSingleLink, deadline: Deadline) -> tuple[socket.socket, bytes]:
        deadlines.append(deadline.left())
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    with broken() as connection:
        connection.reach = reach
        with pytest.raises(OSError, match=r"reset by peer; .*refused"):
            connection.resume(Deadline(timeout))
    (left,) = deadlines
    assert left is not None
    assert left <= most


def test_the_grace_period_begins_when_the_connection_breaks() -> None:
    deadlines: list[float | None] = []

    def reach(_: ClientSingleLink, deadline: Deadline) -> tuple[socket.socket, bytes]:
        deadlines.append(deadline.left())
        raise DistNetworkError("no answer")

    with broken() as connection:
        connection.reach = reach
        connection.down_since -= GRACE
        with pytest.raises(OSError, match="reset by peer; no answer"):
            connection.resume(Deadline(LIMIT))  # the call has time left, so this is no timeout
    assert deadlines == [0.0]


@pytest.mark.parametrize("since", [0.0, 10.0, 2 * GRACE])
def test_the_background_loop_looks_for_the_session_no_longer_than_the_server_keeps_it(
    monkeypatch: pytest.MonkeyPatch, since: float
) -> None:
    deadlines: list[float | None] = []

    async def reach(
        servers: Servers, token: bytes, tls: object, link: ClientSingleLink, deadline: Deadline, *_: object
    ) -> tuple[socket.socket, bytes]:
        deadlines.append(deadline.left())
        raise DistNetworkError("no answer")

    monkeypatch.setattr(resume, "resume", reach)
    with broken() as connection:
        connection.down_since = time.monotonic() - since
        with pytest.raises(DistNetworkError, match="no answer"):
            asyncio.run(resume.resume_idle(Servers(("127.0.0.1", 1)), b"", None, connection, always))
    (left,) = deadlines
    assert left is not None
    assert left <= max(0.0, GRACE - since)


def test_the_background_loop_does_not_wait_for_a_server_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def reach(
        servers: Servers, token: bytes, tls: object, link: ClientSingleLink, deadline: Deadline, *_: object
    ) -> tuple[socket.socket, bytes]:
        return ours, RESUMED

    async def main(connection: SyncConnection) -> None:
        task = asyncio.ensure_future(resume.resume_idle(Servers(("127.0.0.1", 1)), b"", None, connection, always))
        await asyncio.wait({task}, timeout=LIMIT / 2)
        assert task.done()
        with pytest.raises(asyncio.TimeoutError):
            await task

    monkeypatch.setattr(resume, "resume", reach)
    with theirs, broken() as connection:
        assert connection.link is not None
        connection.link.note(b"x" * LARGE)
        connection.down_since -= GRACE
        asyncio.run(main(connection))


# What is sent


def test_a_request_that_was_sent_in_part_is_sent_again_once() -> None:
    peer, other = socket.socketpair()
    ours, theirs = socket.socketpair()
    heard = bytearray()
    reader = threading.Thread(target=received, args=[theirs, heard])
    data, call = ClientSession().prepare(BY_METHOD["set"], (pack(b"k"), pack(b"v" * LARGE)))
    with other, theirs:
        with linked(peer) as connection:
            connection.reach = lambda link, deadline: (ours, RESUMED)
            assert not connection.put(data, call, True)
            assert 0 < connection.sent < len(data)
            connection.mark_down(RESET)
            reader.start()
            connection.put_rest(data, call, Deadline(LIMIT), True)
            connection.peer.sendall(b"the next")
            assert connection.session.written == 1
        reader.join(LIMIT)
    assert len(heard) == len(data + b"the next")
    assert bytes(heard) == data + b"the next"


class Reluctant(socket.socket):
    """A socket whose kernel takes three bytes of each acknowledgement."""

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        return super().send(data[:3] if data[:1] == BY_METHOD["taken"].prefix else data, flags)


def test_the_rest_of_an_acknowledgement_that_was_sent_in_part_follows_on_the_next_connection() -> None:
    """The server would take the next request for it."""
    ours, theirs = socket.socketpair()
    next_ours, next_theirs = socket.socketpair()
    reluctant = Reluctant(fileno=ours.detach())
    with theirs, next_theirs, linked(reluctant) as connection:
        call = connection.request((BY_METHOD["get"], (pack(b"k"),)), Deadline(LIMIT))
        request = theirs.recv(1 << 16)
        writer = threading.Thread(target=theirs.sendall, args=[blob(b"v" * ACKNOWLEDGED_AT_ONCE)])
        writer.start()
        connection.read_until(call, Deadline(LIMIT))
        writer.join(LIMIT)
        assert request.endswith(b"k")
        taken = BY_METHOD["taken"].prefix + connection.counted().received.to_bytes(8, "little")
        assert theirs.recv(1 << 16) == taken[:3]
        reply = b'{"status": "resumed", "taken": %d}' % len(request + taken[:3])
        connection.reach = lambda link, deadline: (next_ours, reply)
        connection.drain_abandoned_calls(Deadline(LIMIT))
        assert next_theirs.recv(1 << 16) == taken[3:]


# What is received


class Signaled(socket.socket):
    """A socket whose first wait is interrupted."""

    signaled = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.signaled:
            self.signaled = True
            raise Stop
        return super().recv(size, flags)


def test_an_interrupt_while_it_waits_for_a_reply_leaves_it_in_step() -> None:
    ours, theirs = socket.socketpair()
    with theirs, Signaled(fileno=ours.detach()) as peer:
        connection = SyncConnection(peer, ClientSession())
        call = connection.request((BY_METHOD["ping"], (7,)), Deadline(LIMIT))
        with pytest.raises(Stop):
            connection.read()
        connection.check_partial_send()
        assert not connection.broken
        theirs.sendall((7).to_bytes(4, "little"))
        connection.drain_abandoned_calls(Deadline(LIMIT))
        assert call.result == 7


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
def test_an_interrupt_at_every_step_of_receiving_loses_and_repeats_no_byte() -> None:
    """Of replies in several chunks, one of which has the end of one reply and the beginning of the next."""
    values = [pack(bytes([number]) * size) for number, size in enumerate((700, 3, 1000))]
    step, struck = 0, True
    while struck:
        ours, theirs = socket.socketpair()
        with theirs, linked(ours) as connection:
            calls = [
                connection.request((BY_METHOD[method], fields), Deadline(LIMIT))
                for method, fields in (("add", (b"k", 1)), ("multi_get", ([b"a", b"b", b"c"],)), ("ping", (7,)))
            ]
            said = (5).to_bytes(8, "little") + b"".join(values) + (7).to_bytes(4, "little")
            theirs.sendall(said)

            def read() -> None:
                while not calls[-1].done:  # noqa: B023
                    connection.read()

            struck = interrupt(read, step)
            assert connection.down is None
            read()
            assert [call.result for call in calls] == [5, values, 7]
            assert connection.counted().received == len(said)
            assert not connection.session.pending
        step += 1
    assert step > 50
