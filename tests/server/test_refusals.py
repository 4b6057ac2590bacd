"""Everybody who must be kept out, at a server with TLS, client certificates, tokens and --require-auth=all.

Each is refused with one line that names the peer and the reason, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conformance.frames import NUM_KEYS, auth, check, get, link, set_
from server.test_auth import KEY_LINE, KEYS, REFUSED, REVOKED, _address, identity_of
from support import (
    HANDSHAKE,
    LIMIT,
    RawPeer,
    Server,
    blob,
    secret_file,
    tcpstore,
    tcpstore_relay,
    tcpstore_server,
    u64,
    until,
)
from tcpstore_async import AccessDeniedError, AsyncTCPStore, TCPStore
from tcpstore_async.base.limits import Limits
from tcpstore_async.server import base
from tcpstore_async.server.uv import UvServer
from tcpstore_async.serving import run
from tcpstore_async.session.tls import MISMATCH
from tcpstore_async.wire.commands import SERVER_KEY
from tls.certificates import certificates
from tls.peers import TlsPeer, context
from tls.test_server import client_hello, old_version

pytestmark = [pytest.mark.slow, pytest.mark.measured]

WRITE = set_(b"/k", b"v")

TLS_REQUIRED = "the server requires TLS: use tcps://, or set TCPSTORE_TLS=1"


@pytest.fixture
def server() -> Iterator[Server]:
    """Of each test's own: a second refusal within a second is only counted."""
    with tempfile.TemporaryDirectory() as made:
        keys, revoked = secret_file(Path(made, "keys"), KEY_LINE), Path(made, "revoked")
        revoked.write_text(f"{identity_of(REVOKED)}\n")
        files = ["--token-keys", str(keys), "--revoked-tokens", str(revoked), *certificates().serving(ca=True)]
        limit = ["--limit", "validate_seconds=2", "--admin", ""]  # nobody else looks in meanwhile, which is logged
        with tcpstore_server(*files, "--require-auth=all", *limit) as found:
            yield found


def own() -> ssl.SSLContext:
    """With a certificate that the server accepts."""
    return context(certificates().client)


def port_of(peer: RawPeer) -> int:
    plain = getattr(peer.socket, "_tls", peer.socket)
    return int(plain.getsockname()[1])


def ended(peer: RawPeer) -> int:
    """Wait until the server has closed the connection; return the peer's port."""
    here = port_of(peer)
    try:
        while peer.socket.recv(1 << 16):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    peer.close()
    return here


def tls_refused(using: ssl.SSLContext) -> Callable[[Server], int]:
    """A handshake that does not succeed, or one whose certificate is refused later."""

    def attack(server: Server) -> int:
        peer = RawPeer(server.port, validate=False)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = using.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        try:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    peer.send(outgoing.read())
                    incoming.write(peer.socket.recv(1 << 16))
            tls.write(HANDSHAKE + WRITE)
            peer.send(outgoing.read())
        except ssl.SSLError:
            peer.send(outgoing.read())
        return ended(peer)

    return attack


def sends(data: bytes, tls: bool = True) -> Callable[[Server], int]:
    def attack(server: Server) -> int:
        peer = TlsPeer(server.port, using=own()) if tls else RawPeer(server.port)
        peer.send(data)
        return ended(peer)

    return attack


def stops_in_the_handshake(server: Server) -> int:
    peer = RawPeer(server.port, validate=False)
    peer.send(client_hello())
    return ended(peer)


def link_frame(attempt: int, *more: tuple[bytes, bytes], secret: bytes = bytes([8] * 16)) -> bytes:
    items = ((b"version", b"2"), (b"id", bytes([7] * 16)), (b"secret", secret))
    return link(*items, (b"attempt", b"%d" % attempt), *more)


def authenticated(server: Server, token: str) -> TlsPeer:
    peer = TlsPeer(server.port, using=own())
    assert b'"ok"' in peer.ask_value(auth(token.encode()))
    return peer


