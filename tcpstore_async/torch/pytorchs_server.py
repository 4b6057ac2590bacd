"""PyTorch's own server where ours cannot be started: for which stores it will do, and the warning.

Who asks for it calls PyTorch's constructor, which raises what a program has done wrong as it does without us. This
module must not know how a server is started.
"""

import logging
import os
from typing import Final

from ..client.credentials import find_token
from ..client.store_name import find_server
from ..client.tls_settings import wants_tls
from ..server.master import LateServerError, NoServerError
from ..stores.tcp import TOKEN_KEYS

_PORTS: Final = "TCPSTORE_PYTORCHS_PORTS"
"""Environment variable: the ports on which this process, or one that has started it, has put it in place of ours."""

_said: Final[set[str]] = set()
"""The reasons that have been given."""

log = logging.getLogger("tcpstore_async.torch")


def will_do(server: str | None = None, tls: bool | None = None, token: str | None = None) -> bool:
    """Return whether it can take the place of ours for a store that is given these arguments.

    Nobody would come to it who looks for a name, and it knows neither TLS nor tokens. Raises ValueError for wrong
    variables.
    """
    secured = wants_tls(tls) or bool(find_token(token)) or bool(os.environ.get(TOKEN_KEYS))
    return find_server(server) is None and not secured


def cannot_start(error: Exception, listen_fd: object = None) -> bool:
    """Return whether an error says that ours could not be started; one that is late has closed a given socket."""
    return isinstance(error, NoServerError) or (isinstance(error, LateServerError) and listen_fd is None)


def is_known(port: int) -> bool:
    """Return whether it has been said of this port, by this process or the agent that has started it."""
    return str(port) in os.environ.get(_PORTS, "").split(",")


def may_be_shared(port: int, error: Exception) -> bool:
    """Return whether ours cannot have the port because PyTorch's has it, which stores of this process may share."""
    return is_known(port) and "EADDRINUSE" in str(error)


def started(port: int, why: object) -> None:
    """Say that it serves on this port, and why ours does not. One warning will do for the servers of an agent."""
    if not is_known(port):
        os.environ[_PORTS] = f"{os.environ.get(_PORTS, '')},{port}".lstrip(",")
    level = logging.INFO if str(why) in _said else logging.WARNING
    _said.add(str(why))
    log.log(level, "using PyTorch's own server on port %d instead of tcpstore_async's: %s", port, why)
