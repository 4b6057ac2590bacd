"""Dependencies between the requests of a recording that a replay must respect to get the same replies.

Connections of a job are not independent: a GET finds what another rank has SET before. `put_in_order` notes in each
step the steps of other connections whose effect it saw, or must not see. Knows keys, commands and the order of rows;
must not know servers or times.

Two requests are ordered if one was answered before the other was sent; if they overlapped, by their replies
(`evidence`). Requests that wait need no order: they wait in the replay, too, unless something was removed before.
Invariant: a step depends only on steps that took effect before it, so no step waits for itself.
"""

from typing import Any, Final

from ...wire.codecs import CANCELED, NO_REPLY, NO_VALUE
from ...wire.commands import COMMANDS, MUTATES, PARKS
from .evidence import order_effects
from .recording import Recording, Step

_REMOVES: Final = {"delete_key", "queue_pop", "lease"}
"""Methods that remove something from a key."""
_WAITS: Final = {one.method for one in COMMANDS if one.flags & PARKS and one.reply not in (CANCELED, NO_VALUE)}
"""Methods whose reply may come later."""
_NAMES_ALL: Final = {"num_keys", "list_keys"}
"""Methods whose reply depends on the set of keys."""
_ALL: Final = -1
"""Number of a pseudo-key that stands for the set of keys; creating or removing a key writes it."""
_LAST: Final = 1 << 60
"""Place of a step after all others of its row."""


class _Key:
    """The state of a key after the steps so far."""

    __slots__ = ("barrier", "before", "exists", "first_write", "readers", "removed", "seen", "value", "writers")

    def __init__(self) -> None:
        self.exists = False
        self.first_write = False
        """Whether the last write created the key, so that waiting requests have seen it."""
        self.removed = False
        """Whether the last write may have removed the key."""
        self.barrier = False
        """Whether the writers are arrivals at a barrier, whose order does not matter."""
        self.value = -1
        """The number of the value that was stored; -1 if unknown."""
        self.writers: list[Step] = []
        """The last write, or several if their order does not matter."""
        self.before: list[Step] = []
        """Steps that each of the writers must follow, if their order does not matter."""
        self.readers: dict[int, Step] = {}
        """The last read of each connection since then."""
        self.seen: set[int] = set()
        """Connections that have seen the last write."""


def put_in_order(recording: Recording) -> None:
    """Note in each step the number of steps that it depends on, and the steps that depend on it."""
    places = order_effects(recording)
    _keep_each_connections_order(recording, places)
    events: list[tuple[int, bool, int, int, Step]] = []
    for step in recording.steps:
        if step.command.method in _WAITS:
            events.append((step.start, False, 0, step.number, step))
        if step.end >= 0:
            events.append((step.end, True, places.get(step.number, _LAST), step.number, step))
    events.sort(key=lambda event: event[:4])
    order = _Order(recording)
    for row, is_effect, _, _, step in events:
        if not is_effect:
            order.on_wait_begin(step, row)
        elif step.command.method in _WAITS:
            order.on_wait_end(step)
        else:
            order.on_effect(step, row)


def _keep_each_connections_order(recording: Recording, places: dict[int, int]) -> None:
    """Ensure that no request of a connection takes effect before the previous ones, as they are executed in order."""
    for connection in recording.connections:
        row = 0
        for step in connection.steps:
            if step.command.method not in _WAITS and step.end >= 0:
                if step.end < row or (step.end == row and step.command.reply is NO_REPLY):
                    step.end = row
                    places[step.number] = _LAST
                row = step.end


def _is_woken(step: Step) -> bool:
    """Return whether a write ended the wait for a key, not a cancel."""
    return step.command.method in ("wait", "fetch") and not (step.canceled and step.reply == [False])


