"""Server processes that share a log in etcd: one serves, the others follow, and any of them may stop, or be cut off.

Servers, their logs and who serves are the real ones (`Replica` with its `Replication`); etcd is in memory, and each
answer of it comes when the schedule lets it: late, after several attempts, or never. Clients, and what they are to see,
are those of `journal.py`: here the model executes a record once etcd has it.

* at any time a record is appended by the server that has the epoch only, behind all others;
* behind each record the state of whoever follows is that of the server that wrote it;
* what the clients of any server receive, also of one that serves no more and does not know it, is explained by records
  that etcd had by then; what a reader without a link is told was true since it asked;
* in the end one process serves, and every client has received everything; also when another one goes on.
"""

from __future__ import annotations

import errno
import random
from functools import partial
from typing import Final, NamedTuple

from properties.fleet import Command, Difference
from simulation.journal import CLIENTS, KEYS, PORTIONS, Chooser, Step
from simulation.journal import World as Clients
from simulation.loop import call, machine
from simulation.processes import ALL, APPEND, FOLLOW, LEASE, Etcd, Process
from simulation.resuming import RANKS, Wire
from tcpstore_async.log.records import Chain, read_alone
from tcpstore_async.server.poller import READ, WRITE
from tcpstore_async.server.uv import UvServer

CALM_SECONDS: Final = 6.0
"""Time in which a lease ends, and another server has taken over."""


