"""Tokens: what is accepted, what is refused and why, and that no secret is told."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
from pathlib import Path

import pytest

from tcpstore_async.auth.access import Access
from tcpstore_async.auth.secret_files import TOKEN, TOKEN_FILE
from tcpstore_async.auth.tokens import HostTokens, TokenFiles, TokenKeys, parse_keys, read_keys
from tcpstore_async.base.errors import AccessDeniedError
from tcpstore_async.client.credentials import find_token, read_token

SECRET = b"a secret of the first key"
KEYS = TokenKeys([("k1", SECRET), ("old", b"the one before it")])
UNSIGNED = "the token is not signed by one of this server's keys"


def made(**given: object) -> bytes:
    return KEYS.create(**given).encode()  # type: ignore[arg-type]


def test_what_a_token_says() -> None:
    token = made(rights="read", prefix="job/", store="s", seconds=1000, max_keys=1, max_bytes=2, max_sessions=3)
    found = KEYS.check(token, 0)
    assert isinstance(found, Access)
    assert (found.rights, found.prefix, found.store, found.signer) == ("read", "job/", "s", "k1")
    assert (found.max_keys, found.max_bytes, found.max_sessions) == (1, 2, 3)
    assert found.identity in str(base64.urlsafe_b64decode(token.split(b".")[2] + b"=="))
    assert KEYS.check(token, found.expires - 1) == found
    assert KEYS.check(token, found.expires) == KEYS.check(token, found.expires + 1e9)
    assert "expired at " in str(KEYS.check(token, found.expires))
    assert KEYS.check(made(), 0) != KEYS.check(made(), 0), "each has an id of its own"


def test_every_changed_byte_and_every_shorter_token_is_refused() -> None:
    token = made(prefix="job/")
    for at in range(len(token)):
        other = b"A" if token[at : at + 1] != b"A" else b"B"
        assert KEYS.check(token[:at] + other + token[at + 1 :], 0) == UNSIGNED
        assert KEYS.check(token[:at], 0) == UNSIGNED
    assert KEYS.check(token + b"=", 0) == UNSIGNED
    assert isinstance(KEYS.check(token, 0), Access)


@pytest.mark.parametrize("token", [b"", b".", b"...", b"tcps1.k1..", b"\xff" * 40, b"tcps1", b"a.k1.b.c.d"])
def test_what_is_no_token_is_refused(token: bytes) -> None:
    assert KEYS.check(token, 0) == UNSIGNED


def _signed(*parts: bytes, key: bytes = SECRET) -> bytes:
    signed = b".".join(parts)
    mac = base64.urlsafe_b64encode(hmac.digest(key, signed, hashlib.sha256)).rstrip(b"=")
    return signed + b"." + mac


def _claiming(claims: bytes, version: bytes = b"tcps1") -> bytes:
    return _signed(version, b"k1", base64.urlsafe_b64encode(claims))


def test_a_key_signs_in_its_own_name_only() -> None:
    _, _, claims, _ = made().split(b".")
    assert KEYS.check(_signed(b"tcps1", b"old", claims), 0) == UNSIGNED
    assert KEYS.check(_signed(b"tcps1", b"nobody", claims), 0) == UNSIGNED


def test_keys_are_rotated(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    revoked = tmp_path / "revoked"
    keys.write_text("# the first signs\n\nnew: s e:cret \nold:another\n")
    keys.chmod(0o600)
    revoked.write_text("")
    assert parse_keys(keys.read_text(), "f") == [("new", b" s e:cret"), ("old", b"another")]
    files = TokenFiles(keys, revoked)
    by_old = TokenKeys([("old", b"another")]).create().encode()
    by_new = read_keys(keys).create().encode()
    first, second = files.authenticate(by_old), files.authenticate(by_new)
    assert isinstance(first, Access)
    assert isinstance(second, Access)
    ended = files.reload()
    assert not ended(first)
    assert not ended(second)
    keys.write_text("new: s e:cret\n")
    revoked.write_text(f"# lost\n{second.identity}\n")
    ended = files.reload()
    assert ended(first) == f"the key old, which signed token {first.identity}, has been removed or replaced"
    assert ended(second) == f"token {second.identity} is revoked"
    assert files.authenticate(by_old) == UNSIGNED
    assert files.authenticate(by_new) == f"token {second.identity} is revoked"
    keys.write_text("new:changed\n")
    revoked.write_text("")
    assert "has been removed" in files.reload()(second)
    keys.write_text("nothing")
    with pytest.raises(ValueError, match="line 1: expected id:secret"):
        files.reload()
    assert files.authenticate(by_new) == UNSIGNED, "it goes on with what it had"


@pytest.mark.parametrize(
    "line",
    [
        made(),
        b"0123 # a lost laptop",
        b"0123, 4567",
        b"\xef\xbb\xbf0123",
        b"caf\xe9",
    ],
    ids=["a token", "a comment behind it", "two", "a byte order mark", "no UTF-8"],
)
def test_what_would_revoke_nothing_is_an_error(line: bytes, tmp_path: Path) -> None:
    """It says where, and nothing of what is there, which may be a token."""
    keys, revoked = tmp_path / "keys", tmp_path / "revoked"
    keys.touch(0o600)
    keys.write_text("k1:a secret of the first key\n")
    revoked.write_bytes(b"# lost\n\n 0123 \r\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"revoked, line 4: expected the id of a token") as raised:
        read_keys(keys, revoked)
    assert line not in str(raised.value).encode()
    revoked.write_bytes(b"# lost\n\n 0123 \r\n4567")
    assert read_keys(keys, revoked).revoked == {"0123", "4567"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "f: no keys"),
        ("#\n\n", "f: no keys"),
        ("k1:s\nk 2:hush", "f, line 2: expected id:secret"),
        ("k1:", "f, line 1: expected id:secret"),
        (":hush", "f, line 1: expected id:secret"),
        ("k.1:hush", "f, line 1: expected id:secret"),
        ("k1:a\nk1:hush", "f, line 2: duplicate key id"),
    ],
)
def test_errors_in_key_files_do_not_show_what_is_in_them(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        parse_keys(text, "f")
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o604, 0o620])
def test_a_file_that_is_open_to_others_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("k1:hush, and sixteen bytes")
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        read_keys(path)
    assert bool(caplog.messages) == bool(mode & 0o077)
    assert "hush" not in caplog.text


def test_a_token_that_would_be_too_long() -> None:
    with pytest.raises(ValueError, match="shorten its prefix"):
        KEYS.create(prefix="p" * 4000)


def test_where_a_client_finds_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(" from.the.file \n")
    path.chmod(0o600)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    assert find_token() == b""
    monkeypatch.setenv(TOKEN_FILE, str(path))
    assert find_token() == b"from.the.file"
    monkeypatch.setenv(TOKEN, "of.the.environment")
    assert find_token() == b"of.the.environment"
    assert find_token("given") == b"given"
    assert find_token("") == b""
    with pytest.raises(TypeError, match="token must be str, not int"):
        find_token(1)


@pytest.mark.parametrize("text", ["two words", "café", "line\nbreak", "x" * 5000])
def test_what_is_no_token_is_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(text.encode())
    with pytest.raises(AccessDeniedError, match="is not a valid token") as raised:
        find_token(text)
    assert text not in str(raised.value)
    with pytest.raises(AccessDeniedError, match="is not a valid token") as raised:
        read_token(path)
    assert text not in str(raised.value)


def test_token_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match=r"cannot read the token file .*: No such file"):
        read_token(tmp_path / "missing")
    for content, error in ((b"", "is empty"), (b"\xff", "is not UTF-8 text"), (bytes(1 << 21), "is longer than")):
        path = tmp_path / "token"
        path.write_bytes(content)
        os.chmod(path, 0o600)
        with pytest.raises(AccessDeniedError, match=error):
            read_token(path)


@pytest.mark.parametrize(
    "claims",
    [
        b"",
        b"null",
        b'{"id":"x"}',
        b'{"rights":"write"}',
        b'{"id":"x","rights":"root"}',
        b'{"id":"x","rights":"write","only_on_mondays":1}',
        b"[" * 3000,
        b"\xff",
        b'{"id":"","rights":"write"}',
        b'{"id":"a\\nforged line","rights":"write"}',
        b'{"id":"' + b"x" * 65 + b'","rights":"write"}',
        b'{"id":"x","rights":"write","prefix":"\\ud800"}',
        b'{"id":"x","rights":"write","expires":1e400}',
        b'{"id":"x","rights":"write","expires":"never"}',
        b'{"id":"x","rights":"write","expires":NaN}',
        b'{"id":"x","rights":"write","expires":1.5}',
        b'{"id":"x","rights":"write","expires":null}',
        b'{"id":"x","rights":"write","keys":-1}',
        b'{"id":"x","rights":"write","bytes":-1}',
        b'{"id":"x","rights":"write","sessions":-1}',
        b'{"id":"x","rights":"write","Prefix":"job/"}',
        b'{"id":"x","rights":"write"}{}',
        b'\xef\xbb\xbf{"id":"x","rights":"write"}',
    ],
)
def test_what_a_signed_token_cannot_say(claims: bytes) -> None:
    assert KEYS.check(_claiming(claims), 0) == "this server does not understand the token's contents"
    assert "version" in str(KEYS.check(_claiming(claims, b"tcps2"), 0))


@pytest.mark.parametrize("expires", [-1, -(10**17), -(10**30)])
def test_a_token_that_expired_before_there_were_dates(expires: int) -> None:
    claims = b'{"id":"x","rights":"write","expires":%d}' % expires
    assert KEYS.check(_claiming(claims), 0) == "token x expired at 1970-01-01T00:00:00Z"


def test_a_short_secret_is_a_warning_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("k1:0123456789abcdef\nk2:hush\n")
    read_keys(path)
    (message,) = caplog.messages
    assert message.startswith(f"the secret of key k2 in {path} is only 4 bytes long")
    assert "hush" not in message


def test_tokens_of_a_host_are_not_in_its_representation() -> None:
    """It may be in a traceback or a log line."""
    assert "hush" not in repr(HostTokens("", frozenset({b"hush"}), ""))
