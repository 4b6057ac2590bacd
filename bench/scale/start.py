"""The store traffic of a job's start: what every rank sends from joining to its first step.

    join        VALIDATE and PING, then ADD to the key that counts the ranks
    nccl2       the NCCL backend of PyTorch 2.15 and later: one root for 128 ranks SETs an ID of 128 bytes; all WAIT for
                all IDs, twice, and MULTI_GET them
    nccl        the backend before it: the same with one WAIT; up to 128 ranks, WAIT and GET by all but the root
    gloo        each rank SETs 154 bytes and 8 more for every rank, and does WAIT, WAIT, GET for every rank
    torchrun    agents: PyTorch's handler keeps everybody in one value of 120 bytes for each agent. Each agent reads and
                compare-sets the complete one once, SETs its role and reads its ranks and the master's address; the
                first agent gathers the roles and sets the ranks. What a real rendezvous adds is left out: lost
                compare-sets, keep-alives and the barrier at the end.

A group made by splitting another one sends nothing. The load generator plays it over thousands of connections, and
`in_memory` without any.
Invariant: a request is the same bytes for all ranks, except for numbers of eight digits; its reply is known, except for
the sum of an ADD. The load generator ends with its context or, if this process is killed, with it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from bench import processes
from bench.scale.servers import Impossible
from tcpstore_async.tools.load.generator import LoadError, Unreachable, late
from tcpstore_async.tools.load.scripts import encode_request, join
from tcpstore_async.wire.values import pack

REQUESTS_PER_SECOND = 20_000
"""At least, of a start: what it may take beyond the limit."""
RANKS_PER_ROOT = 128
ID_BYTES = 128
STATE_BYTES = 120
"""Of torchrun's state, for each agent."""

GROUP, MEMBER, ROOT = b"<group >", b"<member>", b"<root  >"
"""Placeholders, as long as the digits that replace them: the number of the group, of the rank in it, and of the 128
ranks in it to which the rank belongs."""

_DIGITS = b"%08d"
_PLACEHOLDER = re.compile(b"|".join((GROUP, MEMBER, ROOT)))
_STRIDE = 1_000_003
"""A prime that is greater than any number of ranks."""


class Field(NamedTuple):
    """A number that differs from rank to rank."""

    at: int
    """Its offset in the request."""
    what: bytes
    """One of the placeholders."""


class Senders(NamedTuple):
    """Those of the ranks below `ranks`, in groups of `size`, that send a request."""

    who: Literal["all", "roots", "others", "first"]
    """Roots are the first of every 128 in a group, others all but these, `first` is the first of a group."""
    size: int
    ranks: int

    def include(self, rank: int) -> bool:
        if rank >= self.ranks or self.who == "all":
            return rank < self.ranks
        member = rank % self.size
        if self.who == "first":
            return member == 0
        return (member % RANKS_PER_ROOT == 0) == (self.who == "roots")


class Action(NamedTuple):
    """A request that some ranks send, and its reply, for which they wait before the next."""

    senders: Senders
    request: bytes
    reply: bytes = b""
    """Empty: there is none, or only its length is known."""
    reply_bytes: int = 0
    fields: tuple[Field, ...] = ()

    def sent_by(self, rank: int) -> bool:
        return self.senders.include(rank)

    def of(self, rank: int) -> bytes:
        """Return the request of a rank."""
        if not self.fields:
            return self.request
        filled = bytearray(self.request)
        group, member = divmod(rank, self.senders.size)
        numbers = {GROUP: group, MEMBER: member, ROOT: member // RANKS_PER_ROOT}
        for at, what in self.fields:
            filled[at : at + len(what)] = _DIGITS % numbers[what]
        return bytes(filled)


class Group(NamedTuple):
    """Further groups: each rank is a member of `number`, of `size` ranks each."""

    number: int
    size: int
    backend: str


class Pattern(NamedTuple):
    """A kind of start."""

    backend: str = "nccl2"
    groups: tuple[Group, ...] = ()

    @classmethod
    def of(cls, backend: str = "nccl2", groups: str = "") -> Pattern:
        """Parse --backend and --groups, such as `12x128,2x512:gloo`. Raises ValueError, in one line."""
        if backend not in BACKENDS:
            raise ValueError(f"{backend!r} is not one of {', '.join(BACKENDS)}")
        found = []
        for word in filter(None, groups.split(",")):
            match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,6})(?::(\w+))?", word)
            if match is None:
                raise ValueError(f"{word!r} is not COUNTxSIZE or COUNTxSIZE:BACKEND, with {', '.join(_GROUPS)}")
            kind = match[3] or backend
            if kind not in _GROUPS:
                raise ValueError(f"the backend of group {word!r}, {kind}, is not one of {', '.join(_GROUPS)}")
            found.append(Group(int(match[1]), int(match[2]), kind))
        return cls(backend, tuple(found))

    @property
    def words(self) -> tuple[str, str]:
        """Return the values of --backend and --groups."""
        return self.backend, ",".join(f"{number}x{size}:{backend}" for number, size, backend in self.groups)


NCCL2 = Pattern()


