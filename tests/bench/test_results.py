"""The file of a run: an earlier run's is kept, and an invalid one is rejected in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale import results
from bench.scale.results import RunFile
from bench_factories import run, samples


def test_an_earlier_run_is_renamed_and_an_empty_run_replaces_nothing(tmp_path: Path) -> None:
    before, now = run(samples("uvloop", [1.0])), run(samples("libuv", [2.0]))
    for one in (before, run(), now, now, before):
        RunFile(tmp_path).write(one)
    assert results.read(tmp_path / "run.json") == before
    renamed = [tmp_path / f"run-20261121T070000{suffix}.json" for suffix in ("", "-2", "-3")]
    assert [results.read(path) for path in renamed] == [before, now, now]
    assert len(list(tmp_path.iterdir())) == 4


def test_another_file_is_renamed_too(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    file = RunFile(tmp_path)
    for walls in ([1.0], [1.0, 2.0]):
        file.write(run(samples("uvloop", walls)))
    assert len(results.read(tmp_path / "run.json").samples) == 2
    assert [path.read_text() for path in tmp_path.glob("run-*")] == ["mine"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a benchmark run"),
        (b"\xff\xfe", "not a benchmark run"),
        (b'{"samples": 1}', "not a benchmark run"),
        (
            msgspec.json.encode(run(samples("uvloop", [1.0], size=0))),
            r"Expected `int` >= 1 - at `\$.samples\[0\].size`",
        ),
        (msgspec.json.encode(msgspec.structs.replace(run(), format=99)), "written in format 99"),
    ],
)
def test_an_invalid_file_is_rejected_in_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: .*{why}[^\n]*$"):
        results.read(path)


@pytest.mark.parametrize("name", ["run", "earlier"])
def test_the_committed_runs_can_be_read(name: str) -> None:
    found = results.read(Path(__file__).parents[2] / "bench" / "results" / f"{name}.json")
    assert found.complete
