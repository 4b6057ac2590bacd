"""The ranks of a job, with what the environments of processes on the server's machine say of them.

Knows where environments are read. Must not know what follows from them.
"""

from ...client.admin import find_local, read_environment
from ...diagnosis.facts import Facts, Session
from ...diagnosis.ranks import Ranks


def local_ranks(facts: Facts, world_size: int | None, hosts: dict[str, bool] | None = None) -> Ranks:
    """Return the ranks; `world_size` is their number, if the server may not know it.

    If the facts come from another machine, so do the environments. For `hosts` see `find_environments`.
    """
    environments = facts.environments
    if environments is None:
        environments = find_environments(facts.sessions, hosts)
    return Ranks(facts, environments, world_size)


def find_environments(sessions: list[Session], hosts: dict[str, bool] | None = None) -> dict[int, dict[str, str]]:
    """Return by session what the environments of processes on this machine say.

    `hosts` says of which addresses it is known whether they are of this machine; others are added.
    """
    local: dict[str, bool] = {} if hosts is None else hosts
    known: dict[int, dict[str, str]] = {}
    environments: dict[int, dict[str, str]] = {}
    found = {session.host for session in sessions if "rank" not in session.peer}
    unknown = found - local.keys()
    local.update(dict.fromkeys(unknown, False))
    local.update(dict.fromkeys(find_local(unknown), True))
    ours = {host for host in found if local[host]}
    for session in sessions if ours else ():
        host, pid = session.host, session.pid
        if host not in ours or not session.id or pid is None or session.carries is not None or "rank" in session.peer:
            continue
        if pid not in known:
            known[pid] = read_environment(pid)
        if known[pid]:
            environments[session.id] = known[pid]
    return environments
