"""`stats` and others that are asked for every second, at the admin socket of a running server."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from support import RawPeer, blob, tcpstore_server
from tcpstore_async.client.admin import ask
from tcpstore_async.server.backends import BACKENDS
from tcpstore_async.server.listen_socket import accept_queue
from tcpstore_async.server.service_times import BOUNDS, Histogram, ServiceTimes

ROOT = Path(__file__).parent.parent.parent


def look(path: Path, part: str = "stats") -> Any:
    """The part of the reply that is not the same for all."""
    about, *facts, end = [json.loads(line) for line in ask(path, [part], 60.0)]
    assert (list(about), end) == (["server"], {"end": True})
    (fact,) = facts
    return fact


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_counters_of_a_server(sockets: Path, backend: str) -> None:
    with (
        tcpstore_server("--backend", backend, "--limit", "connections=2") as server,
        RawPeer(server.port) as one,
        RawPeer(server.port) as two,
    ):
        path = sockets / f"{server.port}.sock"
        two.ping()
        one.ping()
        before = look(path)["stats"]
        for _ in range(100):
            one.send(b"\x01" + blob(b"/k") + blob(b"x" * 1000))
            one.ping()
        with RawPeer(server.port) as three:
            assert three.closed()
        stats = look(path)["stats"]
        gained = {name: number - before["commands"][name] for name, number in stats["commands"].items()}
        assert {name: number for name, number in gained.items() if number} == {"SET": 100, "PING": 100}
        assert stats["traffic"]["sent_bytes"] - before["traffic"]["sent_bytes"] == 100 * 4
        frame = 1 + 8 + 2 + 8 + 1000 + 5
        assert stats["traffic"]["received_bytes"] - before["traffic"]["received_bytes"] == 100 * frame
        assert stats["connections"] == {"open": 2, "max": 2, "accepted": 2, "rejected": 1, "closed_for": {}}
        assert stats["sessions"]["open"] == 2
        assert (stats["keys"], stats["links"]["open"]) == (1, 0)
        documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "admin.md").read_text()))
        assert {name for name in stats if name not in documented} == set()
        assert stats["resident_bytes"] > 1e6
        assert stats["cpu"] > 0
        assert 0 < before["uptime"] < stats["uptime"]
        for name in ("lag", "service", "turns"):
            assert stats[name]["bounds"] == list(BOUNDS)
            assert len(stats[name]["counts"]) == len(BOUNDS) + 1
        timed = sum(stats["service"]["counts"]) - sum(before["service"]["counts"])
        assert 2 <= timed <= 100  # one in 29 of 100 to 200 turns
        two.send(b"\xff")
        assert two.closed()
        assert look(path)["stats"]["connections"]["closed_for"] == {"protocol": 1}


def test_a_connection_that_makes_place_is_counted(sockets: Path) -> None:
    with (
        tcpstore_server("--limit", "connections=1", "--defer-accept", "0") as server,
        RawPeer(server.port, validate=False) as silent,
        RawPeer(server.port) as one,
    ):
        one.ping()
        assert silent.closed()
        connections = look(sockets / f"{server.port}.sock")["stats"]["connections"]
        assert (connections["open"], connections["rejected"]) == (1, 0)
        assert connections["closed_for"] == {"connections": 1}


@pytest.mark.needs_proc
def test_a_connection_that_the_kernel_holds_is_not_counted(sockets: Path) -> None:
    with (
        tcpstore_server("--defer-accept", "60") as server,
        RawPeer(server.port, validate=False),
        RawPeer(server.port) as one,
    ):
        one.ping()
        assert look(sockets / f"{server.port}.sock")["stats"]["connections"]["accepted"] == 1


def test_what_a_large_value_brings_is_counted(sockets: Path) -> None:
    with tcpstore_server() as server, RawPeer(server.port) as one:
        one.send(b"\x01" + blob(b"/large") + blob(b"x" * 3_000_000))
        one.ping()
        one.send(b"\x03" + blob(b"/large"))
        one.read(8 + 3_000_000)
        path = sockets / f"{server.port}.sock"
        traffic = look(path)["stats"]["traffic"]
        assert 3_000_000 < traffic["received_bytes"] < 3_000_200
        assert 3_000_000 < traffic["sent_bytes"] < 3_000_200
        assert look(path, "largest") == {"largest": [["/large", 3_000_000]]}
        assert look(path, "waits") == {"waits": [], "different": 0}


def watching(path: Path, **more: object) -> socket.socket:
    """A monitor that is attached: its first line has been read."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(60.0)
    peer.connect(str(path))
    peer.sendall(json.dumps({"ask": ["monitor"], **more}).encode() + b"\n")
    head = b""
    while not head.endswith(b"\n"):
        head += peer.recv(1)
    if "server" not in json.loads(head):
        peer.close()
        raise AssertionError(head)
    return peer


