"""A deadline for what cannot be interrupted, such as a look-up of a name."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class TooSlow(Exception):
    """A call was not done in time. It is left behind in a thread for which nothing waits."""


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return what a function returns, or raise what it raises; TooSlow if that takes longer."""
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
