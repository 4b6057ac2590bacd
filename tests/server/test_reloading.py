"""Files that a server loads again: when it is sent SIGHUP and, at a master, when they have changed."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from client.test_master_tokens import WHERE, key_file, master
from conformance.frames import auth
from server.test_auth import KEYS
from support import RawPeer, Server, listening, tcpstore_relay, tcpstore_server, until
from tcpstore_async.auth.tokens import TokenFiles, TokenKeys
from tcpstore_async.server.base import Server as AnyServer
from tcpstore_async.server.reloading import Reloading
from tls.certificates import Pair, certificates
from tls.peers import TlsPeer, context
from tls.test_server import replace, serial

pytestmark = [pytest.mark.slow, pytest.mark.measured]

BOTH = "k1:a secret that nobody knows\nk2:the second secret\n"
FIRST, _, _ = BOTH.partition("k2")


@pytest.mark.parametrize("where", WHERE)
def test_the_server_of_a_master_loads_files_that_have_changed(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can send it a signal: it ignores those that its job gets."""
    known = certificates()
    pair = Pair(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    Path(pair.key).touch(0o600)
    replace(pair, known.server)
    keys = key_file(tmp_path, BOTH)
    for name, value in {"TCPSTORE_SERVER": where, **known.environment(pair)}.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("INFO")
    with master(token_keys=keys, token=KEYS.create()) as store:
        first = serial(store.port, known.client)
        with TlsPeer(store.port, using=context(known.client)) as peer:
            token = TokenKeys([("k2", b"the second secret")]).create()
            assert b'"ok"' in peer.ask_value(auth(token.encode()))
            replace(pair, known.renewed)
            keys.write_text(FIRST)
            assert peer.closed()
        assert serial(store.port, known.client) != first
        store.set("k", "v")
    assert any("files changed: reloaded the token keys k1 and" in message for message in caplog.messages)
    assert any("the key k2, which signed token" in message for message in caplog.messages)


class Looks(threading.Event):
    """Changes a file before each look, and notes how often it had been loaded before."""

    def __init__(self, changes: list[Callable[[], object]], loaded: list[str]) -> None:
        super().__init__()
        self.changes = iter(changes)
        self.loaded = loaded
        self.seen: list[int] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seen.append(len(self.loaded))
        change = next(self.changes, None)
        if change is not None:
            change()
        return change is None


class Loop:
    """Notes what it is to call."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def call_soon_threadsafe(self, function: object, why: str) -> None:
        self.called.append(why)


class NoServer:
    tls = None
    stopped = False


def test_a_file_is_loaded_once_it_no_longer_changes(tmp_path: Path) -> None:
    keys, loop = key_file(tmp_path, BOTH), Loop()
    revoked = tmp_path / "revoked"
    revoked.touch()

    def write(text: str) -> Callable[[], object]:
        return lambda: keys.write_text(text)

    def nothing() -> None: ...

    reloading = Reloading(cast(AnyServer, NoServer()), TokenFiles(keys, revoked))
    changes = [
        nothing, write(""), write("k1:"), write(FIRST), nothing, nothing, keys.unlink, write(BOTH), nothing,
        revoked.unlink, nothing, nothing,
    ]  # fmt: skip
    looks = Looks(changes, loop.called)
    reloading._watch(cast(asyncio.AbstractEventLoop, loop), reloading._state(), looks)
    assert looks.seen == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert set(loop.called) == {"files changed"}


@pytest.fixture(params=["serve", "relay", "http"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """What was started without a file that could be reloaded."""
    admin = str(tmp_path / "admin")
    with tcpstore_server("--admin", admin) as server:
        if request.param == "serve":
            yield server
        elif request.param == "relay":
            with tcpstore_relay(server.port) as relay:
                yield relay
        else:
            before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and so by what is started here
            try:
                with listening(["http", "--listen", "127.0.0.1:0", "--admin", admin], prefix=["env"]) as page:
                    yield page
            finally:
                signal.signal(signal.SIGHUP, before)


def test_a_hangup_ends_nothing(daemon: Server) -> None:
    """As of a reload by the service manager, or the end of the terminal."""
    for number in (1, 2):
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda number=number: len(re.findall("SIGHUP: .* to reload.* keeps running", daemon.log())) == number)  # type: ignore[misc]
    with RawPeer(daemon.port, validate=False):
        pass
    assert daemon.stop(signal.SIGTERM) == 0
