"""Reads files that hold secrets: tokens, keys that sign tokens, private keys of certificates.

Must not know what the secrets are for. Invariant: no part of a file's contents is in an error or in the log.
"""

import logging
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from ..base.errors import DistNetworkError, reason_of

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("tcpstore_async")

TOKEN: Final = "TCPSTORE_TOKEN"
"""Environment variable with a client's token."""

TOKEN_FILE: Final = "TCPSTORE_TOKEN_FILE"
"""Environment variable that names a file with the token."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_MOST_BYTES: Final = 1 << 20


class TlsFiles(NamedTuple):
    """The files of one end of TLS, in PEM format, the key unencrypted; empty for none."""

    ca: str = ""
    """Trusted CAs. Without them, a client trusts the system's, and a server asks no peer for a certificate."""
    cert: str = ""
    key: str = ""


def read_secret(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a file, which errors call `what`; warn if users other than its owner may access it.

    Raises OSError, and ValueError if it is too long or not UTF-8.
    """
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
        _warn_if_open(file, f"{what} {os.fspath(path)}")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{what} {os.fspath(path)} is longer than {_MOST_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{what} {os.fspath(path)} is not UTF-8 text") from None


def load_certificates(context: "ssl.SSLContext", files: TlsFiles) -> None:
    """Load a certificate with its key, and trusted CAs, if given. Raises DistNetworkError.

    Warns if users other than its owner may access the key.
    """
    import ssl  # most commands use no certificates

    ca, cert, key = files
    path = ca
    try:
        if ca:
            context.load_verify_locations(ca)
        if cert:
            path = key
            with open(key, "rb") as file:
                path = cert
                context.load_cert_chain(cert, key, _no_password)
                _warn_if_open(file, f"the private key {key}")
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        with_key = f" (key {key})" if path == cert else ""
        raise DistNetworkError(f"cannot load the certificate {path}{with_key}: {reason}") from None
    except (OSError, ValueError) as error:
        raise DistNetworkError(f"cannot load {path}: {reason_of(error)}") from None


def _warn_if_open(file: BinaryIO, name: str) -> None:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & _OTHERS:
        log.warning("%s is accessible to users other than its owner (mode %04o): run chmod 600 on it", name, mode)


def _no_password() -> str:
    """Refuse an encrypted key, for which OpenSSL would prompt."""
    raise ValueError("its key is encrypted; store the key without a passphrase, readable by its owner only")
