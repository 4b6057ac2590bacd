"""A store that could not be made leaves nothing behind, and may be looked at: in every mode, however it failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT, tcpstore_server

PROGRAM = Path(__file__).with_name("failing.py")


@pytest.mark.parametrize(
    ("module", "install"),
    [
        ("tcpstore_async", "0"),
        ("torch.distributed", "1"),
        ("torch.distributed", "python"),
        ("torch.distributed", "classes"),
        ("torch.distributed", "python,classes"),
    ],
    ids=lambda word: str(word),
)
def test_what_is_alive_after_a_failed_constructor(module: str, install: str) -> None:
    """Before, whoever printed the locals of our frames crashed; and they kept the caller's, with its servers."""
    with tcpstore_server() as server:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(PROGRAM), module, f"tcp://127.0.0.1:{server.port}"],
            env={**os.environ, "TCPSTORE_INSTALL": install}, capture_output=True, text=True, timeout=3 * LIMIT,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout.splitlines()[-1])
    nothing = {"stores": 0, "locals": False, "descriptors": 0, "threads": 0, "port": False}
    assert {way: what for way, what in left.items() if what != nothing} == {}
