"""The event loop of a server, and what makes a process that is one cheaper.

Knows: which loop there is, the garbage collector. Must not know: what runs on the loop.
"""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, or on asyncio where uvloop does not exist. In any thread."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


def tune_gc() -> None:
    """Nothing the server makes for a connection is part of a cycle once it is closed: collect seldom.

    With the defaults, collections that find nothing cost 4 % of a job's start, and more the more ranks there are. The
    youngest are collected more often than that calls for, lest a collection of them takes 30 ms: a WAIT for 131,072
    keys makes a dict for each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 500, 100)
