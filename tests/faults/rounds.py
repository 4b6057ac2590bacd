"""Ends what a replicated store consists of, again and again, under load: nothing is lost, done twice, or left waiting.

    python tests/faults/rounds.py --fault server --rounds 20 [--seed 1]

Three members of etcd, two servers, a relay, and the load of `kills.py`. Prints one line of JSON; the exit status is 1
if anything was wrong. `host`, `cut`, `clients`, `member-cut` and `disk` need root, `clock` the package faketime.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import errno
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from etcd_cluster import MEMBERS, Cluster, programs
from faults.kills import PROGRAM, TIMEOUT, free_port, relay, run
from networks import Network, enter, leave_for_own, stopped, two_networks, unplugged
from support import until

LOG = "/tcpstore/default/"
"""Where the keys of the store are in etcd."""

EARLY = (
    "from tcpstore_async.server import replica; replica.SNAPSHOT_BYTES = 1 << 20; "
    "from tcpstore_async.__main__ import main; main()"
)
"""A server that makes snapshots early."""

REST = 1.0
"""Seconds from one fault to the next, at least."""

BEHIND = 1000
"""Records that a slow standby lacks: more than the 128 answers, and what fits in buffers, that etcd has on the way."""

MEMBER_SECONDS = 3.0
"""Time without a member of etcd, or without a majority of them, or without the network."""

DISK_BYTES = 1 << 30
"""The disk of a member of etcd in `disk`. Its log alone may take 448 MiB: it keeps five files of 64, makes one ahead,
and copies one that it repairs. With too little, the other members' disks are full as well, in time."""


