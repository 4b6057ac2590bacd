"""The recorded vectors as scripts.

A vector of `vectors.json` holds the bytes of one call; `STATES` adds what stood before it, what others did meanwhile
and what was done after it. A vector of `vectors_badinput.json` is a complete transcript from an empty store.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.divergences import MENDED
from conformance.frames import LIST_KEYS, READY, WOKEN, add, barrier, check, i64, multi_get, push, queue_len, set_
from conformance.script import CLOSED, NO_REPLY, Answer, Deed, Peer, Script, Step
from support import blob, keys, u64

HERE = Path(__file__).parent

Values = dict[bytes, bytes]


@dataclass(frozen=True)
class State:
    before: list[bytes] = field(default_factory=list)
    """Requests that made the state in which the call was recorded."""
    during: tuple[bytes, bytes] | None = None
    """What somebody else said after the call's first bytes, and the reply."""
    later: list[tuple[bytes, bytes]] = field(default_factory=list)
    """What somebody else said after the call, before the keys were listed, and the replies."""
    after: Values | None = None
    """All keys and values in the end, where the vector does not hold them in full."""


def _with(**values: bytes) -> State:
    return State([set_(b"/" + key.encode(), value) for key, value in values.items()])


_NO_KEYS = State(after={})
_JOINED_ONCE = State(after={b"init/": b"1"})

STATES = {
    "ctor_client_wsNone_waitTrue": _NO_KEYS,
    "ctor_client_wsNone_waitFalse": _NO_KEYS,
    "clone": _NO_KEYS,
    "ctor_client_ws1_waitTrue": _JOINED_ONCE,
    "ctor_client_ws1_waitFalse": _NO_KEYS,
    "ctor_client_ws2_waitTrue": _JOINED_ONCE,
    "ctor_client_ws2_waitFalse": _NO_KEYS,
    "ctor_master_wsNone_waitTrue_timeout5": _NO_KEYS,
    "ctor_master_ws1_waitTrue_timeout5": _JOINED_ONCE,
    "ctor_master_ws1_waitFalse_timeout5": _NO_KEYS,
    "ctor_master_ws2_waitFalse_timeout5": _NO_KEYS,
    "ctor_master_ws2_waitTrue_timeout0.3": _JOINED_ONCE,
    "ctor_master_ws-1_waitTrue_timeout5": _NO_KEYS,
    "set_2000_bytes": State(after={b"/k": b"a" * 2000}),
    "set_overwrite": _with(k=b"v"),
    "get_present": _with(k=b"hello"),
    "get_present_empty": _with(k=b""),
    "get_binary": _with(k=b"\x00\xff\x80"),
    "add_positive": _with(n=b"10"),
    "add_negative": _with(n=b"10"),
    "add_zero_present": _with(n=b"7"),
    "add_non_integer": _with(n=b"abc"),
    "add_on_empty": _with(n=b""),
    "add_out_of_range_value": _with(n=b"9" * 20),
    "compare_set_match": _with(k=b"old"),
    "compare_set_mismatch": _with(k=b"old"),
    "compare_set_empty_value_match": _with(k=b""),
    "check_one_present": _with(k=b"v"),
    "check_many_present": _with(a=b"1", b=b"1", c=b"1"),
    "wait_present": _with(k=b"v"),
    "wait_many_present": _with(a=b"1", b=b"1"),
    "wait_absent_timeout0": State(later=[(set_(b"/k", b"v"), b"")]),
    "wait_absent_timeout_negative": State(during=(set_(b"/k", b"v"), b"")),
    "wait_duplicate_key": State(during=(set_(b"/k", b"late"), b"")),
    "num_keys_2": _with(a=b"1", b=b"1"),
    "delete_present": _with(k=b"v"),
    "append_present": _with(k=b"ab"),
    "multi_get": _with(a=b"1", b=b"\x00\xff"),
    "queue_push": State(later=[(check(b"/q"), READY), (queue_len(b"/q"), i64(1))]),
    "queue_len_3": State([push(b"/q", b"1"), push(b"/q", b"2"), push(b"/q", b"3")]),
    "queue_pop_block_present": State(
        [push(b"/q", b"1"), push(b"/q", b"2"), push(b"/q", b"3")], later=[(queue_len(b"/q"), i64(2))]
    ),
    "queue_pop_nonblock_present": State(
        [push(b"/q", b"1"), push(b"/q", b"2"), push(b"/q", b"3")], later=[(queue_len(b"/q"), i64(2))]
    ),
    "list_keys_3": _with(a=b"1", b=b"1", c=b"1"),
    "barrier_ws2_completes": State(during=(barrier(b"/b", 2), WOKEN)),
    "barrier_ws2_second": _with(b=b"1"),
    "barrier_non_integer": _with(b=b"abc"),
    "barrier_timeout0": State(later=[(set_(b"/b", b"5"), b"")]),
    "key_8191": State(after={b"/" + b"k" * 8191: b"v"}),
    "payload_8388608": State(after={b"/k": b"a" * 8388608}),
    "payload_8388609": _NO_KEYS,
    "check_131072_keys": _with(k=b"v"),
    "check_131073_keys": _with(k=b"v"),
    "prefix_get": State([set_(b"/p/k", b"v")], after={b"/p/k": b"v"}),
    "prefix_multi_get": State([set_(b"/p/a", b"1"), set_(b"/p/b", b"2")], after={b"/p/a": b"1", b"/p/b": b"2"}),
    "prefix_list_keys": State([set_(b"/p/a", b"1"), set_(b"/other", b"1")], after={b"/p/a": b"1", b"/other": b"1"}),
    "prefix_num_keys": State([set_(b"/p/a", b"1"), set_(b"/other", b"1")], after={b"/p/a": b"1", b"/other": b"1"}),
    "prefix_set": State(after={b"/p/k": b"v"}),
    "prefix_append": State(after={b"/p/k": b"v"}),
    "prefix_barrier_ws1": State(after={b"/p/b/num_members": b"1", b"/p/b/last_member": b"1"}),
    "prefix_barrier_ws2_timeout": State(after={b"/p/b/num_members": b"1"}),
}
"""Vectors that are not here start from an empty store, undisturbed."""

