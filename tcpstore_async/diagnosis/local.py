"""The ranks of a job, with what the environments of processes on this machine say of them.

Knows where environments are read. Must not know what follows from them.
"""

from ..client.admin import find_local, read_environment
from .facts import Facts
from .ranks import Ranks


def local_ranks(facts: Facts, world_size: int | None, hosts: dict[str, bool] | None = None) -> Ranks:
    """Return the ranks; `world_size` is their number, if the server may not know it.

    `hosts` says of which addresses it is known whether they are of this machine; others are added.
    """
    local: dict[str, bool] = {} if hosts is None else hosts
    known: dict[int, dict[str, str]] = {}
    environments: dict[int, dict[str, str]] = {}
    sessions = [
        one
        for one in facts.sessions
        if one.pid is not None and one.id and one.carries is None and "rank" not in one.peer
    ]
    found = {session.host for session in sessions}
    unknown = found - local.keys()
    local.update(dict.fromkeys(unknown, False))
    local.update(dict.fromkeys(find_local(unknown), True))
    ours = {host for host in found if local[host]}
    for session in sessions if ours else ():
        pid = session.pid
        if pid is None or session.host not in ours:
            continue
        if pid not in known:
            known[pid] = read_environment(pid)
        if known[pid]:
            environments[session.id] = known[pid]
    return Ranks(facts, environments, world_size)
