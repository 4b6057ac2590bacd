"""Addresses that are names on a server: stores of both clients, on both servers, through relays and broken links."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client.test_resumed import resetter
from support import LIMIT, Server, free_port, in_child, tcpstore_relay, tcpstore_server, torch_server, until
from tcpstore_async import AsyncTCPStore, DistNetworkError, TCPStore
from tcpstore_async.client import aio, connect
from tcpstore_async.client.admin import ask
from tcpstore_async.client.interfaces import global_addresses
from tcpstore_async.client.store_name import (
    StoreEndedError,
    attempt_from_environment,
    find_server,
    name_of,
    this_network,
)
from tcpstore_async.server.backends import BACKENDS

pytestmark = pytest.mark.measured


@pytest.fixture(scope="module", params=BACKENDS)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with tcpstore_server("--backend", request.param) as server:
        yield server.port


@pytest.fixture(scope="module")
def linking_port() -> Iterator[int]:
    """Of a server whose sessions survive a broken connection: the threaded one has no links."""
    with tcpstore_server() as server:
        yield server.port


@pytest.fixture
def url(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A host that no other test uses."""
    return str(request.node.name).translate(str.maketrans("[]_ ", "----"))


def opened(make: Callable[[], TCPStore]) -> tuple[threading.Thread, list[TCPStore]]:
    found: list[TCPStore] = []
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    return thread, found


# quirk: named-stores
def test_ranks_meet_under_a_name(url: str, name: str) -> None:
    """In whatever order they come."""

    def rank(number: int) -> bytes:
        with TCPStore(name, 29500, 4, number == 0, LIMIT, server=url) as store:
            if number == 0:
                store.set("k", "v")
            value = store.get("k")
            store.barrier("done", 4)
            return value

    with ThreadPoolExecutor(4) as pool:
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            assert list(pool.map(rank, order)) == [b"v"] * 4


def test_the_next_store_of_a_name_is_empty(url: str, name: str) -> None:
    for _ in range(3):
        with TCPStore(name, 1, 1, True, LIMIT, server=url) as store:
            assert not store.check(["k"])
            store.set("k", "v")


def test_nothing_of_one_store_is_visible_in_another(url: str, port: int, name: str) -> None:
    with (
        TCPStore(name, 1, None, True, LIMIT, server=url) as first,
        TCPStore(name, 2, None, True, LIMIT, server=url) as second,
        TCPStore("127.0.0.1", port, timeout=LIMIT, server="") as stock,
    ):
        first.set(name, "1")
        first.queue_push("q", "x")
        for other in (second, stock):
            assert not other.check([name])
            assert name not in other.list_keys()
            assert other.queue_len("q") == 0
        assert (first.host, first.port) == (name, 1)
        with first.clone() as clone:
            assert (clone.host, clone.port, clone.get(name)) == (name, 1, b"1")


async def test_the_asyncio_client(url: str, name: str) -> None:
    waiting = asyncio.ensure_future(AsyncTCPStore.connect(name, 1, timeout=LIMIT, server=url))
    with await asyncio.to_thread(TCPStore, name, 1, None, True, LIMIT, server=url) as owner:
        async with await waiting as store, await store.clone() as clone:
            await store.set("k", "v")
            assert await asyncio.to_thread(owner.get, "k") == b"v"
            fetched = asyncio.ensure_future(clone.get("later"))
            await store.set("later", "1")  # on a connection beside the one that waits
            assert await fetched == b"1"


def test_a_second_owner_learns_of_the_first(url: str, name: str) -> None:
    with TCPStore(name, 1, None, True, LIMIT, server=url):
        with pytest.raises(
            DistNetworkError,
            match=rf"EADDRINUSE, address already in use.*already has an owner \(host .*, pid {os.getpid()}\), "
            r"which created it \d+\.\d s ago; that is this process: close that store",
        ):
            TCPStore(name, 1, None, True, LIMIT, server=url)
        with TCPStore(name, 2, None, True, LIMIT, server=url):
            pass


def test_stores_of_a_process_can_own_one_together(url: str, name: str) -> None:
    first = TCPStore(name, 1, None, True, LIMIT, multi_tenant=True, server=url)
    second = TCPStore(name, 1, None, True, LIMIT, multi_tenant=True, server=url)
    first.set("k", "v")
    first.close()
    assert second.get("k") == b"v"
    with TCPStore(name, 1, timeout=LIMIT, server=url) as rank:
        assert rank.get("k") == b"v"
    second.close()
    with pytest.raises(DistNetworkError, match=r"the store .* has not been created"):
        TCPStore(name, 1, timeout=0.2, server=url)


