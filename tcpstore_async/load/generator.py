"""Thousands of connections in one loop of epoll, each of which sends prepared requests and counts what returns.

Knows: sockets, the order of requests on each, when each was sent and answered. Must not know: what the bytes mean, but
for the sum in the answer to an ADD, on which a barrier turns.
Invariant: a connection has one request under way at most; every answer is counted and, where it is known and comes in
one piece, compared. The first thing that goes wrong ends the whole with one LoadError.
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
_OUT: Final = 4
_AT_ONCE: Final = 32
"""Connections that are started before those under way are looked after."""
_CHUNK: Final = 1 << 18
_PER_SOURCE: Final = 4096
"""Connections from one loopback address, which has 28,000 ports."""
_BIND_ADDRESS_NO_PORT: Final = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT: the port is chosen when it connects. Python has a name for it since 3.12."""
_DIGITS: Final = 8
_TRIES: Final = 10
"""Times that a connection is made again that was reset before it was answered."""


class LoadError(Exception):
    """The load could not be finished; the text is one line for users."""


class Unreachable(LoadError):
    """There is no server, or there is none any more."""


class Late(LoadError):
    """It was not finished in time."""


def late(limit: float, what: str) -> Late:
    """That something was not finished within so many seconds, and what."""
    seconds = f"{limit:.0f}" if limit >= 10 else f"{limit:.2g}"
    return Late(f"not done after {seconds} s: {what}")


class Act(NamedTuple):
    """One request, and the answer that is awaited before the next."""

    request: bytes
    reply: int
    """Bytes of the answer; 0: none, go on at once."""
    rank_at: tuple[int, ...] = ()
    """Where in the request the rank stands as eight digits."""
    expect: bytes = b""
    """The answer, if it is known; empty: it is counted only."""
    last: int = 0
    """If the answer is this number as an i64, `then` is sent: who arrives last at a barrier opens it. 0: never."""
    then: bytes = b""


class Clock(NamedTuple):
    """Seconds so far in which a process has computed, and in which its main thread could have but had no core."""

    cpu: float
    waited: float


def own_clock() -> Clock:
    return Clock(time.process_time(), waited("self"))


def waited(pid: str) -> float:
    """See `Clock`; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Result:
    """What a run took: seconds of the monotonic clock, and of each request in the order of the answers."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended = began
        self.start = own_clock()
        self.end = self.start
        self.operations = 0
        self.behind = 0
        """Requests of the background that were answered, those under way at the end too."""
        self.latencies: array[float] = array("f")

    def finish(self) -> None:
        """Now. The clock of the process is read within the time, which it must not exceed."""
        self.end = own_clock()
        self.ended = time.perf_counter()


def _source(host: str, rank: int) -> str:
    """The address that a rank connects from; empty: any.

    From one address the kernel looks ever longer for a port that is free: 0.2 ms each at 16,000 connections, several
    times what the server takes.
    """
    if sys.platform != "linux" or not host.startswith("127."):
        return ""
    return f"127.0.0.{1 + rank // _PER_SOURCE % 250}"


