"""The load generator: connecting, retries and the measured share of CPU."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from support import LIMIT, server_of
from tcpstore_async.tools.load.generator import Clock, Generator, LoadError, Unreachable, waited
from tcpstore_async.tools.load.scripts import PONG, encode_request, hello, join, make_step
from tcpstore_async.tools.load.workers import ClosedLoop, busy, worker_pool


def test_waiting_for_a_core_counts_as_busy() -> None:
    assert busy(Clock(1.0, 5.0), Clock(1.25, 5.5)) == 0.75


def test_waiting_for_a_core_is_measured() -> None:
    """Two processes compute on the same core."""
    core = str(min(os.sched_getaffinity(0)))
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the kernel has no schedstat")
    loop = ["taskset", "-c", core, sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(2)]
    try:
        deadline = time.monotonic() + LIMIT
        while not all(waited(str(process.pid)) > 0.05 for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_cpu_time_does_not_exceed_elapsed_time() -> None:
    """In a measurement so short that its overhead takes as long."""
    with server_of("ours") as port, worker_pool("127.0.0.1", port, 1) as load:
        load.run(ClosedLoop(hello(), LIMIT))
        for _ in range(50):
            took = load.run(ClosedLoop([make_step(encode_request("ping", 1), 4)], LIMIT))
            assert 0 < took.cpu < took.wall * 1.01


@pytest.mark.parametrize(("window", "least", "most"), [(0, 100, 100), (50, 1, 50)])
def test_all_connect_before_the_first_is_served(window: int, least: int, most: int) -> None:
    """Without a window, all connections exist when the first hello arrives."""
    found: list[int] = []

    def count(listener: socket.socket) -> None:
        with ExitStack() as stack:
            first = stack.enter_context(listener.accept()[0])
            first.settimeout(LIMIT)
            first.recv(1000)
            listener.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    stack.enter_context(listener.accept()[0])
                    found.append(1)

    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        listener.settimeout(LIMIT)
        thread = threading.Thread(target=count, args=[listener])
        thread.start()
        generator = Generator("127.0.0.1", [listener.getsockname()[1]])
        generator.open(100, 0)
        with pytest.raises(LoadError):
            generator.closed_loop(join(), 1.0, window=window)
        generator.close()
        thread.join(LIMIT)
    assert least <= 1 + len(found) <= most


def resetting(listener: socket.socket, resets: int, connections: int) -> None:
    """Reset some connections before replying; reply to the hello of the others, and to nothing else."""
    with ExitStack() as stack, suppress(OSError):  # no more connections
        for number in range(resets + connections):
            one = stack.enter_context(listener.accept()[0])
            one.settimeout(LIMIT)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.recv(1000)
            if number < resets:
                one.close()
            else:
                one.sendall(PONG)
        one.recv(1000)


@contextmanager
def load_on(resets: int) -> Iterator[Generator]:
    """Make two connections to a server that resets the first ones."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        thread = threading.Thread(target=resetting, args=[listener, resets, 2], daemon=True)
        thread.start()
        generator = Generator("127.0.0.1", [listener.getsockname()[1]])
        generator.open(2, 0)
        try:
            yield generator
        finally:
            generator.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)


def test_reset_before_the_first_reply_is_retried() -> None:
    """A kernel with a full backlog resets connections; PyTorch's client retries."""
    with load_on(3) as generator:
        assert generator.closed_loop(hello(), LIMIT).operations == 2
        with pytest.raises(Unreachable, match="was lost after 0 requests"):
            generator.closed_loop(hello(), LIMIT)


def test_resets_are_not_retried_for_ever() -> None:
    with load_on(100) as generator, pytest.raises(Unreachable, match="was lost after 0 requests: Connection reset"):
        generator.closed_loop(hello(), LIMIT)
