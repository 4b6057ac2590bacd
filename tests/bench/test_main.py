"""`python -m bench`: what a run leaves, however it ends, and its one-line errors."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.scale import results
from bench.scale.results import Job
from bench_factories import ROOT, run_program
from faults.fault_helpers import gone
from support import LIMIT, until

INIT_THEN_STEADY = ["--scenario", "init", "--scenario", "steady", "--server", "uvloop", "--sizes", "4"]


def bench(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench", *words]


def scale(*words: str) -> subprocess.CompletedProcess[str]:
    return run_program("-m", "bench", "scale", *words)


def test_a_run_leaves_its_file_and_a_report(tmp_path: Path) -> None:
    done = scale("--scenario", "init", "--server", "uvloop", "--sizes", "8", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1 sample in [0-9.]+ (ms|s): ", done.stderr, re.MULTILINE)
    run = results.read(tmp_path / "run.json")
    assert run.complete
    assert [(one.scenario, one.transport, one.size) for one in run.samples] == [("init", "sockets", 8)]
    assert done.stdout.splitlines()[0] == str(tmp_path / "report.md")


def test_a_start_is_the_only_scenario_where_none_is_named(tmp_path: Path) -> None:
    words = ["--groups", "1x4:gloo", "--sizes", "8", "--transport", "memory", "--rounds", "1", "--out", str(tmp_path)]
    done = scale(*words)
    assert done.returncode == 0, done.stderr
    assert [(one.scenario, one.size, one.parked) for one in results.read(tmp_path / "run.json").samples] == [
        ("start", 8, 7),
        ("start-spread", 8, 7),
    ]
    text = (tmp_path / "report.md").read_text()
    assert "most parked at once" in text
    assert "\n## The start of a job: nccl2, groups 1x4:gloo, ranks arrive at once\n" in text
    assert "\n## The start of a job: nccl2, groups 1x4:gloo, ranks arrive within 10 s\n" in text


def test_a_preset_at_another_size_is_measured_where_the_preset_is(tmp_path: Path) -> None:
    words = ["--preset", "frontier", "--sizes", "1500", "--scenario", "start", "--rounds", "1", "--out", str(tmp_path)]
    done = scale(*words)
    assert done.returncode == 0, done.stderr
    assert "Note: --preset frontier is a job of 98,304 ranks; measuring frontier at 1,500 ranks\n" in done.stderr
    run = results.read(tmp_path / "run.json")
    assert [(one.transport, one.size) for one in run.samples] == [("memory", 1500)]
    assert run.jobs == {"start": Job("nccl2", "", "at once", "frontier at 1,500 ranks")}


def test_a_run_that_measures_nothing_fails(tmp_path: Path) -> None:
    done = scale("--scenario", "init", "--server", "uvloop", "--sizes", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: nothing was measured: init, uvloop at 1: rank 0 has no other ranks to wait for"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--preset frontier --server libuv",
            "start and start-spread of frontier: measured in memory, where libuv cannot be; choose --server uvloop, or "
            "sockets with --transport sockets --sizes 8192",
        ),
        (
            "--preset frontier --transport sockets",
            "start and start-spread of frontier: measured in memory only, unless you choose fewer ranks with "
            "--transport sockets --sizes 8192",
        ),
        (
            "--scenario init --transport memory --server libuv",
            "init: measured in memory, where libuv cannot be; choose --server uvloop, or sockets with "
            "--transport sockets",
        ),
        ("--scenario steady --transport memory", "steady: cannot be measured in memory; choose --transport sockets"),
    ],
)
def test_what_cannot_be_measured_says_what_can(words: str, reason: str, tmp_path: Path) -> None:
    done = scale(*words.split(), "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Error: nothing was measured: {reason}"


@contextmanager
def at_steady(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Return a run that has the samples of `init` and is measuring `steady`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and so by what is started here
    process = subprocess.Popen(
        bench("scale", *INIT_THEN_STEADY, "--rounds", "3", "--out", str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    signal.signal(signal.SIGHUP, before)
    try:
        until(lambda: (tmp_path / "run.json").exists() and len(children(process.pid)) == 2)
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Return the processes of the server and the generator."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_init_only(folder: Path) -> bool:
    run = results.read(folder / "run.json")
    return not run.complete and any(one.scenario == "init" for one in run.samples)


@pytest.mark.needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, number: int) -> None:
    with at_steady(tmp_path) as process:
        for _ in range(3):
            process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == "Error: interrupted; what was measured so far is kept"
    assert has_init_only(tmp_path)


@pytest.mark.needs_proc
def test_a_kill_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    with at_steady(tmp_path) as process:
        started = children(process.pid)
        process.kill()
        until(lambda: all(map(gone, started)))
    assert has_init_only(tmp_path)


def test_a_closed_standard_error_does_not_end_the_run(tmp_path: Path) -> None:
    words = bench("scale", *INIT_THEN_STEADY, "--rounds", "1", "--out", str(tmp_path))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stderr is not None
    process.stderr.close()
    process.wait(LIMIT)
    assert results.read(tmp_path / "run.json").complete


def test_the_file_limit_ends_the_series(tmp_path: Path) -> None:
    words = ["--scenario", "init", "--server", "uvloop", "--sizes", "8,500", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        bench("scale", *words), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700)),
    )  # fmt: skip
    run = results.read(tmp_path / "run.json")
    assert [one.size for one in run.samples] == [8]
    assert "files open" in run.endings[0].reason
    assert done.returncode == 1
    assert b"files open" in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--sizes", "0,4"], "Invalid value for '--sizes': '0,4' is not a list of numbers"),
        (["--sizes", "4,"], "Invalid value for '--sizes': '4,' is not a list of numbers"),
        (["--seconds", "nan"], "Invalid value for '--seconds': not a number"),
        (["--groups", "1x"], "Invalid value for '--groups': '1x' is not COUNTxSIZE or COUNTxSIZE:BACKEND"),
        (["--preset", "dense", "--backend", "gloo"], "--preset excludes --backend and --groups"),
        (
            ["--preset", "frontier", "--scenario", "start", "--scenario", "init"],
            "--backend, --groups and --preset are for start and start-spread, not init",
        ),
        (
            ["--scenario", "steady", "--groups", "1x4"],
            "--backend, --groups and --preset are for start and start-spread, not steady",
        ),
        (["--scenario", "nix"], "Invalid value for '--scenario': 'nix' is not one of 'init', "),
        (["--out", "/proc/nix"], "Invalid value for '--out': cannot write /proc/nix/run.json: "),
    ],
)
def test_a_wrong_argument_is_one_line(words: list[str], error: str) -> None:
    done = scale(*words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: {error}")
    assert "Traceback" not in done.stderr


def test_a_folder_in_place_of_the_file_is_found_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    done = scale("--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"cannot write {tmp_path}/run.json: Is a directory")
