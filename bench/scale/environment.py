"""Describe the machine and the versions of a run. What is unknown is empty."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

from bench.builds import ROOT
from bench.scale.results import Machine, Versions
from bench.scale.servers import CORES, can_mount, load_cores, server_cores
from tcpstore_async.serving import build
from tcpstore_async.version import VERSION


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
