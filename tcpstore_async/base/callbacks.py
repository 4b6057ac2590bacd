"""Callbacks that hold their object weakly."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that calls a method while its object is alive, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        found = reference()
        if found is not None:
            found(*given)

    return call
