"""Shared helpers: servers in processes of their own, and a peer that speaks raw bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import persisted
from torch_forker import Forked, Program

LIMIT = 60.0
"""Seconds after which a test gives up waiting for an event. Generous: machines are shared."""

HANDSHAKE = bytes.fromhex("00cef7853c")


def free_port() -> int:
    """Return a port on which nothing listens.

    It is none of those that the system gives to whoever connects somewhere: one of these may be taken by the time that
    the test listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port


def refused(port: int) -> bool:
    """Return True if nothing listens on this port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), LIMIT).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # it stopped listening in the middle of the handshake
    return False


def until(true: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def secret_file(path: Path, text: str) -> Path:
    """Write a file that only its owner may read."""
    path.touch(0o600)
    path.write_text(text)
    return path


def run_python(program: str, *arguments: object, prefix: Sequence[str] = (), **variables: str) -> str:
    """Run a program, to whose interpreter a warning is an error, perhaps by another one; return what it prints."""
    done = subprocess.run(
        [*prefix, sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        cwd=tempfile.gettempdir(), env={**os.environ, **variables},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def in_child(work: Callable[[], object]) -> str:
    """Run `work` in a forked child; return what it returned or raised, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said: object = "failed"
        try:
            said = work()
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writing, str(said).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        heard = pipe.read()
    os.waitpid(child, 0)
    return heard


@contextmanager
def alarms(handle: Callable[[int, FrameType | None], object], first: float, interval: float = 0.0) -> Iterator[None]:
    """Call a handler by SIGALRM after so many seconds, and then at intervals if these are not 0."""
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, first, interval)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Command(Forked):
    """The command `tcpstore`, forked from a process that has imported it: a part of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], env: dict[str, str], cwd: str, stderr: int) -> None:
        reading, writing = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(reading, "rb")
        with open(os.devnull, "rb") as nothing:
            super().__init__(_request(arguments, env, cwd), (nothing.fileno(), writing, stderr), CLI)
        os.close(writing)

    def wait(self, timeout: float | None = LIMIT) -> int:
        return super().wait(LIMIT if timeout is None else timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since, and its status is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


CLI = "tcpstore_async.cli"


def _request(arguments: list[str], env: dict[str, str], cwd: str) -> dict[str, Any]:
    code = "from tcpstore_async.__main__ import main; main()"
    return {"code": code, "path": False, "arguments": arguments, "env": env, "imports": [], "cwd": cwd}


def tcpstore(*words: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run the command `tcpstore` to its end, forked from a process that has imported it; `env` is all that it has."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        request = _request(list(words), dict(os.environ) if env is None else env, tempfile.gettempdir())
        process = Forked(request, (given.fileno(), out.fileno(), errors.fileno()), CLI)
        try:
            status = process.wait(LIMIT)
        except TimeoutError:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(LIMIT)
            raise
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), errors.read())


class Server:
    """A server process that the test started, on 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes] | Command, ready: bytes, log: Path) -> None:
        self.process = process
        self.ready = ready
        """The line that it printed when it was ready."""
        self.port: int = json.loads(ready)["port"]
        self.log_path = log

    def log(self) -> str:
        """Return the server's log so far."""
        return self.log_path.read_text()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT)


