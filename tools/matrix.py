"""Run the tests that need PyTorch against many versions of it: `make matrix`, or `tools/matrix.py --versions 2.4`.

Each version has a virtual environment under build/matrix (or $MATRIX_DIR), which is kept, with the checkout's package,
interpreted. The results go to summary.json there and, as a table, to docs/compatibility.md. By default the newest
release of each minor version from 2.4 on is tested, spread over this machine's Pythons that it supports.

The builds come from PyTorch's CPU index. If that is unreachable, the GPU build is installed from PyPI without its GPU
libraries, which take several GB; tools/cuda_stubs.py replaces them by stubs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"

TESTS = ("tests/interop", "tests/pytorch", "tests/client/test_[!l]*.py", "tests/relay/test_without_links.py")
"""Those that need PyTorch, without the load test; missing paths are skipped."""

OLDEST = (2, 4)
KNOWN = "2.4.1 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0".split()
"""Used if no index is reachable."""

PYTHONS = (((2, 4), 8, 12), ((2, 5), 9, 13), ((2, 9), 10, 14))
"""From a PyTorch version on: the oldest and newest Python 3.x with builds."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PURE = "typing_extensions filelock sympy networkx jinja2 fsspec setuptools".split()
"""The dependencies that PyTorch imports."""

SPACE = 6 << 30
"""Free disk space in bytes below which nothing is installed."""

INSTALL_LIMIT, TEST_LIMIT = 1800.0, 900.0
"""Seconds."""

PROBE = """
import json, torch, torch.distributed as dist
names = {"clone": "clone", "queue_push": "queues", "list_keys": "LIST_KEYS", "barrier": "BARRIER"}
lacks = [text for name, text in names.items() if not hasattr(dist.TCPStore, name)]
print(json.dumps({"build": torch.__version__, "lacks": lacks}))
"""

Row = dict[str, Any]


class Failed(Exception):
    """A step failed; the message is one line."""


# Which versions, on which Python


def parts(version: str) -> tuple[int, ...]:
    """Split a version: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def newest_of_each(versions: Iterable[str]) -> list[str]:
    """Return the newest release of each supported minor version, in order."""
    found: dict[tuple[int, ...], str] = {}
    for version in versions:
        plain = version.partition("+")[0]
        if re.fullmatch(r"\d+\.\d+\.\d+", plain) and parts(plain)[:2] >= OLDEST:
            minor = parts(plain)[:2]
            found[minor] = max(found.get(minor, plain), plain, key=parts)
    return [found[minor] for minor in sorted(found)]


def selected(wanted: list[str], known: list[str]) -> list[str]:
    """Return the wanted versions, where 2.6 is the newest 2.6; all known ones by default."""
    newest = {".".join(version.split(".")[:2]): version for version in known}
    return sorted({newest.get(version, version) for version in wanted}, key=parts) if wanted else known


def supported(version: str) -> tuple[int, int]:
    """Return the oldest and the newest Python 3.x that have builds."""
    _, oldest, newest = max(row for row in PYTHONS if row[0] <= parts(version)[:2])
    return oldest, newest


def choose(version: str, pythons: dict[int, str]) -> int | None:
    """Return the minor version of a Python for a PyTorch version, varying so that every Python is used."""
    oldest, newest = supported(version)
    fitting = [minor for minor in sorted(pythons) if oldest <= minor <= newest]
    return fitting[parts(version)[1] % len(fitting)] if fitting else None


def find_pythons() -> dict[int, str]:
    """Return this machine's CPythons from 3.10 on, by minor version."""
    candidates = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    candidates += [str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))]
    candidates += [sys.executable]
    found: dict[int, str] = {}
    code = "import sys; print(sys.version_info[1] if sys.implementation.name == 'cpython' else 0)"
    for python in filter(None, candidates):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 and int(done.stdout) >= 10:
            found[int(done.stdout)] = python
    return found


