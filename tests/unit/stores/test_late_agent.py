"""Which agents are too late for a job that ended successfully."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tcpstore_async.stores import late_agent
from tcpstore_async.stores.agent import Ended, agent_name
from tcpstore_async.stores.late_agent import Origin, describe_end, own_origin, why_late

VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TCPSTORE_ATTEMPT")
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def ended(*runs: str, since: float = 60.0) -> Ended:
    agents = [agent_name(f"node{number}", number, run).decode() for number, run in enumerate(runs)]
    return Ended(since, len(agents), agents)


def run_of(monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    with monkeypatch.context() as context:
        for name, value in env.items():
            context.setenv(name, value)
        return own_origin("job").run


def test_a_run_is_what_the_scheduler_and_the_user_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        run_of(monkeypatch, **env)
        for env in (
            STEP,
            {**STEP, "SLURM_STEP_ID": "1"},
            {**STEP, "SLURM_JOB_ID": "4712"},
            {**STEP, "SLURM_RESTART_COUNT": "1"},
            {**STEP, "TCPSTORE_ATTEMPT": "1"},
            {"TCPSTORE_ATTEMPT": "1"},
            {"TCPSTORE_ATTEMPT": "2"},
        )
    ]
    assert len({*runs, ""}) == len(runs) + 1
    assert run_of(monkeypatch, **STEP) == runs[0]


def test_a_step_may_run_several_jobs_under_the_id_that_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert own_origin("job").run
    assert own_origin("none").run == ""
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    assert own_origin("none").run


def test_a_batch_script_does_not_say_which_of_its_runs_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_of(monkeypatch, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1") == ""
    assert run_of(monkeypatch, TCPSTORE_ATTEMPT="") == ""


def test_an_agent_of_the_same_run_is_late_however_young_it_is() -> None:
    same = Origin("r1", "TCPSTORE_ATTEMPT=1", 0.5)
    assert why_late(same, ended("r1")) == "this agent belongs to the same run (TCPSTORE_ATTEMPT=1)"
    assert why_late(same, ended("r0", "r1"))
    assert why_late(same, ended("", "r1"))


@pytest.mark.parametrize("age", [0.5, 1e6])
def test_an_agent_of_another_run_is_not_late_however_old_it_is(age: float) -> None:
    assert why_late(Origin("r2", "", age), ended("r1")) == ""


@pytest.mark.parametrize(("run", "runs"), [("", ["", ""]), ("r1", ["", ""]), ("", ["r1", "r1"])])
def test_without_runs_to_compare_the_age_decides(run: str, runs: list[str]) -> None:
    assert why_late(Origin(run, "", 60.5), ended(*runs)) == "this agent's process began before that"
    assert why_late(Origin(run, "", 59.5), ended(*runs)) == ""


def test_the_age_is_that_of_the_process() -> None:
    program = "import time; from tcpstore_async.stores.late_agent import own_origin; print(own_origin('job').age)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert -0.02 <= float(done.stdout) <= time.monotonic() - began
    assert own_origin("job").age > float(done.stdout)


def test_where_the_system_does_not_tell_the_age_is_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert 0 <= own_origin("job").age <= time.monotonic() - late_agent._imported


def test_an_end_is_described_by_its_time_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_060.0)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_000_000))
    assert describe_end("j", ended("", "")) == f"the job 'j' ended successfully at {at} (60 s ago) on node0, node1"
    many = ended(*[""] * 9)
    assert describe_end("j", many).endswith(f"on {', '.join(f'node{number}' for number in range(8))} and others")
    assert describe_end("j", Ended(1.0, 40, many.agents[:2])).endswith("on node0, node1 and others")
    odd = Ended(1.0, 2, ["", "evil\nhost 1"])
    assert describe_end("j", odd).endswith(r"on , 'evil\nhost'")


def test_a_name_has_room_for_the_run() -> None:
    longest = agent_name("x" * 9999, 999_999, "0" * 16)
    assert len(longest) <= 512
    assert os.getpid() == int(longest.split()[1])
