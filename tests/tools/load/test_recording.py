"""The file format of recordings, the decoding of traffic into it, and the order that a replay keeps. In memory."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import own_cases
from conformance.extension import extension_cases
from conformance.frames import (
    CANCEL_WAIT,
    CANCELED,
    WOKEN,
    add,
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
    set_,
    wait,
)
from conformance.script import Script
from conformance.targets import EngineTarget, byte_by_byte, play
from conformance.vectors import libuv_vectors
from support import HANDSHAKE, blob
from tcpstore_async.tools.load import recording as recordings
from tcpstore_async.tools.load.observer import Observer, Processes
from tcpstore_async.tools.load.recording import (
    FIELDS,
    REPLIES,
    Recording,
    RecordingError,
    RowEncoder,
    Step,
    read_recording,
)
from tcpstore_async.tools.load.replay_order import _WAITS, put_in_order
from tcpstore_async.tools.load.summary import summarize
from tcpstore_async.wire.commands import COMMANDS, PARKS, Command

TEXT = "2026-11-22T12:00:00Z"
NONCE = b"\x07\0\0\0"


class Tape:
    """A recording of connections that the test makes byte by byte, one millisecond apart."""

    def __init__(self, folder: Path, values: bool = False) -> None:
        self.path = folder / "recording"
        self.now = 0.0
        self.rows = RowEncoder(0.0, TEXT, values)
        self.processes = Processes()
        self.observers: dict[str, Observer] = {}

    def connect(self, *names: str) -> None:
        for name in names:
            self.observers[name] = Observer(self.rows, len(self.observers), "10.0.0.1", self.processes, self.tick())
            self.observers[name].sent(HANDSHAKE, self.now)

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def sent(self, name: str, *frames: bytes) -> None:
        self.observers[name].sent(b"".join(frames), self.tick())

    def replied(self, name: str, data: bytes) -> None:
        self.observers[name].replied(data, self.tick())

    def asked(self, name: str, frame: bytes, reply: bytes) -> None:
        self.sent(name, frame)
        self.replied(name, reply)

    def rows_of(self, *kinds: str) -> list[list[Any]]:
        rows = [json.loads(row) for row in self.rows.take().splitlines()]
        return [row[2:] for row in rows if isinstance(row, list) and not isinstance(row[0], str) and row[2] in kinds]

    def end(self) -> Recording:
        for observer in self.observers.values():
            observer.closed("client", self.tick())
        self.rows.add(self.tick(), -1, "END")
        self.path.write_bytes(self.rows.take())
        return read_recording(self.path)


@pytest.fixture
def tape(request: pytest.FixtureRequest, tmp_path: Path) -> Tape:
    """A recording of connections a, b and c; of `values`, if that is the parameter."""
    made = Tape(tmp_path, values=hasattr(request, "param"))
    made.connect("a", "b", "c")
    return made


with_values = pytest.mark.parametrize("tape", ["values"], indirect=True)


def names(steps: Iterable[Step]) -> list[tuple[int, str]]:
    return [(step.connection.number, step.command.name) for step in steps]


# The format


def test_commands_that_wait_are_known() -> None:
    cancels = {"CANCEL_WAIT", "CANCEL_FETCH"}
    assert {command.method for command in COMMANDS if command.flags & PARKS and command.name not in cancels} == _WAITS


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_row_can_hold_every_field(command: Command) -> None:
    """A new kind of field or reply needs a form in recordings."""
    assert set(FIELDS[command.request]) <= set("nkvli")
    assert command.request.kinds in ("u", "t") or len(FIELDS[command.request]) == command.request.arity
    assert REPLIES[command.reply] or command.reply.kind in ("", "u", "d", "a")


def test_values_are_hidden_and_their_equality_is_not(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"secret-1"), set_(b"/j", b"secret-2"), set_(b"/l", b"secret-1"))
    raw = tape.rows.take()
    assert b"secret" not in raw
    sets = [json.loads(row)[3:] for row in raw.splitlines() if b'"SET"' in row]
    assert sets == [[0, 0], [1, 1], [2, 0]]
    assert [json.loads(row) for row in raw.splitlines() if row.startswith(b'["V"')] == [["V", 8], ["V", 8]]


@with_values
def test_values_on_request(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", bytes(range(256))))
    recording = tape.end()
    assert recording.values_included
    assert [value.content for value in recording.values] == [bytes(range(256))]


def test_the_numbering_begins_anew_when_it_is_full(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_MOST_NUMBERS", 3)
    for number in range(10):
        tape.sent("a", set_(b"/%d" % (number % 5), b"%d" % number), wait(b"/%d" % number, b"/x"))
        tape.replied("a", WOKEN)
    recording = tape.end()
    sets = [step for step in recording.steps if step.command.name == "SET"]
    assert [recording.keys[step.fields[0]] for step in sets] == [b"/%d" % (number % 5) for number in range(10)]
    waits = [step for step in recording.steps if step.command.name == "WAIT"]
    for number, step in enumerate(waits):
        assert [recording.keys[key] for key in recording.lists[step.fields[0]]] == [b"/%d" % number, b"/x"]


def test_keys_that_are_no_text(tape: Tape) -> None:
    tape.sent("a", set_(b"/\xff\x00", b""), set_("/é\n".encode(), b""))
    assert tape.end().keys == [b"/\xff\x00", "/é\n".encode()]


@pytest.fixture
def small_job(tmp_path: Path) -> Tape:
    tape = Tape(tmp_path)
    tape.connect("a", "b")
    for name, pid in (("a", b"\x05\0\0\0"), ("b", b"\x06\0\0\0")):
        tape.asked(name, ping(pid), pid)
    tape.sent("b", wait(b"/k"))
    tape.sent("a", set_(b"/k", b"value"))
    tape.replied("b", WOKEN)
    tape.asked("b", get(b"/k"), blob(b"value"))
    return tape


def test_summary(small_job: Tape) -> None:
    summary = summarize(small_job.end())
    assert (summary.ranks, summary.connections, summary.requests, summary.complete) == (2, 2, 7, True)
    rows = {row.command: row for row in summary.commands}
    assert [(row.requests, row.ranks, row.fewest, row.most) for row in rows.values()] == [
        (2, 2, 1, 1), (2, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1),
    ]  # fmt: skip
    assert rows["SET"].request_bytes == len(set_(b"/k", b"value"))
    assert (rows["GET"].request_bytes, rows["GET"].reply_bytes) == (len(get(b"/k")), len(blob(b"value")))
    assert (rows["WAIT"].request_bytes, rows["WAIT"].reply_bytes) == (len(wait(b"/k")), 1)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_recording_that_was_cut_off(compressed: bool, small_job: Tape) -> None:
    """At every byte: what can be read is the beginning of what was recorded."""
    steps = names(small_job.end().steps)
    path = small_job.path
    whole = path.read_bytes()
    if compressed:
        packer = zlib.compressobj(wbits=31)
        whole = b"".join(
            packer.compress(row) + packer.flush(zlib.Z_SYNC_FLUSH) for row in whole.splitlines(keepends=True)
        )
    found: list[list[tuple[int, str]]] = []
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        try:
            recording = read_recording(path)
        except RecordingError as error:
            assert "not a recording" in str(error)
            assert not found
            continue
        assert not recording.complete or stop > len(whole) - 40
        found.append(names(recording.steps))
        assert found[-1] == steps[: len(found[-1])]
    assert found[-1] == steps


def test_a_compressed_recording_and_a_damaged_one(small_job: Tape) -> None:
    steps = names(small_job.end().steps)
    packed = bytearray(gzip.compress(small_job.path.read_bytes()))
    path = small_job.path.with_suffix(".gz")
    path.write_bytes(packed)
    assert names(read_recording(path).steps) == steps
    for place in (11, len(packed) - 6):  # what is compressed, and its checksum
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 255]) + packed[place + 1 :])
        with pytest.raises(RecordingError, match="is damaged and cannot be decompressed: ") as raised:
            read_recording(path)
        assert "\n" not in str(raised.value)


def test_the_time_of_a_recording_ends_with_its_last_event(small_job: Tape) -> None:
    small_job.now += 0.5
    for observer in small_job.observers.values():
        observer.closed("client", small_job.now)
    small_job.now += 60
    small_job.observers.clear()
    recording = small_job.end()
    assert recording.complete
    assert 0.5 < summarize(recording).seconds == recording.seconds - recording.first < 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not a recording: it is empty"),
        (b"\x00\xff\x01\n", "is not a recording"),
        (b"{}\n", "row 1: not a recording made by tcpstore record"),
        (
            b'{"format":"tcpstore-recording","version":9}\n',
            "row 1: format version 9 is not supported; this program reads 1",
        ),
        (b"HEAD[1\n", "row 2: not JSON"),
        (b"HEAD[1,0]\n", "row 2: "),
        (b'HEAD[1,0,"SET",0,0]\n', "row 2: "),
        (b'HEAD[1,0,"OPEN",0]\n[1,0,"SET",0,0]\n', "row 3: number 0 is not defined"),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"GET",0,0]\n', "row 4: 2 fields instead of 1"),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"WAIT",0]\n', "row 4: number 0 is not defined"),
        (b'HEAD["L",[0]]\n', "row 2: a list names an unknown key"),
        (b'HEAD["X",[0]]\n', "row 2: unknown kind of row 'X'"),
        (b'HEAD[1,0,"OPEN",0]\n[1,0,"NOTHING"]\n', "row 3: unknown command 'NOTHING'"),
        (b'HEAD[1,0,"OPEN",0]\n[1,0,"REPLY"]\n', "row 3: "),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"ADD",0,1]\n[1,0,"REPLY"]\n', "row 5: a field is missing"),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"GET",0]\n[1,0,"REPLY",7]\n', "row 5: number 7 is not defined"),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"ADD",0,1]\n[1,0,"REPLY","x"]\n', "row 5: 'x' is not a number"),
        (b'HEAD["K","/k"]\n[1,0,"OPEN",0]\n[1,0,"ADD",0,9223372036854775808]\n', "out of range for a 64-bit integer"),
        (
            b'HEAD[5,0,"OPEN",0]\n[-1,0,"CLOSE","client"]\n',
            "row 3: time -1 is negative; expected the microseconds since the previous row, 0 or more",
        ),
        (b'HEAD["V",-1]\n', "row 2: invalid value size -1"),
        (b'HEAD["V",3,"YQ=="]\n', "row 2: invalid value size 3"),
        (b"HEAD" + b"[" * 100_000 + b"\n", "row 2: "),
        (b"[" * (3 << 20), "row 0: longer than"),
    ],
)
def test_what_is_no_recording(text: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_LONGEST_ROW", 2 << 20)
    path = tmp_path / "recording"
    path.write_bytes(text.replace(b"HEAD", RowEncoder(0.0, TEXT).take()))
    with pytest.raises(RecordingError) as raised:
        read_recording(path)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damaged_recordings(small_job: Tape) -> None:
    """Whatever bytes change, a recording is read and put in order, or refused with one line."""
    small_job.end()
    path = small_job.path
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 2)] = rng.choice(
                [b"", b"0", b"9", b"-", b"[", b'"', b",", b"\xff", b"null"]
            )
        path.write_bytes(damaged)
        try:
            recording = read_recording(path)
        except RecordingError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        put_in_order(recording)
        summarize(recording)
    assert 500 < refused < 1500


def test_an_observer_survives_whatever_passes(tmp_path: Path) -> None:
    rng = random.Random(0)
    opcodes = [command.opcode for command in COMMANDS]
    for _ in range(300):
        tape = Tape(tmp_path)
        tape.connect("a")
        for _ in range(rng.randint(1, 12)):
            data = bytes([rng.choice(opcodes)]) + rng.choice([b"", b"\x02", b"\x01"]) + bytes(rng.randrange(12)) + b"/k"
            tape.sent("a", data[: rng.randint(1, len(data))])
            tape.replied("a", rng.randbytes(rng.randrange(9)) if rng.random() < 0.3 else bytes(rng.randrange(9)))
        put_in_order(tape.end())


def test_a_recording_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*: No such file or directory"):
        read_recording(tmp_path / "nothing")


# Decoding


class ObservedTarget(EngineTarget):
    """The store, with an observer at every connection."""

    def __init__(self, folder: Path, *, bytewise: bool = False) -> None:
        super().__init__(byte_by_byte if bytewise else lambda data: [data])
        self.tape = Tape(folder, values=True)

    def connect(self, peer: str) -> None:
        super().connect(peer)
        tape = self.tape
        tape.observers[peer] = Observer(tape.rows, len(tape.observers), peer, tape.processes, tape.tick())

    def _receive(self, peer: str, piece: bytes) -> None:
        self.tape.sent(peer, piece)
        super()._receive(peer, piece)

    def _flush(self, session: Any) -> None:
        for part in session.out:
            self.tape.replied(session.owner, bytes(part))
        super()._flush(session)


SCRIPTS = [
    script for script in [*libuv_vectors(), *own_cases(), *extension_cases()]
    if not script.stops_server and sum(len(step.data) for step in script.steps) < 1 << 20
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_whatever_passes_is_recorded_or_opaque(script: Script, tmp_path: Path) -> None:
    """No traffic of the conformance tests raises; and how it is cut into chunks does not matter."""
    found = []
    for bytewise in (False, True):
        target = ObservedTarget(tmp_path, bytewise=bytewise)
        play(script, target)
        recording = target.tape.end()
        opaque = {connection.number for connection in recording.connections if connection.opaque}
        put_in_order(recording)
        found.append(
            (opaque, sorted((step.connection.number, step.index, step.command.name) for step in recording.steps))
        )
    if not any(step.ours.closed for step in script.steps):  # else what the server did not read may be recorded
        assert found[0] == found[1] or found[0][0]


def test_unknown_opcode(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"v"), b"\xf0rest")
    tape.sent("a", get(b"/k"))
    tape.replied("a", b"whatever")
    tape.observers["a"].closed("server", tape.tick())
    assert tape.rows_of("SET", "OPAQUE", "GET", "REPLY", "CLOSE") == [
        ["SET", 0, 0],
        ["OPAQUE", "opcode 240"],
        ["CLOSE", "server", len(HANDSHAKE + set_(b"/k", b"v") + b"\xf0rest" + get(b"/k")), len(b"whatever")],
    ]


def test_replies_that_cannot_be(tape: Tape) -> None:
    tape.asked("a", wait(b"/k"), b"\x07")
    tape.replied("b", b"unexpected")
    assert [row[1] for row in tape.rows_of("OPAQUE")] == [
        "Stop_waiting response is expected",
        "server sent 10 unexpected bytes",
    ]


def test_a_canceled_wait(tape: Tape) -> None:
    tape.sent("a", wait(b"/k"))
    tape.sent("a", CANCEL_WAIT)
    tape.replied("a", CANCELED)
    tape.sent("b", wait(b"/k"))
    tape.sent("b", CANCEL_WAIT)
    tape.replied("b", WOKEN + CANCELED)
    tape.asked("c", CANCEL_WAIT, CANCELED)
    tape.asked("c", get(b"/k"), blob(b""))
    recording = tape.end()
    assert [(step.command.name, step.cancels, step.canceled, step.reply) for step in recording.steps[3:]] == [
        ("WAIT", False, True, [False]),
        ("CANCEL_WAIT", True, False, None),
        ("WAIT", False, True, [True]),
        ("CANCEL_WAIT", True, False, None),
        ("CANCEL_WAIT", False, False, []),
        ("GET", False, False, [0]),
    ]
    assert not any(connection.opaque for connection in recording.connections)


def test_a_request_behind_a_wait_is_opaque(tape: Tape) -> None:
    tape.sent("a", wait(b"/k"), get(b"/k"))
    assert tape.rows_of("OPAQUE") == [["OPAQUE", "GET while WAIT is blocking"]]


def test_every_kind_of_row(tape: Tape) -> None:
    tape.asked("a", compare_set(b"/k", b"", b"new"), blob(b"new"))
    tape.asked("a", multi_get(b"/k", b"/j"), blob(b"new") + blob(b""))
    tape.asked("a", multi_get(), b"")
    tape.sent("a", multi_set((b"/k", b"1"), (b"/j", b"2")))
    tape.asked("a", check(b"/k"), b"\0")
    tape.sent("a", push(b"/q", b"item"))
    tape.asked("a", pop(b"/q"), popped(1, b"item"))
    tape.asked("a", pop(b"/q"), i64(0))
    tape.asked("a", b"\x11", i64(2) + blob(b"/k") + blob(b"/j"))
    tape.asked("a", barrier(b"/b", 1), WOKEN)
    recording = tape.end()
    assert [(step.command.name, step.fields, step.reply) for step in recording.steps[3:]] == [
        ("COMPARE_SET", [0, 0, 1], [1]),
        ("MULTI_GET", [0], [[1, 0]]),
        ("MULTI_GET", [1], None),
        ("MULTI_SET", [[[0, 2], [1, 3]]], None),
        ("CHECK", [2], [True]),
        ("QUEUE_PUSH", [2, 4], None),
        ("QUEUE_POP", [2], [1, 4]),
        ("QUEUE_POP", [2], [0]),
        ("LIST_KEYS", [], [2, 4]),
        ("BARRIER", [3, 1], []),
    ]


# The order of a replay


def prerequisites(recording: Recording) -> dict[tuple[int, str], set[tuple[int, str]]]:
    """By connection and command, what each step waits for."""
    put_in_order(recording)
    found: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for step in recording.steps:
        for dependent in step.dependents:
            found.setdefault(names([dependent])[0], set()).add(names([step])[0])
    return found


def test_a_read_waits_for_the_write_that_it_saw(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"v"))
    tape.asked("b", check(b"/k"), b"\0")
    recording = tape.end()
    assert prerequisites(recording) == {(1, "CHECK"): {(0, "SET")}}
    assert [step.fence for step in recording.steps if step.command.name == "SET"] == [True]


def test_an_overlapping_read_that_found_the_old_value_precedes_the_write(tmp_path: Path) -> None:
    """The SET passes the recorder before the reply to the GET, and nothing but the value shows which came first."""
    for found, order in ((b"old", {(1, "SET"): {(0, "SET"), (2, "GET")}}), (b"new", {(2, "GET"): {(1, "SET")}})):
        tape = Tape(tmp_path)
        tape.connect("a", "b", "c")
        tape.sent("a", set_(b"/k", b"old"))
        tape.asked("a", ping(NONCE), NONCE)
        tape.sent("c", get(b"/k"))
        tape.sent("b", set_(b"/k", b"new"), ping(NONCE))
        tape.replied("c", blob(found))
        tape.replied("b", NONCE)
        assert prerequisites(tape.end()).items() >= order.items()


@with_values
def test_an_overlapping_read_of_an_old_sum_precedes_the_add(tape: Tape) -> None:
    tape.asked("a", add(b"/n", 1), i64(1))
    tape.sent("b", get(b"/n"))
    tape.asked("a", add(b"/n", 1), i64(2))
    tape.replied("b", blob(b"1"))
    recording = tape.end()
    put_in_order(recording)
    assert [names(step.dependents) for step in recording.steps if step.command.name == "GET"] == [[(0, "ADD")]]


def test_a_read_of_several_keys_precedes_the_write_of_any_of_them(tape: Tape) -> None:
    """Its place is found with its first key; the second has fewer requests, whose places are lower."""
    for _ in range(3):
        tape.sent("a", set_(b"/j", b"old"))
    tape.sent("a", set_(b"/k", b"old"))
    tape.asked("a", ping(NONCE), NONCE)
    tape.sent("c", multi_get(b"/j", b"/k"))
    tape.sent("b", set_(b"/k", b"new"), ping(NONCE))
    tape.replied("c", blob(b"old") * 2)
    tape.replied("b", NONCE)
    assert (2, "MULTI_GET") in prerequisites(tape.end())[1, "SET"]


def test_a_write_does_not_wait_for_the_wait_that_it_ends(tape: Tape) -> None:
    """A CHECK that did not see it is answered late."""
    tape.sent("a", check(b"/k"))
    tape.sent("b", wait(b"/k"))
    tape.sent("c", set_(b"/k", b"v"), ping(NONCE))
    tape.replied("b", b"\0")
    tape.replied("a", b"\1")
    tape.replied("c", NONCE)
    assert prerequisites(tape.end()) == {(2, "SET"): {(0, "CHECK")}}


def test_a_write_waits_for_the_reads_that_did_not_see_it(tape: Tape) -> None:
    tape.asked("b", check(b"/k"), b"\1")
    tape.asked("c", check(b"/j"), b"\1")
    tape.sent("a", set_(b"/k", b"v"))
    assert prerequisites(tape.end()) == {(0, "SET"): {(1, "CHECK")}}


def test_a_wait_needs_no_order(tape: Tape) -> None:
    """Nor does the read behind it: the wait has ended only because the key is there."""
    tape.sent("a", set_(b"/k", b"v"))
    tape.asked("b", wait(b"/k"), WOKEN)
    tape.asked("b", get(b"/k"), blob(b"v"))
    recording = tape.end()
    assert prerequisites(recording) == {}
    assert not any(step.fence for step in recording.steps)


def test_a_wait_for_a_key_that_is_written_later_has_no_order(tape: Tape) -> None:
    tape.sent("b", wait(b"/k"))
    tape.sent("a", set_(b"/k", b"v"))
    tape.replied("b", WOKEN)
    assert prerequisites(tape.end()) == {}


def test_a_wait_after_a_removal_waits_for_that(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"v"))
    tape.asked("a", delete(b"/k"), i64(1))
    tape.sent("b", wait(b"/k"))
    tape.sent("a", set_(b"/k", b"w"))
    tape.replied("b", WOKEN)
    assert prerequisites(tape.end()) == {(1, "WAIT"): {(0, "DELETE_KEY")}}


def test_a_removal_waits_for_those_that_have_waited(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"v"))
    tape.asked("b", wait(b"/k"), WOKEN)
    tape.asked("a", delete(b"/k"), i64(1))
    assert prerequisites(tape.end()) == {(0, "DELETE_KEY"): {(1, "WAIT")}}


def test_sums_decide_the_order_of_additions(tape: Tape) -> None:
    """The second one's reply was seen first."""
    for name in "abc":
        tape.sent(name, add(b"/n", 1))
    for name, total in (("c", 2), ("a", 1), ("b", 3)):
        tape.replied(name, i64(total))
    assert prerequisites(tape.end()) == {(2, "ADD"): {(0, "ADD")}, (1, "ADD"): {(2, "ADD")}}


