"""What TLS costs a server, and whether the time of a refusal says where a forged token differs.

    python -m bench.security [--rounds 5] [--tries 100000] [PART …]

Parts: `link`, CPU of the server for an ADD of one of 64 ranks on a link, with TLS and without, by how many ADDs a batch
has; `relay`, the same behind a real relay, whose batches are as they come, and the relay's own CPU; `client`, CPU of a
client for a get, synchronous and async; `handshake`, CPU of the server for one TLS connection; `stopped`, the latency
of others beside 10,000 clients that stop inside the handshake: right after they have come, when the server still
answers them, and once it has; `tokens`, the time that a check of a forged token takes.

Tokens of several kinds are checked in random order, so that whatever disturbs the machine meets all kinds alike. All
are made from the same valid ones, right before: where one lies in memory must not tell it from others. Each kind is
compared with the first: the probability that a check of it takes longer (Mann-Whitney, ties count half), with its
99 % interval from 20 blocks. The last kind is the first one once more: what differs between these two is the
measurement's error.

All but `tokens` need the program `openssl`, which makes the certificate. Must not know how a server or a relay works.
Invariant: what is compared alternates in one run; CPU is the server's alone.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import selectors
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import uvloop

from bench import processes
from bench.processes import apart, cpu_seconds, started
from bench.stats import spread

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

import tcpstore_async
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.client.tls_settings import CA
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.tools.load.scripts import encode_request
from tcpstore_async.wire.commands import MAGIC

PARTS = ("link", "relay", "client", "handshake", "stopped", "tokens")
COUNTS = {"link": 200, "relay": 3000, "client": 2000, "handshake": 500, "stopped": 4000}
"""Operations of each rank, or client, in one measurement; for `link`, batches in one burst."""
RANKS = 64
FILLS = (64, 16, 4, 1)
"""ADDs in each batch."""
BURSTS = 40
"""For each server in one round."""
BATCHES = 10
"""Pairs of batches of a client in one round."""
STOPPED = 10_000
LIMIT = 60.0
_TOKENS = 512
"""Tokens of each kind."""
_BLOCKS = 20
_STUDENT = 2.861
"""The quantile of Student's distribution for 99 % and so many blocks."""
_ADD = encode_request("add", b"/sum", 1)
_HELLO = encode_request("validate", MAGIC)


def make_certificate(folder: Path) -> tuple[str, str]:
    """Write a certificate for 127.0.0.1 that is its own CA, and its key (P-256)."""
    if not shutil.which("openssl"):
        sys.exit("this benchmark needs the program openssl")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", cert]
    names = ["-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *curve, *names], check=True, capture_output=True)
    return cert, key


def writes(pid: int) -> int:
    """How often a process has written."""
    fields = Path(f"/proc/{pid}/io").read_text().split()
    return int(fields[fields.index("syscw:") + 1])


def connected(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), LIMIT)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(_HELLO)
    return peer


class _Rank(Stream):
    """One rank's session: counts the bytes of its replies."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier

    def received(self, data: bytes) -> None:
        self.carrier.replied += len(data)
        self.carrier.link.consume(self, len(data))

    def credited(self) -> None:
        pass


class Carrier:
    """One link with its ranks, as a relay holds it, except that it decides how many requests a batch has.

    So the server does the same with TLS as without. A relay's batches depend on timing, which TLS changes.
    """

    def __init__(self, port: int, pid: int, using: ssl.SSLContext | None) -> None:
        self.pid = pid
        self.peer = socket.create_connection(("127.0.0.1", port), LIMIT)
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if using is not None:
            self.peer = using.wrap_socket(self.peer, server_hostname="127.0.0.1")
        self.link = ClientLink()
        self.replied = 0
        self.peer.sendall(self.link.request())
        self.link.answered(self._read_reply())
        self.ranks = [_Rank(self) for _ in range(RANKS)]
        for number, rank in enumerate(self.ranks, 1):
            self.link.open(rank, "127.0.0.1", number)
            self.link.send(rank, _HELLO)
        self.ask(self.ranks, 1)

    def _read_reply(self) -> bytes:
        data = b""
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
            data += self._read()
        return data[8:]

    def _read(self) -> bytes:
        data = self.peer.recv(1 << 16)
        if not data:
            raise ConnectionError("the server has closed a link")
        return data

    def ask(self, ranks: list[_Rank], batches: int) -> None:
        """Have these ranks make an ADD each, all in one batch, and again once all are answered."""
        link = self.link
        for _ in range(batches):
            for rank in ranks:
                link.send(rank, _ADD)
            link.seal()
            data, link.out = b"".join(link.out), []
            self.peer.sendall(data)
            self.replied = 0
            while self.replied < 8 * len(ranks):
                link.receive(self._read())

    def per_add(self, ranks: int, batches: int) -> float:
        """Seconds of the server's CPU for an ADD, if so many ranks make one in each batch."""
        before = cpu_seconds(self.pid)
        self.ask(self.ranks[:ranks], batches)
        return (cpu_seconds(self.pid) - before) / batches / ranks


