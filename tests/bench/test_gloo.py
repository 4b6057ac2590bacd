"""`python -m bench.gloo`: a real group for each combination of switches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gloo import LAZY, SEQUENCE, SWITCHES, V2
from bench_factories import run_program
from versions import VERSION


@pytest.mark.skipif(VERSION < (2, 8), reason="these switches are those of later versions")
def test_the_switches_reduce_what_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run_program("-m", "bench.gloo", "--ranks", "4", "--repeat", "1", "--json", str(file))
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
