"""A run's samples as series, ratios between them, and who is ahead.

Must not know files, Markdown or figures. A server is never named without its transport.
Invariant: a ratio is taken between measurements of one run, one transport and one size; only the noise is taken from
all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import stats
from bench.scale.results import SATURATED, Ending, Job, Run, Sample, Transport
from bench.scale.scenarios import SCENARIOS, Metric, Scenario, scenario_of

TUTORIAL_RANKS = 98_304
TUTORIAL_SECONDS = 100.0
"""From the tutorial's figure: PyTorch's libuv server, init of 98,304 ranks."""

_OURS = ("uvloop", "threaded")

SERVER_NAMES = {
    "uvloop": "ours on uvloop",
    "relay": "ours behind relays of 8 ranks",
    "threaded": "ours with threads",
    "libuv": "PyTorch libuv",
    "legacy": "PyTorch legacy",
    "control": "control (the reference again)",
}
"""In the order of legends and tables."""

TRANSPORT_NAMES: dict[Transport, str] = {"sockets": "sockets", "memory": "memory (no sockets)"}


def server_name(name: str) -> str:
    """Return a server's display name; an unknown one keeps its own."""
    return SERVER_NAMES.get(name, name)


def series_name(name: str, transport: Transport) -> str:
    """Return a server's display name with its transport."""
    return f"{server_name(name)}, {TRANSPORT_NAMES[transport]}"


def capitalized(name: str) -> str:
    """Capitalize the first letter only."""
    return name[:1].upper() + name[1:]


def sort_key(name: str, transport: Transport) -> tuple[int, str, bool]:
    """Sort ours first, then PyTorch's, the control, and others by name."""
    names = list(SERVER_NAMES)
    return (names.index(name) if name in names else len(names), name, transport != "sockets")


@dataclass(frozen=True)
class Series:
    """The samples of one server over one transport, by size and round."""

    server: str
    transport: Transport
    points: dict[int, dict[int, Sample]]

    @property
    def label(self) -> str:
        return series_name(self.server, self.transport)

    @property
    def sizes(self) -> list[int]:
        return sorted(self.points)

    def values(self, size: int, metric: Metric) -> dict[int, float]:
        """Return the metric by round, without rounds that lack it or were below the clock's resolution.

        Memory that has not grown is a value.
        """
        found = {number: metric.of(sample) for number, sample in self.points.get(size, {}).items()}
        zero_counts = metric.unit == "bytes"
        return {
            number: value
            for number, value in found.items()
            if value is not None and (value > 0 or (zero_counts and value == 0))
        }

    def median(self, size: int, metric: Metric) -> float | None:
        values = list(self.values(size, metric).values())
        return stats.median(values) if values else None

    def saturated(self, size: int) -> bool:
        """Whether the generator may have limited any round; in memory there is none."""
        return self.transport == "sockets" and any(
            sample.generator_share >= SATURATED for sample in self.points.get(size, {}).values()
        )


@dataclass(frozen=True)
class Comparison:
    """Two servers at the largest size that both were measured at."""

    subject: Series
    reference: Series
    size: int
    time: stats.Ratio
    """Of the scenario's metric, which is time in most."""
    cpu: stats.Ratio | None

    @property
    def saturated(self) -> bool:
        return self.subject.saturated(self.size) or self.reference.saturated(self.size)


@dataclass(frozen=True)
class Result:
    """What a run has of a scenario, or of one of its operations."""

    scenario: Scenario
    detail: str
    """The operation; empty in most scenarios."""
    reference_name: str
    series: list[Series]
    endings: list[Ending]
    job: Job | None = None
    """What a scenario of a start replayed; None in older files."""

    @property
    def title(self) -> str:
        return f"The start of a job: {self.job}" if self.job else self.scenario.title

    def find(self, server: str, transport: Transport) -> Series | None:
        return next((one for one in self.series if (one.server, one.transport) == (server, transport)), None)

    def reference(self, transport: Transport) -> Series | None:
        """Return what the others are compared with, or None if it was not measured."""
        return self.find(self.reference_name, transport)

    def subject(self) -> Series | None:
        """Return our series, over sockets if there is one."""
        servers = [server for server in _OURS if server != self.reference_name]
        known = [self.find(server, transport) for transport in ("sockets", "memory") for server in servers]
        return next((one for one in known if one is not None), None)

    def ending(self, one: Series) -> Ending | None:
        found = [e for e in self.endings if (e.server, e.transport) == (one.server, one.transport)]
        return min(found, key=lambda ending: ending.size, default=None)

    def ratio(self, one: Series, size: int, metric: Metric) -> stats.Ratio | None:
        """Return a series' ratio to the reference at a size; None if either lacks it, and for the reference itself."""
        reference = self.reference(one.transport)
        if reference is None or reference.server == one.server:
            return None
        noises = self._noises(one.transport, metric)
        if one.server == "control":  # its difference here is the noise here: only other sizes may widen it
            noises = {**noises, size: 1.0}
        return stats.ratio(one.values(size, metric), reference.values(size, metric), stats.noise_at(size, noises))

    def noise(self, transport: Transport, size: int, metric: Metric) -> float | None:
        """Return the factor by which two measurements of one server may differ; None without a control."""
        return stats.noise_at(size, self._noises(transport, metric))

    def _noises(self, transport: Transport, metric: Metric) -> dict[int, float]:
        """Return by size how much the control differs from the reference."""
        reference, control = self.reference(transport), self.find("control", transport)
        if reference is None or control is None:
            return {}
        found = {
            size: stats.noise_of(reference.values(size, metric), control.values(size, metric)) for size in control.sizes
        }
        return {size: noise for size, noise in found.items() if noise is not None}

    def last_ratio(self, one: Series, metric: Metric) -> tuple[int, stats.Ratio] | None:
        """Return the largest size in common with the reference that has enough rounds to judge, and the ratio there.

        If none has, take the largest size in common.
        """
        ratios = [(size, self.ratio(one, size, metric)) for size in reversed(one.sizes)]
        found = [(size, ratio) for size, ratio in ratios if ratio is not None]
        return next((each for each in found if each[1].judged), found[0] if found else None)

    def comparison(self) -> Comparison | None:
        """Compare ours with the reference; None if either is missing."""
        subject = self.subject()
        if subject is None:
            return None
        found = self.last_ratio(subject, self.scenario.metric)
        reference = self.reference(subject.transport)
        if found is None or reference is None:
            return None
        size, time = found
        return Comparison(subject, reference, size, time, self.ratio(subject, size, self.scenario.cpu))