class Preset(NamedTuple):
    """A start at the sizes of a known job."""

    pattern: Pattern
    sizes: tuple[int, ...]
    """Over sockets."""
    memory: tuple[int, ...]

    @property
    def in_memory_only(self) -> bool:
        """Whether it is measured over sockets only if `--transport` asks for that."""
        return not self.sizes


PRESETS = {
    "dense": Preset(NCCL2, (8192,), (8192,)),
    # 51 million requests at 16,384 ranks. Those of a rank are the same at any size, so smaller jobs come first.
    "megatron": Preset(
        Pattern("nccl2", (Group(12, 128, "nccl2"), Group(2, 512, "gloo"))),
        (512, 1024, 2048, 4096, 8192, 16_384),
        (512, 1024, 2048, 4096, 8192, 16_384),
    ),
    "frontier": Preset(NCCL2, (), (98_304,)),
}
"""8,192 ranks with FSDP2; 16,384 of a mixture of experts; 98,304, the most of PyTorch's tutorial."""


class Traffic(NamedTuple):
    """What the ranks of a job send."""

    joining: list[Action]
    first: list[Action]
    """Sent by rank 0 alone before others arrive; without replies."""
    actions: list[Action]
    """Sent by every rank when it has joined; by rank 0 when all have."""


def traffic(pattern: Pattern, ranks: int) -> Traffic:
    """Return what the ranks of a job send. Raises ValueError, in one line, if a group has more ranks than the job."""
    joining = [Action(Senders("all", ranks, ranks), step.request, step.expect, step.reply) for step in join()]
    first: list[Action] = []
    if pattern.backend == "torchrun":
        first, actions = _torchrun(ranks)
    else:
        actions = list(_GROUPS[pattern.backend](b"/default_pg/0//", ranks, ranks))
    for kind, (groups, size, backend) in enumerate(pattern.groups):
        if size > ranks:
            raise ValueError(f"{ranks:,} ranks are less than a group of {size:,}")
        for number in range(groups):
            prefix = b"/default_pg/0//%d.%d." % (kind, number) + GROUP + b"//"
            actions += _GROUPS[backend](prefix, size, ranks - ranks % size)
    return Traffic(joining, first, actions)


def planned(pattern: Pattern, ranks: int, limit: float) -> tuple[Traffic, float]:
    """Return what the ranks of a start send, and a limit of seconds that grows with it. Raises Impossible."""
    try:
        plan = traffic(pattern, ranks)
    except ValueError as error:
        raise Impossible(str(error)) from None
    return plan, limit + len(plan.actions) * ranks / REQUESTS_PER_SECOND


def in_order_of_arrival(ranks: int, roots_last: bool) -> list[int]:
    """Return the ranks but 0 as they arrive: mixed, and the same in every run.

    The load generator has the same order. With the roots last, all others wait for all IDs at the same time.
    """
    mixed = [1 + number * _STRIDE % (ranks - 1) for number in range(ranks - 1)]
    return sorted(mixed, key=lambda rank: rank % RANKS_PER_ROOT == 0) if roots_last else mixed


def _nccl2(prefix: bytes, size: int, ranks: int) -> Iterator[Action]:
    return _ids(prefix, size, ranks, waits=2)


def _nccl(prefix: bytes, size: int, ranks: int) -> Iterator[Action]:
    if size > RANKS_PER_ROOT:
        return _ids(prefix, size, ranks, waits=1)
    key, value = prefix + b"cuda//nccl_storekey_0_" + _DIGITS % 0, pack(bytes(ID_BYTES))
    return iter((_set(Senders("roots", size, ranks), key, value), *_get(Senders("others", size, ranks), key, value)))