def test_nobody_owns_it(url: str, name: str) -> None:
    with pytest.raises(DistNetworkError, match=rf"the store '{name.lower()}:1' has not been created there"):
        TCPStore(name, 1, timeout=0.2, server=url)
    with TCPStore(name, 1, None, True, LIMIT, server=url):
        pass


def test_ranks_of_a_closed_store_have_time_to_leave(url: str, name: str) -> None:
    owner = TCPStore(name, 1, None, True, LIMIT, server=url)
    rank = TCPStore(name, 1, timeout=LIMIT, server=url)
    owner.set("k", "old")
    assert rank.get("k") == b"old"
    owner.close()
    assert rank.get("k") == b"old"
    with TCPStore(name, 1, None, True, LIMIT, server=url) as following:
        following.set("k", "new")
        rank.set("late", "1")
        assert rank.get("k") == b"old"
        assert not following.check(["late"])
    rank.close()


OWNER = """
import sys
from tcpstore_async import TCPStore
store = TCPStore(sys.argv[1], 1, None, True, 60.0, server=sys.argv[2])
store.set("k", "old")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(url: str, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, name, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["127.0.0.1"])
def test_errors_spell_an_address_on_loopback_as_its_master_does(
    url: str, name: str, owner: subprocess.Popen[str]
) -> None:
    """In front, the name has this host's boot id, its network and the user."""
    late = TCPStore(name, 1, timeout=LIMIT, server=url)
    errors = []
    for host, port, master in ((name, 2, False), (name, 1, True), ("node7", 1, False)):
        with pytest.raises(DistNetworkError) as failed:
            TCPStore(host, port, None, master, LIMIT if master else 2.0, server=url)
        errors.append(str(failed.value))
    owner.kill()
    with late, pytest.raises(DistNetworkError) as failed:
        late.get("never")
    errors.append(str(failed.value))
    assert "wait until that store ends" in errors[1]
    boot = this_network().partition("/")[0]
    assert [error for error in errors if "localhost:" not in error or boot in error] == []


def test_a_killed_owner_ends_its_store(url: str, name: str, owner: subprocess.Popen[str]) -> None:
    """And what was left of its job changes nothing in the next store of that name."""
    late = TCPStore(name, 1, timeout=LIMIT, server=url)
    assert late.get("k") == b"old"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    error = rf"the store '{name.lower()}:1' ended: its owner \(host .*, pid {owner.pid}\) left"
    with pytest.raises(DistNetworkError, match=error):
        late.get("never")
    with TCPStore(name, 1, None, True, LIMIT, server=url) as following:
        assert following.list_keys() == []
        with pytest.raises(DistNetworkError, match=error):
            late.set("k", "late")
        with pytest.raises(DistNetworkError, match=error):
            late.clone()
        assert following.list_keys() == []
    late.close()


async def test_the_asyncio_client_says_why_its_store_has_ended(
    url: str, name: str, owner: subprocess.Popen[str]
) -> None:
    """To the calls that wait then, to those on its other connections, and to later ones."""
    async with await AsyncTCPStore.connect(name, 1, timeout=LIMIT, server=url) as store:
        await store.set("k", "v")
        waiting = [asyncio.ensure_future(store.get(key)) for key in ("never", "nor this")]
        assert await store.get("k") == b"v"
        owner.kill()
        for call in waiting:
            with pytest.raises(DistNetworkError, match=f"the store '{name.lower()}:1' ended: its owner .* left"):
                await call
        with pytest.raises(DistNetworkError, match="ended: its owner"):
            await store.get("k")


