"""Who holds a store: Python, PyTorch's C++ side, nobody.

Knows: that those who hold an object are counted, on either side, and how to read the counts, if trying it out confirms
that. Must not know: what stores are for.
Invariant: where it cannot be told, the answer is yes. PyTorch has no function that tells this of a store, but one that
tells it of a storage, which is counted the same way.
"""

import ctypes
import sys
from typing import Any, Final, cast

import torch
import torch.distributed as dist

_CppPrefixStore: Final[Any] = dist.PrefixStore
"""As it is now: `install(classes=True)` puts another in its place."""

_POINTER: Final = object.__basicsize__
"""Where an object of pybind11's has the address of its C++ half."""

_use_count: Final[Any] = getattr(torch._C, "_storage_Use_Count", None)
"""Of the C++ object at an address: how many hold it, of whom Python is one."""


class _Probe(dist.Store):
    """A store that is only there to be held."""


def _holders(store: dist.Store) -> int:
    half = ctypes.c_void_p.from_address(id(store) + _POINTER).value
    return 0 if half is None or _use_count is None else int(_use_count(half))


def _confirmed() -> bool:
    """Whether the count is where it is looked for: it follows who holds, and lets go of, a store."""
    probe = cast(Any, _Probe)()
    found = [_holders(probe)]
    first = _CppPrefixStore("", probe)
    found.append(_holders(probe))
    second = _CppPrefixStore("", probe)
    found.append(_holders(probe))
    del first
    found.append(_holders(probe))
    del second
    found.append(_holders(probe))
    return found == [1, 2, 3, 2, 1]


CAN_TELL: Final = _confirmed()


def is_held(store: dist.Store) -> bool:
    """Whether C++ holds it, or may."""
    return not CAN_TELL or _holders(store) > 1


class Hold:
    """Holds a store, and tells whether somebody else does."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def is_last(self) -> bool:
        """Whether nobody else holds it, neither Python nor C++."""
        return self._references() <= _ALONE and not is_held(self.store)

    def _references(self) -> int:
        return sys.getrefcount(self.store)


_ALONE: Final = Hold(object())._references()
"""What Python counts of an object that only a `Hold` holds."""
