"""Worlds of forked ranks, for the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT, free_port
from versions import QUIET, unsaid

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


def hangs_in_gloo(answer: dict[str, Any]) -> bool:
    """Whether it was killed while PyTorch took a process group apart, in C++.

    That hangs every now and then, with stock PyTorch as well: a thread of gloo needs the interpreter's lock to drop
    something, and who waits for the thread has it.
    """
    at = re.search(r"Current thread .*\n  File .* in (\w+)\n", answer["printed"])
    return answer["status"] == -signal.SIGKILL and at is not None and at[1] in ("be", "destroy_process_group")


@pytest.fixture
def results(ranks: World, tmp_path: Path) -> Callable[..., list[Any]]:
    """The same for ranks that end well: what they return. A word on stdout or stderr is one too many.

    `fresh`, if given, is called before each attempt and returns options, such as where a new server listens.
    """

    def run(*given: Any, fresh: Callable[[], dict[str, Any]] = dict, **named: Any) -> list[Any]:
        answers = ranks(*given, **{**named, "options": {**named.get("options", {}), **fresh()}})
        for again in range(2):
            if any(hangs_in_gloo(answer) for answer in answers):
                elsewhere = {
                    "port": free_port(),
                    "path": str(tmp_path / f"again {again}"),
                    **named.get("options", {}),
                    **fresh(),
                }
                answers = ranks(*given, **{**named, "options": elsewhere})
        for rank, answer in enumerate(answers):
            assert "error" not in answer, f"rank {rank}: {answer['error']}"
            assert (answer["status"], unsaid(answer["printed"])) == (0, ""), f"rank {rank}"
        return [answer["result"] for answer in answers]

    return run
