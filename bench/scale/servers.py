"""Servers under test, each in a process and, with two cores, on a core of its own, and the connections to them.

Must not know what ranks do, rounds, time budgets or files.
Invariant: whatever ends this process, nothing that it started is left, and it ends nothing else; a measurement has a
new server; its times exclude preparation; a failure is a LoadError of one line; nothing waits longer than the limit.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from bench import processes
from tcpstore_async.tools.load.generator import Late, LoadError, Step, Unreachable, late
from tcpstore_async.tools.load.scripts import encode_request, hello, join
from tcpstore_async.tools.load.workers import ClosedLoop, Took, WorkerPool, worker_pool

SERVERS = ("uvloop", "relay", "threaded", "libuv", "legacy", "control")
RELAY = "relay"
"""Our server behind relays, with a link for every eight ranks, as hosts with eight GPUs have it."""
RANKS_PER_LINK = 8
RANKS_PER_RELAY = 14_336
"""Most ranks of one relay process, which has many links here: it opens a file for each rank and two for each link."""
PYTORCH = ("libuv", "legacy")
REFERENCES = ("libuv", "legacy", "threaded")
"""The first of these that a run has is what the others are compared with."""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
WARM_UP_RANKS = 300
"""Join, unmeasured, a server of a process that is reused."""
EXIT_SECONDS = 2.0
"""Within which a process that has closed its connections exits."""
TIMEOUT = 60.0
"""Seconds for a server to start, or to stop."""
WINDOW = 512
"""Ranks that connect concurrently, where not all do."""
POLL_SECONDS = 0.01
"""Between two looks at the number of ranks, as in PyTorch's `waitForWorkers`."""
_CONNECTIONS_PER_GENERATOR = 19_200
"""A process may have 20,000 files open here. Only relays allow more in all."""
FOREIGN = "127.9.8.7"
"""A loopback address without a name in /etc/hosts."""
RESOLVER = "127.9.8.53"
"""The address of the name server that stops answering."""


class Impossible(LoadError):
    """This machine does not allow what a scenario needs."""


class Died(LoadError):
    """The server's process has exited by itself."""


class Server:
    """A running server, on 127.0.0.1."""

    def __init__(self, port: int, pid: int, in_trainer: bool = False, relays: Sequence[Server] = ()) -> None:
        """`in_trainer`: the process has a main thread that computes. `relays`: the ranks connect to these instead."""
        self.port: int = relays[0].port if relays else port
        self.pid = pid
        self.relays = relays
        self._in_trainer = in_trainer

    def cpu(self) -> float:
        """Return CPU seconds so far, of all threads but a trainer's main thread."""
        try:
            total = processes.cpu_seconds(self.pid)
            if not self._in_trainer:
                return total
            return total - int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9
        except (OSError, ValueError):
            raise Died("the server has exited") from None

    def relay_cpu(self) -> float | None:
        """Return the CPU seconds of the relays so far; None without any."""
        return sum(relay.cpu() for relay in self.relays) if self.relays else None

    def memory(self) -> int:
        """Return resident bytes."""
        return self._memory("VmRSS:")

    def reset_peak_memory(self) -> None:
        """Let `peak_memory` begin now, where the kernel allows it."""
        with suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_memory(self) -> int:
        """Return the most resident bytes so far, or since `reset_peak_memory`."""
        return self._memory("VmHWM:")

    def _memory(self, row: str) -> int:
        try:
            return processes.memory(self.pid, row)
        except (OSError, IndexError):
            raise Died("the server has exited") from None


def server_cores() -> set[int]:
    return {CORES[-1]}


def load_cores() -> set[int]:
    return set(CORES[:-1]) or set(CORES)


def has_torch() -> bool:
    return find_spec("torch") is not None


def reference_of(servers: Sequence[str]) -> str:
    """Return the one of these that the others are compared with, or an empty string."""
    startable = [server for server in REFERENCES if server not in PYTORCH or has_torch()]
    return next((server for server in startable if server in servers), "")