class _Order:
    """The state of all keys between two steps."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._keys: dict[int, _Key] = {}
        self._names = any(step.command.method in _NAMES_ALL for step in recording.steps)
        """Whether any step counts or lists the keys."""

    def on_wait_begin(self, step: Step, row: int) -> None:
        """Note that a request that may wait is sent; for a barrier, the arrival is a write at this moment."""
        connection = step.connection.number
        for number in step.keys:
            key = self._key(number)
            if step.command.method == "barrier":
                self._on_arrival(step, key, row)
            elif connection not in key.seen and (
                key.removed or (step.command.method == "fetch" and not key.first_write)
            ):
                self._wait_for(step, key.writers, row)

    def on_wait_end(self, step: Step) -> None:
        """Note that a request that may wait was answered: its connection has seen the creation of the key."""
        for number in step.keys:
            key = self._key(number)
            if key.first_write:
                key.seen.add(step.connection.number)
            if step.command.method != "barrier" and (key.exists or not _is_woken(step)):
                key.readers[step.connection.number] = step  # otherwise the write that woke it comes later

    def on_effect(self, step: Step, row: int) -> None:
        method = step.command.method
        if method in _NAMES_ALL:
            self._on_read(step, self._key(_ALL), row)
        elif not step.command.flags & MUTATES:
            for number in step.keys:
                self._on_read(step, self._key(number), row)
        else:
            for number in step.keys:
                self._on_write(step, number, row)

    def _key(self, number: int) -> _Key:
        key = self._keys.get(number)
        if key is None:
            key = self._keys[number] = _Key()
        return key

    def _on_read(self, step: Step, key: _Key, row: int) -> None:
        connection = step.connection.number
        if connection not in key.seen:
            self._wait_for(step, key.writers, row)
            key.seen.add(connection)
        key.readers[connection] = step

    def _on_write(self, step: Step, number: int, row: int) -> None:
        key = self._key(number)
        connection = step.connection.number
        removes = step.command.method in _REMOVES
        if connection not in key.seen:
            self._wait_for(step, key.writers, row)
        self._wait_for(step, key.readers.values(), row)
        self._note_number(step, key)
        stores = not removes and self._stores(step)
        key.first_write = stores and not key.exists
        if key.first_write or removes:
            self._on_names_change(step, row)
        key.exists = stores or (key.exists and not removes)
        key.removed = removes
        key.barrier = False
        key.writers = [step]
        key.readers.clear()
        key.seen = {connection}

    def _stores(self, step: Step) -> bool:
        """Return whether a write stores something; a COMPARE_SET may not."""
        return step.command.method != "compare_set" or step.reply is None or step.reply[0] == step.fields[2]

    def _note_number(self, step: Step, key: _Key) -> None:
        """Infer the number in a hidden value from the sum of an ADD that follows."""
        method = step.command.method
        if method == "add" and key.value >= 0 and step.reply is not None:
            self._recording.values[key.value].integer = step.reply[0] - step.fields[1]
        key.value = -1
        if method == "set":
            key.value = step.fields[1]
        elif method == "compare_set" and step.reply is not None and not step.canceled:
            key.value = step.reply[0]

    def _on_arrival(self, step: Step, key: _Key, row: int) -> None:
        """Note an arrival at a barrier; the order of arrivals does not matter."""
        before = [*key.readers.values()] if key.barrier else [*key.writers, *key.readers.values()]
        self._add_writer(step, key, before, row)
        if not key.exists:
            self._on_names_change(step, row)
        key.first_write = key.exists = key.barrier = True
        key.removed = False

    def _on_names_change(self, step: Step, row: int) -> None:
        """Note that a key appears or disappears; the order of these changes does not matter."""
        if self._names:
            names = self._key(_ALL)
            self._add_writer(step, names, [*names.readers.values()], row)

    def _add_writer(self, step: Step, key: _Key, before: list[Step], row: int) -> None:
        """Add a write whose order among the last ones does not matter; `before` are steps since the previous ones."""
        if before:
            key.before = before
            key.writers = []
            key.readers.clear()
        self._wait_for(step, key.before, row)
        key.writers.append(step)
        key.seen = set()

    def _wait_for(self, step: Step, others: Any, row: int) -> None:
        """Make the step wait for others whose effect is known to precede this row."""
        for other in others:
            if other.connection is step.connection or not 0 <= other.end <= row:
                continue
            if other.dependents and other.dependents[-1] is step:
                continue
            other.precedes(step)
            other.fence = other.fence or other.command.reply is NO_REPLY
