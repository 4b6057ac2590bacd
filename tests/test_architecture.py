"""The layers: imports point strictly down, and layers 0 to 2 know no operating system.

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

LAYERS = {
    "errors": 0, "limits": 0, "values": 0, "coercion": 0, "keys": 0, "deadline": 0, "version": 0, "interrupts": 0,
    "mypyc_shim": 0, "addresses": 0, "gloo_switches": 0, "similar_keys": 0,
    "wire": 1, "access": 1, "keyspace": 1, "agents": 1, "joins": 1, "rounds": 1,
    "shared_requests": 1, "waiters": 1, "waiter_types": 1, "incremental": 1,
    "session": 2,
    "server": 3, "client": 3, "tokens": 3, "secret_files": 3,
    "stores": 4, "load": 4, "diagnosis": 4,
    "serving": 5, "web": 5, "relay": 5, "doctor": 5, "rendezvous_url": 5, "collectives": 5,
    "cli": 6, "torch": 6,
    "autoload": 7, "torchrun": 7, "__init__": 8, "__main__": 8,
}  # fmt: skip
MACHINE = {"socket", "asyncio", "threading", "time", "os", "logging", "click", "select"}
KNOWS_TIME = {"deadline"}
SAME_LAYER = {
    ("keyspace", "joins"),
    ("coercion", "errors"),
    ("values", "errors"),
    ("limits", "errors"),
    ("keys", "coercion"),
}
SAME_LAYER |= {("relay", "serving"), ("serving", "web"), ("access", "wire")}
SAME_LAYER |= {("client", "secret_files"), ("server", "secret_files"), ("tokens", "secret_files")}
SAME_LAYER |= {("server", "tokens")}
SAME_LAYER |= {("joins", "agents"), ("joins", "waiter_types"), ("joins", "incremental")}
SAME_LAYER |= {("agents", "rounds"), ("agents", "shared_requests"), ("agents", "waiter_types")}
SAME_LAYER |= {("agents", "incremental")}
SAME_LAYER |= {("keyspace", "shared_requests"), ("keyspace", "waiter_types"), ("keyspace", "incremental")}
SAME_LAYER |= {("shared_requests", "waiters"), ("shared_requests", "waiter_types"), ("shared_requests", "incremental")}
SAME_LAYER |= {("waiters", "waiter_types"), ("waiters", "incremental"), ("waiter_types", "incremental")}
SAME_LAYER |= {
    (lower, upper) for lower in ("incremental", "waiter_types") for upper in ("keyspace", "waiters", "waiter_types")
}
"""The last ones are for types only."""

UPWARD = {("server/process/child.py", "serving")}
"""Imports that point up, within a function: a server process runs the `serve` entry point."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
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
    here, module = part(path), str(path.relative_to(PACKAGE))
    assert here in LAYERS, f"tests/test_architecture.py does not know the layer of {here}"
    for name in imports(path):
        if name[0] == "tcpstore_async":
            there = name[1] if len(name) > 1 and name[1] in LAYERS else "__init__"
            allowed = there == here or (here, there) in SAME_LAYER or (module, there) in UPWARD
            assert allowed or LAYERS[there] < LAYERS[here], ".".join(name)
        elif LAYERS[here] <= 2 and here not in KNOWS_TIME:
            assert name[0] not in MACHINE, f"layer {LAYERS[here]} must not import {name[0]}"
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


UNPICKLING = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "multiprocessing",
}
"""What makes objects, or runs code, from the bytes it is given, or may do so."""

EXECUTING = {"eval", "exec", "compile", "__import__", "execfile"}
LOADING = {"loads", "load", "Unpickler", "broadcast_object_list", "all_gather_object", "gather_object"}
"""Attributes by which PyTorch, NumPy and the modules above do the same."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_from_a_store_is_unpickled_or_executed(path: Path) -> None:
    """Anyone who can write to a store would run code. JSON is read by msgspec, and by `json` from our own processes."""
    for name in imports(path):
        assert name[0] not in UNPICKLING, f"{path} imports {'.'.join(name)}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            assert node.id not in EXECUTING, f"{path}:{node.lineno} uses {node.id}"
        if isinstance(node, ast.Attribute) and node.attr in LOADING:
            owner = ast.unparse(node.value)
            assert owner == "json", f"{path}:{node.lineno} uses {owner}.{node.attr}"


def test_that_would_be_noticed(tmp_path: Path) -> None:
    for text in ("import pickle", "from marshal import loads", "eval(input())", "torch.load(file)", "x.Unpickler(y)"):
        planted = tmp_path / "tcpstore_async" / "planted.py"
        planted.parent.mkdir(exist_ok=True)
        planted.write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "PACKAGE", planted.parent)
            with pytest.raises(AssertionError):
                test_nothing_from_a_store_is_unpickled_or_executed(planted)
