"""The key-value store through which the ranks of a distributed job find each other."""

from .client.aio import AsyncTCPStore
from .daemon import serve
from .errors import DistError, DistNetworkError, DistStoreError, QueueEmptyError, StoreTimeoutError
from .limits import Limits
from .stores.base import Store
from .stores.hash import HashStore
from .stores.prefix import PrefixStore
from .stores.tcp import TCPStore
from .version import VERSION as __version__

__all__ = [
    "AsyncTCPStore",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "HashStore",
    "Limits",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "__version__",
    "serve",
]
