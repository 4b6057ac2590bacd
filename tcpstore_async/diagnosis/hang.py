"""Whether a job hangs, and who is not where the others are: what follows from two looks at its processes.

Knows ranks, and reports about processes. Must not know who has asked for these, nor how they are printed.
Invariants: a hang is only what both looks show, and what is certain or has lasted for a while; a slow start is none. A
job goes on only if most of its ranks were seen to. What was not looked at is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Final, NamedTuple

import msgspec

from ..stacks.report import Collective, Doing, HostReport
from .activity import ALIVE, BUSY, IDLE, Activity, describe
from .lines import Line, decode_reply
from .ras import Ras, compare_ras
from .stock_ranks import Rank, Ranks, number_ranges

GOES_ON: Final = "goes on"
STARTS: Final = "starts"
WAITS: Final = "waits"
HANGS: Final = "hangs"
UNKNOWN: Final = "unknown"

HANG_SECONDS: Final = 60.0
"""How long ranks wait before it is called a hang, unless it is certain that what they wait for will not come."""

_MOST_MEMBERS: Final = 4
"""Ranks of a group whose host and pid are kept."""

_UNKNOWN_SHARE: Final = 2 * IDLE
"""Of a core, for a process of which only frames are known: it need not be idle."""

Place = tuple[str, int]
"""The name of a host, and the id of a process there."""


class Relays(msgspec.Struct):
    """What has become of the question to the relays."""

    asked: int = 0
    answered: int = 0
    silent: list[str] = []
    """The addresses of some that have not answered."""
    older: int = 0
    """How many do not know the question."""
    refused: str = ""
    """Why they were not asked."""


class _Reported(Line):
    stacks: HostReport | None = None
    relays: Relays | None = None


class _Seen(NamedTuple):
    """What a process did."""

    doing: Doing
    cpu: float
    """Share of a core that it has used."""
    switches: int
    """How often its main thread has waited; -1 if that is not known."""


class Look:
    """What processes did at one time."""

    def __init__(self) -> None:
        self.doing: dict[Place, _Seen] = {}
        self.relays = Relays()
        self.ras = Ras()
        self.pytorch: dict[int, tuple[str, ...]] = {}
        """Frames that PyTorch's debug server shows, keyed by rank."""

    def add(self, report: HostReport) -> None:
        """Add what a host says of its processes."""
        for group in report.groups:
            if group.doing.state == "gone":
                continue  # it has ended, or its id is one of a container
            for pid, cpu, switches in zip(group.pids, group.cpu, group.switches or repeat(-1), strict=False):
                self.doing[report.host, pid] = _Seen(group.doing, cpu, switches)

    def of(self, rank: Rank, host: str) -> "_Seen | None":
        """Return what a rank on this host did, if that is known."""
        found = self.doing.get((host, rank.pid or 0))
        frames = self.pytorch.get(-1 if rank.number is None else rank.number)
        if frames is None or (found is not None and found.doing.frames):
            return found
        if found is None:
            return _Seen(Doing("", source="debug server", frames=frames), _UNKNOWN_SHARE, -1)
        doing = msgspec.structs.replace(found.doing, source="debug server", frames=frames, no_stack="")
        return found._replace(doing=doing)

    def read(self, lines: Iterable[bytes]) -> None:
        """Add a reply of the admin socket. Raises as `decode_reply` does."""
        for line in decode_reply(lines, _Reported):
            if line.stacks is not None:
                self.add(line.stacks)
            self.relays = line.relays or self.relays


class Member(msgspec.Struct):
    """A rank of a group, and where it runs."""

    rank: int | None
    host: str
    pid: int | None


class Same(msgspec.Struct):
    """Ranks that do the same."""

    does: str
    count: int
    ranks: list[int]
    """Their numbers, as far as known."""
    first: list[Member]
    """The first few of them."""
    since: float | None
    """Seconds since the first has entered the collective that they are in; None if unknown, or if they are in none."""
    quiet: float | None
    """The least seconds since one of them has sent a request to the store or entered a collective."""
    cpu: float
    """The largest share of a core that one uses."""
    moved: int
    """How many did something else at the first look."""
    frames: tuple[str, ...] = ()
    """Where the first one is, innermost first."""
    no_stack: str = ""
    """Why there are no frames."""


class Hang(msgspec.Struct):
    """The conclusion."""

    state: str
    """One of the above."""
    ranks: int
    """Number of ranks that should be there."""
    seen: int
    """How many of them were looked at."""
    moved: int
    """How many did something else at the first look."""
    between: float
    """Seconds between the looks."""
    lasts: float
    """For how many seconds ranks have waited, at least."""
    groups: list[Same]
    """The odd ones first."""
    mismatches: list[str]
    """Ranks whose collectives do not fit those of the others, in words."""
    unseen: dict[str, int]
    """How many connected ranks were not looked at, by host."""
    absent: int
    """How many ranks are not connected, or not known by number."""
    without_stacks: int
    """How many were seen only from outside."""
    uncounted: int
    """How many were looked at without the numbers of their collectives."""
    looked_at: int
    """How many processes were looked at: not those of silent hosts, or that have left."""
    relays: Relays


