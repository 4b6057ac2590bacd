"""The tools that judge the tests: coverage against its minimums, and mutations."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from commands import load_tool

ROOT = Path(__file__).parent.parent


coverage_minimums: Any = load_tool("coverage_minimums")
mutate: Any = load_tool("mutate")
pytorch_tests: Any = load_tool("pytorch_tests")


def test_a_module_below_its_minimum_is_a_problem() -> None:
    report = {"files": {"a.py": {"summary": {"percent_covered": 79.9}}, "b.py": {"summary": {"percent_covered": 80.1}}}}
    found = coverage_minimums.measured(json.dumps(report))
    assert found == {"a.py": 79, "b.py": 80}
    assert coverage_minimums.problems(found, {"a.py": 79, "b.py": 80}) == []
    assert coverage_minimums.problems(found, {}) == ["a.py: 79 % are covered, the minimum is 80 %"]
    assert coverage_minimums.problems(found, {"a.py": 60, "gone.py": 1}) == ["gone.py: was not measured; is it gone?"]


def test_new_minimums_are_a_point_below_what_was_measured() -> None:
    assert coverage_minimums.minimums_from({"a.py": 100, "b.py": 91, "c.py": 0}) == {"a.py": 100, "b.py": 90, "c.py": 0}


def test_minimums_are_percentages() -> None:
    minimums = json.loads(coverage_minimums.MINIMUMS.read_text())
    assert minimums
    assert all(name.startswith("tcpstore_async/") and 0 <= minimum <= 100 for name, minimum in minimums.items())


def test_what_passes_on_stock_pytorch_and_not_here_is_a_difference() -> None:
    stock = {"a": "passed", "b": "passed", "c": "passed", "d": "failed", "e": "skipped", "f": "passed"}
    ours = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "failed"}  # the worker crashed in f
    assert pytorch_tests.differences(stock, ours) == ["b", "c", "f"]


def test_known_differences_have_reasons() -> None:
    table = "| test | mode | why |\n|---|---|---|\n| `t.py::A::b` | `1`, `python` | Says so. |\n"
    page = f"| `u.py::A::b` | `1` | elsewhere |\n{pytorch_tests.BEGIN}\n{table}{pytorch_tests.END}\n"
    assert pytorch_tests.known(page) == {("t.py::A::b", "1"): "Says so.", ("t.py::A::b", "python"): "Says so."}
    listed = pytorch_tests.known(pytorch_tests.PAGE.read_text())
    assert all(re.fullmatch(r"[\w/]+\.py::\w+::\w+", name) and why for (name, _), why in listed.items())
    assert {mode for _, mode in listed} <= {*pytorch_tests.third_party.MODES[1:]}


@pytest.mark.parametrize(("source", "expected"), [
    ("x = a < b", ["x = a <= b"]),
    ("x = a is None", ["x = a is not None"]),
    ("x = a and not b", ["x = (a or not b)", "x = a and (b)"]),
    ("x = a + 1", ["x = (a - 1)", "x = a + 2"]),
    ("x += y", ["x -= y"]),
    ("f(True)", ["pass", "f(False)"]),
    ("x = 'é' == a", ["x = 'é' != a"]),
    ("raise ValueError(1)", []),
    ("log.warning('%s', 1)", []),
    ("x = f'{a + 1}'", []),
    ("x: Literal[1] = y", []),
    ("def f(a: Literal[1]) -> Literal[2]: pass", []),
])  # fmt: skip
def test_mutations_of_a_line(tmp_path: Path, source: str, expected: list[str]) -> None:
    path = Path("module.py")
    (tmp_path / path).write_text(source)
    found = mutate.mutations(tmp_path, path)
    assert [one.applied(source.encode()).decode() for one in found] == expected


def test_every_mutation_of_the_core_is_python_and_a_change() -> None:
    for path in mutate.sources(["tcpstore_async/wire/values.py", "tcpstore_async/session/identity.py"]):
        source = (ROOT / path).read_bytes()
        tree = ast.dump(ast.parse(source))
        found = mutate.mutations(ROOT, path)
        assert len({one.place for one in found}) == len(found)
        for one in found:
            assert ast.dump(ast.parse(one.applied(source))) != tree


def test_what_is_mutated_exists() -> None:
    """Else what was renamed would be left out without a word."""
    assert [name for name in mutate.CORE if not (ROOT / "tcpstore_async" / name).exists()] == []


def test_the_index_of_the_benchmarks_is_complete() -> None:
    """A listing tells a reader little: the package's docstring says what each is for."""
    index = ast.get_docstring(ast.parse((ROOT / "bench" / "__init__.py").read_text())) or ""
    paths = [path.relative_to(ROOT / "bench") for path in (ROOT / "bench").rglob("*.py") if "__" not in path.name]
    missing = [
        str(path)
        for path in paths
        if not re.search(rf"\b({path.stem}|{'[./]'.join(path.with_suffix('').parts)})\b", index)
    ]
    assert not missing, f"add these to the docstring of bench/__init__.py: {missing}"
    for name in re.findall(r"\b(?!TIME)[a-z_]+(?:\.[a-z]+)?(?=  +[a-z])", index.partition("Programs")[2]):
        assert (ROOT / "bench" / f"{name.replace('.', '/')}.py").exists(), name
