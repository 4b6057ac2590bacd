"""The JSON file of a run: its schema, the machine and versions in it, and how it is read and written.

Must not know how anything is measured or drawn. What is unknown of the machine is empty.
Invariant: the file is always absent or complete, another run's samples are never overwritten, and a number that was not
measured is not in it; where a series stops, an `Ending` says why.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bench.processes import ROOT
from bench.scale.servers import CORES, can_mount, load_cores, server_cores
from tcpstore_async.base.version import VERSION
from tcpstore_async.serving import build
from tcpstore_async.tools.load.quick_bench import SATURATED as SATURATED

FORMAT = 1

Transport = Literal["sockets", "memory"]
"""Connections over loopback, or the server's sessions driven in memory without sockets."""


class Machine(msgspec.Struct, frozen=True):
    """Where the run was measured."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    open_files: int
    """Limit of one process, after raising it."""
    backlog: int = 0
    """net.core.somaxconn; 0: unknown, as in older files."""
    load_average: float = 0.0
    """Of the minute before the run."""
    server_cores: str = ""
    """Cores that the servers were pinned to, such as `1`."""
    load_cores: str = ""
    """Cores of the load generators; the same as `server_cores` on a machine with one core."""
    names: Literal["", "files only", "this machine's"] = ""
    """How PyTorch's servers resolved the names of peers; empty if none was measured."""


class Versions(msgspec.Struct, frozen=True):
    """What was measured."""

    tcpstore_async: str
    build: Literal["compiled", "interpreted"]
    commit: str
    python: str
    uvloop: str
    torch: str
    """Empty without PyTorch."""


class Sample(msgspec.Struct, frozen=True):
    """One measurement: one server at one size in one round."""

    scenario: str
    """A name of `bench/scale/scenarios.py`, or that and an operation: `operations-set`."""
    server: str
    """`uvloop`, `relay`, `threaded`, `libuv`, `legacy`, or `control` (the reference a second time)."""
    transport: Transport
    size: Annotated[int, msgspec.Meta(ge=1)]
    """Usually the number of ranks; `Scenario.sizes_are` says what."""
    round: int
    wall_seconds: float
    operations: int
    """Requests or ranks that the times are for."""
    server_cpu_seconds: float
    generator_cpu_seconds: float
    generator_share: float
    """Fraction of the time in which the busiest generator ran or waited for a core; from `SATURATED` on, the generator
    may have limited the result."""
    p50_seconds: float | None = None
    p95_seconds: float | None = None
    p99_seconds: float | None = None
    server_memory_bytes: int | None = None
    """Growth of the server's resident memory since it was idle, where the scenario measures it; at its peak in
    `start`."""
    parked: int | None = None
    """The most ranks that waited for a WAIT at the same time, where the scenario counts them."""
    copy_cpu_seconds: float | None = None
    """CPU for copying requests and replies once, as receiving and sending do; in memory, where it is not in the
    server's."""
    relay_cpu_seconds: float | None = None
    """CPU of the relays, where there are any; it is not in the server's."""


class Job(msgspec.Struct, frozen=True):
    """What a scenario of a start replays."""

    backend: str
    groups: str
    """As for `--groups`; empty if there are none."""
    arrival: str
    """When the ranks arrive, such as `at once`."""
    preset: str = ""
    """Its name, and the sizes if they are not its own; empty without one."""

    def __str__(self) -> str:
        """Return the text for titles: `megatron (nccl2, groups 12x128:nccl2), ranks arrive at once`."""
        pattern = f"{self.backend}, groups {self.groups}" if self.groups else self.backend
        return f"{f'{self.preset} ({pattern})' if self.preset else pattern}, ranks arrive {self.arrival}"


class Ending(msgspec.Struct, frozen=True):
    """Why a series stops."""

    scenario: str
    server: str
    transport: Transport
    size: int
    """The first size that was not measured."""
    reason: str
    """One sentence, shown in the figure."""


class Run(msgspec.Struct, frozen=True):
    """One run of the benchmark."""

    began: str
    """ISO 8601, UTC."""
    seconds: float
    command: str
    machine: Machine
    versions: Versions
    samples: list[Sample]
    endings: list[Ending]
    complete: bool
    """False if the run was interrupted or failed."""
    reference: str = "libuv"
    """The server that the others are compared with; `control` is the same one again."""
    jobs: dict[str, Job] = {}
    """What the scenarios of a start replayed, by scenario; empty in older files."""
    format: int = FORMAT


def write(run: Run, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))


def read(path: Path) -> Run:
    """Read a run. Raises ValueError, in one line, if the file is not one or has another format."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a benchmark run: {error}") from None
    if run.format != FORMAT:
        raise ValueError(f"{path}: written in format {run.format}; this version reads format {FORMAT}")
    return run


class RunFile:
    """`run.json` in a folder, rewritten as the run proceeds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.json"
        self._part = folder / "run.json.part"
        self._ours = False

    def check(self) -> None:
        """Make the folder. Raises OSError if the file cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._part.touch()
        self._part.unlink()

    def write(self, run: Run) -> None:
        """Replace the file; rename another run's file first, or leave it alone if this run has no samples yet.

        Raises OSError.
        """
        if not self._ours and self.path.exists():
            if not run.samples:
                return
            self.path.rename(_backup_name(self.path))
        write(run, self._part)
        self._part.replace(self.path)
        self._ours = True


def _backup_name(path: Path) -> Path:
    """Return an unused name with the time at which that run began, or the file's modification time if it is no run."""
    try:
        began = datetime.fromisoformat(read(path).began)
    except ValueError:
        began = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    names = (f"run-{began:%Y%m%dT%H%M%S}{suffix}.json" for suffix in ("", *map("-{}".format, range(2, 99))))
    return next(found for name in names if not (found := path.with_name(name)).exists())


# The machine and the versions


def open_files() -> int:
    """Return this process's limit on open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def machine(resolves_names: bool) -> Machine:
    """Describe this machine; `resolves_names`: whether a server under test resolves the names of its peers."""
    names: Literal["files only", "this machine's"] = "files only" if can_mount() else "this machine's"
    return Machine(
        processor=_processor(),
        cores=len(CORES),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        open_files=open_files(),
        backlog=_backlog(),
        load_average=os.getloadavg()[0],
        server_cores=",".join(map(str, sorted(server_cores()))),
        load_cores=",".join(map(str, sorted(load_cores()))),
        names=names if resolves_names else "",
    )


def _backlog() -> int:
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def versions() -> Versions:
    kind: Literal["compiled", "interpreted"] = "compiled" if build() == "compiled" else "interpreted"
    return Versions(VERSION, kind, _commit(), platform.python_version(), _version("uvloop"), _version("torch"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode().strip()