class _Found(NamedTuple):
    """A rank, and what it did."""

    rank: Rank
    activity: Activity
    doing: Doing | None = None
    cpu: float = 0.0
    switches: int = -1
    moved: bool = False
    still: bool = False
    """Whether it has only waited from the first look to the second."""

    def signs(self) -> Iterator[float]:
        """Yield the seconds since it has sent a request on each session, and entered a collective."""
        yield from (session.idle for session in self.rank.sessions)
        if self.doing is not None:
            yield from (one.since for one in self.doing.collectives)


def ranks_of(ranks: Ranks) -> list[Rank]:
    """Return the ranks of the job; if none is numbered, all processes that are connected."""
    if ranks.by_number:
        return [ranks.by_number[number] for number in sorted(ranks.by_number)]
    return [rank for rank in ranks.all if rank.sessions and rank.pid is not None]


def conclude(
    ranks: Ranks, looks: tuple[Look, Look], between: float, names: Mapping[str, str], only: Container[int] = ()
) -> Hang:
    """Compare two looks, so many seconds apart; `names` has the names of hosts, keyed by address.

    With `only`, each of these ranks is a group, and there are no others.
    """
    first, second = looks
    silent = _hosts(first.relays) & _hosts(second.relays)
    found: list[_Found] = []
    unseen: Counter[str] = Counter()
    described: dict[tuple[int, bool], Activity] = {}
    """Cache, keyed by identity: processes of a group share a `Doing`, which `found` keeps."""
    for rank in ranks_of(ranks):
        host = names.get(rank.host, rank.host)
        now = second.of(rank, host)
        if not rank.sessions:
            found.append(_Found(rank, Activity("left the store")))
        elif now is not None:
            same = id(now.doing), now.cpu >= BUSY
            activity = described.get(same) or described.setdefault(same, describe(now.doing, now.cpu >= BUSY))
            found.append(_compare(_Found(rank, activity, *now), first.of(rank, host)))
        elif any(session.link in silent for session in rank.sessions):
            found.append(
                _Found(rank, Activity(f"the relay on {host} does not answer (it, or its host, is frozen or too busy)"))
            )
        else:
            unseen[host] += 1
    moved = len([one for one in found if one.moved])
    mismatches = [] if 2 * moved > len(found) else list(_mismatches(found))
    everyone = max(ranks.world_size or 0, len(found) + unseen.total())
    hang = Hang(
        state=UNKNOWN,
        ranks=everyone,
        seen=len(found),
        moved=moved,
        between=between,
        lasts=max(
            [between, *[one.activity.collective.since for one in found if one.still and one.activity.collective]]
        ),
        groups=_grouped(found, names),
        mismatches=[*[text for _, text in mismatches], *compare_ras(first.ras, second.ras, ranks)],
        unseen=dict(unseen),
        absent=everyone - len(found) - unseen.total(),
        without_stacks=len(
            [one for one in found if one.doing is not None and one.doing.state in ALIVE and not one.doing.frames]
        ),
        uncounted=len([one for one in found if one.doing is not None and not one.doing.collectives]),
        looked_at=len([one for one in found if one.doing is not None]),
        relays=second.relays,
    )
    hang.state = _state(hang, found, any(certain for certain, _ in mismatches))
    if only:
        hang.groups = [_same(one.activity.words, [one], names) for one in found if one.rank.number in only]
    return hang


def _hosts(relays: Relays) -> set[str]:
    """Return the hosts of the relays that have not answered."""
    return {address.rpartition(":")[0].strip("[]") for address in relays.silent}


def _compare(now: _Found, before: _Seen | None) -> _Found:
    """Say whether a rank has moved since it did something `before`, or has only waited."""
    doing, activity = now.doing, now.activity
    if before is None or doing is None:
        return now
    was, used, switches = before
    for one, other in ((was.frames, doing.frames), (_entered(was), _entered(doing))):
        if one and other and one != other:  # a look of a busy host may be without frames
            return now._replace(moved=True)
    # A collective that goes on uses CPU, except where it is known by number: on a GPU, one that hangs does, too. Who
    # waits by looking again and again wakes as often as one that goes on.
    woke = switches != now.switches and "faulthandler" not in (was.source, doing.source)  # whose signal counts
    waits = max(now.cpu, used) <= IDLE and not woke
    return now._replace(still=(waits or activity.collective is not None) and not activity.held)


