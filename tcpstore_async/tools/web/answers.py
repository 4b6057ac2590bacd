"""The answers by path: the page, its data, metrics, health, replies of the admin socket.

Knows the latest looks at the server. Must not know sockets, nor the admin socket.
Invariants: no answer to a browser waits longer for the server than a browser waits. No answer has a value of the store.
"""

import platform
from collections.abc import Generator, Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

import msgspec

from ...base.coercion import parse_digits
from ...base.errors import DistError
from ...client.admin_http import PATH
from ...diagnosis.facts import NamedStore
from ...diagnosis.rates import Look, Stats
from .looking import Looker
from .replies import BusyError, Replies
from .summary import STATES, clip

TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"

_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_FIRST_LOOK_SECONDS: Final = 0.5
"""Longest wait for the first look: the page asks again."""


class Answer(NamedTuple):
    """A reply: status, content type and content."""

    status: int
    type: str
    body: bytes
    retry: bool = False
    """Whether the same request may soon have another answer."""


class Lines(NamedTuple):
    """An answer of unknown length: lines of JSON, of which the last one says that it is the last."""

    first: bytes
    rest: Generator[bytes, None, None]
    """Must be closed."""


class Answers:
    """The answers about one server."""

    def __init__(self, looker: Looker, stacks: bool = True) -> None:
        """Only with `stacks` are processes looked at."""
        self._looker = looker
        self._may_look = stacks
        self._replies = Replies(looker.find)
        folder = files(__package__) / "page"
        self._page = {path: Answer(200, kind, (folder / name).read_bytes()) for path, (name, kind) in _PAGE.items()}

    def answer(self, path: str, query: Mapping[str, str], accept: str, names: bool = True) -> Answer | Lines | None:
        """Return the answer to a request; None for an unknown path. Only with `names` do metrics name stores."""
        if path in self._page:
            return self._page[path]
        if path == "/livez":
            return self._alive()
        if path == "/readyz":
            return self._ready()
        if path == "/metrics":
            return self._metrics(accept, names)
        store = query.get("store") or None
        if path == "/api/state":
            return _json(self._state(store))
        if path == PATH:
            return self._lines([part for part in query.get("ask", "").split(",") if part], store)
        if path == "/api/stacks":
            return self._stacks(store)
        if path == "/api/rank":
            return self._rank(query.get("number", ""), store)
        return None

    def _alive(self) -> Answer:
        silent = self._looker.silent_for()
        if not silent:
            return Answer(200, TEXT, b"alive\n")
        return Answer(503, TEXT, f"the server has not answered for {silent:.0f} s{self._reason()}\n".encode())

    def _ready(self) -> Answer:
        alive = self._alive()
        counters = self._looker.counters
        if alive.status != 200 or counters is None:
            return alive
        server = counters.server
        if not server.get("accepting", True):
            return Answer(503, TEXT, b"the server is no longer accepting connections\n")
        if _number(server, "connections") >= _number(server, "max_connections") > 0:
            return Answer(503, TEXT, b"the server is at its connection limit\n")
        if server.get("why_held"):
            return Answer(503, TEXT, f"{clip(str(server['why_held']))}\n".encode())
        return Answer(200, TEXT, b"ready\n")

    def _reason(self) -> str:
        error = self._looker.error
        return f": {error}" if error else ""

    def _metrics(self, accept: str, names: bool) -> Answer:
        try:
            from .metrics import expose
        except ImportError:
            return Answer(501, TEXT, b"metrics need prometheus-client: pip install 'tcpstore-async[metrics]'\n")
        looker = self._looker
        kind, body = expose(None if looker.silent_for() else looker.counters, accept, names)
        return Answer(200, kind, body)

    def _state(self, store: str | None) -> dict[str, Any]:
        looker = self._looker
        summary, age, failed = looker.summary(_FIRST_LOOK_SECONDS, store)
        counters = looker.counters
        return {
            "silent": round(looker.silent_for(), 1),
            "error": clip(looker.error),
            "server": {} if counters is None else _about(counters),
            "ops": list(looker.operations.each_second),
            "commands": looker.operations.commands(),
            "figures": {} if counters is None else self._figures(counters.stats),
            "stores": [] if counters is None else [_store(one) for one in counters.oldest],
            "more_stores": 0 if counters is None else counters.others.stores,
            "states": STATES,
            "age": round(age, 1),
            "failed": clip(failed),
            "look": None if summary is None else msgspec.Raw(summary.encoded),
        }

    def _figures(self, stats: Stats) -> dict[str, float]:
        return {
            "connections": stats.connections.open,
            "waiting": stats.sessions.waiting,
            "keys": stats.keys,
            "resident_bytes": stats.resident_bytes,
            "lag": self._looker.operations.lag(),
            "accept_queue": 0 if stats.accept_queue is None else stats.accept_queue.length,
        }

    def _lines(self, parts: list[str], store: str | None) -> Answer | Lines:
        lines = self._replies.lines(parts, store)
        try:
            return Lines(next(lines), lines)
        except ValueError as error:
            return Answer(400, TEXT, f"{clip(str(error))}\n".encode())
        except BusyError as error:
            return Answer(503, TEXT, f"{error}\n".encode(), retry=True)
        except (DistError, OSError, StopIteration) as error:
            return Answer(503, TEXT, f"{clip(str(error) or 'the server has not replied')}\n".encode())

    def _stacks(self, store: str | None) -> Answer:
        if not self._may_look:
            return Answer(403, TEXT, b"only for a page on a loopback address, or with --same-user\n")
        try:
            lines = self._looker.stacks(store)
        except (DistError, OSError) as error:
            return Answer(503, TEXT, f"{clip(str(error))}\n".encode())
        if lines is None:
            return Answer(503, TEXT, b"another look is under way\n", retry=True)
        return _json({"lines": [clip(line) for line in lines]})

    def _rank(self, number: str, store: str | None) -> Answer:
        summary = self._looker.summary(_FIRST_LOOK_SECONDS, store)[0]
        rank = parse_digits(number)
        if summary is None or rank is None:
            return Answer(404, TEXT, b"unknown rank\n")
        detail = summary.detail(rank)
        return _json({"number": rank, "detail": None if detail is None else detail._asdict()})


def _json(value: object) -> Answer:
    return Answer(200, _JSON, msgspec.json.encode(value))


def _about(counters: Look) -> dict[str, Any]:
    server = counters.server
    known = {name: server.get(name) for name in ("host", "port", "pid", "version", "build", "why_held")}
    return {**known, "hostname": platform.node()}


def _store(store: NamedStore) -> dict[str, Any]:
    return {
        "name": store.name,  # not clipped: the page requests the store with it
        "owner": clip(f"{store.host}, pid {store.pid}" if store.pid else store.host),
        "age": round(store.age),
        "joined": store.joined,
        "expected": store.expected or None,
        "sessions": store.sessions,
        "keys": store.keys,
        "bytes": store.bytes,
    }


def _number(server: Mapping[str, Any], name: str) -> float:
    found = server.get(name, 0)
    return found if isinstance(found, (int, float)) else 0
