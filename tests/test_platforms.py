"""What other systems than Linux lack: tests that need it say so, and are skipped there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROC = re.compile(r"(?<![\w.])/proc/(?!nix)")
"""What a test reads that looks into /proc; `/proc/nix` stands for a path that cannot be written."""

PRETENDED = {"tools/doctor/test_doctor.py", "unit/diagnosis", "test_platforms.py", "test_docs.py"}
"""Tests that only name paths below /proc, or are given what would be there."""


@functools.cache
def looking(path: Path) -> frozenset[str]:
    """Return the names in a module that stand for what looks into /proc, itself or by way of others."""
    text = path.read_text()
    tree = ast.parse(text)
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for helper in (path.parent / f"{node.module}.py", TESTS / f"{node.module.replace('.', '/')}.py"):
                if helper.exists() and helper != path:
                    found |= {alias.asname or alias.name for alias in node.names if alias.name in looking(helper)}
    if not found and not PROC.search(text):
        return frozenset()
    parts = [(name, part) for node in tree.body for name, part in _defined(node)]
    while more := {name for name, part in parts if name not in found and _looks(part, found)}:
        found |= more
    return frozenset(found)


def _defined(node: ast.stmt) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the name that a statement of a module defines, and what that stands for."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, [node.args, *node.body]
    elif isinstance(node, ast.ClassDef):
        yield node.name, [*node.body]
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and target.id != "pytestmark":
                yield target.id, [node.value]


def _looks(parts: list[ast.AST], names: set[str]) -> bool:
    for part in parts:
        docstring = part.value if isinstance(part, ast.Expr) else None
        asked = {id(word) for node in ast.walk(part) for word in _asked(node)}
        for node in ast.walk(part):
            if id(node) in asked:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node is not docstring:
                if PROC.search(node.value):
                    return True
            elif (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.arg) and node.arg in names):
                return True
    return False


def _asked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the path of which `Path(…).exists()` asks whether it is there."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "exists":
        yield from ast.walk(node.func.value)


def unmarked(path: Path) -> list[str]:
    """Return the tests of a module that look into /proc and are not marked `needs_proc`."""
    text = path.read_text()
    if re.search(r"^pytestmark = .*needs_proc", text, re.MULTILINE):
        return []
    tests = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    everywhere = any(
        "autouse" in "".join(map(ast.unparse, node.decorator_list)) and node.name in looking(path) for node in tests
    )
    return [
        f"{path.relative_to(TESTS)}::{node.name}"
        for node in tests
        if node.name.startswith("test_")
        and (everywhere or node.name in looking(path))
        and not any("needs_proc" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_tests_that_look_into_proc_are_marked() -> None:
    paths = [path for path in sorted(TESTS.rglob("test_*.py")) if not _pretends(path)]
    missing = [test for path in paths for test in unmarked(path)]
    assert not missing, "mark these with @pytest.mark.needs_proc: " + ", ".join(missing)


def _pretends(path: Path) -> bool:
    return any(path.relative_to(TESTS).is_relative_to(place) for place in PRETENDED)


@pytest.mark.parametrize(
    "text",
    [
        "def test_a():\n    open('/proc/self/fd')",
        "def fds(pid):\n    return f'/proc/{pid}/fd'\n\n\ndef test_a():\n    fds(1)",
        "LIMIT = Path('/proc/sys/net/core/somaxconn')\n\n\ndef test_a():\n    LIMIT.read_text()",
        "def fds():\n    return '/proc/self/fd'\n\n\ndef test_a(fds):\n    pass",
        "@fixture(autouse=True)\ndef fds():\n    return '/proc/self/fd'\n\n\ndef test_a():\n    pass",
    ],
)
def test_that_one_is_missing_is_noticed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TESTS", tmp_path)
    planted = tmp_path / "test_planted.py"
    planted.write_text(text)
    assert unmarked(planted) == ["test_planted.py::test_a"]
    planted.write_text(text.replace("def test_a", "@pytest.mark.needs_proc\ndef test_a"))
    assert unmarked(planted) == []
