"""Whether a client uses TLS, and with which files: from its caller, the server's URL or its environment.

Imported by commands that may never connect; it must not import modules that do.
"""

import os
from typing import Final

from ..auth.secret_files import TlsFiles
from .server_url import ServerUrl

ENABLE: Final = "TCPSTORE_TLS"
CA: Final = "TCPSTORE_CA"
CERT: Final = "TCPSTORE_CERT"
KEY: Final = "TCPSTORE_KEY"


def wants_tls(tls: bool | None, server: ServerUrl | None = None) -> bool:
    """Return the caller's choice; None means TLS if the server's URL asks for it, or TCPSTORE_TLS is exactly 1."""
    if tls is None and server is not None and server.tls:
        return True
    return os.environ.get(ENABLE) == "1" if tls is None else tls


def files_from_environment() -> TlsFiles:
    """Return the files that TCPSTORE_CA, TCPSTORE_CERT and TCPSTORE_KEY name."""
    return TlsFiles(os.environ.get(CA, ""), os.environ.get(CERT, ""), os.environ.get(KEY, ""))