def link(cert: str, key: str, rounds: int) -> None:
    """Bursts of some milliseconds alternate between two servers, so that both see the same machine."""
    tls = ["--tls-cert", cert, "--tls-key", key]
    with started("serve") as without, started("serve", *tls) as with_tls, apart(without[1], with_tls[1]):
        plain = Carrier(*without, None)
        encrypted = Carrier(*with_tls, ssl.create_default_context(cafile=cert))
        for ranks in FILLS:
            if ranks > RANKS:
                continue
            found = []
            both = (plain, encrypted)
            for carrier in both:
                carrier.per_add(ranks, COUNTS["link"])
            written = [writes(carrier.pid) for carrier in both]
            for _ in range(max(1, rounds)):
                bursts = [[one.per_add(ranks, COUNTS["link"]) for one in both] for _ in range(BURSTS)]
                found.append([statistics.median(column) for column in zip(*bursts, strict=True)])
            made = max(1, rounds) * BURSTS * COUNTS["link"] * ranks
            fills = [made / (writes(carrier.pid) - count) for carrier, count in zip(both, written, strict=True)]
            before, after = (1e6 * statistics.median(column) for column in zip(*found, strict=True))
            ratios = spread([after / (before or 1e-9) for before, after in found])
            print(
                f"link: {ranks} ADDs in each batch and record, µs of server CPU per ADD: {before:.2f} ({fills[0]:.1f} "
                f"replies a write), with TLS {after:.2f} ({fills[1]:.1f}): {ratios}; "
                f"{(after - before) * ranks:.1f} more per batch"
            )
        plain.peer.close()
        encrypted.peer.close()


def adds(peers: list[socket.socket], count: int) -> None:
    """Have each peer make so many ADDs, one after the other, all peers at once."""
    with selectors.DefaultSelector() as selector:
        left = dict.fromkeys(peers, count)
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
            peer.sendall(_ADD)
        while left:
            for key, _ in selector.select(LIMIT):
                peer = key.data
                if not peer.recv(8):
                    raise ConnectionError("the server has closed a connection")
                left[peer] -= 1
                if left[peer]:
                    peer.sendall(_ADD)
                else:
                    del left[peer]
                    selector.unregister(peer)


def through_relay(
    serving: Sequence[str], scheme: str, relaying: Sequence[str], count: int
) -> tuple[float, float, float]:
    """Seconds of CPU for one ADD of 64 ranks, of the server and of their relay, and how many ADDs a write answers."""
    with ExitStack() as stack:
        port, pid = stack.enter_context(started("serve", *serving))
        front, relay_pid = stack.enter_context(
            started("relay", "--upstream", f"{scheme}://127.0.0.1:{port}", *relaying)
        )
        peers = [stack.enter_context(connected(front)) for _ in range(RANKS)]
        adds(peers, count // 10)
        written, before, relays = writes(pid), cpu_seconds(pid), cpu_seconds(relay_pid)
        adds(peers, count)
        made = count * RANKS
        spent = (cpu_seconds(pid) - before, cpu_seconds(relay_pid) - relays)
        return spent[0] / made, spent[1] / made, made / max(1, writes(pid) - written)


def relay(cert: str, key: str, rounds: int) -> None:
    """What ranks behind a relay cost. Its batches differ with and without TLS, so the ratio is not one of TLS alone."""
    count = COUNTS["relay"]
    tls = ["--tls-cert", cert, "--tls-key", key]
    found = [
        (*through_relay([], "tcp", [], count), *through_relay(tls, "tcps", ["--tls-ca", cert], count))
        for _ in range(max(1, rounds))
    ]
    plain, own, fill, encrypted, tls_own, tls_fill = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"relay: µs of server CPU per ADD {plain * 1e6:.2f} ({fill:.1f} ADDs a write), with TLS {encrypted * 1e6:.2f} "
        f"({tls_fill:.1f} ADDs a write): {spread([one[3] / (one[0] or 1e-9) for one in found])}; of the relay "
        f"{own * 1e6:.2f} and {tls_own * 1e6:.2f}: {spread([one[4] / (one[1] or 1e-9) for one in found])}"
    )


