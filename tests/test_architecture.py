"""The floors of the house: imports point strictly down, and the lower floors know no machine.

Under test are the sources of the checkout, whichever build runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tcpstore_async"

FLOORS = {
    "errors": -1, "limits": -1, "blob": -1, "arguments": -1, "version": -1, "interrupts": -1,
    "wire": 0, "keyspace": 0, "jobs": 0,
    "session": 1,
    "server": 2, "client": 2,
    "stores": 3, "ops": 3, "load": 3,
    "daemon": 4, "rendezvous_url": 4, "collectives": 4,
    "cli": 5, "torch": 5,
    "autoload": 6, "__init__": 7, "__main__": 7,
}  # fmt: skip
MACHINE = {"socket", "asyncio", "threading", "time", "os", "logging", "click", "select"}
GROUND_MAY = {("arguments", "errors"), ("blob", "errors"), ("limits", "errors")}
GROUND_MAY |= {("keyspace", "jobs"), ("jobs", "keyspace")}  # one part in two files; back it is for types only

SOURCES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports, wherever in it: the parts of absolute names, relative ones made absolute."""
    package = ("tcpstore_async", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = base + tuple(node.module.split(".") if node.module else ())
            for alias in node.names:
                yield (*module, alias.name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    assert here in FLOORS, f"tests/test_architecture.py does not know on which floor {here} is"
    for name in imports(path):
        if name[0] == "tcpstore_async":
            there = name[1] if len(name) > 1 and name[1] in FLOORS else "__init__"
            assert there == here or (here, there) in GROUND_MAY or FLOORS[there] < FLOORS[here], ".".join(name)
        elif FLOORS[here] <= 1:
            assert name[0] not in MACHINE, f"floor {FLOORS[here]} must not know {name[0]}"
        if here != "torch":
            assert name[0] != "torch"


def test_errors_import_nothing() -> None:
    assert not list(imports(PACKAGE / "errors.py"))


def test_every_module_says_what_it_is() -> None:
    assert SOURCES
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, tcpstore_async, tcpstore_async.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tempfile.gettempdir(), timeout=60).returncode == 0