def results(run: Run) -> list[Result]:
    """Return the result of every scenario that has samples or endings, in the order of the report."""
    names = dict.fromkeys([sample.scenario for sample in run.samples] + [ending.scenario for ending in run.endings])
    order = {name: place for place, name in enumerate(SCENARIOS)}
    return sorted((_result(name, run) for name in names), key=lambda one: order.get(one.scenario.name, len(order)))


def by_scenario(run: Run) -> dict[str, list[Result]]:
    """Group the results by the scenario's name: several if it has operations."""
    found: dict[str, list[Result]] = {}
    for result in results(run):
        found.setdefault(result.scenario.name, []).append(result)
    return found


def _result(name: str, run: Run) -> Result:
    scenario, detail = scenario_of(name)
    samples = [sample for sample in run.samples if sample.scenario == name]
    endings = [ending for ending in run.endings if ending.scenario == name]
    return Result(scenario, detail, run.reference, _series(samples), endings, run.jobs.get(scenario.name))


def _series(samples: Iterable[Sample]) -> list[Series]:
    series: dict[tuple[str, Transport], Series] = {}
    for sample in samples:
        key = (sample.server, sample.transport)
        one = series.setdefault(key, Series(*key, {}))
        one.points.setdefault(sample.size, {})[sample.round] = sample
    return sorted(series.values(), key=lambda one: sort_key(one.server, one.transport))


def series_of(ending: Ending, result: Result, results: Sequence[Result]) -> Series | None:
    """Return the series that ends there, in any operation if the ending is the whole scenario's."""
    among = [result] if result.detail else results
    found = (each.find(ending.server, ending.transport) for each in among)
    return next((one for one in found if one is not None), None)


def rounds(series: Iterable[Series]) -> str:
    """Return how many rounds the points really have, such as `3` or `1 to 3`."""
    found = sorted({len(those) for one in series for those in one.points.values()})
    return " to ".join(str(count) for count in dict.fromkeys([found[0], found[-1]])) if found else "none"


def verdict(result: Result) -> str:
    """Say who is ahead and by how much, or why nobody is."""
    found = result.comparison()
    if found is None:
        return _alone(result)
    reference = server_name(found.reference.server)
    where = f"at {found.size:,} {result.scenario.sizes_are}, {TRANSPORT_NAMES[found.subject.transport]}"
    judged = found.time.judged
    ratio = str(found.time) if judged else stats.format_times(found.time.median)
    text = f"{ratio} the {result.scenario.metric.name} of {reference} {where}{'' if judged else ', no interval'}"
    cpu = f" ({result.scenario.cpu.axis}: {stats.format_times(found.cpu.median)})" if found.cpu else ""
    return f"{_ahead(found)} {text}{cpu}{'; the generator was saturated there' if found.saturated else ''}"


def _ahead(found: Comparison) -> str:
    subject, reference = server_name(found.subject.server), server_name(found.reference.server)
    if not found.time.judged:
        return f"{_why_unjudged(found.time)}: {subject}"
    if found.time.verdict == "within the noise":
        return f"No difference beyond the noise: {subject}"
    if found.time.median < 1:
        return f"{capitalized(subject)} is ahead:"
    return f"{capitalized(reference)} is ahead: {subject}"


def _why_unjudged(found: stats.Ratio) -> str:
    """Say why nobody is called ahead, as the beginning of a sentence."""
    if found.verdict == "too few rounds":
        return capitalized(stats.format_rounds(found.rounds))
    return "No control, noise unknown"


