"""What a token allows, compared with what another allows."""

from __future__ import annotations

import pytest

from tcpstore_async.auth.access import Access

MINE = Access("1", "write", "job/", "a", max_keys=5, max_bytes=500, max_sessions=2)


@pytest.mark.parametrize(
    ("other", "includes"),
    [
        (Access("2", "write", "job/", "a", 9, "k", max_keys=5, max_bytes=500, max_sessions=2), True),
        (Access("2", "admin", "", ""), True),
        (Access("2", "admin", "jo", "", max_keys=6), True),
        (Access("2", "read", "", ""), False),
        (Access("2", "write", "job/1", ""), False),
        (Access("2", "write", "bob/", ""), False),
        (Access("2", "write", "", "b"), False),
        (Access("2", "write", "", "", max_keys=4), False),
        (Access("2", "write", "", "", max_bytes=499), False),
        (Access("2", "write", "", "", max_sessions=1), False),
    ],
)
def test_a_token_that_allows_at_least_as_much(other: Access, includes: bool) -> None:
    assert other.includes(MINE) == includes


def test_no_limit_includes_every_limit_only() -> None:
    assert not MINE.includes(Access("2", "write", "job/", "a"))
