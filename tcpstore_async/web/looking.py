"""Asks a server over its admin socket: for its counters each second, and for everything while somebody looks.

Knows threads, the clock and the admin socket. Must not know HTTP.
Invariants: at most one request of each kind is under way, however many look, at however many stores. A look at
everything in a store, whose cost for the server grows with its sessions and keys, is followed by a pause of several
times its duration.
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from ..client.admin import ask
from ..diagnosis.facts import NamedStore, OtherStores, read_facts
from ..diagnosis.local import local_ranks
from ..diagnosis.rates import Histogram
from ..errors import DistError, DistStoreError, ProtocolError
from .summary import Summary

log = logging.getLogger("tcpstore_async.web")

MOST_STORES: Final = 16
"""Stores that are looked at in turn."""

SILENT_SECONDS: Final = 3.0
"""Since the last answer, after which a server is not alive."""

_EVERY_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 60.0
_PAUSE: Final = 4.0
"""Pause after a look, as a multiple of its duration."""
_WANTED_SECONDS: Final = 10.0
"""Since somebody has looked, for which the next looks are made."""
_KEPT_SECONDS: Final = 600
"""For which the rates of operations are kept."""
_RECENT: Final = 11
"""Replies from which the rates of commands are computed."""
_COMMANDS: Final = 8


class Stats(msgspec.Struct, rename={"turn_times": "turns"}):
    """Counters and levels; see docs/admin.md."""

    time: float
    uptime: float
    cpu: float
    resident_bytes: int
    commands: dict[str, int]
    traffic: dict[str, int]
    connections: dict[str, Any]
    sessions: dict[str, int]
    links: dict[str, int]
    keys: int
    queues: int
    awaited_keys: int
    budget: dict[str, int]
    joins: dict[str, int | None]
    accept_queue: dict[str, int] | None
    lag: Histogram
    service: Histogram
    turn_times: Histogram


class Counters(msgspec.Struct):
    """What the server last said of itself, and when."""

    server: dict[str, Any]
    stats: Stats
    at: float = 0.0
    """By the monotonic clock."""
    oldest: list[NamedStore] = []
    """The oldest of the stores with names; `others` sums up the rest."""
    others: OtherStores = msgspec.field(default_factory=OtherStores)


class _Line(msgspec.Struct):
    server: dict[str, Any] | None = None
    stats: Stats | None = None
    oldest: list[NamedStore] = []
    others: OtherStores | None = None
    error: str = ""
    end: bool = False


def read_counters(lines: Iterable[bytes]) -> Counters:
    """Decode a reply. Raises DistStoreError for one that says what is wrong, ProtocolError for an incomplete one."""
    decoder = msgspec.json.Decoder(_Line)
    server: dict[str, Any] | None = None
    stats: Stats | None = None
    oldest: list[NamedStore] = []
    others = OtherStores()
    for raw in lines:
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"invalid reply of the admin socket: {error}") from None
        if line.error:
            raise DistStoreError(line.error)
        server = line.server or server
        stats = line.stats or stats
        oldest += line.oldest
        others = line.others or others
        if line.end and server is not None and stats is not None:
            return Counters(server, stats, oldest=oldest, others=others)
    raise ProtocolError("the admin socket's reply is incomplete")


class Rates:
    """Operations over the last minutes, one figure a second."""

    def __init__(self) -> None:
        self.each_second: deque[int] = deque(maxlen=_KEPT_SECONDS)
        """Operations a second; 0 while the server did not answer."""
        self._recent: deque[Counters] = deque(maxlen=_RECENT)

    def add(self, counters: Counters) -> None:
        """Take what was asked after the last one."""
        recent = self._recent
        if recent and counters.stats.uptime < recent[-1].stats.uptime:
            recent.clear()  # another server is there now
        if recent:
            before = recent[-1]
            seconds = max(0.001, counters.stats.uptime - before.stats.uptime)
            done = sum(counters.stats.commands.values()) - sum(before.stats.commands.values())
            missed = min(_KEPT_SECONDS, max(0, round(seconds / _EVERY_SECONDS) - 1))
            if seconds < SILENT_SECONDS:
                self.each_second.extend([round(done / seconds)] * (missed + 1))
            else:
                self.each_second.extend([*[0] * missed, done])
        recent.append(counters)

    def commands(self) -> list[tuple[str, float]]:
        """Return how often a second each command was executed in the last seconds, the most frequent first."""
        if len(self._recent) < 2:
            return []
        first, last = self._recent[0].stats, self._recent[-1].stats
        seconds = max(0.001, last.uptime - first.uptime)
        done = {name: number - first.commands.get(name, 0) for name, number in last.commands.items()}
        rates = [(name, round(number / seconds, 1)) for name, number in done.items() if number > 0]
        return sorted(rates, key=lambda one: (-one[1], one[0]))[:_COMMANDS]

    def lag(self) -> float:
        """Return a bound, in seconds, for how late the loop came to its timers in the last seconds; 0 if unknown."""
        if len(self._recent) < 2:
            return 0.0
        first, last = self._recent[0].stats.lag, self._recent[-1].stats.lag
        late = [
            bound for bound, one, other in zip(_bounds(last), last.counts, first.counts, strict=True) if one > other
        ]
        return max(late, default=0.0)


def _bounds(histogram: Histogram) -> list[float]:
    """Return the upper bounds of all buckets; for the last one, of which there is none, the last that there is."""
    return [*histogram.bounds, histogram.bounds[-1]]


class _Watched:
    """A store that somebody looks at."""

    def __init__(self) -> None:
        self.wanted_at = 0.0
        """When somebody has looked last."""
        self.looked_at = float("-inf")
        """When the last look began."""
        self.summary: Summary | None = None
        self.summary_at = 0.0
        self.failed = ""
        """Why the last look has shown nothing; empty if it has."""

    def is_wanted(self) -> bool:
        return time.monotonic() - self.wanted_at < _WANTED_SECONDS


class Looker:
    """Watches one server."""

    def __init__(self, find: Callable[[], Path]) -> None:
        """`find` returns the path of the admin socket, or raises DistNetworkError."""
        self._find = find
        self._began = time.monotonic()
        self.counters: Counters | None = None
        self.error = "it has not been queried yet"
        """Why the last request was not answered; empty if it was."""
        self.operations = Rates()
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._wanted = threading.Condition()
        self._watched: dict[str | None, _Watched] = {}
        """By name, None for the store without one."""
        self.threads = [
            threading.Thread(target=self._follow, name="tcpstore counters", daemon=True),
            threading.Thread(target=self._look_while_wanted, name="tcpstore looks", daemon=True),
        ]

    def start(self) -> None:
        """Ask from now on. Returns when the server has answered, or has not for a second."""
        for thread in self.threads:
            thread.start()
        self._asked.wait(_EVERY_SECONDS)

    def close(self) -> None:
        """Ask no more. A request that is under way ends by itself."""
        self._ended.set()
        with self._wanted:
            self._wanted.notify_all()

    def silent_for(self) -> float:
        """Return for how many seconds the server has not answered; 0 if it does."""
        at = self._began if self.counters is None else self.counters.at
        silent = time.monotonic() - at
        return 0.0 if self.counters is not None and silent < SILENT_SECONDS and not self.error else silent

    def summary(self, timeout: float, store: str | None = None) -> tuple[Summary | None, float, str]:
        """Return what the last look into a store has shown, its age in seconds, and why there is none newer.

        Waits for the first look after a time in which nobody wanted one, up to `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._wanted:
            watched = self._watched.get(store)
            if watched is None:
                if len(self._watched) >= MOST_STORES:
                    self._forget()
                if len(self._watched) >= MOST_STORES:
                    return None, 0.0, f"{MOST_STORES} other stores are being inspected"
                watched = self._watched[store] = _Watched()
            watched.wanted_at = time.monotonic()
            self._wanted.notify_all()
            while watched.summary is None and not watched.failed and not self._ended.is_set():
                left = deadline - time.monotonic()
                if left <= 0 or not self._wanted.wait(left):
                    break
            age = 0.0 if watched.summary is None else time.monotonic() - watched.summary_at
            return watched.summary, age, watched.failed

    # The threads

    def _follow(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                counters = read_counters(ask(self._find(), ["stats", "oldest_stores"], _ANSWER_SECONDS))
            except (DistError, OSError) as error:
                self.error = str(error)
            else:
                counters.at = time.monotonic()
                self.operations.add(counters)
                self.counters = counters
                self.error = ""
            self._asked.set()
            self._ended.wait(max(0.0, began + _EVERY_SECONDS - time.monotonic()))

    def _look_while_wanted(self) -> None:
        while True:
            with self._wanted:
                self._forget()
                self._wanted.wait_for(lambda: self._watched or self._ended.is_set())
                if self._ended.is_set():
                    return
                store, watched = min(self._watched.items(), key=lambda one: one[1].looked_at)
            began = watched.looked_at = time.monotonic()
            self._look(store, watched)
            if self._ended.wait(max(_EVERY_SECONDS, _PAUSE * (time.monotonic() - began))):
                return

    def _forget(self) -> None:
        """Forget the stores that nobody looks at any more: the next one who does waits for a new look."""
        self._watched = {name: one for name, one in self._watched.items() if one.is_wanted()}

    def _look(self, store: str | None, watched: _Watched) -> None:
        summary: Summary | None = None
        failed = ""
        try:
            with _uncollected():
                parts = ["sessions", "counters", "keys"]
                facts = read_facts(ask(self._find(), parts, _LOOK_SECONDS, store=store))
                facts.keep_store(store)
                at = time.monotonic()
                summary = Summary(facts, local_ranks(facts, None))
        except (DistError, OSError) as error:
            failed = str(error)
        except Exception as error:
            failed = f"internal error: {error!r}"
            log.exception("cannot inspect the server")
        with self._wanted:
            watched.failed = failed
            if summary is not None:
                watched.summary, watched.summary_at = summary, at
            self._wanted.notify_all()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do without garbage collections, which would traverse a hundred thousand sessions each time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
