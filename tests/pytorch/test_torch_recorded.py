"""Recordings of PyTorch's jobs: those in bench/recordings, and one that is made here."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from load.test_load_replay import recorder, replay, replay_json

from support import server_of
from tcpstore_async.tools.load.recording import read_recording
from torch_forker import Program

BENCH = Path(__file__).parent.parent.parent / "bench"

JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
half = dist.new_group([0, 1])
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ours", "libuv", "legacy"])
@pytest.mark.parametrize("name", ["gloo", "torchrun"])
def test_the_recordings_of_the_documentation_replay(name: str, kind: str) -> None:
    file = BENCH / "recordings" / f"{name}.gz"
    for ranks in ("1", "40"):
        with server_of(kind) as port:
            replay_json(file, port, "--ranks", ranks)


def test_the_page_shows_what_is_recorded() -> None:
    page = (BENCH / "recordings.md").read_text()
    [(name, shown)] = re.findall(r"\$ tcpstore replay bench/recordings/(\w+)\.gz --summary\n(.*?)```", page, re.DOTALL)
    done = replay(BENCH / "recordings" / f"{name}.gz", 1, "--summary")
    assert done.stdout.decode() == shown


@pytest.mark.parametrize("kind", ["ours", "libuv", "legacy"])
def test_a_gloo_job_replays_with_the_same_replies(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "job"
    with server_of(kind) as port, recorder(port, file, "--values") as proxy:
        with ExitStack() as stack:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(proxy.port), "WORLD_SIZE": "3"}
            env = {**meeting, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            ranks = [stack.enter_context(Program(JOB, env={**env, "RANK": str(rank)})) for rank in range(3)]
            assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.errors() for rank in ranks]
        assert proxy.stop() == 0
    recording = read_recording(file)
    assert (recording.ranks, recording.complete) == (3, True)
    for other in ("ours", "libuv"):
        with server_of(other) as port:
            assert replay_json(file, port)["replies"] == sum(step.reply is not None for step in recording.steps)
