"""Processes of a replicated store, and etcd: real servers with real logs, whose threads the schedule runs.

What a thread does for the loop is a `Call`: etcd executes it at one time, and the loop learns of that at another, or
never. A lease ends when it was not kept alive for long enough, as etcd sees it; its server sees that when it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import memory_log
from properties.fleet import Difference
from simulation.disk import Crash
from simulation.loop import Loop
from tcpstore_async.log.etcd import Deposed, Holder, Trimmed
from tcpstore_async.server.replica import Replica
from tcpstore_async.server.store_ports import NONE
from tcpstore_async.server.uv import UvServer

if TYPE_CHECKING:
    from simulation.replicated import World

LEASE: Final = 2.0
CERTAIN: Final = 1.8
"""Seconds of a lease that are relied on."""

APPEND, FOLLOW, ALL = "append", "follow", "all"

ROUNDS: Final = 3
"""Turns of its loop for which a process runs at once."""


class Etcd(memory_log.Memory):
    """What etcd knows."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.revision = 0
        """At which the epoch was taken."""
        self.lease_until = 0.0
        """When the lease ends unless it is kept alive."""


class Suspended(Exception):
    """A thread goes on when it is told to."""


class Following:
    """A thread in `follow`."""

    def __init__(self, log: Log, number: int, on_records: Callable[..., object], on_epoch: Callable[..., object]):
        self.log = log
        self.number = number
        """Of the next record."""
        self.on_records = on_records
        self.on_epoch = on_epoch
        self.told = -1
        """The revision of the epoch that was told, 0 for none."""
        self.future: asyncio.Future[Any]

    def go_on(self, most: int) -> None:
        """Take up to so many records. Raises Trimmed."""
        etcd, log = self.log.etcd, self.log
        revision = etcd.revision if etcd.epoch is not None else 0
        if revision != self.told:
            self.told = revision
            self.on_epoch(None if etcd.epoch is None else etcd.epoch.holder)
        elif self.number < etcd.trimmed:
            raise Trimmed
        else:
            records: list[bytes] = []
            while self.number in etcd.records and len(records) < most:
                records.append(etcd.records[self.number])
                self.number += 1
            if records:
                self.on_records(records)
                log.process.world.compare(self.number - 1, self.replication._clock.recorder)

    @property
    def replication(self) -> Any:
        """What executes the records."""
        assert isinstance(self.on_records, partial)
        return self.on_records.args[0]


class Log(memory_log.MemoryLog):
    """The log as a process sees it."""

    def __init__(self, process: Process, etcd: Etcd, holder: Holder) -> None:
        super().__init__(etcd, holder)
        self.process = process
        self.etcd = etcd
        self.epoch = 0
        """The revision at which this process took the epoch, as far as it knows; 0 if it does not have it."""
        self.stops = False
        self.following: Following | None = None

    def follow(self, number: int, on_records: Callable[..., object], on_epoch: Callable[..., object]) -> None:
        self.following = Following(self, number, on_records, on_epoch)
        raise Suspended

    def stop_following(self) -> None:
        self.stops = True

    def read_rest(self, number: int) -> list[bytes]:
        if number < self.etcd.trimmed:
            raise Trimmed
        return super().read_rest(number)

    def take_epoch(self) -> bool:
        etcd, now = self.etcd, self.process.world.now
        if etcd.epoch is not None:
            return False
        etcd.epoch = self
        etcd.revision += 1
        etcd.lease_until = now + LEASE
        etcd.standbys.pop(self.holder.id, None)
        self.epoch = etcd.revision
        self.certain_until = now + CERTAIN
        return True

    def keep_alive(self) -> None:
        etcd, now = self.etcd, self.process.world.now
        if not self.epoch:
            return
        if etcd.epoch is self and etcd.revision == self.epoch:
            etcd.lease_until = now + LEASE
            self.certain_until = now + CERTAIN
        else:
            self.lose()

    def lose(self) -> None:
        self.epoch = 0
        self.certain_until = 0.0

    def lost(self) -> bool:
        return not self.epoch

    def resign(self) -> None:
        if self.epoch:
            if self.etcd.revision == self.epoch:
                super().resign()
            self.lose()

    def attempt(self, revision: int, number: int, record: bytes, server: UvServer, looked: int | None) -> None:
        """Append a record; again, if it is not known whether that was done. Raises Deposed.

        `looked` is a digest of the state behind it.
        """
        etcd = self.etcd
        if etcd.epoch is self and etcd.revision == revision and number not in etcd.records:
            etcd.records[number] = record
            etcd.world.appended(number, record, server, looked)
        elif etcd.records.get(number) != record:
            if self.epoch == revision:
                self.lose()
            raise Deposed


class Call:
    """What a thread does."""

    def __init__(self, do: Callable[[], Any], future: asyncio.Future[Any], appends: bool) -> None:
        self.do = do
        self.future = future
        self.appends = appends


