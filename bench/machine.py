"""What a run says of the machine that it was on, and of what it has measured.

Knows where the system says so. Must not know what is measured. What is not known is empty.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

from bench.builds import ROOT
from bench.records import Machine, Versions
from bench.servers import CORES, can_mount, core_of_server, cores_of_load
from tcpstore_async.daemon import build
from tcpstore_async.version import VERSION


def open_files() -> int:
    """How many one process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def machine(asks_for_names: bool) -> Machine:
    """`asks_for_names`: whether a server is measured that looks up its peers."""
    return Machine(
        processor=_processor(),
        cores=len(CORES),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        open_files=open_files(),
        backlog=_backlog(),
        load_average=os.getloadavg()[0],
        server_cores=_listed(core_of_server()),
        load_cores=_listed(cores_of_load()),
        names=_names() if asks_for_names else "",
    )


def _names() -> Literal["files only", "this machine's"]:
    return "files only" if can_mount() else "this machine's"


def _listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))


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
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode().strip()
