"""The owner's side of a server in a process of its own: start it, say what is to be said, end it.

Knows: how a Python process is started whatever became of this one, and the control socket. Must not know: the
protocol, event loops.
Invariants: a forked child of the owner holds nothing of the server and cannot end it. When `stop` returns the port is
free. The server is no child of the owner's, which may wait for all its children; nothing outlives an owner but the
grace of the other ranks.

The program is `tcpstore serve --listen-fd … --owner-pid … --control-fd …`, without the 30 ms that the command line and
`site` take to import. The process that is started forks it and ends: the server is then adopted by the system.
"""

import atexit
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ..fork_safety import close_on_fork
from ..listening import START_TIMEOUT
from .log_reader import ChildLog, last_words
from .pidfd import Process, open_pidfd
from .protocol import Event, Lines

STOP_TIMEOUT: Final = 10.0
"""Seconds until a server that does not confirm its stop is killed."""

_LOG_PATIENCE: Final = 1.0
"""Seconds that a stop waits until the last lines are logged."""

_ABOVE_STANDARD_STREAMS: Final = 3

_PROGRAM: Final = """
import sys
listener, owner, pidfd, control, backend, grace, *path = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry] + path
import os
if os.fork():
    os._exit(0)
try:
    from tcpstore_async.serving import run_owned
except BaseException as error:
    os.write(int(control), repr(error).encode(errors="replace"))
    raise
run_owned(int(listener), int(owner), int(control), pidfd=int(pidfd), log_fd=2, backend=backend, grace=float(grace))
"""
"""The standard library comes first, so that no file of the user's that is named like a part of it is imported."""

_ROOT: Final = os.path.abspath(Path(__file__).parent.parent.parent.parent)
"""Where this package is: a directory, or a zip file. Taken now, before the working directory can change."""

_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_KEPT: Final = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"})
"""Variables by which an interpreter finds its parts. Others, PYTHONINSPECT say, are meant for the user's program."""


class StartError(Exception):
    """No process could be started, or it did not become a server."""


class StartTimeout(StartError):
    """It was not ready in time."""


class ServerProcess:
    """A server in a process of its own, which ends soon after this one at the latest. For any thread."""

    def __init__(self, process: Process, control: socket.socket, log: ChildLog, ready: Event) -> None:
        self.port = ready.port
        self.pid = ready.pid
        self.room = ready.room
        """Connections that it can hold."""
        self._process = process
        self._control = control
        control.settimeout(STOP_TIMEOUT)
        self._log = log
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant: a collection may stop one while its thread is at work on it
        self._stopped = False
        atexit.register(self.stop)

    def announce(self, joins: int) -> None:
        """So many more ranks are to join."""
        self._say(f"joins {joins}")

    def complete(self) -> None:
        """All have joined: connections that come from now on belong to a next round."""
        self._say(f"complete {time.monotonic()}")

    def alive(self) -> bool:
        """Whether it runs still: it was not stopped, and has not crashed. False in a forked child."""
        if self._owner != os.getpid():
            return False
        with self._lock:
            return not self._stopped and not _has_hung_up(self._control)

    def stop(self) -> None:
        """Free the port; it is free when this returns. May be called again, and by a forked child, which does nothing.

        The other ranks have the grace period to end what they are at, even if this process ends before.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            atexit.unregister(self.stop)
            try:
                self._part()
            finally:
                self._control.close()

    def _part(self) -> None:
        """Say stop, and wait until the server no longer listens, whatever it takes."""
        try:
            self._control.sendall(b"stop\n")
            left = _hear(Lines(self._control)).left
        except OSError:  # it crashed, or hangs
            self._kill()
        else:
            if left:
                return  # they have their grace
            if not self._process.wait(STOP_TIMEOUT):
                self._kill()
        self._log.join(_LOG_PATIENCE)

    def _kill(self) -> None:
        if not _has_hung_up(self._control):
            self._log.expect_kill(f"did not stop within {STOP_TIMEOUT:g} s, and was killed")
        self._process.kill()
        self._process.wait(STOP_TIMEOUT)

    def _say(self, words: str) -> None:
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._stopped:
                return
            try:
                self._control.sendall(words.encode() + b"\n")
            except OSError:
                pass  # it is gone, which its connections tell as well


def start(
    listener: socket.socket, *, backend: str = "uv", grace: float = 10.0, timeout: float | None = None
) -> ServerProcess:
    """A server on `listener`, which is closed here; it serves when this returns.

    Raises StartError if there can be none, or StartTimeout if there is none within `timeout`, which is the caller's:
    None has no end, 0 does not wait for others, but has a server started. `listener` is as it was then.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise StartError("there is no Python interpreter to run it")
    try:
        server = _launch(listener, backend, grace, START_TIMEOUT if timeout == 0 else timeout)
    except TimeoutError:
        raise StartTimeout(f"it was not ready within {timeout or START_TIMEOUT:.3g} s") from None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise StartError(str(error)) from None
    listener.close()
    return server


