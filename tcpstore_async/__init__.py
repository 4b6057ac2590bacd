"""The key-value store through which the ranks of a distributed job find each other."""

from .client.aio import AsyncTCPStore
from .daemon import serve
from .errors import DistError, DistNetworkError, DistStoreError, QueueEmptyError, StoreTimeoutError
from .limits import Limits
from .stores.base import Store
from .stores.tcp import TCPStore
from .version import VERSION as __version__

__all__ = [
    "AsyncTCPStore",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "Limits",
    "QueueEmptyError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "__version__",
    "serve",
]
