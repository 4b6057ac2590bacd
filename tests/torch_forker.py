"""Programs forked from a process that has imported what they need: PyTorch takes two seconds of CPU time, and the
command line a quarter of one.

Only programs for which it makes no difference that the import has happened before: not those for which a variable, such
as `TCPSTORE_INSTALL`, decides something at the import. Run as a program, this is the process that forks.

A request is one JSON object, sent with four descriptors: the program's standard streams, and where the process ID is
written first and the exit status when the program has ended.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import IO, Any

LIMIT = 60.0


class Forked:
    """A forked process, as the process that requested it sees it."""

    def __init__(self, request: dict[str, Any], streams: tuple[int, int, int], having: str = "torch") -> None:
        """Run `code`, source text or with `path` the file at a path, with these standard streams.

        `arguments` and `env` are all that it is given. `imports` are modules that are imported before it is forked,
        once for all, besides `having`. With `group`, it leads a process group; `cwd` is its working directory.
        """
        status, answering = os.pipe()
        self._status: IO[bytes] = os.fdopen(status, "rb", buffering=0)
        control = _control(having)
        text = json.dumps(request).encode()
        control.sendmsg([len(text).to_bytes(4, "little")], [_descriptors([*streams, answering])])
        control.sendall(text)
        os.close(answering)
        self.returncode: int | None = None
        self.pid = int.from_bytes(self._status.read(4), "little")

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for the exit status, as `subprocess` returns it."""
        if self.returncode is None:
            ended = select.poll()  # `select` cannot take descriptors above 1,023
            ended.register(self._status, select.POLLIN)
            if not ended.poll(timeout * 1000):
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            self.returncode = int.from_bytes(self._status.read(4), "little", signed=True)
            self._status.close()
        return self.returncode


class Program(Forked):
    """A forked program, as its parent sees it: it runs at once, and is killed at the end of `with`."""

    def __init__(
        self, code: str | Path, *arguments: object, env: dict[str, str] | None = None, imports: Iterable[str] = ()
    ) -> None:
        """Run source text, or the file at a path, with these arguments and more environment, and after `imports`."""
        request = {
            "code": str(code),
            "path": isinstance(code, Path),
            "arguments": [str(one) for one in arguments],
            "env": {**os.environ, **(env or {})},
            "imports": list(imports),
        }
        reading, stdin = os.pipe()
        stdout, writing = os.pipe()
        stderr, name = tempfile.mkstemp()
        os.unlink(name)
        self._files = ExitStack()
        self.stdin: IO[bytes] = self._files.enter_context(os.fdopen(stdin, "wb", buffering=0))
        self.stdout: IO[bytes] = self._files.enter_context(os.fdopen(stdout, "rb", buffering=0))
        self._stderr: IO[bytes] = self._files.enter_context(os.fdopen(stderr, "rb"))
        super().__init__(request, (reading, writing, stderr))
        os.close(reading)
        os.close(writing)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the program, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and its status is on its way
                os.kill(self.pid, signal.SIGKILL)
        self.wait()
        self._files.close()

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for the exit status, as `subprocess` returns it. A program that does not end fails with its output."""
        try:
            return super().wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.errors()}") from None

    def output(self, timeout: float = LIMIT) -> str:
        """Return the output, which ends when all of its processes have closed it."""
        deadline = time.monotonic() + timeout
        parts: list[bytes] = []
        while True:
            if not select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the program is not done within {timeout:g} s: {self.errors()}")
            parts.append(self.stdout.read(1 << 16))
            if not parts[-1]:
                return b"".join(parts).decode()

    def errors(self) -> str:
        """Return what is on standard error so far."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode()


def _descriptors(given: list[int]) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given)


_started: dict[str, tuple[int, socket.socket]] = {}
"""The processes that fork, keyed by their imports, each with the process that started it and the connection to it."""


def _control(having: str) -> socket.socket:
    """Return the connection to the process that forks; start that once."""
    if having not in _started or _started[having][0] != os.getpid():
        from versions import QUIET  # and with it pytest, which the process that forks does without

        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *(QUIET if having == "torch" else ()), __file__, str(theirs.fileno()), having],
                cwd=tempfile.gettempdir(),
                pass_fds=[theirs.fileno()],
                env={name: text for name, text in os.environ.items() if not name.startswith("TCPSTORE_")},
            )
        _started[having] = os.getpid(), ours

        def end() -> None:
            ours.close()
            process.wait(LIMIT)

        atexit.register(end)
    return _started[having][1]


def fork_from_here() -> None:
    """Fork what this program requests from now on from a copy of its current state, which has no threads yet."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        Forker(theirs).serve()
        os._exit(0)
    theirs.close()
    _started["torch"] = os.getpid(), ours


# The process that forks


class Forker:
    """Fork a program for each request, and report how each has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, int] = {}
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve requests until the other side closes."""
        while True:
            ready = select.select([self._control, self._woken], [], [])[0]
            if self._woken in ready:
                self._woken.recv(1024)
                self._report()
            if self._control in ready:
                head, ancillary, _, _ = self._control.recvmsg(4, socket.CMSG_SPACE(4 * array.array("i").itemsize))
                if not head:
                    self._control.close()
                    self._woken.close()
                    self._waking.close()
                    return
                given = array.array("i", ancillary[0][2])
                text = self._control.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
                self._fork(json.loads(text), *given)

    def _fork(self, request: dict[str, Any], stdin: int, stdout: int, stderr: int, answering: int) -> None:
        for name in request["imports"]:
            importlib.import_module(name)
        pid = os.fork()
        if pid:
            if request.get("group"):
                os.setpgid(pid, pid)
            os.write(answering, pid.to_bytes(4, "little"))
            self._running[pid] = answering
            for one in (stdin, stdout, stderr):
                os.close(one)
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for used in (self._control, self._woken, self._waking):
            used.close()
        for number, one in enumerate((stdin, stdout, stderr)):
            os.dup2(one, number)
        for one in (stdin, stdout, stderr, answering, *self._running.values()):
            os.close(one)
        be(request)

    def _report(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            answering = self._running.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(answering, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            os.close(answering)


def be(request: dict[str, Any]) -> None:
    """Run the program as `__main__`, and exit as a program does."""
    os.environ.clear()
    os.environ.update(request["env"])
    if "cwd" in request:
        os.chdir(request["cwd"])
    code, name = request["code"], "<program>"
    sys.path[0] = ""
    if request["path"]:
        name = code
        sys.path[0] = str(Path(name).parent)
        code = Path(name).read_text()
    sys.argv[:] = [name, *request["arguments"]]
    module = ModuleType("__main__")
    module.__dict__["__file__"] = name
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)
    sys.exit(0)


def main() -> None:
    importlib.import_module(sys.argv[2])
    if sys.argv[2] == "torch":
        import torch
        import torch.distributed

        torch.set_num_threads(1)
    gc.freeze()  # no program needs to look at what all have in common
    sys.modules["torch_forker"] = sys.modules["__main__"]  # for a program that wants more of them
    Forker(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
