"""The client's session against the server's, without a socket between them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support import HANDSHAKE, blob, u64
from tcpstore_async import Limits
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.session.client import ClientSession, PendingCall
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import ABSENT, pack, unpack

PID = 4711


class Wire:
    """A client's and a server's session, connected by a wire that cuts bytes anywhere."""

    def __init__(self, store: Store, seed: int = 0) -> None:
        self.client = ClientSession()
        self.server = ServerSession(store, None, "127.0.0.1", 1, 0.0)
        self.rng = random.Random(seed)
        hello, call = self.client.hello(PID)
        assert hello == HANDSHAKE + b"\x0d" + PID.to_bytes(4, "little")
        self.carry(hello)
        assert (call.done, call.result) == (True, PID)

    def carry(self, data: bytes) -> list[PendingCall]:
        """Pass bytes to the server, and its replies back."""
        for piece in self.cut(data):
            self.server.receive(piece)
        return self.fetch()

    def fetch(self) -> list[PendingCall]:
        replies = b"".join(self.server.out)
        self.server.out.clear()
        self.server.unsent = 0
        return [call for piece in self.cut(replies) for call in self.client.receive(piece)]

    def cut(self, data: bytes) -> list[bytes]:
        pieces = []
        while data:
            count = self.rng.randint(1, 2 * len(data))
            pieces.append(data[:count])
            data = data[count:]
        return pieces

    def call(self, method: str, *fields: Any) -> Any:
        data, call = self.client.request(BY_METHOD[method], fields)
        done = self.carry(data)
        if call is None:
            assert not done
            return None
        assert call.done
        return call.result

    def park(self, method: str, *fields: Any) -> PendingCall:
        data, call = self.client.request(BY_METHOD[method], fields)
        assert call is not None
        assert not self.carry(data)
        return call


@pytest.mark.parametrize("seed", range(20))
def test_every_command(seed: int) -> None:
    wire = Wire(Store(Limits()), seed)
    wire.call("set", b"/a", pack(b"1"))
    assert wire.call("get", b"/a") == blob(b"1")
    assert wire.call("add", b"/a", 41) == 42
    wire.call("append", b"/a", pack(b"0"))
    assert wire.call("compare_set", b"/a", pack(b"420"), pack(b"x" * 70_000)) == blob(b"x" * 70_000)
    assert unpack(wire.call("get", b"/a")) == b"x" * 70_000
    wire.call("multi_set", [(b"/b", pack(b"")), (b"/c", pack(b"3"))])
    assert wire.call("multi_get", [b"/b", b"/c", b"/no"]) == [blob(b""), blob(b"3"), blob(b"")]
    assert wire.call("multi_get", []) == []
    assert wire.call("check", [b"/b", b"/c"]) is True
    assert wire.call("check", [b"/no"]) is False
    assert sorted(wire.call("list_keys")) == [b"/a", b"/b", b"/c"]
    assert wire.call("num_keys") == 3
    assert wire.call("delete_key", b"/c") == 1
    wire.call("queue_push", b"/q", pack(b"item"))
    assert wire.call("queue_len", b"/q") == 1
    assert wire.call("wait", [b"/q", b"/a"]) is True
    assert wire.call("queue_pop", b"/q") == (1, blob(b"item"))
    assert wire.call("queue_pop", b"/q") == (0, None)
    assert wire.call("barrier", b"/bar", 1) is True
    assert wire.call("ping", 5) == 5


def test_replies_complete_calls_in_order() -> None:
    wire = Wire(Store(Limits()), 3)
    sent = [wire.client.request(BY_METHOD["add"], (b"/n", 1)) for _ in range(100)]
    done = wire.carry(b"".join(data for data, _ in sent))
    assert done == [call for _, call in sent]
    assert [call.result for call in done] == list(range(1, 101))


def test_a_wait_ends_with_a_set() -> None:
    store = Store(Limits())
    waiter, setter = Wire(store), Wire(store)
    call = waiter.park("wait", [b"/k"])
    with pytest.raises(RuntimeError, match="cannot send GET while WAIT is blocking"):
        waiter.client.request(BY_METHOD["get"], (b"/k",))
    setter.call("set", b"/k", pack(b"1"))
    assert waiter.fetch() == [call]
    assert (call.done, call.canceled) == (True, False)
    assert waiter.call("get", b"/k") == blob(b"1")


@pytest.mark.parametrize(
    ("method", "fields"),
    [("wait", ([b"/k"],)), ("barrier", (b"/k", 2)), ("fetch", (b"/k",)), ("wait_count", (b"/k", 1))],
)
@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_cancel_leaves_the_connection_in_step(method: str, fields: tuple[Any, ...], race: bool, seed: int) -> None:
    store = Store(Limits())
    waiter, setter = Wire(store, seed), Wire(store)
    call = waiter.park(method, *fields)
    cancel = waiter.client.cancel(call)
    if race:
        setter.call("set", b"/k", pack(b"1"))
    assert waiter.carry(cancel) == [call]
    assert (call.done, call.canceled, call.woken) == (True, True, race)
    assert waiter.call("ping", 9) == 9
    with pytest.raises(RuntimeError, match="only a blocking call can be canceled"):
        waiter.client.cancel(call)
    setter.call("set", b"/k", pack(b"2"))
    assert waiter.fetch() == []
    assert waiter.call("get", b"/k") == pack(b"2")


def test_a_call_is_canceled_once() -> None:
    waiter = Wire(Store(Limits()))
    call = waiter.park("wait", [b"/k"])
    waiter.client.cancel(call)
    with pytest.raises(RuntimeError, match="once"):
        waiter.client.cancel(call)


def test_silent_writes_are_unconfirmed_until_a_later_reply() -> None:
    client = Wire(Store(Limits())).client
    assert not client.unconfirmed()
    client.request(BY_METHOD["set"], (b"/a", pack(b"")))
    _, before = client.request(BY_METHOD["ping"], (1,))
    client.request(BY_METHOD["append"], (b"/a", pack(b"")))
    _, after = client.fence(2)
    assert client.unconfirmed()
    assert client.receive(b"\1\0\0\0") == [before]
    assert client.unconfirmed()
    assert client.receive(b"\2\0\0\0") == [after]
    assert not client.unconfirmed()


@pytest.mark.parametrize(
    ("method", "fields", "said", "reason"),
    [
        ("get", (b"/k",), u64(2**63), "claims 9223372036854775808 bytes"),
        ("multi_get", ([b"/k"],), u64(2**50), "claims"),
        ("list_keys", (), u64(2**60), "claims 1152921504606846976 keys"),
        ("check", ([b"/k"],), b"\2", "ready or not_ready response expected"),
        ("wait", ([b"/k"],), b"\7", "Stop_waiting response is expected"),
        ("ping", (1,), b"\1\0\0\0\0", "server sent 1 unexpected byte$"),
    ],
)
def test_invalid_replies(method: str, fields: tuple[Any, ...], said: bytes, reason: str) -> None:
    client = ClientSession()
    client.request(BY_METHOD[method], fields)
    with pytest.raises(ProtocolError, match=reason):
        client.receive(said)


@pytest.mark.parametrize("said", [b"\2", b"\0\0"])
def test_invalid_replies_to_a_cancel(said: bytes) -> None:
    client = ClientSession()
    _, call = client.request(BY_METHOD["wait"], ([b"/k"],))
    assert call is not None
    client.cancel(call)
    with pytest.raises(ProtocolError, match="wait_canceled response is expected"):
        client.receive(said)


def test_a_long_reply_in_small_pieces_is_decoded_once() -> None:
    client = ClientSession()
    names = [b"/%d" % number for number in range(50_000)]
    _, call = client.request(BY_METHOD["multi_get"], (names,))
    assert call is not None
    said = b"".join(map(blob, names))
    done = [one for at in range(0, len(said), 1000) for one in client.receive(said[at : at + 1000])]
    assert done == [call]
    assert call.result == list(map(blob, names))


# FETCH and its cancel


def _fetch() -> tuple[ClientSession, PendingCall]:
    client = ClientSession()
    data, call = client.request(BY_METHOD["fetch"], (b"/k",))
    assert data == b"\x40" + blob(b"/k")
    assert call is not None
    return client, call


def _receive(client: ClientSession, pieces: list[bytes]) -> list[PendingCall]:
    return [call for piece in pieces for call in client.receive(piece)]


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("seed", range(10))
def test_every_command_of_the_extension(seed: int) -> None:
    store = Store(Limits())
    wire, setter = Wire(store, seed), Wire(store, seed + 100)
    wire.call("introduce", [(b"rank", pack(b"3"))])
    assert wire.server.peer == {"rank": "3"}
    assert not wire.client.unconfirmed()
    wire.call("set", b"/a", pack(b"x" * 70_000))
    assert unpack(wire.call("fetch", b"/a")) == b"x" * 70_000
    fetching = wire.park("fetch", b"/b")
    setter.call("add", b"/b", 7)
    assert wire.fetch() == [fetching]
    assert fetching.result == pack(b"7")
    assert wire.call("wait_count", b"/b", 7) is True
    counting = wire.park("wait_count", b"/b", 9)
    setter.call("add", b"/b", 1)
    assert wire.fetch() == []
    setter.call("add", b"/b", 1)
    assert wire.fetch() == [counting]
    assert (counting.done, counting.result) == (True, True)
    assert wire.call("ping", 5) == 5


@pytest.mark.parametrize("size", range(1, 27))
def test_a_fetched_value_in_pieces_of_every_size(size: int) -> None:
    for value in (b"", b"v", b"a value of 18 bytes", b"\xff" * 8):
        client, call = _fetch()
        assert _receive(client, _pieces(pack(value), size)) == [call]
        assert call.result == pack(value)
        assert client.waiting is None


def test_nothing_follows_a_fetch_but_its_cancel() -> None:
    client, call = _fetch()
    with pytest.raises(RuntimeError, match="cannot send PING while FETCH is blocking"):
        client.fence(1)
    assert client.cancel(call) == b"\x41"
    with pytest.raises(RuntimeError, match="once"):
        client.cancel(call)
    with pytest.raises(RuntimeError, match="cannot send PING"):
        client.fence(1)


def test_a_count_is_canceled_as_a_wait_is() -> None:
    client = ClientSession()
    _, call = client.request(BY_METHOD["wait_count"], (b"/n", 3))
    assert call is not None
    assert client.cancel(call) == b"\x0c"
    assert client.receive(b"\0") == []
    assert client.receive(b"\1") == [call]


@pytest.mark.parametrize("value", [None, b"", b"v", b"\xff" * 8, bytes(40)])
def test_a_canceled_fetch_in_every_order_and_cut(value: bytes | None) -> None:
    """The value may be on its way, whole or in part, before the cancel is sent or after."""
    before = b"" if value is None else pack(value)
    said = before + ABSENT
    for early in range(len(before) + (value is None)):
        for cut in range(early, len(said) + 1):
            client, call = _fetch()
            assert client.receive(said[:early]) == []
            client.cancel(call)
            done = _receive(client, [said[early:cut], said[cut:]])
            assert done == [call]
            assert (call.done, call.canceled, call.woken) == (True, True, value is not None)
            _, pong = client.fence(3)
            assert client.receive(b"\3\0\0\0") == [pong]


def test_a_value_that_arrives_before_the_reply_to_its_cancel() -> None:
    client, call = _fetch()
    assert client.receive(pack(b"v")) == [call]
    with pytest.raises(RuntimeError, match="only a blocking call"):
        client.cancel(call)


@pytest.mark.parametrize(
    ("canceled", "said", "reason"),
    [
        (False, u64(2**63), "claims 9223372036854775808 bytes"),
        (False, u64(2**40 + 1), "claims"),
        (False, ABSENT, "claims 18446744073709551615 bytes"),
        (True, u64(2**63), "claims 9223372036854775808 bytes"),
        (True, b"\xff" * 7 + b"\xfe", "claims"),
        (True, pack(b"v") + pack(b"w"), "expected the reply to a canceled FETCH"),
        (True, pack(b"v") + b"\1" + bytes(7), "expected the reply to a canceled FETCH"),
        (True, ABSENT * 2, "unexpected byte"),
        (True, ABSENT + pack(b"v"), "unexpected byte"),
    ],
)
def test_invalid_replies_to_a_canceled_fetch(canceled: bool, said: bytes, reason: str) -> None:
    for size in (len(said), 1):
        client, call = _fetch()
        if canceled:
            client.cancel(call)
        with pytest.raises(ProtocolError, match=reason):
            _receive(client, _pieces(said, size))
