"""`tcpstore stores`, and the other commands that look into stores with names."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from commands import run_command
from support import LIMIT, Server, tcpstore_server
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.diagnosis.rates import between
from tcpstore_async.server.backends import BACKENDS
from tcpstore_async.tools.look.look import look_at
from tcpstore_async.tools.look.top import screen


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
    assert run_command(server, "stores").stdout.split() == "NAME OWNER RANKS AGE SESSIONS KEYS BYTES PORT STATE".split()


def test_a_list(server: Server, owner: TCPStore) -> None:
    (found,) = json.loads(run_command(server, "stores", "-o", "json").stdout)
    age, size, port = found.pop("age"), found.pop("bytes"), found.pop("port")
    name = owner._connection().name
    assert name is not None
    assert port == name.port > 0
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


def test_keys_of_a_store(server: Server, owner: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option, and by a variable, which an empty option overrules."""
    named = ["--store", "node7:4711"]
    assert run_command(server, "get", "key", *named).stdout == "value"
    assert run_command(server, "set", "k", "v", *named).exit_code == 0
    assert owner.get("k") == b"v"
    monkeypatch.setenv("TCPSTORE_STORE", "node7:4711")
    assert run_command(server, "append", "k", "w").exit_code == 0
    assert owner.get("k") == b"vw"
    assert run_command(server, "add", "n", "2").stdout == "2\n"
    assert run_command(server, "compare-set", "k", "vw", "x").stdout == "x"
    assert run_command(server, "wait", "k", "n").exit_code == 0
    assert run_command(server, "check", "k", "n").exit_code == 0
    assert run_command(server, "check", "k", "--store", "").exit_code == 1
    assert run_command(server, "queue", "push", "q", "item").exit_code == 0
    assert run_command(server, "queue", "len", "q").stdout == "1\n"
    assert owner.queue_pop("q") == b"item"
    assert run_command(server, "barrier", "b", "--world-size", "1").exit_code == 0
    assert run_command(server, "keys").stdout == "b\nk\nkey\nn\n"
    assert run_command(server, "keys", "--store", "").stdout == ""
    assert run_command(server, "num-keys").stdout == f"{owner.num_keys()}\n"
    assert run_command(server, "delete", "k").exit_code == 0
    assert not owner.check(["k"])
    assert json.loads(run_command(server, "who", "-o", "json").stdout)[0]["store"] == "node7:4711"  # shows all stores