class Host:
    """Starts servers; reuses processes that have imported PyTorch. Made by `hosting`."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._torch: dict[str, subprocess.Popen[bytes]] = {}
        self._nsswitch: IO[str] | None = None
        self.starts = 0.0
        """Seconds spent so far on starting servers for one sample each."""
        self.imports = 0.0
        """Seconds spent so far on starting and warming up the processes that are reused."""

    def kind_of(self, server: str) -> str:
        """Return what to start for a name; `control` is the reference a second time."""
        return self.reference if server == "control" else server

    @contextmanager
    def running(
        self, server: str, *, ranks: int = 0, busy: bool = False, silent_resolver: bool = False, new: bool = False
    ) -> Iterator[Server]:
        """Start a new server, for so many ranks.

        `busy`: in a trainer that computes; `silent_resolver`: with a name server that has stopped answering; `new`: in
        a new process, even if that takes long. Raises LoadError if it does not start.
        """
        kind = self.kind_of(server)
        if kind == RELAY:
            began = time.monotonic()
            with self._new("uvloop", busy, silent_resolver) as found, relayed(found, ranks) as behind:
                self.starts += time.monotonic() - began
                yield behind
            return
        if kind in PYTORCH and not (busy or silent_resolver or new):
            with self._reused(server) as found:
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
            with _started(self._without_dns(command) if kind in PYTORCH else command, trainer=busy) as found:
                yield found
            return
        if not can_mount():
            raise Impossible("needs a private resolv.conf, and unshare -m is not allowed here")
        conf = f"nameserver {RESOLVER}\noptions timeout:1 attempts:1\n"
        with (
            _name_server() as silence,
            _file(conf) as file,
            _started(_mounted(file.name, "/etc/resolv.conf", command), trainer=False) as found,
        ):
            silence.set()
            yield found

    @contextmanager
    def _reused(self, server: str) -> Iterator[Server]:
        """Start PyTorch's server in a process that is reused, because importing torch takes seconds.

        The control has a process of its own. Each is warmed up first: the first server of a process takes half as long
        again.
        """
        kind = self.kind_of(server)
        if server not in self._torch:
            began = time.monotonic()
            self._torch[server] = _popen(self._without_dns([*processes.CHILD, "--pytorch"]), server_cores())
            _warm_up(_replace(self._torch[server], kind))
            self.imports += time.monotonic() - began
        process = self._torch[server]
        try:
            yield _replace(process, kind)
            # Closing thousands of connections must not overlap the next measurement on the same core.
            _replace(process, "")
        except LoadError as error:
            # What the load did to this process must not affect the next measurement.
            why = _why(error, process)
            _stop(self._torch.pop(server))
            raise why from None

    def _without_dns(self, command: list[str]) -> list[str]:
        """Make the command resolve names from files only, if possible.

        PyTorch's servers look up every peer, and ::ffff:127.0.0.1 is in no file: the machine's name server, and now and
        then its timeout of five seconds, would be measured.
        """
        if not can_mount():
            return command
        if self._nsswitch is None:
            self._nsswitch = _file("hosts: files\n")
        return _mounted(self._nsswitch.name, "/etc/nsswitch.conf", command)

    def stop(self) -> None:
        for process in self._torch.values():
            _stop(process)
        if self._nsswitch is not None:
            self._nsswitch.close()


@contextmanager
def hosting(reference: str = REFERENCES[0]) -> Iterator[Host]:
    host = Host(reference)
    try:
        yield host
    finally:
        host.stop()


@functools.cache
def can_mount() -> bool:
    """Whether files in /etc can be replaced for one process (needs root)."""
    try:
        return (
            subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=TIMEOUT, check=False).returncode == 0
        )
    except OSError:
        return False


def _mounted(file: str, over: str, command: list[str]) -> list[str]:
    """Bind-mount a file over another one for this command only."""
    return ["unshare", "-m", "sh", "-c", f'mount --bind "$0" {over} && exec "$@"', file, *command]


def _file(text: str) -> IO[str]:
    made = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (the caller closes it)
    made.write(text)
    made.flush()
    os.chmod(made.name, 0o644)
    return made


def command_of(kind: str, busy: bool) -> list[str]:
    return [*processes.CHILD, kind, *(["--busy"] if busy else [])]


@contextmanager
def _started(command: list[str], *, trainer: bool) -> Iterator[Server]:
    # A trainer and its server share all cores: neither is pinned.
    process = _popen(command, None if trainer else server_cores())
    try:
        line = _announcement(process)
        if not line:
            raise LoadError(f"the server did not start: {' '.join(command)} exited with status {process.wait(TIMEOUT)}")
        port, pid = processes.announcement(line)
        yield Server(port, pid, in_trainer=trainer and pid == process.pid)
    except LoadError as error:
        raise _why(error, process) from None
    finally:
        _stop(process)


@contextmanager
def relayed(
    server: Server, ranks: int, ranks_per_link: int = RANKS_PER_LINK, processes_for: int = RANKS_PER_RELAY
) -> Iterator[Server]:
    """Start relays in front of a server, on the generators' cores, each process for at most `processes_for` ranks.

    `ranks_per_link` of 0: each process has one link.
    """
    count = max(1, -(-ranks // processes_for))
    share = -(-max(1, ranks + 1) // count)  # rank 0 connects to the first one, beside its share of the others
    command = [*processes.CHILD, "--relays", str(server.port), str(ranks_per_link), str(share)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(_popen(command, load_cores()))
        relays = [Server(*processes.announcement(_announcement(process))) for process in started]
        yield Server(server.port, server.pid, relays=relays)
    except ValueError:
        raise Died("a relay did not start") from None
    finally:
        for process in started:
            _stop(process)


def _replace(process: subprocess.Popen[bytes], kind: str) -> Server:
    """Replace the server of a reused process; `kind` may be empty for none."""
    assert process.stdin is not None
    try:
        process.stdin.write(kind.encode() + b"\n")
        process.stdin.flush()
        return Server(*processes.announcement(_announcement(process)))
    except (OSError, ValueError):
        raise Died(f"PyTorch's {kind} server did not start") from None


def _warm_up(server: Server) -> None:
    with worker_pool("127.0.0.1", server.port, WARM_UP_RANKS, cores=load_cores()) as load:
        load.run(ClosedLoop(join(), TIMEOUT))


def _why(error: LoadError, process: subprocess.Popen[bytes]) -> LoadError:
    """Return Died if the server's process has exited; its connections close a moment before that."""
    if isinstance(error, Died):
        return error
    try:
        process.wait(EXIT_SECONDS if isinstance(error, Unreachable) else 0)
    except subprocess.TimeoutExpired:
        return error
    return Died(f"the server has exited: {error}")


