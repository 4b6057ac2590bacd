"""The demo: every step works, an error is one line, and no process is left."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parent.parent / "demo"


def run_demo(folder: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *options],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )


def assert_server_gone(output: str) -> None:
    found = re.search(r"pid (\d+);", output)
    assert found
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)


def test_a_thousand_ranks_join_and_pass_a_barrier(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--torch", "0", "--plain", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"joined +1,000 in [\d.]+ s; rank \d+ first, rank \d+ last\n", done.stdout)
    assert re.search(r"barrier +1,000 passed in [\d.]+ s; rank \d+ arrived last", done.stdout)
    assert "Try next" in done.stdout
    assert_server_gone(done.stdout)


def test_plain_processes_find_each_other(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--ranks", "8", "--torch", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"rank \d +pid \d+ +read 8 addresses, reached 127.0.0.1:\d+\n", done.stdout)) == 8


@pytest.mark.timeout(4 * LIMIT)
def test_pytorch_processes_form_a_group(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--ranks", "8", "--torch", "2", "--plain", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"rank \d +pid \d+ +all_reduce: 1 \+ 2 = 3\n", done.stdout)) == 2
    assert_server_gone(done.stdout)


def test_one_clear_line_when_a_step_fails(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('out of order')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = run_demo(tmp_path, "--ranks", "2", "--torch", "2", env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert re.fullmatch(r"demo: PyTorch rank \d exited with status 1: RuntimeError: out of order\n", done.stderr)
    assert_server_gone(done.stdout)
