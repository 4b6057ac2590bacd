"""A relay in a process of its own, for an agent that starts one for its workers.

Knows the command line of `tcpstore relay` and its ready line. Must not know links.
"""

import json
import selectors
import subprocess
from typing import Final

from ..auth.secret_files import TOKEN, TOKEN_FILE, TlsFiles
from ..base import python_process
from ..base.errors import DistNetworkError
from ..client.tls_settings import CA, CERT, KEY
from ..server.owned_process import STOP_SECONDS, OwnedProcess

_START_SECONDS: Final = 60.0


class RelayProcess(OwnedProcess):
    """A running relay."""

    def __init__(
        self,
        upstream: str,
        timeout: float = _START_SECONDS,
        token: str | None = "",
        files: TlsFiles | None = None,
        quiet: bool = False,
        store: str = "",
        host: str = "127.0.0.1",
    ) -> None:
        """Start a relay on `host`, in front of the server at the URL `upstream`; wait up to `timeout` seconds for it.

        The server may start later. The relay presents `token`, or none if it is empty; with None, that of the
        environment. `files` replace the TLS files that the environment names. With `quiet` its log is dropped. Its
        ranks enter `store`, if that is given. Raises DistNetworkError if the relay does not start.
        """
        arguments = ["relay", "--owner-fd", "0", "--upstream", upstream, "--host", host, "--port", "0"]
        arguments += ["--store", store] if store else []
        environment = python_process.environment()
        if token is not None:
            environment.pop(TOKEN_FILE, None)
            environment[TOKEN] = token
        if files is not None:
            environment |= {CA: files.ca, CERT: files.cert, KEY: files.key}
        stderr = subprocess.DEVNULL if quiet else None
        super().__init__(arguments, environment, stdout=subprocess.PIPE, stderr=stderr)
        try:
            self.port: int = read_port(self.process, timeout)
        except BaseException:
            self.close()
            raise


def read_port(process: "subprocess.Popen[bytes]", timeout: float | None) -> int:
    """Read a relay's ready line and return its port. Raises DistNetworkError."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout):
            raise DistNetworkError(f"the relay did not start within {timeout:g} s")
    line = process.stdout.readline()
    if not line:
        raise DistNetworkError(f"the relay exited with status {process.wait(STOP_SECONDS)}; see its standard error")
    return int(json.loads(line)["port"])
