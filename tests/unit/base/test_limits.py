"""What a server grants."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from tcpstore_async.base.errors import LimitError, PeerError
from tcpstore_async.base.limits import MIB, Limits


def test_the_defaults_are_those_of_pytorch() -> None:
    limits = Limits()
    assert (limits.key_bytes, limits.value_bytes, limits.keys) == (8192, 8_388_608, 131_072)


def test_the_defaults_let_the_largest_request_in() -> None:
    limits = Limits()
    assert limits.request_bytes > limits.key_bytes + 2 * limits.value_bytes + 100
    assert limits.budget_bytes >= 4 * limits.request_bytes


def test_limits_never_change() -> None:
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        cast(Any, Limits()).keys = 5


def test_single_limits_may_be_given() -> None:
    limits = Limits(keys=3)
    assert (limits.keys, limits.value_bytes) == (3, 8 * MIB)
    assert Limits(keys=3) == limits


def test_a_value_must_fit_the_budget() -> None:
    least = 50 + 16
    assert Limits(value_bytes=50, budget_bytes=least)
    with pytest.raises(ValueError, match=f"budget_bytes is {least - 1}, .* require at least {least}"):
        Limits(value_bytes=50, budget_bytes=least - 1)


def test_a_request_of_the_longest_key_and_values_must_be_within_its_limit() -> None:
    least = 10 + 2 * 50 + 25
    assert Limits(key_bytes=10, value_bytes=50, request_bytes=least)
    with pytest.raises(ValueError, match=f"request_bytes is {least - 1}, .* require at least {least}"):
        Limits(key_bytes=10, value_bytes=50, request_bytes=least - 1)


def test_an_error_names_its_limit() -> None:
    error = LimitError("keys", 5, 4)
    assert isinstance(error, PeerError)
    assert (error.limit, error.size, error.allowed) == ("keys", 5, 4)
    assert str(error) == "limit exceeded: keys=5 (max 4)"
