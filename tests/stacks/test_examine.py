"""Processes that do something known, looked at from outside: by the kernel alone, with py-spy, and by their answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from support import LIMIT, until
from tcpstore_async.base import python_process
from tcpstore_async.stacks import asking, py_spy
from tcpstore_async.stacks import examine as examining
from tcpstore_async.stacks.examine import examine
from tcpstore_async.stacks.kernel import describe, look
from tcpstore_async.stacks.report import Collective, Doing, Group, HostReport, fitted

pytestmark = pytest.mark.needs_proc

PY_SPY = py_spy.find()

PROGRAM = """
import ctypes, os, sys, time, threading
from tcpstore_async.stacks import switch

def sleeping(): time.sleep(1000)
def reading(): os.read(os.pipe()[0], 1)
def looping():
    while True: pass
def holding(): ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
def joining():
    thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
    thread.start()
    thread.join()
def ending(): pass

switch.start()
os.write(1, b"1")
globals()[sys.argv[1]]()
"""
"""Does what its argument says; with TCPSTORE_STACKS=1, after it has started a responder."""

DEEDS = ("sleeping", "reading", "looping", "holding", "joining")
CALLS = {
    "sleeping": ("clock_nanosleep", "pselect6"),
    "reading": ("read",),
    "holding": ("read",),
    "joining": ("futex",),
}


def state(pid: int) -> str:
    return look(pid).state


@contextmanager
def doing(deed: str, program: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process and yield it once it does what it should."""
    command = [sys.executable, str(program), deed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"1"
            if deed in CALLS:
                until(lambda: describe(process.pid, "").call in (*CALLS[deed], ""))
                until(lambda: state(process.pid) == "sleeping")
            yield process
        finally:
            process.kill()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "deeds.py"
    path.write_text(PROGRAM)
    return path


@contextmanager
def all_of_them(program: Path, **env: str) -> Iterator[dict[int, str]]:
    """Yield what processes do, keyed by pid; one of them has been stopped."""
    with ExitStack() as stack:
        found = {stack.enter_context(doing(deed, program, **env)).pid: deed for deed in DEEDS}
        stopped = stack.enter_context(doing("sleeping", program, **env))
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: state(stopped.pid) == "stopped")
        yield {**found, stopped.pid: "stopped"}


def looked(names: dict[int, str], seconds: float = 2 * LIMIT) -> dict[str, tuple[Doing, float]]:
    """Return what is seen of each, keyed by what it does, with the share of a core."""
    report = examine(list(names), seconds)
    assert report.host == socket.gethostname()
    return {
        names[pid]: (group.doing, cpu)
        for group in report.groups
        for pid, cpu in zip(group.pids, group.cpu, strict=True)
    }


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes have as much time to answer as machines under load need."""
    monkeypatch.setattr(examining, "_GIL_SECONDS", LIMIT)
    monkeypatch.setattr(asking, "_DUMP_SECONDS", LIMIT)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: "")


def looped(found: dict[str, tuple[Doing, float]]) -> bool:
    """Return whether the loop has used more CPU than all others."""
    return found["looping"][1] > max(cpu for deed, (_, cpu) in found.items() if deed != "looping")


@pytest.mark.usefixtures("no_py_spy")
def test_from_outside(program: Path) -> None:
    with all_of_them(program, TCPSTORE_STACKS="") as names:
        found = looked(names)
        until(lambda: looped(looked(names)))
    assert {deed: one.state for deed, (one, _) in found.items() if deed != "looping"} == {
        **dict.fromkeys(("sleeping", "reading", "holding", "joining"), "sleeping"),
        "stopped": "stopped",
    }
    for deed, calls in CALLS.items():
        one = found[deed][0]
        assert one.call in (*calls, ""), "empty where the kernel does not tell"
        assert (one.source, one.frames, one.no_stack) == ("", (), "no responder")
    assert found["stopped"][0].no_stack == "stopped"


@pytest.mark.usefixtures("no_py_spy")
def test_by_their_answers(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with all_of_them(program, TCPSTORE_STACKS="1") as names:
        holding = next(pid for pid, deed in names.items() if deed == "holding")
        found = looked({pid: deed for pid, deed in names.items() if pid != holding})
        monkeypatch.setattr(examining, "_GIL_SECONDS", 0.1)
        found |= looked({holding: "holding"})
        again = looked({holding: "holding"})
    assert (found["stopped"][0].frames, found["stopped"][0].no_stack) == ((), "stopped")
    for deed in DEEDS:
        one = found[deed][0]
        assert one.source == ("faulthandler" if deed == "holding" else "responder")
        assert one.frames[-1].startswith("<module> (deeds.py:")
        assert any(frame.startswith(f"{deed} (deeds.py:") for frame in one.frames)
        assert one.no_stack == ""
    assert again["holding"][0].frames == found["holding"][0].frames, "each question has an answer of its own"
    assert any(frame.startswith("join (threading.py:") for frame in found["joining"][0].frames)


@pytest.mark.skipif(not PY_SPY, reason="py-spy is not installed")
def test_by_py_spy(program: Path) -> None:
    with all_of_them(program, TCPSTORE_STACKS="") as names:
        found = looked(names)
    if any(one.no_stack == py_spy.MAY_NOT for one, _ in found.values()):
        pytest.skip("py-spy may not attach here")
    for deed, (one, _) in found.items():
        assert one.source == "py-spy"
        name = "sleeping" if deed == "stopped" else deed
        assert any(frame.startswith(f"{name} (deeds.py:") for frame in one.frames)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1", py_spy.MAY_NOT),
        ("echo 'Error: Operation not permitted (os error 1)' >&2; exit 1", py_spy.MAY_NOT),
        ("echo 'Error: Failed to find python version' >&2; exit 1", "py-spy fails"),
        ("echo '{}'", "py-spy's output is not known"),
        ("echo '[]'", "py-spy finds no main thread"),
        ("exec sleep 1000", py_spy.NO_TIME),
    ],
)
def test_without_frames_from_py_spy(
    script: str, expected: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ptrace_scope 1: then the responder says it, or it is said why nothing does."""
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\n{script}\n")
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(py_spy, "find", lambda: str(spy))
    with (
        doing("reading", program, TCPSTORE_STACKS="") as silent,
        doing("reading", program, TCPSTORE_STACKS="1") as told,
    ):
        found = looked({silent.pid: "silent"}, 0.5 if expected == py_spy.NO_TIME else 2 * LIMIT)
        found |= looked({told.pid: "told"})
    assert found["silent"][0].no_stack == f"{expected}, no responder"
    assert found["told"][0].source == "responder"


