"""The key-value store through which the ranks of a distributed job find each other."""

from .daemon import serve
from .errors import DistError, DistNetworkError, DistStoreError, QueueEmptyError
from .limits import Limits

__all__ = ["DistError", "DistNetworkError", "DistStoreError", "Limits", "QueueEmptyError", "serve"]
