"""`docs/quirks.md` and the tests name each other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from conformance.cases import own_cases
from conformance.divergences import MENDED
from conformance.vectors import libuv_vectors
from tcpstore_async.base.limits import Limits

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {script.name: script for script in libuv_vectors() + own_cases()}


def _tables() -> dict[str, list[list[str]]]:
    """The rows of each table, by the heading above it."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (ROOT / "docs" / "quirks.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {heading: rows[2:] for heading, rows in tables.items()}


TABLES = _tables()
MENDED_ROWS = {row[0].strip("`"): row for row in TABLES["Fixed on purpose"]}


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_divergent_script_has_a_row() -> None:
    for script in SCRIPTS.values():
        assert not script.mended or script.row in MENDED_ROWS, script.name


def test_every_divergence_row_has_a_script() -> None:
    assert {script.row for script in SCRIPTS.values() if script.mended} == set(MENDED_ROWS)


@pytest.mark.parametrize("name", MENDED)
def test_the_row_of_a_recorded_vector_names_it(name: str) -> None:
    assert name in _named(MENDED_ROWS[MENDED[name].row][-1])


@pytest.mark.parametrize(("heading", "row"), [(heading, row) for heading, rows in TABLES.items() for row in rows])
def test_every_row_names_its_evidence(heading: str, row: list[str]) -> None:
    named = _named(row[-1])
    assert named
    for name in named:
        path, _, test = name.partition("::")
        if test:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name
        else:
            script = SCRIPTS[name]
            assert script.mended == (heading == "Fixed on purpose"), name
            assert not script.mended or script.row == row[0].strip("`"), name


def test_every_limit_is_listed_with_its_default() -> None:
    listed = {_named(row[0])[0]: int(re.sub(r"\D", "", row[1].split("(")[0])) for row in TABLES["Our limits"]}
    assert listed == {field.name: field.default for field in dataclasses.fields(Limits)}
