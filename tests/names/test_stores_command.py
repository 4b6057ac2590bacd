"""`tcpstore stores`, and the other commands that look into stores with names."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import run_command
from support import LIMIT, Server, tcpstore_server
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.server.backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def server(request: pytest.FixtureRequest, sockets: Path) -> Iterator[Server]:
    with tcpstore_server("--backend", request.param) as server:
        yield server


@pytest.fixture
def owner(server: Server) -> Iterator[TCPStore]:
    with TCPStore("node7", 4711, 1, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        store.set("key", "value")
        assert store.check(["key"])
        yield store


def test_none(server: Server) -> None:
    assert json.loads(run_command(server, "stores", "-o", "json").stdout) == []
    assert run_command(server, "stores").stdout.split() == "NAME OWNER RANKS AGE SESSIONS KEYS BYTES STATE".split()


def test_a_list(server: Server, owner: TCPStore) -> None:
    (found,) = json.loads(run_command(server, "stores", "-o", "json").stdout)
    age, size = found.pop("age"), found.pop("bytes")
    assert 0 <= age < LIMIT
    assert 0 < size < 10_000
    assert found == {
        "name": "node7:4711",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "attempt": "",
        "joined": 1,
        "expected": 1,
        "sessions": 1,
        "keys": 2,
        "ended": "",
    }
    line = run_command(server, "stores").stdout.splitlines()[1]
    assert line.startswith(f"node7:4711  {socket.gethostname()}, pid {os.getpid()}  1 of 1  ")


def test_a_dropped_store(server: Server, owner: TCPStore) -> None:
    done = run_command(server, "stores", "drop", "node7:4711")
    assert (done.exit_code, done.output) == (0, "")
    with pytest.raises(DistNetworkError, match="the store 'node7:4711' ended: an administrator dropped it"):
        owner.get("key")
    done = run_command(server, "stores", "drop", "node7:4711")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no store 'node7:4711'" in done.stderr


def test_who_is_in_which_store(server: Server, owner: TCPStore) -> None:
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, server="") as nameless:
        nameless.set("k", "v")
        assert nameless.check(["k"])
        found = json.loads(run_command(server, "who", "-o", "json").stdout)
        assert sorted(one["store"] for one in found) == ["", "node7:4711"]
        assert run_command(server, "who").stdout.startswith("STORE")
        (one,) = json.loads(run_command(server, "who", "--store", "node7:4711", "-o", "json").stdout)
        assert one["pid"] == os.getpid()
    done = run_command(server, "who", "--store", "nothing")
    assert (done.exit_code, "there is no store 'nothing'" in done.stderr) == (1, True)


def test_what_is_waited_for_in_a_store(server: Server, owner: TCPStore) -> None:
    owner.set("step_5", "x")
    url = f"tcp://127.0.0.1:{server.port}"
    with TCPStore("node7", 4711, timeout=LIMIT, server=url) as rank:
        thread = threading.Thread(target=lambda: rank.wait(["step_8"]))
        thread.start()
        while True:
            found = json.loads(run_command(server, "waiters", "--store", "node7:4711", "-o", "json").stdout)
            if found:
                break
        assert [one["key"] for one in found] == ["step_8"]
        assert found[0]["nearest"][0]["key"] == "step_5"
        assert json.loads(run_command(server, "waiters", "-o", "json").stdout) == []
        assert "1 of 1 ranks have joined" in run_command(server, "who", "--missing", "--store", "node7:4711").stdout
        owner.set("step_8", "x")
        thread.join()


def test_who_waits_for_a_store(server: Server) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    rank = threading.Thread(target=lambda: TCPStore("late", 1, timeout=LIMIT, server=url).close())
    rank.start()
    while True:
        found = json.loads(run_command(server, "who", "-o", "json").stdout)
        if found and found[0]["waits_for"]:
            break
    assert (found[0]["command"], found[0]["waits_for"]) == ("ENTER", ["late:1"])
    assert "waits for the store late:1" in run_command(server, "who").stdout
    with TCPStore("late", 1, None, True, LIMIT, server=url):
        rank.join()
