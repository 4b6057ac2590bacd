"""Keys like one that does not exist; that stories from reports are told is in tests/unit/diagnosis/test_nearest.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tcpstore_async.observe.similar_keys import Search, family_of, neighbours, number_after, numbers, without_numbers


def nearest(wanted: str, existing: list[str]) -> list[str]:
    search = Search([wanted], set(existing).__contains__)
    search.add(existing)
    while not search.compare():
        pass
    return search.nearest(wanted)


def test_a_neighbour_needs_no_look_at_all_keys() -> None:
    search = Search(["/a/7/b/3"], {"/a/5/b/3", "/a/7/b/4", "/a/7/b/1", "/a/8/b/4"}.__contains__)
    assert search.compare() or search.compare()
    assert search.nearest("/a/7/b/3") == ["/a/5/b/3", "/a/7/b/4"]


def test_padded_numbers_have_neighbours_of_the_same_length() -> None:
    assert neighbours("/step_0010", {"/step_0009", "/step_9"}.__contains__) == ["/step_0009"]
    assert neighbours("/step_10", {"/step_9"}.__contains__) == ["/step_9"]
    assert neighbours("/0", {"/-1", "/1"}.__contains__) == ["/1"]


def test_of_a_number_that_is_far_away() -> None:
    assert nearest("/step/1000", ["/step/3", "/step/10", "/other/1"]) == ["/step/10"]


def test_two_numbers_that_differ_are_worse_than_one() -> None:
    assert nearest("/a/100/200", ["/a/1/1", "/a/100/1"])[0] == "/a/100/1"
    assert nearest("/a/100/200", ["/a/1/1"]) == ["/a/1/1"]


def test_the_same_end_and_similar_letters() -> None:
    assert nearest("/attempt/worker/ready", ["/worker/ready", "/x"]) == ["/worker/ready"]
    assert nearest("/worker/raedy", ["/x", "/worker/ready"]) == ["/worker/ready"]


def test_the_work_is_cut_into_portions() -> None:
    existing = [f"/step/{number}/{number}" for number in range(10_000)]
    search = Search(["/step/99999/99999"], set(existing).__contains__)
    search.add(existing)
    steps = 1
    while not search.compare():
        steps += 1
    assert steps >= 40
    assert search.nearest("/step/99999/99999") == ["/step/9999/9999"]


@given(st.text("ab/019", max_size=12))
def test_a_family_and_its_number_are_the_key(key: str) -> None:
    found = family_of(key)
    if found is not None:
        family, number = found
        assert family.key(number) == key
        assert number == numbers(key)[-1]
        assert without_numbers(str(family)) == without_numbers(family.key(0)).rpartition("#")[0] + "*" + family.after


@given(st.text("ab/01²", max_size=6), st.text("ab/0123456789²", max_size=12))
def test_a_number_that_follows_is_that_of_the_family(before: str, after: str) -> None:
    number = number_after(before, before + after)
    if number is not None and family_of(before + "1") == ((before, ""), 1):  # `before` is all that precedes the number
        assert family_of(before + after) == ((before, ""), number)


def test_a_number_that_follows() -> None:
    assert number_after("/a/", "/a/12") == 12
    assert [number_after("/a/", key) for key in ("/a/", "/b/1", "/a/01", "/a/1b", "/a/²", f"/a/{10**9}")] == [None] * 6
