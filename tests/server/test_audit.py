"""The audit log: one line for each refused action and for each look at a server, with exact counts beyond a limit."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
from pathlib import Path

import pytest

from conformance.frames import set_
from server.test_auth import KEY_LINE, identity_of, tcpstore
from support import LIMIT, RawPeer, secret_file, tcpstore_server, until
from tcpstore_async.base.limits import Limits
from tcpstore_async.server.audit import AuditLog
from tcpstore_async.serving import serve

WRITE = set_(b"/k", b"v")


def refused(port: int) -> int:
    """Be refused; return the port of the connection."""
    with RawPeer(port) as peer:
        here: int = peer.socket.getsockname()[1]
        peer.send(WRITE)
        assert peer.closed()
    return here


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(secret_file(tmp_path / "keys", KEY_LINE))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tcpstore_async.audit")


def test_so_many_lines_a_second_and_exact_counts_of_each_peer(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(2, clock)
    assert [audit.add(f"10.0.0.{n % 4}", f"no {n}") for n in range(12)] == [True] * 2 + [False] * 10
    assert audit.flush_due() == 1.0
    clock.now += 1
    assert audit.flush_due() == 0.0
    assert audit.flush_due() == 0.0
    assert caplog.messages == [
        "no 0",
        "no 1",
        "omitted 3 more lines about 10.0.0.2 in the last second",
        "omitted 3 more lines about 10.0.0.3 in the last second",
        "omitted 4 more lines about other peers in the last second",
    ]


def test_the_next_second_begins_with_the_counts(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(1, clock)
    for text in ("a", "b"):
        audit.add("here", text)
    clock.now += 5
    audit.add("here", "c")
    audit.flush()
    assert caplog.messages == ["a", "omitted 1 more line about here in the last second", "c"]


def test_no_limit(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(0, clock)
    assert all(audit.add("here", "no") for _ in range(1000))
    assert (len(caplog.messages), audit.flush_due()) == (1000, 0.0)


def test_every_refusal_has_a_line_with_its_peer(keys: str) -> None:
    """Also when they come within a second, and of one kind."""
    with tcpstore_server("--token-keys", keys, "--require-auth=all") as server:
        ports = {refused(server.port) for _ in range(30)}
        until(lambda: server.log().count("SET requires a token") == 30)
        assert (
            set(map(int, re.findall(r"closed the connection from 127.0.0.1:(\d+): not allowed", server.log()))) == ports
        )
        assert server.stop() == 0
        assert "omitted" not in server.log()


# quirk: audit_lines
def test_lines_beyond_the_limit_are_counted_exactly(keys: str) -> None:
    options = ["--token-keys", keys, "--require-auth=all", "--limit", "audit_lines=1"]
    with tcpstore_server(*options) as server:
        for _ in range(40):
            refused(server.port)
        until(lambda: "omitted" in server.log())  # by a timer: no further refusal follows
        assert server.stop() == 0
        counts = re.findall(r"omitted (\d+) more lines? about 127.0.0.1 in the last second", server.log())
        assert server.log().count("requires a token") + sum(map(int, counts)) == 40
        assert counts


async def test_the_audit_log_is_a_logger_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """And a program that runs a server may send it elsewhere."""
    async with serve(limits=Limits(audit_lines=7), require_auth="all") as server:
        assert server.audit._most == 7
        await asyncio.to_thread(refused, server.port)

    (record,) = [record for record in caplog.records if "not allowed" in record.getMessage()]
    assert (record.name, record.levelno) == ("tcpstore_async.audit", logging.WARNING)


def test_looking_in_is_one_line_with_the_user_and_what_was_asked_for(tmp_path: Path) -> None:
    with tcpstore_server("--admin", str(tmp_path / "admin"), "--log-format", "json") as server:
        asked = b'{"ask": ["sessions", "keys"]}'
        for request in (asked, b'{"ask": ["a\\nb"]}', asked, b"\x1b[31m"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(LIMIT)
                peer.connect(str(tmp_path / "admin"))
                peer.sendall(request + b"\n")
                while peer.recv(1 << 16):
                    pass
        entries = [json.loads(line) for line in server.log().splitlines()]
        found = [entry["message"] for entry in entries if entry["logger"] == "tcpstore_async.audit"]
        who = f"admin socket for port {server.port}: uid {os.getuid()}, pid {os.getpid()}: "
        assert found[:2] == [f"{who}'asked for sessions, keys'", f"{who}'asked for a\\nb'"]
        assert found[2].startswith(f"{who}'invalid request: ")
        assert len(found) == 3


def test_a_token_that_is_created_is_one_line_without_its_secret(keys: str) -> None:
    options = ["--token-keys", keys, "--rights", "read", "--prefix", "a\nb", "--max-keys", "3"]
    done = tcpstore("token", "create", *options)
    line, access = done.stderr.splitlines()
    token = done.stdout.strip()
    assert "it gives access to the keys that begin with 'a\\nb', for example 'a\\nbx'" in access
    assert (
        f"uid {os.getuid()} created token {identity_of(token)} (rights read, prefix 'a\\nb', max 3 keys), signed by k1"
        in line
    )
    assert token.split(".")[3] not in done.stderr
