"""What a server is told of the etcd that has its log. Must not know the log, which needs another package."""

import secrets
import socket
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from ..auth.secret_files import TlsFiles
from ..base.addresses import format_address
from ..base.version import VERSION
from ..log.records import REPLAY

if TYPE_CHECKING:
    from ..log.etcd import EtcdLog

_ALL = ("::", "0.0.0.0")
"""Hosts that stand for every address of this machine."""


class EtcdOptions(NamedTuple):
    urls: list[str]
    name: str
    """The name of the log there."""
    tls: TlsFiles | None
    user: str
    """NAME:PASSWORD, or empty."""

    def log(self, listener: socket.socket) -> "EtcdLog":
        """Return the log for a server with this listening socket. Raises JournalError."""
        from ..log.etcd import EtcdLog, Holder

        host, port = listener.getsockname()[:2]
        if host in _ALL:
            host = self._own_address()
        holder = Holder(format_address(host, port), VERSION, REPLAY, secrets.token_hex(8))
        return EtcdLog(self.urls, self.name, holder, tls=self.tls, user=self.user)

    def _own_address(self) -> str:
        """Return this machine's address on the way to etcd, which other servers and clients can reach, too."""
        parts = urlsplit(self.urls[0])
        host, port = parts.hostname or "", parts.port or 2379
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
        return own
