"""What a job's ranks leave in the log."""

from __future__ import annotations

import re

import pytest

from bench_factories import run_program


@pytest.mark.slow
def test_a_run() -> None:
    said = run_program("-m", "bench.logged", "32", "0.1").stdout
    found = dict(re.findall(r"^(\w+): +([\d.]+) B", said, re.MULTILINE))
    assert found.keys() == {"start", "store_based_barrier", "BARRIER", "nothing", "snapshot"}
    assert all(float(found[what]) > 0 for what in found.keys() - {"nothing"})
