"""Servers with tokens: what is refused, with one line in the log, and what clients, commands and relays get."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client.fakes import PROBE, proxy_to
from client.test_resumed import resetter
from conformance.frames import LIST_KEYS, NUM_KEYS, auth, check, get, i64, link, multi_set, ping, set_
from contract.store_kinds import Connect, either_client
from support import (
    LIMIT,
    RawPeer,
    Server,
    blob,
    in_child,
    secret_file,
    tcpstore_relay,
    tcpstore_server,
    torch_server,
    u64,
    until,
)
from tcpstore_async import AccessDeniedError, AsyncTCPStore, DistNetworkError, DistStoreError, TCPStore, serve
from tcpstore_async.auth.access import Access
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.errors import ConnectionDeniedError
from tcpstore_async.client.connect import connect_blocking
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.store_name import StoreName
from tcpstore_async.wire.commands import SERVER_KEY
from tls.test_clients import check_resets

pytestmark = [pytest.mark.slow, pytest.mark.measured]

KEY_LINE = "k1:a secret that nobody knows\n"
KEYS = TokenKeys([("k1", b"a secret that nobody knows")])
OTHER_KEYS = TokenKeys([("k1", b"another secret")])


def forged(token: str) -> str:
    head, mac = token.rsplit(".", 1)
    return f"{head}.{'B' if mac[0] == 'A' else 'A'}{mac[1:]}"


def identity_of(token: str) -> str:
    found = KEYS.check(token.encode(), 0)
    assert not isinstance(found, str)
    return found.identity


REVOKED = KEYS.create()

REFUSED = {
    "forged": (forged(KEYS.create()), "the token is not signed by one of this server's keys"),
    "of another server": (OTHER_KEYS.create(), "the token is not signed by one of this server's keys"),
    "truncated": (KEYS.create()[:-1], "the token is not signed by one of this server's keys"),
    "expired": (KEYS.create(seconds=-1), "expired at"),
    "revoked": (REVOKED, f"token {identity_of(REVOKED)} is revoked"),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        secret_file(path / "keys", f"# for tests\n{KEY_LINE}")
        (path / "revoked").write_text(f"{identity_of(REVOKED)}\n")
        yield path


@pytest.fixture
def options(folder: Path) -> list[str]:
    return ["--token-keys", str(folder / "keys"), "--revoked-tokens", str(folder / "revoked")]


@pytest.fixture
def server(options: list[str]) -> Iterator[Server]:
    """One that requires a token of everybody."""
    with tcpstore_server(*options, "--require-auth=all") as found:
        yield found


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with either_client(request.param) as connect:
        yield connect


def lines(server: Server, text: str) -> list[str]:
    """Wait for lines of the log with this text, and return them."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [line for line in server.log().splitlines() if text in line]
        return bool(found)

    until(look)
    return found


def admin(port: int) -> RawPeer:
    peer = RawPeer(port)
    assert json.loads(peer.ask_value(auth(KEYS.create(rights="admin").encode())))["status"] == "ok"
    return peer


def num_keys(server: Server) -> int:
    with admin(server.port) as peer:
        return int.from_bytes(peer.ask(NUM_KEYS, 8), "little")


def test_a_token_for_a_store_opens_no_other(server: Server) -> None:
    token = KEYS.create(store="theirs:1")
    url = f"tcp://127.0.0.1:{server.port}"
    with TCPStore("theirs", 1, None, True, LIMIT, token=token, server=url) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
    reason = "is only for the store 'theirs:1', not for 'ours:1'"
    with pytest.raises(AccessDeniedError, match=reason):
        TCPStore("ours", 1, None, True, LIMIT, token=token, server=url)
    (line,) = lines(server, "not for 'ours:1'")
    assert re.search(r"closed the connection from 127\.0\.0\.1:\d+ \(.*\): not allowed: token ", line)
    with (
        TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token, server="") as nameless,
        pytest.raises(AccessDeniedError, match="SET in the unnamed store; token"),
    ):
        nameless.set("k", "v")
    assert num_keys(server) == 0


