"""The clients' benchmark: its rows, and that client and server must have the same build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT

ROOT = Path(__file__).parent.parent.parent
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


def clients(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "bench" / "clients.py"), *words]
    environment = {**os.environ, "BENCH_BUILD": "interpreted", **more}
    return subprocess.run(command, capture_output=True, timeout=LIMIT, check=False, text=True, env=environment)


def test_every_row_is_measured() -> None:
    pytest.importorskip("torch")
    done = clients("--pairs", "1")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first == "server: ours; package: interpreted; nothing pinned"
    assert [row.partition(" ours ")[0].rstrip() for row in rows] == list(ROWS)


def test_a_server_of_another_build_is_refused(tmp_path: Path) -> None:
    """The server imports the package in the folder where it starts."""
    shutil.copytree(ROOT / "tcpstore_async", tmp_path / "tcpstore_async")
    with (tmp_path / "tcpstore_async" / "session" / "identity.py").open("a") as file:
        file.write(OTHER)
    done = clients("--pairs", "1", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("the clients are interpreted and the server on port ")
    assert done.stderr.endswith(" is translated: nothing is measured\n")
    assert done.stderr.count("\n") == 1
