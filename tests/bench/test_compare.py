"""Two runs side by side: what changed, what else differs, and which files are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import run_file
from bench.compare import compare_files
from bench.run_file import Run
from bench_factories import MACHINE, VERSIONS, run, samples

LIBUV = samples("libuv", [1.0, 1.0, 1.0])
CONTROL = samples("control", [1.0, 1.0, 1.0])


def told(folder: Path, capsys: pytest.CaptureFixture[str], a: Run, b: Run) -> str:
    for name, what in (("a.json", a), ("b.json", b)):
        run_file.write(what, folder / name)
    assert compare_files(folder / "a.json", folder / "b.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


def with_ours(*walls: float) -> Run:
    return run([*samples("uvloop", walls), *LIBUV, *CONTROL])


def test_a_change_beyond_the_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(tmp_path, capsys, with_ours(0.8, 0.82, 0.84), with_ours(0.4, 0.41, 0.43))
    assert "init ours on uvloop, sockets 1,024 0.50× (0.48–0.54) beyond the noise" in said
    assert "0.82× (0.80–0.84) 0.41× (0.40–0.43) no" in said
    assert "1 of 3 differ from A by more than the noise. 0 of 1 ratios to the reference are within A's interval" in said


def test_a_change_that_is_no_more_than_the_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(tmp_path, capsys, with_ours(0.8, 0.9, 1.0), with_ours(0.9, 0.95, 1.1))
    assert "1,024 1.06× (0.90–1.38) within the noise" in said
    assert "0 of 3 differ from A by more than the noise. 1 of 1 ratios to the reference are within A's interval" in said


def test_a_change_that_is_no_more_than_the_control_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In B alone, which is enough."""
    noisy = samples("control", [2.5, 2.5, 2.5])
    a = with_ours(0.8, 0.8, 0.8)
    b = run([*samples("uvloop", [0.4, 0.4, 0.4]), *LIBUV, *noisy])
    said = told(tmp_path, capsys, a, b)
    assert "init ours on uvloop, sockets 1,024 0.50× (0.20–1.25) within the noise" in said


def test_in_memory_there_is_no_control_and_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of sockets says nothing of it."""

    def measured(*walls: float) -> Run:
        return run([*samples("uvloop", walls, transport="memory"), *with_ours(1.0, 1.0, 1.0).samples])

    said = told(tmp_path, capsys, measured(1.0, 1.0, 1.0), measured(1.6, 1.6, 1.6))
    assert "ours on uvloop, memory (no sockets) 1,024 1.60× (noise unknown) noise unknown" in said
    assert "0 of 4 differ from A by more than the noise. For 1 the noise is unknown" in said


def test_one_round_has_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(tmp_path, capsys, run(samples("uvloop", [1.0])), run(samples("uvloop", [3.0])))
    assert "3.00× (one round, no interval) too few rounds" in said


def test_operations_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def both(first: float) -> Run:
        named = samples("uvloop", [first] * 3, scenario="operations-set")
        return run([*named, *samples("uvloop", [1.0] * 3, scenario="operations-get")])

    said = told(tmp_path, capsys, both(1.0), both(2.0))
    assert "operations set ours on uvloop, sockets 1,024 2.00×" in said
    assert "operations get ours on uvloop, sockets 1,024 1.00×" in said


def test_only_what_both_measured_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run([*samples("uvloop", [1.0]), *samples("uvloop", [1.0], size=2048), *samples("legacy", [1.0])])
    b = run([*samples("uvloop", [1.0]), *samples("uvloop", [1.0], scenario="barrier")])
    said = told(tmp_path, capsys, a, b)
    assert "of 1 differ" in said
    assert "2,048" not in said
    assert "legacy" not in said


def test_ratios_to_different_references_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = with_ours(0.8, 0.8, 0.8)
    said = told(tmp_path, capsys, a, run([*a.samples, *samples("legacy", [0.8] * 3)], reference="legacy"))
    assert "different reference: libuv in A, legacy in B" in said
    assert "No ratio to a reference is in both runs with an interval" in said


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, scenario in (("a.json", "init"), ("b.json", "barrier")):
        run_file.write(run(samples("uvloop", [1.0], scenario=scenario)), tmp_path / name)
    assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 1
    assert capsys.readouterr() == ("", "The runs have no measurement in common.\n")


def test_what_else_differs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = with_ours(1.0, 1.0, 1.0)
    b = msgspec.structs.replace(
        a,
        machine=msgspec.structs.replace(MACHINE, cores=64),
        versions=msgspec.structs.replace(VERSIONS, torch="", build="interpreted"),
        complete=False,
    )
    said = told(tmp_path, capsys, a, b)
    assert "different machine: cores 2 in A, 64 in B" in said
    assert "different versions: build compiled in A, interpreted in B" in said
    assert "different versions: torch 2.13.0 in A, none in B" in said
    assert "B is not complete" in said
    assert "kernel" not in said


@pytest.mark.parametrize("broken", ["a.json", "b.json"])
def test_a_file_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    for name in ("a.json", "b.json"):
        run_file.write(run(), tmp_path / name)
    for content, why in ((b"{", "not a benchmark run: "), (None, "No such file or directory")):
        (tmp_path / broken).unlink()
        if content is not None:
            (tmp_path / broken).write_bytes(content)
        assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith(f"{tmp_path / broken}: {why}")
