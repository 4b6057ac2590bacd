"""Run PyTorch's own tests on PyTorch's stores and on ours: `make pytorch-tests PYTORCH=/path/to/checkout`.

Takes the tests of stores, rendezvous, launcher, elastic agent and object collectives from a checkout of PyTorch, best
of the version that is installed, or the files of test/distributed that are named. A test that passes with stock
PyTorch, and does not with a mode of TCPSTORE_INSTALL, is a difference. Status 1 if one is not in the table of known
differences in docs/compatibility.md. What fails is run once more, alone.

The environment is that of `make third-party`; `--python build/matrix/2.15.0/bin/python` takes one of `make matrix`.
Each file runs in a pytest of its own, as PyTorch runs them, whose workers are replaced if a test crashes one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools import matrix, third_party

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- pytorch-tests -->", "<!-- /pytorch-tests -->"

FOLDER: Final = Path("test", "distributed")
FILES: Final = (
    "test_store.py",
    "test_c10d_object_collectives.py",
    "elastic/rendezvous/*test*.py",
    "elastic/agent/server/test/*test*.py",
    "elastic/utils/distributed_test.py",
    "elastic/utils/util_test.py",
    "launcher/*test*.py",
)
"""Those that use a store, in FOLDER; what a version of PyTorch lacks is left out."""

NEEDED: Final = ("pytest>=9", "pytest-timeout>=2.4", "pytest-xdist>=3.6", "expecttest", "numpy")
"""What PyTorch's tests import, and what runs them."""

TEST_LIMIT, FILE_LIMIT = 120, 1800
"""Seconds. A test that takes longer ends its worker: no signal interrupts PyTorch's C++."""

PROBE: Final = """
import torch.distributed as dist, tcpstore_async
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
with tcpstore_async.TCPStore(store.host, store.port) as client:
    print("ours" if client._connection().extended() else "PyTorch's")
"""

Outcomes = dict[str, str]
"""Of tests, by `file::Class::name`: `passed`, `skipped` or `failed`."""


def known(page: str) -> dict[tuple[str, str], str]:
    """Return why a test differs, by its name and the mode, from the table of the page."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "::" in line]
    return {(name.strip("` "), mode.strip("`")): why for name, modes, why in rows for mode in modes.split(", ")}


def differences(stock: Outcomes, ours: Outcomes) -> list[str]:
    """Return what passes on stock PyTorch and not here; a test without a result did not pass."""
    return [name for name, outcome in stock.items() if outcome == "passed" and ours.get(name) != "passed"]


def environment(mode: str, paths: Iterable[Path]) -> dict[str, str]:
    """Return the environment of tests, which find what lies beside them."""
    env = third_party.environment(mode)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *map(str, paths)])
    return env


def server(python: Path, mode: str) -> str:
    """Return whose server a TCPStore starts: a mode that does nothing must not pass."""
    done = subprocess.run(
        [str(python), "-c", PROBE],
        env=environment(mode, ()),
        capture_output=True,
        text=True,
        timeout=TEST_LIMIT,
        check=False,
    )
    return done.stdout.strip() or matrix.last_words(done.stderr)


def run(python: Path, checkout: Path, file: Path, mode: str, names: Iterable[str] = ()) -> Outcomes:
    """Run a file, or of it only the tests with these names."""
    place = str(file.relative_to(checkout / FOLDER))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        chosen = " or ".join(sorted({re.split(r"::|\[", name)[-1] for name in names}))
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-n",
            str(os.cpu_count() or 1),
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
        ]
        command += [
            f"--rootdir={checkout}",
            f"--timeout={TEST_LIMIT}",
            "--timeout-method=thread",
            "-o",
            "junit_family=xunit1",
        ]
        command += [f"--junitxml={report}", *(["-k", chosen] if chosen else []), str(file)]
        env = environment(mode, (checkout / "test", file.parent)) | {"TMPDIR": folder}
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=checkout / "test",
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(FILE_LIMIT)
            except subprocess.TimeoutExpired:
                print(f"{place}, TCPSTORE_INSTALL={mode}: not finished within {FILE_LIMIT} s", flush=True)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what its tests left behind, too
                process.wait()
        if not report.exists():
            print(f"{place}, TCPSTORE_INSTALL={mode}: {matrix.last_words(Path(folder, 'log').read_text())}", flush=True)
            return {}
        found: Outcomes = {}
        for case, outcome, _ in matrix.outcomes(report.read_text()):
            name = "::".join([place, *case.rpartition("::")[0].split(".")[-1:], case.rpartition("::")[2]])
            if found.get(name) != "failed":  # by one of its subtests
                found[name] = outcome
        return found


def compare(python: Path, checkout: Path, file: Path, modes: list[str]) -> tuple[int, list[tuple[str, str]]]:
    """Run a file in every mode; return how many tests pass on stock PyTorch, and the differences."""
    stock = run(python, checkout, file, "0")
    place = file.relative_to(checkout / FOLDER)
    passed = sum(outcome == "passed" for outcome in stock.values())
    print(f"{place}, stock PyTorch: {passed} of {len(stock)} passed", flush=True)
    found = []
    for mode in modes if passed else ():
        ours = run(python, checkout, file, mode)
        if names := differences(stock, ours):
            ours |= run(python, checkout, file, mode, names)
        names = differences(stock, ours)
        print(f"{place}, TCPSTORE_INSTALL={mode}: {passed - len(names)} of these {passed} passed", flush=True)
        found += [(name, mode) for name in names]
    return passed, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of PyTorch, with test/distributed")
    parser.add_argument("files", nargs="*", default=FILES, help=f"in test/distributed; default: {' '.join(FILES)}")
    parser.add_argument("--modes", nargs="+", default=["1"], choices=third_party.MODES[1:], help="default: 1")
    parser.add_argument("--python", type=Path, help="of an environment with PyTorch, the package and pytest")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    files = sorted({file for name in given.files for file in (checkout / FOLDER).glob(name)})
    if not files:
        parser.error(f"none of these tests in {checkout / FOLDER}: is this a checkout of PyTorch?")
    python = given.python.absolute() if given.python else third_party.PYTHON
    if not given.python:
        third_party.prepare()
        if why := third_party.pip(*NEEDED):
            sys.exit(f"cannot install: {why}")
    for mode in ("0", *given.modes):
        expected, whose = ("ours" if mode != "0" else "PyTorch's"), server(python, mode)
        if whose != expected:
            sys.exit(f"TCPSTORE_INSTALL={mode}: a TCPStore's server is expected to be {expected}, found: {whose}")
    results = [compare(python, checkout, file, given.modes) for file in files]
    listed = known(PAGE.read_text())
    wrong = 0
    for name, mode in (one for _, found in results for one in found):
        wrong += (name, mode) not in listed
        text = f"known: {listed[name, mode]}" if (name, mode) in listed else "FAILED, and is not known"
        print(f"{name}, TCPSTORE_INSTALL={mode}: {text}", flush=True)
    passed = sum(count for count, _ in results)
    print(f"{passed} tests pass on stock PyTorch; {wrong} unknown differences", flush=True)
    sys.exit(1 if wrong or not passed else 0)


if __name__ == "__main__":
    main()
