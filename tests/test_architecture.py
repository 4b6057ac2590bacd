"""The layers: imports point strictly down, and layers 0 to 2 know no operating system.

Under test are the sources of the checkout, whichever build runs.
"""

from __future__ import annotations

import ast
import itertools
import re
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
    "wire": 1, "access": 1, "accounts": 1, "keyspace": 1, "agents": 1, "joins": 1, "rounds": 1,
    "shared_requests": 1, "waiters": 1, "waiter_types": 1, "incremental": 1,
    "session": 2,
    "server": 3, "client": 3, "tokens": 3, "secret_files": 3, "locks": 3, "python_process": 3,
    "stores": 4, "load": 4, "diagnosis": 4,
    "serving": 5, "web": 5, "relay": 5, "doctor": 5, "rendezvous_url": 5, "collectives": 5,
    "cli": 6, "torch": 6,
    "autoload": 7, "torchrun": 7, "__init__": 8, "__main__": 8,
}  # fmt: skip
MACHINE = {
    *("asyncio", "click", "concurrent", "fcntl", "http", "io", "logging", "multiprocessing", "os", "pathlib", "queue"),
    *("resource", "select", "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib"),
    "uvloop",
}
KNOWS_TIME = {"deadline"}
SAME_LAYER = {
    ("keyspace", "joins"),
    ("coercion", "errors"),
    ("coercion", "addresses"),
    ("values", "errors"),
    ("limits", "errors"),
    ("keys", "coercion"),
}
SAME_LAYER |= {("relay", "serving"), ("serving", "web"), ("access", "wire")}
SAME_LAYER |= {("client", "secret_files"), ("server", "secret_files"), ("tokens", "secret_files")}
SAME_LAYER |= {("client", "locks"), ("server", "locks")}
SAME_LAYER |= {("client", "python_process"), ("server", "python_process")}
SAME_LAYER |= {("server", "tokens")}
SAME_LAYER |= {("joins", "agents"), ("joins", "waiter_types"), ("joins", "incremental")}
SAME_LAYER |= {("agents", "rounds"), ("agents", "shared_requests"), ("agents", "waiter_types")}
SAME_LAYER |= {("agents", "incremental")}
SAME_LAYER |= {("keyspace", "shared_requests"), ("keyspace", "waiter_types"), ("keyspace", "incremental")}
SAME_LAYER |= {("shared_requests", "waiters"), ("shared_requests", "waiter_types"), ("shared_requests", "incremental")}
SAME_LAYER |= {("waiters", "waiter_types"), ("waiters", "incremental"), ("waiter_types", "incremental")}
SAME_LAYER |= {(user, "accounts") for user in ("agents", "waiters", "waiter_types", "incremental")}
SAME_LAYER |= {
    (lower, upper) for lower in ("incremental", "waiter_types") for upper in ("keyspace", "waiters", "waiter_types")
}
"""The last ones are for types only."""

UPWARD = {("server/process/child.py", "main", "serving")}
"""Imports that point up: module, function, and what that imports. A server process runs the `serve` entry point."""

PROGRAMS = {
    ("relay/named_ports.py", "", "server"),
    ("relay/process.py", "__init__", "__main__"),
    ("server/http_process.py", "http_process", "__main__"),
}
"""What the programs of other processes import, in the same form. The one that forwards connections to named stores
checks whose they are, as a server does; the other two are the commands `tcpstore relay` and `tcpstore http`.
"""

BY_NAME = {
    ("__init__.py", "import_module"),
    ("torch/install.py", "import_module"),
    ("cli/commands.py", "import_module"),
}
"""Modules that import others whose names are values: the public names on first use, one of PyTorch's, and the commands
of their own package.
"""