def test_a_store_by_an_address_on_loopback(server: Server) -> None:
    """As programs and their errors spell it: its name has this host, network and user in front."""
    with TCPStore("127.0.0.1", 4712, 1, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as owner:
        for at in ("localhost:4712", "127.0.0.1:4712", "[::1]:4712", "0.0.0.0:4712"):
            assert run_command(server, "set", "k", at, "--store", at).exit_code == 0
            assert owner.get("k") == at.encode()
        assert '"k"' in run_command(server, "keys", "-o", "json", "--store", "localhost:4712").stdout
    assert run_command(server, "keys", "--store", "localhost:4712").exit_code == 1


def test_a_token_for_a_store(sockets: Path, tmp_path: Path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    keys.write_text("a:a-secret-that-is-long-enough\n")
    with tcpstore_server("--token-keys", str(keys), "--require-auth=all") as server:
        made = [
            run_command(None, "token", "create", "--token-keys", str(keys), *words).stdout.strip()
            for words in (["--store", "node7:4711"], ["--rights", "admin"])
        ]
        token.write_text(made[0])
        url = f"tcp://127.0.0.1:{server.port}"
        with TCPStore("node7", 4711, 1, True, LIMIT, server=url, token=made[1]) as owner:
            owner.set("key", "value")
            words = ["get", "key", "--token-file", str(token)]
            assert run_command(server, *words, "--store", "node7:4711").stdout == "value"
            assert run_command(server, *words).exit_code == 5


def test_traffic_in_a_store(sockets: Path) -> None:
    """Through a relay, because what makes it knows no stores; so the server has to have links."""
    words = ["bench", "--ranks", "2", "--requests", "20", "--ops", "set", "--store", "node7:4711"]
    with (
        tcpstore_server() as server,
        TCPStore("node7", 4711, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}"),
    ):
        done = run_command(server, *words, "-o", "json", "--timeout", str(LIMIT))
        assert json.loads(done.stdout)["complete"], done.output
        look = look_at(Path(json.loads(server.ready)["admin"]), LIMIT, store="node7:4711")
        assert look.stats.commands["SET"] >= 20


def test_a_store_that_is_not_there(server: Server) -> None:
    """What waits for its server waits for its store."""
    named = ["--store", "none:1"]
    for words in (["keys"], ["num-keys"], ["check", "k"]):
        done = run_command(server, *words, *named, "--timeout", "-1")
        assert (done.exit_code, "there is no store 'none:1'" in done.stderr) == (1, True), done.output
    for words in (["get", "k"], ["keys", "--wait"]):
        done = run_command(server, *words, *named, "--timeout", "0.3")
        assert (done.exit_code, "the store 'none:1' has not been created there" in done.stderr) == (4, True)
    done = run_command(server, "get", "k", "--store", "x" * 2000)
    assert (done.exit_code, "is too long for the name of a store" in done.output) == (2, True)


def test_a_command_waits_for_a_store(server: Server) -> None:
    found: list[Result] = []
    words = ["get", "k", "--store", "later:1", "--timeout", str(LIMIT)]
    waiting = threading.Thread(target=lambda: found.append(run_command(server, *words)))
    waiting.start()
    with TCPStore("later", 1, 1, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        store.set("k", "v")
        waiting.join(LIMIT)
    assert found[0].stdout == "v"


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
    assert "is waiting for the store late:1" in run_command(server, "who").stdout
    with TCPStore("late", 1, None, True, LIMIT, server=url):
        rank.join()


@pytest.fixture
def two(server: Server, owner: TCPStore) -> Iterator[Server]:
    """A server with a key in the store without a name and another one in `node7:4711`."""
    owner.set("larger", b"x" * 1000)
    assert owner.check(["larger"])
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, server="") as nameless:
        nameless.set("nameless", "value")
        assert nameless.check(["nameless"])
        yield server


def test_the_keys_of_a_store(two: Server) -> None:
    named = ("--store", "node7:4711")
    assert run_command(two, "keys").stdout.split() == ["nameless"]
    assert run_command(two, "keys", *named).stdout.split() == ["key", "larger"]
    assert "larger" in run_command(two, "keys", "--sort", "size", *named).stdout
    assert "larger" not in run_command(two, "keys", "--sort", "size").stdout
    (found,) = json.loads(run_command(two, "stores", "-o", "json").stdout)
    assert found["sessions"] == 1, "whoever looks at the keys does not stay in the store"


def test_stat_of_a_store(two: Server) -> None:
    found = json.loads(run_command(two, "stat", "-o", "json", "--store", "node7:4711").stdout)
    assert found.pop("time") > 0
    assert 1000 < found.pop("bytes") < 10_000
    assert found == {"store": "node7:4711", "sessions": 1, "waiting": 0, "joined": 1, "keys": 3}
    heading, columns, row = run_command(two, "stat", "--store", "node7:4711").stdout.splitlines()
    assert heading == "store node7:4711"
    assert columns.split() == ["SESSIONS", "WAITING", "JOINED", "KEYS", "BYTES"]
    assert row.split()[:4] == ["1", "0", "1", "3"]
    assert json.loads(run_command(two, "stat", "-o", "json").stdout)["keys"] == 4


def test_top_of_a_store(two: Server) -> None:
    everything = json.loads(run_command(two, "top", "-o", "json").stdout)
    assert [(one["name"], one["joined"], one["keys"]) for one in everything["stores"]] == [("node7:4711", 1, 3)]
    assert everything["other_stores"]["stores"] == 0
    assert everything["largest"][0] == {"key": "larger", "bytes": 1000, "store": "node7:4711"}
    assert {"key": "nameless", "bytes": 5, "store": None} in everything["largest"]
    assert everything["joined"] == 0
    found = json.loads(run_command(two, "top", "-o", "json", "--store", "node7:4711").stdout)
    assert [one["key"] for one in found["largest"]] == ["larger", "key", "init/"]
    assert (found["joined"], found["now"]["store"], "stores" in found) == (1, "node7:4711", False)


@pytest.mark.parametrize("store", [None, "node7:4711"])
def test_the_screen_of_top(two: Server, store: str | None) -> None:
    look = look_at(Path(json.loads(two.ready)["admin"]), LIMIT, "waits", "largest", "oldest_stores", store=store)
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=False)
    console.print(screen(look, between(look.stats, look.stats), None, 40, store))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("store node7:4711" in text, "OLDEST STORES" in text) == (store is not None, store is None)
    assert ("nameless" in text, "larger" in text) == (store is None, True)
    if store is None:
        assert "0 ranks have joined the unnamed store" in text
        assert re.search(r"^node7:4711 +1 of 1 +1 +3 ", text, re.MULTILINE)


def test_a_monitor_says_which_store(two: Server, owner: TCPStore) -> None:
    stopped = threading.Event()

    def work() -> None:
        with TCPStore("127.0.0.1", two.port, timeout=LIMIT, server="") as nameless:
            while not stopped.wait(0.01):
                owner.set("named", "x")
                nameless.set("nameless", "x")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        lines = run_command(two, "monitor", "--count", "20").stdout.splitlines()
        only = json_lines(run_command(two, "monitor", "--count", "5", "-o", "json", "--store", "node7:4711"))
    finally:
        stopped.set()
        thread.join()
    assert {line.endswith("in store node7:4711") for line in lines if " nameless " in line} == {False}
    assert {line.endswith("in store node7:4711") for line in lines if " named " in line} == {True}
    assert {one["store"] for one in only} == {"node7:4711"}


def test_others_are_mentioned(two: Server) -> None:
    for words in (["who", "--missing"], ["waiters"]):
        last = run_command(two, *words).stdout.splitlines()[-1]
        assert last.startswith("not shown: 1 connection in 1 named store; list the stores with 'tcpstore stores'"), (
            words
        )
        assert last.endswith("--store node7:4711")
        assert "not shown" not in run_command(two, *words, "--store", "node7:4711").stdout


COMMANDS = (
    ["who"], ["who", "--missing"], ["waiters"], ["stat"], ["top", "-o", "json"], ["keys"], ["keys", "--sort", "size"],
    ["monitor"],
)  # fmt: skip


def test_an_unknown_store_is_one_line(server: Server) -> None:
    for words in COMMANDS:
        done = run_command(server, *words, "--store", "nothing")
        assert (done.exit_code, done.stdout) == (1, ""), words
        (line,) = done.stderr.splitlines()
        assert "there is no store 'nothing'" in line


def json_lines(done: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in done.stdout.splitlines()]
