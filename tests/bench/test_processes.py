"""Which package the benchmarks measure."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tcpstore_async
from bench import processes
from support import LIMIT, run_python

WHERE = "import tcpstore_async, bench.processes; print(tcpstore_async.__file__)"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of empty sources with a build of them."""
    (tmp_path / "build" / "compiled" / "tcpstore_async").mkdir(parents=True)
    (tmp_path / "tcpstore_async").mkdir()
    for name in ("pyproject.toml", "setup.py", "tcpstore_async/__init__.py"):
        age(tmp_path / name, 1000)
    for name in ("x.so", ".made", "tcpstore_async/__init__.py"):
        age(tmp_path / "build" / "compiled" / name, 2000)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setattr(processes, "COMPILED", tmp_path / "build" / "compiled")
    monkeypatch.delenv("BENCH_BUILD", raising=False)
    return tmp_path


def age(path: Path, seconds: int) -> None:
    path.touch()
    os.utime(path, (seconds, seconds))


def test_a_build_of_these_sources_is_chosen(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert processes.chosen_build() == checkout / "build" / "compiled"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("source", ["tcpstore_async/__init__.py", "setup.py"])
def test_a_build_of_older_sources_is_not(checkout: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    age(checkout / source, 3000)
    assert processes.chosen_build() == checkout
    assert capsys.readouterr().err.count("\n") == 1


def test_a_build_that_was_not_finished_is_not(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "build" / "compiled" / ".made").unlink()
    assert processes.chosen_build() == checkout
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_build_nothing_is_printed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "build" / "compiled" / "x.so").unlink()
    assert processes.chosen_build() == checkout
    assert capsys.readouterr().err == ""


def test_the_interpreted_build_can_be_requested(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUILD", "interpreted")
    assert processes.chosen_build() == checkout


def test_a_tree_comes_before_what_the_user_has(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a relative path, wherever the process runs."""
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    monkeypatch.chdir(checkout / "build")
    monkeypatch.setattr(processes, "ROOT", Path(processes.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", WHERE], stdout=subprocess.PIPE, timeout=LIMIT, check=True,
        cwd=tempfile.gettempdir(), env=processes.environment(Path("compiled")), text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(checkout / "build" / "compiled" / "tcpstore_async" / "__init__.py")


def test_child_processes_use_the_same_package(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(sys, "path", ["/first"])
    processes.use_build()
    compiled = str(checkout / "build" / "compiled")
    assert sys.path == [compiled, "/first"]
    assert os.environ["PYTHONPATH"].split(os.pathsep)[:2] == [compiled, "/elsewhere"]


def test_other_tests_do_not_get_the_compiled_build() -> None:
    """What `bench.gloo` and others choose as they are imported, which is while tests are collected, stays for all."""
    importlib.import_module("bench.gloo")
    found = run_python("import tcpstore_async; print(tcpstore_async.__file__)")
    assert found.strip() == tcpstore_async.__file__
