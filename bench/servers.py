"""The servers under test: each in a process of its own, on a processor core of its own where there are two.

Knows how each is started and how its processor time and memory are read. Must not know what is measured.
Invariant: nothing that was started here is left when its context ends, or this process, however; only processes started
here are ended.
"""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from bench.builds import environment
from tcpstore_async.load.generator import Late, LoadError, Unreachable
from tcpstore_async.load.process import Play, fleet, process_clock
from tcpstore_async.load.requests import join

SERVERS = ("uvloop", "threaded", "libuv", "legacy", "control")
PYTORCH = ("libuv", "legacy")
REFERENCES = ("libuv", "legacy", "threaded")
"""With which the others are compared: the first that a run has."""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
_PYTHON = [sys.executable, "-W", "ignore", "-m"]
WARMING = 300
"""Ranks that join, unmeasured, when a process begins that is kept for several servers."""
ENDING = 2.0
"""Seconds in which a process has ended that has closed its connections."""
LIMIT = 60.0
"""Seconds in which a server has to start, or to end."""


class Impossible(LoadError):
    """This machine does not allow what a scenario needs."""


class Died(LoadError):
    """The server's process has ended by itself."""


FOREIGN = "127.9.8.7"
"""A loopback address that /etc/hosts does not name: who comes from it has to be looked up."""
RESOLVER = "127.9.8.53"
"""Where the name server listens that stops answering."""


class Server:
    """A server that was started here; on 127.0.0.1."""

    def __init__(self, port: int, pid: int, trainer: bool = False) -> None:
        self.port = port
        self.pid = pid
        self._trainer = trainer

    def cpu(self) -> float:
        """Seconds of processor time so far, of all threads; of a trainer's main thread, which is no server's, none."""
        try:
            if not self._trainer:
                return _process_cpu(self.pid)
            main = int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9
            return _process_cpu(self.pid) - main + sum(map(_process_cpu, _children(self.pid)))
        except (OSError, ValueError):
            raise Died("the server has ended") from None

    def memory(self) -> int:
        """Resident bytes."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            return int(status.split("VmRSS:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            raise Died("the server has ended") from None


def _process_cpu(pid: int) -> float:
    return time.clock_gettime(process_clock(pid))


def _children(pid: int) -> list[int]:
    mine = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*mine, *(below for child in mine for below in _children(child))]


def core_of_server() -> set[int]:
    return {CORES[-1]}


def cores_of_load() -> set[int]:
    return set(CORES[:-1]) or set(CORES)


def has_torch() -> bool:
    return find_spec("torch") is not None


def reference_of(servers: Sequence[str]) -> str:
    """The one of these that the others are compared with; empty: there is none."""
    startable = [server for server in REFERENCES if server not in PYTORCH or has_torch()]
    return next((server for server in startable if server in servers), "")


class Host:
    """Starts servers; keeps processes that have PyTorch imported, for theirs. Made by `hosting`."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._torch: dict[str, subprocess.Popen[bytes]] = {}
        self._names: IO[str] | None = None
        self.starts = 0.0
        """Seconds so far in which servers have started, each for a sample of its own."""
        self.imports = 0.0
        """Seconds so far in which the processes have started and warmed up that are kept."""

    def kind_of(self, server: str) -> str:
        """What is started for a name; `control` is the reference a second time."""
        return self.reference if server == "control" else server

    @contextmanager
    def running(
        self, server: str, *, busy: bool = False, silent_resolver: bool = False, new: bool = False
    ) -> Iterator[Server]:
        """A fresh one; `busy`: in a trainer that computes; `silent_resolver`: with a name server that answers no more;
        `new`: its process too, at any price.

        Raises LoadError if it does not start.
        """
        kind = self.kind_of(server)
        if kind in PYTORCH and not (busy or silent_resolver or new):
            with self._kept(server) as found:
                yield found
            return
        began = time.monotonic()
        with self._new(kind, busy, silent_resolver) as found:
            self.starts += time.monotonic() - began
            yield found

    @contextmanager
    def _new(self, kind: str, busy: bool, silent_resolver: bool) -> Iterator[Server]:
        command = command_of(kind, busy)
        if not silent_resolver:
            with _started(self._knowing_nobody(command) if kind in PYTORCH else command, trainer=busy) as found:
                yield found
            return
        if not can_mount():
            raise Impossible("a server cannot be given a resolver of its own here: unshare -m is not allowed")
        conf = f"nameserver {RESOLVER}\noptions timeout:1 attempts:1\n"
        with (
            _names() as silence,
            _file(conf) as file,
            _started(_mounted(file.name, "/etc/resolv.conf", command), trainer=False) as found,
        ):
            silence.set()
            yield found

    @contextmanager
    def _kept(self, server: str) -> Iterator[Server]:
        """PyTorch's, new, in a process that is kept for it: importing PyTorch takes seconds.

        The control has one of its own, so that two processes are compared. None serves for the first time when it is
        measured: that takes half as long again.
        """
        kind = self.kind_of(server)
        if server not in self._torch:
            began = time.monotonic()
            self._torch[server] = _popen(self._knowing_nobody([*_PYTHON, "bench.torch_host"]), pinned=True)
            _warm_up(_another(self._torch[server], kind))
            self.imports += time.monotonic() - began
        process = self._torch[server]
        try:
            yield _another(process, kind)
            # It is gone before the next one is measured, on the same core: it may have thousands to take leave of.
            _another(process, "")
        except LoadError as error:
            # What the load did to it must not be there in the next measurement.
            why = _why(error, process)
            _end(self._torch.pop(server))
            raise why from None

    def _knowing_nobody(self, command: list[str]) -> list[str]:
        """The command, where names are looked up in files only, if that is possible here.

        PyTorch's servers look up every peer, and ::ffff:127.0.0.1 is in no file: what would be measured is the
        machine's name server, and now and then its five seconds of silence.
        """
        if not can_mount():
            return command
        if self._names is None:
            self._names = _file("hosts: files\n")
        return _mounted(self._names.name, "/etc/nsswitch.conf", command)

    def stop(self) -> None:
        for process in self._torch.values():
            _end(process)
        if self._names is not None:
            self._names.close()


