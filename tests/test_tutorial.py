"""The tutorial's programs run and print what it says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT, free_port, run_python

pytestmark = pytest.mark.slow

TUTORIAL = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()
PROGRAMS: list[str] = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)


def program(fragment: str) -> str:
    """Return the program that contains a fragment."""
    (found,) = [text for text in PROGRAMS if fragment in text]
    return found


def test_ranks_find_each_other(tmp_path: Path) -> None:
    text = program("is_master=rank == 0")
    assert "29600" in text
    (tmp_path / "rank.py").write_text(text.replace("29600", str(free_port())))
    ranks = [
        subprocess.Popen(
            [sys.executable, "rank.py"],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        printed = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    name = socket.gethostname()
    addresses = [f"{name}:{9000 + rank}".encode() for rank in range(4)]
    assert printed == [(f"{rank} {addresses}\n", "") for rank in range(4)]


def test_the_asyncio_client() -> None:
    assert run_python(program("asyncio.run")) == "1000\n"


def test_rendezvous() -> None:
    text = f"import tcpstore_async\n{program('rendezvous')}print(rank, world_size)\nstore.close()\n"
    port = str(free_port())
    assert run_python(text, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1") == "0 1\n"
