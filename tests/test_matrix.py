"""tools/matrix.py as far as it needs no network: which versions on which Python, and the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from commands import load_tool

matrix: Any = load_tool("matrix")
cuda_stubs: Any = load_tool("cuda_stubs")

PYTHONS = {minor: f"python3.{minor}" for minor in (10, 11, 12, 13)}


def test_the_newest_of_every_minor_version() -> None:
    said = ["2.13.0+cpu", "2.13.0", "2.10.0", "2.9.1", "2.9.0", "2.4.0", "2.4.1", "2.3.1", "1.13.1", "2.16.0rc1"]
    assert matrix.newest_of_each(said) == ["2.4.1", "2.9.1", "2.10.0", "2.13.0"]


def test_what_was_asked_for() -> None:
    known = ["2.4.1", "2.9.1", "2.10.0"]
    assert matrix.selected([], known) == known
    assert matrix.selected(["2.10", "2.4", "2.9.0"], known) == ["2.4.1", "2.9.0", "2.10.0"]
    assert matrix.selected(["2.99.1"], known) == ["2.99.1"]


@pytest.mark.parametrize(("version", "span"), [
    ("2.4.1", (8, 12)), ("2.5.1", (9, 13)), ("2.8.0", (9, 13)), ("2.9.0", (10, 14)), ("2.15.0", (10, 14)),
])  # fmt: skip
def test_which_pythons_a_version_supports(version: str, span: tuple[int, int]) -> None:
    assert matrix.supported(version) == span


def test_every_python_is_chosen() -> None:
    chosen = [matrix.choose(version, PYTHONS) for version in matrix.KNOWN]
    assert set(chosen) == set(PYTHONS)
    for version, minor in zip(matrix.KNOWN, chosen, strict=True):
        oldest, newest = matrix.supported(version)
        assert oldest <= minor <= newest


def test_no_python_fits(tmp_path: Path) -> None:
    assert matrix.choose("2.4.1", {13: "python3.13"}) is None
    row = matrix.run_one(tmp_path, "2.4.1", {13: "python3.13"}, None, [])
    assert row["error"] == "could not be installed: no Python 3.8 to 3.12 here"


def test_this_python_is_found() -> None:
    assert sys.version_info[1] in matrix.find_pythons()


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="x"/></testcase>
<testcase classname="a" name="worse"><error message="x"/></testcase>
<testcase classname="a" name="not here"><skipped message="no queues"/></testcase>
</testsuite></testsuites>"""


def test_what_a_report_says() -> None:
    row = matrix.counts(REPORT)
    assert row == {"passed": 1, "skipped": {"no queues": 1}, "failed": ["a::bad", "a::worse"]}


def row(torch: str, **more: Any) -> dict[str, Any]:
    return {"torch": torch, "date": "2026-01-02", "python": "3.11.7", "build": f"{torch}+cu1", **more}


def test_the_table() -> None:
    lines = matrix.render([
        row("2.4.1", gpu_libraries="stubs", lacks=["queues", "BARRIER"], passed=5, skipped={"x": 2}, failed=["y"]),
        row("2.10.0", gpu_libraries="stubs", lacks=[], passed=7, skipped={}, failed=[]),
        {"torch": "2.9.1", "date": "2026-01-03", "error": "could not be installed: a | b"},
    ]).splitlines()  # fmt: skip
    assert lines[2] == "| 2.10.0+cu1 | 3.11.7 | stubs | – | 7 | 0 | 0 |"
    assert lines[3] == r"| 2.9.1 | – | – | – | – | – | could not be installed: a \| b |"
    assert lines[4] == "| 2.4.1+cu1 | 3.11.7 | stubs | queues, BARRIER | 5 | 2 | 1 |"
    assert lines[6].endswith("2026-01-02 to 2026-01-03.")


def test_only_what_is_between_the_markers_changes() -> None:
    page = "# A\n\n<!-- methods -->\nx\n<!-- /methods -->\n\n## V\n\n<!-- matrix -->\nold\n<!-- /matrix -->\n\nend\n"
    new = matrix.put(page, "new")
    assert new == page.replace("\nold\n", "\nnew\n")
    assert matrix.put(new, "new") == new


def test_the_section_is_made() -> None:
    made = matrix.put("", "new")
    assert made.startswith("# Compatibility\n\n## Versions of PyTorch\n\n<!-- matrix -->\nnew\n<!-- /matrix -->\n")
    assert matrix.put("# T\n\ntext\n", "new").startswith("# T\n\ntext\n\n## Versions of PyTorch\n")


def test_a_later_row_takes_the_place_of_an_earlier_one() -> None:
    old = [row("2.4.0"), row("2.9.1")]
    assert matrix.merged(old, [row("2.4.1")]) == [row("2.4.1"), row("2.9.1")]


@pytest.mark.parametrize(("said", "last"), [
    ("WARNING: a\nERROR: No matching distribution found for torch\nnotice\n", "No matching"),
    ("Traceback\n  x\nImportError: libfoo.so\n\n", "ImportError: libfoo.so"),
    ("", "no output"),
])  # fmt: skip
def test_why_something_failed(said: str, last: str) -> None:
    assert last in matrix.last_words(said)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
def test_what_a_library_needs() -> None:
    library = cuda_stubs.Library(Path(sys.executable).resolve())
    assert any(name.startswith(("libc.so", "libpython", "libm.so")) for name in library.needed())
    assert any(version[0].startswith("libc.so") for version in library.versions().values())
    with pytest.raises(ValueError, match="is not a 64-bit"):
        cuda_stubs.Library(Path(__file__))


def test_nothing_is_missing_where_nothing_is(tmp_path: Path) -> None:
    assert cuda_stubs.missing(tmp_path) == {}
