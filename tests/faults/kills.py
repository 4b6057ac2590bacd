"""Kills a server with a journal, again and again, under load: nothing is lost, executed twice, or left unanswered.

    python tests/faults/kills.py --kills 100 [--seed 1] [--sync always] [--secure] [--replay] [--builds A:B]
    python tests/faults/kills.py --how replace    another server takes over each time, or `term`: SIGTERM

Each call of each client is checked as it returns, and all queues, counters and values at the end. Prints one line of
JSON for each run of 100 kills; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tcpstore_async
from tcpstore_async.stores.agent import Agent, Options, RoundsClosed, agent_name

ROOT = Path(__file__).parent.parent.parent
COMPILED = ROOT / "build" / "compiled"
DIGESTS = ROOT / "tests" / "log" / "digests.py"

PROGRAM = (sys.executable, "-m", "tcpstore_async")

TIMEOUT = 60.0

MANY_KILLS = 300.0
"""Seconds that a constructor has, which every kill sends back to where its session cannot survive."""

REST = 0.2
"""Seconds from one kill to the next, at least."""

A_RUN = 100
"""Kills before the next run, with an empty journal."""

GRACE = "15"
"""A named store whose owner was closed while there was no server ends after so many seconds; the next one waits."""

LARGE = 300_000
MOST_TEXT = 50_000
MANY = 3000
END = b"end"


class Server:
    """A server at one port and directory, which is killed and comes back."""

    def __init__(
        self,
        folder: Path,
        port: int,
        options: list[str],
        env: dict[str, str],
        how: str = "kill",
        builds: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.folder = folder
        self.port = port
        self.options = options
        self.env = env
        self.program = program
        self.how = how
        self.builds = builds
        """Folders for PYTHONPATH, of each of which a server is started in turn; none for the present one."""
        self.started = 0
        self.start()

    def start(self) -> None:
        if self.builds:
            self.env = {**self.env, "PYTHONPATH": self.builds[self.started % len(self.builds)]}
        self.started += 1
        command = [*self.program, "serve", "--port", str(self.port), *self.options]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--persist", str(self.folder / "journal"), "--admin", str(self.folder / "admin")],
                stdout=subprocess.PIPE, stderr=log, env=self.env, cwd=self.folder,
            )  # fmt: skip

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "server.log").read_text()[-3000:]

    def settle(self) -> None:
        """Bring back what the last end has ended besides."""

    def kill(self) -> None:
        with self.process:
            self.process.kill()

    def restart(self) -> None:
        """End the server in the way that is tried, and start the next one."""
        before = self.process
        if self.how == "replace":
            self.options.append("--replace")
        else:
            before.send_signal(signal.SIGTERM if self.how == "term" else signal.SIGKILL)
            before.wait(TIMEOUT)
        self.start()
        if self.how == "replace":
            self.options.pop()
            before.wait(TIMEOUT)
        with before:
            pass

    def copy(self) -> Path:
        """Copy the journal, while there is no server."""
        copy = Path(tempfile.mkdtemp(dir=self.folder))
        for path in (self.folder / "journal").iterdir():
            if path.name == "instance" or path.name.startswith(("log-", "snapshot-")):
                shutil.copy(path, copy)
        return copy

    def replayed(self, journal: Path, elsewhere: list[tuple[str, int]]) -> list[str]:
        """Execute a journal again in processes with another build, and another order of sets; return what differs.

        Each has a folder for PYTHONPATH and a seed of hashes. The journal is removed.
        """
        found = []
        for path, seed in elsewhere:
            command = [sys.executable, str(DIGESTS), str(journal)]
            env = {**self.env, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
            found.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=self.folder))
        texts = [process.communicate()[0].decode() for process in found]
        shutil.rmtree(journal)
        differ = [text for text in texts if text != texts[0] or json.loads(text)["wrong"]]
        return [f"a replay is not the same: {differ}"] if differ else []


@contextmanager
def relay(folder: Path, url: str, env: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Run a relay; yield its port and its process's id."""
    command = [sys.executable, "-m", "tcpstore_async", "relay", "--upstream", url, "--port", "0"]
    with (folder / "relay.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, cwd=folder)
    with process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["port"], process.pid
        finally:
            process.kill()


class Load:
    """What all clients have done."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.over = False
        self.calls = 0
        self.wrong: list[str] = []
        self.shared: list[int] = []
        """What each addition to the shared counter returned."""
        self.pushed: list[bytes] = []
        self.popped: list[bytes] = []
        self.written: dict[str, bytes] = {}
        """Values that must be there at the end."""

    def check(self, right: bool, what: str) -> None:
        self.calls += 1
        if not right:
            self.wrong.append(what)
            self.over = True


class Client:
    """A store of either kind, for coroutines."""

    def __init__(self, store: Any, name: str) -> None:
        self.store = store
        self.name = name
        self.threads = not isinstance(store, tcpstore_async.AsyncTCPStore)

    async def __call__(self, method: str, *given: Any) -> Any:
        call = getattr(self.store, method)
        return await (asyncio.to_thread(call, *given) if self.threads else call(*given))


async def write(load: Load, call: Client) -> None:
    """Everything that changes values, one client's own and a counter that all share."""
    name, rng, added, text, value = call.name, load.rng, 0, b"", b""
    while not load.over:
        added += 1
        load.check(await call("add", f"{name}/own", 1) == added, f"{name}: not {added}")
        load.shared.append(await call("add", "shared", 1))
        piece = b"%d," % added
        text += piece
        await call("append", f"{name}/text", piece)
        before, value = value, b"%d" % added
        swapped = await call("compare_set", f"{name}/swapped", before, value)
        load.check(swapped == value, f"{name}: swapped {swapped!r} for {value!r}")
        key = f"{name}/{added % 50}"
        data = rng.randbytes(rng.choice((3, 100, 5_000)) if rng.random() < 0.95 else LARGE)
        await call("set", key, data)
        load.check(await call("get", key) == data, f"{name}: another value for {key}")
        load.written[key] = data
        load.written[f"{name}/text"] = text
        if len(text) > MOST_TEXT:
            await call("delete_key", f"{name}/text")
            text = load.written[f"{name}/text"] = b""
        load.written[f"{name}/swapped"] = value
        if rng.random() < 0.03:
            keys = [f"{name}/many/{number}" for number in range(MANY)]
            values = [b"%d/%d" % (added, number) for number in range(MANY)]
            await call("multi_set", keys, values)
            load.check(await call("multi_get", keys) == values, f"{name}: other values of many keys")
            load.check(await call("check", keys), f"{name}: many keys are not there")


async def push(load: Load, call: Client) -> None:
    number = 0
    while not load.over:
        number += 1
        item = f"{call.name}/{number}".encode()
        await call("queue_push", "queue", item)
        load.pushed.append(item)
        load.check(await call("queue_len", "queue") >= 0, "")
        await asyncio.sleep(0.001)


async def pop(load: Load, call: Client) -> None:
    while True:
        item = await call("queue_pop", "queue")
        load.check(True, "")
        if item == END:
            return
        load.popped.append(item)


async def wait(load: Load, call: Client, other: Client) -> None:
    """One waits for what the other sets, sooner or later."""
    number = 0
    while not load.over:
        number += 1
        key = f"{call.name}/awaited/{number}"
        waiting = asyncio.ensure_future(call("wait", [key], TIMEOUT))
        await asyncio.sleep(load.rng.random() / 100)
        await other("set", key, b"1")
        await waiting
        await other("delete_key", key)
        load.check(True, "")


async def meet(load: Load, calls: list[Client], name: str) -> None:
    """All meet at one barrier after the other."""
    number = 0
    while not load.over:
        number += 1
        await asyncio.gather(*(call("barrier", f"{name}/{number}", len(calls)) for call in calls))
        await calls[0]("delete_key", f"{name}/{number}")
        load.check(True, "")


def use_a_named_store(url: str, name: str, size: int, value: str) -> list[bytes]:
    """Own a store, with ranks that wait for it, join it, write and read."""

    def run(rank: int) -> bytes:
        host, _, port = name.rpartition(":")
        with tcpstore_async.TCPStore(host, int(port), size, rank == 0, MANY_KILLS, server=url) as store:
            store.set(f"rank {rank}", value)
            store.barrier("all", size)
            found = b"".join(store.multi_get([f"rank {other}" for other in range(size)]))
            store.barrier("end", size)
            return found

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))


