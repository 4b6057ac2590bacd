"""Histories of calls during a few faults of each kind: `make linear` has minutes of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import networks
from etcd_cluster import programs
from linear.histories import FAULTS

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("histories.py")
AS_ROOT = ("partition", "disk")


@pytest.mark.parametrize("kind", FAULTS)
def test_linearizable(kind: str) -> None:
    if kind in AS_ROOT and (reason := networks.why_not()):
        pytest.skip(reason)
    if kind == "etcd" and not programs():
        pytest.skip("there is no etcd: make etcd")
    done = subprocess.run(
        [sys.executable, PROGRAM, "--kind", kind, "--seconds", "3"],
        cwd=tempfile.gettempdir(), env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
