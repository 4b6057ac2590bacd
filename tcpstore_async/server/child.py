"""The owner's side of a server in a process of its own: start it, say what is to be said, end it.

Knows: how a Python process is started whatever became of this one, and the control socket. Must not know: the
protocol, event loops.
Invariants: a forked child of the owner holds nothing of the server and cannot end it. When `stop` returns the port is
free. No zombie outlives the next start or stop, and nothing outlives an owner but the grace of the other ranks.

The program is `tcpstore serve --listen-fd … --owner-pid … --control-fd …`, without the 30 ms that the command line and
`site` take to import.
"""

import atexit
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from .control import Event, Lines
from .forks import keep_private

START_TIMEOUT: Final = 60.0
"""Seconds until a server that is not ready counts as failed. Usually it takes 0.1; machines can be very busy."""

STOP_TIMEOUT: Final = 10.0
"""Seconds until a server that does not confirm its stop is killed."""

_ABOVE_STANDARD_STREAMS: Final = 3

_PROGRAM: Final = """
import sys
listener, owner, control, backend, grace, *path = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry] + path
try:
    from tcpstore_async.daemon import run_owned
except BaseException as error:
    import os
    os.write(int(control), repr(error).encode(errors="replace"))
    raise
run_owned(int(listener), int(owner), int(control), backend=backend, grace=float(grace))
"""
"""The standard library comes first, so that no file of the user's that is named like a part of it is imported."""

_ROOT: Final = os.path.abspath(Path(__file__).parent.parent.parent)
"""Where this package is: a directory, or a zip file. Taken now, before the working directory can change."""

_KEPT: Final = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"})
"""Variables by which an interpreter finds its parts. Others, PYTHONINSPECT say, are meant for the user's program."""


class StartError(Exception):
    """No process could be started, or it did not become a server."""


class _Process(subprocess.Popen[bytes]):
    """A server that nobody waits for may still give the other ranks their grace; that is no reason for a warning.

    Popen warns of a process that is dropped while it runs. Ours are kept in `_leaving` until they are reaped, so this
    concerns the end of the interpreter and forked children, which cannot wait for them.
    """

    def __del__(self) -> None:
        pass


_leaving: Final[list[_Process]] = []
"""Servers that were stopped, or given up, but had not ended when they were last looked at."""

_leaving_lock = threading.RLock()


class ServerProcess:
    """A server in a process of its own, which ends with this one at the latest. For any thread."""

    def __init__(self, process: _Process, control: socket.socket, ready: Event) -> None:
        self.port = ready.port
        self.pid = ready.pid
        self._process = process
        self._control = control
        control.settimeout(STOP_TIMEOUT)
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
            return not self._stopped and self._process.poll() is None

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
                _give_up(self._process)

    def _part(self) -> None:
        """Say stop, and wait until the server no longer listens, whatever it takes."""
        try:
            self._control.sendall(b"stop\n")
            left = _hear(Lines(self._control)).left
        except OSError:  # it crashed, or hangs
            self._process.kill()
            self._process.wait()
            return
        if not left:
            _wait(self._process)

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
    listener: socket.socket, *, backend: str = "uv", grace: float = 10.0, timeout: float = START_TIMEOUT
) -> ServerProcess:
    """A server on `listener`, which is closed here; it serves when this returns.

    Raises StartError if there is none within `timeout`; `listener` is as it was then.
    """
    _reap()
    if not sys.executable or getattr(sys, "frozen", False):
        raise StartError("there is no Python interpreter to run it")
    try:
        server = _launch(listener, backend, grace, timeout)
    except TimeoutError:
        raise StartError(f"it was not ready within {timeout:g} s") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(str(error)) from None
    listener.close()
    return server


def _launch(listener: socket.socket, backend: str, grace: float, timeout: float) -> ServerProcess:
    """Start the program and wait for it. Raises StartError, OSError and SubprocessError, and leaves nothing then."""
    control, theirs = _socket_pair()
    try:
        with theirs:
            process = _spawn(listener, theirs, backend, grace)
        control.settimeout(timeout)
        return ServerProcess(process, control, _await_ready(process, control))
    except BaseException:
        control.close()
        raise


def _spawn(listener: socket.socket, control: socket.socket, backend: str, grace: float) -> _Process:
    flags = ["-B"] if sys.dont_write_bytecode else []
    with keep_private(_high(listener.dup())) as ours:
        options = [str(ours.fileno()), str(os.getpid()), str(control.fileno()), backend, str(grace)]
        return _Process(
            [sys.executable, "-S", *flags, "-c", _PROGRAM, *options, *_path()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name[:6] != "PYTHON" or name in _KEPT},
            pass_fds=(ours.fileno(), control.fileno()),
            start_new_session=True,
        )


def _await_ready(process: _Process, control: socket.socket) -> Event:
    """What a server says when it serves. One that does not come to that is killed."""
    try:
        said = _hear(Lines(control))
        if said.event != "ready":
            raise StartError(said.error)
        return said
    except BaseException:
        process.kill()
        process.wait()
        raise


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
    return keep_private(_high(one)), keep_private(_high(other))


def _high(one: socket.socket) -> socket.socket:
    """The same socket, out of the way of the standard streams: whoever closed these may open them again."""
    if one.fileno() >= _ABOVE_STANDARD_STREAMS:
        return one
    with one:
        return socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD_STREAMS))


def _hear(lines: Lines) -> Event:
    """The next event. Raises OSError if the server ends before it, or says nothing for too long."""
    while (read := lines.read()) is not None:
        for line in read:
            return msgspec.json.decode(line, type=Event)
    last_words = lines.rest.decode(errors="replace")
    raise ConnectionError(f"it ended at once: {last_words}" if last_words else "it ended at once")


def _wait(process: _Process) -> None:
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


def _give_up(process: _Process) -> None:
    with _leaving_lock:
        _leaving.append(process)
    _reap()


def _reap() -> None:
    """Wait for those that have ended."""
    with _leaving_lock:
        _leaving[:] = [process for process in _leaving if process.poll() is None]


def _forget_inherited() -> None:
    """In a forked child: they are its parent's children."""
    global _leaving_lock
    _leaving_lock = threading.RLock()
    _leaving.clear()


os.register_at_fork(after_in_child=_forget_inherited)
