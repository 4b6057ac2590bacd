"""The command table of one store: which function executes each command.

Sessions, the keyspace and features execute commands; a table finds them by the names of their methods. It must not know
what they do.

Invariant: a table is filled as commands arrive, so commands that are never sent cost a store nothing.
"""

from collections.abc import Callable
from typing import Any

from ..keyspace.keyspace import Keyspace
from ..wire.codecs import KEYS, Fields, Handler
from ..wire.commands import BY_OPCODE, HANDSHAKE, HOLDS, PARKS, SESSION, Command
from .key_list_cache import KeyListCache, SharedKeys
from .observer import Observer
from .peer import Peer
from .slots import NO_COMMANDS, Slot, Tally

Feature = Callable[[Any], Handler]
"""Makes the handler of a command for one store, when it is first sent there; that gets the session, if it concerns one,
and the fields."""

Watcher = Callable[[Command, Fields, Peer | None, str], object]
"""Notes a command, its fields, the session that sends it and its store's name, before the command is executed."""


class Commands:
    """What the tables of all stores share."""

    def __init__(self) -> None:
        self.features: dict[str, Feature] = {}
        """By method, what makes the handlers of commands that keyspaces do not execute."""
        self.tallies: list[Tally] = [Tally() for _ in range(256)]
        """Executions of each command, indexed by opcode."""
        self.watchers: list[Watcher] = []

    def register(self, method: str, feature: Feature) -> None:
        """Have a feature execute the command with this method, in all stores; none has executed it before."""
        self.features[method] = feature

    def counts(self) -> dict[str, int]:
        """Return how often each command has been executed."""
        return {command.name: self.tallies[command.opcode].count for command in filter(None, BY_OPCODE)}


class Table:
    """The commands of one store."""

    def __init__(self, shared: Commands, keyspace: Keyspace, key_lists: KeyListCache, root: "Table | None") -> None:
        self.shared = shared
        self.keyspace = keyspace
        self.key_lists = key_lists
        self.name: str = ""
        """Name of the store; empty for the root."""
        self.serving: Peer | None = None
        """The session whose command is being executed."""
        self.observer: Observer | None = None
        """Told what sessions do, if the store is observed."""
        self.commands: list[Slot | None] = [None] * 256
        self.handshake: list[Slot | None] = [None] * 256
        """The table of sessions that have not sent VALIDATE."""
        self.first: Slot
        self.root: Table = self if root is None else root
        if root is None:
            self._begin_handshakes()
        else:
            self.first = root.first
            self.handshake = root.handshake

    def _begin_handshakes(self) -> None:
        for command in filter(None, BY_OPCODE):
            call = self._method(command, command.method) if command.flags & HANDSHAKE else None
            if call is not None:
                self.handshake[command.opcode] = self.first = self._make_slot(command, call)

    def begin_sessions(self) -> None:
        """Have sessions begin in this store, which is one with a name: VALIDATE is executed here. Idempotent."""
        if self.handshake is self.root.handshake:
            self.handshake = [None] * 256
            self._begin_handshakes()

    def slot(self, opcode: int) -> Slot | None:
        """Return how a command is executed in this store; None for an opcode that nothing executes, and for VALIDATE.

        Making the whole table takes longer than anything else that is done for a store with a name.
        """
        slot = self.commands[opcode]
        command = BY_OPCODE[opcode]
        if slot is None and command is not None and not command.flags & HANDSHAKE:
            call = self._method(command, command.method)
            if call is not None:
                slot = self.commands[opcode] = self._make_slot(command, call)
        return slot

    def clear(self) -> None:
        """Break the cycles with what executes the commands: the store has ended."""
        self.commands = NO_COMMANDS
        self.handshake = self.root.handshake
        self.first = self.root.first
        self.serving = None
        self.observer = None

    def observe(self, observer: Observer) -> None:
        """Have an observer told what sessions do from now on. To be called once."""
        self.observer = observer
        for slot in self.commands:
            if slot is not None:
                slot.call = observer.recorded(slot.command.method, slot.call)

    def note(self, command: Command, fields: Fields) -> None:
        """Tell the watchers."""
        for watcher in self.shared.watchers:
            watcher(command, fields, self.serving, self.name)

    def all_slots(self) -> list[Slot]:
        """Return the slots that there are."""
        tables = [self.commands]
        if self is self.root or self.handshake is not self.root.handshake:
            tables.append(self.handshake)
        return [slot for table in tables for slot in table if slot is not None]

    def _make_slot(self, command: Command, call: Handler) -> Slot:
        slot = Slot(command, call, self.shared.tallies[command.opcode])
        shared = command.method + "_shared"
        if command.request is KEYS and hasattr(self.keyspace, shared):
            call_shared = self._method(command, shared)
            assert call_shared is not None
            slot.request = SharedKeys(self.key_lists, call_shared)
        if self.observer is not None:
            slot.call = self.observer.recorded(command.method, slot.call)
        if self.shared.watchers:
            slot.watch(self.note)
        return slot

    def _method(self, command: Command, name: str) -> Handler | None:
        """Return the function that executes a command, given its fields, by the method of this name."""
        if name == "wait":
            return self._wait
        if name == "barrier":
            return self._barrier
        feature = self.shared.features.get(name)
        if feature is not None:
            method: Handler = feature(self)
        elif command.flags & SESSION:
            return None  # a command of a feature that this server does not have
        else:
            method = getattr(self.keyspace, name)
        if command.flags & (SESSION | PARKS | HOLDS):
            return self._with_session(method, command.request.arity)
        return method

    def _wait(self, keys: list[bytes]) -> bool:
        # What all ranks send: calling the keyspace from compiled code costs less than by `_with_session`.
        serving = self.serving
        assert serving is not None
        return self.keyspace.wait(serving, keys)

    def _barrier(self, key: bytes, world_size: int) -> bool:
        serving = self.serving
        assert serving is not None
        return self.keyspace.barrier(serving, key, world_size)

    def _with_session(self, method: Handler, arity: int) -> Handler:
        """Bind the session as a method's first argument. (One lambda for any arity would cost 0.1 µs a call.)"""
        if arity == 0:
            return lambda: method(self.serving)
        if arity == 1:
            return lambda field: method(self.serving, field)
        if arity == 2:
            return lambda first, second: method(self.serving, first, second)
        return lambda *fields: method(self.serving, *fields)
