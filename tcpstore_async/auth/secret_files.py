"""Reading files that hold secrets: tokens, their keys, and the keys of certificates.

It must not know what the secrets are for. Invariant: nothing of a file's contents is in an error or in the log.
"""

import logging
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from ..base.errors import DistNetworkError

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("tcpstore_async")

TOKEN: Final = "TCPSTORE_TOKEN"
TOKEN_FILE: Final = "TCPSTORE_TOKEN_FILE"
"""Environment variables: a client's token, and a file that holds one."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_MOST_BYTES: Final = 1 << 20


class TlsFiles(NamedTuple):
    """The files of one end of TLS, in PEM format, the key unencrypted; an empty name stands for none."""

    ca: str = ""
    """CAs that are trusted. None: for a client the system's; a server asks no peer for a certificate."""
    cert: str = ""
    key: str = ""


def read_secret(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a file; `what` names it in errors. Warns if others than its owner may use it.

    Raises OSError, and ValueError for what is no text.
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
    """Load a certificate and its key, and trusted CAs, if they are given.

    Warns if others than its owner may use the key. Raises DistNetworkError.
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
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DistNetworkError(f"cannot load {path}: {text}") from None


def _warn_if_open(file: BinaryIO, name: str) -> None:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & _OTHERS:
        log.warning("%s is accessible to users other than its owner (mode %04o): run chmod 600 on it", name, mode)


def _no_password() -> str:
    raise ValueError("its key is encrypted; store the key without a passphrase, readable by its owner only")
