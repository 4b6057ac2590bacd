"""Why a call has timed out: the question to the server, and what follows from its answer in the error.

It knows the calls that can be explained, and their texts. It must not know connections or deadlines, nor draw
conclusions (`diagnosis/`).

Invariant: the text begins with PyTorch's, unchanged. Without an answer, or if the answer adds nothing, it is PyTorch's.
"""

from typing import TYPE_CHECKING, Final

from ..base.errors import StoreTimeoutError, counted
from ..base.keys import caller_key, readable
from ..session.identity import QUESTIONS, Identity
from ..wire.commands import BY_METHOD, JOINS_KEY
from ..wire.values import PREFIX, Framed, pack, unpack
from .requests import Request

if TYPE_CHECKING:
    from ..diagnosis.missing import Elsewhere
    from ..diagnosis.nearest import Near

_WAIT: Final = BY_METHOD["wait"]
_FETCH: Final = BY_METHOD["fetch"]
_BARRIER: Final = BY_METHOD["barrier"]
_WAIT_COUNT: Final = BY_METHOD["wait_count"]
_MISSING: Final = BY_METHOD["missing"]

MOST_SECONDS: Final = 1.0
"""Timeout of the question in seconds, unless the call had less."""

_LEAST_SECONDS: Final = 0.1
"""Shortest timeout that is explained; a shorter one is rather a check whether a key exists."""

_MOST_KEYS: Final = 1000
"""Keys of one question."""

_MOST_BYTES: Final = 65_536
"""Bytes of these keys."""

_MOST_DIGITS: Final = 9
"""Digits of the expected count of a barrier that is explained."""

_LISTED: Final = 100
"""Missing keys in the error's attributes."""

_DESCRIBED: Final = 4
"""Missing keys of which these name similar ones."""

_LISTED_RANKS: Final = 256
"""Missing ranks in the attributes."""

_LISTED_ELSEWHERE: Final = 8
"""Ranks whose activity they describe."""

_NAMED: Final = 3
"""Keys that the text names."""

_NAMED_RANKS: Final = 16
"""Missing ranks that the text names."""

_NAMED_ELSEWHERE: Final = 4
"""Ranks that wait elsewhere and are named with their calls."""

_MINUTE: Final = 60
_HOUR: Final = 3600


def question(request: Request, seconds: float, identity: Identity | None) -> Request | None:
    """Return the question about a call that has timed out after this many seconds; None if the server cannot say."""
    if identity is None or identity.extension < QUESTIONS or seconds < _LEAST_SECONDS:
        return None
    from ..diagnosis.patterns import opened_counter  # these take a tenth of the time in which a rank imports a store

    command, fields = request
    nothing = pack(b"")
    pairs: list[tuple[bytes, Framed]] = []
    if command is _BARRIER or command is _WAIT_COUNT:
        if 0 < fields[1] < 10**_MOST_DIGITS and fields[0] != JOINS_KEY:
            pairs.append((fields[0], pack(b"%d" % fields[1])))
    elif command is _FETCH:
        pairs.append((fields[0], nothing))
    elif command is _WAIT:
        size = 0
        for key in fields[0][:_MOST_KEYS]:
            size += len(key) + 2 * PREFIX
            if size > _MOST_BYTES:
                break
            pairs.append((key, nothing))
        if len(fields[0]) == 1 and (counter := opened_counter(readable(fields[0][0]))):
            pairs.append((counter.encode(), pack(b"0")))
    return (_MISSING, (pairs,)) if pairs else None


def explain(error: StoreTimeoutError, asked: Request, answer: Framed) -> None:
    """Add what follows from the answer to the error of the call. Raises ProtocolError if it is invalid."""
    from ..diagnosis.facts import read_answer
    from ..diagnosis.missing import find_pending
    from ..diagnosis.nearest import find_similar

    keys: list[str] = []
    counter, expected = "", 0
    for key, said in asked[1][0]:
        if len(said) > PREFIX:
            counter, expected = readable(key), int(unpack(said))
        else:
            keys.append(readable(key))
    facts = read_answer(unpack(answer), keys)
    ranks, pending = find_pending(facts, keys, counter, expected)
    error.missing_keys = [caller_key(key) for key in facts.absent[:_LISTED]]
    most_similar: list[str] = []
    for key, near in find_similar(facts.similar, ranks, facts.absent[:_DESCRIBED]).items():
        if near:
            error.nearest_keys[caller_key(key)] = [(caller_key(one.key), one.age, one.by or "") for one in near]
            most_similar.append(_near(near[0]))
    more = 0
    if pending is not None and (pending.of_job or not pending.missing_ranks):
        count = None if pending.expected is None else pending.expected - pending.arrived
        error.missing_ranks = pending.missing_ranks[:_LISTED_RANKS]
        more = (count or 0) - len(error.missing_ranks)
        found = [
            (one.rank, f"{_name(one)} {one.does} (last request {_duration(one.since)} ago)")
            for one in pending.elsewhere
        ]
        found += [(one.rank, f"{_name(one)} {one.does}") for one in pending.left]
        if count is None or len(found) <= count:  # else some of them need not come
            found.sort(key=lambda one: (one[0] is None, one[0] or 0))
            error.elsewhere = [text for _, text in found[:_LISTED_ELSEWHERE]]
    said = []
    if expected:
        arrived = facts.counters[counter].value if counter in facts.counters else expected
        if arrived < expected:
            said.append(f"{arrived:,} of {expected:,} have arrived")
    elif facts.absent and (len(facts.absent) < len(keys) or most_similar or error.missing_ranks or error.elsewhere):
        said = _keys(facts.absent, len(keys), most_similar[:_NAMED])
    said += [str(facts.server.get("why_held", "")), ranks_text(error, more), *error.elsewhere[:_NAMED_ELSEWHERE]]
    said = [one for one in said if one]
    if said:
        text = str(error)
        error.args = (f"{text}{'' if text.endswith('.') else '.'} {'; '.join(said)}",)


def _keys(absent: list[str], asked: int, most_similar: list[str]) -> list[str]:
    """Describe missing keys."""
    named = ", ".join([repr(caller_key(name)) for name in absent[:_NAMED]])
    named += ", …" if len(absent) > _NAMED else ""
    said = [f"{len(absent):,} of {counted(asked, 'key')} missing: {named}"]
    if most_similar:
        said.append(f"most similar: {', '.join(dict.fromkeys(most_similar))}")
    return said


def _near(near: "Near") -> str:
    written = "" if near.age is None else f" written {_duration(near.age)} ago"
    return f"{caller_key(near.key)!r}{written}{'' if near.by is None else f' by {near.by}'}"


def _name(one: "Elsewhere") -> str:
    where = one.host if one.pid is None else f"{one.host}, pid {one.pid}"
    return where if one.rank is None else f"rank {one.rank} ({where})"


def ranks_text(error: StoreTimeoutError, more: int = 0) -> str:
    """Return the missing ranks of an error, and `more` that are not listed in it, as a part of its text."""
    ranks = error.missing_ranks
    more += len(ranks) - _NAMED_RANKS
    listed = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (f" and {more:,} more" if more > 0 else "")
    return f"missing ranks: {listed}" if ranks else ""


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
