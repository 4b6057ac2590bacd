"""Commands of `tcpstore` that benchmarks run. Must not import the package: it is measured in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(*words: str) -> Iterator[tuple[int, int]]:
    """Run a command of `tcpstore` that listens; yield its port and process."""
    command = [sys.executable, "-m", "tcpstore_async", *words, "--port", "0"]
    # Not in the checkout: with `-m`, what is in the working directory would be imported first.
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tempfile.gettempdir()) as process:
        try:
            assert process.stdout is not None
            yield int(json.loads(process.stdout.readline())["port"]), process.pid
        finally:
            process.kill()


@contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Keep servers and clients on different cores: one that shares its client's core sleeps and wakes for less."""
    cores = sorted(os.sched_getaffinity(0))
    for server in servers:
        os.sched_setaffinity(server, {cores[0]})
    os.sched_setaffinity(0, {cores[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
