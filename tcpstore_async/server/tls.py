"""TLS at a server: its certificate, and the handshakes under way.

What both ends of a connection use is in `session/tls.py`; the client's end is `client/tls.py`.

It knows certificate files. It must not know sessions or commands.

Invariants: nothing is allocated for TLS before a peer's first byte asks for it. At most `MOST_HANDSHAKES` handshakes
are under way. A certificate that cannot be loaded leaves the previous one in use.
"""

import logging
import ssl
from typing import Final

from ..auth.secret_files import TlsFiles, load_certificates
from ..base.errors import DistNetworkError
from ..session.transport import Transport

MOST_HANDSHAKES: Final = 512
"""Handshakes under way at once; beyond that, the oldest is closed."""

TLS_BYTES: Final = 64 * 1024
"""Bytes counted for TLS on one connection, besides the connection itself. Measured: 16 KiB after the handshake, 30 to
43 KiB during it, and 46 KiB once it has carried large values."""

CIPHERTEXT_ON: Final = 128 * 1024
"""Bytes read at once within a large value."""

log = logging.getLogger("tcpstore_async.server")


class ServerTls:
    """The certificate of one server, and its handshakes under way."""

    def __init__(self, files: TlsFiles, required: bool = False) -> None:
        """Raises DistNetworkError if a file cannot be used."""
        self.files = files
        self.required = required
        """Whether peers must use TLS."""
        self.context = make_context(files)
        self.handshakes: dict[Transport, bool] = {}
        """Connections with a handshake under way, oldest first."""

    def reload(self) -> None:
        """Reload the files, for new connections; if that fails, log it and keep the previous context."""
        try:
            self.context = make_context(self.files)
        except DistNetworkError as error:
            log.error("%s; the previous certificate stays in use", error)
        else:
            log.info("reloaded the certificate %s", self.files.cert)

    def begin(self, connection: Transport) -> Transport | None:
        """Count a handshake; if there are too many, return the oldest connection for the caller to close."""
        handshakes = self.handshakes
        handshakes[connection] = True
        return next(iter(handshakes)) if len(handshakes) > MOST_HANDSHAKES else None

    def end(self, connection: Transport) -> None:
        """Stop counting a handshake. Idempotent."""
        self.handshakes.pop(connection, None)


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server. Raises DistNetworkError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # clients do not resume TLS sessions, and each ticket costs a write
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    load_certificates(context, files)
    return context
