"""Thousands of connections in one epoll loop; each sends prepared requests and counts the bytes of the replies.

Must not know what the bytes mean, except for the sum in the reply to an ADD, by which the last rank at a barrier
recognizes itself. Invariants: a connection has at most one request in flight. Every reply is counted, and compared if
it is known and arrives in one piece. The first failure ends the run with a LoadError.
"""

import errno
import os
import select
import socket
import struct
import sys
import time
from array import array
from typing import Final, NamedTuple

_IN: Final = 1
"""EPOLLIN, as a constant for compiled code."""
_OUT: Final = 4
"""EPOLLOUT."""
_BATCH: Final = 32
"""Connections started between two polls."""
_CHUNK: Final = 1 << 18
"""Bytes of the receive buffer."""
_CONNECTIONS_PER_SOURCE: Final = 4096
"""Most connections from one loopback address, which has 28,000 ports."""
_BIND_ADDRESS_NO_PORT: Final = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT, which Python names since 3.12: the port is chosen when the socket connects."""
_DIGITS: Final = 8
"""Digits of a rank in a request."""
_RETRIES: Final = 10
"""Attempts to reconnect after a reset before the first reply."""


class LoadError(Exception):
    """The load could not be completed. The text is one line for users."""


class Unreachable(LoadError):
    """The server cannot be reached, or a connection was lost."""


class Late(LoadError):
    """The load was not completed in time."""


def late(limit: float, progress: str) -> Late:
    """Return the error for a limit in seconds; `progress` says what was completed until then."""
    seconds = f"{limit:.0f}" if limit >= 10 else f"{limit:.2g}"
    return Late(f"not completed within {seconds} s: {progress}")


class Step(NamedTuple):
    """One request, and the reply to wait for before the next."""

    request: bytes
    reply: int
    """Bytes of the reply; 0 for none: continue at once."""
    rank_at: tuple[int, ...] = ()
    """Offsets in the request of the rank as eight digits."""
    expect: bytes = b""
    """The reply, if known; if empty, its bytes are only counted."""
    last: int = 0
    """If the reply is this number as an i64, `then` is sent: the last rank at a barrier opens it. 0 for never."""
    then: bytes = b""


class Clock(NamedTuple):
    """CPU seconds of a process, and seconds in which its main thread was runnable but waited for a core."""

    cpu: float
    waited: float


def own_clock() -> Clock:
    return Clock(time.process_time(), waited("self"))


def waited(pid: str) -> float:
    """Return the seconds of waiting for a core (see `Clock`); 0 if the system does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Result:
    """Times and counts of a run. Times are in seconds; latencies are in the order of the replies."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended = began
        self.start = own_clock()
        self.end = self.start
        self.operations = 0
        self.background_operations = 0
        """Replies on background connections, including those to requests in flight at the end."""
        self.latencies: array[float] = array("f")

    def finish(self) -> None:
        """Take the end times: the CPU clock first, so that CPU time never exceeds the elapsed time."""
        self.end = own_clock()
        self.ended = time.perf_counter()


def _source(host: str, rank: int) -> str:
    """Return the address that a rank connects from; empty for any.

    The more ports of one address are in use, the longer the kernel searches for a free one: 0.2 ms at 16,000
    connections, several times what the server needs per connection.
    """
    if sys.platform != "linux" or not host.startswith("127."):
        return ""
    return f"127.0.0.{1 + rank // _CONNECTIONS_PER_SOURCE % 250}"


class Generator:
    """Connections to one server, from the address `source` if that is not empty.

    A connection is a slot: an index into the lists below.
    """

    def __init__(self, host: str, ports: list[int], source: str = "") -> None:
        self.host = host
        self.ports = ports
        """Rank r connects to the port `ports[r % len(ports)]`: that of the server, or those of relays."""
        self.source = source
        self.rank: list[int] = []
        self.epoll = select.epoll()
        self.buffer = bytearray(_CHUNK)
        self.sockets: list[socket.socket] = []
        self.slot_of: dict[int, int] = {}
        self.steps: list[Step] = []
        self.background_steps: list[Step] = []
        self.background = 0
        self.repeat = 1
        self.extra = 0
        """Number of ranks, the first ones, that repeat the steps once more than the others."""
        self.position: list[int] = []
        self.repetition: list[int] = []
        self.expected: list[int] = []
        self.sent_at: list[float] = []
        self.due_at: list[float] = []
        self.unsent: list[bytes] = []
        self.connected: list[bool] = []
        self.retries_left: list[int] = []
        """Remaining attempts to reconnect each connection; 0 after its first reply."""
        self.result = Result(0.0)
        self.started = 0
        self.finished = 0
        self.interval = 0.0
        self.foreground = 0

    def open(self, count: int, first: int) -> None:
        """Create sockets for more connections, ranks from `first` on, which the next run connects. Raises LoadError."""
        for rank in range(first, first + count):
            self.rank.append(rank)
            self.sockets.append(self._socket(rank))
            self.slot_of[self.sockets[-1].fileno()] = len(self.sockets) - 1
            self.position.append(0)
            self.repetition.append(0)
            self.expected.append(0)
            self.sent_at.append(0.0)
            self.due_at.append(0.0)
            self.unsent.append(b"")
            self.connected.append(False)
            self.retries_left.append(_RETRIES)

    def _port(self, slot: int) -> int:
        return self.ports[self.rank[slot] % len(self.ports)]

    def _socket(self, rank: int) -> socket.socket:
        made: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Close with a reset: ports in TIME_WAIT would soon leave none free for the next run.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            source = self.source or _source(self.host, rank)
            if source:
                made.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
                made.bind((source, 0))
        except OSError as error:
            if made is not None:
                made.close()
            raise LoadError(f"cannot open connection {len(self.sockets) + 1}: {error.strerror}") from None
        return made

    def close(self) -> None:
        """Reset and close every connection."""
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()
        self.epoll.close()

    def closed_loop(
        self,
        steps: list[Step],
        limit: float,
        repeat: int = 1,
        window: int = 0,
        background: int = 0,
        background_steps: list[Step] | None = None,
        extra: int = 0,
    ) -> Result:
        """Execute the steps in order on each connection, `repeat` times; once more on ranks below `extra`.

        `window` connections run at a time; 0 for all. Meanwhile the first `background` connections repeat
        `background_steps` until all others are done. Raises LoadError, also after `limit` seconds.
        """
        self.steps = steps
        self.background_steps = background_steps or []
        self.background = background
        self.repeat = repeat
        self.extra = extra
        self.interval = 0.0
        total = len(self.sockets)
        self.foreground = total - background
        self.finished = 0
        self.started = background
        self.result = Result(time.perf_counter())
        deadline = self.result.began + limit
        for slot in range(background):
            self._begin(slot)
        stop = total if window == 0 else min(total, background + window)
        # Without a window all connections are requested before the first is served.
        batch = _BATCH if window or all(self.connected) else stop
        while self.started < stop:
            for _ in range(min(batch, stop - self.started)):
                self._start_next()
            self._poll(0.0)
        while self.finished < self.foreground:
            self._poll(0.5)
            while window and self.started < total and self.started - background - self.finished < window:
                self._start_next()
            if time.perf_counter() > deadline:
                raise late(limit, f"connections done: {self.finished} of {self.foreground}")
        self.result.finish()
        self._drain(deadline)
        return self.result

    def open_loop(self, step: Step, seconds: float, interval: float, limit: float) -> Result:
        """Execute the step on each connection every `interval` seconds, for `seconds`, evenly spread.

        Latencies count from the time at which a request was due, so that a slow server does not hide them. Raises
        LoadError, also after `limit` seconds.
        """
        self.steps = [step]
        self.background = 0
        self.repeat = max(1, int(seconds / interval))
        self.interval = interval
        total = len(self.sockets)
        self.foreground = total
        self.finished = 0
        self.started = 0
        self.result = Result(time.perf_counter())
        began = self.result.began
        for slot in range(total):
            self.due_at[slot] = began + interval * slot / total
            self.position[slot] = 0
            self.repetition[slot] = 0
        sent = 0
        planned = total * self.repeat
        while self.finished < total:
            now = time.perf_counter()
            if now > began + limit:
                raise late(limit, f"requests answered: {self.result.operations} of {planned}")
            while sent < planned and began + interval * sent / total <= now:
                slot = sent % total
                # A connection whose reply is late sends its next request when that has arrived.
                if self.expected[slot] == 0 and self.repetition[slot] * total + slot <= sent:
                    self._send(slot, step)
                sent += 1
            pause = began + interval * sent / total - time.perf_counter() if sent < planned else 0.5
            self._poll(min(0.5, max(0.0, pause)))
        self.result.finish()
        return self.result

    def _drain(self, deadline: float) -> None:
        """Wait for the background's replies, which must not arrive in the next run."""
        self.result.background_operations += sum(1 for count in self.expected[: self.background] if count)
        self.background_steps = []
        while self.background and max(self.expected[: self.background]):
            self._poll(0.5)
            if time.perf_counter() > deadline:
                raise Late("the background connections got no reply in time")

    def _repetitions(self, slot: int) -> int:
        return self.repeat + 1 if self.rank[slot] < self.extra else self.repeat

    def _start_next(self) -> None:
        self.started += 1
        self._begin(self.started - 1)

    def _begin(self, slot: int) -> None:
        self.position[slot] = 0
        self.repetition[slot] = 0
        if slot >= self.background and self._repetitions(slot) == 0:
            self.finished += 1
            return
        if self.connected[slot]:
            self._send_next(slot)
            return
        sock = self.sockets[slot]
        code = sock.connect_ex((self.host, self._port(slot)))
        if code not in (0, errno.EINPROGRESS):
            raise Unreachable(f"cannot connect to {self.host}:{self._port(slot)}: {os.strerror(code)}")
        self.sent_at[slot] = time.perf_counter()
        self.epoll.register(sock.fileno(), _OUT)

    def _poll(self, seconds: float) -> None:
        """Handle events; wait up to `seconds` for the first."""
        for descriptor, events in self.epoll.poll(seconds, 1024):
            slot = self.slot_of[descriptor]
            if not self.connected[slot]:
                self._connected(slot)
            elif events & _OUT and self.unsent[slot]:
                self._flush(slot)
            else:
                self._read(slot)

    def _connected(self, slot: int) -> None:
        code: int = self.sockets[slot].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Unreachable(f"cannot connect to {self.host}:{self._port(slot)}: {os.strerror(code)}")
        self.connected[slot] = True
        self.epoll.modify(self.sockets[slot].fileno(), _IN)
        self._send_next(slot)

    def _send_next(self, slot: int) -> None:
        """Send a connection's next requests, up to one that has a reply."""
        steps = self.background_steps if slot < self.background else self.steps
        while True:
            if self.position[slot] == len(steps):
                self.position[slot] = 0
                self.repetition[slot] += 1
                if slot >= self.background and self.repetition[slot] == self._repetitions(slot):
                    self.finished += 1
                    return
                if not steps:
                    return
            step = steps[self.position[slot]]
            self._send(slot, step)
            if step.reply:
                return
            self.position[slot] += 1

    def _send(self, slot: int, step: Step) -> None:
        self.expected[slot] = step.reply
        self.sent_at[slot] = time.perf_counter()
        data = step.request
        if step.rank_at:
            rank = b"%08d" % self.rank[slot]
            filled = bytearray(data)
            for at in step.rank_at:
                filled[at : at + _DIGITS] = rank
            data = bytes(filled)
        self._write(slot, data)

    def _write(self, slot: int, data: bytes) -> None:
        if self.unsent[slot]:
            self.unsent[slot] += data
            return
        sent = 0
        try:
            sent = self.sockets[slot].send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._retry_or_raise(slot, error)
            return
        if sent < len(data):
            self.unsent[slot] = data[sent:]
            self.epoll.modify(self.sockets[slot].fileno(), _IN | _OUT)

    def _flush(self, slot: int) -> None:
        data = self.unsent[slot]
        self.unsent[slot] = b""
        self._write(slot, data)
        if not self.unsent[slot]:
            self.epoll.modify(self.sockets[slot].fileno(), _IN)

    def _read(self, slot: int) -> None:
        count = 0
        try:
            count = self.sockets[slot].recv_into(self.buffer)
        except BlockingIOError:
            return
        except OSError as error:
            self._retry_or_raise(slot, error)
            return
        if count == 0:
            raise self._connection_lost("closed by the server")
        expected = self.expected[slot]
        if count > expected:
            raise LoadError(f"the server sent {count - expected:,} bytes more than expected")
        self.expected[slot] = expected - count
        if count < expected:
            return
        self._answered(slot, count)

    def _answered(self, slot: int, count: int) -> None:
        """Record a complete reply, of which `count` bytes have just arrived, and continue."""
        self.retries_left[slot] = 0
        steps = self.background_steps if slot < self.background else self.steps
        if not steps:
            return
        step = steps[self.position[slot]]
        whole = count == step.reply
        if step.expect and whole and self.buffer[:count] != step.expect:
            raise LoadError(f"the server replied {bytes(self.buffer[: min(count, 32)])!r}, not {step.expect[:32]!r}")
        now = time.perf_counter()
        if slot >= self.background:
            self.result.operations += 1
            if self.interval:
                self.result.latencies.append(now - self.due_at[slot])
            else:
                self.result.latencies.append(now - self.sent_at[slot])
        else:
            self.result.background_operations += 1
        if step.last and whole and int.from_bytes(self.buffer[:8], "little") == step.last:
            self._write(slot, step.then)
        if self.interval:
            self._schedule_next(slot, step, now)
            return
        self.position[slot] += 1
        self._send_next(slot)

    def _schedule_next(self, slot: int, step: Step, now: float) -> None:
        self.repetition[slot] += 1
        if self.repetition[slot] == self.repeat:
            self.finished += 1
            return
        self.due_at[slot] += self.interval
        if self.due_at[slot] <= now:
            self._send(slot, step)

    def _retry_or_raise(self, slot: int, error: OSError) -> None:
        """Reconnect if the connection was reset before its first reply, as PyTorch's client does.

        A kernel with a full backlog resets connections. Raises Unreachable for any other failure.
        """
        if not isinstance(error, ConnectionError) or not self.retries_left[slot]:
            raise self._connection_lost(error.strerror or "")
        self.retries_left[slot] -= 1
        del self.slot_of[self.sockets[slot].fileno()]
        self.sockets[slot].close()
        self.sockets[slot] = self._socket(self.rank[slot])
        self.slot_of[self.sockets[slot].fileno()] = slot
        self.connected[slot] = False
        self.unsent[slot] = b""
        self._begin(slot)

    def _connection_lost(self, reason: str) -> Unreachable:
        done = self.result.operations
        return Unreachable(f"a connection to {self.host}:{self.ports[0]} was lost after {done} requests: {reason}")
