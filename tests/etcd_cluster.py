"""An etcd of three members on loopback, each of which can be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from networks import Network
from support import free_port, until
from tls.certificates import certificates

MEMBERS = 3

ROOT = Path(__file__).parent.parent


def programs() -> list[str]:
    """Return the etcd that $ETCD names, or those that `make etcd` has fetched, or else the one that is installed."""
    wanted = os.environ.get("ETCD")
    if wanted:
        return [wanted]
    installed = shutil.which("etcd")
    return sorted(map(str, ROOT.glob("build/etcd/*/etcd"))) or ([installed] if installed else [])


class Cluster:
    def __init__(
        self,
        folder: Path,
        program: str,
        *,
        secure: bool = False,
        host: str = "127.0.0.1",
        networks: Sequence[Network] = (),
    ) -> None:
        """Members listen for clients on `host`; or each is on its own one of the `networks`."""
        self.folder = folder
        self.host = host
        self.program = program
        self.networks = networks
        self.scheme = "https" if secure else "http"
        self.ports = [free_port() for _ in range(MEMBERS)]
        self._peers = [free_port() for _ in range(MEMBERS)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"{self.scheme}://{self._address(member)}:{port}" for member, port in enumerate(self.ports)]

    def _address(self, member: int) -> str:
        return self.networks[member].address if self.networks else "127.0.0.1"

    def start(self, *members: int) -> None:
        """Have these run, or all."""
        for member in members or range(MEMBERS):
            if member in self._running:
                self.go_on(member)
            else:
                self._start(member)

    def _start(self, member: int) -> None:
        peers = [f"http://{self._address(number)}:{port}" for number, port in enumerate(self._peers)]
        host = self._address(member) if self.networks else self.host
        prefix = self.networks[member].prefix if self.networks else []
        options = {
            "name": f"m{member}",
            "data-dir": str(self.folder / f"m{member}"),
            "listen-client-urls": f"{self.scheme}://{host}:{self.ports[member]}",
            "advertise-client-urls": self.urls[member],
            "listen-peer-urls": peers[member],
            "initial-advertise-peer-urls": peers[member],
            "initial-cluster": ",".join(f"m{number}={peer}" for number, peer in enumerate(peers)),
            "log-level": "error",
        }
        if self.scheme == "https":
            server, ca = certificates().server, certificates().ours.ca
            options |= {
                "cert-file": server.cert,
                "key-file": server.key,
                "trusted-ca-file": ca,
            }  # it wants certificates
        with open(self.folder / f"m{member}.log", "ab") as log:
            self._running[member] = subprocess.Popen(
                [*prefix, self.program, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until there is a leader, and all members that run know it."""
        until(lambda: len({self._leader_of(member) for member in self._running} - {0}) == 1)

    def _leader_of(self, member: int) -> int:
        """Return the number of its leader, as it sees it; 0 if it sees none."""
        status = self.ask(member, "maintenance/status")
        return int(status.get("leader", 0)) if status else -member - 1

    def ask(self, member: int, method: str, **request: object) -> dict[str, str] | None:
        """Call a method of a member as JSON; None if it does not answer."""
        wanted = urllib.request.Request(f"{self.urls[member]}/v3/{method}", json.dumps(request).encode())
        try:
            with urllib.request.urlopen(wanted, timeout=2) as answer:
                found: dict[str, str] = json.load(answer)
                return found
        except OSError:
            return None

    def leader(self) -> int:
        """Return the member that leads. Waits until there is one."""
        self.wait()
        for member in self._running:
            status = self.ask(member, "maintenance/status")
            if status is not None and status["leader"] == status["header"]["member_id"]:  # type: ignore[index]
                return member
        return self.leader()

    def lead(self, member: int) -> None:
        """Have a member lead."""
        status = self.ask(member, "maintenance/status")
        assert status is not None
        number = status["header"]["member_id"]  # type: ignore[index]
        while (leader := self.leader()) != member:
            self.ask(leader, "maintenance/transfer-leadership", targetID=number)

    def kill(self, *members: int) -> None:
        for member in members:
            process = self._running.pop(member)
            process.kill()
            process.wait()

    def has_ended(self, member: int) -> bool:
        """Return whether a member that was not killed has ended by itself."""
        return self._running[member].poll() is not None

    def stop(self, member: int) -> None:
        self._running[member].send_signal(signal.SIGSTOP)

    def go_on(self, member: int) -> None:
        self._running[member].send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill(*list(self._running))


@contextmanager
def cluster(program: str, *, secure: bool = False, host: str = "127.0.0.1") -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="tcpstore-etcd-") as folder:
        made = Cluster(Path(folder), program, secure=secure, host=host)
        try:
            made.start()
            if not secure:
                made.wait()
            yield made
        finally:
            made.close()


def version_of(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[2]


def unreachable() -> Sequence[str]:
    """URLs at which nothing listens."""
    return [f"http://127.0.0.1:{free_port()}" for _ in range(MEMBERS)]
