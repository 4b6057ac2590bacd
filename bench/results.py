"""A run's samples as lines of points, and who is ahead of whom.

Knows records, scenes and statistics. Must not know files, Markdown or figures.
Invariant: only what was measured over the same transport, at the same size and in the same run is put into a ratio,
and nothing is said about a size at which one of the two was not measured. Only the noise is taken from all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import stats, wording
from bench.records import SATURATED, Ending, Run, Sample, Transport
from bench.scenes import SCENES, Measure, Scene, scene_of

TUTORIAL_RANKS = 98_304
TUTORIAL_SECONDS = 100.0
"""Of the tutorial's figure: PyTorch's libuv server, init of 98,304 ranks."""

_SUBJECTS = ("uvloop", "threaded")


@dataclass(frozen=True)
class Line:
    """What one server did over one transport: samples by size and round."""

    server: str
    transport: Transport
    points: dict[int, dict[int, Sample]]

    @property
    def label(self) -> str:
        return wording.line(self.server, self.transport)

    @property
    def sizes(self) -> list[int]:
        return sorted(self.points)

    def values(self, size: int, measure: Measure) -> dict[int, float]:
        """By round; without the rounds that do not say it, or too short for the clock to tell. No growth is a value."""
        found = {number: measure.of(sample) for number, sample in self.points.get(size, {}).items()}
        told = {number: value for number, value in found.items() if value is not None}
        return told if measure.unit == "bytes" else {number: value for number, value in told.items() if value > 0}

    def median(self, size: int, measure: Measure) -> float | None:
        values = list(self.values(size, measure).values())
        return stats.median(values) if values else None

    def saturated(self, size: int) -> bool:
        """Whether in any round the generator may have set the pace; in memory there is none to do so."""
        return self.transport == "sockets" and any(
            sample.generator_share >= SATURATED for sample in self.points.get(size, {}).values()
        )


@dataclass(frozen=True)
class Comparison:
    """Of two servers, at the largest size that both were measured at."""

    subject: Line
    reference: Line
    size: int
    time: stats.Ratio
    """Of what the scene measures, which is time in most."""
    cpu: stats.Ratio | None

    @property
    def saturated(self) -> bool:
        return self.subject.saturated(self.size) or self.reference.saturated(self.size)


@dataclass(frozen=True)
class Part:
    """A scenario of a run."""

    scene: Scene
    detail: str
    """What of the scene this is, such as an operation; empty in most."""
    compared_with: str
    """The server that the run says it compares with."""
    lines: list[Line]
    endings: list[Ending]

    def find(self, server: str, transport: Transport) -> Line | None:
        return next((line for line in self.lines if (line.server, line.transport) == (server, transport)), None)

    def reference(self, transport: Transport) -> Line | None:
        """What the others are compared with; None where it was not measured."""
        return self.find(self.compared_with, transport)

    def subject(self) -> Line | None:
        """Ours, over sockets if it was."""
        servers = [server for server in _SUBJECTS if server != self.compared_with]
        known = [self.find(server, transport) for transport in ("sockets", "memory") for server in servers]
        return next((line for line in known if line is not None), None)

    def ending(self, line: Line) -> Ending | None:
        found = [e for e in self.endings if (e.server, e.transport) == (line.server, line.transport)]
        return min(found, key=lambda ending: ending.size, default=None)

    def ratio(self, line: Line, size: int, measure: Measure) -> stats.Ratio | None:
        """Of a line to the reference, at a size; None where either was not measured, and for the reference itself."""
        reference = self.reference(line.transport)
        if reference is None or reference.server == line.server:
            return None
        noises = self._noises(line.transport, measure)
        if line.server == "control":  # what it differs by here is the noise here: only the other sizes can widen that
            noises = {**noises, size: 1.0}
        return stats.ratio(line.values(size, measure), reference.values(size, measure), stats.noise_at(size, noises))

    def noise(self, transport: Transport, size: int, measure: Measure) -> float | None:
        """The factor by which the same server measured twice may differ; None where there was no control."""
        return stats.noise_at(size, self._noises(transport, measure))

    def _noises(self, transport: Transport, measure: Measure) -> dict[int, float]:
        """By size, what the control differs by there."""
        reference, control = self.reference(transport), self.find("control", transport)
        if reference is None or control is None:
            return {}
        found = {
            size: stats.noise_of(reference.values(size, measure), control.values(size, measure))
            for size in control.sizes
        }
        return {size: noise for size, noise in found.items() if noise is not None}

    def last_ratio(self, line: Line, measure: Measure) -> tuple[int, stats.Ratio] | None:
        """The ratio at the largest size that the line and the reference have in common with enough rounds to judge.

        Without one, at the largest of all.
        """
        ratios = [(size, self.ratio(line, size, measure)) for size in reversed(line.sizes)]
        found = [(size, ratio) for size, ratio in ratios if ratio is not None]
        return next((one for one in found if one[1].judged), found[0] if found else None)

    def comparison(self) -> Comparison | None:
        """Of ours to the reference; None where there is only one of them."""
        subject = self.subject()
        if subject is None:
            return None
        found = self.last_ratio(subject, self.scene.measure)
        reference = self.reference(subject.transport)
        if found is None or reference is None:
            return None
        size, time = found
        return Comparison(subject, reference, size, time, self.ratio(subject, size, self.scene.cpu))


def parts(run: Run) -> list[Part]:
    """Every scenario of a run that has samples or endings, in the order of the report."""
    names = dict.fromkeys([sample.scenario for sample in run.samples] + [ending.scenario for ending in run.endings])
    order = list(SCENES)
    found = [_part(name, run) for name in names]
    return sorted(found, key=lambda part: order.index(part.scene.name) if part.scene.name in order else len(order))


def _part(name: str, run: Run) -> Part:
    scene, detail = scene_of(name)
    samples = [sample for sample in run.samples if sample.scenario == name]
    endings = [ending for ending in run.endings if ending.scenario == name]
    return Part(scene, detail, run.reference, _lines(samples), endings)


def _lines(samples: Iterable[Sample]) -> list[Line]:
    lines: dict[tuple[str, Transport], Line] = {}
    for sample in samples:
        key = (sample.server, sample.transport)
        line = lines.setdefault(key, Line(*key, {}))
        line.points.setdefault(sample.size, {})[sample.round] = sample
    return sorted(lines.values(), key=lambda line: wording.place(line.server, line.transport))


def line_of(ending: Ending, part: Part, parts: Sequence[Part]) -> Line | None:
    """What ends there: one of its part, or of any if it is of the scene as a whole."""
    among = [part] if part.detail else parts
    found = (each.find(ending.server, ending.transport) for each in among)
    return next((line for line in found if line is not None), None)


def rounds(lines: Iterable[Line]) -> str:
    """How many each point of these lines really has, such as `3` or `1 to 3`."""
    found = sorted({len(those) for line in lines for those in line.points.values()})
    return " to ".join(str(count) for count in dict.fromkeys([found[0], found[-1]])) if found else "none"


def verdict(part: Part) -> str:
    """Who is ahead and by how much, as it stands in a title; says so where there is nothing to compare with."""
    found = part.comparison()
    if found is None:
        return _alone(part)
    reference = wording.server(found.reference.server)
    where = f"at {found.size:,} {part.scene.sizes}, {wording.TRANSPORTS[found.subject.transport]}"
    judged = found.time.judged
    ratio = wording.ratio(found.time) if judged else wording.times(found.time.median)
    said = f"{ratio} the {part.scene.measure.name} of {reference} {where}{'' if judged else ', no interval'}"
    cpu = f" ({part.scene.cpu.axis}: {wording.times(found.cpu.median)})" if found.cpu else ""
    return f"{_ahead(found)} {said}{cpu}{'; the generator was saturated there' if found.saturated else ''}"


def _ahead(found: Comparison) -> str:
    subject, reference = wording.server(found.subject.server), wording.server(found.reference.server)
    if not found.time.judged:
        return f"{_why_unjudged(found.time)}: {subject}"
    if found.time.verdict == "within the noise":
        return f"No difference beyond the noise: {subject}"
    if found.time.median < 1:
        return f"{wording.first(subject)} is ahead:"
    return f"{wording.first(reference)} is ahead: {subject}"


def _why_unjudged(found: stats.Ratio) -> str:
    """Why nobody is called ahead, as the beginning of a sentence."""
    if found.verdict == "too few rounds":
        return wording.first(wording.rounds(found.rounds))
    return "No control, noise unknown"


def _alone(part: Part) -> str:
    """Why there is no ratio."""
    names = ", ".join(line.label for line in part.lines)
    if not names:
        return "Nothing was measured"
    subject = part.subject()
    if subject is None or part.reference(subject.transport) is None:
        return f"Nothing to compare: only {names}"
    measure = part.scene.measure
    zero = [line.label for line in part.lines if any(line.median(size, measure) == 0 for size in line.sizes)]
    if zero:
        return f"No ratio: {measure.axis} was 0 of {', '.join(zero)}"
    return f"No ratio: no size in common of {names}"


def verdict_of_all(parts: Sequence[Part]) -> str:
    """The same over the operations of one scene: the median of their ratios, and who leads where."""
    found = [(part.detail, comparison) for part in parts if (comparison := part.comparison())]
    if not found:
        return _alone(parts[0])
    comparisons = [comparison for _, comparison in found]
    subject, reference = (wording.server(line.server) for line in (comparisons[0].subject, comparisons[0].reference))
    ratios = [comparison.time.median for comparison in comparisons]
    said = (
        f"{subject} takes {wording.times(stats.median(ratios))} the time per operation of {reference} "
        f"{_where_all(parts[0].scene, comparisons)} (median of {len(ratios)} operations, "
        f"{wording.between(min(ratios), max(ratios))})"
    )
    saturated = sum(comparison.saturated for comparison in comparisons)
    marked = f"; the generator was saturated in {saturated} of {len(ratios)}" if saturated else ""
    if not any(comparison.time.judged for comparison in comparisons):
        return f"{_why_unjudged(comparisons[0].time)}: {said}, no interval{marked}"
    beyond = [(name, c.time.median < 1) for name, c in found if c.time.verdict == "beyond the noise"]
    ours, theirs = ([name for name, ahead in beyond if ahead is wanted] for wanted in (True, False))
    leader = _leader(subject, reference, ours, theirs, len(found))
    return (
        f"{leader}: {said}; beyond the noise {subject} leads in {_listed(ours)}, "
        f"{reference} in {_listed(theirs)}{marked}"
    )


def _leader(subject: str, reference: str, ours: Sequence[str], theirs: Sequence[str], of_all: int) -> str:
    """Of several operations, by those alone that differ beyond the noise."""
    if ours and theirs:
        return "Mixed"
    if not ours and not theirs:
        return "No difference beyond the noise"
    who = wording.first(subject if ours else reference)
    count = len(ours or theirs)
    return f"{who} is ahead" if count == of_all else f"{who} is ahead in {count} of {of_all}"


def _where_all(scene: Scene, comparisons: Sequence[Comparison]) -> str:
    sizes = sorted({comparison.size for comparison in comparisons})
    said = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"at {said} {scene.sizes}, {wording.TRANSPORTS[comparisons[0].subject.transport]}"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def headline(run: Run) -> str | None:
    """Init at 98,304 ranks against the tutorial, the transport named, and an estimate for sockets; None without it."""
    init = next((part for part in parts(run) if part.scene.name == "init"), None)
    if init is None:
        return None
    measured = _tutorial_line(init)
    if measured is None:
        return None
    values = list(measured.values(TUTORIAL_RANKS, init.scene.measure).values())
    said = (
        f"{wording.first(wording.server(measured.server))} initialized {TUTORIAL_RANKS:,} ranks in "
        f"{stats.median(values):,.2f} s {_how(measured.transport)} "
        f"({_rounds_told(values)}), "
        f"against the {TUTORIAL_SECONDS:.0f} s in the tutorial of PyTorch's libuv server "
        "(over sockets, on hardware that it does not name)"
    )
    return f"{said}; {_estimate(init, measured.server)}."


def _rounds_told(values: Sequence[float]) -> str:
    if len(values) == 1:
        return wording.rounds(1)
    return f"median of {wording.rounds(len(values))}, {min(values):,.2f}–{max(values):,.2f}"


def _tutorial_line(init: Part) -> Line | None:
    """Real connections count for more than sessions in memory, where a machine can hold so many."""
    lines = [init.find("uvloop", transport) for transport in ("sockets", "memory")]
    return next((line for line in lines if line and line.values(TUTORIAL_RANKS, init.scene.measure)), None)


def _how(transport: Transport) -> str:
    return "over sockets" if transport == "sockets" else "in memory, its sessions driven without sockets"


def _estimate(init: Part, server: str) -> str:
    line = init.find(server, "sockets")
    sizes = [size for size in line.sizes if line.values(size, init.scene.cpu)] if line else []
    if line is None or not sizes:
        return "this run has no connections over sockets to estimate from what they would cost"
    each = line.median(sizes[-1], init.scene.cpu) or 0.0
    return (
        f"over sockets the server spent {wording.seconds(each)} of CPU on each of {sizes[-1]:,} ranks, × "
        f"{TUTORIAL_RANKS:,} = {each * TUTORIAL_RANKS:,.2f} s of CPU, which is an estimate and was not measured"
    )
