"""Servers that stand by, and clients and relays that find the one that serves."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

import tcpstore_async
from conformance.frames import READY, auth, check, get, link, ping, set_, wait
from server.test_persistence import calling, waiters
from standby import Moving, Replicated, standing_by
from support import LIMIT, RawPeer, free_port, tcpstore, tcpstore_relay
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.client import connect as connecting
from tcpstore_async.client.connect import connect, connect_blocking
from tcpstore_async.client.server_url import parse_server_url
from tcpstore_async.client.servers import Servers, StandsByError
from tcpstore_async.client.store_name import StoreName, name_of
from tcpstore_async.relay.running import relay
from tcpstore_async.serving import serve
from tcpstore_async.wire.commands import SERVER_KEY

pytestmark = pytest.mark.slow

KINDS = ["async", "sync", "relay"]


def urls(*ports: int) -> str:
    return "tcp://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def opened(kind: str, url: str, name: str = "job", **given: Any) -> Any:
    """A named store's client of this kind."""
    if kind == "async":
        return await tcpstore_async.AsyncTCPStore.connect(name, 1, server=url, timeout=LIMIT)
    make = functools.partial(tcpstore_async.TCPStore, name, 1, server=url, timeout=LIMIT, **given)
    return await asyncio.to_thread(make)


async def called(how: Any, *given: Any, **named: Any) -> Any:
    return await (how(*given, **named) if how is connect else asyncio.to_thread(how, *given, **named))


# The server