class Threads(Loop):
    """A loop that has tasks, and threads."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world)
        self.process = process
        self.tasks: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        return self.world.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **given: Any) -> asyncio.Task[Any]:
        self.tasks = [task for task in self.tasks if not task.done()]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **given)
        self.tasks.append(task)
        return task

    def call_soon_threadsafe(self, callback: Any, *given: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *given)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.process.alive:
            self.world.errors.found.append(repr(context.get("exception") or context["message"]))

    def run_in_executor(self, executor: Any, function: Any, *given: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        process, future = self.process, self.create_future()
        appends = function == process.log.append
        if appends:
            server = next(one for one in process.made if one.persistence is not None)
            process.world.server = server
            looked = process.world.look(given[0])
            function = process.log.attempt
            given = (process.log.epoch, *given, server, looked)
        process.calls.append(Call(partial(function, *given), future, appends))
        return future


class Process:
    """A server process, which stands by or serves."""

    def __init__(self, world: World, number: int, serial: int) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.paused = False
        """Whether it does not run at all."""
        self.slow = ""
        """Which of its threads wait until they are told to go on: one that appends, that follows, or all."""
        self.deaf = False
        """Whether it is cut off from etcd."""
        self.calls: list[Call] = []
        """What its threads are doing, oldest first."""
        self.made: list[UvServer] = []
        self.server: UvServer | None = None
        """The one that serves."""
        self.loop = Threads(world, self)  # type: ignore[abstract]
        self.log = Log(self, world.etcd, Holder(f"10.1.0.{number}:1", "", 1, f"{number}.{serial}"))
        with self.running():
            log: Any = self.log
            self.replica = Replica(log, {}, self._make, lambda server: nullcontext(), self._announce)
            self.main = self.loop.create_task(self._main())

    def __str__(self) -> str:
        return f"process {self.number}"

    @contextmanager
    def running(self) -> Iterator[None]:
        self.world.loop = self.loop
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def _make(self, instance: str) -> UvServer:
        server = self.world.make(instance)
        server.ports.numbers = NONE
        self.made = [one for one in self.made if not one.stopped]
        self.made.append(server)
        return server

    async def _announce(self, server: UvServer, role: str) -> None:
        if role == "server":
            self.server = server

    async def _main(self) -> None:
        """As `serving._replicate`, without signals."""
        while True:
            async with self.replica.serving():
                await self.replica.over.wait()

    def runs(self) -> bool:
        return self.alive and not self.paused

    def serves(self) -> bool:
        """Return whether it takes connections, whether it may or not."""
        return self.runs() and self.server is not None and not self.server.stopped

    def run(self) -> None:
        """Run for a few turns of its loop, and its threads, unless these are slow."""
        for _ in range(ROUNDS):
            with self.running():
                self.loop.run_once()
            if self.slow != ALL:
                for _ in range(len(self.calls) + 1):
                    self.answer(0 if self.slow == FOLLOW else 1000, self.slow != APPEND)
        if self.main.done():
            raise Difference(f"{self} ends: {self.main.exception()!r}") from self.main.exception()

    def execute(self) -> None:
        """Have etcd execute what is being appended, whose answer does not come."""
        for call in self.calls:
            if call.appends and self.world.etcd.answers:
                with suppress(Deposed):
                    call.do()

    def answer(self, most: int, appends: bool = True) -> None:
        """Let a thread get its answer, or go on following with up to so many records."""
        if self.deaf or not self.world.etcd.answers:
            return
        log, following = self.log, self.log.following
        call = next((one for one in self.calls if appends or not one.appends), None)
        if call is not None:
            self.calls.remove(call)
            self._do(call.do, call.future)
        elif following is not None:
            if log.stops:
                log.following, log.stops = None, False
                self._resolve(following.future, None, None)
                return
            try:
                following.go_on(most)
            except Difference:
                raise
            except Exception as error:
                log.following, log.stops = None, False
                self._resolve(following.future, None, error)

    def _do(self, do: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        with self.running():
            try:
                result = do()
            except Suspended:
                assert self.log.following is not None
                self.log.following.future = future
            except Difference:
                raise
            except Exception as error:
                self._resolve(future, None, error)
            else:
                self._resolve(future, result, None)

    def _resolve(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if not future.done():
            with self.running():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    def kill(self) -> None:
        """End the process. Nothing of it runs any more."""
        self.alive = False
        for server in self.made:
            if not server.stopped:
                server.stopped = True  # nothing below may do anything
                server.persistence = None
                self.world.release(server)
        for task in self.loop.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine: Any = task.get_coro()
                with suppress(Crash, StopIteration, RuntimeError), self.running():
                    for _ in range(20):
                        coroutine.throw(Crash())
        self.loop.soon.clear()
        self.loop.timers.clear()
        self.calls.clear()
        self.log.following = None
