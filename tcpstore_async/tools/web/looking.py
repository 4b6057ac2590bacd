"""Queries a server over its admin socket: its counters every second, everything while pages are open, stacks if asked.

Knows threads, the clock and the admin socket. Must not know HTTP.
Invariants: at most one request of each kind is under way, whatever the number of pages and stores. A look at everything
in a store, whose cost for the server grows with its sessions and keys, is followed by a pause of several times its
duration.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...base.errors import DistError
from ...client.admin import ask
from ...diagnosis.facts import read_facts, uncollected
from ...diagnosis.rates import Interval, Look, Stats, between, read_look
from ..look.local import local_ranks
from ..look.stacks import hang_lines, look_twice
from .summary import Summary

log = logging.getLogger("tcpstore_async.web")

MOST_STORES: Final = 16
"""Most stores looked at, one after the other."""

SILENT_SECONDS: Final = 3.0
"""Seconds since the last answer after which a server is not alive."""

_EVERY_SECONDS: Final = 1.0
"""Seconds between queries of the counters, and the shortest pause between looks."""
_ANSWER_SECONDS: Final = 5.0
"""Timeout of a query of the counters."""
_LOOK_SECONDS: Final = 60.0
"""Timeout of a look."""
_PAUSE: Final = 4.0
"""Pause after a look, as a multiple of its duration."""
_WANTED_SECONDS: Final = 10.0
"""Seconds after a request for which looks continue."""
_EXAMINED_SECONDS: Final = 5.0
"""Seconds for which a look at processes is kept, which costs all hosts something."""
_KEPT_SECONDS: Final = 600
"""Seconds for which the rates of operations are kept."""
_RECENT: Final = 11
"""Replies from which the rates of commands are computed."""
_COMMANDS: Final = 8
"""Most frequent commands shown."""


class Rates:
    """Operations over the last minutes, one number per second."""

    def __init__(self) -> None:
        self.each_second: deque[int] = deque(maxlen=_KEPT_SECONDS)
        """Operations per second; 0 while the server did not answer."""
        self._recent: deque[Stats] = deque(maxlen=_RECENT)

    def add(self, stats: Stats) -> None:
        """Add the next counters."""
        recent = self._recent
        if recent and stats.uptime < recent[-1].uptime:
            recent.clear()  # the server was restarted
        if recent:
            since = between(recent[-1], stats)
            missed = min(_KEPT_SECONDS, max(0, round(since.seconds / _EVERY_SECONDS) - 1))
            if since.seconds < SILENT_SECONDS:
                self.each_second.extend([round(since.ops)] * (missed + 1))
            else:
                self.each_second.extend([*[0] * missed, round(since.ops * since.seconds)])
        recent.append(stats)

    def commands(self) -> list[tuple[str, float]]:
        """Return the rate of each command over the last seconds, most frequent first."""
        lately = self._lately()
        return [] if lately is None else [(name, round(rate, 1)) for name, rate in lately.commands.items()][:_COMMANDS]

    def lag(self) -> float:
        """Return an upper bound, in seconds, of the loop's lag over the last seconds; 0 if unknown."""
        lately = self._lately()
        return 0.0 if lately is None else lately.lag or 0.0

    def _lately(self) -> Interval | None:
        return between(self._recent[0], self._recent[-1]) if len(self._recent) > 1 else None


class _Watched:
    """A store that a page shows."""

    def __init__(self) -> None:
        self.wanted_at = 0.0
        """When it was last requested."""
        self.looked_at = float("-inf")
        """When the last look began."""
        self.summary: Summary | None = None
        self.summary_at = 0.0
        self.failed = ""
        """Why the last look failed; empty if it did not."""

    def is_wanted(self) -> bool:
        return time.monotonic() - self.wanted_at < _WANTED_SECONDS


