"""A job of stock ranks on two hosts, and what an observer between these sees of its store.

A server on the first host, a relay on each, and half of the ranks on each: every key that a rank sets is read by one on
the other host. They train with DDP. All that passes between the hosts from or to the server's port is recorded.

    PYTHONPATH=.:tests .venv/bin/python tests/pytorch/two_hosts.py --ranks 64 [--tls] [--tokens]

prints what the observer found; needs Linux and root.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from faults.fault_helpers import server_under
from networks import INTERFACE, Network, Wire, two_networks
from support import Server, tcpstore_relay
from torch_forker import Program

_RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from networks import enter
enter(sys.argv[2])  # before anything has a thread or a socket
rank, world, mark = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[3]

import torch, torch.distributed as dist
dist.init_process_group("gloo", "env://")
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
store.set(f"{mark}-key-{rank}", f"{mark}-value-{rank}")
got = store.get(f"{mark}-key-{(rank + 1) % world}").decode()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), float(rank + step))).square().mean() / world**2
    loss.backward()
    optimizer.step()
    losses.append(sum(p.sum().item() for p in model.parameters()))
dist.barrier()
found = {"got": got, "weights": losses}
if rank == 0:
    keys = store.list_keys()
    found["store"] = {key: value.hex() for key, value in zip(keys, store.multi_get(keys))}
dist.barrier()
dist.destroy_process_group()
print(json.dumps(found))
"""

_SHORT = 8
"""Keys and values of fewer bytes are not looked for: they could occur anywhere by chance."""

RANK_SECONDS = 600.0


class Observed(NamedTuple):
    """What has passed between the hosts."""

    streams: list[bytes]
    """What each end of each connection has sent."""
    lost: int
    """Packets that were not recorded; 0, or nothing is shown."""
    seen: set[bytes]
    """Keys, values and secrets of the job that can be read in it."""
    hidden: set[bytes]
    """Those that cannot."""
    marks: set[bytes]
    """Those among both that a rank has set and one on the other host has read: they have passed, in some form."""
    secrets: set[bytes]
    """Of the relays: their token, if they have one."""
    weights: list[list[float]]
    """The sums of every rank's parameters after each step."""
    logs: str
    """Of the server and the relays."""


class _Security:
    """The options and variables with which server and relays protect what passes between the hosts."""

    def __init__(self, folder: Path, host: str, tls: bool, tokens: bool) -> None:
        self.scheme = "tcps" if tls else "tcp"
        self.server: list[str] = []
        self.env: dict[str, str] = {}
        self.secrets: set[bytes] = set()
        if tls:
            cert, key = str(folder / "store.pem"), str(folder / "store.key")
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days",
                 "1", "-subj", "/CN=store", "-addext", f"subjectAltName=IP:{host}", "-keyout", key, "-out", cert],
                check=True, capture_output=True,
            )  # fmt: skip
            self.server += ["--tls-cert", cert, "--tls-key", key]
            self.env["TCPSTORE_CA"] = cert
        if tokens:
            keys, token = folder / "token.keys", folder / "token"
            for file in (keys, token):
                file.touch(0o600)
            keys.write_text(f"first:{secrets.token_hex(32)}\n")
            create = [sys.executable, "-m", "tcpstore_async", "token", "create", "--token-keys", str(keys)]
            created = subprocess.run([*create, "--expires", "3600"], check=True, capture_output=True, cwd=folder)
            token.write_bytes(created.stdout)
            self.server += ["--token-keys", str(keys), "--require-auth=all"]
            self.env["TCPSTORE_TOKEN_FILE"] = str(token)
            self.secrets.add(created.stdout.strip())


def run(world: int, *, tls: bool, tokens: bool) -> Observed:
    """Run the job with this many ranks. Raises AssertionError if a rank fails."""
    mark = f"mark-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_networks())
        security = _Security(folder, hosts[0].address, tls, tokens)
        server = stack.enter_context(server_under(hosts[0].prefix, "--host", hosts[0].address, *security.server))
        wire = Wire(hosts[1], server.port)
        with wire:
            url = f"{security.scheme}://{hosts[0].address}:{server.port}"
            relays = [stack.enter_context(tcpstore_relay(url, env=security.env, prefix=one.prefix)) for one in hosts]
            found = _train(stack, world, hosts, relays, mark)
            logs = "".join(one.log() for one in (server, *relays))
    expected = [f"{mark}-value-{(rank + 1) % world}" for rank in range(world)]
    assert [one["got"] for one in found] == expected
    marks = {f"{mark}-{what}-{rank}".encode() for what in ("key", "value") for rank in range(world)}
    secret = marks | security.secrets
    for key, value in found[0]["store"].items():
        secret |= {key.encode(), bytes.fromhex(value)}
    streams = wire.streams()
    seen = {one for one in secret if len(one) >= _SHORT and any(one in stream for stream in streams)}
    hidden = {one for one in secret if len(one) >= _SHORT} - seen
    return Observed(streams, wire.lost, seen, hidden, marks, security.secrets, [one["weights"] for one in found], logs)


def _train(
    stack: ExitStack, world: int, hosts: tuple[Network, Network], relays: list[Server], mark: str
) -> list[dict[str, Any]]:
    """Start the ranks, alternately on both hosts, and return what they print."""
    ranks = []
    for rank in range(world):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(relays[rank % 2].port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        tests = Path(__file__).parent.parent
        ranks.append(stack.enter_context(Program(_RANK, tests, hosts[rank % 2].path, mark, env=env)))
    found = []
    for one in ranks:
        said = one.output(RANK_SECONDS)
        assert one.wait() == 0, one.errors()
        found.append(json.loads(said))
    return found


def has_option(command: str, option: str) -> bool:
    """Whether `tcpstore COMMAND` knows an option."""
    shown = subprocess.run(
        [sys.executable, "-m", "tcpstore_async", command, "--help"], capture_output=True, text=True, check=True
    )
    return option in shown.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--tokens", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    observed = run(asked.ranks, tls=asked.tls, tokens=asked.tokens)
    print(f"{asked.ranks} ranks on two hosts trained in {time.monotonic() - began:.1f} s")
    print(f"{sum(map(len, observed.streams))} bytes recorded in {len(observed.streams)} streams, {observed.lost} lost")
    print(f"{len(observed.seen)} keys, values and secrets can be read, {len(observed.hidden)} cannot")
    for one in sorted(observed.seen)[:10]:
        print(f"  {one[:70]!r}")
    sys.exit(1 if asked.tls and observed.seen else 0)


if __name__ == "__main__":
    main()
