"""Interrupts of the synchronous client at chosen steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

OURS = re.compile("tcpstore_async/(client|links|session|wire)/|/ssl.py$")


class Stop(Exception):
    """What a signal handler raises."""


def stop() -> None:
    raise Stop


def interrupt(
    call: Callable[[], object],
    step: int,
    only: Callable[[Any], bool] = lambda frame: True,
    handler: Callable[[], object] = stop,
) -> bool:
    """Interrupt a call at a step, of those in which `only` holds; return whether there was one."""
    left = step

    def profile(frame: Any, event: str, _: object) -> None:  # these are the moments at which the interpreter looks
        nonlocal left
        if OURS.search(frame.f_code.co_filename) and event in ("call", "c_return") and only(frame):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                handler()

    try:
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    except Stop:
        pass
    return left < 0