def _launch(listener: socket.socket, backend: str, grace: float, timeout: float | None) -> ServerProcess:
    """Start the program and wait for it. Raises StartError, OSError and SubprocessError, and leaves nothing then."""
    end = None if timeout is None else time.monotonic() + timeout
    control, theirs = _socket_pair()
    source, stderr = _socket_pair()
    stderr.setblocking(False)  # whatever becomes of this process, the server must not wait for it
    try:
        with theirs, stderr:
            starter = _spawn(listener, theirs, stderr, backend, grace)
        try:
            ready, process = _await_ready(control, source, end)
            starter.wait()
        except BaseException:
            _give_up(starter, control)
            raise
    except BaseException:
        control.close()
        source.close()
        raise
    try:
        return ServerProcess(process, control, ChildLog(source, process, ready.port), ready)
    except BaseException:
        control.close()  # which is as good as a stop
        process.kill()
        process.wait(STOP_TIMEOUT)
        raise


def _spawn(
    listener: socket.socket, control: socket.socket, stderr: socket.socket, backend: str, grace: float
) -> subprocess.Popen[bytes]:
    """Start the process that starts the server."""
    flags = ["-B"] if sys.dont_write_bytecode else []
    pidfd = _own_pidfd()
    owner = Process(os.getpid(), pidfd)  # closed in a forked child of another thread's
    try:
        with close_on_fork(_high(listener.dup())) as ours:
            fds = [ours.fileno(), control.fileno(), *([] if pidfd is None else [pidfd])]
            watched = [str(os.getpid()), str(-1 if pidfd is None else pidfd)]
            options = [str(ours.fileno()), *watched, str(control.fileno()), backend, str(grace)]
            return subprocess.Popen(
                [sys.executable, "-S", *flags, "-c", _PROGRAM, *options, *_path()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                cwd="/",
                env={name: value for name, value in os.environ.items() if name[:6] != "PYTHON" or name in _KEPT},
                pass_fds=fds,
                start_new_session=True,
            )
    finally:
        owner.close()


def _await_ready(control: socket.socket, source: socket.socket, end: float | None) -> tuple[Event, Process]:
    """What a server says when it serves, and its process. Raises StartError if it comes to nothing."""
    said, fds = b"", []
    try:
        while not said.endswith(b"\n"):
            if end is not None and end <= time.monotonic():
                raise TimeoutError
            control.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
            data, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(4), _CLOEXEC)
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.append(int.from_bytes(raw[:4], sys.byteorder))
            if not data:
                words = said.decode(errors="replace") or _last_words(source)
                raise StartError(f"it ended at once: {words}" if words else "it ended at once")
            said += data
        event = msgspec.json.decode(said, type=Event)
        if event.event != "ready":
            raise StartError(event.error)
        return event, Process(event.pid, fds.pop() if fds else None)
    finally:
        for fd in fds:
            os.close(fd)


def _last_words(source: socket.socket) -> str:
    """What came on standard error."""
    try:
        return last_words(source.recv(1 << 16, socket.MSG_DONTWAIT).decode(errors="replace").splitlines()[-8:])
    except OSError:
        return ""


def _give_up(starter: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Kill what has been started: a process group of its own, whose number is taken until its leader is waited for."""
    with suppress(OSError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.kill()
    starter.wait()
    control.settimeout(STOP_TIMEOUT)
    with suppress(OSError):
        while control.recv(4096):
            pass


def _path() -> list[str]:
    """Where the server finds what it imports: this very package, then what this process finds.

    Not the current directory, unless the package is there: what lies in it may be anything.
    """
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    entries = [os.path.abspath(entry) for entry in sys.path if entry]
    return [_ROOT, *(entry for entry in entries if entry != here)]


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return close_on_fork(_high(one)), close_on_fork(_high(other))


def _own_pidfd() -> int | None:
    """A descriptor of this process, out of the way of the standard streams, where there are any."""
    fd = open_pidfd(os.getpid())
    if fd is None or fd >= _ABOVE_STANDARD_STREAMS:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD_STREAMS)
    finally:
        os.close(fd)


def _high(one: socket.socket) -> socket.socket:
    """The same socket, out of the way of the standard streams: whoever closed these may open them again."""
    if one.fileno() >= _ABOVE_STANDARD_STREAMS:
        return one
    with one:
        return socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD_STREAMS))


def _has_hung_up(one: socket.socket) -> bool:
    """Whether the other end is closed."""
    poll = select.poll()
    poll.register(one, 0)
    return bool(poll.poll(0))


def _hear(lines: Lines) -> Event:
    """The next event. Raises OSError if the server ends before it, or says nothing for too long."""
    while (read := lines.read()) is not None:
        for line in read:
            return msgspec.json.decode(line, type=Event)
    raise ConnectionError("it ended")
