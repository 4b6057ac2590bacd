"""What an admin socket has replied: the sessions, keys and barriers of a server at one time.

Knows the format (`server/admin.py`, `observe/inspection.py`). Must not know sockets, nor what follows from the facts.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, TypeVar

import msgspec

from ..observe.similar_keys import Family, family_of
from .lines import Line, decode_reply


class Wait(msgspec.Struct, rename={"kind": "for"}, gc=False):
    """What a session waits for."""

    kind: str
    """`keys`, `value` or `item` of a key, `number`: until the key reaches `target`, `barrier`, `round`, or `store`."""
    keys: list[str] = []
    group: int = 0
    """The group of waiters that it is in, which then has the keys; 0 for none."""
    target: int = 0
    more: int = 0
    """Keys that are not listed."""


class Session(msgspec.Struct, gc=False):
    """A session that is connected. Times are in seconds."""

    id: int
    """0 if it has sent nothing."""
    host: str
    port: int
    joined: float
    """Since it was connected."""
    idle: float
    """Since it last sent something."""
    command: str
    unsent: int = 0
    held: int = 0
    pid: int | None = None
    peer: dict[str, str] = {}
    """What its client says of itself."""
    link: str | None = None
    """The host of the link that it is on."""
    carries: int | None = None
    """For the connection of a link: the number of its sessions."""
    wait: Wait | None = None
    store: str | None = None
    """The name of the store that it is in, if that has one."""


class NamedStore(msgspec.Struct):
    """A store with a name."""

    name: str
    host: str
    """Of its owner."""
    pid: str
    attempt: str
    age: float
    joined: int
    expected: int
    """0 if it is not known."""
    sessions: int
    keys: int
    bytes: int
    ended: str
    """Why it has ended; empty if it has not."""
    port: int = 0
    """The one that the server has for it; 0 if it has none."""


class OtherStores(msgspec.Struct):
    """Sums over the stores with names that are not listed."""

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
    """Those that are missing."""
    all: list[str] = []
    """The whole list, if it is known."""


class Counter(msgspec.Struct):
    """The counter of a barrier that is not open."""

    key: str
    value: int
    expected: int
    """0 if it is not known."""
    age: float
    members: list[int]
    """The sessions that have counted there."""


class Key(msgspec.Struct, array_like=True, gc=False):
    """A key of the store."""

    key: str
    size: int
    age: float | None = None
    """Seconds since it was last written; None if that is not known."""
    by: int | None = None
    """The session that wrote it."""


Process = tuple[object, ...]
"""What tells processes apart."""

AnySession = TypeVar("AnySession", Session, Departed)

_FEW: Final = 2
"""Writers of a family's keys from which on their numbers may be ranks."""

_SAFE_DIGITS: Final = 8
"""Digits of a number that `family_of` surely takes for one."""


class _Line(Line):
    sessions: list[Session] = msgspec.field(default_factory=list)
    groups: list[Group] = msgspec.field(default_factory=list)
    counters: list[Counter] = msgspec.field(default_factory=list)
    keys: list[Key] = msgspec.field(default_factory=list)
    departed: list[Departed] = msgspec.field(default_factory=list)
    stores: list[NamedStore] = msgspec.field(default_factory=list)
    environments: dict[int, dict[str, str]] | None = None


class Members:
    """The values that ranks have published under keys of one family."""

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes
        """The size of one of the values."""
        self.writers: dict[int, int] = {}
        """By the number in the key: the session that wrote it, 0 if that is not known."""

    @cached_property
    def one_each(self) -> bool:
        """Whether no two keys were written by the same session."""
        known = [writer for writer in self.writers.values() if writer]
        return len(known) >= _FEW and len(set(known)) == len(known)


class Facts:
    """Everything that was replied. What it has of sessions and keys, it also has by process, by wait, and by family.

    That is done as lines arrive: whoever asks would otherwise wait for the server and only then begin.
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
        """By session, what the environments of processes on the server's machine say; None if it is this machine."""
        self.processes: dict[Process, list[Session]] = {}
        """Without the connections of links."""
        self.waits: dict[tuple[object, ...], tuple[Wait, list[Session]]] = {}
        """The sessions that wait, with what they wait for, those that wait for the same together."""
        self.waits_in_groups: dict[int, tuple[Wait, list[Session]]] = {}
        """The same of those in groups of waiters, by group."""
        self.families: dict[Family, Members] = {}
        self._family = Family("", "")
        """The family of the last key, if its number is at its end."""
        self._writers: dict[int, int] | None = None

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
        size = len(before)
        for key in keys:
            name = key.key
            if writers is not None and name[:size] == before:  # most keys are of the same family as the one before
                digits = name[size:]
                if digits.isdecimal() and digits[0] != "0" and digits.isascii() and len(digits) <= _SAFE_DIGITS:
                    writers[int(digits)] = key.by or 0
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
                before, size, writers = family.before, len(family.before), members.writers

    def keep_store(self, name: str | None) -> list[Session]:
        """Forget the sessions that are in other stores than the keys, which are in that of this name; return them."""
        others = [one for one in self.sessions if one.store != name]
        if others:
            sessions = [one for one in self.sessions if one.store == name]
            self.sessions, self.processes, self.waits, self.waits_in_groups = [], {}, {}, {}
            self.add_sessions(sessions)
        return others


def group_by_process(groups: dict[Process, list[AnySession]], sessions: Iterable[AnySession]) -> None:
    """Add sessions to those of the same process; if that is not known, each has one of its own."""
    for one in sessions:
        peer = one.peer
        process: Process
        if one.pid is None:
            process = None, one.id, one.host, one.port, id(one)
        elif peer:
            process = one.pid, one.host, peer.get("host"), peer.get("rank")
        else:
            process = one.pid, one.host
        alone = [one]
        known = groups.setdefault(process, alone)
        if known is not alone:
            known.append(one)


def read_facts(lines: Iterable[bytes]) -> Facts:
    """Decode a reply. Raises DistStoreError for one that reports an error, ProtocolError for an invalid one."""
    facts = Facts()
    for line in decode_reply(lines, _Line):
        if line.server is not None:
            facts.server = line.server
        if line.sessions:
            facts.add_sessions(line.sessions)
        if line.environments is not None:
            facts.environments = {**(facts.environments or {}), **line.environments}
        if line.keys:
            facts.add_keys(line.keys)
        facts.stores += line.stores
        facts.groups.update({group.id: group for group in line.groups})
        facts.departed.update({one.id: one for one in line.departed})
        for counter in line.counters:
            known = facts.counters.get(counter.key)
            if known is None:
                facts.counters[counter.key] = counter
            else:
                known.members += counter.members
    return facts


@contextmanager
def uncollected() -> Iterator[None]:
    """Do without garbage collections, which would traverse the facts of a hundred thousand sessions each time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