def client(cert: str, key: str, rounds: int) -> None:
    """Batches of gets alternate between two stores of this process, one with TLS; only its own CPU counts."""
    count = COUNTS["client"]
    os.environ[CA] = cert
    with ExitStack() as stack:
        port, pid = stack.enter_context(started("serve"))
        tls_port, tls_pid = stack.enter_context(started("serve", "--tls-cert", cert, "--tls-key", key))
        with apart(pid, tls_pid):
            for name, measured in (("sync", _sync_gets), ("async", _async_gets)):
                found = measured((port, tls_port), count, max(1, rounds) * BATCHES)
                plain, encrypted = (statistics.median(column) for column in zip(*found, strict=True))
                ratios = spread([after / (before or 1e-9) for before, after in found])
                print(f"client: µs of CPU per {name} get {plain * 1e6:.2f}, with TLS {encrypted * 1e6:.2f}: {ratios}")


def _sync_gets(ports: tuple[int, int], count: int, batches: int) -> list[list[float]]:
    """Seconds of CPU for a get, without TLS and with it, of each pair of batches."""
    with ExitStack() as stack:
        stores = [
            stack.enter_context(tcpstore_async.TCPStore("127.0.0.1", port, timeout=LIMIT, tls=tls))
            for port, tls in zip(ports, (False, True), strict=True)
        ]
        for store in stores:
            store.set("key", b"value")

        def batch(store: tcpstore_async.TCPStore) -> float:
            before = time.process_time()
            for _ in range(count):
                store.get("key")
            return (time.process_time() - before) / count

        return [[batch(store) for store in stores] for _ in range(batches)]


def _async_gets(ports: tuple[int, int], count: int, batches: int) -> list[list[float]]:
    """As `_sync_gets`, on uvloop."""

    async def batch(store: tcpstore_async.AsyncTCPStore) -> float:
        before = time.process_time()
        for _ in range(count):
            await store.get("key")
        return (time.process_time() - before) / count

    async def measure() -> list[list[float]]:
        async with AsyncExitStack() as stack:
            stores = []
            for port, tls in zip(ports, (False, True), strict=True):
                connecting = tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, tls=tls)
                stores.append(await stack.enter_async_context(await connecting))
            for store in stores:
                await store.set("key", b"value")
            return [[await batch(store) for store in stores] for _ in range(batches)]

    return uvloop.run(measure())


def handshake(cert: str, key: str, rounds: int) -> None:
    count = COUNTS["handshake"]
    using = ssl.create_default_context(cafile=cert)
    found = []
    with started("serve", "--tls-cert", cert, "--tls-key", key) as (port, pid):
        for _ in range(max(1, rounds)):
            before = cpu_seconds(pid)
            for _ in range(count):
                plain = socket.create_connection(("127.0.0.1", port), LIMIT)
                with using.wrap_socket(plain, server_hostname="127.0.0.1") as peer:
                    peer.sendall(_HELLO + _ADD)
                    peer.recv(8)
            found.append((cpu_seconds(pid) - before) / count)
    print(f"handshake: {spread([1000 * one for one in found])} ms of server CPU")


def stopped(cert: str, key: str, rounds: int) -> None:
    """The latency of one client before, while and after the server answers 10,000 that stop after a first message."""
    count = COUNTS["stopped"]
    outgoing = ssl.MemoryBIO()
    using = ssl.create_default_context(cafile=cert)
    waiting = using.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        waiting.do_handshake()
    first = outgoing.read()
    with started("serve", "--tls-cert", cert, "--tls-key", key) as (port, _):
        for _ in range(max(1, rounds)):
            with ExitStack() as stack:
                one = stack.enter_context(connected(port))
                before, _ = p99(one, count)
                came: list[socket.socket] = []
                for _ in range(STOPPED):
                    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT))
                    peer.sendall(first)
                    came.append(peer)
                during, longest = p99(one, count)
                for peer in came:
                    with suppress(ConnectionError):
                        peer.recv(1)  # an answer, or the end, as newer handshakes are under way
                after, _ = p99(one, count)
            print(
                f"stopped: p99 {before * 1e6:.0f} µs; while {STOPPED:,} are answered {during * 1e6:.0f} µs (longest "
                f"{longest * 1e3:.1f} ms); once they are {after * 1e6:.0f} µs: {after / before:.2f}"
            )