async def test_what_a_server_that_stands_by_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Stock clients begin with PING: the closed connection has them try again, as they do without a server."""
    keys = TokenKeys([("k1", b"a secret that nobody knows")])

    def talk(port: int, *commands: bytes) -> bytes:
        with RawPeer(port) as peer:
            peer.send(b"".join(commands))
            with peer.socket.makefile("rb") as replies:
                return replies.read()

    refused = {
        "PING": ping(b"1234"),
        "CHECK of 'k'": check(b"/k"),
        "GET of 'k'": get(b"/k"),
        "WAIT": wait(b"/k"),
        "SET": set_(b"/k", b""),
    }
    async with standing_by("10.0.0.1:29500") as standby:
        standby.store.hub.auth.authenticate = lambda token: keys.check(token, 0.0)
        token = keys.create().encode()
        for named, command in refused.items():
            for first, count in ((b"", 0), (auth(token), 1)):
                replies = await asyncio.to_thread(talk, standby.port, first, command)
                assert bool(replies) == bool(count)
                assert f"{named} is not executed, as this server stands by; 10.0.0.1:29500 serves" in caplog.text
                caplog.clear()
        with await asyncio.to_thread(RawPeer, standby.port) as peer:

            async def ask(data: bytes) -> bytes:
                return await asyncio.to_thread(peer.ask_value, data)

            assert await asyncio.to_thread(peer.ask, check(SERVER_KEY), 1) == READY
            assert json.loads(await ask(get(SERVER_KEY)))["elsewhere"] == "10.0.0.1:29500"
            standby.links.elsewhere = ""
            assert json.loads(await ask(get(SERVER_KEY)))["elsewhere"] == ""
            for first in (b"", auth(token)):
                if first:
                    await ask(first)
                reply = json.loads(await ask(link((b"version", b"2"), (b"id", bytes(16)), (b"secret", bytes(16)))))
                assert (reply["status"], reply["server"]) == ("elsewhere", "")
        assert not standby.links.links
        assert not standby.links.singles
        assert not standby.store.keyspace.values


# First connections


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_follows_the_server_that_stands_by(kind: str) -> None:
    """With one address or several; a relay, too."""
    async with serve() as server, standing_by(f"127.0.0.1:{server.port}") as standby:
        for given in (urls(standby.port), urls(free_port(), standby.port), urls(standby.port, server.port)):
            async with relay(parse_server_url(given).all()) as front:
                url = urls(front.port) if kind == "relay" else given
                owner = await opened("sync", url, is_master=True)
                store = await opened("sync" if kind == "relay" else kind, url)
                await calling(store)("set", "key", b"value")
                assert await calling(owner)("get", "key") == b"value"
                await calling(store)("close")
                await calling(owner)("close")


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_server_that_serves_later(kind: str) -> None:
    """Nobody serves at first, or the one that does is not there yet."""
    later = free_port()
    for told in ("", f"127.0.0.1:{later}"):
        given: dict[str, Any] = {} if kind == "async" else {"is_master": True}
        async with standing_by(told) as standby:
            opening = asyncio.ensure_future(opened(kind, urls(standby.port), **given))
            while standby.accepted < 4:
                await asyncio.sleep(0)
            async with serve(port=later) as server:
                standby.links.elsewhere = f"127.0.0.1:{server.port}"
                owner = await opened("sync", urls(later), is_master=True) if kind == "async" else None
                store = await opening
                await calling(store)("set", "key", b"value")
                for one in (store, owner):
                    if one is not None:
                        await calling(one)("close")


@pytest.mark.parametrize("how", [connect, connect_blocking])
async def test_an_error_names_each_server(how: Any) -> None:
    """Two that name each other are tried with pauses in between; the third one refuses."""
    nobody = free_port()
    async with standing_by() as one, standing_by(f"127.0.0.1:{one.port}") as other:
        one.links.elsewhere = f"127.0.0.1:{other.port}"
        servers = Servers(("127.0.0.1", one.port), ("127.0.0.1", nobody))
        with pytest.raises(DistNetworkError) as failed:
            await called(how, servers, Deadline(1.0))
        text = str(failed.value)
        assert f"(127.0.0.1, {one.port}), (127.0.0.1, {nobody}), (127.0.0.1, {other.port})" in text
        assert f"127.0.0.1:{one.port}: it stands by, and 127.0.0.1:{other.port} serves" in text
        assert f"127.0.0.1:{other.port}: it stands by, and 127.0.0.1:{one.port} serves" in text
        assert f"127.0.0.1:{nobody}: Connection refused" in text
        assert one.accepted < 20


async def test_a_server_that_does_not_answer_delays_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be gone."""
    monkeypatch.setattr(connecting, "_PATIENCE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with serve() as server:
            for how in (connect, connect_blocking):
                servers = Servers(silent.getsockname(), ("127.0.0.1", server.port))
                peer, _ = await called(how, servers, Deadline(LIMIT))
                peer.close()
                assert servers.first == ("127.0.0.1", server.port)


@pytest.mark.parametrize("how", [connect, connect_blocking])
async def test_a_rank_whose_server_ends_while_it_waits_for_its_store(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer delays it as little as before."""
    monkeypatch.setattr(connecting, "_PATIENCE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with serve() as first, serve() as second:
            owner = await opened("sync", urls(second.port), "127.0.0.1", is_master=True)
            servers = Servers(("127.0.0.1", first.port), silent.getsockname(), ("127.0.0.1", second.port))
            name = StoreName(name_of("127.0.0.1", 1))
            entering = asyncio.ensure_future(called(how, servers, Deadline(LIMIT), name=name))
            while name.name not in first.named.waiting:
                await asyncio.sleep(0)
            first.stop()
            peer, _ = await entering
            peer.close()
            assert servers.first == ("127.0.0.1", second.port)
            await calling(owner)("close")


async def test_one_attempt_is_one_at_each() -> None:
    async with serve() as server:
        servers = Servers(("127.0.0.1", free_port()), ("127.0.0.1", server.port))
        peer, _ = await connect(servers, Deadline(0.0))
        peer.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(Servers(*[("127.0.0.1", free_port()) for _ in range(2)]), Deadline(LIMIT), True)


def test_what_is_remembered() -> None:
    servers = Servers(("a", 1), ("b", 2), ("a", 1))
    for number in range(20):
        servers.note(StandsByError(f"c:{number + 1}"))
        servers.note(StandsByError("not an address"))
        servers.note(StandsByError(""))
        servers.note(OSError())
        assert servers.first == ("c", number + 1)
    assert servers.all() == [("a", 1), ("b", 2), *[("c", number) for number in range(13, 21)]]
    tried = []
    for server in servers.round():
        tried.append(server)
        servers.note(StandsByError("b:2"))
    assert tried == [("c", 20), ("b", 2), ("a", 1), *[("c", number) for number in range(13, 20)]]
    servers.leave(("a", 1))
    assert servers.first == ("b", 2)
    servers.leave(("b", 2))
    assert servers.first == ("c", 13)
    servers.note(StandsByError("c:20"))
    servers.leave(("c", 20))
    assert str(servers.url(True)).startswith("tcps://a:1,b:2,c:13,")


# When another server takes over


@pytest.mark.parametrize("kind", KINDS)
async def test_a_takeover_is_a_pause(kind: str, tmp_path: Path) -> None:
    """Calls are executed once, a wait goes on, and so does a named store."""
    with Moving(tmp_path / "journal") as moving:
        assert isinstance(moving, Moving)
        async with standing_by(moving.address) as standby:
            given = urls(moving.port, standby.port)
            with tcpstore_relay(given) as front:
                url = urls(front.port) if kind == "relay" else given
                one = "sync" if kind == "relay" else kind
                owner = await opened("sync", url, is_master=True)
                store, other = await opened(one, url), await opened(one, url)
                call = calling(store)
                assert await call("add", "count", 5) == 5
                await calling(owner)("set", "key", "value")
                awaited = asyncio.ensure_future(calling(other)("wait", ["later"], LIMIT))
                while not await asyncio.to_thread(waiters, moving.port, "--store", "job:1"):
                    pass
                for turn in range(2):
                    moving.kill()
                    standby.links.elsewhere = ""
                    adding = asyncio.ensure_future(call("add", "count", 1))
                    accepted = standby.accepted
                    while standby.accepted < accepted + 2:
                        await asyncio.sleep(0)
                    await asyncio.to_thread(moving.start)
                    standby.links.elsewhere = moving.address
                    assert await adding == 6 + turn
                    assert await call("get", "key") == b"value"
                    assert not awaited.done()
                [found] = await asyncio.to_thread(waiters, moving.port, "--store", "job:1")
                assert found["key"] == "later"
                await call("set", "later", b"")
                await awaited
                for each in (store, other, owner):
                    await calling(each)("close")


async def test_a_server_of_another_store_ends_no_session(tmp_path: Path) -> None:
    """It does not know the link, and has another instance; it is asked first, as it was told."""
    with Moving(tmp_path / "journal") as moving:
        async with serve() as other, standing_by() as standby:
            given = Servers(("127.0.0.1", moving.port), ("127.0.0.1", standby.port))
            async with relay(given.all()) as front:
                stores = [
                    await tcpstore_async.AsyncTCPStore._connect(servers, LIMIT, None, False, None, None)
                    for servers in (given, Servers(("127.0.0.1", front.port)))
                ]
                for number, store in enumerate(stores):
                    assert await store.add("count", 1) == number + 1
                moving.kill()
                standby.links.elsewhere = f"127.0.0.1:{other.port}"
                adding = asyncio.gather(*[store.add("count", 1) for store in stores])
                while other.accepted < 4:
                    await asyncio.sleep(0)
                await asyncio.to_thread(moving.start)
                standby.links.elsewhere = f"127.0.0.1:{moving.port}"
                assert sorted(await adding) == [3, 4]
                assert not other.store.keyspace.values
                for store in stores:
                    await store.close()


# Commands, and what travels


def test_commands(tmp_path: Path) -> None:
    """They find the server by the one that stands by, and say where it is."""
    with Replicated(tmp_path / "journal") as replicated:
        standby = replicated.endpoint.rpartition(",")[2]
        assert tcpstore("set", "key", "value", "--url", standby).returncode == 0
        replicated.restart()
        for url in (standby, f"tcp://{replicated.endpoint}", f"tcp://{replicated.endpoint.replace(',', ',tcp://')}"):
            done = tcpstore("get", "key", "--url", url)
            assert (done.returncode, done.stdout) == (0, b"value"), done.stderr
        found = json.loads(tcpstore("info", "-o", "json", "--url", standby).stdout)
        assert (found["host"], found["port"]) == ("127.0.0.1", replicated.port)
        done = tcpstore(
            "bench", "--url", f"tcp://{replicated.endpoint}", "--ranks", "2", "--ops", "set", "--requests", "4"
        )
        assert done.returncode == 0, done.stderr
        nobody = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
        done = tcpstore("ping", "--url", nobody)
        assert (done.returncode, b"Connection refused" in done.stderr) == (4, True)
        done = tcpstore("record", "--upstream", nobody, "-w", str(tmp_path / "recording"))
        assert (done.returncode, b"has several servers; give one" in done.stderr) == (2, True)
