"""The public names, and that they are typed."""

from __future__ import annotations

from pathlib import Path

import tcpstore_async

NAMES = {
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
}


def test_public_names() -> None:
    assert set(tcpstore_async.__all__) == NAMES
    assert tcpstore_async.__all__ == sorted(tcpstore_async.__all__)
    for name in NAMES:
        assert hasattr(tcpstore_async, name)


def test_errors_are_related_as_pytorchs() -> None:
    assert issubclass(tcpstore_async.DistError, RuntimeError)
    assert issubclass(tcpstore_async.DistStoreError, tcpstore_async.DistError)
    assert issubclass(tcpstore_async.DistNetworkError, tcpstore_async.DistError)
    assert issubclass(tcpstore_async.QueueEmptyError, tcpstore_async.DistStoreError)
    assert issubclass(tcpstore_async.StoreTimeoutError, tcpstore_async.DistStoreError)


def test_the_package_is_typed() -> None:
    assert Path(tcpstore_async.__path__[0], "py.typed").is_file()
