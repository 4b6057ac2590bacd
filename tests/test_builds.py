"""A run tests the build that it was told to, or does not start."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import builds
from support import LIMIT
from tcpstore_async.serving import build

pytestmark = pytest.mark.slow

OTHER = {"compiled": "interpreted", "interpreted": "compiled"}


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one extension module, its source beside it, and one module that is interpreted."""
    package = tmp_path / "half"
    package.mkdir()
    for name in ("__init__.py", "one.py", "two.py", f"two{importlib.machinery.EXTENSION_SUFFIXES[0]}"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builds, "compiled_names", lambda: ["half.one", "half.two"])
    return package


def test_what_setup_compiles_is_there() -> None:
    names = builds.compiled_names()
    assert "tcpstore_async.keyspace.keyspace" in names
    assert [builds.kind(name) for name in names] == [build()] * len(names)


def test_every_module_counts(half: Path) -> None:
    assert [builds.kind(f"half.{name}") for name in ("one", "two", "three")] == ["interpreted", "compiled", "missing"]
    for wanted in OTHER:
        assert "finds 1 of 2 modules otherwise" in (builds.why_unusable(wanted) or "")
    assert "no such build" in (builds.why_unusable("Compiled") or "")


@pytest.mark.parametrize("change", ["edited", "added", "removed", "none"])
def test_a_compiled_build_of_other_sources_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    package = tmp_path / "tcpstore_async"
    shutil.copytree(builds.ROOT / "tcpstore_async", package, ignore=shutil.ignore_patterns("__pycache__"))
    match change:
        case "edited":
            (package / "wire" / "codecs.py").write_bytes(b"")
        case "added":
            (package / "wire" / "new.py").touch()
        case "removed":
            (package / "wire" / "codecs.py").unlink()
    monkeypatch.setattr(builds, "compiled_names", list)
    monkeypatch.setattr("tcpstore_async.__file__", str(package / "__init__.py"))
    assert ("run `make compile`" in (builds.why_unusable("compiled") or "")) == (change != "none")
    assert builds.why_unusable("interpreted") is None


@pytest.mark.parametrize("wanted", ["compiled", "interpreted", ""])
def test_a_run_starts_only_with_the_build_that_is_wanted(tmp_path: Path, wanted: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", __file__],
        cwd=tmp_path,  # where nothing comes before PYTHONPATH
        env={**os.environ, "TCPSTORE_TEST_BUILD": wanted},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if (wanted or "interpreted") == build():
        assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    else:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"this run is to test the {OTHER[build()]} build" in done.stderr
