"""Links that break under load: nothing is lost, and nothing happens twice. By hand, for longer: `cuts.py`."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from conformance.frames import i64, lease_later, popped, push, queue_len
from faults.fault_helpers import until
from relay.cuts import bench, cut, part
from relay.load import Load
from relay.servers import server_with
from support import RawPeer, free_port, tcpstore_relay


@pytest.mark.parametrize("scale", [1, 50])
def test_connections_that_are_cut_at_any_byte(scale: int) -> None:
    with bench([scale]) as running:
        cut(running, 15, 100)


@pytest.mark.parametrize("reset", [False, True])
def test_a_partition(reset: bool) -> None:
    """Nothing arrives until the relay looks for another connection; then the old one goes on, or is reset."""
    with bench(keep_alive=0.2) as running:
        part(running, None, reset)
        assert running.proxies()[0].connections > 1


@pytest.mark.parametrize("returns", [True, False])
def test_a_relay_that_is_killed(returns: bool) -> None:
    """Its ranks wait for items of a queue, and hold some. All of them go to others, who notice nothing else.

    At once when a relay comes back in its place; when the grace period is over if not.
    """
    place = free_port()
    with (
        ExitStack() as stack,
        server_with(grace=1e6 if returns else 0.5) as server,
        RawPeer(server) as direct,
        tcpstore_relay(server) as relay,
        tcpstore_relay(server, port=place) as victim,
    ):
        extra = [b"extra-%d" % number for number in range(3)]
        for item in extra:
            direct.send(push(b"load/leased", item))
        direct.ping()
        doomed = [stack.enter_context(RawPeer(place)) for _ in range(6)]
        for number, rank in enumerate(doomed[:3]):
            rank.send(lease_later(b"load/leased", 1))
            assert rank.read(8 + 8 + 7) == popped(3 - number, extra[number])
        others = Load(b"doomed", [place] * 3)
        load = Load(b"load", [relay.port, server, relay.port, server])
        until(lambda: others.rounds > 1 and load.rounds > 1, "all are at work")
        for rank in doomed[3:]:
            rank.send(lease_later(b"load/leased", 1))
        with RawPeer(place) as other:
            other.ping()  # the server has got that
        victim.process.kill()
        victim.process.wait()
        assert all(rank.closed() for rank in doomed[:3])  # the others may have received an item
        others.stopping = True
        for one in others.ranks:
            one.join()
            assert isinstance(one.error, EOFError | ConnectionError)
        if returns:
            with tcpstore_relay(server, port=place), RawPeer(place) as again:
                again.ping()
        rounds = load.rounds
        until(lambda: load.rounds > rounds + 2 or not load.alive(), "the others go on")
        load.stop()
        left = len(extra) + sum(len(rank.pushed[b"/leased"]) - len(rank.taken[b"/leased"]) for rank in load.ranks)
        until(lambda: direct.ask(queue_len(b"load/leased"), 8) == i64(left), "all leases of the dead went back")
        load.judge(direct, *extra)
