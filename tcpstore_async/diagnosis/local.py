"""The ranks of a job, with what the environments of processes on this machine say of them.

Knows where environments are read. Must not know what follows from them.
"""

from ..client.admin import is_local, read_environment
from .facts import Facts
from .ranks import Ranks


def local_ranks(facts: Facts, world_size: int | None, hosts: dict[str, bool] | None = None) -> Ranks:
    """Return the ranks; `world_size` is their number, if the server may not know it.

    `hosts` says of which addresses it is known whether they are of this machine; others are added.
    """
    local: dict[str, bool] = {} if hosts is None else hosts
    known: dict[int, dict[str, str]] = {}
    environments: dict[int, dict[str, str]] = {}
    for session in facts.sessions:
        host, pid = session.host, session.pid
        if not session.id or pid is None or session.carries is not None or "rank" in session.peer:
            continue
        if host not in local:
            local[host] = is_local(host)
        if local[host]:
            if pid not in known:
                known[pid] = read_environment(pid)
            if known[pid]:
                environments[session.id] = known[pid]
    return Ranks(facts, environments, world_size)