@pytest.mark.usefixtures("no_py_spy")
def test_processes_that_have_ended(program: Path) -> None:
    with doing("ending", program) as process:
        until(lambda: state(process.pid) == "zombie")
        found = looked({process.pid: "ended"}, 0.0)
        assert found["ended"][0].state == "zombie"
    found = looked({process.pid: "ended"}, 0.0)
    assert found["ended"][0] == Doing("gone", no_stack="gone")


@pytest.mark.usefixtures("no_py_spy")
def test_processes_that_do_the_same_are_one_group(program: Path) -> None:
    with ExitStack() as stack:
        alike = [stack.enter_context(doing("reading", program, TCPSTORE_STACKS="1")).pid for _ in range(3)]
        other = stack.enter_context(doing("sleeping", program, TCPSTORE_STACKS="1")).pid
        report = examine([*alike, other], 2 * LIMIT)
    assert [group.pids for group in report.groups] == [[other], alike], "the odd one first"


@pytest.mark.usefixtures("no_py_spy")
def test_processes_of_another_user(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with doing("reading", program, TCPSTORE_STACKS="1") as process:
        found = looked({process.pid: "other"}, 0.1)["other"][0]
    assert (found.state, found.source, found.no_stack) == ("sleeping", "", "another user's")


def test_in_a_process_of_its_own(program: Path) -> None:
    """As a relay runs it."""
    text = "# looks\nfrom tcpstore_async.stacks.examine import main\nmain()\n"
    groups = []
    with doing("reading", program, TCPSTORE_STACKS="1") as process:
        for seconds in (2 * LIMIT, -1):  # the second one has started too late
            given = json.dumps({"pids": [process.pid], "until": time.monotonic() + seconds}).encode()
            done = subprocess.run(
                python_process.command(text),
                input=given,
                env=python_process.environment(),
                capture_output=True,
                check=True,
            )
            groups += msgspec.json.decode(done.stdout, type=HostReport).groups
    assert [group.pids for group in groups] == [[process.pid]] * 2
    assert any(frame.startswith("reading (deeds.py:") for frame in groups[0].doing.frames)
    assert groups[1].doing.state == "sleeping"


def test_a_report_that_is_too_large() -> None:
    groups = [Group([number], Doing("running", frames=("f (x.py:1)",) * number), [1.0]) for number in range(20)]
    report = msgspec.json.decode(fitted(HostReport("host", groups), 1000), type=HostReport)
    assert report.groups[0].pids == [0]
    assert len(report.groups) + report.more == 20
    assert len(msgspec.json.encode(report)) <= 1000


def test_the_collectives_of_a_group_are_its_oldest() -> None:
    collectives = {1: (Collective("g", "all_reduce", 7, since=1.0),), 2: (Collective("g", "all_reduce", 7, since=5.0),)}
    found = {pid: Doing("sleeping", frames=("f (x.py:1)",), collectives=one) for pid, one in collectives.items()}
    (group,) = examining._grouped(found, {1: 0.0, 2: 0.0}, {1: 5, 2: 7})
    assert (group.pids, group.doing, group.switches) == ([1, 2], found[2], [5, 7])
