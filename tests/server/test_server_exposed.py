"""A server that other hosts can reach without protection says so, in one line that says what to do."""

from __future__ import annotations

import logging
import signal

import pytest

from support import RawPeer, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.addresses import is_loopback
from tcpstore_async.server.listen_socket import listen, warn_if_exposed

EXPOSED = "reachable from other hosts"


@pytest.mark.parametrize(
    ("has_tls", "requires_auth", "said", "advised"),
    [
        (
            False,
            False,
            "without TLS or mandatory token authentication: anyone who can reach",
            "--token-keys, --require-auth, --tls-cert and --tls-key, or",
        ),
        (
            True,
            False,
            "without mandatory token authentication: anyone who can reach",
            "--token-keys and --require-auth, or",
        ),
        (False, True, "without TLS: anyone who sees its traffic", "--tls-cert and --tls-key, or"),
        (True, True, "", ""),
    ],
)
def test_what_it_lacks_and_what_to_do(
    caplog: pytest.LogCaptureFixture, has_tls: bool, requires_auth: bool, said: str, advised: str
) -> None:
    with listen("0.0.0.0", 0) as listener:
        warn_if_exposed(listener, has_tls=has_tls, requires_auth=requires_auth)
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
