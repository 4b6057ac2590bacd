"""What PyTorch's C++ client was recorded to send is what ours send, where the call is the same.

A scripted server plays the recorded server. What differs on purpose is taken out of what was said: the question who the
server is, which is answered as PyTorch's do, and the fence before a wait, a PING of nonce 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from client.fakes import answer_probe, answer_try, exactly, fake_server
from conformance.vectors import HERE, expand
from support import LIMIT
from tcpstore_async import AsyncTCPStore, DistNetworkError, DistStoreError, QueueEmptyError, TCPStore

Exchange = list[tuple[str, bytes]]


def _recorded() -> dict[str, dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((HERE / "vectors.json").read_text())
    return {entry["name"]: entry for entry in entries if entry["backend"] == "libuv"}


RECORDED = _recorded()


def exchange_of(name: str) -> Exchange:
    found = []
    for segment in RECORDED[name]["exchange"]:
        data = bytes.fromhex(segment["hex"])
        if "rule" in segment:
            data = expand(segment["rule"].split("  (")[0])
        found.append((segment["dir"], data))
    return [(who, data) for who, data in found if who != "c2s-close"]


SHORT = timedelta(milliseconds=50)

CALLS: dict[str, Callable[[Any], Any]] = {
    "set_str": lambda s: s.set("k", "v"),
    "set_empty_value": lambda s: s.set("k", ""),
    "set_empty_key": lambda s: s.set("", "v"),
    "set_bytes": lambda s: s.set("k", b"\x00\x01\xff"),
    "set_bytes_key": lambda s: s.set(b"kb", b"v"),
    "set_unicode": lambda s: s.set("é", "日本"),
    "set_2000_bytes": lambda s: s.set("k", "a" * 2000),
    "get_present": lambda s: s.get("k"),
    "get_present_empty": lambda s: s.get("k"),
    "get_binary": lambda s: s.get("k"),
    "get_missing_timeout": lambda s: s.get("missing"),
    "add_missing": lambda s: s.add("n", 5),
    "add_positive": lambda s: s.add("n", 5),
    "add_negative": lambda s: s.add("n", -15),
    "add_non_integer": lambda s: s.add("n", 1),
    "add_int64_min": lambda s: s.add("n", -(2**63)),
    "compare_set_missing_nonempty_expected": lambda s: s.compare_set("k", "old", "new"),
    "compare_set_missing_empty_expected": lambda s: s.compare_set("k", "", "new"),
    "compare_set_mismatch": lambda s: s.compare_set("k", "wrong", "new"),
    "check_empty_list": lambda s: s.check([]),
    "check_one_present": lambda s: s.check(["k"]),
    "check_one_absent": lambda s: s.check(["k"]),
    "check_many_present": lambda s: s.check(["a", "b", "c"]),
    "wait_empty_list": lambda s: s.wait([]),
    "wait_present": lambda s: s.wait(["k"]),
    "wait_many_present": lambda s: s.wait(["a", "b"]),
    "wait_absent_timeout": lambda s: s.wait(["k"], SHORT),
    "wait_absent_timeout_two_keys": lambda s: s.wait(["k", "j"], SHORT),
    "wait_absent_timeout0": lambda s: s.wait(["k"], 0),
    # Not in 1 ms: on a busy machine that is over before anything is sent.
    "wait_absent_timeout_1ms": lambda s: s.wait(["k"], timedelta(seconds=0.2)),
    "wait_absent_timeout_negative": lambda s: s.wait(["k"], -1),
    "wait_duplicate_key": lambda s: s.wait(["k", "k"]),
    "num_keys_0": lambda s: s.num_keys(),
    "num_keys_2": lambda s: s.num_keys(),
    "delete_present": lambda s: s.delete_key("k"),
    "delete_absent": lambda s: s.delete_key("k"),
    "append_missing": lambda s: s.append("k", "ab"),
    "multi_get": lambda s: s.multi_get(["a", "b"]),
    "multi_get_empty": lambda s: s.multi_get([]),
    "multi_set": lambda s: s.multi_set(["a", "b"], ["1", b"\0\xff"]),
    "multi_set_empty": lambda s: s.multi_set([], []),
    "multi_set_mismatch": lambda s: s.multi_set(["a", "b"], ["1"]),
    "queue_push": lambda s: s.queue_push("q", "v"),
    "queue_len_missing": lambda s: s.queue_len("q"),
    "queue_len_3": lambda s: s.queue_len("q"),
    "queue_pop_block_present": lambda s: s.queue_pop("q"),
    "queue_pop_nonblock_present": lambda s: s.queue_pop("q", False),
    "queue_pop_nonblock_empty": lambda s: s.queue_pop("q", block=False),
    "list_keys_empty": lambda s: s.list_keys(),
    "list_keys_3": lambda s: sorted(s.list_keys()),
    "barrier_ws1": lambda s: s.barrier("b", 1),
    "barrier_ws0": lambda s: s.barrier("b", 0),
    "barrier_ws_negative": lambda s: s.barrier("b", -3),
    "barrier_ws2_completes": lambda s: s.barrier("b", 2),
    "barrier_timeout": lambda s: s.barrier("b", 2, SHORT),
    "barrier_default_timeout": lambda s: s.barrier("b", 2),
    "barrier_timeout0": lambda s: s.barrier("b", 2, 0),
    "barrier_non_integer": lambda s: s.barrier("b", 2),
    "check_131072_keys": lambda s: s.check(["k"] * 131072),
    "payload_8388608": lambda s: (s.set("k", "a" * 8388608), s.num_keys())[1],
    "key_8191": lambda s: (s.set("k" * 8191, "v"), s.num_keys())[1],
}

DEFAULT_TIMEOUTS = {"get_missing_timeout", "barrier_default_timeout"}
"""Calls for which the store's timeout is short."""