def commands_of(peer: socket.socket, last: str) -> list[str]:
    """The keys that a monitor sees, until this one."""
    found: list[str] = []
    with peer.makefile() as lines:
        while last not in found:
            found += [sample[6] for sample in json.loads(lines.readline())["samples"]]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_monitor_sees_every_command_until_it_goes(sockets: Path, backend: str) -> None:
    with tcpstore_server("--backend", backend) as server, RawPeer(server.port) as one:
        path = sockets / f"{server.port}.sock"
        one.ping(4711)
        with watching(path) as peer:
            for number in range(50):
                one.send(b"\x01" + blob(b"/%d" % number) + blob(b"value"))
            assert commands_of(peer, "/49") == [f"/{number}" for number in range(50)]
        one.ping()
        assert look(path)["stats"]["commands"]["SET"] == 50


def test_a_monitor_that_does_not_read_holds_up_nobody(sockets: Path) -> None:
    """The server keeps no more than it may, and says what it has dropped once the peer reads on."""
    with tcpstore_server() as server, RawPeer(server.port) as one:
        path = sockets / f"{server.port}.sock"
        one.ping()
        with watching(path, values=True) as peer:
            before = look(path)["stats"]["resident_bytes"]
            block = b"".join(b"\x01" + blob(b"/%05d" % number) + blob(b"x" * 256) for number in range(1000))
            for _ in range(40):
                one.send(block)
                one.ping()
            assert look(path)["stats"]["resident_bytes"] - before < 16 << 20
            dropped = samples = 0
            with peer.makefile() as lines:
                while dropped + samples < 40_040:
                    portion = json.loads(lines.readline())
                    samples += len(portion["samples"])
                    dropped = portion["dropped"]
                    if dropped + samples < 40_040:
                        one.ping()  # shows what has been dropped by now
                        samples -= 1
            assert 0 < samples < 40_000
            assert dropped > 20_000


def test_there_are_few_monitors(sockets: Path) -> None:
    with tcpstore_server() as server:
        path = sockets / f"{server.port}.sock"
        peers = [watching(path) for _ in range(4)]
        (error,) = [json.loads(line) for line in ask(path, ["monitor"], 60.0)]
        assert error == {"error": "there are already 4 monitors"}
        assert look(path)["stats"]["uptime"] > 0
        for peer in peers:
            peer.close()
        while True:  # it notices soon
            try:
                watching(path).close()
            except AssertionError:
                continue
            return


def test_a_server_that_ends_closes_its_monitors(sockets: Path) -> None:
    with tcpstore_server() as server, watching(sockets / f"{server.port}.sock") as peer:
        assert server.stop() == 0
        assert peer.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not say")
def test_the_accept_queue() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=5) as listener:
        assert accept_queue(listener) == (0, 5)
        with (
            socket.create_connection(listener.getsockname()),
            socket.create_connection(listener.getsockname()),
        ):
            assert accept_queue(listener) == (2, 5)
    assert accept_queue(listener) is None
    with socket.socket(socket.AF_UNIX) as other:
        assert accept_queue(other) is None


def test_a_histogram() -> None:
    times = Histogram()
    for seconds in (0.0, 0.00001, 0.000011, 10.0, 10.1, 100.0):
        times.add(seconds)
    assert times.counts[:2] == [2, 1]
    assert times.counts[-2:] == [1, 2]
    assert sum(times.counts) == 6
    assert times.as_fact()["sum"] == pytest.approx(120.100021)


def test_one_turn_in_twenty_nine_is_timed() -> None:
    times = ServiceTimes()
    timed = [number for number in range(60) if times.begin()]
    assert timed == [0, 29, 58]
