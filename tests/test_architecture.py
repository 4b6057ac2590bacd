"""The architecture: imports point down, between folders and between the files of one, for types as well as at run time.

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
    "base": 1,
    "wire": 2, "stacks": 2,
    "auth": 3, "keyspace": 3,
    "session": 4,
    "links": 5,
    "observe": 6, "log": 6,
    "diagnosis": 7,
    "client": 8, "server": 8,
    "stores": 9, "serving": 9,
    "relay": 10, "collectives": 10,
    "torch": 11, "cli": 11, "__init__": 11,
    "tools": 12,
    "autoload": 13, "torchrun": 13, "__main__": 13,
}  # fmt: skip
"""The layer of each folder, and of each file beside them."""

PURE = ("base", "wire", "auth/access.py", "keyspace", "session", "links", "observe", "log")
"""What knows no operating system: bytes and meaning."""

MACHINE = {
    *("asyncio", "click", "concurrent", "fcntl", "http", "io", "logging", "multiprocessing", "os", "pathlib", "queue"),
    *("resource", "select", "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib"),
    "uvloop",
}
OF_THE_MACHINE = {
    *(
        "base/deadline.py",
        "base/locks.py",
        "base/peer_process.py",
        "base/python_process.py",
        "log/etcd.py",
        "log/etcd_client.py",
    ),
    "log/journal.py",
}
"""Files in these folders that are about it: clocks, threads, processes, files, other servers."""

STARTED = {
    ("server/owned_process.py", "__main__"),
    ("server/process/parent.py", "serving"),
    ("relay/examining.py", "stacks"),
}
"""What the programs of processes import that a module starts: texts, and words after `-m`."""

BY_NAME = {
    ("__init__.py", "import_module"),
    ("torch/install.py", "import_module"),
    ("cli/commands.py", "import_module"),
    ("stacks/flight_recorder.py", "modules"),
}
"""Modules that import others whose names are values: the public names on first use, PyTorch's, and the commands of
their own package.
"""

BY_VALUE = {"import_module", "__import__", "run_module", "run_path", "modules", "find_spec", "exec_module"}
"""What imports a module by its name, or finds one that has been imported."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


PROGRAM = re.compile(r"(?:^|[\n;]) *(?:from|import) +(tcpstore_async[.\w]*)(?: +import +(\w+))?")
"""An import in a program that is a text."""


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


def started(path: Path) -> Iterator[tuple[str, ...]]:
    """What the programs that a module starts import, in the same form."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in PROGRAM.finditer(node.value):
                yield (*found[1].split("."), *([found[2]] if found[2] else []))
        elif isinstance(node, ast.List | ast.Tuple):
            words = [word.value if isinstance(word, ast.Constant) else None for word in node.elts]
            for option, word in itertools.pairwise(words):
                if option == "-m" and isinstance(word, str):
                    yield (*word.split("."), "__main__")


def destination(name: tuple[str, ...]) -> str | None:
    """Return the part of the package that a name is of."""
    if name[0] != "tcpstore_async":
        return None
    return name[1] if len(name) > 1 and name[1] in LAYERS else "__init__"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here, module = part(path), path.relative_to(PACKAGE).as_posix()
    assert here in LAYERS, f"tests/test_architecture.py does not know the layer of {here}"
    pure = module.startswith(PURE) and module not in OF_THE_MACHINE
    for name in imports(path):
        there = destination(name)
        assert there is None or there == here or LAYERS[there] < LAYERS[here], ".".join(name)
        assert not pure or name[0] not in MACHINE, f"{module} must not import {name[0]}"
        assert here == "torch" or name[0] != "torch"
    for name in started(path):
        there = destination(name)
        assert there is None or there == here or (module, there) in STARTED, f"{module} starts {'.'.join(name)}"


def test_every_part_has_a_layer() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there == LAYERS.keys()
    assert len({LAYERS[path.name] for path in PACKAGE.iterdir() if path.is_dir() and path.name in LAYERS}) <= 12


def file_of(name: tuple[str, ...], root: Path) -> Path | None:
    """Return the file of the package that a name is, or is defined in."""
    for words in (name[1:], name[1:-1]):
        module = root.joinpath(*words)
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if words and file.exists():
                return file
    return None


def circles(root: Path) -> list[set[str]]:
    """Return the files that import each other, however indirectly."""
    imported: dict[Path, set[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        found = {file_of(name, root) for name in imports(path) if name[0] == "tcpstore_async"}
        imported[path] = {file for file in found if file is not None and file != path}
    reached: dict[Path, set[Path]] = {}
    for path in imported:
        seen: set[Path] = set()
        ahead = [*imported[path]]
        while ahead:
            file = ahead.pop()
            if file not in seen:
                seen.add(file)
                ahead += imported.get(file, ())
        reached[path] = seen
    rings = {frozenset(other for other in reached[path] if path in reached[other]) for path in imported}
    return [{file.relative_to(root).as_posix() for file in ring} for ring in sorted(rings, key=len) if ring]


def test_no_files_import_each_other() -> None:
    assert circles(PACKAGE) == []


def test_files_that_import_each_other_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "wire/a.py": "from . import b",
        "wire/b.py": "def later():\n    from ..base.c import x",
        "base/c.py": "if TYPE_CHECKING:\n    from ..wire.a import y",
        "base/d.py": "from .c import x",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert circles(tmp_path) == [{"wire/a.py", "wire/b.py", "base/c.py"}]


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


def test_errors_import_nothing() -> None:
    assert not list(imports(PACKAGE / "base" / "errors.py"))


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
