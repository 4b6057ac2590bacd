"""Records calls of many clients during faults of one kind, and tells whether their histories are linearizable.

    python tests/linear/histories.py --kind kill [--seconds 60] [--seed 1] [--sync always]

kill: the server is killed and started again. stop: it, or the relay, is stopped by SIGSTOP for a while. reset: all
connections are. partition: nothing passes between the server's host and that of the clients (network namespaces, as
root). memory: other clients use up a small budget, and the server may be killed meanwhile. disk: the journal's file
system is full for a while (a tmpfs, as root). ioerror: writing to the journal fails. etcd: what a replicated store
consists of ends or stops, see `faults/rounds.py`; all clients are behind relays. none: nothing happens.

Half of the clients are behind a relay. Except for `memory`, which disconnects clients, any error is a finding, as is a
client that hangs. A client that is disconnected may have been given an item that it could not confirm: then items are
not in order, but none is lost. Keys are new after each fault, and read to the end once no call uses them.

Prints one line of JSON; the exit status is 1 if anything was wrong, and then the shortest history that shows it is
printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tcpstore_async
from etcd_cluster import cluster, programs
from faults.kills import PROGRAM, Client, Server
from faults.rounds import ENDS, Replicated
from linear.checker import (
    EMPTY,
    Call,
    Step,
    Undecided,
    conserved,
    counter,
    linearizable,
    queue,
    register,
    shortest_failure,
)
from networks import Network, enter, two_networks
from relay.link_proxy import LinkProxy, link_proxy
from support import Server as Process
from support import free_port, tcpstore_relay
from tcpstore_async.base.errors import DistError, QueueEmptyError

OBJECTS: dict[str, tuple[Step, int]] = {"register": (register, 3), "counter": (counter, 1), "queue": (queue, 2)}
"""The objects of each generation: what they are, and how many."""

NO_REPLY = ("set", "append", "queue_push")
"""These have happened, at the latest, when a later call of the same client is answered."""

NEVER = b"never"
"""Is no value: COMPARE_SET of it reads, and waits for nothing."""

TIMEOUT = 120.0
"""Seconds that a call has: more than twice the longest fault, as TCP waits longer each time that it sends again."""

CLIENTS = 12
BUDGET = 4_000_000
LARGE = 100_000


class Load:
    """What all clients have called."""

    def __init__(self, seed: int, large: float) -> None:
        self.rng = random.Random(seed)
        self.large = large
        """How many of the values are large."""
        self.generation = 0
        self.over = False
        self.answered: set[str] = set()
        """The clients to which there was a reply since the last fault."""
        self.histories: dict[str, list[Call]] = defaultdict(list)
        self.errors: Counter[str] = Counter()
        self.busy: dict[str, tuple[str, str]] = {}
        """The key and the method that each client is calling."""


class Recorder:
    """One client, whose calls are recorded."""

    def __init__(self, load: Load, name: str, waits: bool, connect: Callable[[], Awaitable[Any]]) -> None:
        self.load = load
        self.name = name
        self.waits = waits
        """Whether it waits for items and values. Some do not, so that there are any."""
        self.connect = connect
        self.client: Client | None = None
        self.seen: dict[str, bytes] = {}
        """The last value seen of each key."""
        self.count = 0
        self._unanswered: list[tuple[str, Call]] = []

    async def __call__(self, key: str, method: str, *given: Any) -> Any:
        """Call a method of a key, and record that; return its result, or None if there was an error."""
        while self.client is None:
            try:
                self.client = Client(await self.connect(), self.name)
                await self.client("num_keys")  # from its first call on, a store survives its connection
            except DistError as error:
                await self._failed(error)
                await asyncio.sleep(0.05)
        began, ended = time.monotonic_ns(), None
        self.load.busy[self.name] = key, method
        try:
            result, ended = await self._timed(method, key, *given)
        except DistError as error:
            await self._failed(error)
            result = None
        del self.load.busy[self.name]
        call = Call(self.name, method, tuple(map(short, given)), short(result), began, ended)
        if ended is None:
            self._confirm(None)
        elif method in NO_REPLY:
            self._unanswered.append((key, call._replace(ended=None)))
            return result
        else:
            self.load.answered.add(self.name)
            self._confirm(ended)
            if method == "queue_pop":
                self._unanswered.append((key, call))
                return result
        self.load.histories[key].append(call)
        return result

    async def _timed(self, method: str, *given: Any) -> tuple[Any, int]:
        assert self.client is not None
        if method == "check":
            given = ([given[0]],)
        found = getattr(self.client.store, method)
        try:
            if self.client.threads:
                return await asyncio.to_thread(lambda: (found(*given), time.monotonic_ns()))
            return await found(*given), time.monotonic_ns()
        except QueueEmptyError:
            return EMPTY, time.monotonic_ns()

    async def _failed(self, error: Exception) -> None:
        """Go on with another client."""
        self.load.errors[f"{type(error).__name__}: {error}"] += 1
        if self.client is not None:
            await self._close(self.client)
        self.client = None

    async def _close(self, client: Client) -> None:
        closing = client.store.close
        await (asyncio.to_thread(closing) if client.threads else closing())

    def _confirm(self, ended: int | None) -> None:
        """Record what waited for another reply. If there is none, it may not have happened: not even a pop."""
        for key, call in self._unanswered:
            self.load.histories[key].append(call._replace(ended=ended and (call.ended or ended)))
        self._unanswered.clear()

    async def close(self) -> None:
        await self(f"counter 0/{self.load.generation}", "add", 0)
        if self.client is not None:
            await self._close(self.client)

    def value(self) -> bytes:
        self.count += 1
        rng = self.load.rng
        return f"{self.name}:{self.count}".encode() + b"." * (LARGE if rng.random() < self.load.large else 0)

    async def work(self) -> None:
        """Call something, as long as the load lasts."""
        rng = self.load.rng
        while not self.load.over:
            kind = rng.choices(list(OBJECTS), (4, 1, 3))[0]
            key = f"{kind} {rng.randrange(OBJECTS[kind][1])}/{self.load.generation}"
            if kind == "counter":
                await self(key, "add", rng.choice((-1, 0, 1, 2)))
            elif kind == "queue":
                await self.use_queue(key, rng.random())
            else:
                await self.use_register(key, rng.random())

    async def use_queue(self, key: str, choice: float) -> None:
        if choice < 0.45:
            await self(key, "queue_push", self.value())
        else:
            await self(key, "queue_pop", self.waits and choice < 0.75)

    async def use_register(self, key: str, choice: float) -> None:
        if choice < 0.4:
            read = ("get",) if self.waits else ("compare_set", NEVER, NEVER)
            self.seen[key] = await self(key, *read) or b""
        elif choice < 0.65:
            await self(key, "set", self.value())
        elif choice < 0.85:
            self.seen[key] = await self(key, "compare_set", self.seen.get(key, b""), self.value()) or b""
        elif choice < 0.95:
            await self(key, "append", f"+{self.name}:{self.count}".encode())
            self.count += 1
        else:
            await self(key, "delete_key" if choice < 0.97 else "check")

    async def finish_all(self) -> None:
        """Finish each generation that is over."""
        generation = 0
        while not (self.load.over and generation > self.load.generation):
            if self.load.over or generation < self.load.generation:
                await self.finish(generation)
                generation += 1
            else:
                await asyncio.sleep(0.02)

    async def finish(self, generation: int) -> None:
        """Answer all who wait for a key of an old generation, and read what is left there."""
        end = f"/{generation}"
        while waiting := {key for key, _ in self.load.busy.values() if key.endswith(end)}:
            for key in waiting:
                if key.startswith("queue"):
                    await self(key, "queue_push", self.value())
                elif key.startswith("register"):
                    await self(key, "set", self.value())
            await self(f"counter 0{end}", "add", 0)  # which confirms that
            await asyncio.sleep(0.02)
        for kind, (_, count) in OBJECTS.items():
            for number in range(count):
                key = f"{kind} {number}{end}"
                if kind == "counter":
                    await self(key, "add", 0)
                elif kind == "register":
                    if await self(key, "check"):
                        await self(key, "get")
                else:
                    while await self(key, "queue_pop", False) not in (EMPTY, None):
                        pass


def short(value: Any) -> Any:
    """Return a value with its padding counted."""
    return re.sub(rb"\.{8,}", lambda dots: b"<%d>" % len(dots[0]), value) if isinstance(value, bytes) else value


# Faults


class Stage:
    """The processes, and what can happen to them."""

    def __init__(self, folder: Path, server: Server, relay: Process, rng: random.Random) -> None:
        self.folder = folder
        self.server = server
        self.relay = relay
        self.rng = rng
        self.direct = ("127.0.0.1", server.port)
        """Where clients without a relay connect."""
        self.proxy: LinkProxy | None = None
        self.hosts: tuple[Network, Network] | None = None
        """Of the server, and of the clients."""
        self.exits: Counter[int] = Counter()
        """How often the server has exited by itself, with each status."""

    async def start(self) -> None:
        """Start the server again, as often as it exits at once."""
        process = self.server.process
        while process.poll() is not None:
            self.exits[process.returncode] += 1
            with process:
                pass
            self.server.start()
            process = self.server.process
            assert process.stdout is not None
            if not await asyncio.to_thread(process.stdout.readline):
                await asyncio.to_thread(process.wait)
                await asyncio.sleep(0.1)

    async def goes_on_until(self, seconds: float) -> None:
        """Wait so long, or until the server has exited."""
        until = time.monotonic() + seconds
        while self.server.process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.02)


async def nothing(stage: Stage) -> None:
    pass


async def kill(stage: Stage) -> None:
    await asyncio.to_thread(stage.server.kill)
    await asyncio.sleep(stage.rng.choice((0.0, 0.0, 0.5)))
    stage.server.start()
    await asyncio.to_thread(stage.server.ready)


async def stop(stage: Stage) -> None:
    """Now and then for longer than it takes to notice that a connection is silent."""
    pids = stage.rng.choice([[stage.server.process.pid], [stage.relay.process.pid]])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(stage.rng.choices((0.2, 2.0, 20.0), (6, 3, 1))[0])
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def reset(stage: Stage) -> None:
    assert stage.proxy is not None
    for _ in range(stage.rng.randrange(1, 5)):
        stage.proxy.cut(reset=True)
        await asyncio.sleep(stage.rng.random() / 10)


async def partition(stage: Stage) -> None:
    """At either end, either packets are lost or whoever sends is told that there is no way."""
    assert stage.hosts is not None
    number = stage.rng.randrange(2)
    here, there = stage.hosts[number], stage.hosts[1 - number]
    interface = ["link", "set", "pair"]
    rule = ["priority", "101", "to", there.address, "unreachable"]
    begin, end = stage.rng.choice(
        [([*interface, "down"], [*interface, "up"]), (["rule", "add", *rule], ["rule", "delete", *rule])]
    )
    subprocess.run(["ip", "-n", here.name, *begin], check=True)
    await asyncio.sleep(stage.rng.choices((0.3, 2.0, 20.0), (6, 3, 1))[0])
    subprocess.run(["ip", "-n", here.name, *end], check=True)


async def memory(stage: Stage) -> None:
    """Fill the store above all marks, and keep it so for a while; sometimes the server is killed meanwhile."""
    keys = [f"fill {number}" for number in range(BUDGET // LARGE)]

    async def each(method: str, *given: bytes) -> None:
        async with await connect_async(*stage.direct) as store:
            for key in keys:
                await getattr(store, method)(key, *given)

    async def free() -> bool:
        try:
            await each("delete_key")
        except DistError:
            return False
        return True

    for _ in range(3):
        with suppress(DistError):
            await each("set", b"." * LARGE)
    await asyncio.sleep(stage.rng.choice((0.0, 0.5)))
    await stage.rng.choice((nothing, kill))(stage)
    while not await free():
        pass


async def disk(stage: Stage) -> None:
    """Leave no space, until the server has noticed or for a while; sometimes it is started before there is some."""
    folder = stage.folder / "journal"
    while True:
        found = os.statvfs(folder)
        if resize(folder, (found.f_blocks - found.f_bfree) * found.f_frsize):  # not if more was written meanwhile
            break
    await stage.goes_on_until(stage.rng.choice((1.0, 10.0)))
    resized = asyncio.create_task(asyncio.sleep(stage.rng.choice((0.0, 1.0))))
    resized.add_done_callback(lambda _: resize(folder, SPACE))
    await asyncio.gather(resized, stage.start())


SPACE = 8 << 30


def resize(folder: Path, size: int) -> bool:
    """Return whether there is not more than this already."""
    return not subprocess.run(
        ["mount", "-o", f"remount,size={size}", str(folder)], stderr=subprocess.DEVNULL
    ).returncode


async def ioerror(stage: Stage) -> None:
    bad = stage.folder / "bad"
    bad.write_text(stage.rng.choice(("write", "torn", "sync")))
    await stage.goes_on_until(stage.rng.choice((0.5, 3.0)))
    mended = asyncio.create_task(asyncio.sleep(stage.rng.choice((0.0, 1.0))))
    mended.add_done_callback(lambda _: bad.unlink())
    await asyncio.gather(mended, stage.start())


async def etcd(stage: Stage) -> None:
    servers = stage.server
    assert isinstance(servers, Replicated)
    await asyncio.to_thread(servers.settle)
    await asyncio.to_thread(getattr(servers, stage.rng.choice(ENDS)))


FAULTS = {
    "none": nothing,
    "kill": kill,
    "stop": stop,
    "reset": reset,
    "partition": partition,
    "memory": memory,
    "disk": disk,
    "ioerror": ioerror,
    "etcd": etcd,
}


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def staged(kind: str, sync: str, seed: int) -> Iterator[Stage]:
    """Start a server and a relay. For `partition` this thread stays on the clients' host."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, env = Path(name), dict(os.environ)
        options, program, host, port = ["--sync", sync], list(PROGRAM), "127.0.0.1", free_port()
        hosts = proxy = None
        if kind == "partition":
            hosts = stack.enter_context(two_networks())
            host = hosts[0].address
            program = [*hosts[0].prefix, *program]
            options += ["--host", host]
            enter(str(hosts[1].path))
        elif kind == "memory":
            options += ["--limit", f"budget_bytes={BUDGET}", "--limit", f"value_bytes={BUDGET // 4}"]
        elif kind == "disk":
            stack.enter_context(mounted(folder / "journal"))
        elif kind == "etcd":
            members = stack.enter_context(cluster(programs()[0]))
            servers = Replicated(folder, members, "server", env)
            stack.callback(servers.close)
            relays = [stack.enter_context(tcpstore_relay(servers.url)) for _ in range(2)]
            stage = Stage(folder, servers, relays[0], random.Random(seed))  # type: ignore[arg-type]
            stage.direct = "127.0.0.1", relays[1].port
            yield stage
            return
        elif kind == "ioerror":
            program = [sys.executable, str(Path(__file__).with_name("bad_disk.py")), str(folder / "bad")]
        server = Server(folder, port, options, env, program=program)
        stack.callback(lambda: server.kill())
        server.ready()
        if kind == "reset":
            proxy = stack.enter_context(link_proxy(port, seed))
            port = proxy.port
        relay = stack.enter_context(tcpstore_relay(f"tcp://{host}:{port}"))
        stage = Stage(folder, server, relay, random.Random(seed))
        stage.proxy, stage.hosts = proxy, hosts
        stage.direct = host, port
        yield stage


