"""Stands in for the comparison until it is merged."""

from __future__ import annotations

from pathlib import Path


def compare(a: Path, b: Path) -> int:
    return 0