def test_arrivals_at_a_barrier_have_no_order(tape: Tape) -> None:
    for name in "abc":
        tape.sent(name, barrier(b"/b", 3))
    for name in "cba":
        tape.replied(name, WOKEN)
    tape.asked("a", get(b"/b"), blob(b"3"))
    assert prerequisites(tape.end()) == {}


def test_the_number_of_keys_waits_for_every_key(tape: Tape) -> None:
    tape.sent("a", set_(b"/k", b"v"), set_(b"/k", b"w"))
    tape.asked("c", b"\x07", i64(1))
    tape.sent("b", set_(b"/j", b"v"))
    assert prerequisites(tape.end()) == {(2, "GETNUMKEYS"): {(0, "SET")}, (1, "SET"): {(2, "GETNUMKEYS")}}


def test_a_hidden_number_is_inferred_from_a_sum(tape: Tape) -> None:
    tape.sent("a", set_(b"/n", b"41"), set_(b"/k", b"xx"))
    tape.asked("a", add(b"/n", 1), i64(42))
    recording = tape.end()
    put_in_order(recording)
    assert [value.integer for value in recording.values] == [41, None]


def test_no_connection_is_unfinished(tape: Tape) -> None:
    """Somebody still waits at the end: that request has no reply, and nothing waits for it."""
    tape.sent("a", wait(b"/k"))
    tape.sent("b", barrier(b"/b", 2))
    recording = tape.end()
    assert [step.reply for step in recording.steps] == [None] * 5
    assert prerequisites(recording) == {}
