"""The ranks of a job, numbered with the help of environments of processes on the server's machine.

Knows where environments are read. Must not know how ranks are numbered.
"""

from ...client.admin import find_local, read_environment
from ...diagnosis.facts import Facts, Session
from ...diagnosis.stock_ranks import Ranks


def local_ranks(facts: Facts, world_size: int | None, hosts: dict[str, bool] | None = None) -> Ranks:
    """Return the ranks; `world_size` is their number, for a server that may not know it.

    Facts from another machine contain the environments. For `hosts` see `find_environments`.
    """
    environments = facts.environments
    if environments is None:
        environments = find_environments(facts.sessions, hosts)
    return Ranks(facts, environments, world_size)


def find_environments(sessions: list[Session], hosts: dict[str, bool] | None = None) -> dict[int, dict[str, str]]:
    """Return the environments of processes on this machine, keyed by session.

    `hosts` caches which addresses are this machine's; new ones are added.
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
