"""Callbacks that do not keep the object alive whose method they call."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback of a method, which does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        found = reference()
        if found is not None:
            found(*given)

    return call
