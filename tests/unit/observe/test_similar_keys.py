"""Keys like one that does not exist; that stories from reports are told is in tests/unit/diagnosis/test_nearest.py."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tcpstore_async.observe.similar_keys import MOST, Nearest, family_of, neighbours, number_after


def nearest(wanted: str, existing: list[str]) -> list[str]:
    search = Nearest(wanted.encode())
    for age, name in enumerate(existing):
        search.add(name.encode(), age)
    return [name.decode() for name in search.found()]


def test_padded_numbers_have_neighbours_of_the_same_length() -> None:
    assert neighbours("/step_0010", {"/step_0009", "/step_9"}.__contains__) == ["/step_0009"]
    assert neighbours("/step_10", {"/step_9"}.__contains__) == ["/step_9"]
    assert neighbours("/0", {"/-1", "/1"}.__contains__) == ["/1"]


def test_fewer_numbers_that_differ_are_nearer() -> None:
    assert nearest("/a/100/200", ["/a/1/1", "/a/100/1"]) == ["/a/100/1", "/a/1/1"]
    assert nearest("/epoch/9/5", [f"/epoch/{number // 7}/{number % 7}" for number in range(40)])[0] == "/epoch/4/5"


def test_one_key_for_each_way_to_differ() -> None:
    assert nearest("/a/5/b/5", ["/a/5/b/3", "/a/5/b/4", "/a/7/b/5", "/a/5/c/1", "/a/5/c/2"]) == [
        "/a/5/b/4",
        "/a/7/b/5",
        "/a/5/c/1",
    ]


def test_the_same_end_and_similar_letters() -> None:
    assert nearest("/attempt/worker/ready", ["/attempt/worker/done", "/worker/ready", "/x"]) == [
        "/worker/ready",
        "/attempt/worker/done",
    ]
    assert nearest("/worker/raedy", ["/x", "/worker/ready"]) == ["/worker/ready"]
    assert nearest("/worker", ["", "/x", "/other"]) == []


def test_of_equally_near_keys_the_newest_is_found() -> None:
    assert nearest("/a/5", ["/a/6", "/a/4"]) == ["/a/6"]


@given(st.binary(max_size=20), st.lists(st.binary(max_size=20), max_size=20))
def test_found_are_some_of_the_existing_keys(wanted: bytes, existing: list[bytes]) -> None:
    search = Nearest(wanted)
    for key in existing:
        search.add(key, 0.0)
    found = search.found()
    assert set(found) <= set(existing) - {wanted}
    assert len(set(found)) == len(found) <= MOST


@given(st.text("ab/019", max_size=12))
def test_a_family_and_its_number_are_the_key(key: str) -> None:
    found = family_of(key)
    if found is not None:
        family, number = found
        assert family.key(number) == key
        assert number == int(re.findall("[0-9]+", key)[-1])


@given(st.text("ab/01²", max_size=6), st.text("ab/0123456789²", max_size=12))
def test_a_number_that_follows_is_that_of_the_family(before: str, after: str) -> None:
    number = number_after(before, before + after)
    if number is not None and family_of(before + "1") == ((before, ""), 1):  # `before` is all that precedes the number
        assert family_of(before + after) == ((before, ""), number)


def test_a_number_that_follows() -> None:
    assert number_after("/a/", "/a/12") == 12
    assert [number_after("/a/", key) for key in ("/a/", "/b/1", "/a/01", "/a/1b", "/a/²", f"/a/{10**9}")] == [None] * 6
