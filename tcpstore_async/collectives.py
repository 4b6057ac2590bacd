"""Barriers, gathers and broadcasts over any store, for programs without PyTorch.

They use PyTorch's keys, so that ranks of both can take part, and report the missing ranks after a timeout. They accept
PyTorch's stores, too, and therefore catch timeouts as RuntimeError, as PyTorch's errors do not derive from ours.
Invariant: a store's own timeout is never changed, because other threads may be using it.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from .base.coercion import Text, Timeout, to_bytes, to_int64, to_seconds
from .base.deadline import DEFAULT_TIMEOUT, Deadline
from .base.errors import DistStoreError, MissingRanksError
from .stores.base import Store

log = logging.getLogger("tcpstore_async.collectives")

_IGNORED: Final = b"<val_ignored>"

_LOG_INTERVAL_MIN: Final = 10.0
"""Least seconds between a rank's log messages; one second is added for every thousand ranks."""

_MAX_TRACED: Final = 16
"""Most missing ranks that a trace reports: enough to show that more than one node is missing."""

_SMALL_WORLD: Final = 256
"""Largest world in which every rank searches for missing ranks. In larger ones that would be too many checks."""

_SEARCHERS: Final = 16
"""In larger worlds the first present of this many ranks searches for all. Two nodes of eight ranks may be missing."""

_SEARCH_SECONDS: Final = 10.0
"""Timeout of a search for missing ranks, in addition to the caller's timeout."""

_POSSIBLY_MORE: Final = "possibly others"


