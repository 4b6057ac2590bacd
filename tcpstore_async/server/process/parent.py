"""The parent side of a server process: start it, send it commands, end it. `child.py` is the other side.

Knows how to start a Python process whatever state this one is in, and the control socket. Must not know the protocol,
or event loops.
Invariants: a forked child of the owner holds nothing of the server and cannot end it. The port is free when `stop`
returns. The server is not a child of the owner, which may wait for all of its children. The server outlives its owner
only to give the other ranks their grace.

It does what `tcpstore serve --listen-fd … --owner-pid … --control-fd …` does, without the 30 ms needed to import the
command line and `site`. The started process forks the server and exits, so that the system adopts the server.
"""

import atexit
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec

from ...auth.secret_files import TlsFiles
from ...auth.tokens import HostTokens
from ...base import python_process
from ...base.deadline import Deadline
from ...base.limits import DEFAULT_GRACE
from ...base.locks import RLock
from ..backends import DEFAULT_BACKEND, START_TIMEOUT
from ..fork_safety import close_on_fork
from .log_reader import LogReader, joined
from .pidfd import Process, open_pidfd
from .protocol import Event, LineReader

STOP_TIMEOUT: Final = 10.0
"""Seconds until a server that does not confirm its stop is killed."""

_CRASH_TIMEOUT: Final = 0.1
"""Seconds to wait for the end of a server that has closed a connection, in case it is ending."""

_LOG_TIMEOUT: Final = 1.0
"""Seconds to wait for the last records of a server that has ended."""

_ABOVE_STANDARD_STREAMS: Final = 3

_PROGRAM: Final = """# the server of a TCPStore(is_master=True)
listen_fd, owner_pid, pidfd, control_fd, backend, grace, cert, key, ca = sys.argv[1:]
if os.fork():
    os._exit(0)
try:
    from tcpstore_async.serving import child_main
except BaseException as error:
    os.write(int(control_fd), repr(error).encode(errors="replace"))
    raise
child_main(int(listen_fd), int(owner_pid), int(pidfd), int(control_fd), backend, float(grace), cert, key, ca)
"""
"""The program of the server process."""

_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class StartError(Exception):
    """The process could not be started, or did not become a server."""


class StartTimeout(StartError):
    """The server was not ready in time."""


class ServerProcess:
    """A server in a process of its own, which ends soon after this one at the latest. Thread-safe."""

    def __init__(self, process: Process, control: socket.socket, log: LogReader, ready: Event) -> None:
        self.port = ready.port
        self.pid = ready.pid
        self.max_connections = ready.max_connections
        self._process = process
        self._control = control
        control.settimeout(STOP_TIMEOUT)
        self._log = log
        self._owner = os.getpid()
        self._lock = RLock()
        """Reentrant: a garbage collection may call `stop` in a thread that holds the lock."""
        self._stopped = False
        atexit.register(self.stop)

    def announce(self, joins: int) -> None:
        """Expect `joins` more ranks to join."""
        self._send(f"joins {joins}")

    def complete(self) -> None:
        """Report that all ranks have joined: later connections belong to the next round."""
        self._send(f"complete {time.monotonic()}")

    def alive(self, seconds: float = 0) -> bool:
        """Return whether the server still runs `seconds` from now. False in a forked child."""
        if self._owner != os.getpid():
            return False
        with self._lock:
            return not self._stopped and not _has_hung_up(self._control, seconds)

    def crash(self) -> str:
        """Return how the server process crashed, after waiting briefly for its last output, or "" if it has not.

        Call it when a connection is lost: the kernel closes the connections of a killed process one by one.
        """
        if self._owner != os.getpid() or self.alive(_CRASH_TIMEOUT):
            return ""
        self._log.join(_LOG_TIMEOUT)
        return self._log.crash

    def stop(self) -> None:
        """Stop the server; its port is free on return. Idempotent; does nothing in a forked child.

        The other ranks get the grace period to finish, even if this process ends before.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            atexit.unregister(self.stop)
            try:
                self._end()
            finally:
                self._control.close()

    def _end(self) -> None:
        """Send `stop` and wait until the server no longer listens; kill it if it does not reply."""
        try:
            self._control.sendall(b"stop\n")
            remaining = _next_event(LineReader(self._control)).remaining
        except OSError:  # it crashed, or hangs
            self._kill()
        else:
            if remaining:
                return  # the server outlives this process until their grace is over
            if not self._process.wait(STOP_TIMEOUT):
                self._kill()
        self._log.join(_LOG_TIMEOUT)

    def _kill(self) -> None:
        if not _has_hung_up(self._control, 0):
            self._log.expect_kill(f"was killed because it did not stop within {STOP_TIMEOUT:g} s")
        self._process.kill()
        self._process.wait(STOP_TIMEOUT)

    def _send(self, command: str) -> None:
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._stopped:
                return
            try:
                self._control.sendall(command.encode() + b"\n")
            except OSError:
                pass  # it has ended, as the store's connections will show


def start(
    listener: socket.socket,
    *,
    backend: str = DEFAULT_BACKEND,
    grace: float = DEFAULT_GRACE,
    timeout: float | None = None,
    tls: TlsFiles | None = None,
    tokens: HostTokens | None = None,
) -> ServerProcess:
    """Start a server process on `listener`, which is closed here. It serves on return.

    `timeout` is in seconds; None is no limit, and 0 means START_TIMEOUT. Raises StartTimeout if the server is not ready
    by then, and StartError if it could not be started; `listener` is left as it was.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise StartError("no Python interpreter found to run it")
    options = [backend, str(grace), *(tls or TlsFiles())]
    server = _launch(listener, options, tokens, START_TIMEOUT if timeout == 0 else timeout)
    listener.close()
    return server


