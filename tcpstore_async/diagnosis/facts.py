"""The facts in a reply of the admin socket, or to MISSING: the sessions, keys and barriers of a server at one time.

Knows the format (`server/admin.py`, `observe/inspection.py`, `observe/missing.py`). Must not know sockets, nor draw
conclusions.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final, TypeVar

import msgspec

from ..base.errors import ProtocolError
from ..observe.similar_keys import Family, family_of, number_after
from .lines import Line, decode_reply


class Wait(msgspec.Struct, rename={"kind": "for"}, gc=False):
    """What a session waits for."""

    kind: str
    """`keys`, `value` or `item` of a key, `number`: until the key reaches `target`, `barrier`, `round`, or `store`.
    Empty if the asker may not know."""
    keys: list[str] = []
    group: int = 0
    """Its group of waiters, which then has the keys; 0 for none."""
    target: int = 0
    more: int = 0
    """Number of keys not listed."""


class Session(msgspec.Struct, gc=False):
    """A connected session. Times are in seconds."""

    id: int
    """0 if it has sent nothing."""
    host: str
    port: int
    joined: float
    """Time since it connected."""
    idle: float
    """Time since it last sent something."""
    command: str
    unsent: int = 0
    held: int = 0
    pid: int | None = None
    peer: dict[str, str] = {}
    """The introduction of its client."""
    link: str | None = None
    """The host of the link that it is on."""
    carries: int | None = None
    """For the connection of a link, the number of its sessions."""
    wait: Wait | None = None
    store: str | None = None
    """The name of its store; None for the unnamed one."""


class NamedStore(msgspec.Struct):
    """A named store."""

    name: str
    host: str
    """The host of its owner; so are the next two."""
    pid: str
    attempt: str
    age: float
    joined: int
    expected: int
    """0 if unknown."""
    sessions: int
    keys: int
    bytes: int
    ended: str
    """Why it ended; empty if it has not."""
    port: int = 0
    """The port that the server has for it; 0 for none."""


class OtherStores(msgspec.Struct):
    """Sums over the named stores that are not listed."""

    stores: int = 0
    joined: int = 0
    expected: int = 0
    sessions: int = 0
    keys: int = 0
    bytes: int = 0


class Departed(msgspec.Struct):
    """A session that has left."""

    id: int
    host: str
    port: int
    pid: int | None = None
    peer: dict[str, str] = {}


class Group(msgspec.Struct):
    """Waiters for the same list of keys."""

    id: int
    keys: list[str]
    """The missing ones."""
    all: list[str] = []
    """The whole list, if known."""


class Counter(msgspec.Struct):
    """The counter of a barrier that is not open."""

    key: str
    value: int
    expected: int = 0
    """0 if unknown."""
    age: float = 0.0
    members: list[int] = []
    """The sessions that have counted there; in a reply to MISSING, some of them."""
    known: int = 0
    """In a reply to MISSING, the number of these sessions."""
    joined: int = 0
    """How many of these have joined."""
    told: int = 0
    """How many ranks they have sent."""
    ranks: list[tuple[int, int]] = []
    """The first ranges of these ranks."""


class Key(msgspec.Struct, array_like=True, gc=False):
    """A key of the store."""

    key: str
    size: int
    age: float | None = None
    """Seconds since it was last written; None if unknown."""
    by: int | None = None
    """The session that wrote it."""


Process = tuple[object, ...]
"""What distinguishes processes."""

AnySession = TypeVar("AnySession", Session, Departed)

_FEW: Final = 2
"""Writers of a family's keys from which their numbers may be ranks."""


class _Line(Line):
    sessions: list[Session] = msgspec.field(default_factory=list)
    groups: list[Group] = msgspec.field(default_factory=list)
    counters: list[Counter] = msgspec.field(default_factory=list)
    keys: list[Key] = msgspec.field(default_factory=list)
    departed: list[Departed] = msgspec.field(default_factory=list)
    stores: list[NamedStore] = msgspec.field(default_factory=list)
    environments: dict[int, dict[str, str]] | None = None


class _Reply(_Line):
    """The reply to MISSING."""

    absent: list[tuple[int, int]] = msgspec.field(default_factory=list)
    similar: list[Key] = msgspec.field(default_factory=list)
    writers: list[int] = msgspec.field(default_factory=list)
    unlisted: int = 0
    worlds: dict[str, int] = msgspec.field(default_factory=dict)


class Members:
    """The values published under keys of one family."""

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes
        """The size of one of the values."""
        self.writers: dict[int, int] = {}
        """The session that wrote each key, 0 if unknown, keyed by the number in the key."""

    @cached_property
    def _known(self) -> tuple[int, int]:
        """The number of keys whose writers are known, and of these writers."""
        known = [writer for writer in self.writers.values() if writer]
        return len(known), len(set(known))

    @property
    def one_each(self) -> bool:
        """Whether no two keys were written by the same session."""
        keys, writers = self._known
        return _FEW <= keys == writers

    @property
    def several_each(self) -> bool:
        """Whether a session has written several keys: their numbers are not ranks."""
        keys, writers = self._known
        return writers < keys


