"""Late agents: their job has ended successfully, and they would run it again alone.

The scheduler or the user may tell the run of its job that an agent belongs to; its process has a start time. From these
and the end that the server remembers (`agents.Ended`), this module decides. It must not know how agents meet, nor
PyTorch.

Invariant: an agent that may belong to a new run of the job is not late.
"""

import os
import time
from hashlib import blake2b
from typing import Final, NamedTuple

from ..client.store_name import ATTEMPT
from .agent import Ended, named_host, named_run

_STEP: Final = "SLURM_STEP_ID"
_VARIABLES: Final = ("SLURM_JOB_ID", _STEP, "SLURM_RESTART_COUNT", ATTEMPT)

_DEFAULT_ID: Final = "none"
"""torchrun's default id of a job."""

_MOST_HOSTS: Final = 8
"""Hosts that a text lists."""

_imported: Final = time.monotonic()


class Origin(NamedTuple):
    """The run and the age of an agent."""

    run: str
    """Text that identifies the run of its job; empty if it is unknown."""
    said: str
    """The variables that the run was taken from, for messages."""
    age: float
    """Seconds since its process started. (Times of day of different hosts would have to be compared.)"""


def own_origin(run_id: str) -> Origin:
    """Return the origin of this process's agents of a job.

    A batch job may start several runs: without a step, only the user can tell them apart. Likewise, a step may start
    several jobs under torchrun's default id.
    """
    said = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    known = bool((os.environ.get(_STEP) and run_id != _DEFAULT_ID) or os.environ.get(ATTEMPT))
    run = blake2b("\0".join(said).encode(errors="replace"), digest_size=8).hexdigest() if known else ""
    return Origin(run, ", ".join(said), _age())


def _age() -> float:
    """Return the seconds since this process started; where the system does not tell, since this module's import."""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) + 1
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic() - _imported


def why_late(origin: Origin, ended: Ended) -> str:
    """Return why an agent is too late for a job that has ended; empty if it may start the job again."""
    runs = {named_run(name) for name in ended.agents}
    if origin.run and any(runs):
        return f"this agent belongs to the same run ({origin.said})" if origin.run in runs else ""
    return "this agent's process began before that" if origin.age > ended.since else ""


def describe_end(run_id: str, ended: Ended) -> str:
    """Return text with the id of a job that has ended, and when and where it did."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - ended.since))
    hosts = list(dict.fromkeys(map(named_host, ended.agents)))
    more = len(hosts) > _MOST_HOSTS or ended.count > len(ended.agents)
    on = ", ".join(hosts[:_MOST_HOSTS]) + (" and others" if more else "")
    return f"the job {run_id!r} ended successfully at {at} ({ended.since:.0f} s ago) on {on}"