@contextmanager
def listening(arguments: list[str], env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> Iterator[Server]:
    """Run a command, perhaps by another one such as prlimit, that prints its port when it is ready."""
    arguments = persisted.options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        everything = {**os.environ, **(env or {})}
        process: subprocess.Popen[bytes] | Command
        # The working directory must not be the checkout, whose plain sources would hide a compiled build.
        with log.open("wb") as errors:
            if prefix:
                command = [*prefix, sys.executable, "-m", "tcpstore_async", *arguments]
                process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, env=everything)
            else:
                process = Command(arguments, everything, folder, errors.fileno())
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"it did not start: {log.read_text()}"
            yield Server(process, line, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(LIMIT)
            process.stdout.close()


@contextmanager
def tcpstore_server(*options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`tcpstore serve --port 0`, ready to be connected to; killed at the end if the test has not stopped it."""
    with listening(["serve", "--port", "0", *options], env) as server:
        yield server


@contextmanager
def tcpstore_relay(
    upstream: int | str,
    *options: str,
    port: int = 0,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """`tcpstore relay` in front of a server, by its port or URL; killed at the end if the test has not stopped it."""
    url = f"tcp://127.0.0.1:{upstream}" if isinstance(upstream, int) else upstream
    with listening(["relay", "--upstream", url, "--port", str(port), *options], env, prefix) as relay:
        yield relay


TORCH_SERVER = """
import datetime, sys, torch
store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=300),
                                   wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def torch_server(backend: str = "libuv") -> Iterator[int]:
    """Run PyTorch's server, `libuv` or `legacy`, in a process of its own; yield its port."""
    with Program(TORCH_SERVER, backend) as server:
        line = server.stdout.readline()
        assert line, f"the server did not start: {server.errors()}"
        yield int(line)


@contextmanager
def server_of(kind: str) -> Iterator[int]:
    """Run our server or PyTorch's: `ours`, `libuv` or `legacy`; yield its port."""
    if kind == "ours":
        with tcpstore_server() as server:
            yield server.port
    else:
        with torch_server(kind) as port:
            yield port


def resting(pid: int) -> None:
    """Wait until all threads of a process wait for something: it has dealt with everything that had arrived.

    They are looked at one by one, twice. Each one that sleeps both times and has not woken between, which its count
    of context switches tells, slept at the moment between the two looks; if that is true of all, all did so at once.
    """
    deadline = time.monotonic() + LIMIT
    while True:
        first = _threads(pid)
        if all(state == "S" for state, _ in first.values()) and _threads(pid) == first:
            return
        assert time.monotonic() < deadline, f"process {pid} does not come to rest: {first}"


def _threads(pid: int) -> dict[str, tuple[str, str]]:
    """Return the state and the context switches of each thread."""
    found = {}
    for path in Path("/proc", str(pid), "task").iterdir():
        try:
            status = (path / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        found[path.name] = (status.partition("State:\t")[2][0], status[status.index("voluntary_ctxt_switches") :])
    return found


def deferred_for(listener: socket.socket) -> int:
    """The seconds for which the kernel holds a connection whose peer sends nothing; 0 also where it cannot."""
    option = getattr(socket, "TCP_DEFER_ACCEPT", None)
    return 0 if option is None else listener.getsockopt(socket.IPPROTO_TCP, option)


class RawPeer:
    """A connection that sends and expects raw bytes. Every wait has a limit."""

    def __init__(self, port: int, *, validate: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if validate:
            self.send(HANDSHAKE)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, count: int) -> bytes:
        """Read this many bytes. Raises EOFError if the server closes before."""
        parts = []
        while count:
            part = self.socket.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def ask(self, data: bytes, count: int) -> bytes:
        """Send, and read a reply of `size` bytes."""
        self.send(data)
        return self.read(count)

    def ask_value(self, data: bytes) -> bytes:
        """Send, and read a reply that is a value."""
        return self.read(int.from_bytes(self.ask(data, 8), "little"))

    def ping(self, nonce: int = 7) -> None:
        """Round trip: everything sent before has been executed, and no other reply is left before this one."""
        assert self.ask(b"\x0d" + struct.pack("<I", nonce), 4) == struct.pack("<I", nonce)

    def join(self, ranks: int) -> None:
        """Join as this many ranks."""
        self.ask(b"\x04" + blob(b"init/") + u64(ranks), 8)

    def closed(self) -> bool:
        """Wait until the server has closed, and say that nothing was left to read. A reset counts as closing."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()


def u64(number: int) -> bytes:
    return struct.pack("<Q", number % 2**64)


def blob(raw: bytes) -> bytes:
    """Encode a key or value."""
    return u64(len(raw)) + raw


def keys(*names: bytes) -> bytes:
    """Encode a counted list of keys."""
    return u64(len(names)) + b"".join(map(blob, names))
