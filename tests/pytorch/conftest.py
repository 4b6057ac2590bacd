"""Worlds of forked ranks, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT, free_port
from versions import QUIET, VERSION

TRIES_AGAIN = 2 if VERSION < (2, 8) else 0
"""Before 2.8, gloo hangs in destroy_process_group every now and then, whoever the server is."""

World = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def _forker() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported PyTorch, from which ranks are forked."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("TCPSTORE_I", "TCPSTORE_S"))}
    process = subprocess.Popen(
        [sys.executable, *QUIET, str(Path(__file__).with_name("worlds.py"))],
        cwd=tempfile.gettempdir(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process
    process.stdin.close()
    process.wait(LIMIT)
    process.stdout.close()


@pytest.fixture
def ranks(_forker: subprocess.Popen[str], port: int, tmp_path: Path) -> World:
    """Runs a scenario of worlds.py in so many ranks and returns what each did."""

    def run(scenario: str, world: int, scheme: str = "tcp", **job: Any) -> list[dict[str, Any]]:
        assert _forker.stdin is not None
        assert _forker.stdout is not None
        meeting = {"scheme": scheme, "port": port, "path": str(tmp_path / "meeting")}
        job["options"] = {**meeting, **job.get("options", {})}
        print(json.dumps({"scenario": scenario, "world": world, **job}), file=_forker.stdin, flush=True)
        answers: list[dict[str, Any]] = json.loads(_forker.stdout.readline())
        return answers

    return run


@pytest.fixture
def results(ranks: World) -> Callable[..., list[Any]]:
    """The same for ranks that end well: what they return. A word on stdout or stderr is one too many."""

    def run(*given: Any, **named: Any) -> list[Any]:
        answers = ranks(*given, **named)
        for _ in range(TRIES_AGAIN):
            if any(answer["status"] == -signal.SIGKILL for answer in answers):
                answers = ranks(*given, **named)
        for rank, answer in enumerate(answers):
            assert "error" not in answer, f"rank {rank}: {answer['error']}"
            assert (answer["status"], answer["printed"]) == (0, ""), f"rank {rank}"
        return [answer["result"] for answer in answers]

    return run
