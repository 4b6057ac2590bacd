"""Make the benchmark, which is not installed, importable from the checkout, after everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench.scale.servers import Host

os.environ["BENCH_BUILD"] = "interpreted"
"""Else what chooses the compiled build, where there is one, does so for all that the tests start after an import."""

sys.path.append(str(Path(__file__).parent.parent.parent))


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    from bench.scale.servers import hosting

    with hosting() as made:
        yield made
