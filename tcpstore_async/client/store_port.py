"""The server's port for a named store: whether this process can reach it.

The port's address leads clients that cannot enter a named store into it, on every host that reaches the server. This
module knows the handshake and the server's identity; it must not know the users of the address.

Invariant: an address is returned only if the store itself was found there, not another store, or another server behind
a relay or a proxy.
"""

import logging
import os
import time
from typing import Final

from ..base.addresses import format_address
from ..base.deadline import Deadline
from ..base.errors import DistNetworkError, ProtocolError, reason_of
from ..session.client import ClientSession
from ..session.identity import read_identity
from ..wire.values import unpack
from . import requests
from .connect import NO_SIGPIPE, Attempt, check_hello, open_blocking
from .server_url import ServerUrl
from .store_name import StoreName

log = logging.getLogger("tcpstore_async.client")

_CONNECT_SECONDS: Final = 2.0
"""Timeout of connecting, which the kernels do however busy the server is."""

_REPLY_SECONDS: Final = 10.0

_SILENT_SECONDS: Final = 60.0
"""Seconds for which no port of a host is tried after one did not answer: a firewall probably drops the packets."""

_REPLY: Final = 4096

_silent: Final[dict[str, float]] = {}
"""End of that time on the monotonic clock, by host."""


def direct_address(server: ServerUrl, name: StoreName, timeout: float) -> tuple[str, int] | None:
    """Return the address of a store's port at the server if this process can reach it, else log why not and what to do.

    `name` has been entered, with `wants_port`. The timeout is in seconds.
    """
    reason = name.no_port or _unreachable(server, name, timeout)
    if not reason:
        return server.host, name.port
    log.info(
        "the store %r on %s has an address on loopback here, which is of no use to other hosts: %s. Other hosts need a "
        "port at the server that they can reach (tcpstore serve --store-ports), or TCPSTORE_SERVER_URL and the name of "
        "the store",
        name.name,
        server,
        reason,
    )
    return None


def _unreachable(server: ServerUrl, name: StoreName, timeout: float) -> str:
    """Return why the store's port cannot be used from here; empty if it can."""
    where = format_address(server.host, name.port)
    if server.tls:
        return f"the server's URL asks for TLS, and {where} has none"
    if _silent.get(server.host, 0.0) > time.monotonic():
        return f"another port of {server.host} did not answer"
    try:
        return "" if _is_there(server.host, name, timeout) else f"{where} is not that of the store"
    except DistNetworkError as error:
        _silent[server.host] = time.monotonic() + _SILENT_SECONDS
        return str(error)
    except (OSError, ProtocolError) as error:
        return f"cannot connect to {where}: {reason_of(error)}"


def _is_there(host: str, name: StoreName, timeout: float) -> bool:
    """Return whether the store's port is at this host.

    Raises DistNetworkError if no connection can be made, OSError for one that is refused or lost, and ProtocolError.
    """
    limit = timeout if timeout > 0 else _REPLY_SECONDS
    with open_blocking(host, name.port, Deadline(min(_CONNECT_SECONDS, limit)), refused_is_final=True) as peer:
        attempt = Attempt(min(_REPLY_SECONDS, limit))
        session = ClientSession()
        hello, greeting = session.hello(os.getpid())
        asking, asked = session.request(*requests.HAS_EXTENSION)
        telling, told = session.request(*requests.WHO_ARE_YOU)
        assert asked is not None
        assert told is not None
        peer.sendall(hello + asking + telling, NO_SIGPIPE)
        while not told.done and not (asked.done and not asked.result):  # another server may never answer WHO_ARE_YOU
            chunk = attempt.receive(peer, _REPLY)
            if not chunk:
                raise ConnectionError("the connection was closed")
            session.receive(chunk)
    check_hello(greeting)
    identity = read_identity(unpack(told.result)) if told.done else None
    return identity is not None and identity.instance == name.incarnation