def takes_over(token: str, attempt: int, secret: bytes = bytes([8] * 16)) -> Callable[[Server], int]:
    """LINK with the id of another's link, which lasts, and by default with its secret."""

    def attack(server: Server) -> int:
        owner = authenticated(server, OWNER)
        said = owner.ask_value(link_frame(5))
        assert b'"new"' in said
        instance = re.findall(rb'"instance":"(\w+)"', said)[0]
        stranger = authenticated(server, token)
        resume = link_frame(attempt, (b"instance", instance), (b"taken", b"0"), (b"told", b"0"), secret=secret)
        assert b'"refused"' in stranger.ask_value(resume)
        stranger.ping()  # it is an ordinary connection
        here = port_of(stranger)
        stranger.close()
        owner.send(struct.pack("<II", 0, 1 | 2 << 24) + b"\0")  # the link's end
        ended(owner)
        return here

    return attack


OWNER = KEYS.create()
PLAIN = "requires a token, because the server was started with --require-auth"

ATTACKS: dict[str, tuple[Callable[[Server], int], str]] = {
    "no token": (sends(WRITE), PLAIN),
    "a plain connection": (sends(WRITE, tls=False), PLAIN),
    "a plain connection asks for the keys": (sends(NUM_KEYS, tls=False), PLAIN),
    "a token, then a write with read rights": (
        sends(auth(KEYS.create(rights="read").encode()) + WRITE),
        "SET requires write access",
    ),
    "a token for another store": (
        sends(auth(KEYS.create(store="job:1").encode()) + WRITE),
        "is only for the store 'job:1'",
    ),
    "a token for other keys": (
        sends(auth(KEYS.create(prefix="job/").encode()) + WRITE),
        "access only to keys with the prefix",
    ),
    **{f"a token {name}": (sends(auth(token.encode()) + WRITE), reason) for name, (token, reason) in REFUSED.items()},
    "trusts another CA": (
        tls_refused(context(ca=certificates().others.ca)),
        "the peer does not trust our certificate's CA",
    ),
    "another CA": (tls_refused(context(certificates().stranger)), "the peer's certificate was not accepted"),
    "an expired certificate": (tls_refused(context(certificates().expired)), "certificate has expired"),
    "no certificate": (tls_refused(context()), "the peer did not send the required certificate"),
    "TLS 1.2": (tls_refused(old_version()), "the peer does not offer TLS 1.3"),
    "stops inside the handshake": (stops_in_the_handshake, "TLS handshake not finished within 2 s"),
    "stops before the token": (sends(b""), "no AUTH within 2 s"),
    "a LINK from a recording": (
        takes_over(OWNER, 5),
        "LINK refused: attempt 5 is stale",
    ),
    "a link with a wrong secret": (takes_over(OWNER, 9, bytes(16)), "LINK refused: wrong secret"),
    "a link of another's": (takes_over(KEYS.create(prefix="job/"), 9), "LINK refused: the link belongs to a client"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refused_with_one_line_and_nothing_else_happens(server: Server, name: str) -> None:
    attack, reason = ATTACKS[name]
    with authenticated(server, OWNER) as other:
        before = server.log()
        here = attack(server)
        other.ping()
        assert other.ask(NUM_KEYS, 8) == u64(0)
        until(lambda: server.log() != before)
        found = server.log().removeprefix(before).splitlines()
        assert len(found) == 1, found
        line = found[0]
        assert f"127.0.0.1:{here}" in line
        assert reason in line


# From other hosts, beside loopback that is exempt


def stream(*frames: tuple[int, int, bytes]) -> bytes:
    return b"".join(struct.pack("<II", one, len(data) | kind << 24) + data for kind, one, data in frames)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (b"", "not allowed: LINK requires a token"),
        (
            auth(KEYS.create(prefix="job/", rights="admin").encode()),
            "grants access only to keys with the prefix 'job/'",
        ),
    ],
    ids=["no token", "a token"],
)
@pytest.mark.skipif(not _address(), reason="this host has loopback addresses only")
def test_a_relay_that_claims_ranks_of_the_servers_host(shown: bytes, reason: str, tmp_path: Path) -> None:
    """What a stranger says of its ranks' addresses opens nothing: not the link, nor what its token does not."""
    keys = secret_file(tmp_path / "keys", KEY_LINE)
    host = _address()
    rank = stream((1, 1, struct.pack("<H", 4711) + b"127.0.0.1"), (0, 1, HANDSHAKE + WRITE))
    options = ["--host", host, "--token-keys", str(keys), "--require-auth"]
    with tcpstore_server(*options) as server:
        with socket.create_connection((host, server.port), LIMIT) as stranger:
            stranger.sendall(HANDSHAKE + shown + link_frame(1) + rank)
            until(lambda: reason in server.log())
            assert (
                f"closed the connection from {host}:{stranger.getsockname()[1] if not shown else 4711}" in server.log()
            )
        with socket.create_connection((host, server.port), LIMIT) as other:
            other.sendall(HANDSHAKE + auth(OWNER.encode()) + NUM_KEYS)
            reply = b""
            while len(reply.partition(b"}")[2]) < 8:
                reply += other.recv(1 << 16)
            assert reply.endswith(b"}" + u64(0))


