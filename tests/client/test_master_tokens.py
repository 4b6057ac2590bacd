"""The server of a master whose process has a token, or the keys that sign tokens."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conformance.frames import set_
from support import LIMIT, RawPeer, secret_file, until
from tcpstore_async import AccessDeniedError, DistNetworkError, PrefixStore, TCPStore
from tcpstore_async.auth.tokens import TokenKeys, read_keys
from tcpstore_async.server.process import child
from tls.certificates import certificates

SECRET = "7d1f0c2b9a"

WHERE = ("process", "thread")


def key_file(folder: Path, text: str = "k1:a secret that nobody knows\n") -> Path:
    return secret_file(folder / "keys", text)


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TCPSTORE_SERVER", request.param)
    return str(request.param)


def master(**given: object) -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, LIMIT, bind_host="127.0.0.1", **given)  # type: ignore[arg-type]


def other(port: int, token: str = "") -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=LIMIT, token=token)


def refused(port: int, token: str, why: str) -> None:
    with pytest.raises(AccessDeniedError, match=why), other(port, token) as store:
        store.num_keys()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("TCPSTORE_TOKEN", SECRET, "no tokens.*TCPSTORE_TOKEN"),
        ("TCPSTORE_TOKEN_KEYS", "keys", "no tokens.*TCPSTORE_TOKEN_KEYS"),
        ("TCPSTORE_TLS", "1", "no TLS.*TCPSTORE_TLS"),
    ],
)
# quirk: legacy-server
def test_the_threaded_server_is_not_started_without_what_was_asked_for(
    name: str, value: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = certificates().server
    if value == "keys":
        value = str(key_file(tmp_path))
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TCPSTORE_CERT", pair.cert)
    monkeypatch.setenv("TCPSTORE_KEY", pair.key)
    with pytest.raises(ValueError, match=rf"^the threaded server \(use_libuv=False\) has {named}"):
        master(use_libuv=False)


def test_the_token_of_the_environment_protects_its_server(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TCPSTORE_TOKEN", SECRET)
    with master() as store:
        store.set("k", "v")
        with other(store.port, SECRET) as mine, mine.clone() as copy:
            assert copy.get("k") == b"v"
        refused(store.port, "", "the server requires a token: set TCPSTORE_TOKEN_FILE")
        refused(store.port, SECRET + "0", "it is not the token of the process that hosts this server")
        with RawPeer(store.port) as stock:
            stock.send(set_(b"/k", b"w"))
            assert stock.closed()
            here = stock.socket.getsockname()[1]
        line = f"closed the connection from 127.0.0.1:{here}: not allowed: SET requires a token"
        until(lambda: any(line in message for message in caplog.messages))
        assert store.get("k") == b"v"
        assert SECRET not in caplog.text
    audit = [record for record in caplog.records if "not allowed" in record.getMessage()]
    assert {record.name for record in audit} == {"tcpstore_async.audit"}


def test_the_token_is_in_no_argument_of_the_servers_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with master(token=SECRET) as store:
        assert store._hosted is not None
        about = Path("/proc", str(store._hosted.pid))
        if about.exists():
            assert (
                SECRET.encode() not in about.joinpath("cmdline").read_bytes() + about.joinpath("environ").read_bytes()
            )
        with other(store.port, SECRET) as mine:
            mine.set("k", "v")


def test_a_server_whose_owner_ends_before_it_passes_its_tokens_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than admit everybody."""
    reading, writing = os.pipe()
    os.close(writing)
    monkeypatch.setattr(child, "_STDIN", reading)
    try:
        with pytest.raises(EOFError, match="exited before it passed on its tokens"):
            child.read_tokens()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), reading)
        assert child.read_tokens() is None
    finally:
        os.close(reading)


