"""Why a call has timed out: the question to the server, and its answer in the error.

It knows the calls that can be explained and the text of an answer; it must not know connections or deadlines.

Invariant: the text begins with PyTorch's, unchanged. Without an answer, or if the answer adds nothing, it is PyTorch's.
"""

from typing import Final

from ..base.errors import StoreTimeoutError, counted
from ..base.keys import caller_key, readable
from ..observe.missing_reply import Elsewhere, Near, Report, decode_report
from ..session.identity import QUESTIONS, Identity
from ..wire.commands import BY_METHOD, JOINS_KEY
from ..wire.values import PREFIX, Framed, pack, unpack
from .requests import Request

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
            if size > _MOST_BYTES and pairs:
                break
            pairs.append((key, nothing))
    return (_MISSING, (pairs,)) if pairs else None


def explain(error: StoreTimeoutError, asked: Request, answer: Framed) -> None:
    """Add the answer to the error of the call. Raises ProtocolError if it is invalid."""
    report = decode_report(unpack(answer))
    pairs = asked[1][0]
    names = [_shown(key) for key, _ in pairs]
    for absent in report.keys:
        if not 0 <= absent.index < len(names):
            continue
        name = names[absent.index]
        error.missing_keys.append(name)
        if absent.nearest:
            near = [(caller_key(one.key), one.age, "" if one.by is None else str(one.by)) for one in absent.nearest]
            error.nearest_keys[name] = near
    error.missing_ranks = report.ranks
    error.elsewhere = [_elsewhere(one) for one in report.elsewhere]
    expected = int(unpack(pairs[-1][1]) or b"0")
    said = _arrivals(report, expected) if expected else _keys(error, report, len(pairs))
    said += [ranks_text(error, report.more), *error.elsewhere[:_NAMED_ELSEWHERE]]
    said = [one for one in said if one]
    if said:
        text = str(error)
        error.args = (f"{text}{'' if text.endswith('.') else '.'} {'; '.join(said)}",)


def _arrivals(report: Report, expected: int) -> list[str]:
    if report.arrived is None or report.arrived >= expected:
        return []
    return [f"{report.arrived:,} of {expected:,} have arrived"]


def _keys(error: StoreTimeoutError, report: Report, asked: int) -> list[str]:
    """Describe missing keys, if that adds to PyTorch's text."""
    near = [one for absent in report.keys for one in absent.nearest[:1]][:_NAMED]
    if not report.missing or (report.missing == asked and not near and not report.ranks):
        return []
    named = ", ".join([repr(name) for name in error.missing_keys[:_NAMED]])
    named += ", …" if report.missing > _NAMED else ""
    said = [f"{report.missing:,} of {counted(asked, 'key')} missing: {named}"]
    if near:
        said.append(f"most similar: {', '.join(dict.fromkeys([_near(one) for one in near]))}")
    return said


def _near(near: Near) -> str:
    written = "" if near.age is None else f" written {_duration(near.age)} ago"
    return f"{caller_key(near.key)!r}{written}{'' if near.by is None else f' by {near.by}'}"


def _elsewhere(one: Elsewhere) -> str:
    return f"{one.who} {one.does}" + ("" if one.since is None else f" (last request {_duration(one.since)} ago)")


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


def _shown(key: bytes) -> str:
    return caller_key(readable(key))
