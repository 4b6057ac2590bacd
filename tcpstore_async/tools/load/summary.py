"""Counts of a recording: requests and bytes by command, in total and per rank. Must not know output formats."""

from typing import Final

import msgspec

from ...wire.values import PREFIX
from .recording import FIELDS, REPLIES, Recording, Step

_REPLY_BYTES: Final = {"n": 8, "b": 1}
"""Bytes of a reply by kind of result."""


class CommandCount(msgspec.Struct):
    """Counts of one command."""

    command: str
    requests: int
    fewest: int
    """Requests of the rank that sent the fewest, but at least one."""
    most: int
    ranks: int
    """Ranks that sent any."""
    request_bytes: int
    reply_bytes: int


class Summary(msgspec.Struct):
    """Counts of a recording. Times are in seconds."""

    created: str
    values: bool
    complete: bool
    ranks: int
    connections: int
    requests: int
    seconds: float
    commands: list[CommandCount]
    """Counts by command, in order of first occurrence."""


def summarize(recording: Recording) -> Summary:
    counts: dict[str, CommandCount] = {}
    by_rank: dict[str, dict[int, int]] = {}
    for step in recording.steps:
        name = step.command.name
        count = counts.setdefault(name, CommandCount(name, 0, 0, 0, 0, 0, 0))
        count.requests += 1
        count.request_bytes += _request_bytes(step)
        count.reply_bytes += _reply_bytes(step)
        connection = step.connection
        rank = connection.process if connection.process >= 0 else -1 - connection.number
        ranks = by_rank.setdefault(name, {})
        ranks[rank] = ranks.get(rank, 0) + 1
    for name, ranks in by_rank.items():
        counts[name].fewest, counts[name].most = min(ranks.values()), max(ranks.values())
        counts[name].ranks = len(ranks)
    return Summary(
        recording.created,
        recording.values_included,
        recording.complete,
        recording.ranks,
        len(recording.connections),
        len(recording.steps),
        recording.seconds - recording.first,
        list(counts.values()),
    )


def _request_bytes(step: Step) -> int:
    recording = step.connection.recording
    total = 1
    if step.command.method in ("ping", "validate"):
        return total + 4
    for kind, field in zip(FIELDS[step.command.request], step.fields, strict=False):
        if kind == "n":
            total += 8
        elif kind == "k":
            total += PREFIX + len(recording.keys[field])
        elif kind == "v":
            total += PREFIX + recording.values[field].size
        elif kind == "l":
            total += PREFIX + sum(PREFIX + len(recording.keys[key]) for key in recording.lists[field])
        else:
            total += PREFIX + sum(
                2 * PREFIX + len(recording.keys[key]) + recording.values[value].size for key, value in field
            )
    return total


def _reply_bytes(step: Step) -> int:
    reply = step.reply
    if reply is None:
        return 0
    values = step.connection.recording.values
    kind = "b" if step.canceled else REPLIES[step.command.reply]
    if kind == "v":
        return PREFIX + values[reply[0]].size
    if kind == "w":
        return sum(PREFIX + values[value].size for value in reply[0])
    if kind == "c":
        return PREFIX + PREFIX * int(reply[0]) + int(reply[1])
    if kind == "p":
        return PREFIX + sum(PREFIX + values[value].size for value in reply[1:])
    if step.command.method == "ping":
        return 4
    return _REPLY_BYTES.get(kind, 1)
