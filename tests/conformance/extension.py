"""Cases of the extension that `docs/wire.md` specifies. PyTorch's server has no part in it, and no answer here.

`control_cases` are those that are played to it all the same: they show that it closes for our opcodes and lacks our
reserved keys, and that a stock client finds the same on both.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.frames import (
    CANCEL_FETCH,
    CANCEL_WAIT,
    CANCELED,
    DEPART,
    END,
    LIST_KEYS,
    NO_VALUE,
    NOT_READY,
    NUM_KEYS,
    READY,
    RETURNED,
    WOKEN,
    add,
    append,
    attend,
    auth,
    barrier,
    check,
    compare_set,
    confirm,
    delete,
    enter,
    fetch,
    get,
    give_back,
    i64,
    introduce,
    join,
    lease,
    lease_later,
    link,
    meet,
    met,
    missing,
    multi_set,
    ping,
    pop,
    popped,
    push,
    queue_len,
    set_,
    state,
    taken,
    wait,
    wait_count,
)
from conformance.script import CLOSED, NO_REPLY, Answer, Script, Writer
from support import blob, keys, u64

SERVER = b"tcpstore_async/server"
JOINS = b"tcpstore_async/joins"

_EXTENSION: list[Script] = []
_CONTROL: list[Script] = []


def extension_cases() -> list[Script]:
    return _EXTENSION


def control_cases() -> list[Script]:
    return _CONTROL


def case(name: str = "", scripts: list[Script] = _EXTENSION) -> Callable[[Writer], Writer]:
    """The decorated function writes a case, named after it unless a name is given."""

    def add_case(write: Writer) -> Writer:
        script = Script(f"extension_{name or write.__name__}")
        write(script)
        assert scripts is _CONTROL or not script.mended, f"{script.name} gives PyTorch's answer"
        scripts.append(script)
        return write

    return add_case


def control(name: str = "") -> Callable[[Writer], Writer]:
    return case(name, _CONTROL)


# FETCH


@case()
def fetch_of_what_is_there(s: Script) -> None:
    a = s.peer("a")
    a.asks(set_(b"k", b"v") + fetch(b"k"), blob(b"v"))
    a.asks(add(b"n", 7) + fetch(b"n") + fetch(b"n"), i64(7) + blob(b"7") * 2)
    a.asks(append(b"k", b"w") + fetch(b"k"), blob(b"vw"))
    a.asks(push(b"q", b"item") + fetch(b"q") + pop(b"q"), blob(b"") + popped(1, b"item"))
    large = bytes(range(256)) * 4096
    a.asks(set_(b"", large) + fetch(b""), blob(large))


def _fetched(name: str, write: bytes, reply: bytes, value: bytes) -> None:
    @case(f"fetched[{name}]")
    def _(s: Script) -> None:
        a, b, c = s.peers("abc")
        a.says(fetch(b"k"))
        b.says(fetch(b"k"))
        c.asks(write, reply)
        a.hears(blob(value))
        b.hears(blob(value))
        c.asks(write, reply if name != "add" else i64(10))
        a.asks(ping(b"pong"), b"pong")


for _name, _write, _reply, _value in (
    ("set", set_(b"k", b"v"), b"", b"v"),
    ("add", add(b"k", 5), i64(5), b"5"),
    ("append", append(b"k", b"v"), b"", b"v"),
    ("compare_set", compare_set(b"k", b"", b"v"), blob(b"v"), b"v"),
    ("multi_set", multi_set((b"j", b"1"), (b"k", b"2")), b"", b"2"),
    ("multi_set, twice", multi_set((b"k", b"1"), (b"k", b"2")), b"", b"2"),
    ("barrier", barrier(b"k", 1), WOKEN, b"1"),
    ("push", push(b"k", b"v"), b"", b""),
    ("8 MiB", set_(b"k", bytes(8 << 20)), b"", bytes(8 << 20)),
):
    _fetched(_name, _write, _reply, _value)


@case()
def fetch_of_its_own_write_comes_before_the_reply(s: Script) -> None:
    a = s.peer("a")
    a.asks(fetch(b"n") + add(b"n", 7) + ping(b"pong"), blob(b"7") + i64(7) + b"pong")


@case()
def fetch_between_others_replies(s: Script) -> None:
    a, b = s.peers("ab")
    a.asks(fetch(b"k") + ping(b"pong") + get(b"j"), b"pong" + blob(b""))
    b.says(set_(b"k", b"v"))
    a.hears(blob(b"v"))


@case()
def fetch_of_what_is_there_leaves_a_wait_alone(s: Script) -> None:
    a, z = s.peers("az")
    z.asks(set_(b"k", b"v") + add(b"n", 5), i64(5))
    a.asks(wait(b"j") + fetch(b"k") + fetch(b"n"), blob(b"v") + blob(b"5"))
    z.says(set_(b"j", b""))
    a.hears(WOKEN)


@case()
def fetch_waits_for_a_barrier_to_be_complete(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.asks(fetch(b"b"), NO_REPLY)
    b.asks(barrier(b"b", 2), NO_REPLY)
    a.hears(NO_REPLY)
    z.asks(barrier(b"b", 2), WOKEN)
    a.hears(blob(b"2"))
    b.hears(WOKEN)


@case()
def fetch_of_a_deleted_key(s: Script) -> None:
    a, z = s.peers("az")
    z.asks(set_(b"k", b"1") + delete(b"k"), i64(1))
    a.asks(fetch(b"k"), NO_REPLY)
    z.asks(delete(b"k") + set_(b"k", b"2") + delete(b"k"), i64(0) + i64(1))
    a.hears(blob(b"2"))
    a.asks(fetch(b"k"), NO_REPLY)


@case()
def fetch_is_canceled(s: Script) -> None:
    a, b = s.peers("ab")
    a.asks(CANCEL_FETCH, NO_VALUE)
    a.asks(fetch(b"k") + CANCEL_FETCH + ping(b"pong"), NO_VALUE + b"pong")
    b.says(set_(b"k", b"v"))
    a.hears(NO_REPLY)
    a.asks(fetch(b"j"), NO_REPLY)
    b.says(set_(b"j", b"w"))
    a.asks(CANCEL_FETCH, blob(b"w") + NO_VALUE)
    a.asks(fetch(b"i"), NO_REPLY)
    a.asks(CANCEL_WAIT, CANCELED)
    b.says(set_(b"i", b""))
    a.hears(NO_REPLY)


@case()
def fetch_takes_no_item(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.says(fetch(b"q"))
    b.says(wait(b"q"))
    c.says(fetch(b"q"))
    z.says(push(b"q", b"1"))
    a.hears(blob(b""))
    b.hears(WOKEN)
    c.hears(NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))
    z.says(push(b"q", b"2"))
    c.hears(blob(b""))
    z.asks(pop(b"q"), popped(1, b"2"))


@case()
def fetch_by_a_woken_waiter_hands_on(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)
    a.asks(fetch(b"q"), blob(b""))
    b.hears(WOKEN)


@case()
def fetch_that_leaves_disturbs_nobody(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.says(fetch(b"k"))
    b.says(fetch(b"k"))
    c.says(wait_count(b"k", 1))
    a.leaves()
    c.half_closes()
    c.hears(CLOSED)
    s.peer("z").says(set_(b"k", b"v"))
    b.hears(blob(b"v"))


def _busy(name: str, first: bytes, second: bytes) -> None:
    @case(f"second_wait_closes[{name}]")
    def _(s: Script) -> None:
        a, b = s.peers("ab")
        a.asks(first, NO_REPLY)
        a.asks(second, CLOSED)
        b.says(set_(b"k", b"9"), set_(b"j", b"9"))
        b.asks(ping(b"pong"), b"pong")


for _name, _first in (
    ("fetch", fetch(b"k")),
    ("wait_count", wait_count(b"k", 3)),
    ("wait", wait(b"k")),
    ("barrier", barrier(b"b", 2)),
):
    _busy(f"{_name}, fetch", _first, fetch(b"j"))
    _busy(f"{_name}, wait_count", _first, wait_count(b"j", 0))


@case()
def stock_waits_take_the_place_of_ours(s: Script) -> None:
    a, b, c, d, z = s.peers("abcdz")
    a.says(fetch(b"k"), wait(b"j"))
    b.says(wait_count(b"n", 1), wait(b"j"))
    c.says(fetch(b"k"), barrier(b"j", 9))
    d.says(wait_count(b"n", 1), barrier(b"j", 9))
    z.says(set_(b"j", b"1"))
    for peer in (a, b, c, d):
        peer.hears(WOKEN)
    z.asks(set_(b"k", b"1") + add(b"n", 1), i64(1))
    for peer in (a, b, c, d):
        peer.hears(NO_REPLY)


@case()
def a_replaced_wait_ends_neither(s: Script) -> None:
    a, b, z = s.peers("abz")
    for peer in (a, b):
        peer.says(wait(b"k", b"l"), wait(b"j"))
    z.says(set_(b"j", b"1"))
    a.hears(WOKEN)
    b.hears(WOKEN)
    a.says(fetch(b"i"))
    b.says(wait_count(b"n", 1))
    z.says(set_(b"k", b"1"), set_(b"l", b"1"))
    a.hears(NO_REPLY)
    b.hears(NO_REPLY)
    z.asks(set_(b"i", b"v") + add(b"n", 1) + add(b"n", 1), i64(1) + i64(2))
    a.hears(blob(b"v"))
    b.hears(WOKEN)


# WAIT_COUNT


@case()
def count_of_what_is_reached(s: Script) -> None:
    a = s.peer("a")
    a.asks(wait_count(b"n", 0) + wait_count(b"n", -(2**63)), WOKEN * 2)
    a.asks(set_(b"n", b" +7x") + wait_count(b"n", 7), WOKEN)
    a.asks(add(b"m", -5) + wait_count(b"m", -5), i64(-5) + WOKEN)


@case()
def count_is_reached(s: Script) -> None:
    a, b, c, d, z = s.peers("abcdz")
    for peer, target in ((a, 2), (b, 2), (c, 5), (d, 2**63 - 1)):
        peer.says(wait_count(b"n", target))
    z.asks(add(b"n", 1), i64(1))
    a.hears(NO_REPLY)
    z.asks(add(b"n", 1), i64(2))
    a.hears(WOKEN)
    b.hears(WOKEN)
    c.hears(NO_REPLY)
    z.says(set_(b"n", b"no number"), multi_set((b"n", b"9"), (b"n", b"1")))
    c.hears(NO_REPLY)
    z.says(multi_set((b"n", b"1"), (b"n", b"9")))
    c.hears(WOKEN)
    z.says(set_(b"n", b"9223372036854775807"))
    d.hears(WOKEN)


@case()
def count_of_its_own_write_comes_before_the_reply(s: Script) -> None:
    a = s.peer("a")
    a.asks(wait_count(b"n", 7) + add(b"n", 9) + ping(b"pong"), WOKEN + i64(9) + b"pong")


@case()
def own_writes_before_and_behind_a_cancel(s: Script) -> None:
    for name, frames, reply in (
        ("fetched", fetch(b"k") + set_(b"k", b"v") + CANCEL_FETCH, blob(b"v") + NO_VALUE),
        ("not fetched", fetch(b"j") + CANCEL_FETCH + set_(b"j", b"v"), NO_VALUE),
        ("counted", wait_count(b"n", 2) + add(b"n", 5) + CANCEL_WAIT, WOKEN + i64(5) + CANCELED),
        ("not counted", wait_count(b"m", 2) + CANCEL_WAIT + add(b"m", 5), CANCELED + i64(5)),
    ):
        s.peer(name).asks(frames, reply)


@case()
def count_of_arrivals_at_a_barrier(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.says(wait_count(b"b", 1))
    b.says(wait_count(b"b", 2))
    z.says(wait(b"b"))
    c.says(barrier(b"b", 3))
    a.hears(WOKEN)
    b.hears(NO_REPLY)
    z.hears(NO_REPLY)
    a.says(barrier(b"b", 3))
    b.hears(WOKEN)
    b.asks(barrier(b"b", 3), WOKEN)
    for peer in (a, c, z):
        peer.hears(WOKEN)


@case()
def count_that_its_own_barrier_reaches(s: Script) -> None:
    a, z = s.peers("az")
    a.asks(wait_count(b"b", 1) + barrier(b"b", 2), WOKEN)
    z.asks(barrier(b"b", 2), WOKEN)
    a.hears(WOKEN)


@case()
def count_is_not_reached_by_a_sum_that_wraps(s: Script) -> None:
    a, z = s.peers("az")
    z.says(set_(b"n", b"1"))
    a.says(wait_count(b"n", 2))
    z.asks(add(b"n", 2**63 - 1), i64(-(2**63)))
    a.hears(NO_REPLY)


@case()
def count_fetch_and_wait_of_one_key(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.says(wait_count(b"n", 2))
    b.says(wait(b"n"))
    c.says(fetch(b"n"))
    z.asks(add(b"n", 1), i64(1))
    a.hears(NO_REPLY)
    b.hears(WOKEN)
    c.hears(blob(b"1"))
    z.asks(add(b"n", 1), i64(2))
    a.hears(WOKEN)


@case()
def count_is_canceled(s: Script) -> None:
    a, z = s.peers("az")
    a.asks(wait_count(b"n", 1) + CANCEL_WAIT, CANCELED)
    z.asks(add(b"n", 1), i64(1))
    a.asks(wait_count(b"n", 2), NO_REPLY)
    z.asks(add(b"n", 1), i64(2))
    a.asks(CANCEL_WAIT, WOKEN + CANCELED)
    z.asks(add(b"n", 9), i64(11))
    a.hears(NO_REPLY)


@case()
def count_of_a_deleted_key(s: Script) -> None:
    a, z = s.peers("az")
    z.asks(add(b"n", -9), i64(-9))
    a.says(wait_count(b"n", -4))
    z.asks(delete(b"n"), i64(1))
    a.hears(NO_REPLY)
    z.asks(add(b"n", -1), i64(-1))
    a.hears(WOKEN)


@case()
def count_of_no_number_closes(s: Script) -> None:
    a, b, z = s.peers("abz")
    b.says(wait_count(b"n", 2))
    z.says(set_(b"n", b"x"))
    a.asks(wait_count(b"n", 2), CLOSED)
    z.says(set_(b"n", b""), set_(b"n", b"9" * 20), set_(b"n", b"-"))
    b.hears(NO_REPLY)
    z.says(set_(b"n", b"2"))
    b.hears(WOKEN)


@case()
def count_is_passed_over_by_a_queue(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait_count(b"q", 1))
    z.says(push(b"q", b"1"))
    a.hears(NO_REPLY)
    z.asks(pop(b"q"), popped(1, b"1"))
    b.says(wait(b"q"))
    z.says(push(b"q", b"2"))
    a.hears(NO_REPLY)
    b.hears(WOKEN)


# LEASE, CONFIRM and RETURN


@case()
def lease_is_confirmed(s: Script) -> None:
    a, z = s.peers("az")
    a.asks(lease(b"q", 1), i64(0))
    z.says(push(b"q", b"1"), push(b"q", b"2"))
    a.asks(lease(b"q", 1), popped(2, b"1"))
    z.asks(queue_len(b"q") + check(b"q") + NUM_KEYS, i64(1) + READY + i64(0))
    a.asks(lease(b"q", -5), popped(1, b"2"))
    z.asks(queue_len(b"q") + check(b"q") + pop(b"q"), i64(0) + NOT_READY + i64(0))
    a.asks(confirm(1) + confirm(1) + confirm(77) + ping(b"pong"), b"pong")
    a.leaves()
    s.peer("b").asks(pop(b"q") + pop(b"q"), popped(1, b"2") + i64(0))


@case()
def lease_is_given_back_to_the_front(s: Script) -> None:
    a, z = s.peers("az")
    z.says(*(push(b"q", item) for item in (b"1", b"2", b"3")))
    a.asks(lease(b"q", 1) + lease(b"q", 2), popped(3, b"1") + popped(2, b"2"))
    a.says(give_back(2), give_back(2), give_back(9))
    z.asks(pop(b"q"), popped(2, b"2"))
    a.asks(give_back(1) + ping(b"pong"), b"pong")
    z.asks(pop(b"q"), popped(2, b"1"))


@case()
def leases_of_the_dead_come_back_in_order(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    z.says(*(push(b"q", item) for item in (b"1", b"2", b"3", b"4")))
    a.asks(lease(b"q", 1) + lease(b"q", 2) + lease(b"q", 3), popped(4, b"1") + popped(3, b"2") + popped(2, b"3"))
    b.asks(lease(b"q", 3), popped(1, b"4"))
    b.says(confirm(3))
    c.asks(lease_later(b"q", 0), NO_REPLY)
    a.leaves()
    c.hears(popped(3, b"1"))
    z.asks(pop(b"q") + pop(b"q") + pop(b"q"), popped(2, b"2") + popped(1, b"3") + i64(0))


@case()
def lease_goes_back_with_a_protocol_error(s: Script) -> None:
    a, z = s.peers("az")
    z.says(push(b"q", b"1"))
    a.asks(lease(b"q", 1) + lease(b"q", 1), Answer(popped(1, b"1"), closed=True))
    z.asks(pop(b"q"), popped(1, b"1"))


@case()
def lease_later_waits_in_line(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.asks(wait(b"q"), NO_REPLY)
    b.asks(lease_later(b"q", 1), NO_REPLY)
    c.asks(wait(b"q"), NO_REPLY)
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)
    a.asks(pop(b"q"), popped(1, b"1"))
    z.says(push(b"q", b"2"), push(b"q", b"3"))
    b.hears(popped(1, b"2"))
    c.hears(WOKEN)
    z.asks(queue_len(b"q"), i64(1))
    b.says(give_back(1))
    z.asks(pop(b"q"), popped(2, b"2"))


@case()
def lease_later_is_given_up(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.asks(lease_later(b"q", 1), NO_REPLY)
    b.asks(lease_later(b"q", 1), NO_REPLY)
    a.asks(give_back(1) + ping(b"pong"), RETURNED + b"pong")
    z.says(push(b"q", b"1"))
    b.hears(popped(1, b"1"))
    a.asks(lease_later(b"q", 2), NO_REPLY)
    b.says(give_back(1))  # it crosses the item, and is the last that is heard of it
    a.hears(popped(1, b"1"))
    a.asks(confirm(2) + lease_later(b"q", 3) + CANCEL_WAIT, CANCELED)


@case()
def lease_later_does_not_wait_for_a_value(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.asks(lease_later(b"k", 1), NO_REPLY)
    z.says(set_(b"k", b"plain"))
    a.hears(i64(0))
    b.asks(lease_later(b"k", 1) + lease_later(SERVER, 2), i64(0) * 2)
    z.says(push(b"k", b"1"))
    b.asks(lease_later(b"k", 1), popped(1, b"1"))


@case()
def what_is_given_back_ends_no_barrier(s: Script) -> None:
    a, b, z = s.peers("abz")
    z.says(push(b"q", b"1"))
    a.asks(lease(b"q", 1), popped(1, b"1"))
    b.asks(barrier(b"q", 2), NO_REPLY)
    a.asks(give_back(1) + ping(b"pong"), b"pong")
    b.hears(NO_REPLY)
    z.asks(pop(b"q"), popped(1, b"1"))


# JOIN and LEAVE


@case()
def join_counts_once(s: Script) -> None:
    a, b, z = s.peers("abz")
    z.says(wait_count(b"init/", 2))
    a.asks(join(b"init/", b"one") * 2, i64(1) * 2)
    a.leaves()
    b.asks(join(b"init/", b"one"), i64(1))
    z.hears(NO_REPLY)
    b.asks(join(b"init/", b"two") + get(b"init/"), i64(2) + blob(b"2"))
    z.hears(WOKEN)
    b.asks(delete(b"init/") + join(b"init/", b"one"), i64(1) + i64(1))
    b.asks(join(b"init/", b"x" * 64) + add(b"init/", 5) + join(b"init/", b"one"), i64(2) + i64(7) * 2)


@case()
def join_tells_who_was_lost(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    z.asks(join(b"n", b""), i64(0))
    a.asks(join(b"n", b"a"), i64(1))
    b.asks(join(b"n", b"b"), i64(2))
    c.asks(add(b"n", 1) + join(b"n", b""), i64(3) * 2)
    a.leaves()
    z.asks(join(b"n", b"") + NUM_KEYS, i64(2) + i64(1))
    z.asks(join(b"n", b"a") + join(b"n", b""), i64(3) * 2)
    b.asks(DEPART + DEPART + ping(b"pong"), b"pong")
    b.leaves()
    c.asks(join(b"n", b""), i64(3))


@case()
def join_closes(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.asks(join(b"n", b"x" * 65), CLOSED)
    b.asks(join(SERVER, b"x"), CLOSED)
    z.says(set_(b"n", b"x"))
    c.asks(join(b"n", b"x"), CLOSED)
    z.asks(get(b"n"), blob(b"x"))


# MEET and ATTEND


@case()
def agents_meet(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    b.asks(meet(b"r", b"b", 3, 3), NO_REPLY)
    a.asks(meet(b"r", b"a", 3, 3), NO_REPLY)
    z.asks(
        attend(b"r", b"") + attend(b"r", b"a") + attend(b"other", b""),
        state(*(0, 0, 2, 0, 0, 0)) + state(*(0, 0, 2, 0, 1, 0)) + state(*[0] * 6),
    )
    c.asks(meet(b"r", b"c", 3, 3), met(0, 2, 3))
    a.hears(met(0, 0, 3))
    b.hears(met(0, 1, 3))
    b.asks(meet(b"r", b"b", 3, 3) * 2, met(0, 1, 3) * 2)
    z.asks(NUM_KEYS + LIST_KEYS + check(b"r") + get(b"r"), i64(0) + keys() + NOT_READY + blob(b""))


@case()
def agents_that_leave_begin_the_next_round(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.asks(meet(b"r", b"a", 1, 2), met(0, -1, 1))
    b.asks(meet(b"r", b"b", 1, 2), met(0, 1, 2))
    a.asks(meet(b"r", b"a", 1, 2), met(0, 0, 2))
    z.asks(meet(b"r", b"z", 1, 2), NO_REPLY)
    b.asks(attend(b"r", b"b"), state(*(0, 1, 2, 0, 1, 0)))
    a.asks(meet(b"r", b"a", 1, 2, 0), NO_REPLY)
    b.asks(attend(b"r", b"") + attend(b"r", b"b"), state(*(0, 1, 1, 2, 0, 0)) + state(*(0, 1, 1, 2, 1, 0)))
    b.leaves()
    a.hears(met(1, 0, 2))
    z.hears(met(1, 1, 2))


@case()
def last_call_ends(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.asks(meet(b"r", b"a", 2, 4), NO_REPLY)
    b.asks(meet(b"r", b"b", 2, 4), met(0, -1, 1))
    b.asks(attend(b"r", b"b") + meet(b"r", b"b", 2, 4), state(*(0, 0, 2, 0, 1, 1)))
    a.leaves()
    c.asks(attend(b"r", b"c", 2, 1) + meet(b"r", b"c", 2, 4), state(*(0, 0, 1, 0, 0, 0)) + met(0, -1, 2))
    c.asks(attend(b"r", b"c", 2, 1), state(*(0, 0, 2, 0, 1, 2)))
    b.asks(CANCEL_FETCH, NO_VALUE)
    c.leaves()
    z.asks(meet(b"r", b"z", 2, 4), met(0, -1, 3))
    z.asks(attend(b"r", b"z", 2, 3), state(*(0, 1, 2, 0, 1, 0)))
    b.asks(meet(b"r", b"b", 2, 4), met(0, 0, 2))
    z.asks(meet(b"r", b"z", 2, 4), met(0, 1, 2))


@case()
def last_call_passes_to_another_agent(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.asks(meet(b"r", b"a", 1, 9), met(0, -1, 1))
    b.asks(meet(b"r", b"b", 1, 9), NO_REPLY)
    c.asks(meet(b"r", b"c", 1, 9), NO_REPLY)
    a.leaves()
    b.hears(met(0, -1, 2))
    b.asks(attend(b"r", b"b", 2, 2), state(*(0, 1, 2, 0, 1, 0)))
    c.hears(met(0, 1, 2))


@case()
def rounds_are_closed(s: Script) -> None:
    a, b, c, d, z = s.peers("abcdz")
    a.asks(meet(b"r", b"a", 1, 1), met(0, 0, 1))
    b.asks(meet(b"r", b"b", 1, 1), NO_REPLY)
    c.asks(meet(b"q", b"c", 2, 2), NO_REPLY)
    z.asks(
        attend(b"r", b"", 3) + attend(b"q", b"", 3) + attend(b"p", b"", 3),
        state(*(0, 2, 1, 0, 0, 0)) + state(*(0, 2, 1, 0, 0, 0)) + state(*(0, 2, 0, 0, 0, 0)),
    )
    b.hears(met(0, -2, 1))
    c.hears(met(0, -2, 0))
    d.asks(meet(b"r", b"d", 1, 1) + meet(b"p", b"d", 1, 1), met(0, -2, 0) * 2)
    a.asks(meet(b"r", b"a", 1, 1, 0), met(1, -2, 0))
    z.asks(delete(b"r") + delete(b"p"), i64(0) * 2)
    d.asks(meet(b"p", b"d", 1, 1), met(0, 0, 1))
    d.asks(meet(b"r", b"d", 1, 1), met(1, -2, 0))


@case()
def rounds_are_described(s: Script) -> None:
    a, b, z = s.peers("abz")
    z.asks(attend(b"r", b"", 0, 1), state(*[0] * 6))
    b.asks(meet(b"r", b"b", 2, 2) + ping(b"pong"), b"pong")
    z.asks(attend(b"r", b"", 0, 1), state(*(0, 0, 1, 0, 0, 0), described=b'{"agents":["b"]}'))
    a.asks(meet(b"r", b"a", 2, 2), met(0, 0, 2))
    b.hears(met(0, 1, 2))
    z.asks(attend(b"r", b"", 0, 1), state(*(0, 1, 2, 0, 0, 0), described=b'{"agents":["a","b"]}'))
    a.asks(attend(b"r", b"a", 0, 2) + attend(b"r", b"a", 3, 2), state(*(0, 1, 2, 0, 1, 0)) + state(*(0, 2, 2, 0, 1, 0)))
    b.asks(attend(b"r", b"b", 3, 1), state(*(0, 2, 2, 0, 1, 0)))
    z.asks(attend(b"r", b"", 0, 1), state(*(0, 2, 2, 0, 0, 0), described=b'{"agents":["a","b"]}'))


@case()
def silent_agents_are_removed(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.asks(meet(b"r", b"a", 2, 2), NO_REPLY)
    b.asks(meet(b"r", b"b", 2, 2), met(0, 1, 2))
    a.hears(met(0, 0, 2))
    c.asks(meet(b"r", b"c", 1, 2), NO_REPLY)
    b.asks(attend(b"r", b"b", 1, 2), state(*(0, 1, 2, 0, 1, 0)))
    a.asks(attend(b"r", b"a", 1, 2), state(*(0, 1, 2, 0, 1, 0)))
    b.asks(attend(b"r", b"b", 1, 2), state(*(0, 1, 2, 0, 1, 0)))
    b.asks(attend(b"r", b"c"), state(*(0, 1, 2, 0, 0, 0)))
    b.asks(attend(b"r", b"b", 1, 2), state(*(0, 1, 1, 0, 1, 0)))
    c.asks(CANCEL_FETCH + meet(b"r", b"c", 1, 2), NO_VALUE)
    b.asks(attend(b"r", b"a", 1, 2) + attend(b"r", b"b", 4), state(*(0, 1, 1, 1, 0, 0)) + state(*(0, 1, 1, 1, 1, 0)))
    b.leaves()
    c.hears(met(1, -1, 1))


@case()
def a_removed_agent_is_not_answered(s: Script) -> None:
    a, b = s.peers("ab")
    a.asks(meet(b"r", b"a", 2, 2), NO_REPLY)
    b.asks(meet(b"r", b"b", 2, 2), met(0, 1, 2))
    a.hears(met(0, 0, 2))
    a.asks(meet(b"r", b"a", 2, 2, 0), NO_REPLY)
    b.asks(attend(b"r", b"b", 1, 2), state(*(0, 1, 1, 1, 1, 0)))
    b.asks(attend(b"r", b"b", 1, 2), state(*(0, 1, 1, 0, 1, 0)))
    b.asks(attend(b"r", b"b", 3), state(*(0, 2, 1, 0, 1, 0)))
    a.asks(CANCEL_FETCH, NO_VALUE)


@case()
def one_agent_with_several_connections(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    a.asks(meet(b"r", b"x", 2, 2), NO_REPLY)
    b.asks(attend(b"r", b"x", 1, 1), state(*(0, 0, 1, 0, 1, 0)))
    a.leaves()
    c.asks(meet(b"r", b"x", 2, 2), NO_REPLY)
    b.leaves()
    z.asks(meet(b"r", b"y", 2, 2), met(0, 1, 2))
    c.hears(met(0, 0, 2))
    c.asks(meet(b"r", b"w", 1, 2), NO_REPLY)
    z.asks(attend(b"r", b"x"), state(*(0, 1, 1, 1, 0, 0)))


@case()
def meet_closes(s: Script) -> None:
    for name, frame in (
        ("no agents", meet(b"r", b"a", 0, 1)),
        ("fewer at most", meet(b"r", b"a", 2, 1)),
        ("no name", meet(b"r", b"", 1, 1)),
        ("long name", meet(b"r", b"x" * 513, 1, 1)),
        ("action", attend(b"r", b"a", 5)),
        ("negative action", attend(b"r", b"a", -1)),
        ("beat", attend(b"r", b"a", 1, 0)),
        ("long name again", attend(b"r", b"x" * 513)),
    ):
        s.peer(name).asks(frame, CLOSED)
    a, z = s.peers("az")
    a.asks(meet(b"r", b"a", 2, 2), NO_REPLY)
    a.asks(meet(b"r", b"a", 2, 2), CLOSED)
    z.asks(attend(b"r", b""), state(*(0, 0, 0, 0, 0, 0)))


# INTRODUCE and the reserved keys


@case()
def introduce_says_nothing_and_stores_nothing(s: Script) -> None:
    a = s.peer("a")
    a.asks(introduce((b"rank", b"3"), (b"host", b"a\r\nb\xff")) + NUM_KEYS + LIST_KEYS, i64(0) + keys())
    a.asks(introduce() + introduce((b"rank", b"3"), (b"rank", b"4")) + ping(b"pong"), b"pong")


@case()
def introduce_at_length(s: Script) -> None:
    a, b = s.peers("ab")
    a.asks(introduce((b"host", bytes(2048 - 4 - 8))) + ping(b"pong"), b"pong")
    b.asks(introduce((b"host", bytes(2048 - 4 - 8 + 1))), CLOSED)


@case()
def reserved_keys_are_not_to_be_written(s: Script) -> None:
    for name, frame in (
        ("set", set_(SERVER, b"v")),
        ("append", append(SERVER, b"v")),
        ("add", add(SERVER, 1)),
        ("compare_set", compare_set(SERVER, b"", b"v")),
        ("multi_set", multi_set((b"k", b"v"), (SERVER, b"v"))),
        ("barrier", barrier(SERVER, 9)),
        ("open barrier", barrier(SERVER, 1)),
        ("push", push(SERVER, b"v")),
        ("join", join(SERVER, b"v")),
    ):
        s.peer(name).asks(ping(b"pong") + frame, Answer(b"pong", closed=True))
    s.peer("z").asks(NUM_KEYS + LIST_KEYS + check(SERVER), i64(0) + keys() + READY)


def _length(name: str, before: bytes, most: int) -> None:
    @case(f"length[{name}]")
    def _(s: Script) -> None:
        a, b, c = s.peers("abc")
        a.asks(before + u64(most), NO_REPLY)
        b.asks(before + u64(most + 1), CLOSED)
        c.asks(before + u64(2**64 - 1), CLOSED)


for _name, _before, _most in (
    ("fetch", b"\x40", 8192),
    ("wait_count", b"\x42", 8192),
    ("introduce", b"\x43", 131072),
    ("name", b"\x43" + u64(1), 8192),
    ("text", b"\x43" + u64(1) + blob(b"rank"), 8 << 20),
):
    _length(_name, _before, _most)


# LINK: what follows it is in tests/properties/test_links.py


@case()
def link_needs_an_id_and_a_secret(s: Script) -> None:
    version, name = (b"version", b"1"), (b"id", bytes(16))
    s.peer("a").asks(link(version), CLOSED)
    s.peer("b").asks(link(version, name), CLOSED)
    s.peer("c").asks(link(version, name, (b"secret", bytes(15))), CLOSED)
    s.peer("d").asks(wait(b"k") + link(version, name, (b"secret", bytes(16))), CLOSED)
    s.peer("e", greet=False).asks(link(version, name, (b"secret", bytes(16))), CLOSED)


@case()
def only_replies_that_were_sent_are_acknowledged(s: Script) -> None:
    s.peer("a").asks(taken(1 << 40), CLOSED)
    s.peer("b").asks(taken(-1), CLOSED)


@case()
def token_is_refused_without_keys_to_check_it(s: Script) -> None:
    said = b'{"status":"refused","reason":"the server has no keys to check tokens with; connect without a token"}'
    s.peer("a").asks(set_(b"k", b"v") + auth(b"any") + set_(b"k", b"w"), Answer(blob(said), closed=True))
    s.peer("b").asks(get(b"k"), blob(b"v"))


@case()
def token_of_at_most_4096_bytes(s: Script) -> None:
    s.peer("a").asks(b"\x4e" + u64(4097), CLOSED)
    s.peer("b").asks(b"\x4e" + u64(2**64 - 1), CLOSED)


# MISSING


@case()
def missing_keys(s: Script) -> None:
    a = s.peer("a")
    a.asks(set_(b"there", b"v") + push(b"queue", b"item"), b"")
    a.asks(missing() + missing((b"there", b""), (b"queue", b"")), blob(b"{}") * 2)
    a.asks(
        missing((b"/not", b""), (b"queue", b""), (b"=nor=that=", b""), (b"nor", b"")),
        blob(b'{"absent":[[0,0],[2,3]]}'),
    )
    a.asks(NUM_KEYS + check(b"/not"), i64(1) + NOT_READY)


@case()
def missing_arrivals(s: Script) -> None:
    a = s.peer("a")
    a.asks(barrier(b"full", 1) + add(b"none", 2), WOKEN + i64(2))
    a.asks(missing((b"full", b"1")), blob(b'{"counters":[{"key":"full","value":1}]}'))
    a.asks(missing((b"none", b"1")), blob(b'{"counters":[{"key":"none","value":2}]}'))


@case()
def missing_while_waiting(s: Script) -> None:
    """It waits for nothing, and changes nothing of what is waited for."""
    a, b = s.peers("ab")
    a.says(wait(b"k"))
    b.asks(missing((b"k", b"")), blob(b'{"absent":[[0,0]]}'))
    b.says(set_(b"k", b"v"))
    a.hears(WOKEN)


@case()
def missing_takes_at_most_1000_keys(s: Script) -> None:
    s.peer("a").asks(set_(b"k", b"v") + missing(*[(b"k", b"")] * 1000), blob(b"{}"))
    s.peer("b").asks(missing(*[(b"k", b"")] * 1001), CLOSED)


@case()
def missing_takes_numbers_and_131072_bytes_only(s: Script) -> None:
    for name, expected in zip("abcd", (b"x", b"-1", b"1234567890", bytes(100_000)), strict=True):
        s.peer(name).asks(missing((b"k", expected)), CLOSED)
    s.peer("e").asks(missing(*[(b"k" * 8_192, b"")] * 17), CLOSED)


# ENTER


@case()
def enter_waits_for_an_owner_and_can_be_given_up(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(enter("a store"))
    a.asks(CANCEL_FETCH, NO_VALUE)
    a.asks(ping(b"pong"), b"pong")
    a.says(enter("a store"))
    b.asks(set_(b"k", b"v") + get(b"k"), blob(b"v"))
    a.asks(CANCEL_FETCH + get(b"k"), NO_VALUE + blob(b"v"))


@case()
def enter_without_waiting(s: Script) -> None:
    none = b'{"status":"ended","reason":"there is no store \'a store\'"}'
    s.peer("a").asks(enter("a store", wait=0) + ping(b"pong"), blob(none) + b"pong")
    ended = b'{"status":"ended","reason":"the store \'a store\' ended"}'
    s.peer("b").asks(enter("a store", incarnation="gone"), blob(ended))


@case()
def enter_closes_for_invalid_items(s: Script) -> None:
    for name, frame in (
        ("no name", enter(None)),
        ("an empty name", enter("")),
        ("a long name", enter("n" * 513)),
        ("no text", enter(b"\xff")),
        ("a long owner", enter("n", owner="o" * 65)),
        ("no number", enter("n", joins="many")),
        ("too much", enter("n", owner="o", unknown="u" * 4096)),
    ):
        s.peer(name).asks(frame, CLOSED)
    none = b'{"status":"ended","reason":"there is no store \'n\'"}'
    s.peer("a").asks(enter("n", wait=0), blob(none))
    s.peer("d").asks(wait(b"k") + enter("n"), CLOSED)
    e = s.peer("e")
    e.asks(join(b"n", b"x"), i64(1))
    e.asks(enter("n"), CLOSED)
    s.peer("f").asks(END, CLOSED)


# What PyTorch's server says to it, and what a stock client sees


@control()
def opcodes_close_on_pytorchs(s: Script) -> None:
    s.peer("a").asks(set_(b"k", b"v") + fetch(b"k"), blob(b"v"), CLOSED)
    s.peer("b").asks(CANCEL_FETCH, NO_VALUE, CLOSED)
    s.peer("c").asks(wait_count(b"n", 0), WOKEN, CLOSED)
    s.peer("d").asks(introduce((b"rank", b"0")), NO_REPLY, CLOSED)
    s.peer("e").asks(lease(b"q", 1), i64(0), CLOSED)
    s.peer("f").asks(lease_later(b"q", 1), NO_REPLY, CLOSED)
    s.peer("g").asks(confirm(1) + give_back(1) + DEPART, NO_REPLY, CLOSED)
    s.peer("h").asks(join(b"n", b"x"), i64(1), CLOSED)
    s.peer("i").asks(meet(b"r", b"x", 2, 2), NO_REPLY, CLOSED)
    s.peer("j").asks(attend(b"q", b"x"), state(*[0] * 6), CLOSED)
    s.peer("k").asks(link(), CLOSED, CLOSED)
    s.peer("l").asks(taken(1 << 40), CLOSED)
    s.peer("m").asks(b"\x4e" + u64(4097), CLOSED)
    s.peer("n").asks(missing(), blob(b"{}"), CLOSED)
    s.peer("o").asks(enter("a", wait=0), blob(b'{"status":"ended","reason":"there is no store \'a\'"}'), CLOSED)
    s.peer("p").asks(END, CLOSED)


@control()
def server_key_is_not_there_on_pytorchs(s: Script) -> None:
    a = s.peer("a")
    a.asks(check(SERVER), READY, NOT_READY)
    a.asks(wait(SERVER), WOKEN, NO_REPLY)


@control()
def joins_key_is_there_on_neither(s: Script) -> None:
    a = s.peer("a")
    a.asks(check(JOINS) + get(JOINS) + wait(JOINS), NOT_READY + blob(b""))
    a.asks(CANCEL_WAIT, CANCELED)


@control()
def stock_client_sees_no_difference(s: Script) -> None:
    a = s.peer("a")
    a.asks(NUM_KEYS + LIST_KEYS, i64(0) + keys())
    a.asks(check(b"/" + SERVER) + check(b"/" + JOINS), NOT_READY * 2)
    a.asks(get(b"/" + SERVER) + delete(b"/" + SERVER), blob(b"") + i64(0))
    a.says(set_(b"/" + SERVER, b"mine"))
    a.asks(get(b"/" + SERVER) + NUM_KEYS + LIST_KEYS, blob(b"mine") + i64(1) + keys(b"/" + SERVER))
    a.asks(delete(SERVER) + delete(JOINS) + check(b"/" + SERVER), i64(0) * 2 + READY)
    a.asks(delete(b"/" + SERVER) + NUM_KEYS + LIST_KEYS, i64(1) + i64(0) + keys())
