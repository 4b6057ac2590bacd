"""Tests that run on each kind of event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from support import LIMIT

uvloop = pytest.importorskip("uvloop")


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs on a fresh loop of uvloop and of asyncio."""

    @functools.wraps(test)
    def run_it(run: Callable[[Coroutine[Any, Any, None]], None], **given: Any) -> None:
        run(asyncio.wait_for(test(**given), LIMIT))

    run = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = inspect.signature(test)
    run_it.__signature__ = own.replace(parameters=[run, *own.parameters.values()])  # type: ignore[attr-defined]
    found: Callable[..., None] = pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])(
        run_it
    )
    return found