def known_versions() -> list[str]:
    """Return the newest release of each minor version in pip's index."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return KNOWN
    found = re.search(r"Available versions: (.*)", done.stdout)
    return newest_of_each(found[1].split(", ")) if found else KNOWN


# Installing


class Environment:
    """The virtual environment of one version."""

    def __init__(self, folder: Path, version: str) -> None:
        self.version = version
        self.path = folder / version
        self.marker = self.path / "matrix.json"
        """Exists once PyTorch is installed and has been imported."""

    def run(self, *command: str, limit: float = INSTALL_LIMIT, **env: str) -> str:
        """Run a program of the environment and return its output. Raises Failed."""
        full = [str(self.path / "bin" / command[0]), *command[1:]]
        try:
            done = subprocess.run(
                full,
                cwd=self.path,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not finished within {limit:.0f} s") from None
        if done.returncode:
            raise Failed(last_words(done.stderr or done.stdout))
        return done.stdout

    def pip(self, *arguments: str) -> None:
        self.run("python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments)

    def make(self, python: str) -> None:
        """Install PyTorch unless it is installed. Raises Failed."""
        if self.marker.exists():
            return
        if shutil.disk_usage(self.path.parent).free < SPACE:
            raise Failed(f"less than {SPACE >> 30} GB of disk space free")
        shutil.rmtree(self.path, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(self.path)], check=True, timeout=300)
        gpu_libraries = self.install_torch()
        found = json.loads(self.run("python", "-W", "ignore", "-c", PROBE))
        self.marker.write_text(json.dumps({**found, "gpu_libraries": gpu_libraries}))

    def install_torch(self) -> str:
        """Install PyTorch and return what replaces its GPU libraries. Raises Failed.

        Without pip's cache, because the builds are large and stay installed.
        """
        if sys.platform != "linux" or platform.machine() != "x86_64":
            self.pip("--no-cache-dir", f"torch=={self.version}")
            return "none needed"
        try:
            self.pip("--no-cache-dir", "--retries=1", f"--index-url={CPU_INDEX}", f"torch=={self.version}+cpu")
            return "none needed"
        except Failed:
            self.pip("--no-cache-dir", "--no-deps", f"torch=={self.version}")
        self.pip(*PURE)
        (library,) = self.path.glob("lib/python*/site-packages/torch/lib")
        stubs = self.run("python", str(ROOT / "tools" / "cuda_stubs.py"), str(library))
        return "stubs" if not stubs.startswith("0 ") else "none needed"


def last_words(text: str) -> str:
    """Return the most informative line of an error's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|\w*Error)\b", line)]
    return ((errors or lines or ["no output"])[-1])[:200]


def build_package(folder: Path, environment: Environment) -> Path:
    """Build an interpreted wheel from a copy, because a build leaves files in its folder."""
    source, wheels = folder / "source", folder / "wheels"
    for old in (source, wheels):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tcpstore_async", source / "tcpstore_async", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source)]
    environment.run(*command, TCPSTORE_PURE="1")
    (wheel,) = wheels.glob("*.whl")
    return wheel


# Running


