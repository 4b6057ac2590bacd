"""What this machine allows a replay: checked before it is prepared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from load.test_load_replay import GETS, rows

from tcpstore_async.tools.load import replay_limits
from tcpstore_async.tools.load.recording import Connection, Recording, RecordingError, read_recording


@pytest.mark.parametrize(
    ("patched", "value", "said"),
    [
        ("max_connections_by_files", 999_999, "the limit on open files (ulimit -Hn) allows only 999,999"),
        ("_local_ports", 28_232, "net.ipv4.ip_local_port_range has only 28,232 ports for them"),
        ("_physical_memory", 8 << 30, "more than half of the 8.0 GiB that this machine has"),
    ],
)
def test_a_limit_ends_a_replay_before_it_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: str, value: int, said: str
) -> None:
    file = tmp_path / "job"
    file.write_bytes(rows(*GETS))
    allowing = {"max_connections_by_files": 2**31, "_local_ports": 2**31, "_physical_memory": 2**60, patched: value}
    for name, number in allowing.items():
        monkeypatch.setattr(replay_limits, name, lambda *reserve, number=number: number)
    recording = read_recording(file)
    with pytest.raises(RecordingError, match=f"^the replay needs .*, .*{re.escape(said)}$"):
        replay_limits.check_limits(recording, 1_000_000, 0)
    replay_limits.check_limits(recording, 1, 0)


def test_a_connection_that_was_closed_at_once_counts() -> None:
    recording = Recording()
    recording.connections = [Connection(recording, number, 1.0) for number in range(3)]
    for connection in recording.connections:
        connection.closed = 1.0
    assert replay_limits._most_at_once(recording, 1.0) == 3
