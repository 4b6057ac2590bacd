"""Both pollers, on their own."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from server.loops import on_each_loop
from support import LIMIT
from tcpstore_async.server.poller import READ, WRITE, LoopPoller, Poller, WatchWith, make_poller


class Scene:
    """A socket pair, one end of which is watched, and the events that were reported."""

    def __init__(self, way: WatchWith) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.fd = self.near.fileno()
        self.news: list[tuple[int, int]] = []
        self.heard = asyncio.Event()
        self.poller: Poller = way(asyncio.get_running_loop(), self.report)

    def report(self, news: list[tuple[int, int]]) -> None:
        self.news += news
        self.heard.set()

    async def next(self) -> int:
        """Return the events of the next report."""
        while not self.news:
            self.heard.clear()
            await asyncio.wait_for(self.heard.wait(), LIMIT)
        fd, events = self.news.pop(0)
        assert fd == self.fd
        return events

    async def quiet(self) -> bool:
        """Return whether many turns of the loop bring no report, except those that were under way."""
        for _ in range(2):
            self.news.clear()
            for _ in range(50):
                await asyncio.sleep(0)
        return not self.news

    def close(self) -> None:
        self.poller.close()
        self.near.close()
        self.far.close()


def played(scenario: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a scenario: with each poller, on each loop."""

    async def main(way: WatchWith) -> None:
        scene = Scene(way)
        try:
            await scenario(scene)
        finally:
            scene.close()

    ways = pytest.mark.parametrize("way", [make_poller, LoopPoller], ids=["the best", "loop readers"])
    found: Callable[..., None] = ways(on_each_loop(main))
    return found


@played
async def test_what_arrives_is_reported(scene: Scene) -> None:
    scene.poller.watch(scene.fd)
    assert await scene.quiet()
    scene.far.send(b"x")
    assert await scene.next() & READ
    scene.near.recv(10)
    assert await scene.quiet()
    scene.far.send(b"y")
    assert await scene.next() & READ


@played
async def test_what_was_there_before_is_reported(scene: Scene) -> None:
    scene.far.send(b"x")
    scene.poller.watch(scene.fd)
    assert await scene.next() & READ


@played
async def test_the_end_is_reported_as_readable(scene: Scene) -> None:
    scene.poller.watch(scene.fd)
    scene.far.close()
    assert await scene.next() & READ
    assert scene.near.recv(1) == b""


@played
async def test_writing_is_reported_when_wanted(scene: Scene) -> None:
    scene.poller.watch(scene.fd)
    with suppress(BlockingIOError):
        while True:
            scene.near.send(bytes(65_536))
    scene.poller.watch_writing(scene.fd, True)
    assert await scene.quiet()
    scene.far.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            scene.far.recv(65_536)
    assert await scene.next() & WRITE
    scene.poller.watch_writing(scene.fd, False)
    assert await scene.quiet()


@played
async def test_a_paused_descriptor_is_not_reported_or_may_be_ignored(scene: Scene) -> None:
    """After `resume` a level is reported again; an edge needs one read without an event."""
    scene.poller.watch(scene.fd)
    scene.poller.pause(scene.fd)
    scene.far.send(b"x")
    await scene.quiet()
    scene.news.clear()
    scene.poller.resume(scene.fd)
    if isinstance(scene.poller, LoopPoller):
        assert await scene.next() & READ
    assert scene.near.recv(10) == b"x"
    await scene.quiet()
    scene.far.send(b"y")
    assert await scene.next() & READ


@played
async def test_what_is_forgotten_is_not_reported(scene: Scene) -> None:
    scene.poller.watch(scene.fd)
    scene.poller.watch_writing(scene.fd, True)
    scene.poller.forget(scene.fd)
    scene.near.close()
    scene.far.close()
    assert await scene.quiet()


@played
async def test_nothing_is_reported_after_the_end(scene: Scene) -> None:
    scene.poller.watch(scene.fd)
    scene.poller.close()
    scene.far.send(b"x")
    assert await scene.quiet()
    scene.poller = LoopPoller(asyncio.get_running_loop(), scene.report)


@on_each_loop
async def test_the_better_way_is_an_epoll_set_where_there_is_one() -> None:
    best = make_poller(asyncio.get_running_loop(), lambda news: None)
    assert isinstance(best, LoopPoller) != hasattr(select, "epoll")
    best.close()
