"""The checker of histories: verdicts that are known, the same as of trying all orders, and planted defects."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linear.checker import EMPTY, Call, Step, conserved, counter, linearizable, queue, register, shortest_failure

A, B, C = b"a", b"b", b"c"


def call(began: int, ended: int | None, method: str, *given: Any, gives: Any = None) -> Call:
    return Call(str(began), method, given, gives, began, ended)


LINEARIZABLE: dict[str, tuple[Step, list[Call]]] = {
    "nothing": (register, []),
    "a read beside a write may see it": (
        register,
        [call(0, 1, "set", A), call(2, 9, "set", B), call(3, 4, "get", gives=B), call(5, 6, "get", gives=B)],
    ),
    "a read beside a write need not see it": (
        register,
        [call(0, 1, "set", A), call(2, 9, "set", B), call(3, 4, "get", gives=A), call(5, 6, "get", gives=B)],
    ),
    "two writes beside each other have either order": (
        register,
        [call(0, 9, "set", A), call(1, 8, "set", B), call(10, 11, "get", gives=A)],
    ),
    "a write of unknown outcome is seen late": (
        register,
        [call(0, 1, "set", A), call(2, None, "set", B), call(3, 4, "get", gives=A), call(50, 51, "get", gives=B)],
    ),
    "a write of unknown outcome is never seen": (
        register,
        [call(0, 1, "set", A), call(2, None, "set", B), call(50, 51, "get", gives=A)],
    ),
    "a get waits for the value": (register, [call(0, 9, "get", gives=A), call(5, 8, "set", A)]),
    "one of two swaps succeeds": (
        register,
        [
            call(0, 1, "set", A),
            call(2, 9, "compare_set", A, B, gives=B),
            call(3, 8, "compare_set", A, C, gives=B),
            call(10, 11, "get", gives=B),
        ],
    ),
    "a swap of a missing value": (
        register,
        [call(0, 1, "compare_set", A, B, gives=A), call(2, 3, "compare_set", b"", B, gives=B)],
    ),
    "appended pieces, deleted": (
        register,
        [
            call(0, 9, "append", A),
            call(1, 8, "append", B),
            call(10, 11, "get", gives=B + A),
            call(12, 13, "delete_key", gives=True),
            call(14, 15, "check", gives=False),
        ],
    ),
    "additions beside each other": (counter, [call(0, 9, "add", 1, gives=3), call(1, 8, "add", 2, gives=2)]),
    "an addition of unknown outcome counts": (counter, [call(0, None, "add", 1), call(5, 6, "add", 1, gives=2)]),
    "items leave in the order of pushes": (
        queue,
        [
            call(0, 1, "queue_push", A),
            call(2, 3, "queue_push", B),
            call(4, 9, "queue_pop", True, gives=B),
            call(5, 8, "queue_pop", True, gives=A),
        ],
    ),
    "a pop waits": (
        queue,
        [
            call(0, 9, "queue_pop", True, gives=A),
            call(1, 2, "queue_pop", False, gives=EMPTY),
            call(5, 8, "queue_push", A),
        ],
    ),
    "a pop of unknown outcome took an item": (
        queue,
        [
            call(0, 1, "queue_push", A),
            call(2, 3, "queue_push", B),
            call(4, None, "queue_pop", True),
            call(5, 6, "queue_pop", True, gives=B),
            call(7, 8, "queue_pop", False, gives=EMPTY),
        ],
    ),
}

NOT_LINEARIZABLE: dict[str, tuple[Step, list[Call]]] = {
    "a stale read": (register, [call(0, 1, "set", A), call(2, 3, "set", B), call(4, 5, "get", gives=A)]),
    "a read of what nobody wrote": (register, [call(0, 1, "set", A), call(2, 3, "get", gives=B)]),
    "a value is seen, then the one before": (
        register,
        [call(0, 1, "set", A), call(2, 9, "set", B), call(3, 4, "get", gives=B), call(5, 6, "get", gives=A)],
    ),
    "two readers see two writes in different orders": (
        register,
        [
            call(0, 20, "set", A),
            call(1, 19, "set", B),
            call(2, 3, "get", gives=A),
            call(4, 5, "get", gives=B),
            call(6, 7, "get", gives=A),
        ],
    ),
    "an acknowledged write is lost": (register, [call(0, 1, "set", A), call(2, 3, "check", gives=False)]),
    "both of two swaps succeed": (
        register,
        [call(0, 1, "set", A), call(2, 9, "compare_set", A, B, gives=B), call(3, 8, "compare_set", A, C, gives=C)],
    ),
    "a piece is appended twice": (register, [call(0, 1, "append", A), call(2, 3, "get", gives=A + A)]),
    "a write of unknown outcome is seen before it began": (
        register,
        [call(0, 1, "set", A), call(2, 3, "get", gives=B), call(4, None, "set", B)],
    ),
    "a lost update": (counter, [call(0, 9, "add", 1, gives=1), call(1, 8, "add", 1, gives=1)]),
    "an addition is executed twice": (counter, [call(0, 1, "add", 1, gives=1), call(2, 3, "add", 1, gives=3)]),
    "totals against the order of time": (counter, [call(0, 1, "add", 1, gives=2), call(2, 3, "add", 1, gives=1)]),
    "an item is popped twice": (
        queue,
        [
            call(0, 1, "queue_push", A),
            call(2, 9, "queue_pop", True, gives=A),
            call(3, 8, "queue_pop", True, gives=A),
        ],
    ),
    "items leave in another order": (
        queue,
        [call(0, 1, "queue_push", A), call(2, 3, "queue_push", B), call(4, 5, "queue_pop", True, gives=B)],
    ),
    "an item is lost": (queue, [call(0, 1, "queue_push", A), call(2, 3, "queue_pop", False, gives=EMPTY)]),
    "an item is popped before it is pushed": (
        queue,
        [call(0, 1, "queue_pop", False, gives=A), call(2, 3, "queue_push", A)],
    ),
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_linearizable(name: str) -> None:
    step, calls = LINEARIZABLE[name]
    assert linearizable(calls, step)


@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_not_linearizable(name: str) -> None:
    step, calls = NOT_LINEARIZABLE[name]
    assert not linearizable(calls, step)
    assert not linearizable(shortest_failure(calls, step), step)


def test_shortest_failure() -> None:
    """What comes later, and reads that do not matter, are left out."""
    stale = [call(0, 1, "set", A), call(2, 3, "set", B), call(5, 6, "get", gives=A)]
    beside = call(4, 30, "set", C)
    calls = [*stale, beside, call(0, 1, "check", gives=True), call(7, 8, "get", gives=B), call(9, 10, "set", A)]
    assert shortest_failure(calls, register) == [*stale[:2], beside._replace(ended=None), stale[2]]


PUSHES = [call(0, 1, "queue_push", A), call(2, 3, "queue_push", B)]
OUT_OF_ORDER = [call(4, 5, "queue_pop", False, gives=B), call(6, 7, "queue_pop", False, gives=A)]
UNKNOWN = call(3, None, "queue_pop", True)


@pytest.mark.parametrize(
    ("pops", "verdict"),
    [
        (OUT_OF_ORDER, True),
        ([*OUT_OF_ORDER, UNKNOWN], True),
        ([OUT_OF_ORDER[0], UNKNOWN], True),
        ([OUT_OF_ORDER[0], call(8, 9, "queue_pop", False, gives=EMPTY)], False),
        ([*OUT_OF_ORDER, call(8, 9, "queue_pop", False, gives=A)], False),
        ([*OUT_OF_ORDER, call(8, 9, "queue_pop", False, gives=C)], False),
        ([OUT_OF_ORDER[0]._replace(began=0, ended=1), OUT_OF_ORDER[1]], False),
    ],
)
def test_conserved(pops: list[Call], verdict: bool) -> None:
    assert conserved([*PUSHES, *pops]) == verdict


# The same as by trying all orders

VALUES = st.sampled_from([A, B])
REGISTER = st.one_of(
    st.tuples(st.just("set"), st.tuples(VALUES), st.none()),
    st.tuples(st.just("append"), st.tuples(VALUES), st.none()),
    st.tuples(st.just("get"), st.just(()), VALUES | st.just(A + B)),
    st.tuples(st.just("check"), st.just(()), st.booleans()),
    st.tuples(st.just("delete_key"), st.just(()), st.booleans()),
    st.tuples(st.just("compare_set"), st.tuples(VALUES, VALUES), VALUES),
)
COUNTER = st.tuples(st.just("add"), st.tuples(st.integers(1, 2)), st.integers(1, 6))
ITEMS = st.sampled_from([A, B, C])
QUEUE = st.one_of(
    st.tuples(st.just("queue_push"), st.tuples(ITEMS), st.none()),
    st.tuples(st.just("queue_pop"), st.just((False,)), ITEMS | st.just(EMPTY)),
    st.tuples(st.just("queue_pop"), st.just((True,)), ITEMS),
)
TIMES = st.tuples(st.integers(0, 12), st.none() | st.integers(0, 6))


def tried(calls: list[Call], step: Step) -> bool:
    """Return whether any order of all calls that ended, and any of the others, is right."""
    ended = [one for one in calls if one.ended is not None]
    unknown = [one for one in calls if one.ended is None]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            if any(right(order, step) for order in itertools.permutations([*ended, *some])):
                return True
    return False


def right(order: tuple[Call, ...], step: Step) -> bool:
    state = None
    for number, one in enumerate(order):
        if any(later.ended is not None and later.ended < one.began for later in order[number + 1 :]):
            return False
        after = step(state, one.method, one.given)
        if after is None or (one.ended is not None and after[0] != one.result):
            return False
        state = after[1]
    return True


@pytest.mark.parametrize(("step", "methods"), [(register, REGISTER), (counter, COUNTER), (queue, QUEUE)])
def test_the_same_as_all_orders(step: Step, methods: st.SearchStrategy[tuple[str, tuple[Any, ...], Any]]) -> None:
    verdicts = set()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(methods, TIMES), max_size=5))
    def same(drawn: list[tuple[tuple[str, tuple[Any, ...], Any], tuple[int, int | None]]]) -> None:
        calls = [
            Call(str(number), method, arguments, result, began, None if lasted is None else began + lasted)
            for number, ((method, arguments, result), (began, lasted)) in enumerate(drawn)
        ]
        verdict = tried(calls, step)
        assert linearizable(calls, step) == verdict
        verdicts.add(verdict)

    same()
    assert verdicts == {True, False}


# Planted defects


class Object:
    """A sequential object, whose calls happen at one moment."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state: Any = None

    def __call__(self, method: str, given: tuple[Any, ...]) -> Any:
        after = self.step(self.state, method, given)
        if after is None:
            return None
        result, self.state = after
        return result


