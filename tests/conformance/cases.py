"""Cases that the recorded vectors lack. Where one answer is given, PyTorch's libuv server gives it too.

Where two are given the second one is PyTorch's. `row` is the row of `docs/quirks.md` that a case shows.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.frames import (
    CANCEL_WAIT,
    CANCELED,
    LIST_KEYS,
    NOT_READY,
    NUM_KEYS,
    READY,
    WOKEN,
    add,
    append,
    barrier,
    check,
    compare_set,
    delete,
    get,
    i64,
    multi_get,
    multi_set,
    ping,
    pop,
    popped,
    push,
    queue_len,
    set_,
    wait,
)
from conformance.script import CLOSED, NO_REPLY, Answer, Peer, Script, Writer
from support import HANDSHAKE, blob, keys, u64

_CASES: list[Script] = []


def own_cases() -> list[Script]:
    return _CASES


def case(row: str = "", name: str = "") -> Callable[[Writer], Writer]:
    """The decorated function writes a case, named after it unless a name is given."""

    def add_case(write: Writer) -> Writer:
        script = Script(name or write.__name__, row)
        write(script)
        _CASES.append(script)
        return write

    return add_case


# Connection start


def _split_validate(at: int) -> None:
    @case("split-validate", f"validate_split_after_{at}")
    def _(s: Script) -> None:
        a = s.peer("a", greet=False)
        a.says(HANDSHAKE[:at])
        a.says(HANDSHAKE[at:])
        a.hears(NO_REPLY, CLOSED)
        a.asks(ping(b"pong"), b"pong", CLOSED)


for _at in range(1, 5):
    _split_validate(_at)


def _bad_start(name: str, data: bytes) -> None:
    @case("bad-start", f"bad_start_{name}")
    def _(s: Script) -> None:
        a, b = s.peer("a", greet=False), s.peer("b")
        a.asks(data, CLOSED, NO_REPLY)
        a.leaves()
        b.asks(NUM_KEYS, i64(0))


_bad_start("unknown_opcode", b"\xff")
_bad_start("one_byte_of_set", b"\x01")
_bad_start("magic_of_other_byte_order", b"\x00\x3c\x85\xf7\xce")
_bad_start("wrong_magic_then_set", b"\x00\0\0\0\0" + set_(b"k", b"v"))


@case()
def unknown_opcode_at_once(s: Script) -> None:
    for number in range(0x13, 0x100, 31):
        a = s.peer(f"a{number}")
        a.asks(bytes([number]), CLOSED)


@case()
def good_frames_before_unknown_opcode_count(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(wait(b"k"))
    a.asks(set_(b"k", b"v") + get(b"k") + b"\x13", Answer(blob(b"v"), closed=True))
    b.hears(WOKEN)
    b.asks(get(b"k"), blob(b"v"))


# ADD

_NUMBERS: list[tuple[bytes, int | None]] = [
    (b" \t+12abc", 12),
    (b"\v\f\r\n7", 7),
    (b"5.9", 5),
    (b"0x10", 0),
    (b"1e3", 1),
    (b"1_000", 1),
    (b"+5", 5),
    (b"-0", 0),
    (b"007", 7),
    (b"000x", 0),
    (b"5 6", 5),
    (b"5\x006", 5),
    (b"5\xff", 5),
    (b" " * 1000 + b"5", 5),
    (b"9223372036854775807", 2**63 - 1),
    (b"-9223372036854775808", -(2**63)),
    (b"0" * 25 + b"12", 12),
    (b"-" + b"0" * 30 + b"9223372036854775808", -(2**63)),
    (b"9223372036854775808", None),
    (b"-9223372036854775809", None),
    (b"1" + b"0" * 19, None),
    (b"1" + b"0" * 5000, None),
    (b"+", None),
    (b"-", None),
    (b"", None),
    (b"   ", None),
    (b"- 5", None),
    (b"--5", None),
    (b"+-5", None),
    (b"\x005", None),
    (b"\xa05", None),
    (b"\xd9\xa1", None),  # a digit, but not an ASCII one
    (b"inf", None),
]


def _number(text: bytes, number: int | None) -> None:
    shown = ascii(text)[2:-1] if len(text) < 40 else f"{ascii(text[:8])[2:-1]}…{len(text)}"

    @case("numbers", f"add_text[{shown}]")
    def _(s: Script) -> None:
        a, b = s.peers("ab")
        a.says(set_(b"n", text))
        a.asks(add(b"n", 0), CLOSED if number is None else i64(number))
        b.asks(get(b"n"), blob(text if number is None else b"%d" % number))

    @case("numbers", f"barrier_text[{shown}]")
    def _(s: Script) -> None:
        a, b = s.peers("ab")
        a.says(set_(b"n", text))
        a.asks(barrier(b"n", -(2**63)), CLOSED if number is None else WOKEN)
        after = text if number is None else b"%d" % _wrapped(number + 1)
        b.asks(get(b"n"), blob(after))


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


for _text, _value in _NUMBERS:
    _number(_text, _value)


@case("numbers")
def add_wraps_both_ways(s: Script) -> None:
    a = s.peer("a")
    a.asks(add(b"n", 2**63 - 1), i64(2**63 - 1))
    a.asks(add(b"n", 1), i64(-(2**63)))
    a.asks(get(b"n"), blob(b"-9223372036854775808"))
    a.asks(add(b"n", -1), i64(2**63 - 1))
    a.asks(add(b"n", -(2**63)), i64(-1))
    a.asks(add(b"m", -(2**63)), i64(-(2**63)))
    a.asks(add(b"m", -(2**63)), i64(0))


@case()
def counter_is_decimal_text(s: Script) -> None:
    a = s.peer("a")
    for amount, text in ((0, b"0"), (9, b"9"), (1, b"10"), (-11, b"-1"), (-99, b"-100")):
        a.says(add(b"n", amount))
        a.hears(i64(int(text)))
        a.asks(get(b"n"), blob(text))
        a.asks(multi_get(b"n", b"n"), blob(text) * 2)
    a.asks(check(b"n"), READY)


@case()
def compare_set_on_counter(s: Script) -> None:
    a = s.peer("a")
    a.asks(add(b"n", 5), i64(5))
    a.asks(compare_set(b"n", b"05", b"6"), blob(b"5"))
    a.asks(compare_set(b"n", b"", b"6"), blob(b"5"))
    a.asks(compare_set(b"n", b"5", b" 7x"), blob(b" 7x"))
    a.asks(add(b"n", 1), i64(8))
    a.asks(compare_set(b"n", b"8", b""), blob(b""))
    a.asks(get(b"n"), blob(b""))
    a.asks(compare_set(b"n", b"", b"1"), blob(b"1"))


@case()
def append_to_counter_and_back(s: Script) -> None:
    a = s.peer("a")
    a.asks(add(b"n", 12), i64(12))
    a.asks(append(b"n", b"34") + get(b"n"), blob(b"1234"))
    a.asks(add(b"n", 1), i64(1235))
    a.asks(append(b"n", b"") + get(b"n"), blob(b"1235"))
    a.asks(append(b"n", b"x") + add(b"n", 1), i64(1236))
    a.asks(append(b"n", b"0") + compare_set(b"n", b"12360", b"y"), blob(b"y"))


# Values


@case()
def append_to_empty_and_missing(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(wait(b"k"))
    a.asks(append(b"k", b"") + check(b"k"), READY)
    b.hears(WOKEN)
    a.asks(get(b"k") + append(b"k", b"v") + get(b"k"), blob(b"") + blob(b"v"))


@case()
def append_many_times(s: Script) -> None:
    a = s.peer("a")
    a.asks(
        append(b"k", b"ab") * 500 + get(b"k") + append(b"k", b"c") * 3 + get(b"k"),
        blob(b"ab" * 500) + blob(b"ab" * 500 + b"ccc"),
    )
    a.asks(set_(b"k", b"new") + append(b"k", b"er") + multi_get(b"k", b"k"), blob(b"newer") * 2)


@case("append-beyond-limit")
def append_beyond_the_value_limit(s: Script) -> None:
    a = s.peer("a")
    half = b"a" * (5 << 20)
    a.says(append(b"k", half))
    a.says(append(b"k", half))
    a.asks(get(b"k"), blob(half + half))


@case("any-bytes")
def empty_key(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(wait(b""))
    a.says(set_(b"", b"v"))
    b.hears(WOKEN)
    a.asks(get(b"") + check(b"") + NUM_KEYS + LIST_KEYS, blob(b"v") + READY + i64(1) + keys(b""))
    a.asks(
        compare_set(b"", b"v", b"1") + add(b"", 2) + append(b"", b"0") + multi_get(b"", b""),
        blob(b"1") + i64(3) + blob(b"30") * 2,
    )
    a.asks(push(b"", b"item") + queue_len(b"") + pop(b"") + queue_len(b""), i64(1) + popped(1, b"item") + i64(0))
    a.asks(delete(b"") + delete(b"") + barrier(b"", 1) + get(b""), i64(1) + i64(0) + WOKEN + blob(b"1"))


@case("any-bytes")
def any_byte_in_keys_and_values(s: Script) -> None:
    a = s.peer("a")
    every = bytes(range(256))
    a.says(set_(every, every[::-1]), set_(b"\0", b"\0\0"), set_(b"\0\0", b"\0"), set_(b"", b""))
    a.asks(get(every) + multi_get(b"\0", b"\0\0", b""), blob(every[::-1]) + blob(b"\0\0") + blob(b"\0") + blob(b""))
    a.asks(delete(b"\0") + check(b"\0") + check(b"\0\0", every), i64(1) + NOT_READY + READY)
    a.asks(push(b"\0", b"\0\1") + pop(b"\0"), popped(1, b"\0\1"))


@case("compare-set-missing")
def compare_set_table(s: Script) -> None:
    a = s.peer("a")
    a.asks(compare_set(b"k", b"", b"") + check(b"k"), blob(b"") + READY)
    a.asks(compare_set(b"k", b"x", b"y"), blob(b""))
    a.asks(compare_set(b"k", b"", b"y"), blob(b"y"))
    a.asks(compare_set(b"k", b"", b"z"), blob(b"y"))
    a.asks(compare_set(b"k", b"y", b"") + get(b"k"), blob(b"") * 2)
    a.asks(compare_set(b"j", b"x", b"y") + check(b"j"), blob(b"x") + NOT_READY)


@case()
def multi_set_duplicates(s: Script) -> None:
    a, b, c = s.peers("abc")
    b.says(wait(b"k", b"k"))
    c.says(wait(b"k", b"j"))
    a.asks(
        multi_set((b"k", b"1"), (b"j", b"2"), (b"k", b"3")) + multi_get(b"k", b"j") + NUM_KEYS,
        blob(b"3") + blob(b"2") + i64(2),
    )
    b.hears(WOKEN)
    c.hears(WOKEN)
    a.asks(multi_get(b"j", b"k", b"j"), blob(b"2") + blob(b"3") + blob(b"2"))


@case("list-keys-order")
def list_keys_of_many(s: Script) -> None:
    a = s.peer("a")
    names = [b"/key/%d" % number for number in range(300)]
    a.says(multi_set(*((name, name) for name in names)), push(b"/queue", b"1"), add(b"init/", 1))
    a.hears(i64(1))
    a.says(LIST_KEYS)
    a.hears(keys(*names, b"init/"), listed=0)
    a.asks(delete(names[7]), i64(1))
    a.says(NUM_KEYS + LIST_KEYS)
    a.hears(i64(300) + keys(*names[:7], *names[8:], b"init/"), listed=8)


@case("queue-and-value")
def queue_and_value_of_one_name(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(push(b"x", b"item"))
    a.asks(get(b"x") + NUM_KEYS + LIST_KEYS + delete(b"x"), blob(b"") + i64(0) + keys() + i64(0))
    a.asks(check(b"x") + wait(b"x") + queue_len(b"x"), READY + WOKEN + i64(1))
    a.asks(add(b"x", 4) + queue_len(b"x") + pop(b"x") + get(b"x"), i64(4) + i64(1) + popped(1, b"item") + blob(b"4"))
    b.asks(check(b"x") + delete(b"x") + check(b"x"), READY + i64(1) + NOT_READY)
    a.asks(compare_set(b"y", b"", b"v") + push(b"y", b"1") + compare_set(b"y", b"1", b"w"), blob(b"v") + blob(b"v"))


# Limits that are PyTorch's own


def _key_limit(name: str, before: bytes) -> None:
    @case("key_bytes", f"key_limit[{name}]")
    def _(s: Script) -> None:
        a, b = s.peers("ab")
        a.asks(before + u64(8192), NO_REPLY)
        b.asks(before + u64(8193), CLOSED)


for _name, _before in {
    "set": b"\x01",
    "compare_set": b"\x02",
    "get": b"\x03",
    "add": b"\x04",
    "check": b"\x05" + u64(1),
    "wait": b"\x06" + u64(2) + blob(b"k"),
    "delete": b"\x08",
    "append": b"\x09",
    "multi_get": b"\x0a" + u64(1),
    "multi_set": b"\x0b" + u64(1),
    "push": b"\x0e",
    "pop": b"\x0f",
    "queue_len": b"\x10",
    "barrier": b"\x12",
}.items():
    _key_limit(_name, _before)


def _value_limit(name: str, before: bytes) -> None:
    @case("value_bytes", f"value_limit[{name}]")
    def _(s: Script) -> None:
        a, b, c = s.peers("abc")
        a.asks(before + u64(8 << 20), NO_REPLY)
        b.asks(before + u64((8 << 20) + 1), CLOSED)
        c.asks(before + u64(2**64 - 1), CLOSED)


for _name, _before in {
    "set": b"\x01" + blob(b"k"),
    "compare_set_expected": b"\x02" + blob(b"k"),
    "compare_set_desired": b"\x02" + blob(b"k") + blob(b""),
    "append": b"\x09" + blob(b"k"),
    "multi_set": b"\x0b" + u64(1) + blob(b"k"),
    "push": b"\x0e" + blob(b"k"),
}.items():
    _value_limit(_name, _before)


def _count_limit(name: str, opcode: bytes) -> None:
    @case("keys", f"count_limit[{name}]")
    def _(s: Script) -> None:
        a, b, c = s.peers("abc")
        a.asks(opcode + u64(131072), NO_REPLY)
        b.asks(opcode + u64(131073), CLOSED)
        c.asks(opcode + u64(2**63), CLOSED)


for _name, _opcode in {"check": b"\x05", "wait": b"\x06", "multi_get": b"\x0a", "multi_set": b"\x0b"}.items():
    _count_limit(_name, _opcode)


@case("whole-multi-set")
def multi_set_over_the_limit_in_its_second_pair(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(wait(b"k"))
    a.asks(b"\x0b" + u64(2) + blob(b"k") + blob(b"1") + blob(b"j") + u64((8 << 20) + 1), CLOSED)
    b.hears(NO_REPLY, WOKEN)
    b.asks(CANCEL_WAIT + check(b"k"), CANCELED + NOT_READY, CANCELED + READY)


@case("whole-multi-set")
def multi_set_cut_off(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(multi_set((b"k", b"1"), (b"j", b"2"))[:-1])
    a.leaves()
    b.asks(multi_get(b"k", b"j") + NUM_KEYS, blob(b"") * 2 + i64(0), blob(b"1") + blob(b"") + i64(1))


@case("whole-multi-set")
def multi_set_in_pieces_is_applied_once(s: Script) -> None:
    a, b = s.peers("ab")
    frame = multi_set((b"k", b"1"), (b"j", b"2"))
    a.says(frame[:-1])
    b.says(set_(b"k", b"mine"))
    a.says(frame[-1:])
    b.asks(multi_get(b"k", b"j"), blob(b"1") + blob(b"2"))
    a.says(multi_set((b"i", b"1"), (b"j", b"3"))[:-1])
    b.asks(check(b"i"), NOT_READY, READY)


# Order on one connection


@case()
def pipelined_replies_in_order(s: Script) -> None:
    a = s.peer("a")
    a.asks(
        set_(b"k", b"v")
        + wait(b"k")
        + add(b"n", 3)
        + get(b"k")
        + ping(b"\1\2\3\4")
        + check(b"k", b"n")
        + check(b"k", b"m")
        + push(b"q", b"i")
        + queue_len(b"q")
        + multi_get(b"n", b"m", b"k")
        + pop(b"q")
        + pop(b"q")
        + delete(b"k")
        + NUM_KEYS
        + LIST_KEYS
        + barrier(b"b", 1)
        + CANCEL_WAIT,
        WOKEN
        + i64(3)
        + blob(b"v")
        + b"\1\2\3\4"
        + READY
        + NOT_READY
        + i64(1)
        + blob(b"3")
        + blob(b"")
        + blob(b"v")
        + popped(1, b"i")
        + i64(0)
        + i64(1)
        + i64(1)
        + keys(b"n")
        + WOKEN
        + CANCELED,
    )


def _own_wake(name: str, frame: bytes, reply: bytes) -> None:
    @case(name=f"own_wake_comes_before_the_reply[{name}]")
    def _(s: Script) -> None:
        a = s.peer("a")
        a.asks(wait(b"k") + frame + ping(b"pong"), WOKEN + reply + b"pong")


for _name, _frame, _reply in (
    ("set", set_(b"k", b"v"), b""),
    ("add", add(b"k", 7), i64(7)),
    ("compare_set", compare_set(b"k", b"", b"v"), blob(b"v")),
    ("append", append(b"k", b"v"), b""),
    ("multi_set", multi_set((b"j", b"1"), (b"k", b"2")), b""),
    ("barrier", barrier(b"k", 1), WOKEN),
    ("push", push(b"k", b"v"), b""),
):
    _own_wake(_name, _frame, _reply)


@case()
def thousand_gets_of_a_large_value(s: Script) -> None:
    a = s.peer("a")
    value = b"v" * 10_000
    a.says(set_(b"k", value))
    a.asks(get(b"k") * 20 + NUM_KEYS, blob(value) * 20 + i64(1))


# WAIT


@case("counted-keys")
def wait_counts_down_each_key_once(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k", b"j"))
    b.says(set_(b"k", b"1"), set_(b"k", b"2"), append(b"k", b"3"))
    a.hears(NO_REPLY)
    b.asks(delete(b"k"), i64(1))
    b.says(set_(b"k", b"4"))
    a.hears(NO_REPLY)
    b.asks(delete(b"k"), i64(1))
    b.says(set_(b"j", b"1"))
    a.hears(WOKEN)


@case("counted-keys")
def wait_of_present_and_missing(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(set_(b"k", b"1"))
    a.says(wait(b"k", b"j", b"k"))
    b.asks(delete(b"k"), i64(1))
    b.says(set_(b"k", b"1"))
    a.hears(NO_REPLY)
    b.says(set_(b"j", b"1"))
    a.hears(WOKEN)


@case("second-wait")
def second_wait_awaits_each_key_once(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"), wait(b"k", b"j"))
    b.says(set_(b"k", b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.says(set_(b"j", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("second-wait")
def second_wait_leaves_nothing_for_a_third(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"), wait(b"j"))
    b.says(set_(b"k", b"1"))
    a.hears(NO_REPLY, WOKEN)
    a.says(wait(b"m", b"n"))
    b.says(set_(b"j", b"1"))
    a.hears(NO_REPLY)
    b.says(set_(b"m", b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.says(set_(b"n", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("second-wait")
def second_wait_forgets_the_keys_of_the_first(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"), wait(b"j", b"i"))
    b.says(set_(b"k", b"1"))
    a.hears(NO_REPLY)
    b.says(set_(b"i", b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.says(set_(b"j", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("second-wait")
def barrier_in_place_of_a_wait(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"), barrier(b"b", 2))
    b.says(set_(b"k", b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.asks(barrier(b"b", 2), WOKEN)
    a.hears(WOKEN, NO_REPLY)


@case("second-wait-at-once")
def wait_then_wait_for_what_is_there(s: Script) -> None:
    a, b = s.peers("ab")
    b.says(set_(b"j", b"1"))
    a.asks(wait(b"k"), NO_REPLY)
    a.asks(wait(b"j"), WOKEN)
    b.says(set_(b"k", b"1"))
    a.hears(WOKEN)


@case()
def cancel_drops_every_registration(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"), wait(b"j", b"i"), wait(b"k"))
    a.asks(CANCEL_WAIT, CANCELED)
    b.says(set_(b"k", b"1"), set_(b"j", b"1"), set_(b"i", b"1"))
    a.hears(NO_REPLY)
    a.says(wait(b"h"))
    b.says(set_(b"h", b"1"))
    a.hears(WOKEN)


@case()
def waiter_that_left_disturbs_nobody(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.says(wait(b"k", b"j"))
    b.says(wait(b"k"))
    a.leaves()
    c.says(set_(b"k", b"1"), set_(b"j", b"1"))
    b.hears(WOKEN)


@case("half-close")
def half_closed_waiter_is_closed(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"))
    a.half_closes()
    a.hears(CLOSED)
    b.asks(set_(b"k", b"1") + get(b"k"), blob(b"1"))


@case("barrier-opened-by-writes")
def push_ends_waits_of_both_kinds(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(barrier(b"q", 2))
    b.asks(wait(b"q"), WOKEN)
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)


# COMPARE_SET and waiters


@case("failed-compare-set")
def failed_compare_set_wakes_nobody(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(wait(b"k"))
    b.asks(compare_set(b"k", b"old", b"new"), blob(b"old"))
    a.hears(NO_REPLY, WOKEN)
    b.says(set_(b"k", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("failed-compare-set")
def failed_compare_set_does_not_open_a_barrier(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(barrier(b"b", 2))
    b.asks(compare_set(b"b", b"7", b"8"), blob(b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.asks(barrier(b"b", 2), WOKEN)
    a.hears(WOKEN, NO_REPLY)


@case("barrier-opened-by-writes")
def good_compare_set_opens_a_barrier(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(barrier(b"b", 3))
    b.asks(compare_set(b"b", b"1", b"x"), blob(b"x"))
    a.hears(WOKEN)


# BARRIER


@case("barrier-sizes")
def barrier_ignores_world_sizes_below_two(s: Script) -> None:
    a = s.peer("a")
    for number, world_size in enumerate((1, 0, -1, -(2**63), 3), 1):
        a.asks(barrier(b"b", world_size), WOKEN)
        a.asks(get(b"b"), blob(b"%d" % number))


@case("barrier-same-peer")
def barrier_same_peer_thrice(s: Script) -> None:
    a = s.peer("a")
    a.asks(barrier(b"b", 3) * 3, WOKEN * 2)
    a.asks(get(b"b"), blob(b"3"))


@case("barrier-sizes")
def barrier_of_mixed_sizes(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.asks(barrier(b"b", 5), NO_REPLY)
    b.asks(barrier(b"b", 3), NO_REPLY)
    c.asks(barrier(b"b", 3), WOKEN)
    a.hears(WOKEN)
    b.hears(WOKEN)


@case("barrier-opened-by-writes")
def barrier_is_opened_by_set_add_append_multi_set(s: Script) -> None:
    a, b = s.peers("ab")
    for frame, reply in (
        (set_(b"b", b"0"), b""),
        (add(b"b", 0), i64(1)),
        (append(b"b", b""), b""),
        (multi_set((b"k", b"1"), (b"b", b"0")), b""),
    ):
        a.asks(barrier(b"b", 9), NO_REPLY)
        b.asks(frame, reply)
        a.hears(WOKEN)


@case("numbers")
def barrier_overflow_wraps(s: Script) -> None:
    a, b = s.peers("ab")
    a.says(set_(b"b", b"9223372036854775807"))
    a.asks(barrier(b"b", 2), NO_REPLY)
    b.asks(get(b"b"), blob(b"-9223372036854775808"))


@case("barrier-key")
def barrier_that_is_not_full_is_there_for_new_waiters_only(s: Script) -> None:
    a, b, c = s.peers("abc")
    a.says(wait(b"b"))
    b.asks(barrier(b"b", 2), NO_REPLY)
    a.hears(NO_REPLY)
    c.asks(wait(b"b"), WOKEN)
    c.asks(barrier(b"b", 2), WOKEN)
    a.hears(WOKEN)
    b.hears(WOKEN)


# Queues: as PyTorch has them


def _item_for_the_first(s: Script, waiting: str) -> list[Peer]:
    """Return peers that wait for an item, of which the first has been woken for one, and who has pushed that."""
    *peers, z = s.peers(waiting + "z")
    for peer in peers:
        peer.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    peers[0].hears(WOKEN)
    return [*peers, z]


@case("pop-length")
def queue_is_first_in_first_out(s: Script) -> None:
    a = s.peer("a")
    a.says(push(b"q", b"1"), push(b"q", b""), push(b"q", b"3"))
    a.asks(pop(b"q") * 4, popped(3, b"1") + popped(2, b"") + popped(1, b"3") + i64(0))


@case()
def one_push_wakes_one_of_two(s: Script) -> None:
    a, b, z = _item_for_the_first(s, "ab")
    b.hears(NO_REPLY)
    a.asks(pop(b"q"), popped(1, b"1"))
    b.hears(NO_REPLY)
    z.says(push(b"q", b"2"))
    b.hears(WOKEN)
    b.asks(pop(b"q"), popped(1, b"2"))
    a.hears(NO_REPLY)


@case()
def two_pushes_wake_two(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    z.says(push(b"q", b"1"), push(b"q", b"2"))
    a.hears(WOKEN)
    b.hears(WOKEN)
    b.asks(pop(b"q"), popped(2, b"1"))
    a.asks(pop(b"q"), popped(1, b"2"))


@case("pop-takes-first")
def pop_can_take_what_a_woken_waiter_was_about_to_pop(s: Script) -> None:
    a, b, z = _item_for_the_first(s, "ab")
    z.asks(pop(b"q"), popped(1, b"1"))
    a.asks(pop(b"q"), i64(0))
    b.hears(NO_REPLY)


@case("pop-takes-first")
def wait_for_items_that_are_there_returns_at_once(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)
    b.asks(wait(b"q"), WOKEN)
    b.asks(pop(b"q"), popped(1, b"1"))
    a.asks(pop(b"q"), i64(0))


@case()
def push_counts_down_a_longer_wait_on_its_way(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q", b"k"))
    b.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    b.hears(WOKEN)
    a.hears(NO_REPLY)
    z.says(set_(b"k", b"1"))
    a.hears(WOKEN)


@case()
def wait_of_one_queue_twice(s: Script) -> None:
    a, z = s.peers("az")
    a.says(wait(b"q", b"q"))
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)


@case("set-wakes-queue")
def compare_set_wakes_all_waiters_of_a_queue(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    z.asks(compare_set(b"q", b"", b"v"), blob(b"v"))
    a.hears(WOKEN)
    b.hears(WOKEN)
    a.asks(pop(b"q"), i64(0))


@case()
def queue_waiter_that_leaves_before_a_push(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    a.leaves()
    z.says(push(b"q", b"1"))
    b.hears(WOKEN)
    b.asks(pop(b"q"), popped(1, b"1"))


# Queues: mended


@case("queue-order")
def served_waiter_goes_to_the_end_of_the_line(s: Script) -> None:
    a, b, c, z = _item_for_the_first(s, "abc")
    a.asks(pop(b"q"), popped(1, b"1"))
    a.says(wait(b"q"))
    for number, (peer, torch) in enumerate(((b, NO_REPLY), (c, NO_REPLY), (a, Answer(WOKEN))), 2):
        z.says(push(b"q", b"%d" % number))
        peer.hears(WOKEN, torch)
    for peer in (a, b, c):
        peer.hears(NO_REPLY, NO_REPLY if peer is a else WOKEN)


@case("push-counts-once")
def push_does_not_end_a_barrier(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)
    a.asks(pop(b"q"), popped(1, b"1"))
    a.says(barrier(b"b", 2))
    z.says(push(b"q", b"2"))
    a.hears(NO_REPLY, WOKEN)
    b.asks(barrier(b"b", 2), WOKEN)
    a.hears(WOKEN, NO_REPLY)


@case("push-counts-once")
def second_push_does_not_count_for_another_key(s: Script) -> None:
    a, z = s.peers("az")
    a.says(wait(b"q", b"k"))
    z.says(push(b"q", b"1"))
    a.hears(NO_REPLY)
    z.says(push(b"q", b"2"))
    a.hears(NO_REPLY, WOKEN)
    z.says(set_(b"k", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("second-wait")
def asking_again_goes_to_the_end_of_the_line(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    a.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    a.hears(NO_REPLY, WOKEN)
    b.hears(WOKEN, NO_REPLY)
    z.says(push(b"q", b"2"))
    a.hears(WOKEN, NO_REPLY)
    b.hears(NO_REPLY, WOKEN)


@case()
def an_item_is_not_handed_on_into_a_barrier(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(barrier(b"q", 2))
    z.says(push(b"q", b"1"))
    a.hears(WOKEN)
    a.asks(ping(b"pong"), b"pong")
    b.hears(NO_REPLY)


@case("filled-queue-counts")
def wait_counts_a_filled_queue_as_there(s: Script) -> None:
    a, z = s.peers("az")
    z.says(push(b"q", b"1"))
    a.says(wait(b"q", b"k"))
    a.hears(NO_REPLY)
    z.says(set_(b"k", b"1"))
    a.hears(WOKEN, NO_REPLY)
    z.says(push(b"q", b"2"))
    a.hears(NO_REPLY, WOKEN)


@case("filled-queue-counts")
def wait_counts_a_queue_down_though_it_is_emptied(s: Script) -> None:
    a, z = s.peers("az")
    z.says(push(b"q", b"1"))
    a.says(wait(b"k", b"q", b"q"))
    z.asks(pop(b"q"), popped(1, b"1"))
    z.says(set_(b"k", b"1"))
    a.hears(WOKEN, NO_REPLY)


@case("hand-off")
def woken_waiter_that_dies_hands_on(s: Script) -> None:
    a, b, _ = _item_for_the_first(s, "ab")
    a.leaves()
    b.hears(WOKEN, NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))


@case("hand-off")
def a_row_of_woken_waiters_that_die(s: Script) -> None:
    a, b, c, d, _ = _item_for_the_first(s, "abcd")
    a.leaves()
    b.hears(WOKEN, NO_REPLY)
    b.leaves()
    c.hears(WOKEN, NO_REPLY)
    c.leaves()
    d.hears(WOKEN, NO_REPLY)
    d.asks(pop(b"q"), popped(1, b"1"))


def _goes_on(name: str, frame: bytes, reply: bytes) -> None:
    @case("hand-off", f"woken_waiter_goes_on_without_popping[{name}]")
    def _(s: Script) -> None:
        a, b, _ = _item_for_the_first(s, "ab")
        a.asks(frame, reply)
        b.hears(WOKEN, NO_REPLY)
        b.asks(pop(b"q"), popped(1, b"1"))
        a.hears(NO_REPLY)


for _name, _frame, _reply in (
    ("cancel_wait", CANCEL_WAIT, CANCELED),
    ("ping", ping(b"pong"), b"pong"),
    ("set", set_(b"k", b"v"), b""),
    ("get", get(b"k"), blob(b"")),
    ("pop_of_another_queue", pop(b"r"), i64(0)),
    ("queue_len", queue_len(b"q"), i64(1)),
    ("check", check(b"q"), READY),
    ("wait_for_another_key", wait(b"k"), b""),
    ("barrier", barrier(b"b", 2), b""),
    ("push_to_another_queue", push(b"r", b"1"), b""),
):
    _goes_on(_name, _frame, _reply)


@case("hand-off")
def woken_waiter_that_is_refused_hands_on(s: Script) -> None:
    a, b, _ = _item_for_the_first(s, "ab")
    a.asks(b"\x13", CLOSED)
    b.hears(WOKEN, NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))


@case("hand-off")
def cancel_that_crosses_the_wake_hands_on(s: Script) -> None:
    a, b, z = s.peers("abz")
    a.says(wait(b"q"))
    b.says(wait(b"q"))
    z.says(push(b"q", b"1"))
    a.asks(CANCEL_WAIT, WOKEN + CANCELED)
    b.hears(WOKEN, NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))


@case("hand-off")
def woken_waiter_that_pushes_hands_on(s: Script) -> None:
    a, b, c, _ = _item_for_the_first(s, "abc")
    a.says(push(b"q", b"2"))
    b.hears(WOKEN)
    c.hears(WOKEN, NO_REPLY)
    c.asks(pop(b"q"), popped(2, b"1"))
    b.asks(pop(b"q"), popped(1, b"2"))


@case("hand-off")
def half_a_pop_and_then_gone_hands_on(s: Script) -> None:
    a, b, _ = _item_for_the_first(s, "ab")
    a.says(pop(b"q")[:-1])
    b.hears(NO_REPLY)
    a.leaves()
    b.hears(WOKEN, NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))


@case("hand-off")
def woken_waiter_that_waits_again_keeps_its_item(s: Script) -> None:
    a, b, _ = _item_for_the_first(s, "ab")
    a.asks(wait(b"q"), WOKEN)
    b.hears(NO_REPLY)
    a.leaves()
    b.hears(WOKEN, NO_REPLY)
    b.asks(pop(b"q"), popped(1, b"1"))


@case("pop-takes-first")
def nothing_to_hand_on_after_another_pop(s: Script) -> None:
    a, b, z = _item_for_the_first(s, "ab")
    z.asks(pop(b"q"), popped(1, b"1"))
    a.leaves()
    b.hears(NO_REPLY)


@case("hand-off")
def two_woken_one_takes_one_dies(s: Script) -> None:
    a, b, c, z = s.peers("abcz")
    for peer in (a, b, c):
        peer.says(wait(b"q"))
    z.says(push(b"q", b"1"), push(b"q", b"2"))
    a.hears(WOKEN)
    b.hears(WOKEN)
    c.hears(NO_REPLY)
    b.asks(pop(b"q"), popped(2, b"1"))
    c.hears(NO_REPLY)
    a.leaves()
    c.hears(WOKEN, NO_REPLY)
    c.asks(pop(b"q"), popped(1, b"2"))