def run_tests(environment: Environment, arguments: list[str]) -> Row:
    """Run the tests; return counts of passed and skipped ones, and the names of failed ones. Raises Failed."""
    report = environment.path / "report.xml"
    report.unlink(missing_ok=True)
    paths = [str(path.relative_to(ROOT)) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    command = [str(environment.path / "bin" / "pytest"), "-q", "-n", "auto", "--dist", "loadfile"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    env = {**os.environ, "TCPSTORE_TEST_BUILD": "interpreted"}
    with (environment.path / "pytest.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *arguments, *paths], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(TEST_LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"the tests did not finish within {TEST_LIMIT:.0f} s") from None
        finally:
            process.kill()
            process.wait()
    if not report.exists():
        raise Failed(f"pytest exited with status {process.returncode}: see {log.name}")
    return counts(report.read_text())


def outcomes(report: str) -> Iterator[tuple[str, str, str]]:
    """Yield a JUnit report's tests: `class::name`, `passed`, `skipped` or `failed`, and why it was skipped."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        outcome = "failed" if {"failure", "error"} & kinds.keys() else "skipped" if "skipped" in kinds else "passed"
        why = kinds["skipped"].get("message") or "" if outcome == "skipped" else ""
        yield f"{case.get('classname')}::{case.get('name')}", outcome, why


def counts(report: str) -> Row:
    """Return the counts in a JUnit report."""
    row: Row = {"passed": 0, "skipped": {}, "failed": []}
    for name, outcome, why in outcomes(report):
        if outcome == "failed":
            row["failed"].append(name)
        elif outcome == "skipped":
            row["skipped"][why] = row["skipped"].get(why, 0) + 1
        else:
            row["passed"] += 1
    return row


def run_one(folder: Path, version: str, pythons: dict[int, str], wheel: Path | None, arguments: list[str]) -> Row:
    """Install and test one version; an error is in the row."""
    row: Row = {"torch": version, "date": time.strftime("%Y-%m-%d")}
    minor = choose(version, pythons)
    if minor is None:
        oldest, newest = supported(version)
        return {**row, "error": f"could not be installed: no Python 3.{oldest} to 3.{newest} here"}
    row["python"] = platform_version(pythons[minor])
    environment = Environment(folder, version)
    try:
        environment.make(pythons[minor])
        row |= json.loads(environment.marker.read_text())
        wheel = wheel or build_package(folder, environment)
        environment.pip(f"{wheel}[test]")
        environment.pip("--no-deps", "--force-reinstall", str(wheel))
    except (Failed, OSError, subprocess.SubprocessError) as error:
        return {**row, "error": f"could not be installed: {error}"}
    try:
        return row | run_tests(environment, arguments)
    except Failed as error:
        return {**row, "error": str(error)}


def platform_version(python: str) -> str:
    done = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


# Reporting


def render(rows: list[Row]) -> str:
    """Return the table, newest version first."""
    lines = [
        "| PyTorch | Python | GPU libraries | its store lacks | passed | not applicable | failed |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in sorted(rows, key=lambda row: parts(row["torch"]), reverse=True):
        start = f"| {row.get('build', row['torch'])} | {row.get('python', '–')} | {row.get('gpu_libraries', '–')} "
        lacks = ", ".join(row.get("lacks", ())) or "–"
        if "error" in row:
            text = row["error"].replace("|", "\\|")
            lines.append(f"{start}| {lacks} | – | – | {text} |")
            continue
        skipped = sum(row["skipped"].values())
        lines.append(f"{start}| {lacks} | {row['passed']} | {skipped} | {len(row['failed'])} |")
    dates = sorted({row["date"] for row in rows})
    spread = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never"
    system = f"{platform.system()} {platform.machine()}"
    return "\n".join([*lines, "", f"Ran with `make matrix` on {system}, {spread}."])


def put(page: str, table: str) -> str:
    """Return the page with the table between its markers."""
    if BEGIN in page and END in page:
        before, rest = page.split(BEGIN, 1)
        return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"
    page = page.rstrip() or "# Compatibility"
    return f"{page}\n\n## Versions of PyTorch\n\n{BEGIN}\n{table}\n{END}\n"


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Merge results: a later row replaces the same minor version's."""
    found = {parts(row["torch"])[:2]: row for row in [*old, *new]}
    return [found[minor] for minor in sorted(found)]


def write(folder: Path, row: Row) -> None:
    """Save a result; called after each version, so that an interruption loses nothing."""
    summary = folder / "summary.json"
    old = json.loads(summary.read_text()) if summary.exists() else []
    rows = merged(old, [row])
    summary.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(put(PAGE.read_text() if PAGE.exists() else "", render(rows)))


def show(row: Row) -> None:
    """Print a result."""
    if "error" in row:
        print(f"torch {row['torch']}: {row['error']}", flush=True)
        return
    skipped = sum(row["skipped"].values())
    print(f"torch {row['torch']}: {row['passed']} passed, {skipped} skipped, {len(row['failed'])} failed", flush=True)
    for name in row["failed"]:
        print(f"    {name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=[], metavar="2.x", help="only these; 2.6 is the newest 2.6")
    parser.add_argument("--list", action="store_true", help="print which versions would run on which Python, and exit")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options for pytest; nothing is written")
    given = parser.parse_args()
    folder = Path(os.environ.get("MATRIX_DIR") or ROOT / "build" / "matrix").resolve()
    pythons = find_pythons()
    versions = selected(given.versions, known_versions())
    if given.list:
        for version in versions:
            minor = choose(version, pythons)
            there = "installed" if Environment(folder, version).marker.exists() else ""
            print(f"{version:8} {'no fitting Python' if minor is None else f'Python 3.{minor}':18} {there}".rstrip())
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    bad = 0
    for version in versions:
        print(f"torch {version} …", flush=True)
        wheel = next((folder / "wheels").glob("*.whl"), None) if (folder / "wheels").exists() else None
        row = run_one(folder, version, pythons, wheel, given.pytest.split())
        show(row)
        bad += "error" in row or bool(row["failed"])
        if not given.pytest:
            write(folder, row)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
