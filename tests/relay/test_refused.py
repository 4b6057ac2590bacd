"""A relay that its server refuses: its ranks are closed at once if that is for good, and wait if it is not."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from conformance.frames import auth, set_, wait
from contract.store_kinds import either_client
from server.test_auth import KEY_LINE, KEYS, identity_of
from support import LIMIT, RawPeer, secret_file, tcpstore, tcpstore_relay, tcpstore_server, until
from tcpstore_async import AccessDeniedError, TCPStore
from tls.certificates import certificates

FOR_EVER = ("--link-grace", "100000")
"""No test waits until this is over."""


def files(folder: Path, token: str) -> tuple[list[str], Path, Path]:
    """Options of a server, its file of revoked tokens, and a file with a token for the relay."""
    texts = {"keys": KEY_LINE, "revoked": "", "token": token}
    keys, revoked, mine = (secret_file(folder / name, text) for name, text in texts.items())
    return ["--token-keys", str(keys), "--revoked-tokens", str(revoked), "--require-auth=all"], revoked, mine


def test_ranks_of_a_relay_whose_token_is_revoked_are_closed_at_once(tmp_path: Path) -> None:
    token = KEYS.create()
    options, revoked, mine = files(tmp_path, token)
    with (
        tcpstore_server(*FOR_EVER, *options) as server,
        tcpstore_relay(server.port, "--token-file", str(mine)) as relay,
        RawPeer(relay.port) as rank,
    ):
        rank.ping()
        rank.send(wait(b"/never"))
        revoked.write_text(f"{identity_of(token)}\n")
        server.process.send_signal(signal.SIGHUP)
        assert rank.closed()
        reason = f"the server refused the token: token {identity_of(token)} is revoked"
        assert f"has ended: {reason}; closing 1 connection" in relay.log()
        with RawPeer(relay.port) as late:
            late.ping()
            late.send(set_(b"/k", b"v"))
            assert late.closed()
        until(lambda: f"127.0.0.1:{relay.port} cannot use its server: " in relay.log())


@pytest.mark.parametrize("tried", ["sync", "async", "command"])
def test_clients_behind_a_relay_whose_token_is_revoked_are_told_so(tried: str, tmp_path: Path) -> None:
    token = KEYS.create()
    options, revoked, mine = files(tmp_path, token)
    reason = f"cannot use its server: .*the server refused the token: token {identity_of(token)} is revoked"
    with (
        tcpstore_server(*FOR_EVER, *options) as server,
        tcpstore_relay(server.port, "--token-file", str(mine)) as relay,
        TCPStore("127.0.0.1", relay.port, timeout=LIMIT) as early,
    ):
        early.set("k", "v")
        revoked.write_text(f"{identity_of(token)}\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "is revoked; closing" in relay.log())
        if tried == "command":
            done = tcpstore("get", "k", "--url", f"tcp://127.0.0.1:{relay.port}")
            assert done.returncode == 5, done.stderr
            assert re.search(reason, done.stderr.decode())
        else:
            with either_client(tried) as connect, pytest.raises(AccessDeniedError, match=reason):
                connect(relay.port).get("k")
        mine.write_text(KEYS.create())  # it is read for each attempt
        with RawPeer(relay.port) as rank:
            rank.ping()
        until(lambda: relay.log().count("linked to") == 2)


def test_a_rank_that_has_a_token_is_told_too(tmp_path: Path) -> None:
    token = KEYS.create()
    options, revoked, mine = files(tmp_path, token)
    with tcpstore_server(*options) as server, tcpstore_relay(server.port, "--token-file", str(mine)) as relay:
        revoked.write_text(f"{identity_of(token)}\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "has ended" in relay.log())
        with pytest.raises(AccessDeniedError, match="is revoked"):
            TCPStore("127.0.0.1", relay.port, timeout=LIMIT, token=KEYS.create())


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_relay_whose_token_is_refused_at_the_start_ends(log_format: str, tmp_path: Path) -> None:
    token = KEYS.create()
    options, revoked, mine = files(tmp_path, token)
    revoked.write_text(f"{identity_of(token)}\n")
    with tcpstore_server(*options) as server:
        url = f"tcp://127.0.0.1:{server.port}"
        done = tcpstore(
            "relay", "--upstream", url, "--port", "0", "--token-file", str(mine), "--log-format", log_format
        )
    assert done.returncode == 5, done.stderr
    assert not done.stdout
    assert token.encode() not in done.stderr
    reason = f"the server refused the token: token {identity_of(token)} is revoked"
    assert f"cannot connect to 127.0.0.1:{server.port}: {reason}" in done.stderr.decode().splitlines()[-1]


def test_a_relay_that_needs_a_token_and_has_none_ends(tmp_path: Path) -> None:
    options, _, _ = files(tmp_path, KEYS.create())
    with tcpstore_server(*options) as server:
        done = tcpstore("relay", "--upstream", f"tcp://127.0.0.1:{server.port}", "--port", "0")
    assert done.returncode == 5, done.stderr
    assert "the server requires a token" in done.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize("tried", ["another CA", "no certificate", "no TLS there", "no TLS here"])
def test_a_relay_that_does_not_agree_on_tls_with_its_server_ends(tried: str) -> None:
    known = certificates()
    options, ca, reason = {
        "another CA": (known.serving(), known.others.ca, "certificate verify failed: unable to get local issuer"),
        "no certificate": (known.serving(ca=True), known.ours.ca, "the peer requires a certificate"),
        "no TLS there": ([], known.ours.ca, "TLS handshake failed: the peer does not use TLS"),
        "no TLS here": ([*known.serving(), "--require-tls"], known.ours.ca, "the server requires TLS: use tcps://"),
    }[tried]
    with tcpstore_server(*options) as server:
        url = f"{'tcp' if tried == 'no TLS here' else 'tcps'}://127.0.0.1:{server.port}"
        done = tcpstore("relay", "--upstream", url, "--port", "0", "--tls-ca", ca)
    assert done.returncode == 5, done.stderr
    assert not done.stdout
    assert f"cannot connect to 127.0.0.1:{server.port}: " in done.stderr.decode().splitlines()[-1]
    assert reason in done.stderr.decode().splitlines()[-1]


def test_ranks_of_a_relay_that_no_longer_trusts_its_server_are_told_so() -> None:
    known = certificates()
    with tcpstore_server(*known.serving()) as first:
        port = first.port
        with tcpstore_relay(f"tcps://127.0.0.1:{port}", env={"TCPSTORE_CA": known.ours.ca}) as relay:
            until(lambda: "linked to" in relay.log())
            first.stop()
            with tcpstore_server(*known.serving(known.expired), "--port", str(port)):
                until(lambda: "certificate has expired" in relay.log())
                with (
                    TCPStore("127.0.0.1", relay.port, timeout=LIMIT) as late,
                    pytest.raises(AccessDeniedError, match=r"cannot use its server: .*certificate has expired"),
                ):
                    late.get("k")
            with tcpstore_server(*known.serving(), "--port", str(port)):
                until(lambda: relay.log().count("linked to") == 2)
                with RawPeer(relay.port) as rank:
                    rank.ping()


def test_ranks_wait_while_the_token_has_as_many_sessions_as_it_allows(tmp_path: Path) -> None:
    """One of them may be the relay's own last connection, whose end the server has not noticed."""
    token = KEYS.create(max_sessions=2)
    options, _, mine = files(tmp_path, token)
    with tcpstore_server(*options) as server:
        others = [RawPeer(server.port) for _ in range(2)]
        for other in others:
            assert b'"ok"' in other.ask_value(auth(token.encode()))
        with tcpstore_relay(server.port, "--token-file", str(mine)) as relay, RawPeer(relay.port) as rank:
            until(lambda: "already has 2 sessions (max 2)" in relay.log())
            for other in others:
                other.close()
            rank.ping()
