"""Comparing two trees: which is which, and that compiled and interpreted ones are not mixed up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench_factories import ROOT, run_program

SLOWER = """
_quick = add


def add(key, amount):
    for _ in range(10_000):
        pass
    return _quick(key, amount)
"""
OTHER = """


def build():
    return "compiled"
"""


def micro(*words: str) -> subprocess.CompletedProcess[str]:
    return run_program("bench/micro.py", "calls", "--rounds", "3", "--runs", "1", *words)


def copied(folder: Path, path: str = "", more: str = "") -> Path:
    """Return a checkout with text appended to one of its files."""
    shutil.copytree(ROOT / "tcpstore_async", folder / "tcpstore_async", ignore=shutil.ignore_patterns("__pycache__"))
    if path:
        with (folder / "tcpstore_async" / path).open("a") as file:
            file.write(more)
    return folder


def test_a_ratio_is_that_of_the_second_tree_to_the_first(tmp_path: Path) -> None:
    slow = copied(tmp_path, "client/requests.py", SLOWER)
    done = micro("--tree", str(ROOT), "--tree", str(slow))
    assert (done.returncode, done.stderr) == (0, "")
    *_, row = done.stdout.splitlines()
    assert row.startswith("calls    add ")
    low = float(row.rpartition("(")[2].partition("–")[0])
    assert low > 10


def test_one_tree_has_no_ratio() -> None:
    done = micro("--tree", str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    tree, rounds, row = done.stdout.splitlines()
    assert tree == f"{ROOT}: interpreted"
    assert rounds == "medians of 3 rounds"
    assert row.endswith(" ns")


def test_builds_are_compared_only_on_purpose(tmp_path: Path) -> None:
    other = copied(tmp_path, "session/identity.py", OTHER)
    words = ["--tree", str(ROOT), "--tree", str(other)]
    done = micro(*words)
    assert done.returncode == 2
    assert done.stderr == "one tree is interpreted and the other compiled: --across-builds compares them\n"
    done = micro(*words, "--across-builds")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == [f"{ROOT}: interpreted", f"{other}: compiled"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_tree_that_cannot_be_measured_is_one_line(tmp_path: Path, broken: bool) -> None:
    if broken:
        copied(tmp_path, "wire/values.py", "raise ImportError('on purpose')\n")
    done = micro("--tree", str(ROOT), "--tree", str(tmp_path))
    assert done.returncode == 2
    why = "ImportError: on purpose" if broken else "contains no tcpstore_async package"
    assert done.stderr == f"{tmp_path}: {why}\n"
