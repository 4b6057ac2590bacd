"""What a server is told of the etcd that has its log. Must not need gRPC, which few servers have."""

import secrets
import socket
from typing import TYPE_CHECKING, NamedTuple

from ..auth.secret_files import TlsFiles
from ..base.addresses import EVERYWHERE, format_address
from ..base.errors import reason_of
from ..base.version import VERSION
from ..log.encoding import JournalError
from ..log.etcd_client import parse_member
from ..log.records import REPLAY

if TYPE_CHECKING:
    from ..log.etcd import EtcdLog


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
        if host in EVERYWHERE:
            host = self._own_address()
        holder = Holder(format_address(host, port), VERSION, REPLAY, secrets.token_hex(8))
        return EtcdLog(self.urls, self.name, holder, tls=self.tls, user=self.user)

    def _own_address(self) -> str:
        """Return this machine's address on the way to etcd, which other servers and clients can reach, too."""
        _, host, port = parse_member(self.urls[0])
        try:
            kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                own: str = probe.getsockname()[0]
        except OSError as error:
            why = f"cannot tell by which address others reach this server, as {self.urls[0]} cannot be looked up or"
            raise JournalError(f"{why} reached ({reason_of(error)}): give --host ADDRESS") from None
        return own