async def name(load: Load, url: str, number: int) -> None:
    """One named store after the other, of the same name."""
    size, round_number = 3, 0
    while not load.over:
        round_number += 1
        value = f"{round_number}."
        found = await asyncio.to_thread(use_a_named_store, url, f"job{number}:29500", size, value)
        load.check(found == [value.encode() * size] * size, f"store {number}, round {round_number}: {found}")


def form_rounds(load: Load, ports: list[int], tls: list[bool | None]) -> list[list[tuple[int, int, int]]]:
    """Have one agent at each port join one round after the other; return what each saw."""
    options = Options(least=len(ports), most=len(ports), join=TIMEOUT, heartbeat=TIMEOUT)

    def run(number: int) -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        with tcpstore_async.TCPStore("127.0.0.1", ports[number], timeout=TIMEOUT, tls=tls[number]) as store:
            agent = Agent(store, "rounds", agent_name("agents", number), options)
            while not load.over:
                try:
                    seen.append(agent.join())
                    agent.beat()
                except RoundsClosed:
                    return seen
                load.check(len(seen) < 2 or seen[-1][0] > seen[-2][0], f"agent {number}: {seen[-2:]}")
            agent.close()
        return seen

    with ThreadPoolExecutor(len(ports)) as agents:
        return list(agents.map(run, range(len(ports))))


