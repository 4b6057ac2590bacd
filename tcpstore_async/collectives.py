"""Barriers, gathers and broadcasts over any store, for programs without PyTorch.

Knows: PyTorch's keys for them, so that ranks of both meet in one; who is missing when time is up. Must not know: what
kind of store it is.
Invariant: a store's own timeout is never changed, for others may be using it. That time is up is a RuntimeError, whose
store it may be: PyTorch's stores have no base of ours.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from .coercion import Text, Timeout, to_bytes, to_int64, to_seconds
from .deadline import DEFAULT_TIMEOUT, Deadline
from .errors import DistStoreError, MissingRanksError
from .stores.base import Store

log = logging.getLogger("tcpstore_async.collectives")

_IGNORED: Final = b"<val_ignored>"
_LEAST_INTERVAL: Final = 10.0
"""Seconds between lines of the log, and one more for every thousand ranks, whose lines add up."""

_MOST_TRACED: Final = 16
"""Missing ranks after which a trace has seen enough: that it is more than one node."""

_ALL_LOOK: Final = 256
"""Up to so many ranks each one looks for itself who is missing. In larger worlds that would be billions of looks."""

_LOOKOUTS: Final = 16
"""In those the first rank that is there looks for all, if it is one of so many: two nodes of eight may be missing."""

_LOOK_SECONDS: Final = 10.0
"""How long a look for who is missing may take, beyond the caller's timeout."""

_AND_MORE: Final = "and perhaps others"


def store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    world_size: int,
    timeout: Timeout = DEFAULT_TIMEOUT,
    logging_interval: Timeout = timedelta(seconds=10),
) -> None:
    """Until all ranks have come to this group's barrier, as `init_process_group` has them do; once for every group.

    Every `logging_interval` seconds, more in large worlds, a line of the log says how many have joined. Raises
    DistStoreError, with that number, after `timeout` seconds.
    """
    key = f"store_based_barrier_key:{group_name}"
    deadline = Deadline(to_seconds("timeout", timeout))
    interval = max(to_seconds("logging_interval", logging_interval), _LEAST_INTERVAL + world_size / 1000)
    joined = store.add(key, 1)
    if joined == world_size:
        store.set(f"{key}:last_worker", b"1")
    while True:
        left = deadline.left()
        try:
            patience = timedelta(seconds=interval) if left is None or left > interval else _left(deadline)
            store.wait([f"{key}:last_worker"], patience)
            return
        except RuntimeError as error:
            joined = store.add(key, 0)
            if deadline.passed():
                raise DistStoreError(
                    f"Timed out initializing process group in store based barrier on rank {rank}, for key: {key} "
                    f"(world_size={world_size}, num_workers_joined={joined}, "
                    f"timeout={timedelta(seconds=deadline.timeout)} error={error})"
                ) from None
            log.info(
                "rank %d has waited %.0f s in the barrier %s: %d of %d have joined",
                rank, deadline.spent(), key, joined, world_size,
            )  # fmt: skip


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """What all ranks have set at `{prefix}{rank}`, in the order of ranks. Rank 0 returns when all others have read it.

    Raises StoreTimeoutError after the store's timeout.
    """
    found = store.multi_get([f"{prefix}{other}" for other in range(world_size)])
    last = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return found


