"""A join counts once, and a rank ends up on the server of its own round."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client.fakes import PROBE, STOCK, exactly, fake_server, greet, proxy_to, silent
from client.test_pops import Link
from support import LIMIT, blob, free_port, keys, tcpstore_server, torch_server, until
from tcpstore_async import DistNetworkError, DistStoreError, StoreTimeoutError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.client import requests
from tcpstore_async.client.brief_join import BriefJoin
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.sync_client import TCPClient
from tcpstore_async.server.master import host
from tcpstore_async.stores.rank import Rank
from tcpstore_async.wire.commands import JOINS_KEY
from tcpstore_async.wire.values import pack

pytestmark = [pytest.mark.slow, pytest.mark.measured]

WORKERS = b"init/"
IDENTITY = b'{"server":"tcpstore_async","version":"0","extension":2,"instance":"%s"}'


@pytest.fixture
def port() -> int:
    return free_port()


def counted(store: TCPStore) -> int:
    assert store._client is not None
    return int(store._client.call(requests.count(0)))


# Once


class Cutter(Link):
    """Cuts the first connections during the join: before the request arrives, or before its reply does."""

    times = 3
    before = False

    def _pass_on(self, peer: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.target), LIMIT) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            joined = False
            ends = {server: peer, peer: server}
            while True:
                for end in _ready(list(ends)):
                    data = end.recv(1 << 20)
                    joined = joined or (end is peer and WORKERS in data)
                    if not data or (joined and self.times > 0 and (self.before or end is server)):
                        self.times -= joined
                        return
                    ends[end].sendall(data)


def _ready(ends: list[socket.socket]) -> list[socket.socket]:
    return select.select(ends, [], [], LIMIT)[0]


@pytest.mark.parametrize("before", [True, False])
# quirk: lost-join
def test_a_rank_that_loses_its_connection_is_counted_once(before: bool) -> None:
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as look:
        cutter = Cutter(server.port, "q")
        cutter.before = before
        try:
            with TCPStore("127.0.0.1", cutter.port, 3, timeout=LIMIT) as store:
                assert counted(look) == 1
                assert store.check([]) is True
            assert cutter.connections == 4
        finally:
            cutter.stop()


def test_a_master_does_not_return_without_a_rank(port: int) -> None:
    """Its place used to be taken by a rank that was counted twice."""
    with ThreadPoolExecutor(1) as threads:
        master = threads.submit(TCPStore, "127.0.0.1", port, 3, True, 4.0)
        with TCPStore("127.0.0.1", port, timeout=LIMIT):
            pass  # it listens
        cutter = Cutter(port, "q")
        try:
            with TCPStore("127.0.0.1", cutter.port, 3, timeout=LIMIT), pytest.raises(DistStoreError, match="2/3"):
                master.result(LIMIT)
        finally:
            cutter.stop()


# quirk: lost-join
def test_pytorchs_server_is_joined_once() -> None:
    """It would count twice; so a connection lost during the join is an error, as with PyTorch's client."""
    with torch_server() as server_port, TCPStore("127.0.0.1", server_port, timeout=LIMIT) as look:
        cutter = Cutter(server_port, "q")
        try:
            with pytest.raises(DistNetworkError):
                TCPStore("127.0.0.1", cutter.port, 3, timeout=LIMIT)
            assert counted(look) == 1
            assert cutter.connections == 1
        finally:
            cutter.stop()


# quirk: lost-join
def test_a_server_that_closes_at_every_join_is_an_error() -> None:
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        assert store._client is not None
        store._client.call((requests.set_("k", "")[0], (WORKERS, blob(b"no number"))))
        with pytest.raises(
            DistNetworkError, match="closed 8 connections in a row while this rank was joining: see the server's log"
        ):
            TCPStore("127.0.0.1", server.port, 2, timeout=LIMIT)
        assert "closed the connection from" in server.log()


