"""The table of methods in docs/compatibility.md is up to date and true.

Both sides make the calls of `table_probes.py`, in processes of their own. Two outcomes agree if the values are equal,
or if the errors have the same text and our class is PyTorch's or inherits from it. Every probe whose outcomes differ
must be covered by a note of the table, and every note by such a probe, so that fixes in PyTorch and regressions here
show.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commands import load_tool
from contract import table_probes
from contract.table_probes import CLASSES, KINDS, PROBES
from support import LIMIT
from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, Store, TCPStore

pytestmark = pytest.mark.interpreted

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load_tool("make_reference")


def test_every_store_has_every_method_of_the_contract(table: ModuleType) -> None:
    contract = table.public(Store)
    for store in (TCPStore, FileStore, HashStore, PrefixStore):
        assert contract <= table.public(store)
        assert table.PYTORCH[store.__name__] <= table.public(store)
    assert contract - {"has_extended_api"} <= table.public(AsyncTCPStore)


def test_differences_concern_common_methods(table: ModuleType) -> None:
    for name, stores, _, _ in table.DIFFERENCES:
        for store in stores:
            assert name in table.PYTORCH[store]


@pytest.mark.slow
def test_methods_of_pytorch_s_classes(table: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table is of 2.13")
    for name, methods in table.PYTORCH.items():
        theirs = getattr(sys.modules["torch"].distributed, name)
        assert {found for found in dir(theirs) if not found.startswith("_")} == methods


Outcomes = dict[tuple[str, str, str], list[Any]]


@pytest.fixture(scope="module")
def outcomes() -> tuple[Outcomes, Outcomes]:
    """The outcomes on our side and on PyTorch's, by kind of store, method and probe."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("there is no PyTorch")
    if not version.startswith("2.13."):
        pytest.skip("the table is of 2.13")
    with ExitStack() as stack:
        ours, theirs = (_started(side, stack) for side in ("ours", "torch"))
        return _finished(ours), _finished(theirs)


def _started(side: str, stack: ExitStack) -> subprocess.Popen[str]:
    """Start the probes of one side; kill its process group when the stack is left."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", table_probes.__file__, side],
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # PyTorch's server looks up the name of every peer, which may take ten seconds without DNS.
        env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
    )

    def end() -> None:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    stack.callback(end)
    return process


def _finished(process: subprocess.Popen[str]) -> Outcomes:
    printed, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    return {(kind, method, name): found for kind, method, name, found in map(json.loads, printed.splitlines())}


def _agree(ours: list[Any], theirs: list[Any]) -> bool:
    """Compare values, or class and text of errors; pybind's texts may differ."""
    if len(ours) == 1 or len(theirs) == 1:
        return ours == theirs
    text = re.sub(r" \((awaiting the reply to|sending) .*\)$", "", ours[1])  # of a lost connection
    return theirs[0] in ours[2] and (theirs[0] in ("TypeError", "AttributeError") or text == theirs[1])


def _disagreeing(outcomes: tuple[Outcomes, Outcomes], kind: str, method: str) -> set[str]:
    ours, theirs = (
        {name: found for (k, m, name), found in side.items() if (k, m) == (kind, method)} for side in outcomes
    )
    assert set(ours) == set(theirs)
    return {name for name in ours if not _agree(ours[name], theirs[name])}


def _patterns(table: ModuleType, kind: str, method: str) -> list[tuple[bool, str]]:
    """Return the patterns of probes that should differ, and whether on this very kind."""
    outer, _, inner = kind.partition("-")
    own = [(not inner, pattern) for row in table.differences(CLASSES[outer], method) for pattern in row[3]]
    if not inner or method in table.OF_ITS_OWN:
        return own
    return own + [(True, pattern) for row in table.differences(CLASSES[inner], method) for pattern in row[3]]


CELLS = [(kind, method) for kind in KINDS for method in PROBES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), CELLS, ids=lambda part: part)
def test_cell(kind: str, method: str, table: ModuleType, outcomes: tuple[Outcomes, Outcomes]) -> None:
    if method not in table.PYTORCH[CLASSES[kind.partition("-")[0]]]:
        return
    tried = {name for k, m, name in outcomes[0] if (k, m) == (kind, method)}
    assert tried == set(table_probes.probes_of(kind, method))
    found = _disagreeing(outcomes, kind, method)
    if method in table.UNNAMED:
        assert table.BY_NAME in found
        found.discard(table.BY_NAME)
    said = _patterns(table, kind, method)
    for name in found:
        ours, theirs = (side[kind, method, name][:2] for side in outcomes)
        assert any(fnmatch(name, pattern) for _, pattern in said), f"{name!r}: {ours}, and PyTorch's {theirs}"
    for here, pattern in said:
        if here and any(fnmatch(name, pattern) for name in tried):
            assert any(fnmatch(name, pattern) for name in found), f"{pattern!r} does not differ any more"


@pytest.mark.slow
def test_every_difference_of_a_prefix_store_is_found(table: ModuleType, outcomes: tuple[Outcomes, Outcomes]) -> None:
    for method, stores, _, patterns in table.DIFFERENCES:
        if "PrefixStore" in stores:
            kinds = [kind for kind in KINDS if kind.startswith("prefix")]
            found = set().union(*(_disagreeing(outcomes, kind, method) for kind in kinds))
            for pattern in patterns:
                assert any(fnmatch(name, pattern) for name in found), (method, pattern)


def test_every_method_has_probes(table: ModuleType) -> None:
    assert set().union(*table.PYTORCH.values()) == set(PROBES)


def test_every_pattern_matches_a_probe(table: ModuleType) -> None:
    for method, _, _, patterns in table.DIFFERENCES:
        for pattern in patterns:
            assert any(fnmatch(name, pattern) for name in PROBES[method]), (method, pattern)