class Process:
    """A server process, and what it says of itself."""

    def __init__(
        self,
        folder: Path,
        port: int,
        options: list[str],
        env: dict[str, str],
        said: queue.Queue[Process],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.port = port
        command = [*program, "serve", "--port", str(port), "--admin", str(folder / f"admin{port}"), *options]
        with (folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, cwd=folder)
        self.role = ""
        self._said = said
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.role = json.loads(line)["role"]
            self._said.put(self)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        with self.process:
            self.process.wait(TIMEOUT)
        self._reading.join()


class Replicated:
    """Two servers of one replicated store, one of which serves; for the load, like one server."""

    def __init__(self, folder: Path, etcd: Cluster, fault: str, env: dict[str, str]) -> None:
        self.port = 0
        self.etcd = etcd
        self.folder = folder
        self.env = env
        self.said: queue.Queue[Process] = queue.Queue()
        self.ports = [free_port(), free_port()]
        self.rng = random.Random(0)
        self.network = ExitStack()
        """What is stopped."""
        self.gone: Process | None = None
        """The server whose host has no network."""
        self.begun = 0
        """How often a standby has begun anew before the present round."""
        self.shift = folder / "shift"
        """How wrong the servers' clocks are."""
        if fault == "clock":
            self.shift.write_text("+0")
            self.env = {
                **env, "LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(self.shift), "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
        self.fault: Callable[[], None] = getattr(self, fault.replace("-", "_"))
        self.servers = [self._start(self.ports[0])]
        self.serving = self._next(self.servers[0])
        self.servers.append(self._start(self.ports[1]))
        self._next(self.servers[1])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """One that runs."""
        return next(one.process for one in self.servers if one.process.poll() is None)

    @property
    def url(self) -> str:
        return "tcp://" + ",".join([f"127.0.0.1:{port}" for port in self.ports])

    @property
    def standby(self) -> Process:
        return next(one for one in self.servers if one is not self.serving)

    def _start(self, port: int, program: Sequence[str] = PROGRAM) -> Process:
        urls = ",".join(self.etcd.urls)
        if self.etcd.host != "127.0.0.1":  # each server knows etcd by addresses that no other uses: see `cut`
            urls = urls.replace("127.0.0.1", f"127.0.{1 + self.ports.index(port)}.1")
        return Process(self.folder, port, ["--etcd", urls], self.env, self.said, program)

    def _next(self, *wanted: Process) -> Process:
        """Wait until one of these says what it is, or any of them serves."""
        while True:
            found = self.said.get(timeout=TIMEOUT)
            if found in wanted or (not wanted and found.role == "server" and found.process.poll() is None):
                return found

    def restart(self) -> None:
        self.fault()

    def ready(self) -> None:
        """Wait for nothing: the load does."""

    def settle(self) -> None:
        """Start what has ended."""
        if self.gone is not None:
            self.network.close()
            while self.gone.role == "server":
                self.said.get(timeout=TIMEOUT)
            self.gone = None
        self.etcd.start()
        for number, one in enumerate(self.servers):
            if one.process.poll() is not None:
                self.servers[number] = self._start(one.port)
                self._next(self.servers[number])
        while not any(one.role == "server" for one in self.servers):
            self._next()
        self.serving = next(one for one in self.servers if one.role == "server")
        if self.fault == self.compaction:
            self._leave_behind()

    # Faults

    def server(self) -> None:
        self.serving.end(signal.SIGKILL)
        self.serving = self._next()

    def term(self) -> None:
        self.serving.end(signal.SIGTERM)
        self.serving = self._next()

    def stopped(self) -> None:
        before = self.serving
        before.process.send_signal(signal.SIGSTOP)
        self.serving = self._next()
        before.process.send_signal(signal.SIGCONT)
        while before.role == "server":
            self.said.get(timeout=TIMEOUT)

    def leader(self) -> None:
        self.etcd.kill(self.etcd.leader())

    def both(self) -> None:
        self.etcd.kill(self.etcd.leader())
        self.server()

    def member(self) -> None:
        member = self.etcd.leader()
        self.etcd.stop(member)
        time.sleep(MEMBER_SECONDS)
        self.etcd.go_on(member)

    def majority(self) -> None:
        leader = self.etcd.leader()
        self.etcd.kill(leader, (leader + 1) % 3)
        time.sleep(MEMBER_SECONDS)
        self.etcd.start(leader)

    def cut(self) -> None:
        """Nothing passes between the server that serves and etcd, until after another one serves."""
        before = self.serving
        with stopped(*self._etcd()):
            self.serving = self._next()
            time.sleep(self.rng.random())
        while before.role == "server":
            self.said.get(timeout=TIMEOUT)

    def clients(self) -> None:
        """Nothing passes between the server that serves and its clients."""
        with stopped(*self._clients()):
            time.sleep(MEMBER_SECONDS)

    def host(self) -> None:
        """The host of the server that serves is gone, as if without power, until the next round."""
        self.gone = self.serving
        self.network.enter_context(stopped(*self._etcd(), *self._clients()))
        self.serving = self._next()

    def _clients(self) -> list[str]:
        return [f"ipproto tcp {side} {self.serving.port}" for side in ("sport", "dport")]

    def _etcd(self) -> list[str]:
        addresses = f"127.0.{1 + self.ports.index(self.serving.port)}.0/24"
        return [f"to {addresses}", f"from {addresses}"]

    def disk(self) -> None:
        """The disk of a member of etcd, which may lead, is full for a while.

        The member ends if it has to write more. When there is space, it is started again, as by systemd.
        """
        member = 0
        if self.rng.random() < 0.5:
            self.etcd.lead(member)
        filler = self.etcd.folder / f"m{member}" / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        time.sleep(MEMBER_SECONDS)
        filler.unlink()
        if self.etcd.has_ended(member):
            self.etcd.kill(member)
            self.etcd.start(member)
        self.etcd.wait()  # else the next round would fill the disk while it repairs its log

    def member_cut(self) -> None:
        """Nothing passes between a member of etcd, which may lead, and all others."""
        member = MEMBERS - 1
        if self.rng.random() < 0.5:
            self.etcd.lead(member)
        with unplugged(self.etcd.networks[member]):
            time.sleep(MEMBER_SECONDS)
        self.etcd.wait()

    def compaction(self) -> None:
        """The server that serves ends. The other one is behind, and what it would read next is in etcd no more."""
        self.standby.process.send_signal(signal.SIGCONT)
        if self.rng.random() < 0.5:
            until(self._has_begun_anew)
        self.serving.end(signal.SIGKILL)
        self.serving = self._next()
        assert self._has_begun_anew()

    def _leave_behind(self) -> None:
        """Stop the standby until a third server's snapshot has replaced what comes next, and compact etcd."""
        third = self._start(free_port(), [sys.executable, "-c", EARLY])
        self.servers.append(third)
        self._next(third)
        self.begun = self._beginnings()
        self.standby.process.send_signal(signal.SIGSTOP)
        last, _ = self._record("DESCEND")
        until(lambda: self._record("ASCEND")[0] > last + BEHIND)
        assert self.etcd.ask(0, "kv/compaction", revision=self._record("ASCEND")[1], physical=True) is not None
        self.servers.remove(third)
        third.end(signal.SIGKILL)

    def _record(self, order: str) -> tuple[int, str]:
        """Return the number of the first or last record in etcd, -1 if there is none, and etcd's revision."""
        key, end = [base64.b64encode(f"{LOG}{name}".encode()).decode() for name in ("log/", "log0")]
        found: Any = self.etcd.ask(0, "kv/range", key=key, range_end=end, limit=1, keys_only=True, sort_order=order)
        keys = [base64.b64decode(one["key"]) for one in found.get("kvs", ())]
        return int(keys[0].rpartition(b"/")[2]) if keys else -1, found["header"]["revision"]

    def _beginnings(self) -> int:
        return (self.folder / "server.log").read_text().count("beginning anew with the snapshot")

    def _has_begun_anew(self) -> bool:
        return self._beginnings() > self.begun

    def clock(self) -> None:
        """The servers' wall clocks are set, forward or back."""
        self.shift.write_text(f"{self.rng.choice('+-')}{self.rng.choice((1, 3, 60, 86_400))}")

    def close(self) -> None:
        for one in self.servers:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
                one.end(signal.SIGKILL)


ENDS = ("server", "term", "stopped", "leader", "both", "member", "majority")
"""These need no rights, and no network, disk or clock of their own."""

FAULTS = (*ENDS, "compaction", "host", "cut", "clients", "member-cut", "disk", "clock")

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@contextmanager
def small_disks(folder: Path) -> Iterator[None]:
    """Give each member of etcd a disk of its own."""
    members = [folder / f"m{number}" for number in range(MEMBERS)]
    for one in members:
        one.mkdir()
        options = f"size={DISK_BYTES},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(one)], check=True)
    try:
        yield
    finally:
        for one in members:
            subprocess.run(["umount", str(one)], check=True)


def rounds(fault: str, count: int, seed: int, program: str) -> dict[str, Any]:
    """Run a load during which a fault happens so often; return what was seen."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        env = {**os.environ, "TCPSTORE_RELAY": "0"}
        own = fault in ("host", "cut", "clients")
        if own:
            leave_for_own()
        networks: list[Network] = []
        if fault == "member-cut":
            ours, other = stack.enter_context(two_networks())
            enter(str(ours.path))
            networks = [ours] * (MEMBERS - 1) + [other]
        etcd = Cluster(folder / "etcd", program, host="0.0.0.0" if own else "127.0.0.1", networks=networks)
        etcd.folder.mkdir()
        if fault == "disk":
            stack.enter_context(small_disks(etcd.folder))
        stack.callback(etcd.close)
        etcd.start()
        etcd.wait()
        servers = Replicated(folder, etcd, fault, env)
        stack.callback(servers.close)
        relayed, _ = stack.enter_context(relay(folder, servers.url, env))
        try:
            found = asyncio.run(run(servers, servers.url, [0, relayed], count, seed, [], REST, named=True))  # type: ignore[arg-type]
        except BaseException:
            print((folder / "server.log").read_text()[-5000:], file=sys.stderr)
            raise
        if found["wrong"]:
            found["log"] = (folder / "server.log").read_text()[-5000:]
        return {**found, "fault": fault, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", default="server", choices=FAULTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = rounds(given.fault, given.rounds, given.seed, programs()[0])
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
