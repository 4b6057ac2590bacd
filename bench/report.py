"""Stands in for the report until it is merged."""

from __future__ import annotations

from pathlib import Path

from bench.records import Run


def write_report(run: Run, folder: Path) -> list[Path]:
    return []
