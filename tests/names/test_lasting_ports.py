"""Ports that stand for a store with a name until they are closed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.fault_helpers import program, until
from support import LIMIT, RawPeer, refused, secret_file, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.client.server_url import ServerUrl
from tcpstore_async.relay import named_ports
from tcpstore_async.relay.named_ports import LastingPort


@pytest.fixture(autouse=True)
def _forwarding() -> Iterator[None]:
    """The process that forwards ends with the test."""
    yield
    named_ports._forget()


def test_it_outlasts_its_clients_and_they_outlast_it() -> None:
    with (
        tcpstore_server() as server,
        TCPStore("node7", 4711, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as owner,
    ):
        port = LastingPort(ServerUrl("127.0.0.1", server.port, False), "node7:4711")
        for number in range(3):
            with TCPStore("127.0.0.1", port.port, timeout=LIMIT, server="") as rank:
                rank.set(str(number), "v")
                assert owner.get(str(number)) == b"v"
        with RawPeer(port.port) as rank:
            rank.ping()
            port.close()
            port.close()
            until(lambda: refused(port.port), "the port is closed")
            rank.ping()


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is given, or that of the environment as it is now."""
    keys = secret_file(tmp_path / "keys", "k1:a secret\n")
    token = TokenKeys([("k1", b"a secret")]).create()
    with tcpstore_server("--token-keys", str(keys), "--require-auth=all") as server:
        where = ServerUrl("127.0.0.1", server.port, False)
        ports = [LastingPort(where, "node7:4711", token)]
        monkeypatch.setenv("TCPSTORE_TOKEN", token)
        ports.append(LastingPort(where, "node7:4711"))
        with TCPStore("node7", 4711, None, True, LIMIT, server=str(where)):
            for port in ports:
                with RawPeer(port.port) as rank:
                    rank.ping()
                port.close()


def test_who_has_lost_the_server_is_told_what_for_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        tcpstore_server() as server,
        TCPStore("node7", 4711, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}"),
    ):
        port = LastingPort(ServerUrl("127.0.0.1", server.port, False), "node7:4711")
        with RawPeer(port.port) as rank:
            rank.ping()
            server.stop(signal.SIGKILL)
            said = ""

            def told() -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return "the server and the job" in said

            until(told, "the error is printed")
        port.close()
    [line] = [line for line in said.splitlines() if line.startswith("tcpstore: ")]
    assert line == (
        f"tcpstore: no process is listening at tcp://127.0.0.1:{server.port} any more, so this host's processes have "
        "lost the store 'node7:4711' there: the server has ended, or its machine was restarted. Restart "
        "the server and the job"
    )


def test_the_process_that_forwards_gets_what_its_interpreter_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nothing that is for the user's program: it is started as a server's process is."""
    wrapper, seen = tmp_path / "python", tmp_path / "seen"
    variables = {"PYTHONHOME": sys.base_prefix, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONINSPECT": "1"}
    shown = " ".join(f"${name}" for name in variables)
    wrapper.write_text(f'#!/bin/sh\necho "$1 $2" {shown} >"{seen}"\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    with (
        tcpstore_server() as server,
        TCPStore("node7", 4711, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}"),
    ):
        port = LastingPort(ServerUrl("127.0.0.1", server.port, False), "node7:4711")
        assert seen.read_text() == f"-S -B {sys.base_prefix} 1\n"
        with RawPeer(port.port) as rank:
            rank.ping()
        port.close()


_OWNER = """
import os, sys
from tcpstore_async.relay.named_ports import LastingPort
from tcpstore_async.client.server_url import ServerUrl
os.setpgrp()
port = LastingPort(ServerUrl("127.0.0.1", int(sys.argv[1]), False), "node7:4711")
print(port.port, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_process_group() -> None:
    with tcpstore_server() as server, program(_OWNER, str(server.port)) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert not refused(port)
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: refused(port), "the port is closed")
