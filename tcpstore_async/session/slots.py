"""Rows of the command table as a store serves them.

A slot knows its codecs and the function that executes the command. It must not know what the function does.

Invariant: what a slot executes is the same whether it is watched or not.
"""

from typing import Any, Final

from ..wire.codecs import Handler, RequestCodec
from ..wire.commands import HANDSHAKE, HOLDS, MUTATES, PARKS, SESSION, Command
from .key_list_cache import SharedKeys

_LASTING: Final = MUTATES | PARKS | SESSION | HANDSHAKE | HOLDS


class Tally:
    """How often a command has been executed, whichever table it was in."""

    def __init__(self) -> None:
        self.count: int = 0


class Slot:
    """A row of the command table as a store serves it: its codecs and the function that executes it."""

    def __init__(self, command: Command, call: Handler, tally: Tally) -> None:
        self.command = command
        self.tally = tally
        self.request: RequestCodec = command.request
        self.call = call
        self.lasting = command.flags & _LASTING != 0 and command.method != "ping"
        """Whether it may change anything, as opposed to a request whose reply is all that matters."""
        self.writes = command.flags & MUTATES != 0
        """Whether it waits while the disk has no space: see `Hub.held`."""
        self.encode = command.reply.encode if command.reply.measure is None else None
        self.in_pieces = command.reply.in_pieces or command.reply.measure is not None
        self._unwatched: list[Handler] = []
        """The handlers without the watchers' wrapper (`call`, and that of shared keys) while watched; else empty."""

    def executing(self) -> Handler:
        """Return the function that executes the command, without the watchers' wrapper."""
        return self._unwatched[0] if self._unwatched else self.call

    def executing_shared(self) -> Handler:
        """Return the same function for shared lists of keys."""
        request = self.request
        assert isinstance(request, SharedKeys)
        return self._unwatched[1] if self._unwatched else request.call

    def watch(self, note: Handler) -> None:
        """Have `note` called with the command and its fields before the command is executed."""
        command, call, request = self.command, self.call, self.request
        self._unwatched = [call]
        self.call = lambda *fields: _noted(note, command, call, fields)
        if isinstance(request, SharedKeys):
            shared = request.call
            self._unwatched.append(shared)
            request.call = lambda listed: _noted(note, command, shared, (listed,))

    def unwatch(self) -> None:
        """Undo `watch`."""
        if self._unwatched:
            if isinstance(self.request, SharedKeys):
                self.request.call = self._unwatched[1]
            self.call = self._unwatched[0]
            self._unwatched = []


def _noted(note: Handler, command: Command, call: Handler, fields: tuple[Any, ...]) -> Any:
    note(command, fields)
    return call(*fields)


NO_COMMANDS: Final[list[Slot | None]] = [None] * 256
"""The table of an evicted session, which must not make the server hold anything any more."""
