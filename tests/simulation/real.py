"""The real clients on the stage, and a check that they lose nothing that they must not.

Each actor has a list of operations, chosen like everything else. What is checked:

* an item that the server was given is in its queue or was returned to one caller; with two only if the connection over
  which the first had it was cut before the server could hear that;
* a write whose caller made a round trip later is there, and no `add` or join counts twice;
* a store reads what it has written;
* no call times out while what it waits for exists and the network rests;
* in the end the server holds nothing for connections that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from properties.fleet import Difference
from simulation.stage import Actor, Choices, Stage, machine, run_on_loop
from tcpstore_async.base.errors import DistNetworkError, QueueEmptyError, StoreTimeoutError
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.stores.tcp import TCPStore
from tcpstore_async.wire.commands import BY_METHOD, WORKERS_KEY
from tcpstore_async.wire.values import unpack

TIMEOUT = 5.0
OPERATIONS = [
    "push",
    "push",
    "pop",
    "pop",
    "pop",
    "pop_now",
    "set",
    "get",
    "get_other",
    "add",
    "ping",
    "wait",
    "append",
]

QUEUING = 6
"""How many of these concern the queue, whose items travel furthest."""

Operation = tuple[str, float]


class Book:
    """The known state of all items, sums and joins."""

    def __init__(self) -> None:
        self.queue, self.sum = "q", "sum"
        self.serial = 0
        self.pushed: Counter[bytes] = Counter()
        """Items that the server has executed a push of."""
        self.returned: dict[bytes, list[tuple[Person, int]]] = {}
        """Callers, with how often each had been cut off when its request began."""
        self.confirmed: set[bytes] = set()
        self.added = 0
        self.perhaps_added = 0
        self.stores = 0
        self.perhaps_stores = 0

    def item(self) -> bytes:
        self.serial += 1
        return b"item%d" % self.serial

    def judge_items(self, queued: Counter[bytes], may_lose: bool, forgive: bool = False) -> None:
        """Check where each pushed item is after all have left."""
        twice = [item for item, count in self.pushed.items() if count > 1]
        if twice:
            raise Difference(f"items {twice} were pushed twice")
        for item in self.pushed:
            holders = self.returned.get(item, [])
            count = len(holders) + queued[item]
            forgiven = sum(forgive or actor.losses > losses or actor.dead for actor, losses in holders)
            if count == 0 and not may_lose:
                raise Difference(f"item {item!r} is lost")
            if count - forgiven > 1:
                raise Difference(f"item {item!r} is with {len(holders)} callers and {queued[item]} times in the queue")

    def judge_sums(self, total: int, joined: int) -> None:
        if not self.added <= total <= self.added + self.perhaps_added:
            raise Difference(f"{self.added} to {self.added + self.perhaps_added} were added, the sum is {total}")
        if not self.stores <= joined <= self.stores + self.perhaps_stores:
            raise Difference(f"{self.stores} to {self.stores + self.perhaps_stores} have joined, {joined} are counted")


class StageBook(Book):
    """The same, with access to the server's state."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.listed = 0
        stage.observe(BY_METHOD["queue_push"].opcode, lambda key, item: self.pushed.update([unpack(item)]))
        stage.observe(BY_METHOD["list_keys"].opcode, self._list)

    def _list(self) -> None:
        self.listed += 1

    def judge(self) -> None:
        """Check everything after all have left."""
        keyspace = self.stage.store.keyspace
        queued = Counter(unpack(item) for items in keyspace.queues.values() for item in items)
        self.judge_items(queued, any(actor.dead for actor in self.stage.actors))
        missing = self.confirmed - set(self.pushed)
        if missing:
            raise Difference(f"items {missing} were pushed and confirmed, but never came")
        self.judge_sums(int(unpack(keyspace.get(b"/sum")) or b"0"), int(unpack(keyspace.get(WORKERS_KEY)) or b"0"))
        if self.listed:
            raise Difference("somebody asked for the names of all keys")
        if self.stage.refusals:
            raise Difference(f"the server refused {self.stage.refusals}")
        held = (
            len(keyspace.waiters),
            len(keyspace.handoffs),
            len(keyspace.counters),
            self.stage.store.budget.unfinished,
        )
        if any(held):
            raise Difference(f"waiters, hand-offs, counters, unfinished bytes are left: {held}")


class Person(Protocol):
    """The caller of operations."""

    name: str
    losses: int
    dead: bool


