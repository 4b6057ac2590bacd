"""The examples that need no PyTorch run, and print what they should; every example is run by a test."""

from __future__ import annotations

from pathlib import Path

from example_runs import EXAMPLES, lines_of
from support import free_port


def test_plain() -> None:
    assert lines_of("plain.py", free_port()) == ["rank 0, rank 1, rank 2, rank 3"]


def test_asyncio() -> None:
    assert lines_of("asyncio_job.py") == ["100 numbers squared by 3 processes: 328350"]


def test_every_example_is_run_and_listed() -> None:
    tests = Path(__file__).read_text() + (Path(__file__).parent / "pytorch" / "test_torch_examples.py").read_text()
    index = (EXAMPLES / "README.md").read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tests
        assert f"[{example.name}]({example.name})" in index
