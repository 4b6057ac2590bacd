"""Key-value store for distributed jobs, compatible with PyTorch's TCPStore.

The public names are imported on first use, so that PyTorch's plugin mechanism can import this package at no cost.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base.version import VERSION as __version__

if TYPE_CHECKING:
    from .base.errors import (
        AccessDeniedError,
        DistError,
        DistNetworkError,
        DistStoreError,
        MissingRanksError,
        QueueEmptyError,
        StoreTimeoutError,
    )
    from .base.limits import Limits
    from .client.aio import AsyncTCPStore
    from .serving import serve
    from .stores.base import Store
    from .stores.file import FileStore
    from .stores.hash import HashStore
    from .stores.prefix import PrefixStore
    from .stores.rendezvous_url import register_rendezvous_handler, rendezvous
    from .stores.tcp import TCPStore

__all__ = [
    "AccessDeniedError",
    "AsyncTCPStore",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "Limits",
    "MissingRanksError",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "__version__",
    "register_rendezvous_handler",
    "rendezvous",
    "serve",
]

_MODULES = {
    "client.aio": ["AsyncTCPStore"],
    "serving": ["serve"],
    "base.errors": [name for name in __all__ if name.endswith("Error")],
    "base.limits": ["Limits"],
    "stores.rendezvous_url": ["register_rendezvous_handler", "rendezvous"],
    "stores.base": ["Store"],
    "stores.file": ["FileStore"],
    "stores.hash": ["HashStore"],
    "stores.prefix": ["PrefixStore"],
    "stores.tcp": ["TCPStore"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