def _entered(doing: Doing) -> tuple[int, ...]:
    return tuple(one.number for one in doing.collectives)


def _state(hang: Hang, found: list[_Found], mismatch: bool) -> str:
    """Return the state of the job; with a `mismatch`, ranks have entered different collectives as the same one."""
    still = [one for one in found if one.still]
    if not found:
        return UNKNOWN
    active = [one for one in found if one.moved or one.cpu > IDLE]
    if 4 * hang.moved >= len(found) and 2 * len(active) > len(found):
        return GOES_ON  # of two looks at a loop of few lines, many find the same line
    if still and (mismatch or any(one.activity.held for one in found)):
        return HANGS
    if hang.absent or any(one.activity.starts for one in found):
        return STARTS
    if 2 * len(still) < len(found) or (len(hang.groups) == 1 and hang.without_stacks):
        return UNKNOWN  # busy, or none is odd as far as the kernel shows
    if hang.lasts >= HANG_SECONDS and not any(one.cpu > IDLE for one in found if not one.still):
        return HANGS
    return WAITS


def _grouped(found: list[_Found], names: Mapping[str, str]) -> list[Same]:
    """Return who does what, the smallest groups first, those that wait behind others of the same size."""
    by_words: dict[str, list[_Found]] = defaultdict(list)
    for one in found:
        by_words[one.activity.words].append(one)
    most = max(by_words.values(), key=len, default=[])

    def place(group: tuple[str, list[_Found]]) -> tuple[bool, int, bool]:
        alike = group[1]
        return alike is most or _seems_like(alike[0], most[0]), len(alike), alike[0].still

    return [_same(words, alike, names) for words, alike in sorted(by_words.items(), key=place)]


def _seems_like(one: _Found, other: _Found) -> bool:
    """Return whether only a stack that was not read in time tells one rank from another: that does not make it odd."""
    first, second = one.doing, other.doing
    if first is None or second is None or first.frames or not second.frames or one.still != other.still:
        return False
    return (first.state, first.wchan, first.call) == (second.state, second.wchan, second.call)


def _same(words: str, alike: list[_Found], names: Mapping[str, str]) -> Same:
    first = alike[0]
    doing = first.doing
    since = [one.activity.collective.since for one in alike if one.activity.collective is not None]
    return Same(
        words,
        len(alike),
        [one.rank.number for one in alike if one.rank.number is not None],
        [
            Member(one.rank.number, names.get(one.rank.host, one.rank.host), one.rank.pid)
            for one in alike[:_MOST_MEMBERS]
        ],
        max(since, default=None),
        min([sign for one in alike for sign in one.signs()], default=None),
        max(one.cpu for one in alike),
        len([one for one in alike if one.moved]),
        () if doing is None else doing.frames,
        "" if doing is None else doing.no_stack,
    )


def _mismatches(found: Iterable[_Found]) -> Iterator[tuple[bool, str]]:
    """Yield which ranks have entered other collectives than most, and whether that is certain to be a mistake."""
    groups: dict[str, list[tuple[Rank, Collective]]] = defaultdict(list)
    for one in found:
        if one.doing is not None and not one.moved:
            for last in one.doing.collectives:
                groups[last.group].append((one.rank, last))
    for name, members in groups.items():
        number = max(last.number for _, last in members)
        there = [(rank, last) for rank, last in members if last.number == number]
        usual, sizes = Counter((last.name, last.sizes) for _, last in there).most_common(1)[0][0]
        behind: dict[int, list[Rank]] = defaultdict(list)
        for rank, last in members:
            if last.number < number:
                behind[last.number].append(rank)
        for last_number, ranks in behind.items():
            have = "has" if len(ranks) == 1 else "have"
            what = f"{usual} " if last_number == number - 1 else ""
            rest = "" if what else f" (others are in #{number} {usual})"
            yield False, f"{name_ranks(ranks)} {have} not entered #{last_number + 1} {what}of {name}{rest}"
        others: dict[tuple[str, str], list[Rank]] = defaultdict(list)
        for rank, last in there:
            if last.name != usual or last.sizes != sizes:
                others[last.name, last.sizes].append(rank)
        for (kind, size), ranks in others.items():
            differs = kind if kind != usual else f"{kind} of {size or 'unknown size'}, not {sizes or 'unknown size'},"
            yield kind != usual, f"{name_ranks(ranks)} entered {differs} as #{number} of {name}, most entered {usual}"


def name_ranks(ranks: list[Rank]) -> str:
    """Return ranks as text: their numbers if they have some."""
    numbers = [rank.number for rank in ranks if rank.number is not None]
    if not numbers:
        return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"