@contextmanager
def hosting(reference: str = REFERENCES[0]) -> Iterator[Host]:
    host = Host(reference)
    try:
        yield host
    finally:
        host.stop()


@functools.cache
def can_mount() -> bool:
    """Whether a process can be given other files in /etc than the machine's: needs root."""
    try:
        return (
            subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=LIMIT, check=False).returncode == 0
        )
    except OSError:
        return False


def _mounted(file: str, over: str, command: list[str]) -> list[str]:
    """The command with a file over another one, for itself only."""
    return ["unshare", "-m", "sh", "-c", f'mount --bind "$0" {over} && exec "$@"', file, *command]


def _file(text: str) -> IO[str]:
    made = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (whoever asks for it closes it)
    made.write(text)
    made.flush()
    os.chmod(made.name, 0o644)
    return made


def command_of(kind: str, busy: bool) -> list[str]:
    host = ["bench.torch_host", "--once"] if kind in PYTORCH else ["bench.own_host"]
    return [*_PYTHON, *host, kind, *(["--busy"] if busy else [])]


@contextmanager
def _started(command: list[str], *, trainer: bool) -> Iterator[Server]:
    # A trainer and its server compete for the cores that there are: neither is pinned.
    process = _popen(command, pinned=not trainer)
    try:
        line = _line_of(process)
        if not line:
            raise LoadError(f"the server did not start: {' '.join(command[:4])} … ended with {process.wait(LIMIT)}")
        port, pid = _ready(line)
        yield Server(port, pid, trainer)
    except LoadError as error:
        raise _why(error, process) from None
    finally:
        _end(process)


def _another(process: subprocess.Popen[bytes], kind: str) -> Server:
    """A new server, or none, in a process that is kept, instead of the one before."""
    assert process.stdin is not None
    try:
        process.stdin.write(kind.encode() + b"\n")
        process.stdin.flush()
        return Server(*_ready(_line_of(process)))
    except (OSError, ValueError):
        raise Died(f"PyTorch's {kind} server did not start") from None


def _warm_up(server: Server) -> None:
    with fleet("127.0.0.1", server.port, WARMING, cores=cores_of_load()) as load:
        load.tell(Play(join(), LIMIT))


def _why(error: LoadError, process: subprocess.Popen[bytes]) -> LoadError:
    """What went wrong, and that it was the server's end, if it was; its connections go a moment before itself."""
    if isinstance(error, Died):
        return error
    try:
        process.wait(ENDING if isinstance(error, Unreachable) else 0)
    except subprocess.TimeoutExpired:
        return error
    return Died(f"the server has ended by itself: {error}")


def _line_of(process: subprocess.Popen[bytes]) -> bytes:
    """What it says first. Raises Late."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], LIMIT)[0]:
        raise Late(f"the server has not started within {LIMIT:.0f} s")
    return process.stdout.readline()


def _ready(line: bytes) -> tuple[int, int]:
    if line.startswith(b"{"):
        event = json.loads(line)
        return int(event["port"]), int(event["pid"])
    port, pid = line.split()
    return int(port), int(pid)


def _popen(command: list[str], *, pinned: bool) -> subprocess.Popen[bytes]:
    """Started on the server's core, which its threads inherit. Ctrl-C is for us, so it has a session of its own."""
    mine = os.sched_getaffinity(0)
    if pinned:
        os.sched_setaffinity(0, core_of_server())
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
            env=environment(),
        )
    finally:
        os.sched_setaffinity(0, mine)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(LIMIT)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def _names() -> Iterator[threading.Event]:
    """A name server that knows no name, and once the event is set answers no more.

    It answers while a server starts because PyTorch's 2.13 asks nobody again after the first failure.
    """
    silent = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stub:
        try:
            stub.bind((RESOLVER, 53))
        except OSError as error:
            raise Impossible(f"no name server can be put on {RESOLVER}: {error.strerror}") from None
        stub.settimeout(0.1)
        over = threading.Event()
        thread = threading.Thread(target=_answer, args=[stub, silent, over])
        thread.start()
        try:
            yield silent
        finally:
            over.set()
            thread.join()


def _answer(stub: socket.socket, silent: threading.Event, over: threading.Event) -> None:
    while not over.is_set():
        try:
            question, peer = stub.recvfrom(4096)
        except TimeoutError:
            continue
        if not silent.is_set():
            # A response, recursion available, NXDOMAIN; one question, which is repeated, and nothing else.
            stub.sendto(question[:2] + b"\x81\x83\0\1\0\0\0\0\0\0" + question[12:], peer)
