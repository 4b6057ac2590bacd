"""The last collective of each process group of this process, as PyTorch's flight recorder has it.

Knows the form of its dump, which is private to PyTorch. Must not import PyTorch.
Invariant: without PyTorch, without the recorder, or where the form is another, there are no collectives and no error.
"""

import sys
import time
from typing import Final

import msgspec

from .report import Collective

_MODULE: Final = "torch._C._distributed_c10d"
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Of gloo, and of NCCL."""


_DEFAULT: Final = "default_pg"
"""The description of the group of all ranks."""


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    """The group's name, and its description."""
    profiling_name: str
    collective_seq_id: int
    is_p2p: bool
    time_created_ns: int
    input_sizes: list[list[int]]


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


def last_collectives() -> tuple[Collective, ...]:
    """Return the last collective of each group. Sends and receives are none."""
    module = sys.modules.get(_MODULE)
    last: dict[tuple[str, str], _Entry] = {}
    for name in _DUMPS:
        try:
            dump = msgspec.json.decode(getattr(module, name)(True, False), type=_Dump)
        except Exception:
            continue  # private: any error means that it is not what it was
        last.update((one.process_group, one) for one in dump.entries if not one.is_p2p)
    return tuple(_collective(one) for one in last.values())


def _collective(entry: _Entry) -> Collective:
    name, description = entry.process_group
    if description in ("", "undefined"):
        description = name
    elif description != _DEFAULT:  # groups of other ranks may have the same
        description = f"{description} ({name})"
    return Collective(
        description,
        entry.profiling_name.rpartition(":")[2],
        entry.collective_seq_id,
        ", ".join(map(str, entry.input_sizes)),
        max(time.time() - entry.time_created_ns / 1e9, 0.0),
    )
