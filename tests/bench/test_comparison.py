"""Comparing two runs: changes, other differences, and invalid files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale import results
from bench.scale.report import compare_files
from bench.scale.results import Job, Run
from bench_factories import MACHINE, VERSIONS, run, samples

ONE = [1.0, 1.0, 1.0]
REFERENCE = [*samples("libuv", ONE), *samples("control", ONE)]


def ours(*walls: float) -> Run:
    return run([*samples("uvloop", walls), *REFERENCE])


def in_memory(*walls: float) -> Run:
    return run([*samples("uvloop", walls, transport="memory"), *ours(*ONE).samples])


def two_operations(first: float) -> Run:
    named = samples("uvloop", [first] * 3, scenario="operations-set")
    return run([*named, *samples("uvloop", ONE, scenario="operations-get")])


NOISY = run([*samples("uvloop", [0.4] * 3), *samples("libuv", ONE), *samples("control", [2.5] * 3)])
ELSEWHERE = msgspec.structs.replace(
    ours(*ONE),
    machine=msgspec.structs.replace(MACHINE, cores=64, load_average=9.0),
    versions=msgspec.structs.replace(VERSIONS, torch="", build="interpreted"),
    complete=False,
)


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (
            ours(0.8, 0.82, 0.84),
            ours(0.4, 0.41, 0.43),
            [
                "init ours on uvloop, sockets 1,024 0.50× (0.48–0.54) beyond the noise",
                "0.82× (0.80–0.84) 0.41× (0.40–0.43) no",
                "1 of 3 differ from A by more than the noise. 0 of 1 ratios to the reference are within A's interval",
            ],
        ),
        (  # no more than the spread of the rounds
            ours(0.8, 0.9, 1.0),
            ours(0.9, 0.95, 1.1),
            ["1,024 1.06× (0.90–1.38) within the noise", "0 of 3 differ", "1 of 1 ratios"],
        ),
        # no more than the control differs, in B alone
        (ours(0.8, 0.8, 0.8), NOISY, ["ours on uvloop, sockets 1,024 0.50× (0.20–1.25) within the noise"]),
        (  # the control over sockets says nothing of memory
            in_memory(*ONE),
            in_memory(1.6, 1.6, 1.6),
            [
                "ours on uvloop, memory (no sockets) 1,024 1.60× (noise unknown) noise unknown",
                "0 of 4 differ from A by more than the noise. For 1 the noise is unknown",
            ],
        ),
        (run(samples("uvloop", [1.0])), run(samples("uvloop", [3.0])), ["3.00× (one round, no interval) too few"]),
        (two_operations(1.0), two_operations(2.0), ["operations set ours on uvloop, sockets 1,024 2.00×", "get ours"]),
        (  # only what both measured
            run([*samples("uvloop", [1.0]), *samples("uvloop", [1.0], size=2048), *samples("legacy", [1.0])]),
            run([*samples("uvloop", [1.0]), *samples("uvloop", [1.0], scenario="barrier")]),
            ["0 of 1 differ"],
        ),
        (
            ours(0.8, 0.8, 0.8),
            run([*ours(0.8, 0.8, 0.8).samples, *samples("legacy", [0.8] * 3)], reference="legacy"),
            ["different reference: libuv in A, legacy in B", "No ratio to a reference is in both runs"],
        ),
        (
            run(samples("uvloop", [1.0], scenario="start"), jobs={"start": Job("nccl2", "", "at once")}),
            run(samples("uvloop", [1.0], scenario="start"), jobs={"start": Job("gloo", "2x4:gloo", "at once")}),
            [
                "different job of start: nccl2, ranks arrive at once in A, gloo, groups 2x4:gloo, ranks arrive at once "
                "in B"
            ],
        ),
        (
            ours(*ONE),
            ELSEWHERE,
            [
                "different machine: cores 2 in A, 64 in B different versions: build compiled in A, interpreted in B "
                "different versions: torch 2.13.0 in A, none in B B is not complete scenario"
            ],
        ),
    ],
)
def test_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str], a: Run, b: Run, texts: list[str]) -> None:
    for name, what in (("a.json", a), ("b.json", b)):
        results.write(what, tmp_path / name)
    assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in texts:
        assert text in " ".join(out.split())


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, scenario in (("a.json", "init"), ("b.json", "barrier")):
        results.write(run(samples("uvloop", [1.0], scenario=scenario)), tmp_path / name)
    assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 1
    assert capsys.readouterr() == ("", "The runs have no measurement in common.\n")


@pytest.mark.parametrize(("content", "why"), [(b"{", "not a benchmark run: "), (None, "No such file or directory")])
@pytest.mark.parametrize("broken", ["a.json", "b.json"])
def test_an_invalid_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str, content: bytes | None, why: str
) -> None:
    for name in ("a.json", "b.json"):
        results.write(run(), tmp_path / name)
    (tmp_path / broken).unlink()
    if content is not None:
        (tmp_path / broken).write_bytes(content)
    assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{tmp_path / broken}: {why}")