async def agents(load: Load, ports: list[int], tls: list[bool | None]) -> None:
    """Rounds have all their agents, and are formed once."""
    seen = await asyncio.to_thread(form_rounds, load, ports, tls)
    formed = min(len(one) for one in seen)  # one may have closed the rounds before another joined the last
    for rounds in zip(*[one[:formed] for one in seen], strict=True):
        numbers = {number for number, _, _ in rounds}
        ranks = sorted(rank for _, rank, _ in rounds)
        load.check(len(numbers) == 1 and ranks == list(range(len(ports))), f"rounds {rounds}")


async def kill(
    server: Server, load: Load, count: int, ends: Callable[[], bool], elsewhere: list[tuple[str, int]], rest: float
) -> list[float]:
    """Kill the server so often, after `rest` seconds or a little more; return the seconds to the next answer."""
    pauses: list[float] = []
    for _ in range(count):
        await asyncio.sleep(rest + load.rng.random() * 0.6)
        if ends():
            break
        await asyncio.to_thread(server.settle)
        began = time.monotonic()
        if elsewhere:
            await asyncio.to_thread(server.kill)
            copy = await asyncio.to_thread(server.copy)
            server.start()
        else:
            copy = None
            await asyncio.to_thread(server.restart)
        await asyncio.to_thread(server.ready)
        before = load.calls
        while load.calls == before and not ends():
            await asyncio.sleep(0.001)
            if time.monotonic() - began > TIMEOUT:
                load.wrong.append(f"nothing was answered for {TIMEOUT} s after a kill")
                return pauses
        pauses.append(time.monotonic() - began)
        if copy is not None:
            load.wrong += await asyncio.to_thread(server.replayed, copy, elsewhere)
    return pauses


