"""The public names, and that they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tcpstore_async
from support import run_python

NAMES = {
    *("AsyncTCPStore", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    *("AccessDeniedError", "DistError", "DistNetworkError", "DistStoreError"),
    *("MissingRanksError", "QueueEmptyError", "StoreTimeoutError"),
    *("Limits", "__version__", "register_rendezvous_handler", "rendezvous", "serve"),
}


def test_public_names() -> None:
    assert set(tcpstore_async.__all__) == NAMES == set(tcpstore_async._MODULE_OF) | {"__version__"}
    assert set(dir(tcpstore_async)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tcpstore_async.nothing  # noqa: B018
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


def test_importing_the_package_imports_nothing_else() -> None:
    """PyTorch imports it to ask whether there is something to install."""
    code = "import sys; before = set(sys.modules); import tcpstore_async; print(*sorted(set(sys.modules) - before))"
    imported = run_python(code).split()
    ours = ["tcpstore_async", "tcpstore_async.base", "tcpstore_async.base.version"]
    assert [name for name in imported if name.startswith("tcpstore")] == ours
    assert "asyncio" not in imported


def test_importing_a_module_hides_no_name() -> None:
    code = "import tcpstore_async, tcpstore_async.stores.rendezvous_url; assert callable(tcpstore_async.rendezvous)"
    run_python(code)