def _alone(result: Result) -> str:
    """Say why there is no ratio."""
    names = ", ".join(one.label for one in result.series)
    if not names:
        return "Nothing was measured"
    subject = result.subject()
    if subject is None or result.reference(subject.transport) is None:
        return f"Nothing to compare: only {names}"
    metric = result.scenario.metric
    zero = [one.label for one in result.series if any(one.median(size, metric) == 0 for size in one.sizes)]
    if zero:
        return f"No ratio: {metric.axis} was 0 of {', '.join(zero)}"
    return f"No ratio: no size in common of {names}"


def verdict_of_all(results: Sequence[Result]) -> str:
    """Say the same of a scenario with several operations."""
    found = [(result.detail, comparison) for result in results if (comparison := result.comparison())]
    if not found:
        return _alone(results[0])
    comparisons = [comparison for _, comparison in found]
    subject, reference = (server_name(one.server) for one in (comparisons[0].subject, comparisons[0].reference))
    ratios = [comparison.time.median for comparison in comparisons]
    text = (
        f"{subject} takes {stats.format_times(stats.median(ratios))} the time per operation of {reference} "
        f"{_where_all(results[0].scenario, comparisons)} (median of {len(ratios)} operations, "
        f"{stats.format_interval(min(ratios), max(ratios))})"
    )
    saturated = sum(comparison.saturated for comparison in comparisons)
    marked = f"; the generator was saturated in {saturated} of {len(ratios)}" if saturated else ""
    if not any(comparison.time.judged for comparison in comparisons):
        return f"{_why_unjudged(comparisons[0].time)}: {text}, no interval{marked}"
    beyond = [(name, c.time.median < 1) for name, c in found if c.time.verdict == "beyond the noise"]
    ours, theirs = ([name for name, ahead in beyond if ahead is wanted] for wanted in (True, False))
    leader = _leader(subject, reference, ours, theirs, len(found))
    return (
        f"{leader}: {text}; beyond the noise {subject} leads in {_listed(ours)}, "
        f"{reference} in {_listed(theirs)}{marked}"
    )


def _leader(subject: str, reference: str, ours: Sequence[str], theirs: Sequence[str], of_all: int) -> str:
    """Judge several operations by those that differ beyond the noise."""
    if ours and theirs:
        return "Mixed"
    if not ours and not theirs:
        return "No difference beyond the noise"
    who = capitalized(subject if ours else reference)
    count = len(ours or theirs)
    return f"{who} is ahead" if count == of_all else f"{who} is ahead in {count} of {of_all}"


def _where_all(scenario: Scenario, comparisons: Sequence[Comparison]) -> str:
    sizes = sorted({comparison.size for comparison in comparisons})
    text = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"at {text} {scenario.sizes_are}, {TRANSPORT_NAMES[comparisons[0].subject.transport]}"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def headline(run: Run) -> str | None:
    """Set init at 98,304 ranks beside the tutorial, with its transport and an estimate for sockets; None without it."""
    init = next((result for result in results(run) if result.scenario.name == "init"), None)
    if init is None:
        return None
    measured = _tutorial_series(init)
    if measured is None:
        return None
    values = list(measured.values(TUTORIAL_RANKS, init.scenario.metric).values())
    text = (
        f"{capitalized(server_name(measured.server))} initialized {TUTORIAL_RANKS:,} ranks in "
        f"{stats.median(values):,.2f} s {_how(measured.transport)} "
        f"({_rounds_shown(values)}), "
        f"against the {TUTORIAL_SECONDS:.0f} s in the tutorial of PyTorch's libuv server "
        "(over sockets, on hardware that it does not name)"
    )
    return f"{text}; {_estimate(init, measured.server)}."


def _rounds_shown(values: Sequence[float]) -> str:
    if len(values) == 1:
        return stats.format_rounds(1)
    return f"median of {stats.format_rounds(len(values))}, {min(values):,.2f}–{max(values):,.2f}"


def _tutorial_series(init: Result) -> Series | None:
    """Prefer connections to sessions in memory."""
    series = [init.find("uvloop", transport) for transport in ("sockets", "memory")]
    return next((one for one in series if one and one.values(TUTORIAL_RANKS, init.scenario.metric)), None)


def _how(transport: Transport) -> str:
    return "over sockets" if transport == "sockets" else "in memory, its sessions driven without sockets"


def _estimate(init: Result, server: str) -> str:
    one = init.find(server, "sockets")
    sizes = [size for size in one.sizes if one.values(size, init.scenario.cpu)] if one else []
    if one is None or not sizes:
        return "this run has no connections over sockets to estimate from what they would cost"
    each = one.median(sizes[-1], init.scenario.cpu) or 0.0
    return (
        f"over sockets the server spent {stats.format_seconds(each)} of CPU on each of {sizes[-1]:,} ranks, × "
        f"{TUTORIAL_RANKS:,} = {each * TUTORIAL_RANKS:,.2f} s of CPU, which is an estimate and was not measured"
    )
