"""Medians, intervals and ratios: known values and properties; and how numbers are written."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import stats

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)
ROUNDS = st.dictionaries(st.integers(0, 20), POSITIVE, min_size=1, max_size=15)


def by_round(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 1, 1, 0.0), (2, 1, 2, 0.5), (3, 1, 3, 0.75), (5, 1, 5, 0.9375), (7, 1, 7, 0.984375), (8, 2, 7, 0.9296875)],
)
def test_between_which_values_the_median_lies(count: int, low: float, high: float, confidence: float) -> None:
    """The probabilities are those of as many coin tosses."""
    shuffled = random.Random(1).sample(range(1, count + 1), count)
    assert stats.interval([float(value) for value in shuffled]) == (low, high, confidence)


@given(st.lists(POSITIVE, min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.99]))
def test_an_interval_holds_the_median_of_its_values(values: list[float], confidence: float) -> None:
    found = stats.interval(values, confidence)
    assert found.low <= statistics.median(values) <= found.high
    assert {found.low, found.high} <= set(values)
    assert found.confidence >= confidence or (found.low, found.high) == (min(values), max(values))


@pytest.mark.parametrize("count", [3, 5, 8, 12])
def test_an_interval_holds_the_true_median_with_its_confidence(count: int) -> None:
    """On a skewed distribution whose median is 1."""
    dice = random.Random(7)
    drawn = [stats.interval([dice.lognormvariate(0, 1) for _ in range(count)]) for _ in range(4000)]
    share = sum(found.low <= 1 <= found.high for found in drawn) / len(drawn)
    assert share == pytest.approx(drawn[0].confidence, abs=0.02)


def test_a_ratio_is_taken_round_by_round() -> None:
    """The second round was slow for both; a ratio of medians would mix rounds."""
    found = stats.ratio(by_round([1.0, 9.0, 2.0]), by_round([2.0, 10.0, 2.0]))
    assert found == stats.Ratio(0.9, 0.5, 1.0, 3, None)


def test_only_rounds_that_both_measured_count() -> None:
    assert stats.paired({1: 2.0, 2: 3.0, 4: 8.0}, {2: 1.0, 3: 5.0, 4: 2.0}) == [3.0, 4.0]
    assert stats.ratio({1: 1.0}, {2: 1.0}) is None


def test_a_round_too_short_for_the_clock_does_not_count() -> None:
    assert stats.paired(by_round([0.0, 2.0, 4.0]), by_round([1.0, 0.0, 2.0])) == [2.0]
    assert stats.unpaired([0.0], [1.0]) is None


def test_the_control_widens_the_interval() -> None:
    reference = by_round([1.0, 1.0, 1.0])
    noise = stats.noise_of(reference, by_round([1.2, 1.25, 1.3]))
    found = stats.ratio(by_round([0.8, 0.9, 0.85]), reference, noise)
    assert found is not None
    assert found.noise == 1.3
    assert found.median == 0.85
    assert (found.low, found.high) == pytest.approx((0.8 / 1.3, 0.9 * 1.3))
    assert found.verdict == "within the noise"


def test_a_control_that_agrees_by_chance_does_not_hide_the_noise() -> None:
    """Its noise at most other sizes counts as well, but not that of a single size."""
    assert stats.noise_at(8, {1: 1.1, 2: 1.2, 4: 1.3, 8: 1.0}) == 1.2
    assert stats.noise_at(1, {1: 1.5, 2: 1.0, 4: 1.0, 8: 1.0}) == 1.5
    assert stats.noise_at(2, {2: 1.01}) == 1.01
    assert stats.noise_at(2, {4: 1.01}) is None


def test_three_rounds_of_equal_servers_differ_rarely_and_are_reproduced_mostly() -> None:
    """On a machine where rounds scatter by 5 % and servers by another 3 % from run to run."""
    dice = random.Random(11)

    def server() -> dict[int, float]:
        bias = dice.lognormvariate(0, 0.03)
        return by_round([bias * dice.lognormvariate(0, 0.05) for _ in range(3)])

    def measured() -> stats.Ratio | None:
        reference = server()
        return stats.ratio(server(), reference, stats.noise_of(reference, server()))

    runs = [measured() for _ in range(4000)]
    found = [ratio for ratio in runs if ratio is not None]
    different = sum(ratio.verdict == "beyond the noise" for ratio in found)
    again = sum(one.low <= other.median <= one.high for one, other in itertools.pairwise(found))
    assert different / len(found) < 0.05
    assert again / len(found) > 0.85


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.8, 0.9, 0.95], "beyond the noise"),
        ([1.1, 1.2, 1.3], "beyond the noise"),
        ([0.9, 0.95, 1.01], "within the noise"),
        ([0.1], "too few rounds"),
        ([0.1, 0.1], "too few rounds"),
    ],
)
def test_verdicts(values: list[float], verdict: str) -> None:
    """The control never differed from the reference."""
    reference = by_round([1.0] * len(values))
    found = stats.ratio(by_round(values), reference, stats.noise_of(reference, reference))
    assert found is not None
    assert found.verdict == verdict
    assert found.judged is (len(values) >= 3)


@pytest.mark.parametrize("control", [{}, {7: 1.0}])
def test_without_a_control_there_is_no_verdict(control: dict[int, float]) -> None:
    """Nor with a control measured in other rounds: equal servers would often be called different."""
    reference = by_round([1.0, 1.0, 1.0])
    found = stats.ratio(by_round([0.1, 0.1, 0.1]), reference, stats.noise_of(reference, control))
    assert found is not None
    assert found.verdict == "noise unknown"
    assert not found.judged


@given(ROUNDS, ROUNDS)
def test_the_interval_of_the_inverse_is_the_reciprocal(subject: dict[int, float], reference: dict[int, float]) -> None:
    found, turned = stats.ratio(subject, reference), stats.ratio(reference, subject)
    if found is None or turned is None:
        assert found is turned
        return
    assert (1 / turned.high, 1 / turned.low) == pytest.approx((found.low, found.high))


@given(st.lists(POSITIVE, min_size=1, max_size=9), st.lists(POSITIVE, min_size=1, max_size=9))
def test_unpaired_is_as_wide_as_both(subject: list[float], reference: list[float]) -> None:
    found = stats.unpaired(subject, reference, 1.5)
    assert found is not None
    middle = statistics.median(subject) / statistics.median(reference)
    assert found.median == pytest.approx(middle)
    assert found.low <= middle / 1.5 * 1.000001
    assert found.high >= middle * 1.5 * 0.999999


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (stats.format_seconds, 0.0, "0 s"),
        (stats.format_seconds, 1e-10, "0.100 ns"),
        (stats.format_seconds, 3.14159e-6, "3.14 µs"),
        (stats.format_seconds, 0.0009999, "1.00 ms"),
        (stats.format_seconds, 1234.5, "1,234 s"),
        (stats.format_bytes, 0, "0 B"),
        (stats.format_bytes, 12, "12.0 B"),
        (stats.format_bytes, 1536, "1.50 KiB"),
        (stats.format_bytes, 8 << 30, "8.00 GiB"),
        (stats.format_size, 256, "256"),
        (stats.format_size, 1024, "1K"),
        (stats.format_size, 19_000, "19,000"),
        (stats.format_size, 98_304, "96K"),
        (stats.format_size, 1_000_000, "1M"),
        (stats.format_size, 1_000_001, "1,000,001"),
        (stats.format_times, 0.92, "0.92×"),
        (stats.format_times, 0.0341, "0.034×"),
        (stats.format_times, 12.345, "12.35×"),
        (stats.format_times, 123.4, "123×"),
        (stats.format_times, 1234.0, "1,234×"),
    ],
)
def test_numbers(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (stats.Ratio(0.5, 0.5, 0.5, 1, None), "0.50× (one round, no interval)"),
        (stats.Ratio(0.5, 0.4, 0.6, 2, None), "0.50× (2 rounds, no interval)"),
        (stats.Ratio(0.5, 0.4, 0.6, 3, None), "0.50× (noise unknown)"),
        (stats.Ratio(0.5, 0.4, 0.6, 3, 1.0), "0.50× (0.40–0.60)"),
    ],
)
def test_a_ratio_has_an_interval_or_the_reason_why_not(ratio: stats.Ratio, text: str) -> None:
    assert str(ratio) == text