def _announcement(process: subprocess.Popen[bytes]) -> bytes:
    """Return the line that announces the server. Raises Late."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], TIMEOUT)[0]:
        raise Late(f"the server has not started within {TIMEOUT:.0f} s")
    return process.stdout.readline()


def _popen(command: list[str], cores: set[int] | None) -> subprocess.Popen[bytes]:
    """Start a process on these cores, in a session of its own: Ctrl-C is for the benchmark."""
    mine = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
            env=processes.environment(),
        )
    finally:
        os.sched_setaffinity(0, mine)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(TIMEOUT)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def _name_server() -> Iterator[threading.Event]:
    """Serve NXDOMAIN for every name until the event is set, then nothing.

    It answers while a server starts because PyTorch 2.13 does not ask again after a first failure.
    """
    silent = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stub:
        try:
            stub.bind((RESOLVER, 53))
        except OSError as error:
            raise Impossible(f"cannot bind a name server to {RESOLVER}: {error.strerror}") from None
        stub.settimeout(0.1)
        over = threading.Event()
        thread = threading.Thread(target=_serve_names, args=[stub, silent, over])
        thread.start()
        try:
            yield silent
        finally:
            over.set()
            thread.join()


def _serve_names(stub: socket.socket, silent: threading.Event, over: threading.Event) -> None:
    while not over.is_set():
        try:
            question, peer = stub.recvfrom(4096)
        except TimeoutError:
            continue
        if not silent.is_set():
            # Header of a response: recursion available, NXDOMAIN, one question (echoed), no records.
            stub.sendto(question[:2] + b"\x81\x83\0\1\0\0\0\0\0\0" + question[12:], peer)


# Connections, and what is measured over them


class Measured(NamedTuple):
    """One measurement; seconds and bytes."""

    wall: float
    operations: int
    """What the server's CPU is for: answered requests, or ranks."""
    server_cpu: float
    generator_cpu: float
    share: float
    quantiles: tuple[float | None, float | None, float | None] = (None, None, None)
    memory: int | None = None
    part: str = ""
    """The operation, if the scenario has several."""
    parked: int | None = None
    copy_cpu: float | None = None
    relay_cpu: float | None = None


class Connection:
    """A blocking connection to a server under test. `limit`: seconds for each reply. Raises LoadError."""

    def __init__(self, port: int, limit: float, *, name: str = "a connection", source: str = "") -> None:
        self._name = name
        self._limit = limit
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), limit, (source, 0) if source else None)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{name} cannot be made: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def call(self, request: bytes, reply: int) -> bytes:
        """Send a request; return its reply, of `reply` bytes."""
        answer = b""
        try:
            self._socket.sendall(request)
            while len(answer) < reply:
                piece = self._socket.recv(reply - len(answer))
                if not piece:
                    raise Unreachable(f"{self._name} was closed by the server")
                answer += piece
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{self._name} was lost: {error.strerror or error}") from None
        return answer

    def _late(self) -> Late:
        return late(self._limit, f"{self._name} was not answered")


