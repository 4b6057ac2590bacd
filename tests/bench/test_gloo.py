"""`python -m bench.gloo`: a real group for each combination of switches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gloo import LAZY, SEQUENCE, SWITCHES, V2
from versions import VERSION

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(VERSION < (2, 8), reason="these switches are those of later versions")
def test_the_switches_reduce_what_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gloo", "--ranks", "4", "--repeat", "1", "--json", str(file)],
        cwd=ROOT, capture_output=True, timeout=110, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {tuple(row["switches"]): row for row in json.loads(file.read_text())}
    assert list(rows) == list(SWITCHES)
    assert done.stdout.count("\n") == 4 + len(rows)
    plain = rows[()]
    assert plain["requests_per_rank"] == 3 * 4 + 1
    assert rows[SEQUENCE,]["requests_per_rank"] == plain["requests_per_rank"]
    assert rows[SEQUENCE,]["bytes_per_rank"] < plain["bytes_per_rank"]
    assert rows[V2, SEQUENCE]["requests_per_rank"] == rows[V2,]["requests_per_rank"] == 3
    assert rows[LAZY,]["requests_per_rank"] < plain["requests_per_rank"]
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["server_cpu_ms"] > 0