class Script:
    """An actor's operations and what it remembers of them."""

    def __init__(self, actor: Person, book: Book, operations: list[Operation]) -> None:
        self.actor = actor
        self.book = book
        self.operations = operations
        self.unsure: list[bytes] = []
        """Items that were pushed since the last round trip."""
        self.store: object = None
        """The store over which they were pushed."""
        self.mine = b""
        """Expected value of the key that only this actor writes."""
        self.sure = True
        """Whether that is certain: a write may have been cut off."""
        self.losses = 0
        """How often the actor had been cut off at the start of the operation."""

    @property
    def key(self) -> str:
        return self.actor.name

    def round_trip(self) -> None:
        self.book.confirmed.update(self.unsure)
        self.unsure.clear()

    def use(self, store: TCPStore | AsyncTCPStore) -> None:
        if store is not self.store:
            self.store = store
            self.unsure.clear()

    def begin(self) -> None:
        self.losses = self.actor.losses

    def give(self, item: bytes) -> None:
        """Note that an item was returned."""
        self.book.returned.setdefault(item, []).append((self.actor, self.losses))
        self.round_trip()

    def saw(self, value: bytes) -> None:
        if self.sure and value != self.mine:
            raise Difference(f"{self.key} reads {value!r} and has written {self.mine!r}")

    def do(self, store: TCPStore, name: str, timeout: float) -> None:
        """One operation."""
        self.use(store)
        book = self.book
        store.set_timeout(timeout)
        match name:
            case "push":
                item = book.item()
                store.queue_push(book.queue, item)
                self.unsure.append(item)
            case "pop" | "pop_now":
                try:
                    self.give(store.queue_pop(book.queue, name == "pop"))
                except QueueEmptyError:
                    pass
            case "set" | "append":
                before, self.sure = self.sure, False
                text = book.item()
                if name == "set":
                    store.set(self.key, text)
                    self.mine, self.sure = text, True
                else:
                    store.append(self.key, text)
                    self.mine, self.sure = self.mine + text, before
            case "add":
                book.perhaps_added += 1
                store.add(book.sum, 1)
                book.perhaps_added -= 1
                book.added += 1
            case "get" | "get_other":
                key = self.key if name == "get" else book.sum
                value = store.get(key)
                if name == "get":
                    self.saw(value)
                self.round_trip()
            case "wait":
                store.wait([book.sum, self.key])
                self.round_trip()
            case _:
                store.num_keys()
                self.round_trip()

    async def do_async(self, store: AsyncTCPStore, name: str, timeout: float) -> None:
        """One operation."""
        self.use(store)
        book = self.book
        store.set_timeout(timeout)
        match name:
            case "push":
                item = book.item()
                await store.queue_push(book.queue, item)
                self.unsure.append(item)
            case "pop" | "pop_now":
                try:
                    self.give(await store.queue_pop(book.queue, name == "pop"))
                except QueueEmptyError:
                    pass
            case "add":
                book.perhaps_added += 1
                await store.add(book.sum, 1)
                book.perhaps_added -= 1
                book.added += 1
            case "get_other":
                await store.get(book.sum)
                self.round_trip()
            case "wait":
                await store.wait([book.sum, self.key])
                self.round_trip()
            case _:
                await store.num_keys()
                self.round_trip()


class Client(Actor):
    """An actor with a store."""

    def judge_timeout(self, script: Script, began: float, name: str, timeout: float) -> None:
        """Check a timeout: what it waited for was absent, or bytes were in flight."""
        book = script.book
        names = {"pop": [book.queue], "get": [script.key], "get_other": [book.sum], "wait": [book.sum, script.key]}.get(
            name, []
        )
        keys = [b"/" + name.encode() for name in names]
        stage = self.stage
        keyspace = stage.store.keyspace
        if keys and not timeout:  # one look, which was before they came
            return
        if stage.rushed >= began or self.losses > script.losses or stage.in_flight() or not keyspace.check(keys):
            return
        if any(pipe.rest for pipe in stage.pipes if pipe.actor is self) or any(map(keyspace.handoffs.get, keys)):
            return
        raise Difference(f"{self.name} timed out, but {keys} are there and nothing is under way")

    def judge_leases(self) -> None:
        """Check that an idle client holds no items."""
        for pipe in self.stage.pipes:
            if pipe.actor is self and pipe.served and not pipe.up and pipe.session.leases:
                raise Difference(f"{self.name} keeps what nobody asked for: {pipe.session.leases}")


class SyncActor(Client):
    """Runs a TCPStore in one thread, as a training script does."""

    def __init__(self, stage: Stage, name: str, book: Book, operations: list[Operation]) -> None:
        super().__init__(stage, name)
        self.script = Script(self, book, operations)
        self.store: TCPStore | None = None

    def act(self) -> None:
        try:
            for name, timeout in self.script.operations:
                self.script.begin()
                began = self.stage.now
                try:
                    self.stage.tell(f"{self.name} begins {name}, timeout {timeout:g}")
                    self.script.do(self._open(), name, timeout)
                except StoreTimeoutError:
                    self.judge_timeout(self.script, began, name, timeout)
                except KeyboardInterrupt:
                    self.script.sure = False
                except DistNetworkError:
                    self._close()
        finally:
            self._close()

    def _open(self) -> TCPStore:
        if self.store is None:
            book = self.script.book
            book.perhaps_stores += 1
            self.store = TCPStore("127.0.0.1", 1, 100, False, timeout=TIMEOUT)
            book.perhaps_stores -= 1
            book.stores += 1
        return self.store

    def _close(self) -> None:
        self.script.unsure.clear()
        self.script.sure = False
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def disturb(self, how: int) -> None:
        def strike() -> None:
            raise KeyboardInterrupt

        self.interrupt = self._handle_signal if how % 2 else strike

    def _handle_signal(self) -> None:
        """Handle a signal in the middle of any operation."""
        store, began, losses = self.store, self.stage.now, self.losses
        if store is None:
            return
        try:
            store.set("preempted", "1")
            store.num_keys()
        except StoreTimeoutError:
            if self.stage.rushed < began and losses == self.losses and not self.stage.in_flight():
                raise Difference("a handler of signals timed out") from None
        except DistNetworkError:
            pass  # what it has interrupted will hear that, too