def p99(peer: socket.socket, count: int) -> tuple[float, float]:
    """Return the p99 and the longest of so many requests, in seconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        peer.sendall(_ADD)
        peer.recv(8)
        times.append(time.perf_counter() - begin)
    return statistics.quantiles(times, n=100)[98], max(times)


# Tokens

OTHER = TokenKeys([("k1", b"of a server that has nothing to do with it")])

Change = tuple[slice, bytes]
"""A part of a token, and what stands there in the forged one."""


def kinds(token: bytes) -> dict[str, Change]:
    """Return what is changed in a valid token, by kind. The length stays as it is."""
    mac = token.rindex(b".") + 1
    claims = token.index(b".", token.index(b".") + 1) + 1
    middle = (mac + len(token)) // 2
    first: Change = slice(mac, mac + 1), b"!"
    return {
        "signature, first byte": first,
        "signature, middle byte": (slice(middle, middle + 1), b"!"),
        "signature, last byte": (slice(len(token) - 1, len(token)), b"!"),
        "all of the signature": (slice(mac, len(token)), b"!" * (len(token) - mac)),
        "claims, first byte": (slice(claims, claims + 1), b"!"),
        "unknown key": (slice(claims - 3, claims - 1), b"zz"),
        "signature, first again": first,
    }


def check_times(keys: TokenKeys, tries: int, rng: random.Random) -> dict[str, list[int]]:
    """Return the times, in ns, of so many checks of each kind."""
    valid = [keys.create(prefix="job/").encode() for _ in range(_TOKENS)]
    changes = kinds(valid[0])
    names = list(changes)
    made_of = list(changes.values())
    order = list(range(len(names))) * tries
    rng.shuffle(order)
    neutral = OTHER.create(prefix="job/").encode()
    taken = []
    clock, check, choice = time.perf_counter_ns, keys.check, rng.choice
    for number in order:  # nothing here but the token may depend on the kind
        made = bytearray(choice(valid))
        part, other = made_of[number]
        made[part] = other
        token = bytes(made)
        check(neutral, 0)  # so that caches and predictions are the same, however the token was made
        began = clock()
        check(token, 0)
        taken.append(clock() - began)
    by_kind: dict[str, list[int]] = {name: [] for name in changes}
    for number, nanoseconds in zip(order, taken, strict=True):
        by_kind[names[number]].append(nanoseconds)
    return by_kind


def superiority(these: list[int], those: list[int]) -> float:
    """Return the probability that one of these is above one of those; ties count half."""
    marked = sorted([(value, True) for value in these] + [(value, False) for value in those])
    ranks = 0.0
    at = 0
    while at < len(marked):
        stop = at
        mine = 0
        while stop < len(marked) and marked[stop][0] == marked[at][0]:
            mine += marked[stop][1]
            stop += 1
        ranks += mine * (at + stop + 1) / 2
        at = stop
    n = len(these)
    return (ranks - n * (n + 1) / 2) / (n * len(those))


def compare(these: list[int], those: list[int]) -> tuple[float, float]:
    """Return the mean of that over blocks of successive checks, and half the width of its 99 % interval.

    What disturbs the machine lasts for many checks: single ones are not independent of each other, blocks are.
    """
    size = len(these) // _BLOCKS
    parts = [slice(size * number, size * (number + 1)) for number in range(_BLOCKS)]
    found = [superiority(these[part], those[part]) for part in parts]
    return statistics.mean(found), _STUDENT * statistics.stdev(found) / math.sqrt(_BLOCKS)


def tokens(tries: int, seed: int) -> None:
    rng = random.Random(seed)
    keys = TokenKeys([("k1", secrets.token_bytes(32)), ("k2", secrets.token_bytes(32))])
    taken = check_times(keys, tries, rng)
    first, reference = next(iter(taken.items()))
    print(f"{tries:,} checks of each kind; P: that one takes longer than one of {first!r}, 99 % interval")
    for name, times in taken.items():
        found, half = compare(times, reference)
        verdict = "no difference" if abs(found - 0.5) <= half else "DIFFERS"
        text = "" if times is reference else f"  P = {found:.4f} ± {half:.4f}  {verdict}"
        print(f"{name:24} median {statistics.median(times):6.0f} ns{text}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = processes.parser(__doc__, PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=100_000, help="checks of each kind of token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the order of the checks (%(default)s)")
    given = parser.parse_args(arguments)
    of_tls = {"link": link, "relay": relay, "client": client, "handshake": handshake, "stopped": stopped}
    with tempfile.TemporaryDirectory() as folder:
        certificate = make_certificate(Path(folder)) if of_tls.keys() & {*given.parts} else None
        for part in given.parts:
            if part in of_tls:
                assert certificate is not None
                of_tls[part](*certificate, given.rounds)
            else:
                tokens(given.tries, given.seed)


if __name__ == "__main__":
    main()
