"""The clients' benchmark: its rows, and that client and server must have the same build."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench_factories import ROOT, run_program

ROWS = (
    "add",
    "set, then check",
    "check",
    "get",
    "set, of a whole batch",
    "make and close",
    "async add, 64 in flight",
    "async get, 64 in flight",
    "async check, 64 in flight",
    "async set, and one check, 64 in flight",
    "add, busy main thread in the master",
)
OTHER = """


def build():
    return "translated"
"""


def test_every_row_is_measured() -> None:
    pytest.importorskip("torch")
    done = run_program("bench/clients.py", "--pairs", "1")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first == "server: ours; package: interpreted; nothing pinned"
    assert [row.partition(" ours ")[0].rstrip() for row in rows] == list(ROWS)


def test_a_server_of_another_build_is_refused(tmp_path: Path) -> None:
    """The server imports the package in the folder where it starts."""
    shutil.copytree(ROOT / "tcpstore_async", tmp_path / "tcpstore_async")
    with (tmp_path / "tcpstore_async" / "session" / "identity.py").open("a") as file:
        file.write(OTHER)
    done = run_program("bench/clients.py", "--pairs", "1", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("the clients are interpreted and the server on port ")
    assert done.stderr.endswith(" is translated: nothing is measured\n")
    assert done.stderr.count("\n") == 1