BY_VALUE = {"import_module", "__import__", "run_module", "run_path", "modules", "find_spec", "exec_module"}
"""What imports a module by its name, or finds one that has been imported."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


PROGRAM = re.compile(r"(?:^|[\n;]) *(?:from|import) +(tcpstore_async[.\w]*)(?: +import +(\w+))?")
"""An import in a program that is a string."""


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports, wherever in it: the parts of absolute names, relative ones made absolute."""
    for _, name in imports_by_function(path):
        yield name


def imports_by_function(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The same with the functions that import, "" for the module itself; in programs that are strings, too."""
    package = ("tcpstore_async", *path.relative_to(PACKAGE).parts[:-1])
    yield from _imports(ast.parse(path.read_text()), package, "")


def _imports(node: ast.AST, package: tuple[str, ...], function: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield function, tuple(alias.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else ()
        module = base + tuple(node.module.split(".") if node.module else ())
        for alias in node.names:
            yield function, (*module, alias.name)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        for found in PROGRAM.finditer(node.value):
            yield function, (*found[1].split("."), *([found[2]] if found[2] else []))
    elif isinstance(node, ast.List | ast.Tuple):
        words = [word.value if isinstance(word, ast.Constant) else None for word in node.elts]
        for option, word in itertools.pairwise(words):
            if option == "-m" and isinstance(word, str):
                yield function, (*word.split("."), "__main__")
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, function)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here, module = part(path), str(path.relative_to(PACKAGE))
    assert here in LAYERS, f"tests/test_architecture.py does not know the layer of {here}"
    for function, name in imports_by_function(path):
        if name[0] == "tcpstore_async":
            there = name[1] if len(name) > 1 and name[1] in LAYERS else "__init__"
            allowed = there == here or (here, there) in SAME_LAYER or (module, function, there) in UPWARD | PROGRAMS
            assert allowed or LAYERS[there] < LAYERS[here], ".".join(name)
        elif LAYERS[here] <= 2 and here not in KNOWS_TIME:
            assert name[0] not in MACHINE, f"layer {LAYERS[here]} must not import {name[0]}"
        if here != "torch":
            assert name[0] != "torch"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_not_imported_by_name(path: Path) -> None:
    """Nobody would see where such an import points."""
    module = str(path.relative_to(PACKAGE))
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in BY_VALUE:
            assert (module, name) in BY_NAME, f"{path}:{getattr(node, 'lineno', 0)} uses {name}"
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name not in BY_VALUE or (module, alias.name) in BY_NAME, f"{path} imports {alias.name}"


@pytest.mark.parametrize(
    "text",
    [
        "import tcpstore_async.serving",
        "import tcpstore_async.serving as above",
        "from tcpstore_async import serving",
        "from tcpstore_async.serving import run",
        "from ...serving import serve_owner",
        "from ... import serving",
        "from ... import serve",
        "import tcpstore_async",
        "def another():\n    from ...serving import serve_owner",
        "class Child:\n    def main(self):\n        pass\n    from ...serving import serve_owner",
        "if True:\n    from ... import serving",
        "try:\n    pass\nfinally:\n    import tcpstore_async.cli",
        "async def start():\n    import tcpstore_async.cli",
        "PROGRAM = 'from tcpstore_async.serving import run; run()'",
        "PROGRAM = 'import sys\\nimport tcpstore_async.cli'",
        "run([sys.executable, '-m', 'tcpstore_async', 'serve'])",
        "import importlib\nimportlib.import_module('tcpstore_async.serving')",
        "from importlib import import_module as load\nload('tcpstore_async.serving')",
        "import sys\nsys.modules['tcpstore_async.serving']",
        "import runpy\nrunpy.run_module('tcpstore_async')",
        "__import__('tcpstore_async.serving')",
    ],
)
def test_every_form_of_an_import_that_points_up_is_noticed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "server" / "process" / "child.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    with pytest.raises(AssertionError):
        test_imports_point_down(planted)
        test_modules_are_not_imported_by_name(planted)


def test_the_hook_that_points_up_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "server" / "process" / "child.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("def main():\n    from ...serving import serve_owner")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    test_imports_point_down(planted)


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
