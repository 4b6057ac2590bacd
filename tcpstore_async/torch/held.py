"""Whether PyTorch's C++ side holds a store that Python is about to drop.

Knows: that those who hold a C++ object are counted, and how to read the count, if trying it out confirms that. Must not
know: what stores are for.
Invariant: where it cannot be told, the answer is yes. PyTorch has no function that tells this of a store, but one that
tells it of a storage, which is counted the same way.
"""

import ctypes
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