class Stage:
    """Plays the recorded server of one call on the first connection. Other connections only probe it."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.connections = 0
        self.probed = False
        """Whether the client has asked who the server is."""
        self.wrong: list[str] = []
        self.played = threading.Event()

    def play(self, peer: socket.socket) -> None:
        peer.sendall(exactly(peer, 10)[6:])
        self.connections += 1
        if self.connections > 1:
            answer_try(peer)
            return
        try:
            for who, data in self.exchange:
                if who == "c2s":
                    self.hear(peer, data)
                elif who == "s2c":
                    peer.sendall(data)
                else:
                    return
        finally:
            self.played.set()
        rest = peer.recv(100)
        if rest:
            self.wrong.append(f"it said more: {rest.hex()}")

    def hear(self, peer: socket.socket, expected: bytes) -> None:
        if not self.probed:
            self.probed = True
            answer_probe(peer)
        said = exactly(peer, len(expected))
        if said != expected:
            self.wrong.append(f"it said {said[:200].hex()} and not {expected[:200].hex()}")


def result_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (DistStoreError, DistNetworkError) as error:
        return type(error)


def recorded_result(name: str) -> Any:
    result = RECORDED[name]["result"]
    if "raises" in result:
        kind = result["raises"].rpartition(".")[2]
        return {
            "DistStoreError": DistStoreError,
            "DistNetworkError": DistNetworkError,
            "QueueEmptyError": QueueEmptyError,
        }[kind]
    return value_of(result)


def value_of(result: dict[str, Any]) -> Any:
    if "bytes" in result:
        return bytes.fromhex(result["bytes"])
    if "list" in result:
        return [value_of(one) for one in result["list"]]
    return result["value"]


def compare(name: str, found: Any, stage: Stage) -> None:
    assert stage.played.wait(LIMIT)
    assert not stage.wrong
    expected = recorded_result(name)
    if isinstance(expected, type):
        assert isinstance(found, type)
        assert issubclass(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("name", CALLS)
def test_the_synchronous_client(name: str) -> None:
    stage = Stage(exchange_of(name))
    with fake_server(stage.play) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        if name in DEFAULT_TIMEOUTS:
            store.set_timeout(SHORT)
        found = result_of(lambda: CALLS[name](store))
        compare(name, found, stage)


PLURAL = {"payload_8388608", "key_8191", "list_keys_3"}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in PLURAL])
async def test_the_async_client(name: str) -> None:
    stage = Stage(exchange_of(name))
    with fake_server(stage.play) as fake:
        async with await AsyncTCPStore.connect("127.0.0.1", fake.port, timeout=LIMIT) as store:
            if name in DEFAULT_TIMEOUTS:
                store.set_timeout(SHORT)
            try:
                found = await CALLS[name](store)
            except (DistStoreError, DistNetworkError) as error:
                found = type(error)
            await asyncio.to_thread(compare, name, found, stage)


CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "ctor_client_wsNone_waitTrue": {},
    "ctor_client_wsNone_waitFalse": {"wait_for_workers": False},
    "ctor_client_ws1_waitTrue": {"world_size": 1},
    "ctor_client_ws1_waitFalse": {"world_size": 1, "wait_for_workers": False},
    "ctor_client_ws2_waitTrue": {"world_size": 2},
    "ctor_client_ws2_waitFalse": {"world_size": 2, "wait_for_workers": False},
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_constructor(name: str) -> None:
    """Afterwards the peer receives nothing more, even if it stays."""
    exchange = exchange_of(name)
    assert exchange[0][1] == bytes.fromhex("00cef7853c0d4e220000")
    stage = Stage(exchange[2:])
    hellos = []

    def play(peer: socket.socket) -> None:
        hellos.append(peer.recv(10, socket.MSG_PEEK | socket.MSG_WAITALL))
        stage.play(peer)

    with fake_server(play) as fake:
        TCPStore("127.0.0.1", fake.port, timeout=LIMIT, **CONSTRUCTORS[name]).close()
        assert stage.played.wait(LIMIT)
    assert not stage.wrong
    assert hellos == [bytes.fromhex("00cef7853c0d") + os.getpid().to_bytes(4, "little")]


def test_a_peer_that_closes_after_the_pong() -> None:
    """PyTorch's own tests have one: the constructor must have succeeded."""
    stage = Stage([("s2c-close", b"")])
    with fake_server(stage.play) as fake, TCPStore("127.0.0.1", fake.port, 1, timeout=LIMIT, wait_for_workers=False):
        assert stage.played.wait(LIMIT)