def wait_for_ranks(rank0: Connection, ranks: int, limit: float) -> float:
    """Poll as PyTorch's constructor does until all ranks have joined; return that time. Raises LoadError."""
    deadline = time.monotonic() + limit
    wait, get = encode_request("wait", [b"init/"]), encode_request("get", b"init/")
    while time.monotonic() < deadline:
        rank0.call(wait, 1)
        size = int.from_bytes(rank0.call(get, 8), "little")
        if int(rank0.call(b"", size)) >= ranks:
            return time.perf_counter()
        time.sleep(POLL_SECONDS)
    raise late(limit, "rank 0 has not seen all others")


class TestBed:
    """A server under test and the generators' connections to it."""

    __test__ = False

    def __init__(self, server: Server, load: WorkerPool, limit: float) -> None:
        self.server = server
        self.load = load
        self.limit = limit

    def connect(self, **how: str) -> Connection:
        return Connection(self.server.port, self.limit, **how)

    def prepare(self, steps: list[Step]) -> None:
        """Play without measuring."""
        self.load.run(ClosedLoop(steps, self.limit, window=WINDOW))

    def play(
        self,
        steps: list[Step],
        *,
        repeat: int = 1,
        window: int = 0,
        background: int = 0,
        background_steps: list[Step] | None = None,
    ) -> Measured:
        before, relays = self.server.cpu(), self.server.relay_cpu()
        order = ClosedLoop(
            steps, self.limit, repeat=repeat, window=window, background=background, background_steps=background_steps
        )
        found = measured(self.load.run(order), self.server.cpu() - before)
        return found._replace(relay_cpu=self.relay_cpu_since(relays))

    def relay_cpu_since(self, before: float | None) -> float | None:
        now = self.server.relay_cpu()
        return None if now is None or before is None else now - before

    def join(self, ranks: int, window: int, source: str = "") -> Measured:
        """Let rank 0 join, then the others, until rank 0 has seen all; operations are ranks."""
        cpu, relays, began = self.server.cpu(), self.server.relay_cpu(), time.perf_counter()
        with self.connect(name="rank 0's connection", source=source) as rank0:
            for step in join():
                rank0.call(step.request, step.reply)
            self.load.send(ClosedLoop(join(), self.limit, window=window))
            ended = wait_for_ranks(rank0, ranks, self.limit)
            took = self.load.collect()
        found = measured(took, self.server.cpu() - cpu)
        return found._replace(wall=ended - began, operations=ranks, relay_cpu=self.relay_cpu_since(relays))


def measured(took: Took, cpu: float) -> Measured:
    quantiles = (took.quantile(0.5), took.quantile(0.95), took.quantile(0.99))
    return Measured(took.wall, took.operations + took.background_operations, cpu, took.cpu, took.share, quantiles)


def generators(connections: int, cores: int, relays: int = 0) -> int:
    """Return how many processes make the load: one for each core, and enough for their limits on open files.

    Several relays for many ranks have one each, so that ranks that share a link are active at the same time, as those
    of a host are.
    """
    needed = -(-connections // _CONNECTIONS_PER_GENERATOR)
    return max(min(4, cores), relays if needed > 1 else 1, needed)


@contextmanager
def loaded(
    server: Server, connections: int, limit: float, *, source: str = "", pinned: bool = True
) -> Iterator[TestBed]:
    """Start the generators for a server."""
    cores, ports = load_cores(), [relay.port for relay in server.relays]
    with worker_pool(
        "127.0.0.1", server.port, connections, source=source, ports=ports,
        generators=generators(connections, len(cores), len(ports)), cores=cores if pinned else None,
    ) as load:  # fmt: skip
        yield TestBed(server, load, limit)


class Point(NamedTuple):
    """What to measure: a server at a size, within a limit of seconds for each step."""

    host: Host
    server: str
    size: int
    limit: float

    @contextmanager
    def started(self, connections: int, *, source: str = "", busy: bool = False, **how: bool) -> Iterator[TestBed]:
        """Start the server and the generators; the other options are those of `Host.running`."""
        with (
            self.host.running(self.server, ranks=connections, busy=busy, **how) as server,
            loaded(server, connections, self.limit, source=source, pinned=not busy) as bed,
        ):
            yield bed

    @contextmanager
    def connected(self) -> Iterator[TestBed]:
        """Start the server and connect `size` clients."""
        with self.started(self.size) as bed:
            bed.prepare(hello())
            yield bed

    @property
    def others(self) -> int:
        """Ranks besides rank 0. Raises Impossible if there are none."""
        if self.size < 2:
            raise Impossible("rank 0 has no other ranks to wait for")
        return self.size - 1