def _ids(prefix: bytes, size: int, ranks: int, waits: int) -> Iterator[Action]:
    names, value = prefix + b"cuda//nccl_storekey_0_", pack(bytes(ID_BYTES))
    keys = [names + _DIGITS % number for number in range(-(-size // RANKS_PER_ROOT))]
    everyone = Senders("all", size, ranks)
    yield _set(Senders("roots", size, ranks), names + ROOT, value)
    yield from [_wait(everyone, keys)] * waits
    yield _action(everyone, encode_request("multi_get", keys), value * len(keys))


def _gloo(prefix: bytes, size: int, ranks: int) -> Iterator[Action]:
    names, address = prefix + b"cpu//0/", pack(bytes(154 + 8 * size))
    everyone = Senders("all", size, ranks)
    yield _set(everyone, names + MEMBER, address)
    for number in range(size):
        wait, get = _get(everyone, names + _DIGITS % number, address)
        yield from (wait, wait, get)


_GROUPS: dict[str, Callable[[bytes, int, int], Iterator[Action]]] = {"nccl2": _nccl2, "nccl": _nccl, "gloo": _gloo}
BACKENDS = (*_GROUPS, "torchrun")


def _torchrun(agents: int) -> tuple[list[Action], list[Action]]:
    everyone, agent0 = Senders("all", agents, agents), Senders("first", agents, agents)
    name, state = b"/torch.rendezvous.job", pack(bytes(STATE_BYTES * agents))
    roles, role = name + b".0/torchelastic/role_info/", pack(b'{"role": "default", "rank": 0, "local_world_size": 8}')
    assigned, ranks = name + b".0/torchelastic/assigned_ranks/", pack(b"[0, 0, 98304, 0, 98304]")
    masters = {name + b".0/MASTER_ADDR": pack(b"host-0.example"), name + b".0/MASTER_PORT": pack(b"29500")}
    keys = [roles + _DIGITS % number for number in range(agents)]
    items = [(assigned + _DIGITS % number, ranks) for number in range(agents)]
    return [_set(agent0, name, state)], [
        *_get(everyone, name, state),
        _action(everyone, encode_request("compare_set", name, state, state), state),
        _set(everyone, roles + MEMBER, role),
        _wait(agent0, keys),
        _action(agent0, encode_request("multi_get", keys), role * agents),
        _action(agent0, encode_request("multi_set", items)),
        *(_set(agent0, key, value) for key, value in masters.items()),
        *_get(everyone, assigned + MEMBER, ranks),
        *(action for key, value in masters.items() for action in _get(everyone, key, value)),
    ]


def _get(senders: Senders, key: bytes, value: bytes) -> tuple[Action, Action]:
    """PyTorch's `get`: WAIT, then GET."""
    return _wait(senders, [key]), _action(senders, encode_request("get", key), value)


def _set(senders: Senders, key: bytes, value: bytes) -> Action:
    return _action(senders, encode_request("set", key, value))


def _wait(senders: Senders, keys: list[bytes]) -> Action:
    return _action(senders, encode_request("wait", keys), b"\0")


def _action(senders: Senders, request: bytes, reply: bytes = b"") -> Action:
    fields = tuple(Field(match.start(), match[0]) for match in _PLACEHOLDER.finditer(request))
    return Action(senders, request, reply, len(reply), fields)


# The load generator plays it

_WHO = {"all": 0, "roots": 1, "others": 2, "first": 3}
_PLACEHOLDERS = (GROUP, MEMBER, ROOT)
_U32 = struct.Struct("<I")


class Played(NamedTuple):
    """Times in seconds."""

    began: float
    """Of the monotonic clock, as `ended`: when the last rank had its last reply."""
    ended: float
    cpu: float
    """Of the load generator."""
    share: float
    """Of the time in which it computed or waited for a core."""
    requests: int
    parked: int
    """The most ranks that waited for the reply to a WAIT at the same time."""


def script(actions: Sequence[Action]) -> bytes:
    """Encode actions for the load generator's mode `play`: little-endian u32 numbers and bytes, see `play_load`."""
    replies: dict[tuple[int, bytes], int] = {}
    for action in actions:
        replies.setdefault((action.reply_bytes, action.reply), len(replies))
    found = [_numbers(RANKS_PER_ROOT, len(replies), len(actions))]
    for size, reply in replies:
        found += [_numbers(size, len(reply)), reply]
    for action in actions:
        found.append(_numbers(_WHO[action.senders.who], action.senders.size, action.senders.ranks))
        found.append(_numbers(replies[action.reply_bytes, action.reply], len(action.request), len(action.fields)))
        found += [_numbers(at, _PLACEHOLDERS.index(what)) for at, what in action.fields]
        found.append(action.request)
    return b"".join(found)


def _numbers(*numbers: int) -> bytes:
    return b"".join(map(_U32.pack, numbers))


class Player:
    """A load generator at work; made by `playing`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def result(self, limit: float) -> Played:
        """Wait, so many seconds at most, until all ranks are done. Raises LoadError."""
        try:
            out, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise late(limit, "some ranks are not done") from None
        if not out:
            raise LoadError(f"the load generator exited with status {self._process.returncode}")
        found = json.loads(out)
        if "error" in found:
            lost = found["errno"] in (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED)
            raise (Unreachable if lost else LoadError)(f"the load generator failed: {found['error']}")
        wall = found["ended"] - found["began"]
        share = (found["cpu"] + found["waited"]) / wall
        return Played(found["began"], found["ended"], found["cpu"], share, found["requests"], found["parked"])


@contextmanager
def playing(port: int, actions: Sequence[Action], others: int, seconds: float, cores: set[int]) -> Iterator[Player]:
    """Play the ranks but 0 of a job, which arrive within so many seconds; 0 for all at once. Raises LoadError."""
    try:
        generator = processes.load_generator()
    except (OSError, subprocess.SubprocessError) as error:
        raise LoadError(f"the load generator needs a C compiler: {error}") from None
    with tempfile.NamedTemporaryFile() as file:
        file.write(script(actions))
        file.flush()
        words = ["-p", port, "-n", others, "-A", seconds, "-f", file.name, "-m", "play"]
        # In a session of its own: Ctrl-C is for the parent, which ends it.
        process = subprocess.Popen(
            [generator, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        player = Player(process)
        try:
            os.sched_setaffinity(process.pid, cores)
            yield player
        except LoadError:
            if process.poll():  # then this is the reason
                player.result(0)
            raise
        finally:
            process.kill()
            process.communicate()
