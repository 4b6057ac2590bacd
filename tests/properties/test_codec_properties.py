"""What one end encodes the other decodes, and says how much is missing while it is not all there."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.wire import codecs
from tcpstore_async.wire.codecs import PartialReply, ReplyCodec, RequestCodec
from tcpstore_async.wire.values import ABSENT, pack

LIMITS = Limits()

keys = st.binary(max_size=40)
values = st.binary(max_size=60).map(pack)
i64 = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)

pairs = st.lists(st.tuples(keys, values), max_size=8)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "u": u32,
    "n": i64,
    "k": keys,
    "v": values,
    "t": values,
    "l": st.lists(keys, max_size=8),
    "i": pairs,
    "m": pairs,
}
"""By kind of field."""

RESULTS: dict[str, st.SearchStrategy[Any]] = {
    "": st.none(),
    "u": u32,
    "n": i64,
    "b": st.booleans(),
    "d": st.just(True),
    "v": values,
    "a": st.just(ABSENT),
    "w": st.lists(values, max_size=8),
    "c": st.lists(keys, max_size=8),
    "p": st.just((0, None)) | st.just((-1, None)) | st.tuples(st.integers(1, 2**62), values),
}
"""By kind of reply."""

REQUESTS: list[tuple[str, st.SearchStrategy[tuple[Any, ...]]]] = [
    (name, st.tuples(*[FIELDS[kind] for kind in codec.kinds]))
    for name, codec in vars(codecs).items()
    if isinstance(codec, RequestCodec)
]

REPLIES: list[tuple[str, st.SearchStrategy[Any]]] = [
    (name, RESULTS[codec.kind]) for name, codec in vars(codecs).items() if isinstance(codec, ReplyCodec)
]


def request_of(name: str) -> RequestCodec:
    codec = getattr(codecs, name)
    assert isinstance(codec, RequestCodec)
    return codec


def reply_of(name: str) -> ReplyCodec:
    codec = getattr(codecs, name)
    assert isinstance(codec, ReplyCodec)
    return codec


def encoded_reply(reply: ReplyCodec, result: Any) -> bytes:
    """The bytes of a reply, as the session makes them."""
    encoded = result if reply.encode is None else reply.encode(result)
    if encoded is None:
        return b""
    return b"".join(encoded) if isinstance(encoded, list) else bytes(encoded)


def test_every_codec_is_tried() -> None:
    assert {"NOTHING", "KEY_VALUE", "ITEMS"} <= {name for name, _ in REQUESTS}
    assert {"NO_REPLY", "VALUE", "POPPED"} <= {name for name, _ in REPLIES}


@pytest.mark.parametrize(("name", "fields"), REQUESTS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_requests(name: str, fields: st.SearchStrategy[tuple[Any, ...]], data: st.DataObject) -> None:
    codec = request_of(name)
    sent = data.draw(fields)
    encoded = codec.encode(sent)
    before, after = data.draw(st.binary(max_size=9)), data.draw(st.binary(max_size=9))
    calls: list[tuple[Any, ...]] = []

    def call(*got: Any) -> str:
        calls.append(got)
        return "done"

    whole = before + encoded + after
    result, stop = codec.decode(call, whole, len(before), len(whole), LIMITS)
    assert (result, stop, calls) == ("done", len(before) + len(encoded), [sent])


@pytest.mark.parametrize(("name", "fields"), REQUESTS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_requests_in_parts(name: str, fields: st.SearchStrategy[tuple[Any, ...]], data: st.DataObject) -> None:
    """As a session does it: never asked before `need` bytes are there, which is never more than will come."""
    codec = request_of(name)
    sent = data.draw(fields)
    encoded = codec.encode(sent)
    calls: list[tuple[Any, ...]] = []

    def call(*got: Any) -> str:
        calls.append(got)
        return "done"

    rest = None
    base = at = end = 0
    for _ in range(1000):
        decode = codec.decode if rest is None else rest.decode
        result, stop = decode(call, encoded[base:end], at, end - base, LIMITS)
        if stop >= 0:
            break
        assert not calls
        assert end - base < -stop
        assert base - stop <= len(encoded), "more is asked for than will come"
        end = data.draw(st.integers(base - stop, len(encoded)))
        if result is not None:
            rest = result
            base, at = base + result.at, 0
    assert (result, base + stop, calls) == ("done", len(encoded), [sent])


@pytest.mark.parametrize(("name", "results"), REPLIES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_replies(name: str, results: st.SearchStrategy[Any], data: st.DataObject) -> None:
    codec = reply_of(name)
    sent = data.draw(results)
    encoded = encoded_reply(codec, sent)
    count = len(sent) if isinstance(sent, list) else 0
    if codec.measure is not None:
        assert codec.measure(sent) == len(encoded)
    before, after = data.draw(st.binary(max_size=9)), data.draw(st.binary(max_size=9))
    whole = before + encoded + after
    assert codec.decode(whole, len(before), len(whole), count) == (sent, len(before) + len(encoded))
    for end in range(len(encoded)):
        result, need = codec.decode(encoded[:end], 0, end, count)
        if isinstance(result, PartialReply):
            result.whole = len(result.items)
            assert result.decode(encoded, result.at, len(encoded)) == (sent, len(encoded))
        else:
            assert result is None
        assert end < -need <= len(encoded)


@pytest.mark.parametrize(("name", "byte"), [("PRESENCE", 2), ("WAKE", 1), ("CANCELED", 0), ("WAKE", 255)])
def test_impossible_replies(name: str, byte: int) -> None:
    with pytest.raises(ProtocolError):
        reply_of(name).decode(bytes([byte]), 0, 1, 0)


@pytest.mark.parametrize(("name", "result"), [("WAKE", False), ("NO_REPLY", None)])
def test_results_without_reply(name: str, result: Any) -> None:
    assert encoded_reply(reply_of(name), result) == b""