@pytest.mark.parametrize("kind", [*REFUSED, "none"])
def test_both_clients_say_why(server: Server, connect: Connect, kind: str) -> None:
    token, reason = REFUSED.get(kind, ("", "the server requires a token: set TCPSTORE_TOKEN_FILE"))
    with pytest.raises(AccessDeniedError) as raised:
        connect(server.port, token=token).set("k", "v")
    assert reason in str(raised.value)
    if token:
        assert "the server refused the token: " in str(raised.value)
        for text in (str(raised.value), server.log()):
            assert token not in text
            assert token.split(".")[-1] not in text
    assert num_keys(server) == 0


@pytest.mark.parametrize(
    "frame",
    [set_(b"/k", b"v"), get(b"/k"), check(b"/k"), LIST_KEYS, NUM_KEYS, multi_set((b"/k", b"v")), link()],
    ids=["set", "get", "check", "list", "num", "multi_set", "link"],
)
def test_without_a_token_nothing_is_done(server: Server, frame: bytes) -> None:
    with RawPeer(server.port) as peer:
        assert peer.ask(check(SERVER_KEY), 1) == b"\x00"
        peer.send(frame)
        assert peer.closed()
    (line,) = lines(server, "not allowed")
    assert "requires a token, because the server was started with --require-auth" in line
    assert "127.0.0.1:" in line
    assert num_keys(server) == 0


def test_loopback_is_exempt_from_require_auth_alone(options: list[str]) -> None:
    with tcpstore_server(*options, "--require-auth") as server, RawPeer(server.port) as peer:
        assert peer.ask(set_(b"/k", b"v") + get(b"/k"), 9) == blob(b"v")


