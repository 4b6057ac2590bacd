"""Many sessions on one store do and say what the model does and says, whatever the interleaving."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from properties.fleet import DELTAS, HANDSHAKE, TARGETS, TEXTS, Command, Difference, Fleet, Step, replay, run_epoch
from properties.model import MAGIC

SLOTS = 4
NAMES = [b"/a", b"/b", b"q"]

name = st.sampled_from(NAMES)
text = st.sampled_from(TEXTS) | st.binary(max_size=12)
names = st.lists(name, max_size=4)
agent = st.sampled_from([b"a", b"b", b"c", b"d"])


@st.composite
def commands(draw: st.DrawFn) -> Command:
    kind = draw(
        st.sampled_from(
            "wait queue_push queue_pop delete_key set cancel_wait barrier add compare_set append multi_set check get "
            "multi_get num_keys queue_len list_keys ping validate unknown fetch fetch cancel_fetch wait_count "
            "wait_count introduce meet meet attend".split()
        )
    )
    match kind:
        case "set" | "append" | "queue_push":
            return Command(kind, draw(name), draw(text))
        case "compare_set":
            return Command(kind, draw(name), draw(text), draw(text))
        case "get" | "delete_key" | "queue_pop" | "queue_len" | "fetch":
            return Command(kind, draw(name))
        case "add":
            return Command(kind, draw(name), draw(st.sampled_from(DELTAS)))
        case "barrier":
            return Command(kind, draw(name), draw(st.integers(-1, 4)))
        case "wait_count":
            return Command(kind, draw(name), draw(st.sampled_from(TARGETS)))
        case "meet":
            least = draw(st.integers(1, 3))
            most = least + draw(st.integers(0, 2))
            return Command(kind, draw(name), draw(agent), least, most, draw(st.integers(-1, 2)))
        case "attend":
            return Command(kind, draw(name), draw(agent), draw(st.integers(0, 4)), draw(st.integers(1, 3)))
        case "introduce":
            return Command(kind, draw(st.lists(st.tuples(text, text), max_size=3)))
        case "check" | "wait" | "multi_get":
            return Command(kind, draw(names))
        case "multi_set":
            return Command(kind, draw(st.lists(st.tuples(name, text), max_size=3)))
        case "ping":
            return Command(kind, draw(st.integers(0, 2**32 - 1)))
        case "validate":
            return Command(kind, draw(st.sampled_from([MAGIC, 0])))
        case _:
            return Command(kind)


slot = st.integers(0, SLOTS - 1)
send = st.tuples(
    st.sampled_from(["send", "send", "drip"]),
    slot,
    st.lists(commands(), max_size=3).map(tuple),
    st.just(0) | st.integers(0, 30),
)
other = st.tuples(st.sampled_from(["leave", "doze", "read"]), slot, st.just(()), st.just(0))
steps = st.lists(send | send | send | other, max_size=50)


@settings(max_examples=400, deadline=None)
@given(steps, st.sampled_from([0, 20, 2**20]))
def test_interleavings_equal_the_model(recorded: list[Step], soft: int) -> None:
    greeting: list[Step] = [("send", index, (HANDSHAKE,), 0) for index in range(SLOTS)]
    replay(SLOTS, soft, greeting + recorded)


@pytest.mark.parametrize("seed", range(20))
def test_seeded_fleet_equals_the_model(seed: int) -> None:
    assert run_epoch(seed) > 0


def test_fleet_notices_a_wrong_answer() -> None:
    fleet = Fleet(1)
    fleet.apply(("send", 0, (HANDSHAKE,), 0))
    fleet.model.store[b"/a"] = b"1"
    with pytest.raises(Difference):
        fleet.apply(("send", 0, (Command("get", b"/a"),), 0))
    with pytest.raises(Difference):
        fleet.check()
