"""Plays a recording to a running server and compares the replies.

Each recorded connection is opened and sends the same requests. A request is sent at its time, but not before its
connection has received the replies that preceded it in the recording, nor before the requests of other connections that
it depends on are done (`replay_order`). Invariant: in the end every recorded reply has been compared, or the reason why
not has been raised or counted.
"""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import msgspec

from ...base.addresses import format_address
from ...base.errors import AccessDeniedError, DistNetworkError, ProtocolError, StoreTimeoutError, counted
from ...client.aio import AsyncTCPStore
from ...server.listen_socket import raise_file_limit
from ...session.client import ClientSession, PendingCall
from ...wire.codecs import NO_REPLY
from ...wire.commands import BY_METHOD, JOINS_KEY, MAGIC, SERVER_KEY
from ...wire.values import PREFIX, Framed, pack
from .recording import FIELDS, REPLIES, Connection, Recording, RecordingError, Step, Value
from .replay_limits import check_limits
from .replay_order import put_in_order

_PING: Final = BY_METHOD["ping"]
_ENTER: Final = BY_METHOD["enter"]
_RESERVED: Final = (SERVER_KEY, JOINS_KEY)
"""Keys of the server itself, which get no prefix and are not compared."""
_COUNTS_NAMES: Final = ("num_keys", "list_keys")
"""Commands whose replies depend on how many copies of the job are played."""
_FENCE_NONCE: Final = 4_021
"""The number in PINGs that the replay adds."""
_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Contents of hidden values: none may be mistaken for a number."""
_KEPT_BYTES: Final = 4096
"""Size up to which contents are made once and kept."""
_RETRIES: Final = 10
"""Attempts to connect."""
_PAUSE: Final = 0.05
"""Seconds between attempts."""


class Report(msgspec.Struct):
    """The result of a replay. Times are in seconds."""

    copies: int
    """How many copies of the job were played."""
    ranks: int
    """Processes of the recording, times copies."""
    connections: int
    requests: int
    replies: int
    """Recorded replies."""
    different: int
    """Replies that differ, or did not arrive because their connection broke."""
    broken: int
    """Connections that the server closed early, or with undecodable replies."""
    first: str
    """Describes the first difference."""
    fences: int
    """PINGs added by the replay, to know when writes without a reply are done."""
    seconds: float
    recorded_seconds: float
    keys_before: int
    """Keys that the server had before."""
    opaque: int
    """Recorded connections that could not be decoded completely."""
    complete: bool
    """Whether the recording is complete."""
    interrupted: bool
    """Whether the replay was stopped early; the numbers are those until then."""


class Player:
    """One replay: `copies` copies of the recorded job at `speed` times its speed; 0 for no pauses.

    `timeout`, in seconds, limits the time without progress; a negative one does not.
    """

    def __init__(
        self, recording: Recording, host: str, port: int, *, copies: int = 1, speed: float = 1.0, timeout: float = 10.0
    ) -> None:
        self.recording = recording
        self.host = host
        self.port = port
        self.copies = copies
        self.speed = speed
        self.timeout = timeout
        self.filler = _Filler(recording)
        self.began = 0.0
        self.keys_before = 0
        """Keys that the server had before the replay, if known."""
        self.requests = 0
        self.replies = 0
        self.fences = 0
        self.different = 0
        self.broken = 0
        self.first = ""
        self.progress = 0
        """Counts events, to notice when there are none."""
        self.scheduled = 0
        """Number of connections whose next request is not due yet."""
        self.open = 0
        """Number of unfinished connections."""
        self.stage = "connecting"
        """What the replay does before the first request; empty afterwards."""
        self.interrupted = False
        self.end: asyncio.Future[None] | None = None
        self.peers: list[_Peer] = []
        self._lost: list[_Peer] = []
        """Peers whose connection has ended early, until it is known whether the server still runs."""
        self._probing: asyncio.Task[None] | None = None

    async def play(self, started: Callable[[], None] = lambda: None) -> Report:
        """Play the recording; call `started` before the first connection is made.

        Raises RecordingError, DistNetworkError, and StoreTimeoutError without progress.
        """
        raise_file_limit()
        recording = self.recording
        entered = {step.connection.number for step in recording.steps if step.command is _ENTER}
        if entered:
            raise RecordingError(
                f"cannot replay a recording of named stores ({counted(len(entered), 'connection')} used one): "
                "record the job without TCPSTORE_SERVER_URL or server=, and torchrun with --rdzv-conf named_store=0"
            )
        check_limits(recording, self.copies, self.speed)
        await self._check_server()
        self.stage = f"ordering {counted(len(recording.steps), 'request')}"
        put_in_order(recording)
        loop = asyncio.get_running_loop()
        self.end = loop.create_future()
        self.open = self.copies * len(recording.connections)
        self._prepare()
        self.began = loop.time()
        watch = loop.create_task(self._watch())
        started()
        try:
            for peer in self.peers:
                peer.begin()
            if self.open:
                await self.end
        finally:
            watch.cancel()
            if self._probing is not None:
                self._probing.cancel()
            for peer in self.peers:
                peer.abandon()
        return Report(
            copies=self.copies,
            ranks=self.copies * recording.ranks,
            connections=self.copies * len(recording.connections),
            requests=self.requests,
            replies=self.replies,
            different=self.different,
            broken=self.broken,
            first=self.first,
            fences=self.fences,
            seconds=loop.time() - self.began,
            recorded_seconds=recording.seconds - recording.first,
            keys_before=self.keys_before,
            opaque=sum(connection.opaque for connection in recording.connections),
            complete=recording.complete,
            interrupted=self.interrupted,
        )

    def _prepare(self) -> None:
        for copy in range(self.copies):
            self.stage = f"preparing copy {copy + 1:,} of {self.copies:,}"
            job = _Job(self, copy)
            for connection in self.recording.connections:
                job.peers[connection.number] = peer = _Peer(job, connection)
                self.peers.append(peer)
        self.stage = ""

    def describe_progress(self) -> str:
        """Say what the replay is doing; may be called in any thread."""
        if self.stage:
            return self.stage
        total = counted(self.copies * len(self.recording.steps), "request")
        return (
            f"played {self.requests:,} of {total}, {self.open:,} of {counted(len(self.peers), 'connection')} unfinished"
        )

    def interrupt(self) -> None:
        """Stop the replay; `play` returns the report so far."""
        assert self.end is not None
        self.interrupted = True
        if not self.end.done():
            self.end.set_result(None)

    async def _check_server(self) -> None:
        """Count the keys on the server.

        Raises DistNetworkError without a server, and RecordingError if it lacks an extension that the recording needs.
        """
        async with await AsyncTCPStore.connect(self.host, self.port, timeout=self.timeout, server="") as store:
            needed = sorted({s.command.name for s in self.recording.steps if s.command.since})
            server = await store.server()
            if needed and server is None:
                raise RecordingError(
                    f"the recording uses tcpstore_async extension commands ({', '.join(needed)}), which the server at "
                    f"{format_address(self.host, self.port)} does not support"
                )
            with suppress(AccessDeniedError):  # a token for some of the keys
                self.keys_before = await store.num_keys()

    async def _watch(self) -> None:
        """End the replay when nothing happens for longer than the timeout."""
        if self.timeout < 0:
            return
        seen, since = -1, time.monotonic()
        while True:
            await asyncio.sleep(max(0.01, min(0.25, self.timeout / 4)))
            if self.progress != seen or self.scheduled:
                seen, since = self.progress, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                stall = f"no progress for {self.timeout:g} s: {self._describe_stall()}"
                self.fail(StoreTimeoutError(stall + self._describe_differences()))
                return

    def connection_lost(self, peer: "_Peer") -> None:
        """Find out whether the server has closed only this connection, or is gone."""
        self._lost.append(peer)
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        while self._lost:
            lost, self._lost = self._lost, []
            reason = await self._try_server()
            if reason:
                self.fail_unreachable(f"the server at {format_address(self.host, self.port)} is gone: {reason}")
                return
            for peer in lost:
                peer.lost()
        self._probing = None

    async def _try_server(self) -> str:
        """Return why the server does not reply to a PING on a new connection; empty if it does."""
        reason = ""
        for _ in range(_RETRIES):
            try:
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(ClientSession().hello(_FENCE_NONCE)[0])
                    await reader.readexactly(4)
                    return ""
                finally:
                    writer.close()
            except OSError as error:
                reason = _reason(error)
            except asyncio.IncompleteReadError:
                reason = "it closes new connections at once"
            self.progress += 1
            await asyncio.sleep(_PAUSE)
        return reason

    def _describe_differences(self) -> str:
        if not self.first:
            return ""
        if self.different:
            number = counted(self.different, "reply differs", "replies differ")
        else:
            number = f"{counted(self.broken, 'connection')} ended early"
        return f"; {number}; first: {self.first}"

    def _describe_stall(self) -> str:
        waiting = [peer for peer in self.peers if not peer.done]
        oldest = next((text for peer in waiting if (text := peer.describe())), "")
        return f"{len(waiting)} of {counted(len(self.peers), 'connection')} unfinished{'; ' * bool(oldest)}{oldest}"

    def fail(self, error: Exception) -> None:
        assert self.end is not None
        if not self.end.done():
            self.end.set_exception(error)

    def fail_unreachable(self, text: str) -> None:
        """End the replay because the server cannot be reached."""
        expected = self.copies * sum(connection.replies for connection in self.recording.connections)
        replies = counted(expected, "reply", "replies")
        progress = f"{self.replies - self.different} of {replies} matched the recording before that"
        self.fail(DistNetworkError(f"{text}; {progress}{self._describe_differences()}"))

    def differs(self, text: str, replies: int = 1) -> None:
        """Count replies that differ or do not arrive."""
        self.different += replies
        self.first = self.first or text

    def peer_done(self) -> None:
        assert self.end is not None
        self.open -= 1
        if not self.open and not self.end.done():
            self.end.set_result(None)


def _reason(error: OSError) -> str:
    """Return why a connection could not be made."""
    return os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else str(error)


class _Job:
    """One copy of the recorded job, with keys of its own unless it is the first."""

    def __init__(self, player: Player, copy: int) -> None:
        self.player = player
        self.copy = copy
        self.peers: dict[int, _Peer] = {}
        self.prerequisites = [step.prerequisites for step in player.recording.steps]
        """Number of steps that each step still waits for."""
        prefix = b"/replay-%d" % copy
        self.keys = [
            key if not copy or key in _RESERVED else prefix + (b"" if key.startswith(b"/") else b"/") + key
            for key in player.recording.keys
        ]

    def step_done(self, step: Step) -> None:
        for dependent in step.dependents:
            left = self.prerequisites[dependent.number] - 1
            self.prerequisites[dependent.number] = left
            if not left:
                self.peers[dependent.connection.number].advance()

    def encode(self, step: Step) -> bytes:
        """Return a request as this copy sends it."""
        command = step.command
        value = self.player.filler.framed
        if command is _PING:
            return command.prefix + command.request.encode((self.nonce(step),))
        if command.method == "validate":
            return command.prefix + command.request.encode((MAGIC,))
        fields: list[Any] = []
        for kind, field in zip(FIELDS[command.request], step.fields, strict=False):
            if kind == "k":
                fields.append(self.keys[field])
            elif kind == "v":
                fields.append(value(field))
            elif kind == "l":
                fields.append([self.keys[key] for key in self.player.recording.lists[field]])
            elif kind == "i":
                fields.append([(self.keys[key], value(number)) for key, number in field])
            else:
                fields.append(field)
        return command.prefix + command.request.encode(tuple(fields))

    def nonce(self, step: Step) -> int:
        """Return the number in a PING, which differs by process."""
        processes = max(0, step.connection.process) + self.copy * len(self.player.recording.connections)
        return 1 + processes % (2**31 - 1)


class _Filler:
    """Contents of values: recorded ones, or letters of the same length, equal for equal values."""

    def __init__(self, recording: Recording) -> None:
        self._values = recording.values
        self._kept: dict[int, Framed] = {}
        self._ordinals: list[int] = []
        """Index of each value among the values of its size, which makes short values differ."""
        counts: dict[int, int] = {}
        for value in recording.values:
            self._ordinals.append(counts.get(value.size, 0))
            counts[value.size] = self._ordinals[-1] + 1

    def framed(self, number: int) -> Framed:
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        value = self._values[number]
        framed = pack(self._content(value))
        if value.size <= _KEPT_BYTES:
            self._kept[number] = framed
        return framed

    def _content(self, value: Value) -> bytes:
        if value.content is not None:
            return value.content
        if value.integer is not None:
            text = b"%0*d" % (value.size, value.integer)
            if len(text) == value.size:
                return text
        ordinal = self._ordinals[value.number]
        letters = bytearray()
        while len(letters) < value.size and (ordinal or not letters):
            ordinal, letter = divmod(ordinal, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return bytes(letters) + b"." * (value.size - len(letters))


class _Peer(asyncio.Protocol):
    """One connection of one copy of the job."""

    def __init__(self, job: _Job, connection: Connection) -> None:
        self.job = job
        self.player = job.player
        self.connection = connection
        self.steps = connection.steps
        self.position = 0
        """The next step."""
        self.answered = 0
        """Number of answered steps with a recorded reply."""
        self.session = ClientSession()
        self.fences = 0
        """Unanswered PINGs after writes that other steps wait for."""
        self.done = False
        self.closing = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._advancing = False

    # Connecting

    def begin(self) -> None:
        """Connect at the recorded time."""
        if self._is_due(self.connection.opened, self._connect):
            self._connect()

    def _connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        player = self.player
        loop = asyncio.get_running_loop()
        for failures in range(_RETRIES):
            try:
                await loop.create_connection(lambda: self, player.host, player.port)
                return
            except OSError as error:
                if failures == _RETRIES - 1 or error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET):
                    text = f"cannot connect to {format_address(player.host, player.port)}: {_reason(error)}"
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        player.fail(RecordingError(text))
                    else:
                        player.fail_unreachable(text)
                    return
            await asyncio.sleep(_PAUSE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.player.progress += 1
        self.advance()

    # Sending

    def advance(self) -> None:
        """Send all requests that may be sent now."""
        if self._transport is None or self.done or self._advancing or self._timer is not None:
            return
        self._advancing = True
        out: list[bytes] = []
        while self.position < len(self.steps):
            step = self.steps[self.position]
            if self.answered < step.needs or self.job.prerequisites[step.number]:
                break
            if not self._is_due(step.at, self.advance):
                break
            self.position += 1
            self._send(step, out)
        if out and not self._transport.is_closing():
            self.player.progress += 1
            self._transport.write(b"".join(out))
        self._advancing = False
        if self._is_finished() and not self.fences:
            self._finish()

    def _send(self, step: Step, out: list[bytes]) -> None:
        player = self.player
        player.requests += 1
        out.append(self.job.encode(step))
        if step.cancels:
            call = self.session.waiting
            if call is not None:
                call.canceled = True
            else:  # the wait has ended: the server replies to the cancel
                self.session.pending.append(PendingCall(step.command, 0, 0, (step, False)))
        elif step.has_reply:
            fields = step.fields
            keys = player.recording.lists[fields[0]] if FIELDS[step.command.request] == "l" else ()
            self.session.pending.append(PendingCall(step.command, len(keys), 0, (step, True)))
        elif step.fence:
            player.fences += 1
            self.fences += 1
            out.append(_PING.prefix + _PING.request.encode((_FENCE_NONCE,)))
            self.session.pending.append(PendingCall(_PING, 0, 0, (step, False)))
        elif step.command.reply is not NO_REPLY:
            self.job.step_done(step)

    def _is_due(self, at: float, then: Callable[[], None]) -> bool:
        """Return whether a recorded time has passed; if not, call `then` when it has."""
        player = self.player
        if not player.speed:
            return True
        loop = asyncio.get_running_loop()
        due = player.began + (at - player.recording.first) / player.speed
        if due <= loop.time():
            return True

        def fire() -> None:
            player.scheduled -= 1
            self._timer = None
            then()

        player.scheduled += 1
        self._timer = loop.call_at(due, fire)
        return False

    # Receiving

    def data_received(self, data: bytes) -> None:
        self.player.progress += 1
        try:
            calls = self.session.receive(data)
        except ProtocolError as error:
            self._break(f"the reply cannot be decoded: {error}")
            return
        for call in calls:
            step, is_own = call.fields
            if is_own and step.reply is not None:
                self.answered += 1
                self.player.replies += 1
                self._compare(step, call)
            elif step.fence:
                self.fences -= 1
            self.job.step_done(step)
        self.advance()

    def _compare(self, step: Step, call: PendingCall) -> None:
        assert step.reply is not None
        if step.canceled:
            ended = call.woken or not call.canceled
            text = f"{'ended' if ended else 'did not end'} before it was canceled, unlike in the recording"
            text = "" if ended == step.reply[0] else text
        else:
            text = self._difference(step, call.result)
        if text:
            self.player.differs(f"{self._name(step)}: {text}")

    def _difference(self, step: Step, result: Any) -> str:
        """Describe how a reply differs; empty if it does not."""
        player = self.player
        reply = step.reply
        assert reply is not None
        kind = REPLIES[step.command.reply]
        if player.copies > 1 and step.command.method in _COUNTS_NAMES:
            return ""
        if step.command is _PING:
            return "" if result == self.job.nonce(step) else f"sent {self.job.nonce(step)}, got {result}"
        if kind and self._is_reserved(step):
            return ""
        if kind in ("n", "b"):
            return "" if result == reply[0] else f"recorded {reply[0]}, got {result}"
        if kind == "c":
            found = [len(result), sum(map(len, result))]
            return (
                ""
                if found == reply[:2]
                else f"recorded {counted(reply[0], 'key')} ({counted(reply[1], 'byte')}), got {found[0]} ({found[1]})"
            )
        if kind == "v":
            return self._value_difference(reply[0], result)
        if kind == "w":
            for place, (number, value) in enumerate(zip(reply[0], result, strict=True)):
                text = self._value_difference(number, value)
                if text:
                    return f"value {place + 1} of {len(result)}: {text}"
        if kind == "p":
            length, item = result
            if length != reply[0] or (item is None) != (len(reply) == 1):
                return f"recorded {counted(reply[0], 'item')}, got {length}"
            if item is not None:
                return self._value_difference(reply[1], item)
        return ""

    def _value_difference(self, number: int, found: Framed) -> str:
        value = self.player.recording.values[number]
        size = len(found) - PREFIX
        if size != value.size:
            return f"recorded {counted(value.size, 'byte')}, got {size}"
        if value.content is not None and found[PREFIX:] != value.content:
            return f"recorded {value.content[:32]!r}, got {bytes(found[PREFIX : PREFIX + 32])!r}"
        return ""

    def _is_reserved(self, step: Step) -> bool:
        return any(self.player.recording.keys[key] in _RESERVED for key in step.keys)

    def _name(self, step: Step) -> str:
        keys = [self.job.keys[key].decode(errors="replace") for key in step.keys]
        what = f" {keys[0]}" if keys else ""
        more = f" and {counted(len(keys) - 1, 'more key')}" if len(keys) > 1 else ""
        copy = f" of copy {self.job.copy + 1}" if self.player.copies > 1 else ""
        return f"connection {step.connection.number}{copy}, request {step.index + 1}, {step.command.name}{what}{more}"

    # The end

    def connection_lost(self, error: Exception | None) -> None:
        if self.done:
            return
        if self.closing or (self._is_finished() and self.connection.closed_by_server):
            self._complete()
        else:
            self.player.connection_lost(self)

    def lost(self) -> None:
        """Note that a running server has closed the connection early."""
        if self._is_finished():
            self._complete()
        else:
            self._break("the server closed the connection")

    def _is_finished(self) -> bool:
        return self.position == len(self.steps) and self.answered == self.connection.replies

    def _finish(self) -> None:
        """Close the connection at the recorded time, or wait for the server to close it."""
        if self.closing or self.done:
            return
        connection = self.connection
        if connection.closed is None or (
            (connection.opaque or not connection.closed_by_server) and self._is_due(connection.closed, self._close)
        ):
            self._close()

    def _close(self) -> None:
        assert self._transport is not None
        if self.done:
            return
        self.closing = True
        self._transport.close()

    def _break(self, reason: str) -> None:
        """Give up a connection; other steps must not wait for its steps."""
        step = self.steps[min(self.position, len(self.steps) - 1)] if self.steps else None
        if self.session.pending:
            step = self.session.pending[0].fields[0]
        where = self._name(step) if step is not None else f"connection {self.connection.number}"
        missing = self.connection.replies - self.answered
        self.player.replies += missing
        self.player.broken += 1
        self.player.differs(f"{where}: {reason}", missing)
        self._complete()

    def _complete(self) -> None:
        """End the connection; its unconfirmed and unsent steps count as done, so that no other step waits for them."""
        self.done = True
        self.abandon()
        undone = [call.fields[0] for call in self.session.pending]
        undone += self.steps[self.position :]
        self.session.pending.clear()
        self.position = len(self.steps)
        self.player.progress += 1
        self.player.peer_done()
        for step in undone:
            self.job.step_done(step)

    def abandon(self) -> None:
        """Release what this connection holds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.player.scheduled -= 1
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def describe(self) -> str:
        """Describe what this connection waits for; empty if it waits for another connection."""
        if self.session.pending:
            return f"{self._name(self.session.pending[0].fields[0])} has not been answered"
        if self._transport is None:
            return f"connection {self.connection.number} is not established"
        if self._is_finished() and self.connection.closed_by_server:
            return f"the server did not close connection {self.connection.number} as recorded"
        return ""