def _address() -> str:
    """An address of this host that is not loopback's; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("203.0.113.1", 9))
        except OSError:
            return ""
        return str(one.getsockname()[0])


@pytest.mark.skipif(not _address(), reason="this host has loopback addresses only")
def test_other_addresses_are_not_exempt(options: list[str]) -> None:
    with tcpstore_server(*options, "--host", _address(), "--require-auth") as server:
        with socket.create_connection((_address(), server.port), LIMIT) as peer:
            peer.sendall(bytes.fromhex("00cef7853c") + set_(b"/k", b"v"))
            assert peer.recv(1) == b""
        assert f"closed the connection from {_address()}:" in lines(server, "not allowed")[0]


def clear_text(text: str) -> int:
    return text.count("without TLS: anyone who sees the traffic can use it")


@pytest.mark.skipif(not _address(), reason="this host has loopback addresses only")
def test_a_token_in_clear_text_is_warned_about_once(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = KEYS.create()
    file = secret_file(tmp_path / "token", token)
    with tcpstore_server(*options, "--host", _address()) as server:
        for _ in range(2):
            with TCPStore(_address(), server.port, timeout=LIMIT, token=token) as store:
                store.set("k", "v")

        async def main() -> None:
            async with await AsyncTCPStore.connect(_address(), server.port, timeout=LIMIT, token=token) as other:
                assert await other.get("k") == b"v"

        asyncio.run(main())
        assert clear_text(caplog.text) == 1
        with tcpstore_relay(f"tcp://{_address()}:{server.port}", "--token-file", str(file)) as relay:
            with RawPeer(relay.port) as rank:
                rank.ping()
            assert clear_text(relay.log()) == 1
    caplog.clear()
    with (
        tcpstore_server(*options) as server,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token) as store,
    ):
        store.set("k", "v")
    assert not clear_text(caplog.text)


def test_who_does_not_authenticate_in_time_is_closed(options: list[str]) -> None:
    with tcpstore_server(*options, "--require-auth=all", "--limit", "validate_seconds=1") as server:
        with RawPeer(server.port) as peer:
            peer.ping()
            assert peer.closed()
        assert "no AUTH within 1 s (the `validate_seconds` limit)" in lines(server, "closed the connection")[0]


# Both clients


def test_a_server_is_asked_once_who_it_is(server: Server) -> None:
    """A token and a store with a name both need that, on the same connection."""
    with proxy_to(server.port) as proxy:
        name = StoreName("job", owner="me")
        peer, _ = connect_blocking(
            Servers(("127.0.0.1", proxy.port)), Deadline(LIMIT), token=KEYS.create().encode(), name=name
        )
        peer.close()
        (sent,) = proxy.sent
        assert sent.count(PROBE) == 1


def test_a_store_stays_usable_after_a_refusal(server: Server) -> None:
    token = KEYS.create(prefix="job/")
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token) as store:
        store.set("job/k", "v")
        refused: list[Callable[[], Any]] = [
            lambda: store.set("other", "v"),
            lambda: store.get("other"),
            lambda: store.add("other", 1),
            lambda: store.append("other", "x"),
            lambda: store.check(["job/k", "other"]),
            lambda: store.wait(["job/k", "other"]),
            lambda: store.multi_get(["other"]),
            lambda: store.multi_set(["job/k", "other"], ["1", "2"]),
            lambda: store.compare_set("other", "", "x"),
            lambda: store.delete_key("other"),
            lambda: store.queue_push("other", "x"),
            lambda: store.queue_pop("other"),
            lambda: store.queue_pop("other", block=False),
            lambda: store.queue_len("other"),
            lambda: store.barrier("other", 1),
            lambda: store.num_keys(),
            lambda: store.list_keys(),
        ]
        for call in refused:
            with pytest.raises(DistStoreError, match=r"^not allowed: .* token "):
                call()
            assert store.get("job/k") == b"v"
        with store.clone() as clone:
            assert clone.get("job/k") == b"v"
            with pytest.raises(AccessDeniedError):
                clone.set("other", "v")
    assert num_keys(server) == 1
    assert "not allowed" not in server.log(), "nothing was sent"


async def test_an_async_store_stays_usable_after_a_refusal(server: Server) -> None:
    token = KEYS.create(rights="read")

    async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT, token=token) as store:
        refused: list[Callable[[], Any]] = [
            lambda: store.set("k", "v"),
            lambda: store.add("k", 1),
            lambda: store.append("k", "x"),
            lambda: store.multi_set(["k"], ["1"]),
            lambda: store.compare_set("k", "", "x"),
            lambda: store.delete_key("k"),
            lambda: store.queue_push("k", "x"),
            lambda: store.queue_pop("k"),
            lambda: store.queue_pop("k", block=False),
            lambda: store.barrier("k", 1),
        ]
        for call in refused:
            with pytest.raises(DistStoreError, match=r"not allowed: .* requires write access"):
                await call()
            assert await store.num_keys() == 0
        assert await store.list_keys() == []
        waiting = asyncio.create_task(store.get("k"))
        blocked = [asyncio.create_task(store.wait(["k"])) for _ in range(3)]
        async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT, token=KEYS.create()) as writer:
            await writer.set("k", "v")
            assert await waiting == b"v"
            await asyncio.gather(*blocked)
        async with await store.clone() as clone:
            assert await clone.get("k") == b"v"


def test_no_token_is_sent_to_a_server_that_checks_none() -> None:
    token = KEYS.create()
    with torch_server() as port:
        with pytest.raises(
            DistStoreError, match=f"127.0.0.1:{port} does not check tokens, so the token was not sent"
        ) as raised:
            TCPStore("127.0.0.1", port, timeout=LIMIT, token=token)
        assert token not in str(raised.value)
        with pytest.raises(DistStoreError, match="does not check tokens"):
            asyncio.run(AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT, token=token))
    with tcpstore_server() as server, pytest.raises(AccessDeniedError, match="has no keys to check tokens with"):
        TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token)


def test_a_store_with_a_token_survives_resets(server: Server, connect: Connect) -> None:
    with resetter(server.port) as proxy:
        check_resets(connect(proxy.port, token=KEYS.create(prefix="counter", max_sessions=1)), proxy)


@pytest.mark.unmeasured
def test_a_forked_process_authenticates_for_itself(server: Server) -> None:
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=KEYS.create()) as store:
        store.set("k", "v")
        assert in_child(lambda: store.get("k")) == "b'v'"


# Revocation


def test_a_hangup_closes_those_whose_tokens_are_no_longer_valid(options: list[str], tmp_path: Path) -> None:
    keys, revoked = secret_file(tmp_path / "keys", f"{KEY_LINE}k2:the second\n"), tmp_path / "revoked"
    revoked.touch()
    one, two, three = KEYS.create(), KEYS.create(), TokenKeys([("k2", b"the second")]).create()
    options = [*options[:2], "--token-keys", str(keys), "--revoked-tokens", str(revoked)]
    with tcpstore_server(*options) as server, RawPeer(server.port) as stock:
        stock.ping()
        peers = [RawPeer(server.port) for _ in range(3)]
        for peer, token in zip(peers, (one, two, three), strict=True):
            peer.ask_value(auth(token.encode()))
        revoked.write_text(f"{identity_of(one)}\n")
        keys.write_text(KEY_LINE)
        server.process.send_signal(signal.SIGHUP)
        assert peers[0].closed()
        assert peers[2].closed()
        peers[1].ping()
        stock.ping()
        assert f"token {identity_of(one)} is revoked" in lines(server, identity_of(one))[0]
        assert len(lines(server, "the key k2, which signed token")) == 1
        assert len(lines(server, "closed the connection from 127.0.0.1:")) == 2
        assert len(lines(server, "SIGHUP: reloaded the token keys k1 and 1 revoked token")) == 1
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        assert f"{keys}: no keys; the previous ones stay in use" in lines(server, "cannot reload the token files: ")[0]
        peers[1].ping()
        for peer in peers:
            peer.close()


# Links


def _link_items(number: int, *more: tuple[bytes, bytes]) -> bytes:
    return link((b"version", b"2"), (b"id", bytes([7] * 16)), (b"secret", bytes([8] * 16)),
                (b"attempt", b"%d" % number), *more)  # fmt: skip


def _open(port: int, token: str, frame: bytes) -> tuple[RawPeer, dict[str, Any]]:
    peer = RawPeer(port)
    peer.ask_value(auth(token.encode()))
    return peer, json.loads(peer.ask_value(frame))


@pytest.mark.parametrize("single", [False, True])
def test_a_link_is_resumed_by_its_own_client_only(server: Server, single: bool) -> None:
    mine, stranger = KEYS.create(prefix="job/"), KEYS.create(prefix="jo", rights="read")
    kind = ((b"single", b"1"),) if single else ()
    first = _link_items(1, *kind)
    owner, said = _open(server.port, mine, first)
    assert said["status"] == "new"
    resume = (*kind, (b"instance", said["instance"].encode()), (b"taken", b"0"), (b"told", b"0"))
    owner.reset()
    for token, frame, reason in (
        (stranger, _link_items(2, *resume), "the link belongs to a client whose token allows more"),
        (stranger, _link_items(3, *kind), "the link belongs to a client whose token allows more"),
        (mine, first, "attempt 1 is stale: the link is already at attempt 1"),
    ):
        peer, said = _open(server.port, token, frame)
        assert (said["status"], said["reason"]) == ("refused", reason)
        peer.close()
    (line, *_) = lines(server, "LINK refused")
    assert "refused a request from 127.0.0.1:" in line
    assert "the link belongs to a client whose token allows more" in line
    back, said = _open(server.port, mine, _link_items(4, *resume))
    assert said["status"] == "resumed"
    recorded, said = _open(server.port, mine, _link_items(4, *resume))
    assert (said["status"], said["reason"]) == ("refused", "attempt 4 is stale: the link is already at attempt 4")
    recorded.close()
    for number, token in enumerate((KEYS.create(prefix="job/"), KEYS.create(prefix="j", rights="admin")), 5):
        back.reset()
        back, said = _open(server.port, token, _link_items(number, *resume))
        assert said["status"] == "resumed", "a renewed token does"
    back.close()


def test_a_link_takes_no_place_of_a_stranger(server: Server) -> None:
    place = (b"place", b"the relay's")
    first, said = _open(server.port, KEYS.create(), _link_items(1, place))
    assert said["status"] == "new"
    frame = link((b"version", b"2"), (b"id", bytes(16)), (b"secret", bytes(16)), place)
    second, said = _open(server.port, KEYS.create(), frame)
    assert said["status"] == "new"
    first.send(u64(0)[:0])
    assert first.socket.recv(1), "the link lasts, and is kept alive"
    assert "has taken its place" not in server.log()
    first.close()
    second.close()


# Relays


def test_ranks_behind_a_relay_may_do_what_its_token_allows(server: Server, folder: Path) -> None:
    token = secret_file(folder / "job.token", KEYS.create(prefix="job/"))
    with tcpstore_relay(server.port, "--token-file", str(token)) as relay:
        with RawPeer(relay.port) as stock:
            assert stock.ask(set_(b"/job/k", b"v") + get(b"/job/k"), 9) == blob(b"v")
        with RawPeer(relay.port) as stock:
            stock.send(set_(b"/other", b"v"))
            assert stock.closed()
        (line,) = lines(server, "not allowed")
        assert "SET of 'other'; token " in line
        with TCPStore("127.0.0.1", relay.port, timeout=LIMIT) as store:
            assert store.get("job/k") == b"v"
            with pytest.raises(DistStoreError, match="not allowed: SET of 'other'"):
                store.set("other", "v")
            store.set("job/k", "w")
        with TCPStore("127.0.0.1", relay.port, timeout=LIMIT, token=KEYS.create(rights="read")) as store:
            assert store.get("job/k") == b"w"
            with pytest.raises(AccessDeniedError):
                store.set("job/k", "x")

        async def run() -> None:
            async with await AsyncTCPStore.connect("127.0.0.1", relay.port, timeout=LIMIT) as other:
                assert await other.get("job/k") == b"w"
                with pytest.raises(AccessDeniedError, match="not allowed: GETNUMKEYS"):
                    await other.num_keys()

        asyncio.run(run())
    assert num_keys(server) == 1


def test_a_relay_sends_no_token_to_pytorchs_server() -> None:
    with torch_server() as port, tcpstore_relay(port, env={"TCPSTORE_TOKEN": KEYS.create()}) as relay:
        assert "it does not check tokens, so the token was not sent" in lines(relay, "cannot connect to")[0]


# The command line


def tcpstore(*words: str, port: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "TCPSTORE_URL": f"tcp://127.0.0.1:{port}", **env}
    command = [sys.executable, "-m", "tcpstore_async", *words]
    where = tempfile.gettempdir()
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=LIMIT, env=everything, check=False
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("options", "said", "warned"),
    [
        ((), "it gives access to all keys\n", ""),
        (("--store", "s:1"), "it gives access to all keys of the store 's:1'\n", ""),
        (
            ("--prefix", "job1/"),
            "the keys that begin with 'job1/', for example 'job1/x', which is 'x' in PrefixStore('job1', store)\n",
            "",
        ),
        (
            ("--prefix", "job1"),
            "'job1x'; end it with '/' to give access only to the keys of PrefixStore('job1', store)\n",
            "",
        ),
        (
            ("--prefix", "/job1/"),
            "that begin with '/job1/', for example '/job1/x', which is 'x' in PrefixStore('/job1', store)\n",
            "the token gives no access to keys such as 'job1/x'; omit the leading '/'",
        ),
        (("--prefix", "/"), "the keys that begin with '/', for example '/x'\n", "no access to keys such as 'x'; omit"),
    ],
)
def test_token_create_says_which_keys(options: tuple[str, ...], said: str, warned: str, tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", KEY_LINE)
    done = tcpstore("token", "create", "--token-keys", str(keys), *options)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert said in done.stderr
    assert done.stderr.count("WARNING") == bool(warned)
    assert warned in done.stderr
    _, _, example = done.stderr.partition("for example '")
    if example:
        access = KEYS.check(done.stdout.strip().encode(), 0)
        assert isinstance(access, Access)
        assert access.covers(b"/" + example.partition("'")[0].encode())
        assert not access.covers(b"/" + options[-1].lstrip("/").encode()) or not warned


@pytest.mark.parametrize(("prefix", "reason"), [("", "it is empty; omit it"), ("\udc80", "it is not UTF-8")])
def test_token_create_takes_no_prefix_that_is_a_mistake(prefix: str, reason: str) -> None:
    done = tcpstore("token", "create", "--token-keys", "/none", "--prefix", prefix)
    assert done.returncode == 2
    assert reason in done.stderr


def test_the_commands(folder: Path) -> None:
    keys = str(folder / "keys")
    with tcpstore_server("--token-keys", keys, "--require-auth=all") as server:
        port = server.port
        made = tcpstore("token", "create", "--token-keys", keys, "--prefix", "a", "--expires", "1000")
        assert made.returncode == 0
        token = made.stdout.strip()
        assert tcpstore("set", "a1", "v", port=port, TCPSTORE_TOKEN=token).returncode == 0
        path = folder / "a.token"
        path.write_text(made.stdout)
        path.chmod(0o644)
        got = tcpstore("get", "a1", "--token-file", str(path), port=port)
        assert (got.returncode, got.stdout) == (0, "v")
        assert f"{path} is accessible to users other than its owner (mode 0644)" in got.stderr
        path.chmod(0o600)
        got = tcpstore("get", "a1", port=port, TCPSTORE_TOKEN_FILE=str(path))
        assert (got.returncode, got.stdout, got.stderr) == (0, "v", "")
        for words in (("get", "b"), ("set", "b", "v"), ("check", "b"), ("keys",), ("num-keys",), ("queue", "pop", "b")):
            refused = tcpstore(*words, port=port, TCPSTORE_TOKEN=token)
            assert (refused.returncode, refused.stdout) == (5, "")
            assert refused.stderr.startswith("Error: not allowed: ")
            assert refused.stderr.count("\n") == 1
        refused = tcpstore("get", "a1", "-o", "json", port=port, TCPSTORE_TOKEN=forged(token))
        assert refused.returncode == json.loads(refused.stderr)["status"] == 5
        assert token[:20] not in refused.stderr
        assert tcpstore("get", "a1", "--token-file", str(folder / "none"), port=port).returncode == 5
        assert tcpstore("get", "a1", port=port, TCPSTORE_TOKEN="").returncode == 5
        assert num_keys(server) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("serve", "--require-auth"), "needs --token-keys or --tls-ca"),
        (("serve", "--require-auth=all"), "needs --token-keys or --tls-ca"),
        (("serve", "--revoked-tokens", "x"), "needs --token-keys"),
        (("serve", "--require-auth=some", "--token-keys", "x"), "Invalid value for '--require-auth'"),
        (("token", "create"), "Missing option '--token-keys'"),
        (("token", "create", "--token-keys", "x", "--rights", "root"), "Invalid value for '--rights'"),
        (("token", "create", "--token-keys", "x", "--expires", "0"), "Invalid value for '--expires'"),
    ],
)
def test_usage_errors(words: tuple[str, ...], error: str) -> None:
    done = tcpstore(*words)
    assert done.returncode == 2
    assert error in done.stderr


def test_key_files_that_are_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for words in (("serve", "--port", "0"), ("token", "create")):
        done = tcpstore(*words, "--token-keys", str(path))
        assert (done.returncode, "No such file" in done.stderr) == (1, True)
        path.write_text("hush")
        path.chmod(0o600)
        done = tcpstore(*words, "--token-keys", str(path))
        assert (done.returncode, "hush" not in done.stderr, "line 1: expected id:secret" in done.stderr) == (
            1,
            True,
            True,
        )
        path.unlink()


def test_limits_of_a_token_close_with_one_line(server: Server) -> None:
    token = KEYS.create(max_keys=2)
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token) as store:
        store.set("a", "1")
        store.set("b", "1")
        assert store.check(["a", "b"])
        with pytest.raises(DistNetworkError, match="2 of the 2 allowed") as told:
            store.add("c", 1)
        assert isinstance(told.value, AccessDeniedError)
    (line,) = lines(server, "not allowed")
    assert f"ADD would add 1 key; 2 of the 2 allowed for token {identity_of(token)} are in use" in line
    assert num_keys(server) == 2
    assert i64(2) == u64(2)


def test_a_client_whose_connection_is_closed_is_told_why(connect: Connect, options: list[str], tmp_path: Path) -> None:
    """The reason comes with the next connection: a limit of the token was exceeded, or the token is no longer valid."""
    limited, revoked = KEYS.create(max_bytes=100), KEYS.create()
    file = tmp_path / "revoked"
    file.touch()
    options = [*options[:2], "--revoked-tokens", str(file), "--require-auth=all"]
    said = []
    with tcpstore_server(*options) as server:
        for token in (limited, revoked):
            store = connect(server.port, token=token)
            store.check(["k"])
            if token is revoked:
                file.write_text(f"{identity_of(revoked)}\n")
                server.process.send_signal(signal.SIGHUP)
                lines(server, f"token {identity_of(revoked)} is revoked")
            for _ in range(2):  # later calls say so, too
                with pytest.raises(ConnectionDeniedError) as told:
                    store.set("k", bytes(1000))
                    store.get("k")
                said.append(str(told.value))
        limit, again, gone, for_good = said
        for text in (limit, again):
            assert re.match(r"not allowed: SET would add [\d,]+ bytes; 0 of the 100 allowed for token", text)
        for text in (gone, for_good):
            assert text.startswith(f"the server refused the token: token {identity_of(revoked)} is revoked: ")
        for token, status in ((KEYS.create(), 0), (limited, 5)):
            done = tcpstore("set", f"k{status}", "v" * 1000, port=server.port, TCPSTORE_TOKEN=token)
            assert done.returncode == status, done.stderr


def test_another_process_with_the_same_token_is_not_told(server: Server) -> None:
    """Who has the token knows its limits; but what another process did is not why this one lost its connection."""
    token = KEYS.create(max_keys=1)
    reply = {}
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token) as store:
        store.set("a", "1")
        with pytest.raises(ConnectionDeniedError):
            store.add("b", 1)
    for pid in (os.getpid(), os.getpid() + 1):
        with RawPeer(server.port) as peer:
            peer.ask(ping(struct.pack("<I", pid)), 4)
            reply[pid] = peer.ask_value(auth(token.encode()))
    assert b'"closed":"not allowed: ADD would add 1 key; ' in reply[os.getpid()]
    assert b'"closed"' not in reply[os.getpid() + 1]


@pytest.mark.parametrize("options", [{"require_auth": "banana"}, {"backend": "threaded", "require_auth": "all"}])
async def test_a_server_that_would_admit_strangers_or_nobody_does_not_start(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="require_auth"):
        async with serve(**options):
            pass
