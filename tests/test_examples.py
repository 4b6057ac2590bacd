"""The examples that do not need PyTorch print what they should; every example is run by a test."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from example_runs import EXAMPLES, lines_of, run_once
from support import free_port

pytestmark = pytest.mark.slow


def test_plain() -> None:
    assert lines_of("plain.py", free_port()) == ["rank 0, rank 1, rank 2, rank 3"]


def test_plain_on_a_port_in_use() -> None:
    """It ends at once, and its last line gives the reason."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        [code], [printed] = run_once(str(EXAMPLES / "plain.py"), str(port), world=1, env={})
    assert code == 1
    assert f"port: {port}" in printed.splitlines()[-1]
    assert "address already in use" in printed.splitlines()[-1]


def test_asyncio() -> None:
    assert lines_of("asyncio_job.py") == ["100 numbers squared by 3 processes: 328350"]


def test_every_example_is_run_and_listed() -> None:
    tests = Path(__file__).read_text() + (Path(__file__).parent / "pytorch" / "test_torch_examples.py").read_text()
    index = (EXAMPLES / "README.md").read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tests
        assert f"[{example.name}]({example.name})" in index
