"""What several rounds of one measurement say: medians, ratios, and how far either may be trusted.

Knows numbers, their rounds and sizes. Must not know servers, scenarios or files. Not called `statistics`: the
other scripts of this folder import Python's module of that name, with this folder first on their path.
Invariant: nothing here is drawn at random, so the same rounds always give the same answer; every interval consists of
values that were measured, and says with what confidence it holds.

The interval of a median is between two order statistics: the median of whatever the rounds were drawn from is below the
least of n values with probability 2**-n, whatever its distribution. Few rounds give little confidence, and say so:
min to max of three rounds is 75 %, of five 94 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

CONFIDENCE = 0.9
"""What an interval has at least, if there are rounds enough (five)."""

LEAST_ROUNDS = 3
"""Rounds below which nobody is said to be ahead: two agree by chance every second time."""

Verdict = Literal["beyond the noise", "within the noise", "too few rounds", "noise unknown"]


class Interval(NamedTuple):
    """Where a median lies."""

    low: float
    high: float
    confidence: float
    """From 0, which is that of a single value, to 1."""


class Ratio(NamedTuple):
    """How many times the other one takes what one takes, lower being better."""

    median: float
    low: float
    """Of the interval, the noise included where it is known."""
    high: float
    rounds: int
    noise: float | None
    """The factor, at least 1, by which the same server measured twice may differ; None where there was no control."""

    @property
    def verdict(self) -> Verdict:
        if self.rounds < LEAST_ROUNDS:
            return "too few rounds"
        if self.noise is None:
            return "noise unknown"
        return "within the noise" if self.low <= 1 <= self.high else "beyond the noise"

    @property
    def judged(self) -> bool:
        """Whether there is an interval that the noise is in, so that somebody may be said to be ahead."""
        return self.verdict in ("within the noise", "beyond the noise")


def median(values: Sequence[float]) -> float:
    """The median; of an even number the mean of the two in the middle. Raises StatisticsError for none."""
    return statistics.median(values)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest interval between order statistics that holds the median with the confidence wanted.

    All of them, with what confidence that has, where they are too few. Raises ValueError for no values.
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
    """The probability that the median is between the values left when so many were taken from either end."""
    if count == 1:
        return 0.0
    tail = sum(math.comb(count, number) for number in range(left_out + 1))
    return 1 - 2 * tail * 0.5**count


def paired(subject: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Subject over reference in every round that measured both: what changes from round to round falls out.

    Both map a round to a value. A round with a value that is not positive (less CPU than the clock can tell) is left
    out.
    """
    rounds = sorted(subject.keys() & reference.keys())
    return [subject[number] / reference[number] for number in rounds if subject[number] > 0 and reference[number] > 0]


def noise_of(reference: Mapping[int, float], control: Mapping[int, float]) -> float | None:
    """The factor, at least 1, by which the same server's two measurements may differ; None without a common round.

    It is the end of their ratio's interval that is farther from 1, not the median, because of few rounds the median is
    no better known than what it is to judge: with its median as the noise, three rounds would call 8 to 13 in a
    hundred equal servers different (rounds scattered by 5 %), with this 1 to 3.
    """
    ratios = paired(control, reference)
    if not ratios:
        return None
    found = interval(ratios)
    return max(found.high, 1 / found.low)


def noise_at(size: int, noises: Mapping[int, float]) -> float | None:
    """The noise at a size, from what the control says there and at the other sizes; None where it was not measured.

    It is no less than the upper quartile of all, of three sizes or fewer the greatest: in three rounds at one size the
    same server agrees with itself by chance, and the next run would not be within so narrow an interval.
    """
    if size not in noises:
        return None
    ordered = sorted(noises.values())
    return max(noises[size], ordered[math.ceil(0.75 * len(ordered)) - 1])


def ratio(subject: Mapping[int, float], reference: Mapping[int, float], noise: float | None = None) -> Ratio | None:
    """The median of the ratios of interleaved rounds, and its interval widened by the noise (a factor, if known).

    Subject and reference map a round to a value. None without a common round.
    """
    ratios = paired(subject, reference)
    if not ratios:
        return None
    found = interval(ratios)
    return Ratio(median(ratios), found.low / (noise or 1), found.high * (noise or 1), len(ratios), noise)


def unpaired(subject: Sequence[float], reference: Sequence[float], noise: float | None = None) -> Ratio | None:
    """Median over median of rounds that were not interleaved, such as those of two runs.

    The interval goes from the low end of one over the high end of the other to the opposite, widened by the noise (a
    factor): it holds at least as often as both intervals do. Values that are not positive are left out; None if
    nothing else is there.
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
