"""Every recorded vector and every case of our own, over TLS, beside plain connections to the same server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.script import Script
from conformance.targets import OUR_SERVERS, Servers, SocketTarget, play, servers
from conformance.test_vectors import SCRIPTS
from tls.certificates import certificates
from tls.peers import TlsPeer

TLS_SERVERS = OUR_SERVERS.replace(
    "serve(backend=sys.argv[1])", "serve(backend=sys.argv[1], tls_cert=sys.argv[2], tls_key=sys.argv[3])"
)


class TlsTarget(SocketTarget):
    """A server whose peers use TLS; the connection that tells when it is done does not."""

    def connect(self, peer: str) -> None:
        assert peer not in self.peers
        self.peers[peer] = TlsPeer(self.port, validate=False)
        self._fence()


@pytest.fixture(scope="module")
def tls_servers() -> Iterator[Servers]:
    with servers(TLS_SERVERS, "uv", *certificates().server) as running:
        yield running


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_over_tls(script: Script, tls_servers: Servers) -> None:
    port = tls_servers.start()
    with TlsTarget(port, lambda: tls_servers.stop(port)) as target:
        play(script, target)
