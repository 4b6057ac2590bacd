"""A relay that its server refuses: its ranks are closed at once if that is for good, and wait if it is not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from client.test_sync import until
from conformance.frames import auth, wait
from server.test_auth import KEYS, identity_of
from support import RawPeer, tcpstore_relay, tcpstore_server
from tcpstore_async.server.backends import BACKENDS

FOR_EVER = ("--link-grace", "100000")
"""No test waits until this is over."""


def files(folder: Path, token: str) -> tuple[list[str], Path, Path]:
    """Options of a server, its file of revoked tokens, and a file with a token for the relay."""
    keys, revoked, mine = folder / "keys", folder / "revoked", folder / "token"
    for file, text in ((keys, "k1:a secret that nobody knows\n"), (revoked, ""), (mine, token)):
        file.touch(0o600)
        file.write_text(text)
    return ["--token-keys", str(keys), "--revoked-tokens", str(revoked), "--require-auth=all"], revoked, mine


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_a_relay_whose_token_is_revoked_are_closed_at_once(backend: str, tmp_path: Path) -> None:
    token = KEYS.create()
    options, revoked, mine = files(tmp_path, token)
    with (
        tcpstore_server("--backend", backend, *FOR_EVER, *options) as server,
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
            assert late.closed()
        until(lambda: "the relay is not allowed to use its server" in relay.log())


def test_ranks_wait_while_the_token_has_as_many_sessions_as_it_allows(tmp_path: Path) -> None:
    """One of them may be the relay's own last connection, whose end the server has not noticed."""
    token = KEYS.create(max_sessions=2)
    options, _, mine = files(tmp_path, token)
    with tcpstore_server(*options) as server:
        others = [RawPeer(server.port) for _ in range(2)]
        for other in others:
            reply = other.ask(auth(token.encode()), 8)
            assert b'"ok"' in other.read(int.from_bytes(reply, "little"))
        with tcpstore_relay(server.port, "--token-file", str(mine)) as relay, RawPeer(relay.port) as rank:
            until(lambda: "already has 2 sessions (max 2)" in relay.log())
            for other in others:
                other.close()
            rank.ping()