class AsyncActor(Client):
    """Runs an AsyncTCPStore that two tasks share."""

    def __init__(self, stage: Stage, name: str, book: Book, tasks: list[list[Operation]]) -> None:
        super().__init__(stage, name)
        self.scripts = [Script(self, book, operations) for operations in tasks]
        self.store: AsyncTCPStore | None = None
        self.opening: asyncio.Lock
        self.tasks: list[asyncio.Task[None]] = []
        self.loop: asyncio.AbstractEventLoop

    def act(self) -> None:
        run_on_loop(self, self._main)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.opening = asyncio.Lock()
        self.tasks = [self.loop.create_task(self._run(script)) for script in self.scripts]
        try:
            await asyncio.wait(self.tasks)
            if self.store is not None:
                with contextlib.suppress(DistNetworkError, StoreTimeoutError):
                    await self.store.num_keys()
                    self.judge_leases()
        finally:
            if self.store is not None:
                await self.store.close()
        for task in self.tasks:
            task.result()

    async def _run(self, script: Script) -> None:
        for operation in script.operations:
            with contextlib.suppress(asyncio.CancelledError):
                await self._step(script, operation)

    async def _step(self, script: Script, operation: Operation) -> None:
        store: AsyncTCPStore | None = None
        script.begin()
        began = self.stage.now
        try:
            store = await self._open()
            self.stage.tell(
                f"{self.name}, task {self.scripts.index(script)}, begins {operation[0]}, timeout {operation[1]:g}"
            )
            await script.do_async(store, *operation)
        except StoreTimeoutError:
            self.judge_timeout(script, began, *operation)
        except DistNetworkError:
            script.unsure.clear()
            script.sure = False
            if store is not None and store is self.store:
                self.store = None
                await asyncio.gather(store.close(), return_exceptions=True)

    async def _open(self) -> AsyncTCPStore:
        async with self.opening:
            if self.store is None:
                self.store = await AsyncTCPStore.connect("127.0.0.1", 1, timeout=TIMEOUT)
            return self.store

    def disturb(self, how: int) -> None:
        if self.tasks and not self.tasks[how % len(self.tasks)].done():
            self.loop.call_soon(_cancel_once, self.tasks[how % len(self.tasks)])


def _cancel_once(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()


def perform(choices: Choices, tell: Callable[[str], object] = lambda text: None) -> Stage:
    """Run the choices. Raises what is wrong."""
    draw = choices.draw
    stage = Stage(choices, (0, 10, 30, 60)[draw(4)], tell)
    book = StageBook(stage)

    most = (len(OPERATIONS), QUEUING)[draw(2)]

    def operations() -> list[Operation]:
        return [(OPERATIONS[draw(most)], (TIMEOUT, 0.5, 0.0, TIMEOUT)[draw(4)]) for _ in range(1 + draw(6))]

    for number in range(2 + draw(3)):
        if draw(2):
            AsyncActor(stage, f"async{number}", book, [operations(), operations()])
        else:
            SyncActor(stage, f"sync{number}", book, operations())
    with machine():
        try:
            stage.play()
        finally:
            stage.end()
    book.judge()
    return stage


def fault(given: list[int], seed: int | None = None) -> Exception | None:
    """Return what is wrong with a run, if anything."""
    try:
        perform(Choices(given, seed))
    except Exception as error:
        return error
    return None


def shrink(numbers: list[int], differs: Callable[[list[int]], Any] = fault) -> list[int]:
    """Return fewer and smaller numbers with which the run still fails."""
    size = max(1, len(numbers) // 2)
    while size:
        at = 0
        while at < len(numbers):
            for candidate in (
                numbers[:at] + numbers[at + size :],
                numbers[:at] + [0] * len(numbers[at : at + size]) + numbers[at + size :],
            ):
                if candidate != numbers and differs(candidate) is not None:
                    numbers = candidate
                    break
            else:
                at += size
                continue
            if candidate[at : at + 1] == [0]:
                at += size
        size //= 2
    return numbers
