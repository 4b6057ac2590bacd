"""Repeat a call on a loop while something is due.

Must not know what the call does.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from .turn import LoopTurn

_LEAST_SECONDS: Final = 0.001


class Due:
    """A call that is scheduled when it is needed, and repeated until it returns None."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        call_soon: Callable[[Callable[[], object]], None],
        turn: LoopTurn,
        run: Callable[[], float | None],
    ) -> None:
        """`run` is called in a turn. It returns the seconds until the next call, or None if none is needed.

        `call_soon` schedules a call on `loop` from any thread.
        """
        self._loop = loop
        self._call_soon = call_soon
        self._turn = turn
        self._run = run
        self._scheduled: bool = False
        self._cancelled: bool = False
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Schedule the call, unless it is scheduled. In a turn."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._call)

    def cancel(self) -> None:
        """Make no more calls. On the loop."""
        self._cancelled = True
        if self._timer is not None:
            self._timer.cancel()

    def _call(self) -> None:
        with self._turn:
            if self._cancelled:
                return
            self._scheduled = False  # `run` itself may cause `expect`
            seconds = self._run()
            if seconds is not None and not self._scheduled:
                self._scheduled = True
                self._timer = self._loop.call_later(max(seconds, _LEAST_SECONDS), self._call_when_possible)

    def _call_when_possible(self) -> None:
        """Call now, or behind what the server has to finish first."""
        self._call_soon(self._call)