def synchronize(
    store: Store, data: Text, rank: int, world_size: int, key_prefix: str, timeout: Timeout = DEFAULT_TIMEOUT
) -> list[bytes]:
    """Give every rank the data of all; once for every prefix. Raises MissingRanksError after `timeout` seconds."""
    deadline = Deadline(to_seconds("timeout", timeout))
    _check_rank(rank, world_size)
    keys = [f"{key_prefix}{other}" for other in range(world_size)]
    store.set(keys[rank], data)
    try:
        store.wait(keys, _left(deadline))
    except RuntimeError as error:
        raise _missing(store, "synchronize", dict(enumerate(keys)), rank, error) from None
    found = store.multi_get(keys)
    last = _arrive(store, world_size, f"{key_prefix}/finished")
    if rank == 0:
        store.wait([last], _left(deadline))
    return found


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: Timeout = DEFAULT_TIMEOUT,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: Timeout = timedelta(seconds=10),
) -> None:
    """Until `world_size` ranks have come; once for every prefix. As `torch.distributed.elastic.utils.store.barrier`.

    Raises StoreTimeoutError after `barrier_timeout` seconds. If all ranks have given their `rank`, rank 0's is a
    MissingRanksError, and the others' say so; finding out takes up to twice `trace_timeout` seconds more. The decoder
    makes a host's name, or whatever helps, of a rank.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    seconds = to_seconds("barrier_timeout", barrier_timeout)
    last = _arrive(store, world_size, key_prefix)
    try:
        store.wait([last], timedelta(seconds=seconds))
    except RuntimeError:
        if rank is None:
            raise
        missing = _trace(store, world_size, key_prefix, rank, to_seconds("trace_timeout", trace_timeout))
        if missing is None:
            raise
        name = rank_tracing_decoder or str
        names = (
            [name(other) for other in missing] if rank == 0 else [f"<check rank 0 ({name(0)}) for missing rank info>"]
        )
        raise MissingRanksError(
            f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} (world_size={world_size}, "
            f"missing_ranks=[{', '.join(names)}], timeout={seconds:g})",
            missing,
        ) from None


def _arrive(store: Store, world_size: int, prefix: str) -> str:
    """Count one more at a barrier; the key that is there when it is open."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _IGNORED)
    return last


def _trace(store: Store, world_size: int, prefix: str, rank: int, seconds: float) -> list[int] | None:
    """Who has not come, found out by rank 0; others wait until it has. None if it has not come itself."""
    store.set(f"{prefix}{rank}/TRACE", _IGNORED)
    gate = f"{prefix}/TRACING_GATE"
    if rank != 0:
        try:
            store.wait([gate], timedelta(seconds=2 * seconds))  # rank 0 may have begun later
        except RuntimeError:
            return None
        return []
    keys = [f"{prefix}{other}/TRACE" for other in range(1, world_size)]
    missing: list[int] = []
    try:
        store.wait(keys, timedelta(seconds=seconds))  # others may begin later
    except RuntimeError:
        places, _ = _look(store, keys, Deadline(seconds))
        missing = [1 + place for place in places[:_MOST_TRACED]]
    store.set(gate, _IGNORED)
    return missing


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, as world_size is {world_size}, not {rank}")


