"""PyTorch's own server where ours cannot be started: for which stores it is a substitute, and the warning.

The caller uses PyTorch's constructor, so that a program's mistakes raise the same errors as without us. This module
must not know how a server is started.
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
"""Environment variable: the ports where PyTorch's server replaces ours in this process or the agent that started it."""

_said: Final[set[str]] = set()
"""The reasons of which a warning was logged."""

log = logging.getLogger("tcpstore_async.torch")


def can_replace(
    error: Exception,
    port: int,
    shares: bool,
    listen_fd: object = None,
    server: str | None = None,
    tls: bool | None = None,
    token: str | None = None,
) -> bool:
    """Return whether PyTorch's server can replace ours, which has failed with `error`, for a store of these arguments.

    `shares` is whether stores of this process may share a server. Raises ValueError for a wrong TCPSTORE_SERVER_URL.
    """
    # A late error comes after a given socket has been closed, so PyTorch's server cannot have it.
    failed = isinstance(error, NoServerError) or (isinstance(error, LateServerError) and listen_fd is None)
    if not failed and not (shares and is_known(port) and "EADDRINUSE" in str(error)):
        return False
    # Clients that look for a name would not find it, and it has neither TLS nor tokens.
    secured = wants_tls(tls) or bool(find_token(token)) or bool(os.environ.get(TOKEN_KEYS))
    return find_server(server) is None and not secured


def is_known(port: int) -> bool:
    """Return whether this process, or the agent that has started it, has logged that PyTorch's server has this port."""
    return str(port) in os.environ.get(_PORTS, "").split(",")


def started(port: int, why: object) -> None:
    """Log that PyTorch's server has this port, and why ours does not. The servers of an agent get one warning."""
    if not is_known(port):
        os.environ[_PORTS] = f"{os.environ.get(_PORTS, '')},{port}".lstrip(",")
    level = logging.INFO if str(why) in _said else logging.WARNING
    _said.add(str(why))
    log.log(level, "using PyTorch's own server on port %d instead of tcpstore_async's: %s", port, why)