async def run(
    server: Server,
    url: str,
    ports: list[int],
    kills: int,
    seed: int,
    elsewhere: list[tuple[str, int]],
    rest: float = REST,
    named: bool = False,
) -> dict[str, Any]:
    """Run a load on a server, and kill it; return what was seen. If clients have a `named` store, `url` may be several
    servers': then the first of the `ports` stands for these."""
    load = Load(seed)
    owner = None
    if named:
        open_store = functools.partial(tcpstore_async.TCPStore, "127.0.0.1", 1, None, True, TIMEOUT, server=url)
        owner = await asyncio.to_thread(open_store)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(100))  # most wait for the server
    clients: list[Client] = []
    for port in ports:
        direct = port == server.port
        options: dict[str, Any] = {"timeout": TIMEOUT, "tls": None if direct else False}
        if named:
            options = {"timeout": TIMEOUT, "server": url if direct else f"tcp://127.0.0.1:{port}"}
        at = 1 if named else port
        for number in range(14):
            where = f"{'direct' if direct else 'relayed'}/{number}"
            if number % 3:
                store: Any = await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", at, **options)
            else:
                store = await asyncio.to_thread(functools.partial(tcpstore_async.TCPStore, "127.0.0.1", at, **options))
            clients.append(Client(store, where))
    for call in clients:  # from its first call on, a store survives its connection
        await call("num_keys")
    tasks, poppers = [], []
    for first in range(0, len(clients), 14):
        part = clients[first : first + 14]
        tasks += [write(load, call) for call in part[:4]]
        tasks += [push(load, call) for call in part[4:6]]
        poppers += [asyncio.ensure_future(pop(load, call)) for call in part[6:8]]
        tasks += [wait(load, part[8], part[9])]
        tasks += [meet(load, part[10:14], f"barrier {first}")]
    tasks += [name(load, url, number) for number in range(2)]
    three = [ports[-1]] * 3 if named else [ports[0], ports[-1], ports[0]]
    tasks += [agents(load, three, [None if port == server.port else False for port in three])]
    running = [asyncio.ensure_future(task) for task in tasks]
    began = time.monotonic()

    def ends() -> bool:
        return load.over or any(one.done() for one in (*running, *poppers))

    pauses = await kill(server, load, kills, ends, elsewhere, rest)
    load.over = True
    ended = await asyncio.gather(*running, return_exceptions=True)
    load.wrong += [f"{type(one).__name__}: {one}" for one in ended if isinstance(one, BaseException)]
    for _ in poppers:
        await clients[1]("queue_push", "queue", END)
    _, hanging = await asyncio.wait(poppers, timeout=TIMEOUT)
    load.wrong += [
        f"{type(one.exception()).__name__}: {one.exception()}"
        for one in poppers
        if one not in hanging and one.exception()
    ]
    load.wrong += ["a pop was never answered"] * len(hanging)
    call = clients[1]
    for key, value in load.written.items():
        if await call("get", key) != value:
            load.wrong.append(f"{key} has another value")
    if await call("add", "shared", 0) != len(load.shared) or len(set(load.shared)) != len(load.shared):
        load.wrong.append(f"{len(load.shared)} additions, {len(set(load.shared))} results")
    if Counter(load.pushed) != Counter(load.popped):
        lost, more = Counter(load.pushed) - Counter(load.popped), Counter(load.popped) - Counter(load.pushed)
        load.wrong.append(f"lost {list(lost)[:5]}, too many {list(more)[:5]}")
    seconds = time.monotonic() - began
    for call in clients:
        closing = call.store.close
        await (asyncio.to_thread(closing) if call.threads else closing())
    if owner is not None:
        await asyncio.to_thread(owner.close)
    pauses.sort()
    return {
        "kills": len(pauses), "calls": load.calls, "seconds": round(seconds, 1), "items": len(load.pushed),
        "pause": [round(pauses[int(len(pauses) * part)], 3) for part in (0.5, 0.95)] if pauses else [],
        "wrong": load.wrong[:10],
    }  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def kills(
    count: int,
    seed: int,
    sync: str,
    secure: bool,
    elsewhere: list[tuple[str, int]] | None = None,
    how: str = "kill",
    builds: list[str] | None = None,
) -> dict[str, Any]:
    """Run a load during which the server is killed so often, or ended otherwise; return what was seen.

    Behind each kill the journal is executed again `elsewhere`, as for `Server.replayed`.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        env = dict(os.environ)
        options = ["--sync", sync, "--link-grace", GRACE]
        if secure:
            options += secured(folder, env)
            os.environ.update({key: text for key, text in env.items() if key.startswith("TCPSTORE_")})
        server = Server(folder, free_port(), options, env, how, builds or [])
        stack.callback(server.kill)
        server.ready()
        url = f"{'tcps' if secure else 'tcp'}://127.0.0.1:{server.port}"
        relayed, _ = stack.enter_context(relay(folder, url, env))
        try:
            found = asyncio.run(run(server, url, [server.port, relayed], count, seed, elsewhere or []))
        except BaseException:
            print((folder / "server.log").read_text()[-3000:], file=sys.stderr)
            raise
        found |= {"seed": seed, "sync": sync, "secure": secure, "how": how}
        if found["wrong"]:
            found["log"] = (folder / "server.log").read_text()[-3000:]
        return found


def secured(folder: Path, env: dict[str, str]) -> list[str]:
    """Make keys, a certificate and a token; return the server's options, and set the clients' variables."""
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "cert"))
    (folder / "keys").write_text(f"one:{'k' * 40}\n")
    (folder / "keys").chmod(0o600)
    command = [sys.executable, "-m", "tcpstore_async", "token", "create", "--token-keys", str(folder / "keys")]
    token = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=folder).stdout.strip()
    env.update(TCPSTORE_TLS="1", TCPSTORE_CA=str(folder / "ca"), TCPSTORE_TOKEN=token)
    options = ["--tls-cert", str(folder / "cert"), "--tls-key", str(folder / "cert")]
    return [*options, "--token-keys", str(folder / "keys"), "--require-auth=all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", default="process", choices=["process", "always"])
    parser.add_argument("--secure", action="store_true", help="with TLS and tokens")
    parser.add_argument("--replay", action="store_true", help="behind each kill, execute the journal again: see Server")
    parser.add_argument("--how", default="kill", choices=["kill", "term", "replace"])
    parser.add_argument("--builds", default="", help="folders of builds that are started in turn, separated by :")
    given = parser.parse_args()
    builds_in_order = [path for path in given.builds.split(":") if path]
    builds = [str(ROOT), *([str(COMPILED)] if COMPILED.exists() else [])]
    elsewhere = [(path, seed) for path in builds for seed in (0, 1, 4711)] if given.replay else []
    wrong = False
    for run in range(-(-given.kills // A_RUN)):
        count = min(A_RUN, given.kills - A_RUN * run)
        found = kills(count, given.seed + run, given.sync, given.secure, elsewhere, given.how, builds_in_order)
        print(json.dumps(found), flush=True)
        wrong = wrong or bool(found["wrong"])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