class Looker:
    """Watches one server."""

    def __init__(self, find: Callable[[], Path]) -> None:
        """`find` returns the path of the admin socket, or raises DistNetworkError."""
        self.find = find
        self.counters: Look | None = None
        self._answered_at = time.monotonic()
        self.error = "it has not been queried yet"
        """Why the last query was not answered; empty if it was."""
        self.operations = Rates()
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._wanted = threading.Condition()
        self._watched: dict[str | None, _Watched] = {}
        """Watched stores by name, None for the unnamed one."""
        self._hosts: dict[str, bool] = {}
        """Cache, while pages are open: whether addresses are this machine's. Asking the kernel takes 12 µs each."""
        self._examining = threading.Lock()
        self._examine_at = 0.0
        """Until then, the last look at processes serves again."""
        self._examined: str | None = None
        """The store that it was about."""
        self._stacks: list[str] = []
        self.threads = [
            threading.Thread(target=self._follow, name="tcpstore counters", daemon=True),
            threading.Thread(target=self._look_while_wanted, name="tcpstore looks", daemon=True),
        ]

    def start(self) -> None:
        """Start querying. Return once the server has answered, or after a second."""
        for thread in self.threads:
            thread.start()
        self._asked.wait(_EVERY_SECONDS)

    def close(self) -> None:
        """Stop querying. A request that is under way ends by itself."""
        self._ended.set()
        with self._wanted:
            self._wanted.notify_all()

    def silent_for(self) -> float:
        """Return the seconds for which the server has not answered; 0 if it does."""
        silent = time.monotonic() - self._answered_at
        return 0.0 if self.counters is not None and silent < SILENT_SECONDS and not self.error else silent

    def summary(self, timeout: float, store: str | None = None) -> tuple[Summary | None, float, str]:
        """Return the result of the last look at a store, its age in seconds, and why there is none newer.

        Waits up to `timeout` seconds for the first look at a store that was not watched.
        """
        deadline = time.monotonic() + timeout
        with self._wanted:
            watched = self._watched.get(store)
            if watched is None:
                if len(self._watched) >= MOST_STORES:
                    self._forget()
                if len(self._watched) >= MOST_STORES:
                    return None, 0.0, f"{MOST_STORES} other stores are already being inspected, the maximum"
                watched = self._watched[store] = _Watched()
            watched.wanted_at = time.monotonic()
            self._wanted.notify_all()
            while watched.summary is None and not watched.failed and not self._ended.is_set():
                left = deadline - time.monotonic()
                if left <= 0 or not self._wanted.wait(left):
                    break
            age = 0.0 if watched.summary is None else time.monotonic() - watched.summary_at
            return watched.summary, age, watched.failed

    def stacks(self, store: str | None) -> list[str] | None:
        """Return what the processes of the ranks in a store do, as text; None if another look is under way.

        Takes seconds. Raises DistError, OSError.
        """
        if not self._examining.acquire(blocking=False):
            return None
        try:
            if time.monotonic() > self._examine_at or store != self._examined:
                facts = read_facts(ask(self.find(), ["sessions", "counters", "keys"], _LOOK_SECONDS, store=store))
                facts.keep_store(store)
                self._stacks = list(hang_lines(look_twice(self.find(), local_ranks(facts, None))))
                self._examined, self._examine_at = store, time.monotonic() + _EXAMINED_SECONDS
            return self._stacks
        finally:
            self._examining.release()

    # The threads

    def _follow(self) -> None:
        failing = False
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                counters = read_look(ask(self.find(), ["stats", "oldest_stores"], _ANSWER_SECONDS))
            except (DistError, OSError) as error:
                self.error = str(error)
                if not failing:
                    log.warning("cannot query the server; retrying every second: %s", error)
                failing = True
            else:
                if failing:
                    log.info("the server is answering queries")
                failing = False
                self._answered_at = time.monotonic()
                self.operations.add(counters.stats)
                self.counters = counters
                self.error = ""
            self._asked.set()
            self._ended.wait(max(0.0, began + _EVERY_SECONDS - time.monotonic()))

    def _look_while_wanted(self) -> None:
        while True:
            with self._wanted:
                self._forget()
                if not self._watched:
                    self._hosts = {}
                self._wanted.wait_for(lambda: self._watched or self._ended.is_set())
                if self._ended.is_set():
                    return
                store, watched = min(self._watched.items(), key=lambda one: one[1].looked_at)
            began = watched.looked_at = time.monotonic()
            self._look(store, watched)
            if self._ended.wait(max(_EVERY_SECONDS, _PAUSE * (time.monotonic() - began))):
                return

    def _forget(self) -> None:
        """Forget the stores that no page shows any more: the next request waits for a new look."""
        self._watched = {name: one for name, one in self._watched.items() if one.is_wanted()}

    def _look(self, store: str | None, watched: _Watched) -> None:
        summary: Summary | None = None
        failed = ""
        try:
            with uncollected():
                parts = ["sessions", "counters", "keys"]
                facts = read_facts(ask(self.find(), parts, _LOOK_SECONDS, store=store))
                facts.keep_store(store)
                at = time.monotonic()
                summary = Summary(facts, local_ranks(facts, None, self._hosts))
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
