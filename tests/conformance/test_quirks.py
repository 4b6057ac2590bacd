"""`docs/quirks.md` has a row for each difference, and what shows a row names it.

A script has its name as `row`; a test has it, or several, in a comment right above its `def`: `quirk: fork, reset`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from conformance.cases import own_cases
from conformance.vectors import libuv_vectors
from tcpstore_async.base.limits import Limits

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = libuv_vectors() + own_cases()


def _tables() -> dict[str, list[tuple[str, str]]]:
    """Return the name and the second cell of each row, by the heading above the table."""
    _, *sections = re.split(r"^## (.+)\n", (ROOT / "docs" / "quirks.md").read_text(), flags=re.MULTILINE)
    return {
        heading: re.findall(r"^\| (.+?) \| (.+?) \|", text, re.MULTILINE)[1:]
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }


TABLES = _tables()
FIXED = {name.strip("`") for name, _ in TABLES["Fixed on purpose"]}
ROWS = [name.strip("`") for table in TABLES.values() for name, _ in table]


def _comments() -> dict[str, tuple[str, str]]:
    """Return each comment and the line below it, by where it is."""
    return {
        f"{path.relative_to(ROOT)}:{found[2]}": (found[1], found[2])
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for found in re.finditer(r"^ *# quirk: *(.*)\n(.*)", path.read_text(), re.MULTILINE)
    }


COMMENTS = _comments()
SHOWN = {script.row for script in SCRIPTS} | {name for names, _ in COMMENTS.values() for name in names.split(", ")}


def test_each_row_has_a_name_of_its_own() -> None:
    assert all(re.fullmatch(r"`[a-z_-]+`", name) for table in TABLES.values() for name, _ in table)
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_shown(name: str) -> None:
    assert name in SHOWN


def test_every_name_in_a_script_is_a_row() -> None:
    assert {script.name: script.row for script in SCRIPTS if script.row and script.row not in ROWS} == {}


@pytest.mark.parametrize(("names", "below"), COMMENTS.values(), ids=COMMENTS)
def test_every_name_above_a_test_is_a_row(names: str, below: str) -> None:
    assert re.match(r"(async )?def test_", below)
    assert set(names.split(", ")) <= set(ROWS)


def test_only_rows_of_what_is_fixed_have_two_answers() -> None:
    """And each has a script, so PyTorch's server fails a test of it."""
    for script in SCRIPTS:
        assert script.mended == (script.row in FIXED), script.name
    assert {script.row for script in SCRIPTS if script.mended} == FIXED


def test_every_limit_is_listed_with_its_default() -> None:
    listed = {name.strip("`"): int(re.sub(r"\(.*|,", "", default)) for name, default in TABLES["Our limits"]}
    assert listed == {field.name: field.default for field in dataclasses.fields(Limits)}
