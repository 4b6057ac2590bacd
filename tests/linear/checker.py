"""Tells whether a history of concurrent calls is linearizable: whether each may have happened at one moment between its
beginning and its end, so that all results are those of a sequential object.

The search is Wing and Gong's, with Lowe's memory of what was tried: it orders calls one by one, each of which had begun
before any other call that is not yet ordered ended, and goes back where a result does not fit. Objects with different
keys are independent, so each is a history of its own. This module must not know stores, clients or faults.

Invariant: `linearizable` is True if and only if there is such an order. A call whose outcome is unknown, as the client
gave up, may be in it at any time after its beginning, or nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

Step = Callable[[Any, str, tuple[Any, ...]], "tuple[Any, Any] | None"]
"""A sequential object: given its state, a method and arguments, returns the result and the next state, or None if the
call waits. States are hashable; None is the first."""


class Call(NamedTuple):
    """One call of one client."""

    client: str
    method: str
    given: tuple[Any, ...]
    result: Any
    began: int
    ended: int | None
    """None: the outcome is unknown, and the result means nothing."""


# Sequential objects

EMPTY = "empty"
"""What a pop returns that waits for nothing and finds nothing."""


def register(state: bytes | None, method: str, given: tuple[Any, ...]) -> tuple[Any, Hashable] | None:
    """A value, which is missing at first."""
    if method == "get":
        return None if state is None else (state, state)
    if method == "check":
        return state is not None, state
    if method == "set":
        return None, given[0]
    if method == "append":
        return None, (state or b"") + given[0]
    if method == "delete_key":
        return state is not None, None
    assert method == "compare_set", method
    expected, desired = given
    if (state or b"") == expected:
        return desired, desired
    return (expected if state is None else state), state


def counter(state: int | None, method: str, given: tuple[Any, ...]) -> tuple[Any, Hashable]:
    assert method == "add", method
    total = (state or 0) + given[0]
    return total, total


def queue(state: tuple[bytes, ...] | None, method: str, given: tuple[Any, ...]) -> tuple[Any, Hashable] | None:
    items = state or ()
    if method == "queue_push":
        return None, (*items, given[0])
    assert method == "queue_pop", method
    if items:
        return items[0], items[1:]
    waits = given[0]
    return None if waits else (EMPTY, items)


# The search


MOST = 2_000_000


class Undecided(Exception):
    """There are too many orders to try."""


def linearizable(calls: Sequence[Call], step: Step) -> bool:
    """Return whether these calls of one object have an order. Raises Undecided."""
    needs, taken = _of_queue(calls) if step is queue else ([0] * len(calls), frozenset())
    unknown = sorted((number for number, call in enumerate(calls) if call.ended is None), key=lambda n: calls[n].began)
    # Beginnings and ends in one linked list, in the order of time; an end is the number of its call, inverted.
    events = [
        event
        for number, call in enumerate(calls)
        if call.ended is not None
        for event in ((call.began, 0, number), (call.ended, 1, ~number))
    ]
    order = [number for _, _, number in sorted(events)]
    place = {number: at for at, number in enumerate(order, 1)}
    place.update({number: at for at, number in enumerate(unknown, len(order) + 2)})
    last = len(order) + 1
    following = list(range(1, last + 2))
    before = list(range(-1, last + 1))

    def unlink(number: int) -> None:
        at = place[number]
        following[before[at]] = following[at]
        before[following[at]] = before[at]

    def link(number: int) -> None:
        at = place[number]
        following[before[at]] = before[following[at]] = at

    left = len(order) // 2
    """Calls that have ended and have no place in the order yet."""
    done = 0
    """The calls that have one, as bits."""
    state: Any = None
    tried: set[tuple[int, Any]] = set()
    path: list[tuple[int, Any]] = []
    """The calls in order, each with the state before it."""
    at = following[0]
    while left:
        # What began before any other call ends may be next; of that, calls of unknown outcome last.
        if at < last and order[at - 1] >= 0:
            number = order[at - 1]
        else:
            if at <= last:
                end = at
                at = last + 1
            else:
                end = following[0]
                while order[end - 1] >= 0:
                    end = following[end]
            number = unknown[at - last - 1] if at - last <= len(unknown) else -1
            if number < 0 or calls[number].began > (calls[~order[end - 1]].ended or 0):
                if not path:
                    return False
                number, state = path.pop()
                done ^= 1 << number
                if calls[number].ended is not None:
                    link(~number)
                    link(number)
                    left += 1
                at = _next(place[number], last, following)
                continue
        call = calls[number]
        fits = not done & 1 << number and not needs[number] & ~done
        after = step(state, call.method, call.given) if fits else None
        if after is not None and call.ended is None:  # it must make a difference, and take nothing that another took
            fits = after[1] != state and (call.method != "queue_pop" or after[0] not in taken)
        elif after is not None:
            fits = after[0] == call.result
        if after is None or not fits or (done | 1 << number, after[1]) in tried:
            at = _next(at, last, following)
            continue
        path.append((number, state))
        done, state = done | 1 << number, after[1]
        tried.add((done, state))
        if len(tried) > MOST:
            raise Undecided
        if call.ended is not None:
            unlink(number)
            unlink(~number)
            left -= 1
        at = following[0]
    return True


def _next(at: int, last: int, following: list[int]) -> int:
    return following[at] if at < last else at + 1


NEVER = -1


def _of_queue(calls: Sequence[Call]) -> tuple[list[int], frozenset[Any]]:
    """Return for each call, as bits, which others must come before it; and the items that are known to be popped.

    If items are distinct, pushes happened in the order in which their items were popped, those behind whose items were
    not, unless a pop of unknown outcome took one; so orders that differ from that need not be tried. A push of unknown
    outcome whose item nobody popped need not be either: without it, every result is the same. Nor need pops of unknown
    outcome be tried in more than one order.
    """
    needs = [0] * len(calls)
    pops = 0
    for number in sorted(range(len(calls)), key=lambda number: calls[number].began):
        if calls[number].method == "queue_pop" and calls[number].ended is None:
            needs[number] = pops
            pops |= 1 << number
    pushes = {call.given[0]: number for number, call in enumerate(calls) if call.method == "queue_push"}
    if len(pushes) < sum(call.method == "queue_push" for call in calls):
        return needs, frozenset()
    popped = {call.result: call for call in calls if call.ended is not None and call.result in pushes}
    ends = sorted((call.ended, item) for item, call in popped.items())
    masks = list(accumulate([1 << pushes[item] for _, item in ends], or_, initial=0))
    for item, number in pushes.items():
        if item in popped:
            needs[number] = masks[bisect_left(ends, (popped[item].began, b""))]
        elif calls[number].ended is None:
            needs[number] = NEVER
        elif not pops:
            needs[number] = masks[-1]
    return needs, frozenset(popped)


def conserved(calls: Sequence[Call]) -> bool:
    """Return whether each item of a queue was popped once, or at most as often where the outcome of pops is unknown.

    What a client is given that is lost before it could confirm that returns to the front of the queue, while others pop
    what is behind it: with such clients, a queue is not linearizable, but this holds.
    """
    pushed = {call.given[0]: call for call in calls if call.method == "queue_push"}
    pops = [call for call in calls if call.method == "queue_pop"]
    popped = [call for call in pops if call.ended is not None and call.result != EMPTY]
    known = {call.result for call in popped}
    lost = [call for item, call in pushed.items() if call.ended is not None and item not in known]
    return (
        len(known) == len(popped)
        and all(call.result in pushed and pushed[call.result].began <= (call.ended or 0) for call in popped)
        and len(lost) <= sum(call.ended is None for call in pops)
    )


def shortest_failure(calls: Sequence[Call], step: Step) -> list[Call]:
    """Return the part of a history that shows that there is no order: up to the first result that fits none.

    What ended later counts as unknown. Calls without an effect are left out where there is no order without them.
    """
    ends = sorted(call.ended for call in calls if call.ended is not None)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if linearizable(_until(calls, ends[middle]), step):
            low = middle + 1
        else:
            high = middle
    kept = _until(calls, ends[low])
    for call in list(kept):
        rest = [one for one in kept if one is not call]
        if call.method in _READS and not linearizable(rest, step):
            kept = rest
    return sorted(kept, key=lambda call: call.began)


_READS = ("get", "check")


def _until(calls: Sequence[Call], now: int) -> list[Call]:
    begun = [call for call in calls if call.began <= now]
    return [call if call.ended is None or call.ended <= now else call._replace(ended=None) for call in begun]
