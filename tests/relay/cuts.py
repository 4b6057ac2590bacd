"""Links that break under load: `python tests/relay/cuts.py --cuts 10000`, or `--partition 20 [--reset]`.

Several relays, each behind a proxy, share a server. While their ranks work (see `load`), each connection is cut at a
random byte, in order or by a reset; or all connections of one relay carry nothing for a time. Then everything must have
happened exactly once. Which build runs is for PYTHONPATH to say.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.fault_helpers import until
from relay.link_proxy import LinkProxy, link_proxy
from relay.load import Load
from relay.servers import server_with
from support import RawPeer, Server, tcpstore_relay

GRACE = 1e6
"""Seconds that a link may be without a connection: no schedule is to depend on the machine."""


def anywhere(scale: int, rng: random.Random) -> int:
    """Sometimes while connecting, mostly between the first batches, sometimes behind large values."""
    low, high = rng.choices(((1, 600), (600, 4000 * scale), (4000 * scale, 40_000 * scale)), (1, 6, 2))[0]
    return rng.randrange(low, high)


class Pair:
    """Two relays behind proxies, whose ranks make one load."""

    def __init__(self, stack: ExitStack, server: int, ranks: int, seed: int, scale: int) -> None:
        self.scale = scale
        self.proxies: list[LinkProxy] = [stack.enter_context(link_proxy(server, 2 * seed + n)) for n in range(2)]
        self.relays: list[Server] = [stack.enter_context(tcpstore_relay(proxy.port)) for proxy in self.proxies]
        ports = [relay.port for _ in range(ranks) for relay in self.relays]
        self.load = Load(b"load %d" % seed, ports, seed, scale)

    def goes_on(self) -> None:
        """Wait until every rank has done something after now."""
        rounds = self.load.rounds
        until(lambda: self.load.rounds >= rounds + 2 or not self.load.alive(), "the ranks have met")


class Bench:
    """A server, and pairs of relays."""

    def __init__(self, stack: ExitStack, server: int, pairs: list[Pair]) -> None:
        self.direct = stack.enter_context(RawPeer(server))
        self.pairs = pairs

    def proxies(self) -> list[LinkProxy]:
        return [proxy for pair in self.pairs for proxy in pair.proxies]

    def cuts(self) -> int:
        return sum(proxy.cuts for proxy in self.proxies())

    def finish(self) -> str:
        """Stop and judge; return figures."""
        proxies = self.proxies()
        for proxy in proxies:
            proxy.fate = None
        done: Counter[str] = Counter()
        for pair in self.pairs:
            try:
                pair.load.stop()
            except Exception as error:
                raise AssertionError("\n".join(relay.log() for relay in pair.relays)) from error
            pair.load.judge(self.direct)
            done.update(sum((rank.done for rank in pair.load.ranks), Counter()))
        return (
            f"{self.cuts():,} cuts, {sum(proxy.resets for proxy in proxies):,} of them resets; "
            f"{len(proxies)} relays with {len(self.pairs[0].load.ranks) // 2} ranks each made "
            f"{sum(proxy.connections for proxy in proxies):,} connections; "
            f"{sum(pair.load.rounds for pair in self.pairs):,} meetings; "
            + ", ".join(f"{count:,} {name}" for name, count in sorted(done.items()))
        )


@contextmanager
def bench(scales: Sequence[int] = (1,), ranks: int = 2, seed: int = 0, keep_alive: float = 5.0) -> Iterator[Bench]:
    """One pair of relays for each scale."""
    with ExitStack() as stack:
        server = stack.enter_context(server_with(grace=GRACE, keep_alive=keep_alive))
        numbered = enumerate(scales, seed * len(scales))
        yield Bench(stack, server, [Pair(stack, server, ranks, number, scale) for number, scale in numbered])


def cut(running: Bench, count: int, seconds: float) -> str:
    """Cut connections until that has happened so often; return figures."""
    began = told = time.monotonic()
    for pair in running.pairs:
        for proxy in pair.proxies:
            proxy.fate = partial(anywhere, pair.scale)
            proxy.cut()
    while running.cuts() < count and all(pair.load.alive() for pair in running.pairs):
        now = time.monotonic()
        assert now < began + seconds, f"only {running.cuts()} cuts within {seconds:g} s"
        if now > told + 20:
            told = now
            print(f"{running.cuts():,} cuts, {now - began:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.02)
    return running.finish()


def part(running: Bench, seconds: float | None, reset: bool) -> str:
    """Let nothing pass between one relay and the server, for so long or until the relay has noticed; return figures."""
    pair = running.pairs[0]
    proxy, relay = pair.proxies[0], pair.relays[0]
    pair.goes_on()
    proxy.flowing.clear()
    if seconds is None:
        until(lambda: "nothing received" in relay.log(), "the relay has noticed")
    else:
        time.sleep(seconds)
    if reset:
        proxy.cut(True)
    proxy.flowing.set()
    pair.goes_on()
    return running.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--partition", type=float, metavar="SECONDS", help="instead of cutting")
    parser.add_argument("--reset", action="store_true", help="reset all connections at the end of the partition")
    parser.add_argument("--pairs", type=int, default=6, help="of relays")
    parser.add_argument("--ranks", type=int, default=2, help="of each relay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1800, help="after which it is given up")
    given = parser.parse_args()
    began = time.monotonic()
    scales = ([1] * 5 + [50]) * given.pairs
    with bench(scales[: given.pairs], given.ranks, given.seed) as running:
        if given.partition is None:
            figures = cut(running, given.cuts, given.seconds)
        else:
            figures = part(running, given.partition, given.reset)
        if given.partition is not None:
            print(running.pairs[0].relays[0].log(), end="", file=sys.stderr)
    print(f"nothing lost, nothing doubled: {figures}; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