def test_a_clone_says_no_more_than_the_constructor() -> None:
    hellos: list[bytes] = []
    over = threading.Event()

    def play(peer: socket.socket) -> None:
        hello = exactly(peer, 10)
        peer.sendall(hello[6:])
        if len(hellos) == 0:
            hellos.append(hello)
            answer_probe(peer)  # so it joins by ADD
            assert exactly(peer, 22)[:1] == b"\x04"
            peer.sendall((1).to_bytes(8, "little"))
            over.wait(LIMIT)
        else:
            hellos.append(hello + peer.recv(100))
            over.set()

    with fake_server(play) as fake, TCPStore("127.0.0.1", fake.port, 1, timeout=LIMIT) as store:
        store.clone().close()
        assert over.wait(LIMIT)
    assert len(hellos) == 2
    assert hellos[0] == hellos[1]


def test_a_wait_behind_a_write_is_fenced() -> None:
    """A PING with nonce 0 precedes the WAIT, in the same segment, and is answered first."""
    _, wait = exchange_of("wait_present")[0]
    _, write = exchange_of("set_str")[0]
    stage = Stage([("c2s", wait), ("s2c", b"\0"), ("c2s", write), ("c2s", b"\x0d\0\0\0\0" + wait), ("s2c", bytes(5))])
    with fake_server(stage.play) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        store.wait(["k"])
        store.set("k", "v")
        store.wait(["k"])
    assert not stage.wrong
