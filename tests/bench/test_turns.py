"""The benchmark of the longest step has a case for every command."""

from __future__ import annotations

import subprocess
import sys

from support import LIMIT


def test_every_command_has_a_case() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.turns", "--runs", "1", "LEAVE"],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LEAVE" in done.stdout
