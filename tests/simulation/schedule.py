"""Schedules, chosen by a seed, and how they run.

A schedule is the size of its world and a list of steps, see `world`.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from replaying import replayed
from simulation.world import LEASED, Step, World

KEYS = [b"/a", b"/b", b"/n"]
QUEUES = [b"/q", b"/r"]
VALUES = [b"", b"1", b"x" * 9]
MANY = [[*KEYS, KEYS[0]], [*KEYS[:2], QUEUES[0], KEYS[1]], [*KEYS, QUEUES[0]]]
"""Key lists long enough to be shared."""

CALLS: list[tuple[int, str, str]] = [
    # weight, program, fields: k key, K keys, M many keys, v value, n number, q queue, l queue of leases, w world size
    (4, "set", "kv"),
    (2, "add", "cn"),
    (2, "compare_set", "kvv"),
    (1, "append", "kv"),
    (1, "check", "K"),
    (4, "wait", "K"),
    (2, "wait", "M"),
    (1, "check", "M"),
    (2, "multi_get", "M"),
    (1, "multi_get_when_there", "M"),
    (2, "delete_key", "k"),
    (1, "delete_key", "c"),
    (1, "multi_set", "P"),
    (1, "multi_get_when_there", "K"),
    (3, "get_when_there", "k"),
    (2, "fetch", "k"),
    (1, "fetch", "q"),
    (2, "wait_count", "cn"),
    (2, "barrier", "bw"),
    (8, "push", "q"),
    (2, "pop", "q"),
    (8, "pop_when_there", "q"),
    (8, "push", "l"),
    (3, "lease", "l"),
    (10, "lease_later", "l"),
    (1, "wait", "L"),
    (2, "join", ""),
    (1, "depart", ""),
    (1, "queue_len", "q"),
    (1, "wait", "Q"),
    (1, "num_keys", ""),
    (1, "list_keys", ""),
    (1, "ping", "n"),
]

AGENT_CALLS = {"agent": 60, "beat": 24, "describe": 3, "give_up": 3, "close": 1, "end": 2}
"""Weights of what the agents of an elastic job do."""

WEIGHTS = {
    "call": 30,
    "go": 30,
    "up": 10,
    "down": 8,
    "quit": 8,
    "close": 2,
    "reset": 2,
    "drop": 2,
    "old": 5,
    "doze": 3,
    "read": 3,
}


class Schedule(NamedTuple):
    """A world and its steps."""

    clients: int
    soft: int
    """The server's limit of unsent bytes."""
    pipelines: int
    """One bit per client."""
    steps: list[Step]


_NAMES = [name for _, name, _ in CALLS]
_FIELDS = [fields for _, _, fields in CALLS]
_CALL_WEIGHTS = [weight for weight, _, _ in CALLS]


def chosen(seed: int) -> Schedule:
    """Return the schedule of a seed. Every eighth has agents only, which achieve little among other calls."""
    rng = random.Random(seed)
    if seed % 8 == 7:
        return _agents(rng)
    clients = rng.choice((2, 2, 3, 3, 4, 5))
    soft = rng.choice((0, 20, 1 << 20, 1 << 20))
    pipelines = rng.randrange(1 << clients)
    weights = [weight * rng.choice((0, 1, 1, 3)) for weight in WEIGHTS.values()]
    weights[0], weights[1] = 30, rng.choice((10, 30))
    calls = [weight * rng.choice((0, 0, 1, 4)) for weight in _CALL_WEIGHTS]
    if rng.random() < 0.4:  # mostly about a queue, whose items wander furthest
        queue = rng.choice("ql")
        calls = [10 * weight * (fields == queue) + weight % 2 for weight, _, fields in CALLS]
    elif rng.random() < 0.3:  # mostly about lists of keys
        calls = [weight * (10 if fields == "M" else name in ("set", "delete_key")) for weight, name, fields in CALLS]
    elif rng.random() < 0.1:  # mostly about counters
        calls = [weight * (fields[:1] == "c") for weight, _, fields in CALLS]
    calls[0] += 1
    count = rng.randrange(10, 41)
    random_ = rng.random
    steps: list[Step] = []
    which = iter(rng.choices(range(len(CALLS)), calls, k=count))
    for at, kind in enumerate(rng.choices(list(WEIGHTS), weights, k=count)):
        number = int(random_() * clients)
        if kind == "call" or at < clients:  # before that there is nothing to carry or to cut
            row = next(which)
            steps.append(("call", number, _NAMES[row], *[_field(rng, one) for one in _FIELDS[row]]))
        elif kind in ("up", "down", "quit"):
            steps.append((kind, number, int(random_() * 24)))
        elif kind == "old":
            steps.append((kind, number, int(random_() * 60)))
        else:
            steps.append((kind, number))
    return Schedule(clients, soft, pipelines, steps)


def _agents(rng: random.Random) -> Schedule:
    """Return a schedule of agents that meet, beat, are late, leave and die."""
    clients = rng.choice((2, 3, 3, 4, 5))
    weights = [weight * rng.choice((0, 1, 1, 3)) for weight in (*WEIGHTS.values(), 8)]
    weights[0], weights[1] = 60, rng.choice((40, 80))
    calls = list(AGENT_CALLS.values())
    if rng.random() < 0.7:  # nothing happens in closed rounds
        calls[-2:] = [0, 0]
    steps: list[Step] = []
    for kind in rng.choices([*WEIGHTS, "late"], weights, k=rng.randrange(20, 101)):
        number = rng.randrange(clients)
        if kind == "call":
            steps.append(("call", number, *rng.choices(list(AGENT_CALLS), calls)))
        elif kind in ("up", "down", "quit", "old"):
            steps.append((kind, number, rng.randrange(60)))
        else:
            steps.append((kind, number))
    return Schedule(clients, 1 << 20, rng.randrange(1 << clients), steps)


def _field(rng: random.Random, kind: str) -> Any:
    at = int(rng.random() * 6)
    match kind:
        case "k":
            return KEYS[at % 2]
        case "c":
            return KEYS[2]
        case "v":
            return VALUES[at % 3]
        case "n":
            return at % 4
        case "b":
            return b"/barrier"
        case "w":
            return 1 + at % 3
        case "q":
            return QUEUES[at // 5]
        case "l":
            return LEASED[0]
        case "L":
            return [*LEASED, *QUEUES][: 1 + at % 2]
        case "K":
            return (KEYS[:1], KEYS[1:2], KEYS[:2], [KEYS[0], KEYS[0], KEYS[1]], [], KEYS)[at]
        case "M":
            return MANY[at % 3]
        case "Q":
            return (QUEUES[:1], QUEUES, [QUEUES[0], KEYS[0]])[at % 3]
        case _:
            return [(KEYS[0], VALUES[at % 3]), (KEYS[1], b"2")]


def run(schedule: Schedule, every: int = 16) -> World:
    """Run a schedule, and check all invariants after every few steps. Raises what is wrong."""
    world = World(schedule.clients, schedule.soft, schedule.pipelines)
    for count, step in enumerate(schedule.steps):
        world.do(step)
        if count % every == every - 1:
            world.check()
    world.finish()
    return world


def fault(schedule: Schedule) -> Exception | None:
    """Return what is wrong, if anything, with a check after each step, and when it is executed again."""
    try:
        with replayed(1):
            run(schedule, 1)
    except Exception as error:  # the package's own, too
        return error
    return None
