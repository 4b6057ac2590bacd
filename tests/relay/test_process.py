"""A relay that an agent runs for its workers: it ends with its owner, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from faults.fault_helpers import gone, program, until
from support import RawPeer, tcpstore_server

_OWNER = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from tcpstore_async.relay.process import RelayProcess

relay = RelayProcess(f"tcp://127.0.0.1:{sys.argv[1]}")
child = os.fork()
if not child:
    signal.pause()
print(relay.pid, relay.port, child, flush=True)
sys.stdin.readline()
relay.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextmanager
def owner(server: int) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process that owns a relay and has forked a child; yields it, and the relay's pid and port."""
    with program(_OWNER, str(server)) as process:
        assert process.stdout is not None
        pid, port, child = (int(word) for word in process.stdout.readline().split())
        try:
            yield process, pid, port
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.unmeasured
@pytest.mark.needs_proc
def test_it_ends_with_its_owner_though_a_child_of_that_lives_on() -> None:
    with tcpstore_server() as server, owner(server.port) as (process, pid, port), RawPeer(port) as rank:
        rank.ping()
        process.kill()
        assert rank.closed()
        until(lambda: gone(pid), "the relay has ended")


@pytest.mark.needs_proc
@pytest.mark.parametrize("killed", [False, True])
def test_it_ends_when_its_owner_closes_it(killed: bool) -> None:
    """Who may do so when it has ended already."""
    with tcpstore_server() as server, owner(server.port) as (process, pid, port), RawPeer(port) as rank:
        rank.ping()
        if killed:
            os.kill(pid, signal.SIGKILL)
            until(lambda: gone(pid), "the relay has ended")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert rank.closed()
        assert gone(pid)


@pytest.mark.needs_proc
def test_signals_to_all_processes_of_a_job_do_not_end_it() -> None:
    """Its ranks, which get them too, may need the store to finish."""
    with tcpstore_server() as server, owner(server.port) as (process, pid, port), RawPeer(port) as rank:
        assert os.getpgid(pid) != os.getpgid(process.pid)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
            rank.ping()
            with RawPeer(port) as another:
                another.ping()
        assert not gone(pid)
