"""What a process does, in words: "sleeping in read (dataset.py:41)", "all_reduce of default_pg (train.py:98)".

Knows the report about a process, and the names of files between a program and the kernel. Must not know ranks.
Invariant: two processes that do the same have the same words, on whatever host; no words depend on times.
"""

import re
from typing import Final, NamedTuple

from ..stacks.report import Collective, Doing

IDLE: Final = 0.05
"""Share of a core up to which a process only waits."""
BUSY: Final = 0.5
"""Share of a core from which on a process runs, whatever its state was at the moment of the look."""

_FRAME: Final = re.compile(r"(\S+) \((.+?)(:\d+)?\)$")

_TORCH: Final = frozenset({"distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "rendezvous.py"})
"""Files of torch.distributed whose functions are called by programs."""
_WRAPPER: Final = "wrapper"
"""What decorates these functions."""

_LIBRARIES: Final = _TORCH | {
    *("threading.py", "queue.py", "queues.py", "connection.py", "selectors.py", "socket.py", "ssl.py", "subprocess.py"),
    *("popen_fork.py", "process.py", "synchronize.py", "base_events.py", "runners.py", "_base.py", "contextlib.py"),
    *("dataloader.py", "fetch.py", "_utils.py", "module.py", "_tensor.py", "_contextlib.py", "eval_frame.py"),
}
"""Files in which nobody looks for the cause: a program's own line is outside."""

_IMPORTING: Final = "<frozen importlib"

_STARTING: Final = frozenset({"init_process_group", "new_group", "split_group", "rendezvous"})
_NO_COLLECTIVES: Final = _STARTING | {"destroy_process_group", "abort_process_group"}
"""Functions of torch.distributed in which a rank may wait, which are no collectives."""

ALIVE: Final = frozenset({"running", "sleeping", "waiting for a disk"})
_HELD: Final = {"stopped": "stopped (SIGSTOP)", "traced": "stopped by a debugger", "zombie": "ended (zombie)"}


class Activity(NamedTuple):
    """What a process does."""

    words: str
    collective: Collective | None = None
    """The collective that it is in, if known."""
    starts: bool = False
    """Whether it imports modules, or makes a process group."""
    held: bool = False
    """Whether it does nothing until somebody acts."""


def describe(doing: Doing, busy: bool = False) -> Activity:
    """Describe a process, which may be `busy`."""
    last = min(doing.collectives, key=lambda one: one.since, default=None)
    place, function, called = _places(doing.frames)
    if doing.state in _HELD:
        where = f" in {called or function}{place}" if place else ""
        return Activity(f"{_HELD[doing.state]}{where}", held=True)
    if called in _NO_COLLECTIVES:
        return Activity(f"{called}{place}", starts=called in _STARTING)
    if called:
        if last is None or not _may_be(called, last.name):  # such as a recv, which is not numbered
            return Activity(f"{called}{place}")
        return Activity(f"{called} #{last.number} of {last.group}{place}", last)
    state = "running" if busy else doing.state
    where = (doing.call if state == "sleeping" else "") or function or doing.call or doing.wchan
    words = " in ".join(filter(None, (state, f"{where}{place}")))
    return Activity(words, starts=any(_IMPORTING in frame for frame in doing.frames))


def _places(frames: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the program's own innermost line, its function, and the function of torch.distributed called there.

    The line is in parentheses; it is the innermost one if all frames are in libraries.
    """
    called = ""
    innermost = ("", "")
    for frame in frames:
        found = _FRAME.match(frame)
        if found is None:
            continue
        function, file = found[1].rpartition(".")[2], found[2]  # py-spy knows qualified names
        here = f" ({file}{found[3] or ''})", function
        if file in _TORCH:
            if function != _WRAPPER:
                called = function
        elif file not in _LIBRARIES and not file.startswith("<frozen"):
            return *here, called
        innermost = innermost if innermost[0] else here
    return *innermost, called


def _may_be(function: str, name: str) -> bool:
    """Return whether a function of torch.distributed may make what the flight recorder calls by this name.

    `all_gather_into_tensor` makes an `_all_gather_base`, and `barrier` may make an `all_reduce_barrier`.
    """
    return function.replace("_", "")[:4] in name.replace("_", "").lower()
