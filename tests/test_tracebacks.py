"""No error is kept where its traceback reaches it: that keeps the locals of all callers until a garbage collection.

An error refers to its traceback, that to frames, and those to their locals. So a local that is raised makes a cycle,
and whatever keeps an error that has been raised keeps its callers' locals, a store and its server among them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tcpstore_async

PACKAGE = Path(tcpstore_async.__file__).parent
KEEPERS = {"add", "append", "insert", "put", "put_nowait", "set_exception"}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What a function executes, without the functions in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from own_nodes(node)


def deleted(function: ast.AST) -> set[str]:
    """The names that a `finally` deletes."""
    return {
        target.id
        for node in own_nodes(function)
        if isinstance(node, ast.Try)
        for statement in node.finalbody
        if isinstance(statement, ast.Delete)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def raised_and_kept(source: str) -> list[str]:
    """What raises an error that something refers to, and what keeps an error that has been raised."""
    found = []
    for function in functions(ast.parse(source)):
        nodes = list(own_nodes(function))
        handled = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        locals_ = names - handled - deleted(function)
        for node in nodes:
            if isinstance(node, ast.Raise) and (
                (isinstance(node.exc, ast.Name) and node.exc.id in locals_)
                or isinstance(node.exc, ast.Attribute | ast.Subscript)
            ):
                found.append(ast.unparse(node))
            if isinstance(node, ast.ExceptHandler) and node.name:
                found += [ast.unparse(one) for one in own_nodes(node) if keeps(one, node.name)]
    return found


def keeps(node: ast.AST, name: str) -> bool:
    def is_it(value: ast.AST | None) -> bool:
        if isinstance(value, ast.Tuple | ast.List):
            return any(is_it(one) for one in value.elts)
        return isinstance(value, ast.Name) and value.id == name

    if isinstance(node, ast.Assign | ast.AnnAssign):
        return is_it(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPERS:
        return any(is_it(one) for one in node.args)
    return False


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n error = E()\n raise error", ["raise error"]),
        ("def f(error):\n raise error from None", ["raise error from None"]),
        ("def f():\n try: g()\n except E as error: last = error\n raise last", ["raise last", "last = error"]),
        ("def f():\n try: g()\n except E as error: self.lost = error", ["self.lost = error"]),
        ("def f():\n try: g()\n except E as error: tried.append((1, error))", ["tried.append((1, error))"]),
        ("def f():\n raise self.lost", ["raise self.lost"]),
        ("def f():\n raise errors[0]", ["raise errors[0]"]),
        ("def f(error):\n try: raise error\n finally: del error", []),
        ("def f():\n try: g()\n except E as error: tried.append(error.with_traceback(None))", []),
        ("def f():\n try: g()\n except E as error:\n  error.x = 1\n  raise error", []),
        ("def f():\n raise errors.pop()", []),
        ("def f():\n raise copy(self.lost)", []),
    ],
)
def test_the_patterns(source: str, found: list[str]) -> None:
    assert sorted(raised_and_kept(source)) == sorted(found)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_error_is_kept_where_its_traceback_reaches_it(path: Path) -> None:
    assert raised_and_kept(path.read_text()) == []
