"""What a relay promises its server: something in each keep-alive interval, and no place that is another relay's."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tcpstore_async.relay.running import _drain
from tcpstore_async.relay.upstream import Upstream


@pytest.mark.parametrize("keep_alive", [0.5, 1.0, 5.0, 60.0])
def test_the_longest_silence_is_the_interval(keep_alive: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ticks as late as a loop may be, and bytes that are sent between them."""
    rng = random.Random(0)
    now = 0.0
    moments: list[float] = [0.0]

    def send() -> None:
        relay.link.sent += 10
        moments.append(now)

    relay: Any = SimpleNamespace(
        tick=lambda: None, loop=SimpleNamespace(time=lambda: now), link=SimpleNamespace(sent=0), heard=True
    )
    relay.acknowledge = send
    upstream = Upstream(relay, [("127.0.0.1", 1)])
    upstream._keep_alive = keep_alive
    monkeypatch.setattr(upstream, "_expect_tick", lambda: None)
    for _ in range(1000):
        pause = upstream._tick_seconds() + rng.uniform(0, 1e-6)
        if rng.random() < 0.1:
            between = rng.uniform(0, pause)
            now += between
            send()
            now += pause - between
        else:
            now += pause
        relay.heard = True
        upstream._tick()
    assert max(after - before for before, after in itertools.pairwise(moments)) <= keep_alive + 1e-3
    assert len(moments) < 4 * now / keep_alive + 200


async def test_a_relay_that_drains_takes_no_place() -> None:
    """A new link of its place would end that of its successor on the same port."""
    relay: Any = SimpleNamespace(stop_accepting=lambda: None, empty=asyncio.Event(), make_link=None)
    relay.empty.set()
    await _drain(relay, 1.0)
    assert relay.make_link().place == ""
