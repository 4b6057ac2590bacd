"""The client's session against the server's, without a socket between them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support import HANDSHAKE, blob, u64
from tcpstore_async import Limits
from tcpstore_async.blob import pack, unpack
from tcpstore_async.errors import ProtocolError
from tcpstore_async.session.client import Call, ClientSession
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.wire.commands import BY_METHOD

PID = 4711


class Line:
    """A client's session and the server's, with wires that cut bytes anywhere."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.client = ClientSession()
        self.server = ServerSession(engine, None, "127.0.0.1", 1, 0.0)
        self.rng = random.Random(seed)
        hello, call = self.client.hello(PID)
        assert hello == HANDSHAKE + b"\x0d" + PID.to_bytes(4, "little")
        self.carry(hello)
        assert (call.done, call.result) == (True, PID)

    def carry(self, data: bytes) -> list[Call]:
        """Take bytes to the server, and everything it has to say back."""
        for piece in self.cut(data):
            self.server.receive(piece)
        return self.fetch()

    def fetch(self) -> list[Call]:
        said = b"".join(self.server.out)
        self.server.out.clear()
        self.server.unread = 0
        return [call for piece in self.cut(said) for call in self.client.receive(piece)]

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

    def park(self, method: str, *fields: Any) -> Call:
        data, call = self.client.request(BY_METHOD[method], fields)
        assert call is not None
        assert not self.carry(data)
        return call


@pytest.mark.parametrize("seed", range(20))
def test_every_command(seed: int) -> None:
    line = Line(Engine(Limits()), seed)
    line.call("set", b"/a", pack(b"1"))
    assert line.call("get", b"/a") == blob(b"1")
    assert line.call("add", b"/a", 41) == 42
    line.call("append", b"/a", pack(b"0"))
    assert line.call("compare_set", b"/a", pack(b"420"), pack(b"x" * 70_000)) == blob(b"x" * 70_000)
    assert unpack(line.call("get", b"/a")) == b"x" * 70_000
    line.call("multi_set", [(b"/b", pack(b"")), (b"/c", pack(b"3"))])
    assert line.call("multi_get", [b"/b", b"/c", b"/no"]) == [blob(b""), blob(b"3"), blob(b"")]
    assert line.call("multi_get", []) == []
    assert line.call("check", [b"/b", b"/c"]) is True
    assert line.call("check", [b"/no"]) is False
    assert sorted(line.call("list_keys")) == [b"/a", b"/b", b"/c"]
    assert line.call("num_keys") == 3
    assert line.call("delete_key", b"/c") == 1
    line.call("queue_push", b"/q", pack(b"item"))
    assert line.call("queue_len", b"/q") == 1
    assert line.call("wait", [b"/q", b"/a"]) is True
    assert line.call("queue_pop", b"/q") == (1, blob(b"item"))
    assert line.call("queue_pop", b"/q") == (0, None)
    assert line.call("barrier", b"/bar", 1) is True
    assert line.call("ping", 5) == 5


def test_many_calls_are_answered_in_order() -> None:
    line = Line(Engine(Limits()), 3)
    sent = [line.client.request(BY_METHOD["add"], (b"/n", 1)) for _ in range(100)]
    done = line.carry(b"".join(data for data, _ in sent))
    assert done == [call for _, call in sent]
    assert [call.result for call in done] == list(range(1, 101))


def test_a_wait_is_over_when_someone_sets() -> None:
    engine = Engine(Limits())
    waiter, setter = Line(engine), Line(engine)
    call = waiter.park("wait", [b"/k"])
    with pytest.raises(RuntimeError, match="GET cannot be sent behind a WAIT that waits"):
        waiter.client.request(BY_METHOD["get"], (b"/k",))
    setter.call("set", b"/k", pack(b"1"))
    assert waiter.fetch() == [call]
    assert (call.done, call.canceled) == (True, False)
    assert waiter.call("get", b"/k") == blob(b"1")


@pytest.mark.parametrize("method", ["wait", "barrier"])
@pytest.mark.parametrize("race", [False, True])
def test_a_cancel_leaves_the_connection_in_step(method: str, race: bool) -> None:
    engine = Engine(Limits())
    waiter, setter = Line(engine), Line(engine)
    call = waiter.park("wait", [b"/k"]) if method == "wait" else waiter.park("barrier", b"/k", 2)
    cancel = waiter.client.cancel(call)
    if race:
        setter.call("set", b"/k", pack(b"1"))
    assert waiter.carry(cancel) == [call]
    assert (call.done, call.canceled, call.woken) == (True, True, race)
    assert waiter.call("ping", 9) == 9
    with pytest.raises(RuntimeError, match="only a call that waits can be canceled, once"):
        waiter.client.cancel(call)


def test_a_call_is_canceled_once() -> None:
    waiter = Line(Engine(Limits()))
    call = waiter.park("wait", [b"/k"])
    waiter.client.cancel(call)
    with pytest.raises(RuntimeError, match="once"):
        waiter.client.cancel(call)


def test_silent_writes_are_unconfirmed_until_a_later_reply() -> None:
    client = Line(Engine(Limits())).client
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
    ("method", "fields", "said", "complaint"),
    [
        ("get", (b"/k",), u64(2**63), "announces 9223372036854775808 bytes"),
        ("multi_get", ([b"/k"],), u64(2**50), "announces"),
        ("list_keys", (), u64(2**60), "announces 1152921504606846976 keys"),
        ("check", ([b"/k"],), b"\2", "ready or not_ready response expected"),
        ("wait", ([b"/k"],), b"\7", "Stop_waiting response is expected"),
        ("ping", (1,), b"\1\0\0\0\0", "nobody asked for"),
    ],
)
def test_what_cannot_be_a_reply(method: str, fields: tuple[Any, ...], said: bytes, complaint: str) -> None:
    client = ClientSession()
    client.request(BY_METHOD[method], fields)
    with pytest.raises(ProtocolError, match=complaint):
        client.receive(said)


@pytest.mark.parametrize("said", [b"\2", b"\0\0"])
def test_what_cannot_answer_a_cancel(said: bytes) -> None:
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