class Facts:
    """A whole reply, with sessions also grouped by process and wait, and keys by family.

    They are grouped as lines arrive, while the server prepares the next ones.
    """

    def __init__(self) -> None:
        self.server: dict[str, Any] = {}
        self.sessions: list[Session] = []
        self.groups: dict[int, Group] = {}
        self.counters: dict[str, Counter] = {}
        self.keys: list[Key] = []
        self.departed: dict[int, Departed] = {}
        self.stores: list[NamedStore] = []
        self.environments: dict[int, dict[str, str]] | None = None
        """Environments of processes on the server's machine, keyed by session; None if that is this machine."""
        self.processes: dict[Process, list[Session]] = {}
        """Sessions, without the connections of links, keyed by process."""
        self.waits: dict[tuple[object, ...], tuple[Wait, list[Session]]] = {}
        """Waits, each with the sessions that wait for the same."""
        self.waits_in_groups: dict[int, tuple[Wait, list[Session]]] = {}
        """The same for groups of waiters, keyed by group."""
        self.families: dict[Family, Members] = {}
        self.absent: list[str] = []
        """Missing keys of a question."""
        self.similar: list[Key] = []
        """Existing keys that resemble these."""
        self.partial = False
        """Whether they are about one question, so that most sessions and keys are not listed."""
        self.unlisted: int = 0
        """Number of connected processes without a rank that are not listed."""
        self.worlds: dict[str, int] = {}
        """How many sessions have said each size of the world, if not all are listed."""
        self._family = Family("", "")
        """The family of the last key with a number at its end."""
        self._writers: dict[int, int] | None = None

    def add(self, line: _Line) -> None:
        """Add the facts in a line of a reply."""
        if line.server is not None:
            self.server = line.server
        if line.sessions:
            self.add_sessions(line.sessions)
        if line.environments is not None:
            self.environments = {**(self.environments or {}), **line.environments}
        if line.keys:
            self.add_keys(line.keys)
        self.stores += line.stores
        self.groups.update({group.id: group for group in line.groups})
        self.departed.update({one.id: one for one in line.departed})
        for counter in line.counters:
            known = self.counters.get(counter.key)
            if known is None:
                self.counters[counter.key] = counter
            else:
                known.members += counter.members

    def add_sessions(self, sessions: list[Session]) -> None:
        self.sessions += sessions
        group_by_process(self.processes, [one for one in sessions if one.carries is None and one.command != "LINK"])
        waits, in_groups = self.waits, self.waits_in_groups
        for one in sessions:
            wait = one.wait
            if wait is None:
                continue
            keys = wait.keys
            if wait.group:
                in_groups.setdefault(wait.group, (wait, []))[1].append(one)
            elif keys:
                same = (wait.kind, wait.target, keys[0]) if len(keys) == 1 else (wait.kind, wait.target, *sorted(keys))
                known = waits.get(same)
                if known is None:
                    waits[same] = wait, [one]
                else:
                    known[1].append(one)

    def add_keys(self, keys: list[Key]) -> None:
        self.keys += keys
        writers = self._writers
        before = self._family.before
        for key in keys:
            name = key.key
            # Most keys are of the same family as the one before.
            if writers is not None and (same := number_after(before, name)) is not None:
                writers[same] = key.by or 0
                continue
            found = family_of(name)
            if found is None:
                continue
            family, number = found
            members = self.families.get(family)
            if members is None:
                members = self.families[family] = Members(key.size)
            members.writers[number] = key.by or 0
            if not family.after:
                self._family, self._writers = family, members.writers
                before, writers = family.before, members.writers

    def keep_store(self, name: str | None) -> list[Session]:
        """Keep only the sessions in the store of this name, whose keys these are; return the others."""
        others = [one for one in self.sessions if one.store != name]
        if others:
            sessions = [one for one in self.sessions if one.store == name]
            self.sessions, self.processes, self.waits, self.waits_in_groups = [], {}, {}, {}
            self.add_sessions(sessions)
        return others


def group_by_process(groups: dict[Process, list[AnySession]], sessions: Iterable[AnySession]) -> None:
    """Group sessions by process; one whose process is unknown gets its own group."""
    for one in sessions:
        peer = one.peer
        process: Process
        if one.pid is None:
            process = None, one.id, one.host, one.port, id(one)
        elif peer:
            process = one.pid, one.host, peer.get("host"), peer.get("rank")
        else:
            process = one.pid, one.host
        groups.setdefault(process, []).append(one)


def read_facts(lines: Iterable[bytes]) -> Facts:
    """Decode a reply. Raises DistStoreError for a reported error, ProtocolError for an invalid reply."""
    facts = Facts()
    for line in decode_reply(lines, _Line):
        facts.add(line)
    return facts


def read_answer(raw: bytes, keys: list[str]) -> Facts:
    """Decode the reply to MISSING about these keys. Raises ProtocolError."""
    try:
        reply = msgspec.json.decode(raw, type=_Reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to MISSING") from None
    facts = Facts()
    facts.partial = True
    facts.add(reply)
    absent = {at for first, last in reply.absent for at in range(max(0, first), min(last + 1, len(keys)))}
    facts.absent = [keys[at] for at in sorted(absent)]
    there = [key for at, key in enumerate(keys) if at not in absent]
    facts.add_keys([Key(key, 0, None, by) for key, by in zip_longest(there, reply.writers[: len(there)])])
    facts.similar, facts.unlisted, facts.worlds = reply.similar, reply.unlisted, reply.worlds
    return facts


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collections, each of which would traverse the facts of a hundred thousand sessions."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