class Stale(Object):
    """A read now and then returns what was read before."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.reads = 0
        self.seen: Any = None

    def __call__(self, method: str, given: tuple[Any, ...]) -> Any:
        if method != "get":
            return super().__call__(method, given)
        self.reads += 1
        if self.reads % 10:
            self.seen = super().__call__(method, given)
        return self.seen


class Forgetful(Object):
    """Every so often, what changes the state is answered, and lost."""

    calls = 0

    def __call__(self, method: str, given: tuple[Any, ...]) -> Any:
        before = self.state
        result = super().__call__(method, given)
        self.calls += 1
        if self.calls % 20 == 0:
            self.state = before
        return result


class Twice(Object):
    """Every so often, a call is executed again, as by a client that sends it again."""

    calls = 0

    def __call__(self, method: str, given: tuple[Any, ...]) -> Any:
        self.calls += 1
        if self.calls % 20 == 0:
            super().__call__(method, given)
        return super().__call__(method, given)


class Returning(Object):
    """Every so often, a popped item returns, to the end of the queue."""

    calls = 0

    def __call__(self, method: str, given: tuple[Any, ...]) -> Any:
        result = super().__call__(method, given)
        self.calls += 1
        if method == "queue_pop" and result != EMPTY and self.calls % 5 == 0:
            self.state = (*self.state, result)
            return EMPTY
        return result


def random_call(step: Step, rng: random.Random, number: int) -> tuple[str, tuple[Any, ...]]:
    value = b"%d" % number
    if step is counter:
        return "add", (rng.randrange(3),)
    if step is queue:
        return rng.choice([("queue_push", (value,)), ("queue_pop", (False,)), ("queue_pop", (False,))])
    expected = b"%d" % rng.randrange(number - 5, number) if number > 5 else b""
    return rng.choice(
        [("set", (value,)), ("get", ()), ("get", ()), ("append", (b"+",)), ("compare_set", (expected, value))]
    )


def history(target: Object, seed: int, clients: int = 5, count: int = 150) -> list[Call]:
    """Return a history of clients that call an object: each call takes effect somewhere between its ends, or never."""
    rng = random.Random(seed)
    calls: list[Call] = [call(0, 1, "set", b"first")] if target.step is register else []
    for one in calls:
        target(one.method, one.given)
    now, number = 2, 0
    pending: dict[int, list[Any]] = {}
    """For each client: method, arguments, when it began, whether it has happened, the result."""
    while number < count or pending:
        now += 1
        client = rng.randrange(clients) if number < count else rng.choice(list(pending))
        if client not in pending:
            number += 1
            pending[client] = [*random_call(target.step, rng, number), now, False, None]
            continue
        method, given, began, happened, result = pending[client]
        if happened:
            del pending[client]
            calls.append(Call(str(client), method, given, result, began, now))
        elif rng.random() < 0.02:  # gives up; it may happen nevertheless, later
            del pending[client]
            calls.append(Call(str(client), method, given, None, began, None))
            pending[clients + number] = [method, given, began, False, "late"]
        else:
            late = result == "late"
            result = target(method, given) if not late or rng.random() < 0.5 else None
            if late:
                del pending[client]
            else:
                pending[client][3:] = [True, result]
    return calls


@pytest.mark.parametrize("step", [register, counter, queue])
def test_a_correct_object(step: Step) -> None:
    for seed in range(30):
        assert linearizable(history(Object(step), seed), step), seed


@pytest.mark.parametrize(
    ("defect", "step"),
    [
        (Stale, register),
        (Forgetful, register),
        (Forgetful, counter),
        (Forgetful, queue),
        (Twice, register),
        (Twice, counter),
        (Twice, queue),
        (Returning, queue),
    ],
)
def test_a_planted_defect_is_found(defect: type[Object], step: Step) -> None:
    found = [seed for seed in range(30) if not linearizable(history(defect(step), seed), step)]
    assert len(found) >= 10
    calls = history(defect(step), found[0])
    least = shortest_failure(calls, step)
    assert len(least) < len(calls)
    assert not linearizable(least, step)
