"""The examples that need no PyTorch run, and print what they should; every example is run by a test."""

from __future__ import annotations

import socket
from pathlib import Path

from example_runs import EXAMPLES, lines_of


def test_plain() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    assert lines_of("plain.py", port) == ["rank 0, rank 1, rank 2, rank 3"]


def test_asyncio() -> None:
    assert lines_of("asyncio_job.py") == ["100 numbers squared by 3 processes: 328350"]


def test_every_example_is_run_and_listed() -> None:
    tests = Path(__file__).read_text() + (Path(__file__).parent / "pytorch" / "test_torch_examples.py").read_text()
    index = (EXAMPLES / "README.md").read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tests
        assert f"[{example.name}]({example.name})" in index
