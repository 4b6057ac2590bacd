"""What a run of the benchmark leaves behind, as it stands in its JSON file.

Knows the shape of the results and how they are written and read. Must not know how anything is measured or drawn.
Invariant: a number that was not measured is not here; where a line ends, an `Ending` says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tcpstore_async.load.short import SATURATED as SATURATED

FORMAT = 1

Transport = Literal["sockets", "memory"]
"""Real connections over loopback, or the server's own sessions driven without sockets."""


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    open_files: int
    """What one process may have open, after asking for more."""
    backlog: int = 0
    """Connections that may wait to be accepted (net.core.somaxconn); 0: not known, as in older files."""
    load_average: float = 0.0
    """Of the minute before the run: what else was going on."""
    server_cores: str = ""
    """The processor cores that the servers were pinned to, such as `1`."""
    load_cores: str = ""
    """Those of the load; the same if there is one only, and the two compete for it."""
    names: Literal["", "files only", "this machine's"] = ""
    """Who tells PyTorch's servers, which ask for it, the name of a peer. Empty where none was measured."""


class Versions(msgspec.Struct, frozen=True):
    """What was measured."""

    tcpstore_async: str
    build: Literal["compiled", "interpreted"]
    commit: str
    python: str
    uvloop: str
    torch: str
    """Empty where PyTorch is not installed."""


class Sample(msgspec.Struct, frozen=True):
    """One measurement: one server, at one size, in one round of the interleaved rounds."""

    scenario: str
    """As `python -m bench scale --scenario` names it: init, barrier, barrier-opcode, herd, newcomers, ..."""
    server: str
    """`uvloop`, `threaded`, `libuv`, `legacy`, or `control` (the reference server a second time)."""
    transport: Transport
    size: Annotated[int, msgspec.Meta(ge=1)]
    """Ranks, in most scenarios; what it is says the scenario (`bench/scenarios.py`)."""
    round: int
    wall_seconds: float
    """What the scenario is about, from the first byte to rank 0's return."""
    operations: int
    """How many requests or ranks the times are for."""
    server_cpu_seconds: float
    generator_cpu_seconds: float
    generator_share: float
    """Of the time in which it had an order, how long the busiest generator process computed or waited for a core; from
    `SATURATED` on the generator, not the server, may have set the pace."""
    p50_seconds: float | None = None
    p95_seconds: float | None = None
    p99_seconds: float | None = None
    server_memory_bytes: int | None = None
    """By how much the server's resident memory has grown over the idle server's, where the scenario asks for it."""


class Ending(msgspec.Struct, frozen=True):
    """Why a server's line goes no further than it does."""

    scenario: str
    server: str
    transport: Transport
    size: int
    """The first size that was not measured."""
    reason: str
    """One sentence, as it stands in the figure."""


class Run(msgspec.Struct, frozen=True):
    """One run of the benchmark."""

    began: str
    """ISO 8601, UTC."""
    seconds: float
    command: str
    machine: Machine
    versions: Versions
    samples: list[Sample]
    endings: list[Ending]
    complete: bool
    """False after Ctrl-C or a failure: what was measured until then is here."""
    reference: str = "libuv"
    """The server that the others are compared with, which `control` is a second time."""
    format: int = FORMAT


def write(run: Run, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))


def read(path: Path) -> Run:
    """Raises ValueError, in one line, for a file that is no run, or one of another format."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: no results of this benchmark: {error}") from None
    if run.format != FORMAT:
        raise ValueError(f"{path}: written in format {run.format}, this benchmark reads {FORMAT}")
    return run
