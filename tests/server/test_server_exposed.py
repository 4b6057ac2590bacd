"""A server that other hosts can reach without protection says so, in one line that says what to do."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from support import RawPeer, secret_file, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.base.addresses import is_loopback
from tcpstore_async.server.listen_socket import listen, warn_if_exposed
from tls.certificates import certificates

EXPOSED = "reachable from other hosts"


UNPROTECTED = "without TLS or mandatory authentication: anyone who can reach"
OPEN = "without mandatory authentication: anyone who can reach"
IN_CLEAR_TEXT = "without mandatory TLS: a client that connects without TLS sends its token"
AUTH = "--token-keys or --tls-ca, --require-auth and --require-tls, or"
ALL = {"tls", "tokens", "requires_auth", "requires_tls"}


@pytest.mark.parametrize(
    ("given", "said", "advised"),
    [
        (set(), UNPROTECTED, f"--tls-cert, --tls-key, {AUTH}"),
        ({"tokens"}, UNPROTECTED, "--tls-cert, --tls-key, --require-auth and --require-tls, or"),
        ({"tls"}, OPEN, f"start it with {AUTH}"),
        ({"tls", "ca"}, OPEN, "start it with --require-auth and --require-tls, or"),
        ({"tls", "requires_tls"}, OPEN, "start it with --token-keys or --tls-ca and --require-auth, or"),
        ({"tokens", "requires_auth"}, "without TLS: anyone who sees its traffic", "--tls-key and --require-tls, or"),
        ({"tls", "tokens", "requires_auth"}, IN_CLEAR_TEXT, "start it with --require-tls, or"),
        ({"tls", "ca", "tokens", "requires_auth"}, IN_CLEAR_TEXT, "start it with --require-tls, or"),
        (ALL, "", ""),
        ({"tls", "ca", "requires_auth"}, "", ""),
        ({"tls", "ca", "requires_tls"}, "", ""),
    ],
)
def test_what_it_lacks_and_what_to_do(
    caplog: pytest.LogCaptureFixture, given: set[str], said: str, advised: str
) -> None:
    has = {f"has_{name}": name in given for name in ("tls", "ca", "tokens")}
    with listen("0.0.0.0", 0) as listener:
        warn_if_exposed(listener, **has, requires_auth="requires_auth" in given, requires_tls="requires_tls" in given)
        port = listener.getsockname()[1]
    if not said:
        assert not caplog.records
        return
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert text.startswith(f"0.0.0.0:{port} is {EXPOSED} {said}")
    assert advised in text
    assert "127.0.0.1" in text
    assert "\n" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0", "2001:db8::1"])
def test_beyond_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(("host", "lines"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_serve_warns_once(host: str, lines: int) -> None:
    with tcpstore_server("--host", host) as server, RawPeer(server.port) as peer:
        peer.ping()
        peer.close()
        assert server.stop(signal.SIGTERM) == 0
        assert server.log().count(EXPOSED) == lines


def test_serve_says_that_a_token_may_be_sent_in_clear_text(tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", "k1:a secret that nobody knows\n")
    options = ["--host", "0.0.0.0", "--token-keys", str(keys), "--require-auth", *certificates().serving(ca=True)]
    with tcpstore_server(*options) as server:
        assert server.log().count(f"{EXPOSED} without mandatory TLS") == 1
    with tcpstore_server(*options, "--require-tls") as server:
        assert EXPOSED not in server.log()


@pytest.mark.parametrize(
    ("options", "lines"), [((), 0), (("--host", "0.0.0.0"), 1), (("--host", "0.0.0.0", "--same-user"), 0)]
)
def test_a_relay_warns_too(options: tuple[str, ...], lines: int) -> None:
    with tcpstore_server() as server, tcpstore_relay(server.port, *options) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        assert relay.log().count(EXPOSED) == lines


@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_masters_server_is_as_quiet_as_pytorchs(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It listens on every interface because PyTorch's does; nobody chose that, and every honest job would be warned."""
    monkeypatch.setenv("TCPSTORE_SERVER", where)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        store.set("key", "value")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
