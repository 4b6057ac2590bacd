"""What a server process does on SIGTERM and SIGINT: drain, or end at once.

Must not know what draining is. SIGHUP reloads files: see `reloading.py`.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("tcpstore_async.server")


def watch_signals() -> "asyncio.Queue[signal.Signals]":
    """Return a queue that receives every SIGTERM and SIGINT from now on."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def told(number: signal.Signals) -> None:
        log.info("%s: ending", number.name)
        signals.put_nowait(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    return signals


async def drain_when_told(
    signals: "asyncio.Queue[signal.Signals]", drain: Coroutine[Any, Any, None], stopping: Callable[[], None]
) -> None:
    """Wait for a signal and call `stopping`; after SIGTERM, await `drain`, or another signal."""
    number = await signals.get()
    stopping()
    if number is not signal.SIGTERM:
        drain.close()
        return
    draining = asyncio.ensure_future(drain)
    told_again = asyncio.ensure_future(signals.get())
    await asyncio.wait([draining, told_again], return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, told_again):
        task.cancel()