class World(Clients):
    """Runs steps. Raises Difference."""

    def __init__(
        self, singles: int, named: int, relays: int, portion: int, tokens: bool, processes: int, every: int
    ) -> None:
        super().__init__(singles, named, relays, portion, tokens, every)
        self.etcd = Etcd(self)
        self.chain = Chain()
        """Where the log ends."""
        self.history: list[bytes] = []
        """All records."""
        self.started = 0
        self.count = processes
        self.processes: list[Process] = []
        self.late: list[Wire] = []
        """Those of which their servers have not been told that something has arrived."""

    def start(self) -> None:
        self.processes = [self._started(number) for number in range(self.count)]
        self._do_time(1.0)

    def _started(self, number: int) -> Process:
        self.started += 1
        return Process(self, number, self.started)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        super().close()

    def appended(self, number: int, data: bytes, server: UvServer, looked: int | None) -> None:
        """Execute a record that etcd has now."""
        if number < self.chain.number:  # appended once more, as it was trimmed before that was known
            if self.history[number] != data:
                raise Difference(f"record {number} is replaced")
            return
        self.history.append(data)
        self.digests[number] = looked
        self.server = server
        self.executed.execute(read_alone(data, self.chain))

    # Turns

    def process_of(self, wire: Wire) -> Process | None:
        """Return the process that has the connection, if it has not ended."""
        return next((one for one in self.processes if one.alive and one.server is wire.server), None)

    def serve(self, wires: list[Wire]) -> None:
        self.late += [wire for wire in wires if wire not in self.late]
        self._guarded(self.run)

    def run(self) -> None:
        """Have the processes do what they can do now."""
        for process in self.processes:
            if process.runs():
                if process.serves():
                    self._ready(process)
                process.run()

    def _ready(self, process: Process) -> None:
        server = process.server
        assert server is not None
        mine = [wire for wire in self.late if wire.server is server and wire.connection is not None]
        self.late = [wire for wire in self.late if wire not in mine and self.process_of(wire) is not None]
        loop = process.loop
        reported = [(wire.fd, READ) for wire in mine if wire.is_open() and wire.fd in loop.readers]
        reported += [(fd, WRITE) for fd in loop.writers]
        if reported:
            with process.running():
                server.ready(reported)

    # Steps

    def do(self, step: Step) -> None:
        """Do one of these, too, each to a process that is named by its number:

        * `("connect", c, n)`: c connects to one of those that take connections, if it has no connection
        * `("kill", p, executed)`: it ends; before, what it is appending is executed, or not
        * `("boot", p)`: it is started again
        * `("pause", p)`: it does not run, and `("go_on", p)`: it does
        * `("slow", p, which)`: its threads wait, those that `append`, that `follow`, or `all`
        * `("prompt", p)`: they do not
        * `("execute", p)`: etcd executes what it is appending, whose answer does not come
        * `("answer", p, n)`: one of its threads gets its answer, or n records if it follows
        * `("deaf", p)`: it is cut off from etcd, and `("hears", p)`: it is not
        * `("quorum", answers)`: etcd does not answer, or answers again
        * `("expire",)`: the lease ends, before anything else happens
        * `("promote", p)`: it is told to let another one serve
        * `("snapshot", p)`: it makes a snapshot, if it stands by, and removes the records before
        """
        super().do(step)

    def _do_connect(self, number: int, choice: int = 0) -> None:
        client = self.clients[number]
        serving = [process for process in self.processes if process.serves()]

        def connect() -> None:
            if client.wire is None and serving:
                process = serving[choice % len(serving)]
                assert process.server is not None
                self.server = process.server
                with process.running():
                    client.connect()
                    process.server.served()
                self.run()

        self._guarded(connect)

    def _do_notice(self) -> None:
        def notice() -> None:
            gone, self.gone = self.gone, []
            for wire in gone:
                process = self.process_of(wire)
                if process is not None and process.serves() and wire.is_open():
                    connection = wire.connection
                    if connection is None or wire.server.committing or wire in self.late:
                        self.gone.append(wire)
                        continue
                    with process.running():
                        if wire.ended:
                            wire.server.ready([(wire.fd, READ)])
                        elif not wire.server.committing:
                            with wire.server.turn:
                                connection.lost(ConnectionResetError(errno.ECONNRESET, "reset"))
                    if wire.is_open():
                        self.gone.append(wire)
                        continue
                elif process is not None and wire.is_open() and not wire.server.stopped:  # it is paused
                    self.gone.append(wire)
                    continue
                wire.socket.close()
            self.run()

        self._guarded(notice)

    def _pass(self, until: float) -> None:
        while True:
            timers = [
                (timer.when(), process.number)
                for process in self.processes
                if process.runs()
                for timer in process.loop.timers
            ]
            when, number = min(timers, default=(until, -1))
            self.now = max(self.now, min(when, until))
            self._keep_alive()
            if number < 0 or when > until:
                break
            process = self.processes[number]
            timer = process.loop.next_timer(when)
            assert timer is not None
            with process.running():
                call(timer)
            self._run_on()
        self._run_on()

    def _run_on(self) -> None:
        """Run until all processes wait for something."""
        self.run()
        while any(process.runs() and process.loop.soon for process in self.processes):
            self.run()

    def _keep_alive(self) -> None:
        etcd = self.etcd
        if etcd.answers:
            for process in self.processes:
                if process.runs() and not process.deaf:
                    process.log.keep_alive()
            if etcd.epoch is not None and self.now >= etcd.lease_until:
                etcd.end_lease()

    def _do_kill(self, number: int, executed: bool) -> None:
        process = self.processes[number]
        if not process.alive:
            return
        if executed:
            process.execute()
        server = process.server
        process.kill()
        self.crashes += 1
        for client in self.clients:
            if client.wire is not None and client.wire.server is server:
                if not client.dozing:  # else what it has not read is lost
                    client.deliver()
                if client.wire is not None:
                    client.lose()
        self._do_notice()

    def _do_boot(self, number: int) -> None:
        if not self.processes[number].alive:
            self.processes[number] = self._started(number)

    def _do_pause(self, number: int) -> None:
        self.processes[number].paused = True

    def _do_go_on(self, number: int) -> None:
        self.processes[number].paused = False

    def _do_slow(self, number: int, which: str) -> None:
        self.processes[number].slow = which

    def _do_prompt(self, number: int) -> None:
        self.processes[number].slow = ""

    def _do_execute(self, number: int) -> None:
        self._guarded(self.processes[number].execute)

    def _do_answer(self, number: int, most: int) -> None:
        process = self.processes[number]
        if process.runs():
            self._guarded(partial(process.answer, most))
            self._guarded(self.run)

    def _do_deaf(self, number: int) -> None:
        self.processes[number].deaf = True

    def _do_hears(self, number: int) -> None:
        self.processes[number].deaf = False

    def _do_quorum(self, answers: bool) -> None:
        self.etcd.answers = answers
        self.etcd.lease_until = max(self.etcd.lease_until, self.now + LEASE)  # its new leader begins anew

    def _do_expire(self) -> None:
        etcd = self.etcd
        if etcd.epoch is not None and etcd.answers:
            self.now = max(self.now, etcd.epoch.certain_until)
            etcd.end_lease()

    def _do_promote(self, number: int) -> None:
        process = self.processes[number]
        if process.serves():
            process.replica.over.set()
            self._guarded(self.run)

    def _do_snapshot(self, number: int) -> None:
        process = self.processes[number]
        following = process.log.following
        if following is not None and process.runs():
            self._guarded(partial(following.replication.make_snapshot))

    def _do_examine(self) -> None:
        for process in self.processes:
            if process.serves():
                assert process.server is not None
                with process.running():
                    self._examine(process.server)
        self._guarded(self.run)

    # The end

    def calm(self) -> None:
        self._guarded(self._run_on)

    def settle(self) -> None:
        """Let everything go on, and deliver everything."""
        self._do_quorum(True)
        for process in self.processes:
            process.paused = process.deaf = False
            process.slow = ""
            self._do_boot(process.number)
        self._do_time(CALM_SECONDS)
        serving = [process.server for process in self.processes if process.serves()]
        if len(serving) != 1 or serving[0] is None:
            raise Difference(f"{len(serving)} processes serve")
        super().settle()
        self.server = serving[0]
        for client in self.clients:
            if client.wire is None or not client.linked:
                raise Difference(f"{client} is not served")

    def again(self) -> None:
        serving = next(process for process in self.processes if process.serves())
        self._do_kill(serving.number, False)
        self.settle()