async def test_a_further_connection_finds_that_the_store_has_ended(
    url: str, name: str, owner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the others have noticed: a call that needs it does not say that it has timed out."""

    async def ended(*_: object, **__: object) -> object:
        raise StoreEndedError("it has ended")

    async with await AsyncTCPStore.connect(name, 1, timeout=LIMIT, server=url) as store:
        waiting = asyncio.ensure_future(store.get("never"))
        await asyncio.sleep(0)
        monkeypatch.setattr(aio, "connect", ended)
        with pytest.raises(DistNetworkError, match="it has ended"):
            await store.get("nor this")
        waiting.cancel()


def test_an_owner_that_exits_gives_time(url: str, name: str, owner: subprocess.Popen[str]) -> None:
    with TCPStore(name, 1, timeout=LIMIT, server=url) as rank:
        assert owner.stdin is not None
        owner.stdin.close()
        assert owner.wait() == 0
        assert rank.get("k") == b"old"


@pytest.mark.unmeasured
def test_a_forked_child_owns_nothing(url: str, name: str) -> None:
    with TCPStore(name, 1, None, True, LIMIT, server=url) as store:
        store.set("k", "v")
        assert in_child(lambda: (store.get("k"), store.close())) == "(b'v', None)"  # type: ignore[func-returns-value]
        assert store.get("k") == b"v"


def test_ranks_behind_a_relay(port: int, name: str) -> None:
    with tcpstore_relay(port) as relay:
        url = f"tcp://127.0.0.1:{relay.port}"
        thread, found = opened(lambda: TCPStore(name, 1, timeout=LIMIT, server=url))
        with TCPStore(name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{port}") as owner:
            thread.join()
            found[0].set("k", "v")
            assert owner.get("k") == b"v"
        found[0].close()
        with TCPStore(name, 1, 1, True, LIMIT, server=url) as owner:
            assert not owner.check(["k"])


@pytest.mark.parametrize("called", [True, False], ids=["", "that has called nothing"])
def test_a_store_survives_a_broken_connection_of_its_owner(linking_port: int, name: str, called: bool) -> None:
    port = linking_port
    with resetter(port) as proxy:
        owner = TCPStore(name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{proxy.port}")
        with TCPStore(name, 1, timeout=LIMIT, server=f"tcp://127.0.0.1:{port}") as rank:
            (owner if called else rank).set("k", "v")
            assert rank.get("k") == b"v"
            proxy.reset()
            assert rank.add("n", 1) == 1
            assert owner.add("n", 1) == 2
        owner.close()


def test_a_name_whose_owner_was_killed_in_the_middle_of_a_reply(name: str) -> None:
    """To the server that is a broken connection: who is next waits until the owner is back, or its time is over."""
    with tcpstore_server("--link-grace", "2") as server, resetter(server.port) as proxy:
        url = f"tcp://127.0.0.1:{server.port}"
        killed = TCPStore(name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{proxy.port}")
        killed.set("k", "old")
        assert killed.get("k") == b"old"
        proxy.refuse()
        proxy.reset()
        until(lambda: suspended(server))
        thread, found = opened(lambda: TCPStore(name, 1, timeout=LIMIT, server=url))
        with TCPStore(name, 1, None, True, LIMIT, server=url) as following:
            assert following.list_keys() == []
            thread.join()
            found[0].set("k", "new")
            assert following.get("k") == b"new"
        found[0].close()
        killed.close()


def suspended(server: Server) -> int:
    """How many clients of a server have lost their connections, and may come back."""
    facts = [json.loads(line) for line in ask(Path(json.loads(server.ready)["admin"]), ["stats"], LIMIT)]
    return sum(fact["stats"]["links"]["suspended"] for fact in facts if "stats" in fact)


def test_port_0_is_a_free_name(url: str) -> None:
    with TCPStore("localhost", 0, None, True, LIMIT, server=url) as store:
        assert store.port
        with TCPStore("127.0.0.1", store.port, timeout=LIMIT, server=url) as rank:
            rank.set("k", "v")
            assert store.get("k") == b"v"


def test_attempts(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "2")
    with TCPStore(name, 1, None, True, LIMIT, server=url) as owner:
        monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
        with pytest.raises(DistNetworkError, match="belongs to attempt 2, but this rank belongs to attempt 1"):
            TCPStore(name, 1, timeout=LIMIT, server=url)
        monkeypatch.setenv("TCPSTORE_ATTEMPT", "3")
        with pytest.raises(DistNetworkError, match="has not been created there by attempt 3 of the job"):
            TCPStore(name, 1, timeout=0.1, server=url)
        thread, found = opened(lambda: TCPStore(name, 1, timeout=LIMIT, server=url))
        owner.set("k", "old")
    with TCPStore(name, 1, None, True, LIMIT, server=url):
        thread.join()
        assert found[0].list_keys() == []
    found[0].close()


def test_what_no_server_takes_is_an_error_at_once(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("x" * 511, "é" * 256):
        with pytest.raises(ValueError, match=r"is too long for the name of a store: 51[34] bytes \(max 512\)"):
            TCPStore(host, 1, None, True, LIMIT, server=url)
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "x" * 65)
    with pytest.raises(ValueError, match=r"TCPSTORE_ATTEMPT is too long: 65 bytes \(max 64\)"):
        TCPStore(name, 1, timeout=LIMIT, server=url)


@pytest.mark.parametrize("backend", ["libuv", "legacy"])
def test_a_server_without_names(backend: str, name: str) -> None:
    """PyTorch's legacy server closes the connection when it is asked who it is."""
    pytest.importorskip("torch")
    with torch_server(backend) as port, pytest.raises(DistNetworkError, match="does not support named stores"):
        TCPStore(name, 1, timeout=LIMIT, server=f"tcp://127.0.0.1:{port}")


def test_the_variable(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER_URL", url)
    with TCPStore(name, 1, 1, True, LIMIT) as store:
        store.set("k", "v")
        with TCPStore(name, 1, timeout=LIMIT) as rank:
            assert rank.get("k") == b"v"
    with (
        TCPStore("127.0.0.1", 0, 1, True, LIMIT, server="") as hosted,
        TCPStore("127.0.0.1", hosted.port, timeout=LIMIT, server="") as rank,
    ):
        hosted.set("k", "v")
        assert rank.get("k") == b"v"


@pytest.mark.parametrize("client", ["TCPStore", "AsyncTCPStore"])
def test_only_the_variable_of_the_commands_is_set(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a store that nobody hosts says so, unless its address is meant."""
    monkeypatch.delenv("TCPSTORE_SERVER_URL", raising=False)
    monkeypatch.setenv("TCPSTORE_URL", "tcp://node7:29500")
    port = free_port()

    def error(server: str | None) -> str:
        with pytest.raises(DistNetworkError) as raised:
            if client == "TCPStore":
                TCPStore("127.0.0.1", port, timeout=0.1, server=server)
            else:
                asyncio.run(AsyncTCPStore.connect("127.0.0.1", port, timeout=0.1, server=server))
        return str(raised.value)

    advice = " (TCPSTORE_URL is for the tcpstore command; to have named stores on that server, set TCPSTORE_SERVER_URL)"
    assert error(None).endswith(advice)
    assert "TCPSTORE" not in error("")
    monkeypatch.delenv("TCPSTORE_URL")
    assert "TCPSTORE" not in error(None)


def test_the_agents_own_store_needs_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is always an address."""
    port = free_port()
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for variable, text in {**agent, "TCPSTORE_URL": "tcp://node7:29500"}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(DistNetworkError) as raised:
        TCPStore("127.0.0.1", port, timeout=0.1)
    assert "TCPSTORE" not in str(raised.value)


# Names


@pytest.mark.parametrize("url", [
    "node:29500", "http://node:1", "tcp://node", "tcp://:1", "tcp://node:1/x", "tcp://a:1,b", "tcp://node:x",
    "tcp://u@node:1", "tcp://a:1,", "tcp://a:1,tcps://b:1", "a:1,tcp://b:1",
])  # fmt: skip
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(ValueError, match="is not of the form tcp://HOST:PORT"):
        find_server(url)


def test_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCPSTORE_SERVER_URL", raising=False)
    assert find_server(None) is None
    assert find_server("") is None
    monkeypatch.setenv("TCPSTORE_SERVER_URL", "tcps://[::1]:29500")
    found = find_server(None)
    assert found is not None
    assert (found.host, found.port, found.tls, str(found)) == ("::1", 29500, True, "tcps://[::1]:29500")
    assert find_server("") is None


@pytest.mark.parametrize("url", ["tcps://a:1,[::1]:2,c:3", "tcps://a:1, tcps://[::1]:2,tcps://c:3/"])
def test_several_servers(url: str) -> None:
    found = find_server(url)
    assert found is not None
    assert (found.host, found.port, found.tls, found.others) == ("a", 1, True, (("::1", 2), ("c", 3)))
    assert str(found) == "tcps://a:1,[::1]:2,c:3"
    assert find_server(str(found)) == found


def test_what_an_address_is_called() -> None:
    assert name_of("Node1.Example.", 29500) == "node1.example:29500"
    assert name_of("fe80::1", 1) == "[fe80::1]:1"
    assert name_of("2001:DB8:0:0::1", 1) == name_of("2001:db8::1", 1) == "[2001:db8::1]:1"
    assert name_of("127.example", 1) == "127.example:1"
    assert name_of("localhost.example", 1) == "localhost.example:1"


@pytest.mark.parametrize("host", [
    "localhost", "127.0.0.1", "127.1.2.3", "127.1", "::1", "0.0.0.0", "0", "::", "", "0:0:0:0:0:0:0:1",
    "::ffff:127.0.0.1", "Localhost.", "node.localhost", "localhost.localdomain", "localhost4",
    "localhost6.localdomain6", "ip6-localhost", "ip6-loopback",
])  # fmt: skip
def test_a_loopback_address_is_local_however_it_is_written(host: str) -> None:
    assert name_of(host, 1) == f"{this_network()}/{os.getuid()}/localhost:1"


@pytest.mark.parametrize(("environment", "attempt"), [
    ({}, ""), ({"TCPSTORE_ATTEMPT": "3", "TORCHELASTIC_RESTART_COUNT": "1"}, "3"),
    ({"TORCHELASTIC_RESTART_COUNT": "1"}, "1"), ({"TORCHELASTIC_RESTART_COUNT": "1", "GROUP_WORLD_SIZE": "2"}, ""),
])  # fmt: skip
def test_the_attempt_of_a_process(environment: dict[str, Any], attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TCPSTORE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    assert attempt_from_environment() == attempt


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "", "0"])
# quirk: named-stores
def test_any_address_of_the_master(wildcard: str, url: str) -> None:
    """However its ranks spell it: an address, or a name that leads to one."""
    with TCPStore(wildcard, 4711, None, True, LIMIT, server=url) as owner:
        owner.set("k", "v")
        for host in ("127.0.0.2", "ip6-loopback", socket.gethostname(), *global_addresses()):
            with TCPStore(host, 4711, timeout=LIMIT, server=url) as rank, rank.clone() as clone:
                assert clone.get("k") == b"v"


async def test_ranks_wait_for_any_address_of_the_master(url: str) -> None:
    hosts = [socket.gethostname(), *global_addresses()]
    waiting = [asyncio.ensure_future(AsyncTCPStore.connect(host, 4712, timeout=LIMIT, server=url)) for host in hosts]
    threads = [opened(lambda host=host: TCPStore(host, 4712, timeout=LIMIT, server=url)) for host in hosts]  # type: ignore[misc]
    with await asyncio.to_thread(TCPStore, "0.0.0.0", 4712, None, True, LIMIT, server=url) as owner:
        await asyncio.to_thread(owner.set, "k", "v")
        for thread, found in threads:
            await asyncio.to_thread(thread.join)
            assert found[0].get("k") == b"v"
            found[0].close()
        for store in waiting:
            async with await store as rank:
                assert await rank.get("k") == b"v"


def test_who_waits_in_vain_is_told_which_stores_there_are(url: str) -> None:
    """Those of the same port, as they are when its time is over: behind NAT no address matches."""
    thread, errors = None, []

    def wait() -> None:
        try:
            TCPStore("node9", 4713, timeout=4.0, server=url)
        except DistNetworkError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    with (
        TCPStore("0.0.0.0", 4713, None, True, LIMIT, server=url),
        TCPStore("node7", 4713, None, True, LIMIT, server=url),
        TCPStore("node8", 4714, None, True, LIMIT, server=url),
    ):
        thread.join()
    who = rf"\(host {socket.gethostname()}, pid {os.getpid()}\)"
    [error] = errors
    assert re.search(
        rf"the store 'node9:4713' has not been created there; stores of that port there are node7:4713 {who}, "
        rf"0\.0\.0\.0:4713 {who}: give the address as the store's master gives it\.$",
        error,
    )


def test_a_name_that_cannot_be_resolved_yet(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up again: a pod's name comes to be after the pod."""
    monkeypatch.setattr(connect, "_LOOK_UP_AGAIN", 0.1)
    known = threading.Event()
    resolve = connect._resolve

    def later(host: str, port: int) -> list[Any]:
        if not known.is_set():
            raise OSError("not yet")
        return resolve("127.0.0.1", port)

    monkeypatch.setattr(connect, "_resolve", later)
    with TCPStore("0.0.0.0", 4715, None, True, LIMIT, server=url) as owner:
        thread, found = opened(lambda: TCPStore("pod-7", 4715, timeout=LIMIT, server=url))
        known.set()
        thread.join()
        found[0].set("k", "v")
        assert owner.get("k") == b"v"
        found[0].close()