# One run


async def connect_async(host: str, port: int) -> Any:
    return await tcpstore_async.AsyncTCPStore.connect(host, port, timeout=TIMEOUT)


async def connect_sync(host: str, port: int) -> Any:
    return await asyncio.to_thread(partial(tcpstore_async.TCPStore, host, port, timeout=TIMEOUT))


async def run(stage: Stage, kind: str, seconds: float, seed: int) -> tuple[Load, dict[str, Any]]:
    """Have all clients call until the time is over; return what they called, and figures."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(100))
    load = Load(seed, {"disk": 0.6, "memory": 0.01}.get(kind, 0.02))
    recorders = []
    for number in range(CLIENTS):
        place = ("127.0.0.1", stage.relay.port) if number % 2 else stage.direct
        name = f"{'relayed' if number % 2 else 'direct'}-{'async' if number % 3 else 'sync'}-{number}"
        recorders.append(
            Recorder(load, name, number % 4 < 2, partial(connect_async if number % 3 else connect_sync, *place))
        )
    last = Recorder(load, "last", False, partial(connect_async, *stage.direct))
    for recorder in (*recorders, last):
        await recorder("counter 0/0", "add", 1)
    working = [asyncio.create_task(recorder.work()) for recorder in recorders]
    working.append(asyncio.create_task(last.finish_all()))
    busy = {recorder.name for recorder in recorders if not recorder.waits}
    faults = 0
    pauses: list[float] = []
    wrong: list[str] = []
    began = time.monotonic()
    while time.monotonic() < began + seconds and not any(one.done() for one in working) and not wrong:
        # There is another fault only once all go on: several in a row are one that may outlast the grace period.
        await asyncio.sleep(0.2 + stage.rng.random() * 0.6)
        faulty = time.monotonic()
        await FAULTS[kind](stage)
        faults += 1
        load.answered.clear()
        while not load.answered >= busy and not wrong:
            await stage.start()
            await asyncio.sleep(0.001)
            if time.monotonic() > faulty + TIMEOUT:
                wrong.append(f"clients had no reply for {TIMEOUT} s: {busy - load.answered}, {load.busy}")
        pauses.append(time.monotonic() - faulty)
        load.generation += 1
    load.over = True
    try:
        await asyncio.wait_for(asyncio.gather(*working), 2 * TIMEOUT)
        for recorder in (*recorders, last):
            await recorder.close()
    except asyncio.TimeoutError:
        wrong.append(f"clients hang: {load.busy}")
    if kind != "memory":
        wrong += [f"{count} × {text}" for text, count in load.errors.items()]
    if stage.exits and kind not in ("disk", "ioerror"):
        wrong.append("the server exited")
    pauses.sort()
    calls = [call for history in load.histories.values() for call in history]
    return load, {
        "kind": kind, "seed": seed, "seconds": round(time.monotonic() - began, 1), "faults": faults,
        "calls": len(calls), "unknown": sum(call.ended is None for call in calls), "keys": len(load.histories),
        "pause": [round(pauses[int(len(pauses) * part)], 3) for part in (0.5, 0.95)] if pauses else [],
        "exits": dict(stage.exits), "errors": sum(load.errors.values()), "wrong": wrong,
    }  # fmt: skip


def judge(histories: dict[str, list[Call]]) -> list[str]:
    """Return, for each key whose history is not linearizable, the shortest part that shows it."""
    found = []
    for key, calls in histories.items():
        step = OBJECTS[key.split()[0]][0]
        try:
            if any(call.method == "queue_pop" and call.ended is None for call in calls):
                if conserved(calls):
                    continue
                least, text = calls, "has lost items, or items that were popped twice"
            elif linearizable(calls, step):
                continue
            else:
                least, text = shortest_failure(calls, step), "is not linearizable"
        except Undecided:
            least, text = calls, "has too many orders to try"
        first = min(call.began for call in least)
        found.append("\n".join([f"{key} {text}:", *(line(call, first) for call in least)]))
    return found


def line(call: Call, first: int) -> str:
    ended = "?" if call.ended is None else f"{(call.ended - first) / 1e6:.3f}"
    words = ", ".join(map(repr, call.given))
    result = "" if call.ended is None else f" = {call.result!r}"
    return f"{(call.began - first) / 1e6:10.3f} – {ended:>10} ms  {call.client:18} {call.method}({words}){result}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(FAULTS), required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", default="process", choices=["process", "always"])
    given = parser.parse_args()
    with staged(given.kind, given.sync, given.seed) as stage:
        load, found = asyncio.run(run(stage, given.kind, given.seconds, given.seed))
        failures = judge(load.histories)
        found["linearizable"] = not failures
        print("\n".join([json.dumps(found), *failures]), flush=True)
        wrong = bool(failures or found["wrong"])
        if wrong:
            print((stage.folder / "server.log").read_text()[-3000:], stage.relay.log()[-3000:], file=sys.stderr)
    if wrong:
        os._exit(1)  # clients may hang in threads


if __name__ == "__main__":
    main()