def test_both_the_given_token_and_that_of_the_environment_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_TOKEN", SECRET)
    with master(token="another") as store:
        for token in (SECRET, "another"):
            with other(store.port, token) as mine:
                assert mine.num_keys() == 0
        refused(store.port, "third", "it is not the token")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_keys_let_in_the_tokens_that_they_have_signed(
    where: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = key_file(tmp_path)
    if by == "environment":
        monkeypatch.setenv("TCPSTORE_TOKEN_KEYS", str(keys))
    with master(**({"token_keys": keys} if by == "argument" else {})) as store:  # which has made its own token
        store.set("a/k", "v")
        made = read_keys(keys)
        with other(store.port, made.create("read", "a/")) as mine:
            assert mine.get("a/k") == b"v"
            with pytest.raises(AccessDeniedError, match="requires write access"):
                PrefixStore("a/", mine).set("k", "w")
        refused(store.port, "", "the server requires a token")
        refused(store.port, TokenKeys([("k1", b"other")]).create(), "not signed by one of this server's keys")
        refused(store.port, made.create(seconds=-1), "expired at")


def test_a_master_with_keys_presents_the_token_that_it_has(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    with master(token_keys=keys, token=read_keys(keys).create(prefix="a/")) as store:
        store.set("a/k", "v")
        with pytest.raises(AccessDeniedError, match="; token"):
            store.set("b", "v")
    with pytest.raises(AccessDeniedError, match="not signed by one of this server's keys"):
        master(token_keys=keys, token=SECRET)


def test_nothing_is_required_without_a_token(where: str) -> None:
    with master() as store, RawPeer(store.port) as stock:
        stock.ping()
        with pytest.raises(AccessDeniedError, match="no keys to check tokens with"):
            other(store.port, SECRET)


def test_an_open_server_in_a_process_with_a_token_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TCPSTORE_TOKEN", SECRET)
    with master(token="") as store, RawPeer(store.port) as stock:
        stock.ping()
    assert any("admits clients without a token" in message for message in caplog.messages)
    assert SECRET not in caplog.text


def test_who_must_have_one(where: str) -> None:
    with master(token=SECRET, require_auth="remote") as store, RawPeer(store.port) as stock:
        stock.ping()
        refused(store.port, "wrong", "it is not the token")
    with pytest.raises(ValueError, match="require_auth must be '', 'remote' or 'all', not 'none'"):
        master(require_auth="none")


def test_a_server_with_another_token_is_not_shared() -> None:
    with TCPStore("127.0.0.1", 0, None, True, LIMIT, multi_tenant=True, token=SECRET) as one:
        with TCPStore("127.0.0.1", one.port, None, True, LIMIT, multi_tenant=True, token=SECRET) as two:
            two.set("k", "v")
            assert one.get("k") == b"v"
        for token in ("", "another"):
            with pytest.raises(DistNetworkError, match="token or token keys differ"):
                TCPStore("127.0.0.1", one.port, None, True, LIMIT, multi_tenant=True, token=token)


@pytest.mark.parametrize(
    ("text", "error"),
    [(None, "cannot read the token keys /.*: No such file"), ("k1", "line 1: expected id:secret"), ("", "no keys")],
)
def test_keys_that_cannot_be_used(text: str | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "keys" if text is None else key_file(tmp_path, text)
    with pytest.raises(AccessDeniedError, match=error):
        master(token_keys=path)


def test_others_ignore_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has no use for them, and need not be able to read them."""
    with master() as store:
        monkeypatch.setenv("TCPSTORE_TOKEN_KEYS", str(tmp_path / "none"))
        with other(store.port) as mine:
            assert mine.num_keys() == 0


def test_what_the_master_starts_has_the_standard_input_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The tokens come by it, and a server process must not read what is its owner's."""
    caplog.set_level(logging.INFO)
    program = (
        "import sys, tcpstore_async\n"
        "with tcpstore_async.TCPStore('127.0.0.1', 0, None, True, bind_host='127.0.0.1', token='secret') as store:\n"
        "    print(store.num_keys(), sys.stdin.read())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="mine",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    assert (done.stdout, done.returncode) == ("0 mine\n", 0), done.stderr
