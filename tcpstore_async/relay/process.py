"""A relay in a process of its own, for an agent that starts one for its workers.

Knows the command line of `tcpstore relay` and its ready line. Must not know links.
Invariant: the process ends when its owner closes it, is garbage, or ends in whatever way, and not before: what a job
manager or a terminal sends to every process of a job does not reach it, as its ranks may need the store to finish.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Final

from ..auth.secret_files import TOKEN, TOKEN_FILE, TlsFiles
from ..base.errors import DistNetworkError
from ..client.tls_settings import CA, CERT, KEY
from ..server.fork_safety import close_on_fork

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0


class RelayProcess:
    """A running relay on a port of 127.0.0.1."""

    def __init__(
        self,
        upstream: str,
        timeout: float = _START_SECONDS,
        token: str | None = "",
        files: TlsFiles | None = None,
        quiet: bool = False,
        store: str = "",
    ) -> None:
        """Start a relay in front of the server at the URL `upstream`; wait up to `timeout` seconds until it listens.

        The server may start later. The relay presents `token`, and none if it is empty, whatever the environment says;
        None leaves it to that. `files` take the place of those that the environment names for TLS. With `quiet` its log
        is dropped. The ranks are put into the `store` of this name, if one is given.
        Raises DistNetworkError if the relay does not start.
        """
        command = [sys.executable, "-m", "tcpstore_async", "relay", "--upstream", upstream, "--port", "0"]
        if store:
            command += ["--store", store]
        given = {} if token is None else {TOKEN: token}
        if files is not None:
            given |= {CA: files.ca, CERT: files.cert, KEY: files.key}
        # The relay ends when its standard input does: when this process has closed it, or has ended.
        end, stdin = socket.socketpair()
        close_on_fork(end)  # a child that outlives this process would keep the relay running
        try:
            with stdin:
                process = subprocess.Popen(
                    [*command, "--owner-fd", "0"],
                    stdin=stdin.fileno(),
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    stderr=subprocess.DEVNULL if quiet else None,
                    env={name: text for name, text in os.environ.items() if token is None or name != TOKEN_FILE}
                    | given,
                )
        except BaseException:
            end.close()
            raise
        self._process = process
        self._finalize = weakref.finalize(self, _stop, process, end, os.getpid())
        try:
            self.port: int = _ready(process, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the relay, and with it the connections of its ranks. Idempotent."""
        self._finalize()


def _ready(process: "subprocess.Popen[bytes]", timeout: float) -> int:
    """Read the ready line and return the port."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout):
            raise DistNetworkError(f"the relay did not start within {timeout:g} s")
    line = process.stdout.readline()
    if not line:
        raise DistNetworkError(f"the relay exited with status {process.wait(_STOP_SECONDS)}; see its standard error")
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):  # what else starts with Python, a sitecustomize for one, may print
        raise DistNetworkError(f"the relay printed {line[:100]!r} instead of its ready line") from None


def _stop(process: "subprocess.Popen[bytes]", end: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return
    with end, suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # works even if somebody else holds a copy
    assert process.stdout is not None
    process.stdout.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
