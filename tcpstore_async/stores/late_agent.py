"""Whether an agent comes too late: its job has ended successfully, and it would run it again alone.

What is known of an agent is to which run of its job it belongs, if its scheduler or its user says so, and when its
process began. This module decides from these and from what the server remembers (`agents.Ended`); it must not know how
agents meet, nor PyTorch.

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
"""The id of a job for which torchrun was given none."""

_MOST_HOSTS: Final = 8

_imported: Final = time.monotonic()


class Origin(NamedTuple):
    """Where an agent comes from."""

    run: str
    """To which run of its job it belongs: the same text for all agents of a run; empty if it is not known."""
    said: str
    """What says so, for messages."""
    age: float
    """Seconds since its process began. (A time of day would have to be compared with another host's.)"""


def own_origin(run_id: str) -> Origin:
    """Return where this process's agents of a job come from.

    A batch script may start one run after the other: without a step, only the user can tell them apart. So may a step
    start one job after the other under torchrun's default id, which nobody has chosen for either.
    """
    said = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    known = bool((os.environ.get(_STEP) and run_id != _DEFAULT_ID) or os.environ.get(ATTEMPT))
    run = blake2b("\0".join(said).encode(errors="replace"), digest_size=8).hexdigest() if known else ""
    return Origin(run, ", ".join(said), _age())


def _age() -> float:
    """Return the seconds since this process began; where the system does not tell, since this module was imported."""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) + 1
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic() - _imported


def why_late(origin: Origin, ended: Ended) -> str:
    """Return why an agent is too late for a job that has ended; empty if it may begin the job anew."""
    runs = {named_run(name) for name in ended.agents}
    if origin.run and any(runs):
        return f"this agent belongs to the same run ({origin.said})" if origin.run in runs else ""
    return "this agent's process began before that" if origin.age > ended.since else ""


def describe_end(run_id: str, ended: Ended) -> str:
    """Return which job has ended, when and where."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - ended.since))
    hosts = list(dict.fromkeys(map(named_host, ended.agents)))
    more = len(hosts) > _MOST_HOSTS or ended.count > len(ended.agents)
    on = ", ".join(hosts[:_MOST_HOSTS]) + (" and others" if more else "")
    return f"the job {run_id!r} ended successfully at {at} ({ended.since:.0f} s ago) on {on}"