def store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    world_size: int,
    timeout: Timeout = DEFAULT_TIMEOUT,
    logging_interval: Timeout = timedelta(seconds=10),
) -> None:
    """Wait until all ranks have reached a group's barrier, as `init_process_group` does. Usable once per group name.

    While waiting, log the number of joined ranks every `logging_interval` seconds, at least 10 and more in large
    worlds. Raises DistStoreError, which contains that number, after `timeout` seconds.
    """
    key = f"store_based_barrier_key:{group_name}"
    deadline = Deadline(to_seconds("timeout", timeout))
    interval = max(to_seconds("logging_interval", logging_interval), _LOG_INTERVAL_MIN + world_size / 1000)
    joined = store.add(key, 1)
    if joined == world_size:
        store.set(f"{key}:last_worker", b"1")
    while True:
        left = deadline.left()
        try:
            pause = timedelta(seconds=interval) if left is None or left > interval else _remaining(deadline)
            store.wait([f"{key}:last_worker"], pause)
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
                "rank %d: barrier %s has %d of %d ranks after %.0f s",
                rank, key, joined, world_size, deadline.spent(),
            )  # fmt: skip


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of `{prefix}{rank}` for all ranks, in order. Rank 0 returns after all others have read them.

    Raises StoreTimeoutError after the store's timeout.
    """
    values = store.multi_get([f"{prefix}{other}" for other in range(world_size)])
    last = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return values


def synchronize(
    store: Store, data: Text, rank: int, world_size: int, key_prefix: str, timeout: Timeout = DEFAULT_TIMEOUT
) -> list[bytes]:
    """Exchange data: return that of all ranks, in order. Usable once per prefix.

    Raises MissingRanksError after `timeout` seconds.
    """
    deadline = Deadline(to_seconds("timeout", timeout))
    _check_rank(rank, world_size)
    keys = [f"{key_prefix}{other}" for other in range(world_size)]
    store.set(keys[rank], data)
    try:
        store.wait(keys, _remaining(deadline))
    except RuntimeError as error:
        raise _missing_ranks_error(store, "synchronize", dict(enumerate(keys)), rank, error) from None
    values = store.multi_get(keys)
    last = _arrive(store, world_size, f"{key_prefix}/finished")
    if rank == 0:
        store.wait([last], _remaining(deadline))
    return values


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: Timeout = DEFAULT_TIMEOUT,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: Timeout = timedelta(seconds=10),
) -> None:
    """Wait until `world_size` ranks have arrived, as `torch.distributed.elastic.utils.store.barrier`.

    Usable once per prefix. Raises StoreTimeoutError after `barrier_timeout` seconds. If all ranks pass their `rank`,
    the error is a MissingRanksError: rank 0's names the missing ranks, the others' refer to rank 0. Finding them takes
    up to twice `trace_timeout` seconds more. `rank_tracing_decoder` returns a rank's name, such as its host.
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
    """Count this rank at a barrier; return the key that is set once all have arrived."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _IGNORED)
    return last


def _trace(store: Store, world_size: int, prefix: str, rank: int, seconds: float) -> list[int] | None:
    """Return the missing ranks as found by rank 0; None if rank 0 is missing. Other ranks wait and return none."""
    store.set(f"{prefix}{rank}/TRACE", _IGNORED)
    gate = f"{prefix}/TRACING_GATE"
    if rank != 0:
        try:
            store.wait([gate], timedelta(seconds=2 * seconds))  # rank 0 may have started later
        except RuntimeError:
            return None
        return []
    keys = [f"{prefix}{other}/TRACE" for other in range(1, world_size)]
    missing: list[int] = []
    try:
        store.wait(keys, timedelta(seconds=seconds))  # others may start later
    except RuntimeError:
        absent, _ = _absent(store, keys, Deadline(seconds))
        missing = [1 + index for index in absent[:_MAX_TRACED]]
    store.set(gate, _IGNORED)
    return missing


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1} (world_size={world_size}), not {rank}")


class StoreCollectives:
    """Control-plane collectives over a store, as `torch._C._distributed_c10d._StoreCollectives`.

    Every method takes a key, which may be used once per object (else RuntimeError), and a timeout in seconds, after
    which it raises MissingRanksError if it can tell which ranks are missing, and StoreTimeoutError otherwise.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = to_int64("rank", rank)
        self._world_size = to_int64("world_size", world_size)
        _check_rank(self._rank, self._world_size)
        self._used: set[bytes] = set()

    def barrier(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Wait until all ranks have arrived; without `block`, arrive only."""
        name = self._claim(key)
        deadline = Deadline(to_seconds("timeout", timeout))
        arrived = self._store.add(name + b"/num_members", 1)
        self._store.set(self._rank_key(name, self._rank), b"joined")
        last = name + b"/last_members"
        if arrived == self._world_size:
            self._store.set(last, _IGNORED)
        elif block:
            self._wait("barrier", [last], name, deadline)

    def broadcast_send(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send data to all ranks that call `broadcast_recv`."""
        self._store.set(self._claim(key), data)

    def broadcast_recv(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Wait for the data of `broadcast_send` and return it. Raises StoreTimeoutError."""
        return self._receive(self._claim(key), timeout)

    def gather_send(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send this rank's data to the rank that calls `gather_recv`."""
        self._store.set(self._rank_key(self._claim(key), self._rank), data)

    def gather_recv(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return the data of all ranks, in order; this rank's is `data`."""
        name = self._claim(key)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        gathered = self._gather("gather", name, others, timeout, alone=True)
        gathered.insert(self._rank, to_bytes("data", data))
        return gathered

    def scatter_send(self, key: Text, data: Sequence[Text], timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Send each rank its item of `data`; return this rank's. Raises IndexError if there are too few."""
        name = self._claim(key)
        items = [to_bytes("data", data[rank]) for rank in range(self._world_size)]
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.multi_set([self._rank_key(name, rank) for rank in others], [items[rank] for rank in others])
        return items[self._rank]

    def scatter_recv(self, key: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Wait for this rank's item of `scatter_send` and return it. Raises StoreTimeoutError."""
        return self._receive(self._rank_key(self._claim(key), self._rank), timeout)

    def all_gather(self, key: Text, data: Text, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Exchange data: return that of all ranks, in order."""
        name = self._claim(key)
        self._store.set(self._rank_key(name, self._rank), data)
        return self._gather("all_gather", name, range(self._world_size), timeout)

    def all_sum(self, key: Text, data: int, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
        """Return the sum of all ranks' numbers."""
        name = self._claim(key)
        self._store.add(name, data)
        self.barrier(name + b"/barrier", timeout)
        return self._store.add(name, 0)

    def _claim(self, key: Text) -> bytes:
        name = to_bytes("key", key)
        if name in self._used:
            raise RuntimeError(f"Key {name.decode(errors='replace')} has already been used.")
        self._used.add(name)
        return name

    def _rank_key(self, name: bytes, rank: int) -> bytes:
        return name + b"/%d" % rank

    def _receive(self, name: bytes, timeout: Timeout) -> bytes:
        self._store.wait([name], timedelta(seconds=to_seconds("timeout", timeout)))
        return self._store.get(name)

    def _gather(
        self, collective: str, name: bytes, ranks: Sequence[int], timeout: Timeout, alone: bool = False
    ) -> list[bytes]:
        keys = [self._rank_key(name, rank) for rank in ranks]
        self._wait(collective, keys, name, Deadline(to_seconds("timeout", timeout)), alone)
        return list(self._store.multi_get(keys))

    def _wait(self, collective: str, keys: list[bytes], name: bytes, deadline: Deadline, alone: bool = False) -> None:
        """Wait for keys; on timeout, find the missing ranks. `alone` is whether only this rank waits for the keys."""
        try:
            self._store.wait(keys, _remaining(deadline))
        except RuntimeError as error:
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            expected = {rank: self._rank_key(name, rank) for rank in others}
            raise _missing_ranks_error(
                self._store, collective, expected, None if alone else self._rank, error
            ) from None


def _missing_ranks_error(
    store: Store, collective: str, keys: Mapping[int, Text], rank: int | None, error: RuntimeError
) -> RuntimeError:
    """Return an error with the ranks whose keys are missing; `error` itself if the store no longer answers.

    With `rank`, all other ranks time out as well, so in a large world only some of them search.
    """
    deadline = Deadline(_SEARCH_SECONDS)
    try:
        if rank is None or len(keys) <= _SMALL_WORLD:
            missing, more = _search(store, keys, deadline)
        else:
            first = min(rank, _SEARCHERS)
            missing, more = _search(store, {other: keys[other] for other in range(first)}, deadline)
            if not more and len(missing) < first:
                more = f"<check rank {min(set(range(first)) - set(missing))} for missing rank info>"
            elif not more and rank < _SEARCHERS:
                missing, more = _search(store, keys, deadline)
            else:
                more = _POSSIBLY_MORE
    except RuntimeError:
        return error
    names = ", ".join([*map(str, missing), *([more] if more else [])])
    return MissingRanksError(
        f"{collective} failed -- missing ranks: {names or 'none (all have since arrived)'}, {error}", missing
    )


def _search(store: Store, keys: Mapping[int, Text], deadline: Deadline) -> tuple[list[int], str]:
    """Return the ranks whose keys are missing, and a remark if the search is incomplete."""
    ranks = list(keys)
    absent, complete = _absent(store, list(keys.values()), deadline)
    return [ranks[index] for index in absent], "" if complete else _POSSIBLY_MORE


def _absent(store: Store, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
    """Return the indices of missing keys, and whether all were checked; PyTorch's stores only have `check` for that."""
    found: tuple[list[int], bool]
    if isinstance(store, Store) or hasattr(store, "_absent"):
        found = store._absent(keys, deadline)
    else:
        found = Store._absent(store, keys, deadline)
    return found


def _remaining(deadline: Deadline) -> timedelta:
    """Return the time left in whole milliseconds, which every store accepts; negative means no timeout."""
    left = deadline.left()
    return timedelta(milliseconds=-1 if left is None else math.ceil(left * 1000))