# Schedules

STEPS: Final = {
    **CLIENTS, "kill": 2, "boot": 4, "pause": 2, "go_on": 4, "slow": 3, "prompt": 3, "execute": 5, "answer": 12,
    "deaf": 1, "hears": 2, "quorum": 2, "expire": 2, "promote": 1, "snapshot": 2, "depose": 2,
}  # fmt: skip


class Schedule(NamedTuple):
    """A world and its steps."""

    singles: int
    named: int
    """How many of these are in a store with a name."""
    relays: int
    portion: int
    tokens: bool
    processes: int
    steps: list[Step]


def _depose(chooser: Chooser, process: int) -> list[Step]:
    """Return steps in which a server learns too late that it has appended, and serves no more."""
    rng = chooser.rng
    key, rank = rng.choice(KEYS), rng.randrange(chooser.singles + chooser.relays * RANKS)
    client = rank if rank < chooser.singles else chooser.singles + (rank - chooser.singles) // RANKS
    everybody: Step = ("turn", tuple(range(chooser.clients)), -1)
    steps: list[Step] = [
        *(("slow", process, APPEND), ("send", rank, Command("append", key, b"1")), everybody),
        *(("execute", process), ("expire",), ("break", client)),
        *(("pause", process), ("time", 0.5), ("go_on", process)),
        *(("connect", client, rng.randrange(2)), *[everybody] * 4),
        *(("send", rank, Command("append", key, b"2")), *[everybody] * 4),
        *(("ask", Command("get", key)), everybody, ("answer", process, 1), everybody),
    ]
    return [step for step in steps if rng.random() < 0.97]


def chosen(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    chooser = Chooser(rng)
    processes = rng.choice((1, 2, 2, 2, 3))
    steps: list[Step] = [("connect", number) for number in range(chooser.clients)]
    for kind in chooser.kinds(STEPS):
        match kind:
            case "connect":
                steps.append((*chooser.step(kind), rng.randrange(2)))
            case "kill":
                steps.append((kind, rng.randrange(processes), rng.random() < 0.5))
            case "answer":
                steps.append((kind, rng.randrange(processes), rng.choice((1, 1, 5))))
            case "slow":
                steps.append((kind, rng.randrange(processes), rng.choice((APPEND, FOLLOW, ALL))))
            case "depose":
                steps += _depose(chooser, rng.randrange(processes))
            case "quorum":
                steps.append((kind, rng.random() < 0.7))
            case "expire":
                steps.append((kind,))
            case kind if kind in CLIENTS:
                steps.append(chooser.step(kind))
            case _:
                steps.append((kind, rng.randrange(processes)))
    named, portion, tokens = chooser.named(), rng.choice(PORTIONS), rng.random() < 0.3
    return Schedule(chooser.singles, named, chooser.relays, portion, tokens, processes, steps)


def run(schedule: Schedule, every: int = 4) -> World:
    """Run a schedule, and look at the state behind every few records."""
    singles, named, relays, portion, tokens, processes, steps = schedule
    world = World(singles, named, relays, portion, tokens, processes, every)
    with machine(world):
        world.start()
        for step in steps:
            world.do(step)
        world.finish()
    return world


def fault(schedule: Schedule) -> Exception | None:
    """Return what is wrong, if anything, with a look at the state behind each record."""
    try:
        run(schedule, 1)
    except Exception as error:  # the package's own, too
        return error
    return None
