"""Values: results and errors of every method, on every kind of store."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from client.test_arguments import WRONG, Call, names
from contract.store_kinds import Kind, Maker
from tcpstore_async import DistError, DistNetworkError, DistStoreError, HashStore, PrefixStore, Store

Name = Callable[[str], str]


def test_values_are_returned_as_bytes(store: Store, key: str) -> None:
    store.set(key, "text é")
    assert store.get(key) == "text é".encode()
    store.set(key, bytearray(b"\x00\xff"))
    assert store.get(key) == b"\x00\xff"
    assert type(store.get(key)) is bytes


def test_stores_share_their_keys(make: Maker, key: str) -> None:
    first, second = make(), make()
    first.set(key, "1")
    assert second.get(key) == b"1"
    assert second.add(key, 2) == 3
    assert first.get(key) == b"3"


@pytest.mark.parametrize("odd", ["", "with\0nul", "/", "//a", "-", "-/a", "+/a", "refcount", "ключ", "a" * 5000])
def test_odd_keys(store: Store, odd: str) -> None:
    store.set(odd, "value")
    assert store.check([odd])
    assert store.get(odd) == b"value"
    assert odd in store.list_keys()
    assert store.get(odd.encode()) == store.get(bytearray(odd.encode())) == b"value"
    assert store.delete_key(odd)
    assert odd not in store.list_keys()


def test_undecodable_key_cannot_be_listed(store: Store, name: Name) -> None:
    raw = name("raw").encode() + b"\xff"
    store.set(raw, "value")
    assert store.get(raw) == b"value"
    with pytest.raises(UnicodeDecodeError):
        store.list_keys()
    assert store.delete_key(raw)
    assert name("raw") not in store.list_keys()


@pytest.mark.parametrize(
    "value", [b"", b"\0", b"/", bytes(range(256)), bytes(2**20)], ids=lambda value: str(len(value))
)
def test_any_value(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)
    assert store.get(key) == value
    assert store.compare_set(key, value, b"new") == b"new"
    store.append(key, value)
    assert store.multi_get([key]) == [b"new" + value]


def test_add(store: Store, key: str) -> None:
    assert store.add(key, 5) == 5
    assert store.add(key, -7) == -2
    assert store.get(key) == b"-2"
    assert store.add(key, 0) == -2
    assert store.add(key, True) == -1
    store.set(key, " \t+12abc")
    assert store.add(key, 1) == 13
    store.set(key, str(2**63 - 1))
    assert store.add(key, 1) == -(2**63)


@pytest.mark.parametrize("text", ["", "x", "9223372036854775808"])
def test_add_to_a_value_that_is_not_a_number(kind: Kind, make: Maker, key: str, text: str) -> None:
    store = make()
    store.set(key, text)
    error = DistNetworkError if kind.is_remote else ValueError
    with pytest.raises(
        error, match=None if kind.is_remote else f"'{kind.shown}{key}': its value is not a 64-bit number"
    ):
        store.add(key, 1)
    assert make().get(key) == text.encode()


@pytest.mark.parametrize(
    ("old", "expected", "desired", "answer", "after"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "other", "new", b"other", None),
        ("old", "old", "new", b"new", b"new"),
        ("old", "other", "new", b"old", b"old"),
        ("old", "", "new", b"old", b"old"),
        ("", "", "new", b"new", b"new"),
        ("", "other", "new", b"", b""),
        ("old", "old", "", b"", b""),
        ("old", "old", "old", b"old", b"old"),
    ],
)
def test_compare_set(
    store: Store, key: str, old: str | None, expected: str, desired: str, answer: bytes, after: bytes | None
) -> None:
    if old is not None:
        store.set(key, old)
    assert store.compare_set(key, expected, desired) == answer
    assert store.check([key]) == (after is not None)
    if after is not None:
        assert store.get(key) == after


def test_append(store: Store, key: str) -> None:
    store.append(key, "")
    assert store.get(key) == b""
    store.append(key, "v")
    store.append(key, "v")
    store.append(key, b"w")
    assert store.get(key) == b"vvw"


def test_check(store: Store, name: Name) -> None:
    store.set(name("a"), "")
    store.set(name("b"), "")
    assert store.check([])
    assert store.check([name("a"), name("b"), name("a")])
    assert not store.check([name("a"), name("c")])
    assert store.check((name("a"),))
    assert store.check(text for text in {name("b")})


def test_delete_key(store: Store, key: str) -> None:
    assert not store.delete_key(key)
    store.set(key, "1")
    assert store.delete_key(key) is True
    assert store.delete_key(key) is False
    assert not store.check([key])
    assert store.add(key, 1) == 1


def test_list_keys_and_num_keys(make: Maker, name: Name) -> None:
    store, other = make(), make()
    before = store.num_keys()
    others = set(store.list_keys())
    names = {name(text) for text in "abc"}
    for text in names:
        other.set(text, text)
    assert other.check(names)  # waits until the writes are done: a threaded server serves others meanwhile
    assert set(store.list_keys()) - others == names
    assert len(store.list_keys()) == len(set(store.list_keys()))
    assert store.num_keys() == before + 3
    other.delete_key(name("a"))
    assert store.num_keys() == before + 2


def test_multi(store: Store, name: Name) -> None:
    names = [name(text) for text in "abc"]
    store.multi_set(names, ["1", b"2", ""])
    assert store.multi_get(names) == [b"1", b"2", b""]
    assert store.multi_get((names[1], names[1])) == [b"2", b"2"]
    store.multi_set([names[0], names[0]], ["x", "y"])
    assert store.get(names[0]) == b"y"
    assert store.multi_get([]) == []
    store.multi_set([], [])


def test_multi_set_with_different_numbers_of_keys_and_values(store: Store, name: Name) -> None:
    with pytest.raises(DistStoreError, match="multiSet keys and values vectors must be of same size"):
        store.multi_set([name("a"), name("b")], ["1"])
    assert not store.check([name("a")])


@pytest.mark.parametrize(("named", "call", "wrong"), WRONG)
def test_invalid_arguments(store: Store, named: str, call: Call, wrong: list[Any]) -> None:
    keys = store.num_keys()
    for value in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(store, value)
        names(caught.value, named)
    assert store.num_keys() == keys


def test_arguments_by_name(store: Store, name: Name) -> None:
    store.set(key=name("k"), value="1")
    assert store.get(key=name("k")) == b"1"
    assert store.add(key=name("k"), amount=1) == 2
    assert store.compare_set(key=name("k"), expected="2", desired="3") == b"3"
    store.append(key=name("k"), value="4")
    assert store.check(keys=[name("k")])
    store.wait(keys=[name("k")], timeout=1.0)
    assert store.multi_get(keys=[name("k")]) == [b"34"]
    store.multi_set(keys=[name("m")], values=["1"])
    assert store.delete_key(key=name("m"))
    store.queue_push(key=name("q"), value="1")
    assert store.queue_len(key=name("q")) == 1
    assert store.queue_pop(key=name("q"), block=False) == b"1"
    store.barrier(key=name("b"), world_size=1, timeout=1.0)
    store.set_timeout(timeout=1.0)


def test_extended_api(store: Store) -> None:
    assert store.has_extended_api() is True


def test_clone(store: Store, key: str) -> None:
    store.set_timeout(12.5)
    clone = store.clone()
    store.set(key, "1")
    assert clone.get(key) == b"1"
    assert clone.timeout == timedelta(seconds=12.5)
    assert type(clone) is type(store)
    clone.close()
    clone.close()
    assert store.get(key) == b"1"


def test_with(maker: Maker, key: str) -> None:
    with maker() as store:
        store.set(key, "1")
        assert store.get(key) == b"1"
    store.close()
    if not isinstance(store, HashStore) and not isinstance(
        getattr(store, "_underlying_non_prefix_store", 0), HashStore
    ):
        with pytest.raises(DistError, match="closed"):
            store.get(key)
    with maker() as store:
        store.delete_key(key)


def test_stores_cannot_be_pickled(kind: Kind, store: Store) -> None:
    if kind.name != "async":
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(store)


def test_prefixes(store: Store, name: Name) -> None:
    view = PrefixStore(name("view"), store)
    view.set("k", "1")
    view.set(b"k2", "2")
    assert store.get(f"{name('view')}/k") == b"1"
    assert sorted(view.list_keys()) == ["k", "k2"]
    store.set(f"{name('view')}x", "is not in it")
    assert sorted(view.list_keys()) == ["k", "k2"]
    assert view.num_keys() == store.num_keys()
    view.close()
    assert store.get(f"{name('view')}/k") == b"1"
