"""What processes of one host do.

Must not know how that is found out, or what follows from it.
"""

import msgspec


class Collective(msgspec.Struct, omit_defaults=True, frozen=True):
    group: str
    name: str
    number: int
    """The sequence number."""
    sizes: str = ""
    since: float = 0.0
    """Seconds since it was entered."""


class Doing(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a process does."""

    state: str
    """`running`, `sleeping`, `waiting for a disk`, `stopped`, `traced`, `zombie` or `gone`."""
    wchan: str = ""
    """The kernel's function in which the main thread sleeps; empty if unknown."""
    call: str = ""
    """The system call of the main thread, where the kernel says so."""
    source: str = ""
    """`py-spy`, `responder` or `faulthandler`; empty if only the kernel was asked."""
    frames: tuple[str, ...] = ()
    """Of the main thread, innermost first, each `function (file.py:41)`."""
    collectives: tuple[Collective, ...] = ()
    """The last one of each process group."""
    no_stack: str = ""
    """Why there are no frames."""


class Group(msgspec.Struct, omit_defaults=True):
    """Processes of one host that do the same."""

    pids: list[int]
    doing: Doing
    cpu: list[float]
    """Share of a core that each used, in the order of pids."""
    switches: list[int] = []
    """How often the main thread of each has waited so far; one that has waited on since has the same number."""


class HostReport(msgspec.Struct, omit_defaults=True):
    host: str
    groups: list[Group]
    more: int = 0
    """Processes left out because of a limit."""


def fitted(report: HostReport, most: int) -> bytes:
    """Return a report of at most so many bytes as JSON, without its last groups if need be; empty if none is left."""
    while len(data := msgspec.json.encode(report)) > most:
        if not report.groups:
            return b""
        report.more += len(report.groups.pop().pids)
    return data
