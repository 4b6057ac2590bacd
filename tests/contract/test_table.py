"""The table of methods in docs/compatibility.md: it is fresh, and what it says of PyTorch's classes is true."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, Store, TCPStore

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_method_table", ROOT / "tools" / "make_method_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(table: ModuleType) -> None:
    assert table.render_methods() in (ROOT / "docs" / "compatibility.md").read_text(), "run tools/make_method_table.py"


def test_every_store_has_every_method_of_the_contract(table: ModuleType) -> None:
    contract = table.public(Store)
    for store in (TCPStore, FileStore, HashStore, PrefixStore):
        assert contract <= table.public(store)
        assert table.PYTORCH[store.__name__] <= table.public(store)
    assert contract - {"has_extended_api"} <= table.public(AsyncTCPStore)


def test_differences_are_of_methods_that_both_have(table: ModuleType) -> None:
    for name, stores, _ in table.DIFFERENCES:
        for store in stores:
            assert name in table.PYTORCH[store]


def test_pytorchs_classes_are_as_the_table_says(table: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table is of 2.13")
    for name, methods in table.PYTORCH.items():
        theirs = getattr(sys.modules["torch"].distributed, name)
        assert {found for found in dir(theirs) if not found.startswith("_")} == methods