def _launch(
    listener: socket.socket, options: list[str], tokens: HostTokens | None, timeout: float | None
) -> ServerProcess:
    """Start the program and wait until it is ready. If that fails, raises StartError, and leaves nothing behind.

    No error is caught around the wait, which is long: it would be one that a signal handler has raised.
    """
    deadline = Deadline(-1 if timeout is None else timeout)
    try:
        control, source, starter = _begin(listener, options, tokens)
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(str(error)) from None
    try:
        ready, process = _await_ready(control, source, deadline)
        starter.wait()
    except BaseException:
        _give_up(starter, control)
        control.close()
        source.close()
        raise
    try:
        return ServerProcess(process, control, LogReader(source, process, ready.port), ready)
    except BaseException as error:
        control.close()  # equivalent to a stop
        process.kill()
        process.wait(STOP_TIMEOUT)
        if isinstance(error, RuntimeError):  # there can be no more threads
            raise StartError(str(error)) from None
        raise


def _begin(
    listener: socket.socket, options: list[str], tokens: HostTokens | None
) -> tuple[socket.socket, socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks the server; return the ends of its control socket and its log, and itself."""
    control, child_control = _socket_pair()
    try:
        source, stderr = _socket_pair()
    except BaseException:
        control.close()
        child_control.close()
        raise
    stderr.setblocking(False)  # the server must never wait for this process to read
    try:
        with child_control, stderr:
            return control, source, _spawn(listener, child_control, stderr, options, tokens)
    except BaseException:
        control.close()
        source.close()
        raise


def _spawn(
    listener: socket.socket,
    control: socket.socket,
    stderr: socket.socket,
    options: list[str],
    tokens: HostTokens | None,
) -> subprocess.Popen[bytes]:
    """Start the process that forks the server. Tokens go through its standard input: other users see arguments."""
    pidfd = _own_pidfd()
    owner = Process(os.getpid(), pidfd)  # closes the pidfd in a child that another thread forks now
    try:
        with close_on_fork(socket.socket(fileno=_above_standard_streams(os.dup(listener.fileno())))) as copy:
            fds = [copy.fileno(), control.fileno(), *([] if pidfd is None else [pidfd])]
            watched = [str(os.getpid()), str(-1 if pidfd is None else pidfd)]
            arguments = [str(copy.fileno()), *watched, str(control.fileno()), *options]
            process = subprocess.Popen(
                python_process.command(_PROGRAM, *arguments),
                stdin=subprocess.DEVNULL if tokens is None else subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                cwd="/",
                env=python_process.environment(),
                pass_fds=fds,
                start_new_session=True,
            )
    finally:
        owner.close()
    if tokens is not None and process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:  # if it has failed, it reports why
            pipe.write(tokens.encode())  # a few kilobytes, which a pipe takes without blocking
    return process


def _await_ready(control: socket.socket, source: socket.socket, deadline: Deadline) -> tuple[Event, Process]:
    """Wait until the server is ready; return the event and its process. Raises StartError."""
    received, fds = b"", []
    try:
        while not received.endswith(b"\n"):
            if not _reports(control, select.POLLIN, deadline.left()):
                raise StartTimeout(f"not ready within {deadline.timeout:.3g} s")
            data, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(4), _CLOEXEC)
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.append(int.from_bytes(raw[:4], sys.byteorder))
            if not data:
                reason = received.decode(errors="replace") or _last_output(source)
                raise StartError(f"it exited at once: {reason}" if reason else "it exited at once")
            received += data
        event = msgspec.json.decode(received, type=Event)
        if event.event != "ready":
            raise StartError(event.error)
        return event, Process(event.pid, fds.pop() if fds else None)
    finally:
        for fd in fds:
            os.close(fd)


def _last_output(source: socket.socket) -> str:
    """Return the last lines that the process wrote to standard error."""
    try:
        return joined(source.recv(1 << 16, socket.MSG_DONTWAIT).decode(errors="replace").splitlines()[-8:])
    except OSError:
        return ""


def _give_up(starter: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Kill the started processes, and wait until the server's end of `control` is closed."""
    with suppress(OSError):  # the group's number cannot be reused before its leader is waited for
        os.killpg(starter.pid, signal.SIGKILL)
    starter.kill()
    starter.wait()
    control.settimeout(STOP_TIMEOUT)
    with suppress(OSError):
        while control.recv(4096):
            pass


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    one, other = [socket.socket(fileno=_above_standard_streams(end.detach())) for end in socket.socketpair()]
    return close_on_fork(one), close_on_fork(other)


def _own_pidfd() -> int | None:
    """Return a pidfd of this process, above the standard streams, or None if the system has no pidfds."""
    fd = open_pidfd(os.getpid())
    return None if fd is None else _above_standard_streams(fd)


def _above_standard_streams(fd: int) -> int:
    """Move a descriptor above the standard streams, whose numbers the child replaces. Takes ownership of `fd`."""
    if fd >= _ABOVE_STANDARD_STREAMS:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD_STREAMS)
    finally:
        os.close(fd)


def _has_hung_up(one: socket.socket, seconds: float) -> bool:
    """Return whether the other end closes within `seconds`."""
    return _reports(one, 0, seconds)


def _reports(one: socket.socket, events: int, seconds: float | None) -> bool:
    """Return whether one of these events happens within `seconds`, or the other end closes."""
    poll = select.poll()
    poll.register(one, events)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))


def _next_event(lines: LineReader) -> Event:
    """Wait for an event and return it. Raises OSError if the server ends first, or the socket times out."""
    while (read := lines.read()) is not None:
        for line in read:
            return msgspec.json.decode(line, type=Event)
    raise ConnectionError("the server process exited")
