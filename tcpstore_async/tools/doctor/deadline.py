"""A deadline for calls that cannot be interrupted, such as name look-ups."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class TooSlow(Exception):
    """The call timed out; its daemon thread is abandoned."""


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return what a function returns, or raise what it raises. Raises TooSlow if it takes longer than `seconds`."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error.with_traceback(None))

    thread = threading.Thread(target=run, name="tcpstore doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()
    if not results:
        raise TooSlow
    return results[0]
