"""Formatting of numbers and ratios."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.scale import formatting
from bench.stats import Ratio


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (formatting.seconds, 0.0, "0 s"),
        (formatting.seconds, 1e-10, "0.100 ns"),
        (formatting.seconds, 3.14159e-6, "3.14 µs"),
        (formatting.seconds, 0.0009999, "1.00 ms"),
        (formatting.seconds, 1234.5, "1,234 s"),
        (formatting.num_bytes, 0, "0 B"),
        (formatting.num_bytes, 12, "12.0 B"),
        (formatting.num_bytes, 1536, "1.50 KiB"),
        (formatting.num_bytes, 8 << 30, "8.00 GiB"),
        (formatting.short, 256, "256"),
        (formatting.short, 1024, "1K"),
        (formatting.short, 19_000, "19,000"),
        (formatting.short, 98_304, "96K"),
        (formatting.short, 1_000_000, "1M"),
        (formatting.short, 1_000_001, "1,000,001"),
        (formatting.times, 0.92, "0.92×"),
        (formatting.times, 0.0341, "0.034×"),
        (formatting.times, 12.345, "12.35×"),
        (formatting.times, 123.4, "123×"),
        (formatting.times, 1234.0, "1,234×"),
    ],
)
def test_numbers(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(0.5, 0.5, 0.5, 1, None), "0.50× (one round, no interval)"),
        (Ratio(0.5, 0.4, 0.6, 2, None), "0.50× (2 rounds, no interval)"),
        (Ratio(0.5, 0.4, 0.6, 3, None), "0.50× (noise unknown)"),
        (Ratio(0.5, 0.4, 0.6, 3, 1.0), "0.50× (0.40–0.60)"),
    ],
)
def test_a_ratio_has_an_interval_or_the_reason_why_not(ratio: Ratio, text: str) -> None:
    assert formatting.ratio(ratio) == text