class StoreCollectives:
    """Control collectives among the ranks of a world, as `torch._C._distributed_c10d._StoreCollectives`.

    Every method takes a key, which no two calls on one object may share (RuntimeError), and a timeout in seconds,
    after which it raises MissingRanksError if it can tell who is missing, else StoreTimeoutError.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = to_int64("rank", rank)
        self._world_size = to_int64("world_size", world_size)
        _check_rank(self._rank, self._world_size)
        self._used: set[bytes] = set()

    def barrier(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Until all have come; with `block` false only arrive."""
        name = self._take(key)
        deadline = Deadline(to_seconds("timeout", timeout))
        arrived = self._store.add(name + b"/num_members", 1)
        self._store.set(self._of(name, self._rank), b"joined")
        last = name + b"/last_members"
        if arrived == self._world_size:
            self._store.set(last, _IGNORED)
        elif block:
            self._wait("barrier", [last], name, deadline)

    def broadcast_send(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give data to all who `broadcast_recv` it."""
        self._store.set(self._take(key), data)

    def broadcast_recv(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """What was sent, as soon as it is. Raises StoreTimeoutError."""
        return self._receive(self._take(key), timeout)

    def gather_send(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give this rank's data to the one who gathers."""
        self._store.set(self._of(self._take(key), self._rank), data)

    def gather_recv(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """The data of all ranks in order, this one's own being `data`."""
        name = self._take(key)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        found = self._gather("gather", name, others, timeout, alone=True)
        found.insert(self._rank, to_bytes("data", data))
        return found

    def scatter_send(self, key: Text, data: Sequence[Text], timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Give every rank its item; this one's own. Raises IndexError if there are not enough."""
        name = self._take(key)
        items = [to_bytes("data", data[rank]) for rank in range(self._world_size)]
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.multi_set([self._of(name, rank) for rank in others], [items[rank] for rank in others])
        return items[self._rank]

    def scatter_recv(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """This rank's item, as soon as it was sent. Raises StoreTimeoutError."""
        return self._receive(self._of(self._take(key), self._rank), timeout)

    def all_gather(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Give this rank's data to all, and get that of all, in order."""
        name = self._take(key)
        self._store.set(self._of(name, self._rank), data)
        return self._gather("all_gather", name, range(self._world_size), timeout)

    def all_sum(self, key: Text, data: int, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
        """The sum of the numbers of all ranks."""
        name = self._take(key)
        self._store.add(name, data)
        self.barrier(name + b"/barrier", timeout)
        return self._store.add(name, 0)

    def _take(self, key: Text) -> bytes:
        name = to_bytes("key", key)
        if name in self._used:
            raise RuntimeError(f"Key {name.decode(errors='replace')} has already been used.")
        self._used.add(name)
        return name

    def _of(self, name: bytes, rank: int) -> bytes:
        return name + b"/%d" % rank

    def _receive(self, name: bytes, timeout: Timeout) -> bytes:
        self._store.wait([name], timedelta(seconds=to_seconds("timeout", timeout)))
        return self._store.get(name)

    def _gather(
        self, what: str, name: bytes, ranks: Sequence[int], timeout: Timeout, alone: bool = False
    ) -> list[bytes]:
        keys = [self._of(name, rank) for rank in ranks]
        self._wait(what, keys, name, Deadline(to_seconds("timeout", timeout)), alone)
        return list(self._store.multi_get(keys))

    def _wait(self, what: str, keys: list[bytes], name: bytes, deadline: Deadline, alone: bool = False) -> None:
        try:
            self._store.wait(keys, _left(deadline))
        except RuntimeError as error:
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            asked = {rank: self._of(name, rank) for rank in others}
            raise _missing(self._store, what, asked, None if alone else self._rank, error) from None


def _missing(store: Store, what: str, keys: Mapping[int, Text], rank: int | None, error: RuntimeError) -> RuntimeError:
    """The error that says which ranks' keys are missing; `error` itself if the store no longer answers.

    With `rank`, all ranks of the world fail like this one at the moment: of many, not every one looks for all.
    """
    deadline = Deadline(_LOOK_SECONDS)
    try:
        if rank is None or len(keys) <= _ALL_LOOK:
            missing, more = _look_for(store, keys, deadline)
        else:
            first = min(rank, _LOOKOUTS)
            missing, more = _look_for(store, {other: keys[other] for other in range(first)}, deadline)
            if not more and len(missing) < first:
                more = f"<check rank {min(set(range(first)) - set(missing))} for missing rank info>"
            elif not more and rank < _LOOKOUTS:
                missing, more = _look_for(store, keys, deadline)
            else:
                more = _AND_MORE
    except RuntimeError:
        return error
    names = ", ".join([*map(str, missing), *([more] if more else [])])
    return MissingRanksError(f"{what} failed -- missing ranks: {names or 'none any more'}, {error}", missing)


def _look_for(store: Store, keys: Mapping[int, Text], deadline: Deadline) -> tuple[list[int], str]:
    """The ranks whose keys are not there, and what else the error has to say of them."""
    ranks = list(keys)
    places, complete = _look(store, list(keys.values()), deadline)
    return [ranks[place] for place in places], "" if complete else _AND_MORE


def _look(store: Store, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
    """The places of keys that are not there; PyTorch's stores have only `check` for that."""
    found: tuple[list[int], bool]
    if isinstance(store, Store) or hasattr(store, "_absent"):
        found = store._absent(keys, deadline)
    else:
        found = Store._absent(store, keys, deadline)
    return found


def _left(deadline: Deadline) -> timedelta:
    """What is left, as every store takes it, in whole milliseconds; negative means for ever."""
    left = deadline.left()
    return timedelta(milliseconds=-1 if left is None else math.ceil(left * 1000))