class Generator:
    """Connections to one server; `source`: the address they come from, empty: any."""

    def __init__(self, host: str, port: int, source: str = "") -> None:
        self.host = host
        self.port = port
        self.source = source
        self.rank: list[int] = []
        self.epoll = select.epoll()
        self.buffer = bytearray(_CHUNK)
        self.sockets: list[socket.socket] = []
        self.index: dict[int, int] = {}
        self.acts: list[Act] = []
        self.behind: list[Act] = []
        self.background = 0
        self.repeat = 1
        self.more = 0
        """So many ranks, the first ones, repeat once more than the others."""
        self.step: list[int] = []
        self.turn: list[int] = []
        self.need: list[int] = []
        self.since: list[float] = []
        self.due: list[float] = []
        self.rest: list[bytes] = []
        self.ready: list[bool] = []
        self.tries: list[int] = []
        """How often each may still be made again; 0 once it has been answered."""
        self.result = Result(0.0)
        self.started = 0
        self.finished = 0
        self.interval = 0.0
        self.wanted = 0

    def open(self, count: int, first: int) -> None:
        """Make room for so many more connections, ranks from `first` on; the first run of each connects it.

        Raises LoadError.
        """
        for rank in range(first, first + count):
            self.rank.append(rank)
            self.sockets.append(self._socket(rank))
            self.index[self.sockets[-1].fileno()] = len(self.sockets) - 1
            self.step.append(0)
            self.turn.append(0)
            self.need.append(0)
            self.since.append(0.0)
            self.due.append(0.0)
            self.rest.append(b"")
            self.ready.append(False)
            self.tries.append(_TRIES)

    def _socket(self, rank: int) -> socket.socket:
        made: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A reset at the end leaves no port in TIME_WAIT, of which the next run would soon find none free.
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
        """Close every connection, with a reset."""
        for one in self.sockets:
            one.close()
        self.sockets.clear()
        self.epoll.close()

    def play(
        self,
        acts: list[Act],
        limit: float,
        repeat: int = 1,
        window: int = 0,
        background: int = 0,
        behind: list[Act] | None = None,
        more: int = 0,
    ) -> Result:
        """Each connection does the acts in order, `repeat` times, a rank below `more` once more.

        That takes `limit` seconds at most.

        `window` connections at a time, 0: all at once. The first `background` ones do `behind` again and again until
        all others are through. Raises LoadError.
        """
        self.acts = acts
        self.behind = behind or []
        self.background = background
        self.repeat = repeat
        self.more = more
        self.interval = 0.0
        total = len(self.sockets)
        self.wanted = total - background
        self.finished = 0
        self.started = background
        self.result = Result(time.perf_counter())
        deadline = self.result.began + limit
        for which in range(background):
            self._begin(which)
        stop = total if window == 0 else min(total, background + window)
        # A herd: nobody is served before all have asked for a connection.
        at_once = _AT_ONCE if window or all(self.ready) else stop
        while self.started < stop:
            for _ in range(min(at_once, stop - self.started)):
                self._next()
            self._look(0.0)
        while self.finished < self.wanted:
            self._look(0.5)
            while window and self.started < total and self.started - background - self.finished < window:
                self._next()
            if time.perf_counter() > deadline:
                raise late(limit, f"{self.finished} of {self.wanted} connections are")
        self.result.finish()
        self._drain(deadline)
        return self.result

    def pace(self, act: Act, seconds: float, interval: float, limit: float) -> Result:
        """Each connection does the act every `interval` seconds, for so many seconds, spread evenly over them.

        A latency counts from when the request was due: what the server holds up is not forgiven. Raises LoadError.
        """
        self.acts = [act]
        self.background = 0
        self.repeat = max(1, int(seconds / interval))
        self.interval = interval
        total = len(self.sockets)
        self.wanted = total
        self.finished = 0
        self.started = 0
        self.result = Result(time.perf_counter())
        began = self.result.began
        asleep = list(range(total))
        for which in asleep:
            self.due[which] = began + interval * which / total
            self.step[which] = 0
            self.turn[which] = 0
        sent = 0
        everything = total * self.repeat
        while self.finished < total:
            now = time.perf_counter()
            if now > began + limit:
                raise late(limit, f"{self.result.operations} of {everything} requests are")
            while sent < everything and began + interval * sent / total <= now:
                which = sent % total
                # One whose answer is late sends as soon as that has come.
                if self.need[which] == 0 and self.turn[which] * total + which <= sent:
                    self._send(which, act)
                sent += 1
            pause = began + interval * sent / total - time.perf_counter() if sent < everything else 0.5
            self._look(min(0.5, max(0.0, pause)))
        self.result.finish()
        return self.result

    def _drain(self, deadline: float) -> None:
        """Let what the background has under way be answered: nothing of it may meet the next run."""
        self.result.behind += sum(1 for need in self.need[: self.background] if need)
        self.behind = []
        while self.background and max(self.need[: self.background]):
            self._look(0.5)
            if time.perf_counter() > deadline:
                raise Late("the connections in the background were not answered in time")

    def _turns(self, which: int) -> int:
        return self.repeat + 1 if self.rank[which] < self.more else self.repeat

    def _next(self) -> None:
        self.started += 1
        self._begin(self.started - 1)

    def _begin(self, which: int) -> None:
        self.step[which] = 0
        self.turn[which] = 0
        if which >= self.background and self._turns(which) == 0:
            self.finished += 1
            return
        if self.ready[which]:
            self._act(which)
            return
        one = self.sockets[which]
        code = one.connect_ex((self.host, self.port))
        if code not in (0, errno.EINPROGRESS):
            raise Unreachable(f"cannot connect to {self.host}:{self.port}: {os.strerror(code)}")
        self.since[which] = time.perf_counter()
        self.epoll.register(one.fileno(), _OUT)

    def _look(self, seconds: float) -> None:
        """Wait so long for something to happen, and look after it."""
        for descriptor, events in self.epoll.poll(seconds, 1024):
            which = self.index[descriptor]
            if not self.ready[which]:
                self._connected(which)
            elif events & _OUT and self.rest[which]:
                self._go_on_sending(which)
            else:
                self._read(which)

    def _connected(self, which: int) -> None:
        code: int = self.sockets[which].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Unreachable(f"cannot connect to {self.host}:{self.port}: {os.strerror(code)}")
        self.ready[which] = True
        self.epoll.modify(self.sockets[which].fileno(), _IN)
        self._act(which)

    def _act(self, which: int) -> None:
        """Send what is next on a connection, until something is to be awaited."""
        acts = self.behind if which < self.background else self.acts
        while True:
            if self.step[which] == len(acts):
                self.step[which] = 0
                self.turn[which] += 1
                if which >= self.background and self.turn[which] == self._turns(which):
                    self.finished += 1
                    return
                if not acts:
                    return
            act = acts[self.step[which]]
            self._send(which, act)
            if act.reply:
                return
            self.step[which] += 1

    def _send(self, which: int, act: Act) -> None:
        self.need[which] = act.reply
        self.since[which] = time.perf_counter()
        data = act.request
        if act.rank_at:
            rank = b"%08d" % self.rank[which]
            own = bytearray(data)
            for place in act.rank_at:
                own[place : place + _DIGITS] = rank
            data = bytes(own)
        self._put(which, data)

    def _put(self, which: int, data: bytes) -> None:
        if self.rest[which]:
            self.rest[which] += data
            return
        sent = 0
        try:
            sent = self.sockets[which].send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(which, error)
            return
        if sent < len(data):
            self.rest[which] = data[sent:]
            self.epoll.modify(self.sockets[which].fileno(), _IN | _OUT)

    def _go_on_sending(self, which: int) -> None:
        data = self.rest[which]
        self.rest[which] = b""
        self._put(which, data)
        if not self.rest[which]:
            self.epoll.modify(self.sockets[which].fileno(), _IN)

    def _read(self, which: int) -> None:
        count = 0
        try:
            count = self.sockets[which].recv_into(self.buffer)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(which, error)
            return
        if count == 0:
            raise self._lost("the server has closed it")
        need = self.need[which]
        if count > need:
            raise LoadError(f"the server sent {count - need} bytes that nobody asked for")
        self.need[which] = need - count
        if count < need:
            return
        self._answered(which, count)

    def _answered(self, which: int, count: int) -> None:
        """The answer is complete; `count` bytes of it came just now."""
        self.tries[which] = 0
        acts = self.behind if which < self.background else self.acts
        if not acts:
            return
        act = acts[self.step[which]]
        whole = count == act.reply
        if act.expect and whole and self.buffer[:count] != act.expect:
            raise LoadError(f"the server answered {bytes(self.buffer[: min(count, 32)])!r}, not {act.expect[:32]!r}")
        now = time.perf_counter()
        if which >= self.background:
            self.result.operations += 1
            if self.interval:
                self.result.latencies.append(now - self.due[which])
            else:
                self.result.latencies.append(now - self.since[which])
        else:
            self.result.behind += 1
        if act.last and whole and int.from_bytes(self.buffer[:8], "little") == act.last:
            self._put(which, act.then)
        if self.interval:
            self._paced(which, act, now)
            return
        self.step[which] += 1
        self._act(which)

    def _paced(self, which: int, act: Act, now: float) -> None:
        self.turn[which] += 1
        if self.turn[which] == self.repeat:
            self.finished += 1
            return
        self.due[which] += self.interval
        if self.due[which] <= now:
            self._send(which, act)

    def _failed(self, which: int, error: OSError) -> None:
        """Begin anew, as PyTorch's client does, with a connection that was reset before the server had taken it.

        A kernel does that whose backlog is full. Raises Unreachable for others.
        """
        if not isinstance(error, ConnectionError) or not self.tries[which]:
            raise self._lost(error.strerror or "")
        self.tries[which] -= 1
        del self.index[self.sockets[which].fileno()]
        self.sockets[which].close()
        self.sockets[which] = self._socket(self.rank[which])
        self.index[self.sockets[which].fileno()] = which
        self.ready[which] = False
        self.rest[which] = b""
        self._begin(which)

    def _lost(self, why: str) -> Unreachable:
        done = self.result.operations
        return Unreachable(f"a connection to {self.host}:{self.port} was lost after {done} requests: {why}")