def test_a_rank_pauses_ever_longer_before_it_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.2 it connected 2,500 times a second to a server that closed at every join."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    rank = Rank(2, False, Deadline(-1))
    assert all(rank.pause() for _ in range(7))
    assert not rank.pause()
    assert "lost; the server closed 8 connections in a row" in str(rank.blame(DistNetworkError("lost")))
    assert pauses == [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    hurried = Rank(2, False, Deadline(1e-3))
    hurried.pause()
    assert max(pauses[7:], default=0.0) <= 1e-3


# The round


def early(port: int, code: str = "") -> subprocess.Popen[str]:
    """A rank in a separate process, which joins a world of two again and again."""
    script = f"import sys, tcpstore_async as t\nargs = '127.0.0.1', {port}, 2, False, {LIMIT}\n{code}"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


ROUNDS = """
store = None
for number in range(3):
    if {close} and store is not None:
        store.close()
    store = t.TCPStore(*args)
    store.set("rank", str(number))
    assert store.get("master") == b"%d" % number
"""


@pytest.mark.parametrize("close", [True, False])
# quirk: early-rank
def test_a_rank_that_makes_its_next_store_comes_to_the_next_round(port: int, close: bool) -> None:
    """Even while it still has the last store, as in `store = TCPStore(...)`."""
    with early(port, ROUNDS.format(close=close)) as rank:
        try:
            for number in range(3):
                with TCPStore("127.0.0.1", port, 2, True, LIMIT) as master:
                    assert master.get("rank") == b"%d" % number
                    master.set("master", str(number))
                    if number < 2:  # it has come too early
                        while counted(master) < 3:
                            assert rank.poll() is None
            assert rank.wait(LIMIT) == 0
        finally:
            rank.kill()


# quirk: early-rank
def test_a_rank_that_left_before_its_master_came_counts_as_another(port: int) -> None:
    """As in PyTorch: what has joined and left may as well have been the other rank of the world."""
    server = host(port, bind_host=None, listen_fd=None, multi_tenant=False, backend="uv", timeout=LIMIT)
    try:
        server.announce(2)
        TCPStore("127.0.0.1", port, 2, timeout=LIMIT).close()
        with TCPStore("127.0.0.1", port, 2, timeout=LIMIT) as again:
            assert counted(again) == 2
    finally:
        server.release()


ONE = "store = t.TCPStore(*args)\nprint('there', flush=True)\nsys.stdin.readline()"


# quirk: full-world
def test_a_rank_that_is_started_again_takes_its_place_at_once(port: int) -> None:
    """The server's count decides, not a clock: before 0.2 it waited for 10 s."""
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(TCPStore, "127.0.0.1", port, 2, True, -1)
        with early(port, ONE) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == "there\n"
            first.kill()
        with making.result(LIMIT) as master:
            look = (*requests.join(b""),)
            assert master._client is not None
            until(lambda: master._client is not None and master._client.call(look) == 1)
            with proxy_to(port) as proxy, early(proxy.port, ONE) as again:
                assert again.stdin is not None
                assert again.stdout is not None
                assert again.stdout.readline() == "there\n"
                assert b"\x42" + blob(JOINS_KEY) not in proxy.all_sent()  # it does not wait for a next round
                print(file=again.stdin, flush=True)
                assert again.wait(LIMIT) == 0
            assert counted(master) == 3


@pytest.mark.parametrize("why", ["agent", "other world"])
# quirk: full-world
def test_a_server_of_another_world_is_not_doubted(port: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as torchrun's. Nothing announces more ranks there, so waiting for a next round would take ten seconds."""
    if why == "agent":
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    nodes = 2 if why == "agent" else 1
    with ThreadPoolExecutor(3) as threads:
        agents = [threads.submit(TCPStore, "127.0.0.1", port, nodes, number == 0, LIMIT) for number in range(nodes)]
        stores = [agent.result(LIMIT) for agent in agents]
        with proxy_to(port) as proxy:
            ranks = [threads.submit(TCPStore, "127.0.0.1", proxy.port, 2, False, LIMIT) for _ in range(2)]
            stores += [rank.result(LIMIT) for rank in ranks]
            assert b"\x42" + blob(JOINS_KEY) not in proxy.all_sent()
        for store in reversed(stores):
            store.close()


def test_a_world_of_one_is_not_doubted(port: int) -> None:
    """It has its master only, so whoever else joins it, a tool say, is no rank of a next round."""
    with (
        TCPStore("127.0.0.1", port, 1, True, LIMIT),
        proxy_to(port) as proxy,
        TCPStore("127.0.0.1", proxy.port, 1, False, LIMIT) as tool,
    ):
        assert counted(tool) == 2
        assert JOINS_KEY not in proxy.all_sent()


# quirk: full-world
def test_an_early_rank_asks_once(port: int) -> None:
    """And is notified: before 0.2 it sent a hundred requests per second."""
    asked: list[bytes] = []
    over = threading.Event()

    def talk(peer: socket.socket) -> None:
        greet(peer)
        assert exactly(peer, len(PROBE)) == PROBE
        peer.sendall(b"\0")
        exactly(peer, 9 + len(keys(b"tcpstore_async/server")) - 16)
        peer.sendall(blob(IDENTITY % b"x"))
        said = b""
        while not said.endswith(struct.pack("<q", 3)):
            part = peer.recv(4096)
            if not part:
                return
            said += part
            asked.append(part)
            if b"\x48" in part:
                peer.sendall(struct.pack("<q", 3))
            elif part.startswith(b"\x03"):
                peer.sendall(blob(b"2"))
        over.set()
        assert exactly(peer, 1) == b"\x0c"
        peer.sendall(b"\1")

    with fake_server(talk) as fake, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(TCPStore, "127.0.0.1", fake.port, 2, False, 2.0)
        assert over.wait(LIMIT)
        assert asked[-1].startswith(b"\x42" + blob(b"tcpstore_async/joins"))
        joining.result(LIMIT).close()
        assert len(asked) <= 5


def test_stores_are_made_by_many_threads() -> None:
    """No constructor, and no `close`, goes through the stores of the process, whose number other threads change.

    In 0.1.0 a rank that joined did, by `list()` of a WeakValueDictionary, which then failed; many are open, so that it
    took long. What goes through them today, `_forked`, runs in a child, where there are no other threads.
    """
    before = sys.getswitchinterval()
    opened: deque[TCPStore] = deque()
    with tcpstore_server() as server, ThreadPoolExecutor(6) as threads:
        sys.setswitchinterval(1e-6)
        try:

            def make(_: int) -> None:
                opened.append(TCPStore("127.0.0.1", server.port, 1, timeout=LIMIT))
                if len(opened) > 200:
                    opened.popleft().close()

            list(threads.map(make, range(500)))
        finally:
            sys.setswitchinterval(before)
            for store in opened:
                store.close()


# Who it is


def resetting(port: int, times: int) -> Link:
    """A proxy that closes so many connections once they have sent something."""
    link = Link(port, "q")
    real = link._talk

    def talk(peer: socket.socket) -> None:
        if link.connections <= times:
            peer.recv(1)
            return
        real(peer)

    link._talk = talk
    return link


@pytest.mark.parametrize("who", ["reset once", pytest.param("forked", marks=pytest.mark.unmeasured)])
def test_a_rank_is_known_by_all_its_connections(port: int, who: str) -> None:
    """So that its later connections also get the grace period when the owner ends."""
    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(TCPStore, "127.0.0.1", port, 2, True, LIMIT)
        TCPStore("127.0.0.1", port, timeout=LIMIT).close()  # it listens
        link = resetting(port, 1 if who == "reset once" else 0)
        try:
            store = TCPStore("127.0.0.1", link.port, 2, False, LIMIT)
            master = making.result(LIMIT)
            master.set("there", "")
            assert store.check(["there"])
            if who == "forked":
                reading, writing = os.pipe()
                child = os.fork()
                if not child:
                    try:
                        store.set("child", "")
                        os.read(reading, 1)
                        os._exit(0 if store.check(["child"]) else 1)
                    finally:
                        os._exit(2)
                store.wait(["child"])
                master.close()
                os.write(writing, b".")
                assert os.waitpid(child, 0)[1] == 0
                os.close(reading)
                os.close(writing)
            else:
                waiting = threads.submit(store.wait, ["late"], LIMIT)  # on a second connection
                until(lambda: link.connections == 3 or store.check(["late"]))
                master.close()
                store.set("late", "")
                waiting.result(LIMIT)
            assert store.check(["there"])
            store.close()
        finally:
            link.stop()


def test_a_server_that_hangs_up_twice_is_greeted_without_ping() -> None:
    hellos: list[bytes] = []

    def talk(peer: socket.socket) -> None:
        hellos.append(exactly(peer, 5) + exactly(peer, 1))
        if len(hellos) < 3:
            return
        assert exactly(peer, 8 + len(PROBE)) == bytes(8) + PROBE  # for it may be one of ours that stands by
        peer.sendall(b"\0" + STOCK)

    with fake_server(talk) as fake:
        TCPClient(Servers(("127.0.0.1", fake.port)), LIMIT).close()
    assert [hello[5] for hello in hellos] == [0x0D, 0x0D, 0x05]


def test_a_join_that_times_out_names_the_server() -> None:
    text = r"^no reply from 127\.0\.0\.1:{} while joining: check timeout after 100ms$"
    with (
        fake_server(silent) as fake,
        pytest.raises(StoreTimeoutError, match=text.format(fake.port)),
    ):
        TCPStore("127.0.0.1", fake.port, 2, False, 0.1)


class Scripted:
    """As much of a client as a rank needs before it is counted: 2 ranks are there, and the owner is about to stop."""

    identity = None

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self.calls: list[Any] = []

    def extended(self, *_: Any) -> bool:
        return self.ours

    def call(self, request: Any, _: Deadline) -> Any:
        self.calls.append(request)
        return pack(b"0") if request is requests.JOINS else 2


@pytest.mark.parametrize("ours", [True, False])
def test_a_rank_avoids_a_server_of_ours_that_is_about_to_stop(ours: bool) -> None:
    """PyTorch's servers cannot say so, and are not asked."""
    client: Any = Scripted(ours)
    rank = Rank(2, False, Deadline.of_a_call(LIMIT, None))
    assert rank.may_join(client) == (not ours)
    assert bool(client.calls) == ours


@pytest.mark.parametrize("pings", [True, False])
def test_a_rank_asks_with_its_first_bytes(pings: bool) -> None:
    """So that it takes one round trip less. A server before PING closes the connection first."""
    joined = requests.count(1)

    def talk(peer: socket.socket) -> None:
        start = exactly(peer, 6)
        if start[5] == 0x0D and not pings:
            return
        nonce = exactly(peer, 4 if pings else 8)
        assert exactly(peer, len(PROBE)) == PROBE
        peer.sendall((nonce if pings else STOCK) + STOCK)
        wanted = joined[0].prefix + joined[0].request.encode(joined[1])
        assert exactly(peer, len(wanted)) == wanted
        peer.sendall((1).to_bytes(8, "little"))
        assert not peer.recv(1)

    with fake_server(talk) as fake, TCPStore("127.0.0.1", fake.port, 2, timeout=LIMIT) as store:
        assert store._client is not None
        assert not store._client.extended()


@pytest.mark.parametrize("ours", [True, False])
def test_a_brief_join_asks_with_its_first_bytes(ours: bool) -> None:
    """So that it takes one round trip less. PyTorch's server is never sent a JOIN."""
    sent = bytearray()

    def talk(peer: socket.socket) -> None:
        hello = exactly(peer, 10 + len(PROBE))
        assert hello[10:] == PROBE
        peer.sendall(hello[6:10] + (b"\x00" if ours else b"\x01"))
        while part := peer.recv(4096):
            sent.extend(part)
            if sent.endswith(b"\x49"):
                peer.sendall((1).to_bytes(8, "little"))

    leave = requests.DEPART[0].prefix
    assert leave == b"\x49"
    with fake_server(talk) as fake, BriefJoin("127.0.0.1", fake.port, Deadline(LIMIT)) as brief:
        assert brief.join(b"t" * 16, 2) == ours
    assert bytes(sent).endswith(leave) == ours == bool(sent)


def test_a_brief_join_takes_nothing_else_for_a_store() -> None:
    def talk(peer: socket.socket) -> None:
        exactly(peer, 10 + len(PROBE))
        peer.sendall(bytes(5))

    with (
        fake_server(talk) as fake,
        BriefJoin("127.0.0.1", fake.port, Deadline(LIMIT)) as brief,
        pytest.raises(ProtocolError, match="Ping failed"),
    ):
        brief.join(b"t" * 16, 2)
