"""Certificates for the tests, made anew in every process."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import trustme

from tcpstore_async.auth.secret_files import TlsFiles

HOSTS = ("127.0.0.1", "localhost", "::1")


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A CA, and its certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.authority = trustme.CA()
        self.ca = str(folder / f"{name}.ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str, not_after: datetime | None = None) -> Pair:
        """Write a certificate for these hosts."""
        cert = self.authority.issue_cert(*hosts, not_after=not_after)
        pair = Pair(str(self.folder / f"{self.name}.{name}.pem"), str(self.folder / f"{self.name}.{name}.key"))
        Path(pair.key).touch(0o600)
        cert.private_key_pem.write_to_path(pair.key)
        Path(pair.cert).write_bytes(b"".join(one.bytes() for one in cert.cert_chain_pems))
        os.chmod(pair.key, 0o600)
        return pair


class Certificates:
    """All that the tests use."""

    def __init__(self, folder: Path) -> None:
        self.ours = Authority(folder, "ours")
        self.others = Authority(folder, "others")
        yesterday = datetime.now(timezone.utc) - timedelta(days=1)
        self.server = self.ours.issue("server", *HOSTS)
        self.renewed = self.ours.issue("renewed", *HOSTS)
        self.elsewhere = self.ours.issue("elsewhere", "store.example")
        self.expired = self.ours.issue("expired", *HOSTS, not_after=yesterday)
        self.client = self.ours.issue("client", "rank.example")
        self.stranger = self.others.issue("stranger", "rank.example")

    @property
    def trusting(self) -> TlsFiles:
        """The files of a client without a certificate."""
        return TlsFiles(self.ours.ca)

    def serving(self, pair: Pair | None = None, *, ca: bool = False) -> list[str]:
        """The options of `tcpstore serve`."""
        pair = pair or self.server
        options = ["--tls-cert", pair.cert, "--tls-key", pair.key]
        return [*options, "--tls-ca", self.ours.ca] if ca else options

    def environment(self, pair: Pair | None = None) -> dict[str, str]:
        """The environment of clients that use TLS."""
        found = {"TCPSTORE_TLS": "1", "TCPSTORE_CA": self.ours.ca}
        return {**found, "TCPSTORE_CERT": pair.cert, "TCPSTORE_KEY": pair.key} if pair else found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="tcpstore-certificates-")
    atexit.register(made.cleanup)
    return made


@functools.cache
def certificates() -> Certificates:
    """The certificates of this process, which are deleted when it ends."""
    return Certificates(Path(_folder().name))
