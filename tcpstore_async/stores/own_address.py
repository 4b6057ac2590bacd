"""Whether the address that a master was given belongs to its machine, which hosts the server.

It knows addresses and the log; it must not know how connections are made. Nothing is checked if the connection is made
in time: another machine's address may well be forwarded to this one.
"""

import logging
import math
import socket
import threading
import time
from typing import Final

from ..client.admin import is_local

log = logging.getLogger("tcpstore_async.stores")

_SLOW_SECONDS: Final = 1.0
"""Seconds without a connection until the address is checked."""


class OwnAddress:
    """The address at which a master reaches its own server."""

    def __init__(self, host: str, port: int) -> None:
        self.fault = ""
        """What is wrong with the address; empty if nothing is known to be."""
        self._host = host
        self._port = port
        self._due = time.monotonic() + _SLOW_SECONDS

    def wait(self) -> bool:
        """Return True, to keep trying; once that takes long, log a warning if the address is not this machine's."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            threading.Thread(target=self._check, name=f"lookup of {self._host}", daemon=True).start()
        return True

    def _check(self) -> None:
        try:
            socket.getaddrinfo(self._host, self._port)
        except (OSError, ValueError):
            return  # the name may be known later; if not, the last error of the connection says so
        if is_local(self._host):
            return
        self.fault = (
            f"{self._host} is not an address of this machine, where this store's server listens on port {self._port}: "
            "have rank 0 run on the machine of that address, or give all ranks (MASTER_ADDR) one of this machine's"
        )
        log.warning("this store has not reached its own server yet: %s", self.fault)