ROWS = {
    "key_len_8192": "key_bytes",
    "key_len_8193_header_only": "key_bytes",
    "payload_8388608": "value_bytes",
    "payload_8388609": "value_bytes",
    "check_131072_keys": "keys",
    "check_131073_keys": "keys",
    "list_keys_3": "list-keys-order",
    "delete_while_waiting": "counted-keys",
    "cancel_idle": "cancel",
    "set_then_cancel": "cancel",
    "wait_cancel_pipelined": "cancel",
    "barrier_delete_reset": "delete-wakes-nobody",
    "get_missing_raw": "get-missing",
    "mget_missing_raw": "get-missing",
    "zero_keys_mget": "no-keys",
    "zero_keys_check": "no-keys",
    "compare_set_missing_nonempty_expected": "compare-set-missing",
    "compare_set_empty_value_match": "compare-set-missing",
    "add_on_empty": "numbers",
    "barrier_round": "barrier-counts-on",
    "barrier_disconnect": "barrier-leavers",
    "barrier_cancel": "barrier-leavers",
    "barrier_check": "barrier-key",
    "barrier_ws2_first_wakes_waiter": "barrier-key",
    "barrier_add_wakes": "barrier-opened-by-writes",
    "barrier_same_conn_twice": "barrier-same-peer",
    "queue_vs_key": "queue-and-value",
    "set_wakes_queue_waiters": "set-wakes-queue",
    "queue_pop_nonblock_present": "pop-length",
    "zero_length_key": "any-bytes",
    "validate_twice": "validate-twice",
    "truncated_then_half_close": "half-close",
}
"""The rows of `docs/quirks.md` that vectors show in which we answer as PyTorch does."""

LISTS = {"list_keys_3": {"a.2": 0}, "prefix_list_keys": {"a.2": 0}, "mset_partial": {"b.4": 0}, "list_init": {"a.2": 8}}
"""Where a LIST_KEYS reply with more than one key begins in an answer."""

LONG = {
    ("pipelined_1000_adds", Deed.SAY): add(b"/n", 1) * 1000,
    ("pipelined_1000_adds", Deed.HEAR): b"".join(i64(number) for number in range(1, 1001)),
    ("key_len_8192", Deed.SAY): b"k" * 8192,
    ("key_len_8193_header_only", Deed.SAY): b"k" * 8193 + i64(1),
}
"""What was too long to be recorded whole and carries no rule."""


def libuv_vectors() -> list[Script]:
    return [_call(entry) for entry in _entries("vectors.json")] + [
        _transcript(entry) for entry in _entries("vectors_badinput.json")
    ]