def test_nobody_is_accepted_before_it_is_known_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads accept at once: whoever was waiting to be accepted must not have all rights for good."""
    required: list[str] = []
    kind: Any = UvServer
    start = kind.start

    def noted(server: base.Server) -> None:
        required.append(server.store.hub.auth.require_auth)
        start(server)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kind, "start", noted)
    limits, ready = Limits(), lambda server: None
    asyncio.run(
        run(
            "127.0.0.1", 0, None, backend="uv", limits=limits, grace=0, link_grace=1, ready=ready,
            require_auth="all",
        )
    )  # fmt: skip
    assert required == ["all"]


# Certificates and tokens together


def test_a_certificate_is_enough_if_the_server_has_no_token_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    known = certificates()
    options = [*known.serving(ca=True), "--require-auth=all"]
    with tcpstore_server(*options) as server:
        with RawPeer(server.port) as plain:
            plain.send(WRITE)
            assert plain.closed()
        until(lambda: "SET requires a client certificate" in server.log())
        url = f"tcps://127.0.0.1:{server.port}"
        with (
            TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store,
            pytest.raises(AccessDeniedError, match="the server requires a client certificate"),
        ):
            store.set("k", "v")
        for name, value in known.environment(known.client).items():
            monkeypatch.setenv(name, value)
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
            store.set("sync", "1")
            assert store.num_keys() == 1

        async def main() -> None:
            async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT) as other:
                assert await other.get("sync") == b"1"

        asyncio.run(main())
        with tcpstore_relay(url) as relay, RawPeer(relay.port) as rank:
            assert rank.ask(NUM_KEYS, 8) == u64(1)
        with pytest.raises(AccessDeniedError, match="no keys to check tokens with; connect without a token"):
            TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=KEYS.create())


# quirk: tls-mismatch
def test_plain_connections_to_a_server_that_requires_tls(tmp_path: Path) -> None:
    """They are closed at their first byte, from loopback too: no token is asked for; our clients say why at once."""
    keys = secret_file(tmp_path / "keys", KEY_LINE)
    options = ["--token-keys", str(keys), *certificates().serving(), "--require-tls"]
    with tcpstore_server(*options) as server, TlsPeer(server.port) as other:
        other.ping()
        here = []
        for data in (HANDSHAKE + auth(OWNER.encode()) + WRITE, HANDSHAKE + check(SERVER_KEY), b"\xfe"):
            with RawPeer(server.port, validate=False) as plain:
                here.append(port_of(plain))
                plain.send(data)
                assert plain.read(len(MISMATCH)) == MISMATCH
                assert plain.closed()
        with pytest.raises(AccessDeniedError, match=TLS_REQUIRED):
            TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=-1), token=OWNER)
        with pytest.raises(AccessDeniedError, match=TLS_REQUIRED):
            asyncio.run(AsyncTCPStore.connect("127.0.0.1", server.port, timeout=-1, token=OWNER))
        done = tcpstore("get", "k", "--url", f"tcp://127.0.0.1:{server.port}")
        assert done.returncode == 5, done.stderr
        assert TLS_REQUIRED in done.stderr.decode()
        for port in here:
            until(lambda port=port: f"127.0.0.1:{port}: not allowed: it uses plain TCP" in server.log())  # type: ignore[misc]
        assert other.ask(NUM_KEYS, 8) == u64(0)
        assert OWNER not in server.log()


def test_rights_of_two_tokens_do_not_add_up(server: Server) -> None:
    one, two = KEYS.create(prefix="a/", max_sessions=1), KEYS.create(prefix="b/", rights="read")
    with authenticated(server, one) as peer:
        peer.send(set_(b"/a/1", b"v"))
        assert b'"ok"' in peer.ask_value(auth(two.encode()))
        with authenticated(server, one) as other:  # the session counts for the second token alone
            other.ping()
        peer.send(set_(b"/a/1", b"w"))
        assert peer.closed()
    with authenticated(server, OWNER) as other:
        assert other.ask(get(b"/a/1"), 9) == blob(b"v")


@contextmanager
def relay_with(token: Path, server: Server) -> Iterator[Server]:
    """A relay with a client certificate and a token."""
    known = certificates()
    env = {name: value for name, value in known.environment(known.client).items() if name != "TCPSTORE_TLS"}
    with tcpstore_relay(f"tcps://127.0.0.1:{server.port}", "--token-file", str(token), env=env) as relay:
        yield relay


def test_a_rank_behind_a_relay_with_a_token_of_its_own(server: Server, tmp_path: Path) -> None:
    """It may do what that allows, and no longer what the relay's does; it does not count for the relay's."""
    file = secret_file(tmp_path / "token", KEYS.create(prefix="job/", max_sessions=2))
    with relay_with(file, server) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        with RawPeer(relay.port) as crowded:
            assert crowded.closed()
        until(lambda: "already has 2 sessions (max 2)" in server.log())
        assert b'"ok"' in rank.ask_value(auth(KEYS.create(prefix="own/").encode()))
        rank.send(set_(b"/own/k", b"v"))
        rank.ping()
        with RawPeer(relay.port) as next_one:
            next_one.ping()
        rank.send(get(b"/job/k"))
        assert rank.closed()
        assert "tcps1." not in server.log() + relay.log()


# Before a token has been accepted


def long(length: int, sent: int) -> bytes:
    """AUTH with a token of so many bytes, of which some are sent."""
    return auth(b"")[:1] + struct.pack("<Q", length) + b"x" * sent


UNSIGNED = "the token is not signed by one of this server's keys"
BEFORE: dict[str, tuple[bytes, str]] = {
    **{
        f"a token of {what}": (auth(token) + WRITE + NUM_KEYS, UNSIGNED)
        for what, token in {
            "nothing": b"",
            "zeros": bytes(100),
            "points": b"." * 4096,
            "no text": b"\xff" * 4096,
            "a valid one and a byte": OWNER.encode() + b"\0",
            "a valid one and padding": OWNER.encode() + b"=",
            "a valid one after a space": b" " + OWNER.encode(),
            "two valid ones": OWNER.encode() + b"." + OWNER.encode(),
        }.items()
    },
    "a token of 4,097 bytes": (long(4097, 4097), "a value of 4097 bytes (max 4096)"),
    "a token of 2^63 bytes": (long(1 << 63, 1), "a value of 9223372036854775808 bytes (max 4096)"),
    "a command in front of a valid token": (WRITE + auth(OWNER.encode()) + NUM_KEYS, "SET requires a token"),
    "a link in front of a valid token": (link_frame(1) + auth(OWNER.encode()), "LINK requires a token"),
    "a refused token in front of a valid one": (auth(b"x") + auth(OWNER.encode()) + WRITE, UNSIGNED),
    "no command": (b"\xfe", "unknown opcode 254"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_nothing_is_done_before_a_token_is_accepted(server: Server, name: str) -> None:
    """Each is a line, also those within a second of each other."""
    data, reason = BEFORE[name]
    with authenticated(server, OWNER) as other:
        ports = [sends(data, tls=False)(server) for _ in range(3)]
        assert other.ask(NUM_KEYS, 8) == u64(0)
        for here in ports:
            until(lambda here=here: f"127.0.0.1:{here}" in server.log())  # type: ignore[misc]
            (line,) = [line for line in server.log().splitlines() if f"127.0.0.1:{here}" in line]
            assert reason in line
        assert OWNER not in server.log()


def test_tls_where_there_is_none(server: Server, tmp_path: Path) -> None:
    """At a relay's port and at an admin socket: the peer is closed, or told so, and others go on."""
    file = secret_file(tmp_path / "token", OWNER)
    with relay_with(file, server) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        with RawPeer(relay.port, validate=False) as peer:
            peer.send(client_hello())
            assert peer.read(len(MISMATCH)) == MISMATCH
            assert peer.closed()
        rank.ping()
    with tcpstore_server("--admin", str(tmp_path / "admin")) as own, socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(LIMIT)
        peer.connect(str(tmp_path / "admin"))
        peer.sendall(client_hello())
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1 << 16).startswith(b'{"error":"invalid request: ')
        with RawPeer(own.port) as stock:
            stock.ping()
