"""`tcpstore journal`: what it says of a journal that is whole, torn or damaged, and what it never prints."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import LIMIT, free_port, listening, secret_file, tcpstore, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.log.journal import segments_of, snapshots_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = secret_file(tmp_path_factory.mktemp("keys") / "keys", f"one:{'k' * 40}")
    made: str = tcpstore("token", "create", "--token-keys", str(keys)).stdout.decode().strip()
    return made + " " + str(keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, token: str) -> Iterator[Path]:
    """The journal of a server that runs."""
    folder = tmp_path_factory.mktemp("journal")
    text, keys = token.split()
    options = ["--token-keys", keys, "--require-auth=all", "--persist", str(folder)]
    relay_env = {"TCPSTORE_TOKEN": text}
    with tcpstore_server(*options) as server, tcpstore_relay(server.port, env=relay_env) as relay:
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=text) as store:
            store.set("one", "a value")
            store.add("count", 3)
            store.multi_set(["two", "three"], ["another value", "x" * 300_000])
            store.queue_push("queue", "an item")
        with TCPStore("127.0.0.1", relay.port, timeout=LIMIT) as store:
            store.set("relayed", "a relayed value")
            assert store.get("relayed") == b"a relayed value"
        yield folder


def test_a_running_servers_journal_is_whole(folder: Path) -> None:
    done = tcpstore("journal", "verify", str(folder))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b" records in 1 segment, all whole\n")


def test_commands_are_printed_without_values(folder: Path, token: str) -> None:
    said = tcpstore("journal", "dump", str(folder)).stdout.decode()
    commands = [line.split(": ", 1)[1] for line in said.splitlines()]
    for expected in (
        "SET /one (7 bytes)",
        "ADD /count 3",
        "MULTI_SET [/two=(13 bytes), /three=(300,000 bytes)]",
        "QUEUE_PUSH /queue (7 bytes)",
        "AUTH",
        "LINK",
    ):
        assert expected in commands, said
    assert "value" not in said
    assert token.split()[0] not in said


def test_values_are_printed_on_request_but_tokens_never(folder: Path, token: str) -> None:
    done = tcpstore("journal", "dump", str(folder), "--values", "-o", "json", "--from", "2")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert min(event["record"] for event in events) == 2
    assert any(event["event"].endswith("SET /one 'a value'") for event in events)
    assert token.split()[0].encode() not in done.stdout


def test_no_token_is_in_the_journal(folder: Path, token: str) -> None:
    text = token.split()[0].encode()
    assert not [path.name for path in segments_of(folder) if text in path.read_bytes()]


def test_a_journal_with_a_snapshot(tmp_path: Path, token: str) -> None:
    """It has no token either; what older sessions send is not decoded, as it may begin within a request."""
    text, keys = token.split()
    folder = tmp_path / "journal"
    options = ["--token-keys", keys, "--require-auth=all", "--persist", str(folder)]
    port = str(free_port())
    with listening(["serve", "--port", port, *options]) as server:
        store = TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=text)
        store.set("one", "a value")
        store.num_keys()
        assert server.stop(signal.SIGTERM) == 0
    (snapshot,) = snapshots_of(folder)
    assert text.encode() not in snapshot.read_bytes()
    with listening(["serve", "--port", port, *options]), store:
        store.set("two", "another value")
        assert store.get("one") == b"a value"
        verified = tcpstore("journal", "verify", str(folder)).stdout.decode()
        assert re.match(r"a snapshot behind \d+ records, and \d+ records in 1 segment, all whole\n", verified)
        said = tcpstore("journal", "dump", str(folder)).stdout.decode()
        assert re.search(r"session 1: \d+ bytes\n", said)
        assert "/two" not in said


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in (folder / "instance", *segments_of(folder)):
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_damaged_journal(folder: Path, token: str, tmp_path: Path) -> None:
    """One line says where; a server refuses it, too."""
    copy = copy_of(folder, tmp_path / "copy")
    (segment,) = segments_of(copy)
    data = bytearray(segment.read_bytes())
    data[data.index(b"a value")] ^= 1
    segment.write_bytes(data)
    serve = ["serve", "--port", "0", "--token-keys", token.split()[1], "--require-auth=all", "--persist"]
    for command in (["journal", "verify"], ["journal", "dump"], serve):
        done = tcpstore(*command, str(copy))
        assert done.returncode == 1, command
        (line,) = done.stderr.decode().splitlines()[-1:]
        assert "is damaged, and whole ones follow" in line
        assert str(segment) in line


def test_a_torn_journal(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    (segment,) = segments_of(copy)
    data = segment.read_bytes().rstrip(b"\0")
    segment.write_bytes(data[:-3] + bytes(1000))
    done = tcpstore("journal", "verify", str(copy))
    assert done.returncode == 0
    assert b"of one that is not whole, which the next server cuts" in done.stdout


def test_what_is_no_journal(tmp_path: Path) -> None:
    done = tcpstore("journal", "verify", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, b"0 records in 0 segments, all whole\n")
    (tmp_path / "log-00000000").write_bytes(b"something else" * 10)
    done = tcpstore("journal", "verify", str(tmp_path))
    assert done.returncode == 1
    assert b"this is no segment of a journal" in done.stderr
