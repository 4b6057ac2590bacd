"""What becomes of an installation that is not compiled, on purpose or because that went wrong: plain Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from marks import exhaustive
from support import LIMIT

pytestmark = [pytest.mark.slow, pytest.mark.interpreted("what is installed is not what this run tests")]

ROOT = Path(__file__).parent.parent
SAY = "from tcpstore_async import serving; print(serving.build(), serving.__file__)"


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing of the checkout is found, nor anything that was set for this run."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH", "TCPSTORE_PURE")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )


def pip(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Without network."""
    options = ("--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check")
    return run(folder, "-m", "pip", arguments[0], *options, *arguments[1:], **env)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the package is built from: building leaves things there."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tcpstore_async", source / "tcpstore_async", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.mark.parametrize(("env", "said"), [
    ({"TCPSTORE_PURE": "1"}, ""),
    ({"CC": "no-such-compiler"}, "there is no C compiler 'no-such-compiler'"),
    ({"CC": "false"}, "tcpstore_async is installed as plain Python: "),
], ids=["wanted", "no compiler", "compiler fails"])  # fmt: skip
def test_what_is_not_compiled_is_plain_python(tmp_path: Path, source: Path, env: dict[str, str], said: str) -> None:
    built = pip(tmp_path, "wheel", "--no-build-isolation", "--verbose", "--wheel-dir=wheels", str(source), **env)
    assert built.returncode == 0, built.stdout + built.stderr
    assert said in built.stdout + built.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    installed = pip(tmp_path, "install", "--target=site", str(wheel))
    assert installed.returncode == 0, installed.stderr
    serving = tmp_path / "site" / "tcpstore_async" / "serving.py"
    told = run(tmp_path, "-c", SAY, PYTHONPATH=str(tmp_path / "site"))
    assert told.stdout.split() == ["interpreted", str(serving)], told.stderr
    assert not list((tmp_path / "site").rglob("*.so"))
    page = Path("tcpstore_async", "tools", "web", "page")
    assert {path.name for path in (tmp_path / "site" / page).iterdir()} == {
        path.name for path in (ROOT / page).iterdir()
    }


@pytest.mark.parametrize("compiler", ["no-such-compiler", exhaustive("false")])
def test_what_must_be_compiled_and_cannot_be_is_an_error(tmp_path: Path, source: Path, compiler: str) -> None:
    env = {"TCPSTORE_PURE": "0", "CC": compiler}
    built = pip(tmp_path, "wheel", "--no-build-isolation", "--wheel-dir=wheels", str(source), **env)
    assert built.returncode != 0
    assert "cannot compile tcpstore_async: " in built.stdout + built.stderr
