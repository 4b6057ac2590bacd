"""A connection that is cut behind each byte of a run, in either direction: ranks get what they get without a relay."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from conformance.frames import add, append, compare_set, confirm, get, lease_later, ping, push, queue_len, set_, wait
from relay.link_proxy import link_proxy
from support import HANDSHAKE, LIMIT
from tcpstore_async.relay.running import relay
from tcpstore_async.serving import serve

AT_ONCE = 40


def script(name: bytes) -> list[tuple[int, bytes, int]]:
    """The steps of a run: a rank sends bytes, and reads so many; the first two wait for what the third does."""
    log, queue, late, number = (name + b"/" + text for text in (b"log", b"queue", b"late", b"number"))
    return [
        (0, HANDSHAKE + add(number, 1), 8),
        (1, HANDSHAKE + add(number, 2), 8),
        (0, append(log, b"a") + wait(late), 0),
        (1, lease_later(queue, 1), 0),
        (2, HANDSHAKE + push(queue, b"item") + set_(late, bytes(300)) + ping(b"2222"), 4),
        (1, b"", 8 + 8 + 4),
        (1, confirm(1) + queue_len(queue), 8),
        (0, b"", 1),
        (0, get(late), 8 + 300),
        (2, compare_set(late, bytes(300), b"short"), 8 + 5),
        (1, compare_set(late, bytes(300), b"wrong"), 8 + 5),
        (2, append(log, b"c") + get(log), 8 + 2),
        (1, add(number, 4) + get(number), 8 + 8 + 1),
    ]


async def play(port: int, name: bytes) -> list[bytes]:
    """Return what the ranks read, step by step."""
    ranks = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    found = []
    for number, data, count in script(name):
        reader, writer = ranks[number]
        writer.write(data)
        found.append(await asyncio.wait_for(reader.readexactly(count), LIMIT))
    for _, writer in ranks:
        writer.close()
        await writer.wait_closed()
    return found


class First:
    """Cuts the first connection only, after so many bytes of one direction: 0 is up."""

    def __init__(self, direction: int, at: int) -> None:
        self.fates = [-1, -1]
        self.fates[direction] = at

    def __call__(self, _: random.Random) -> int:
        return self.fates.pop(0) if self.fates else -1


async def is_cut(server: int, direction: int, at: int) -> bool:
    """Play once; return whether there were so many bytes."""
    name = b"%d%06d" % (direction, at)
    with link_proxy(server, at, First(direction, at)) as proxy:
        async with relay([("127.0.0.1", proxy.port)]) as front:
            found = await play(front.port, name)
            await asyncio.wait_for(front.empty.wait(), LIMIT)
        assert found == await play(server, b"x" + name[1:]), (direction, at)
        return proxy.cuts > 0


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("direction", [0, 1], ids=["up", "down"])
async def test_a_connection_that_is_cut_behind_each_byte(stride: int, direction: int) -> None:
    async with serve() as server:
        for first in range(0, sys.maxsize, AT_ONCE * stride):
            run = range(first, first + AT_ONCE * stride, stride)
            cut = await asyncio.gather(*[is_cut(server.port, direction, at) for at in run])
            if not all(cut):
                break
        assert first or any(cut)
