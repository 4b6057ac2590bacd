"""Medians, intervals and ratios of repeated measurements, and how numbers are written.

Must not know servers, scenarios or files. Not called `statistics`, which scripts of this folder import from Python's
library with this folder first on their path.
Invariant: nothing is random, so the same rounds give the same answer; an interval consists of measured values and has a
known confidence; no number is written without its unit.

The interval of a median lies between two order statistics: whatever the distribution, all of n values are above its
median with probability 2**-n, and all below it with the same. Min to max of three rounds has 75 % confidence, of five
94 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

CONFIDENCE = 0.9
"""Minimum of an interval from five rounds on."""

LEAST_ROUNDS = 3
"""With fewer, nobody is said to be ahead: two agree by chance every second time."""

Verdict = Literal["beyond the noise", "within the noise", "too few rounds", "noise unknown"]


class Interval(NamedTuple):
    """Bounds of a median."""

    low: float
    high: float
    confidence: float
    """0 (a single value) to 1."""


class Ratio(NamedTuple):
    """Subject over reference; lower is better."""

    median: float
    low: float
    """The interval, widened by the noise if that is known."""
    high: float
    rounds: int
    noise: float | None
    """The factor, at least 1, by which two measurements of one server may differ; None without a control."""

    @property
    def verdict(self) -> Verdict:
        if self.rounds < LEAST_ROUNDS:
            return "too few rounds"
        if self.noise is None:
            return "noise unknown"
        return "within the noise" if self.low <= 1 <= self.high else "beyond the noise"

    @property
    def judged(self) -> bool:
        """Whether the interval includes the noise, so that somebody may be said to be ahead."""
        return self.verdict in ("within the noise", "beyond the noise")

    def __str__(self) -> str:
        """Return the ratio with its interval, or say why it has none."""
        if self.verdict == "too few rounds":
            return f"{format_times(self.median)} ({format_rounds(self.rounds)}, no interval)"
        if self.verdict == "noise unknown":
            return f"{format_times(self.median)} (noise unknown)"
        return f"{format_times(self.median)} ({format_interval(self.low, self.high)})"


def median(values: Sequence[float]) -> float:
    """Return the median. Raises StatisticsError without values."""
    return statistics.median(values)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the narrowest interval between order statistics with at least this confidence, or min to max.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    count = len(ordered)
    left_out = 0
    while left_out + 1 < (count + 1) // 2 and _holds(count, left_out + 1) >= confidence:
        left_out += 1
    return Interval(ordered[left_out], ordered[-1 - left_out], _holds(count, left_out))


def _holds(count: int, left_out: int) -> float:
    """Return the confidence of the interval that leaves out so many values at either end."""
    if count == 1:
        return 0.0
    tail = sum(math.comb(count, number) for number in range(left_out + 1))
    return 1 - 2 * tail * 0.5**count


def paired(subject: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Return subject over reference for every round that measured both, which cancels drift between rounds.

    Both map a round to a value. Rounds with a value that is not positive (below the clock's resolution) are left out.
    """
    rounds = sorted(subject.keys() & reference.keys())
    return [subject[number] / reference[number] for number in rounds if subject[number] > 0 and reference[number] > 0]


def noise_of(reference: Mapping[int, float], control: Mapping[int, float]) -> float | None:
    """Return the factor, at least 1, by which two measurements of one server may differ; None without a common round.

    It is the end of the ratio's interval that is farther from 1. With the median instead, three rounds would call 8 to
    13 % of equal servers different (rounds scattered by 5 %); with this, 1 to 3 %.
    """
    ratios = paired(control, reference)
    if not ratios:
        return None
    found = interval(ratios)
    return max(found.high, 1 / found.low)


def noise_at(size: int, noises: Mapping[int, float]) -> float | None:
    """Return the noise at a size, at least the upper quartile of all sizes; None if it was not measured there.

    Three rounds of one server may agree by chance, and the next run would fall outside so narrow an interval.
    """
    if size not in noises:
        return None
    ordered = sorted(noises.values())
    return max(noises[size], ordered[math.ceil(0.75 * len(ordered)) - 1])


def ratio(subject: Mapping[int, float], reference: Mapping[int, float], noise: float | None = None) -> Ratio | None:
    """Return the median ratio of interleaved rounds, its interval widened by the noise; None without a common round."""
    ratios = paired(subject, reference)
    if not ratios:
        return None
    found = interval(ratios)
    return Ratio(median(ratios), found.low / (noise or 1), found.high * (noise or 1), len(ratios), noise)


def unpaired(subject: Sequence[float], reference: Sequence[float], noise: float | None = None) -> Ratio | None:
    """Return median over median of rounds that were not interleaved, such as those of two runs.

    The interval combines the opposite ends of both, widened by the noise. Values that are not positive are left out;
    None if no others remain.
    """
    above = [value for value in subject if value > 0]
    below = [value for value in reference if value > 0]
    if not above or not below:
        return None
    upper, lower = interval(above), interval(below)
    widened = noise or 1
    return Ratio(
        median(above) / median(below),
        upper.low / lower.high / widened,
        upper.high / lower.low * widened,
        min(len(above), len(below)),
        noise,
    )


# How numbers are written

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def _digits(value: float, significant: int = 3) -> str:
    """Round to this many significant digits, but keep all before the point; separate thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    # Take the exponent of the rounded number: 0.9999 is 1.00 in three digits.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    after = max(0, significant - 1 - exponent)
    return f"{value:,.{after}f}"


def format_seconds(value: float) -> str:
    """Format seconds in a suitable unit: 15.3 µs."""
    return _scaled(value, _SECONDS)


def format_bytes(value: float) -> str:
    """Format bytes in a suitable unit: 1.50 KiB."""
    return _scaled(value, _BYTES)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return f"0 {units[-1][0] if units is _BYTES else 's'}"
    # 999.9 µs rounds to 1 ms.
    unit, scale = next(((unit, scale) for unit, scale in units if abs(value) >= scale * 0.9995), units[-1])
    return f"{_digits(value / scale)} {unit}"


def format_size(size: int) -> str:
    """Format a size as the libuv tutorial does: 1K, 96K; others in full."""
    if size >= 1024 and size % 1024 == 0:
        return f"{size // 1024}K"
    return f"{size // 1_000_000}M" if size >= 1_000_000 and size % 1_000_000 == 0 else f"{size:,}"


def format_times(value: float) -> str:
    """Format a ratio: 0.92×."""
    return f"{value:,.2f}×" if 0.1 <= value < 100 else f"{_digits(value, 2)}×"


def format_interval(low: float, high: float) -> str:
    return f"{format_times(low)[:-1]}–{format_times(high)[:-1]}"


def format_rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def spread(values: Sequence[float], unit: str = "") -> str:
    """Format the median, and in brackets the least and the greatest value."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}–{max(values):.2f})"
