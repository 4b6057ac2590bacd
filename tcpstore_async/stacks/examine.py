"""Look at processes of this machine: at first from outside, then at their frames where they or py-spy show them.

Knows the ways to frames and their order. Must not know ranks, nor what follows. Invariants: within the seconds given,
but for the time that the kernel takes; only processes of the own user are asked or read; none of them is stopped.
"""

import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Final

import msgspec

from . import py_spy
from .asking import ask, dumped
from .kernel import GONE, INTERRUPTED, STOPPED, Seen, describe, look
from .report import Collective, Doing, Group, HostReport, fitted

_GIL_SECONDS: Final = 1.0
"""After which a responder that has not answered does not get the GIL."""
_CPU_SECONDS: Final = 0.5
"""What a process uses is counted in steps of 10 ms."""
_BUSY: Final = 0.5
"""Share of a core from which on a process differs from one that waits."""
_MOST_BYTES: Final = 1 << 16


class _Question(msgspec.Struct):
    pids: list[int]
    until: float
    """On the monotonic clock, which all processes share: the start of this one is part of the time."""


def examine(pids: Sequence[int], seconds: float = 1.5) -> HostReport:
    """Return what processes do, the odd ones first."""
    start = time.monotonic()
    until = start + seconds
    before = {pid: look(pid) for pid in pids}
    ours = [pid for pid, seen in before.items() if seen.user == os.geteuid() and seen.state not in (GONE, "zombie")]
    awake = [pid for pid in ours if before[pid].state not in STOPPED]
    # A third is for py-spy and signals.
    answers = ask(awake, min(_GIL_SECONDS, seconds * 2 / 3))
    time.sleep(max(start + min(_CPU_SECONDS, seconds / 2) - time.monotonic(), 0))
    passed = time.monotonic() - start
    after = {pid: look(pid) for pid in before}
    cpu = {pid: (after[pid].cpu - seen.cpu) / passed for pid, seen in before.items()}
    doing = {pid: _outside(pid, seen, after[pid]) for pid, seen in before.items()}
    for pid, seen in before.items():
        if seen.user not in (-1, os.geteuid()):
            doing[pid] = _with(doing[pid], no_stack="another user's")
    for pid, answer in answers.items():
        if answer is not None:
            doing[pid] = _with(doing[pid], "responder", answer.frames, answer.collectives)
    left = [pid for pid in ours if not doing[pid].source and doing[pid].state != GONE]
    _add_frames(doing, _odd_first(left, doing, cpu), answers.keys(), until)
    return HostReport(socket.gethostname(), _grouped(doing, cpu, {pid: seen.switches for pid, seen in after.items()}))


def _outside(pid: int, before: Seen, after: Seen) -> Doing:
    if after.state == GONE or after.born != before.born:
        return Doing(GONE, no_stack=GONE)
    return describe(pid, after.state)


def _with(
    doing: Doing,
    source: str = "",
    frames: tuple[str, ...] = (),
    collectives: tuple[Collective, ...] = (),
    no_stack: str = "",
) -> Doing:
    return Doing(doing.state, doing.wchan, doing.call, source, frames, collectives, no_stack)


def _add_frames(doing: dict[int, Doing], pids: list[int], responders: Container[int], until: float) -> None:
    """Add the frames of processes whose responder has not answered, or that have none, or why there are none."""
    program = py_spy.find()
    found = py_spy.spy(program, pids, until) if program else {}
    silent = [pid for pid in pids if pid in responders and isinstance(found.get(pid, ""), str)]
    held = dumped([pid for pid in silent if _restarts(doing[pid])], until)
    for pid in pids:
        frames = found.get(pid, "")
        if pid in held:
            doing[pid] = _with(doing[pid], "faulthandler", held[pid])
        elif not isinstance(frames, str):
            doing[pid] = _with(doing[pid], "py-spy", frames)
        elif doing[pid].state in STOPPED:
            doing[pid] = _with(doing[pid], no_stack="stopped")
        else:
            why = "the GIL is held" if pid in responders else "no responder"
            doing[pid] = _with(doing[pid], no_stack=f"{frames}, {why}" if frames else why)


def _restarts(doing: Doing) -> bool:
    """Return whether what a process does goes on after a signal: nobody's sleep is to end because we ask."""
    return doing.state == "running" or (doing.call != "" and doing.call not in INTERRUPTED)


def _odd_first(pids: Iterable[int], doing: dict[int, Doing], cpu: dict[int, float]) -> list[int]:
    """Return processes, the odd ones first as far as the kernel shows: time may not suffice for all."""
    groups = defaultdict(list)
    for pid in pids:
        one = doing[pid]
        groups[one.state, one.wchan, one.call, cpu[pid] >= _BUSY].append(pid)
    return [pid for group in sorted(groups.values(), key=len) for pid in group]


def _same(doing: Doing, busy: bool) -> tuple[object, ...]:
    """Return what is the same of two processes that do the same."""
    if not doing.frames:
        return doing.state, doing.wchan, doing.call, doing.no_stack
    # A process that waits in a loop runs now and then, and one that computes sleeps.
    state = doing.state if doing.state in STOPPED else busy
    held = doing.source == "faulthandler"
    return state, held, doing.frames, *[(one.group, one.name, one.number) for one in doing.collectives]


def _grouped(doing: dict[int, Doing], cpu: dict[int, float], switches: dict[int, int]) -> list[Group]:
    groups = defaultdict(list)
    for pid, one in doing.items():
        groups[_same(one, cpu[pid] >= _BUSY)].append(pid)
    return [
        Group(
            pids,
            _longest([doing[pid] for pid in pids]),
            [round(max(cpu[pid], 0.0), 3) for pid in pids],
            [switches[pid] for pid in pids],
        )
        for pids in sorted(groups.values(), key=len)
    ]


def _longest(alike: list[Doing]) -> Doing:
    """Return the one that has been in its collectives for the longest time."""
    return max(alike, key=lambda doing: max((one.since for one in doing.collectives), default=0.0))


def main() -> None:
    """Read a question from standard input, and write the report to standard output.

    However late the process has started, it tells what the kernel knows.
    """
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    sys.stdout.buffer.write(fitted(examine(question.pids, max(0.0, question.until - time.monotonic())), _MOST_BYTES))
