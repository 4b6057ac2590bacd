"""The order in which overlapping requests to one key were executed, inferred from their replies.

A recorder sees when requests and replies pass, not when requests are executed. Where two overlap, the right order is
the one that explains the replies: a sum, the value that a GET found, whether a COMPARE_SET stored. Knows what commands
do to one key; leaves out requests that wait.

The order is found in one pass: of the possible next requests, a read whose reply fits the current state of the key is
taken before any write, which might make it unfit. Without such a read it is the first request that fits, or, if none
does, the one that was answered first.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Any, Final

from ...wire.commands import MUTATES
from .recording import Recording, Step

State = tuple[str, int] | None
"""What a key holds: None if it is missing; otherwise ("value", its number), ("counter", the number), or unknown."""

_UNKNOWN: Final = ("unknown", 0)

Window = tuple[int, int]

_NEVER: Final = 1 << 60


def order_effects(recording: Recording) -> dict[int, int]:
    """Set `end` of steps on single keys to rows at which they can have been executed, in the order that fits.

    Returns the place of each of these steps among the steps of its row, keyed by the step's number.
    """
    windows = _windows(recording)
    by_key: dict[int, list[Step]] = {}
    excluded: set[int] = set()
    for step in recording.steps:
        if step.end < 0:
            continue
        for key in step.keys:
            if step.command.method in _OUTCOMES:
                by_key.setdefault(key, []).append(step)
            elif step.command.flags & MUTATES:
                excluded.add(key)
    places: dict[int, int] = {}
    for key, steps in by_key.items():
        if key not in excluded:
            _place(_sequence(key, steps, windows), windows, places)
    return places


def _windows(recording: Recording) -> dict[int, Window]:
    """Return the first and last row at which each step can have been executed.

    The last row is that of its reply or, without one, of the connection's next reply.
    """
    windows: dict[int, Window] = {}
    for connection in recording.connections:
        row = _NEVER
        for step in reversed(connection.steps):
            if step.reply is not None and step.end >= 0:
                row = min(row, step.end)
            windows[step.number] = step.start, row
    return windows


def _sequence(key: int, steps: list[Step], windows: dict[int, Window]) -> list[Step]:
    """Return the steps on a key in the order that fits their replies."""
    waiting = sorted(steps, key=lambda step: windows[step.number][0])
    queues: dict[int, deque[Step]] = {}
    """Steps that may be next, and the later ones of their connections."""
    heads: list[tuple[int, int, Step]] = []
    bounds: list[tuple[int, int]] = []
    done: set[int] = set()
    found: list[Step] = []
    state: State = None
    at = 0
    while len(found) < len(waiting):
        while bounds and bounds[0][1] in done:
            heappop(bounds)
        while at < len(waiting) and (not bounds or windows[waiting[at].number][0] < bounds[0][0]):
            step = waiting[at]
            at += 1
            heappush(bounds, (windows[step.number][1], step.number))
            queue = queues.setdefault(step.connection.number, deque())
            queue.append(step)
            if len(queue) == 1:
                heappush(heads, (step.end, step.number, step))
        step, state = _next(heads, key, state)
        done.add(step.number)
        found.append(step)
        queue = queues[step.connection.number]
        queue.popleft()
        if queue:
            heappush(heads, (queue[0].end, queue[0].number, queue[0]))
    return found


def _next(heads: list[tuple[int, int, Step]], key: int, state: State) -> tuple[Step, State]:
    """Take from a heap the first read that fits, else the first step that fits, else the first."""
    skipped: list[tuple[int, int, Step]] = []
    chosen = heads[0]
    found, after = False, state
    while heads:
        entry = heappop(heads)
        step = entry[2]
        skipped.append(entry)
        if found and step.command.flags & MUTATES:
            continue
        fits, result = _OUTCOMES[step.command.method](step, key, state)
        if fits or len(skipped) == 1:
            chosen, after = entry, result
        if fits and (not step.command.flags & MUTATES or state == _UNKNOWN):
            break
        found = found or fits
    for entry in skipped:
        if entry is not chosen:
            heappush(heads, entry)
    return chosen[2], after


def _place(sequence: list[Step], windows: dict[int, Window], places: dict[int, int]) -> None:
    """Give the steps ascending rows: as late as possible if they have a reply, else as early as possible.

    A step with several keys keeps the row from the first of them.
    """
    rows: list[int] = []
    row = _NEVER
    for step in reversed(sequence):
        row = min(row, windows[step.number][1])
        rows.append(row)
    rows.reverse()
    row = place = 0
    for step, last in zip(sequence, rows, strict=True):
        row = last if step.has_reply else max(row, min(windows[step.number][0], last))
        place = places.get(step.number, place + 1)  # one placed by another key still precedes the rest here
        if step.number not in places:
            step.end = row
            places[step.number] = place
            windows[step.number] = row, row


# Outcomes: whether the reply of a command fits the state of a key, and the state after it


def _value(step: Step, number: int) -> Any:
    return step.connection.recording.values[number]


def _add(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    before = step.reply[0] - step.fields[1]
    after = ("counter", step.reply[0])
    if state is None:
        return before == 0, after
    kind, number = state
    if kind == "value":
        content = _value(step, number).content
        return content is None or content.strip() == b"%d" % before, after
    return kind != "counter" or number == before, after


def _set(step: Step, key: int, state: State) -> tuple[bool, State]:
    return True, ("value", step.fields[1])


def _multi_set(step: Step, key: int, state: State) -> tuple[bool, State]:
    return True, ("value", next(value for name, value in reversed(step.fields[0]) if name == key))


def _append(step: Step, key: int, state: State) -> tuple[bool, State]:
    return True, _UNKNOWN


def _delete(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    return state == _UNKNOWN or (state is not None) == bool(step.reply[0]), None


def _check(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    present = bool(step.reply[0])
    if len(step.keys) > 1 and not present:
        return True, state  # another key may be the missing one
    fits = state == _UNKNOWN or (state is not None) == present
    return fits, (state if fits and state != _UNKNOWN else _UNKNOWN if present else None)


def _finds(step: Step, state: State, found: int) -> tuple[bool, State]:
    """Return the outcome of a read that returned value `found`."""
    value = _value(step, found)
    after = ("value", found) if value.size else state
    if state is None:
        return value.size == 0, after
    kind, number = state
    if kind == "value":
        return number == found, after
    if kind == "counter":
        text = b"%d" % number
        return (value.size == len(text) if value.content is None else value.content == text), state
    return True, after


def _get(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    return _finds(step, state, step.reply[0])


def _multi_get(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    return _finds(step, state, step.reply[0][step.keys.index(key)])


def _compare_set(step: Step, key: int, state: State) -> tuple[bool, State]:
    assert step.reply is not None
    found = step.reply[0]
    _, expected, desired = step.fields
    if state is None:
        stores = _value(step, expected).size == 0
        return found == (desired if stores else expected), ("value", desired) if found == desired else None
    kind, number = state
    if kind != "value":
        return True, ("value", found)
    return found == (desired if number == expected else number), ("value", found)


_OUTCOMES: Final = {
    "set": _set,
    "add": _add,
    "get": _get,
    "check": _check,
    "append": _append,
    "delete_key": _delete,
    "compare_set": _compare_set,
    "multi_get": _multi_get,
    "multi_set": _multi_set,
}