def _entries(file: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((HERE / file).read_text())
    return [entry for entry in entries if entry["backend"] == "libuv"]


# vectors.json


def _call(entry: dict[str, Any]) -> Script:
    name = entry["name"]
    state = STATES.get(name, State())
    vector = _Vector(name)
    if state.before:
        vector.script.peer("before").says(*state.before)
    exchange = [segment for segment in entry["exchange"] if segment["dir"] != "c2s-close"]
    greets = bool(exchange) and exchange[0]["hex"].startswith("00cef7853c")
    a = vector.peer("a", greet=not greets)
    if not greets:
        vector.hears("a", NO_REPLY)
    for number, segment in enumerate(exchange):
        if segment["dir"] == "c2s":
            a.says(_segment(segment))
        elif segment["dir"] == "s2c":
            vector.hears("a", Answer(bytes.fromhex(segment["hex"])))
        else:
            vector.hears("a", CLOSED)
        if number == 0 and state.during is not None:
            vector.script.peer("meanwhile").asks(*state.during)
    for request, reply in state.later:
        vector.script.peer(f"later{len(vector.script.steps)}").asks(request, reply)
    _look(vector.script, _values_after(entry) if state.after is None else state.after)
    return vector.finish()


def _segment(segment: dict[str, Any]) -> bytes:
    data = bytes.fromhex(segment["hex"])
    if "rule" not in segment:
        return data
    expanded = expand(segment["rule"].split("  (")[0])
    assert expanded.startswith(data), segment["rule"]
    assert len(expanded) == segment["hex_len"] or "cut off" in segment["rule"]
    return expanded


_TERM = re.compile(r"u64\((\d+)\)|'(\w|/\w?)'(?:\*(\d+))?|\((.*)\)\*(\d+)|([0-9a-f]{2})")


def expand(rule: str) -> bytes:
    """The bytes that a vector's `rule` stands for, as `01 + u64(2) + '/k' + u64(3) + 'a'*3`."""
    parts = []
    at = 0
    while at < len(rule):
        term = _TERM.match(rule, at)
        assert term is not None, rule[at:]
        number, text, times, inner, inner_times, byte = term.groups()
        if number:
            parts.append(u64(int(number)))
        elif text:
            parts.append(text.encode() * int(times or 1))
        elif inner:
            parts.append(expand(inner) * int(inner_times))
        else:
            parts.append(bytes.fromhex(byte))
        at = term.end()
        while at < len(rule) and rule[at] in " +":
            at += 1
    return b"".join(parts)


def _values_after(entry: dict[str, Any]) -> Values:
    after = entry["server_keys_after"]
    assert isinstance(after, dict), f"{entry['name']}: what the server holds is not recorded in full"
    return {b"/" + key.encode(): bytes.fromhex(value) for key, value in after.items()}


def _look(script: Script, values: Values) -> None:
    """Somebody else finds exactly these values."""
    looker = script.peer("looker")
    looker.says(LIST_KEYS)
    looker.hears(keys(*values), listed=0)
    if values:
        looker.asks(multi_get(*values), b"".join(map(blob, values.values())))


# vectors_badinput.json


def _transcript(entry: dict[str, Any]) -> Script:
    name = entry["name"]
    vector = _Vector(name)
    peers: dict[str, Peer] = {}
    for step in entry["steps"]:
        who, deed = step["conn"], step["op"]
        if deed == "connect":
            peers[who] = vector.peer(who, greet=False)
        elif deed == "send":
            peers[who].says(_long(name, Deed.SAY, step))
        elif deed == "shutdown_wr":
            peers[who].half_closes()
        elif deed == "close":
            peers[who].leaves()
        else:
            if name == "server_destroyed" and step["outcome"] == "closed":
                vector.script.steps.append(Step(who, Deed.STOP_SERVER))
            data = _long(name, Deed.HEAR, step)
            vector.hears(who, Answer(data, closed="closed" in step["outcome"] or "reset" in step["outcome"]))
    return vector.finish()


def _long(name: str, deed: Deed, step: dict[str, Any]) -> bytes:
    data = bytes.fromhex(step["hex"])
    if "hex_len" not in step:
        return data
    expanded = LONG[name, deed]
    assert expanded.startswith(data)
    assert expanded.endswith(bytes.fromhex(step.get("last8", "")))
    assert len(expanded) == step["hex_len"]
    return expanded


class _Vector:
    """Writes a script, and puts our answers beside the recorded ones that are mended."""

    def __init__(self, name: str) -> None:
        self.mended = MENDED.get(name)
        self.script = Script(name, self.mended.row if self.mended else ROWS.get(name, ""))
        self.peers: dict[str, Peer] = {}
        self.heard: dict[str, int] = {}
        self.used: set[str] = set()

    def peer(self, name: str, *, greet: bool) -> Peer:
        self.peers[name] = peer = self.script.peer(name, greet=greet)
        self.heard[name] = 0
        return peer

    def hears(self, who: str, recorded: Answer) -> None:
        self.heard[who] += 1
        answer = f"{who}.{self.heard[who]}"
        ours = recorded
        if self.mended is not None and answer in self.mended.answers:
            torch, text = self.mended.answers[answer]
            assert _answer(torch) == recorded, f"{self.script.name}, {answer}: recorded is {recorded}, not {torch}"
            ours = _answer(text)
            self.used.add(answer)
        self.peers[who].hears(ours, recorded, LISTS.get(self.script.name, {}).get(answer))

    def finish(self) -> Script:
        expected = set(self.mended.answers) if self.mended else set()
        assert self.used == expected, f"{self.script.name}: no such answers {expected - self.used}"
        return self.script


def _answer(text: str) -> Answer:
    if text == "closed":
        return CLOSED
    return NO_REPLY if text == "silent" else Answer(bytes.fromhex(text))
