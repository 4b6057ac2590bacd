"""Play what the ranks of a job send (`bench/scale/start.py`) with the load generator, over thousands of connections.

Must not know what the requests are for.
Invariant: the load generator ends with the context or, if this process is killed, with it.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bench import loadgen
from bench.scale.start import GROUP, MEMBER, RANKS_PER_ROOT, ROOT, Action
from tcpstore_async.load.generator import LoadError, Unreachable, late

_WHO = {"all": 0, "roots": 1, "others": 2, "first": 3}
_PLACEHOLDERS = (GROUP, MEMBER, ROOT)
_U32 = struct.Struct("<I")


class Played(NamedTuple):
    """Times in seconds."""

    began: float
    """Of the monotonic clock, as `ended`: when the last rank had its last reply."""
    ended: float
    cpu: float
    """Of the load generator."""
    share: float
    """Of the time in which it computed or waited for a core."""
    requests: int
    parked: int
    """The most ranks that waited for the reply to a WAIT at the same time."""


def script(actions: Sequence[Action]) -> bytes:
    """Encode actions for the load generator's mode `play`: little-endian u32 numbers and bytes, see `play_load`."""
    replies: dict[tuple[int, bytes], int] = {}
    for action in actions:
        replies.setdefault((action.reply_bytes, action.reply), len(replies))
    found = [_numbers(RANKS_PER_ROOT, len(replies), len(actions))]
    for size, reply in replies:
        found += [_numbers(size, len(reply)), reply]
    for action in actions:
        found.append(_numbers(_WHO[action.senders.who], action.senders.size, action.senders.ranks))
        found.append(_numbers(replies[action.reply_bytes, action.reply], len(action.request), len(action.fields)))
        found += [_numbers(at, _PLACEHOLDERS.index(what)) for at, what in action.fields]
        found.append(action.request)
    return b"".join(found)


def _numbers(*numbers: int) -> bytes:
    return b"".join(map(_U32.pack, numbers))


class Player:
    """A load generator at work; made by `playing`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def result(self, limit: float) -> Played:
        """Wait, so many seconds at most, until all ranks are done. Raises LoadError."""
        try:
            out, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise late(limit, "some ranks are not done") from None
        if not out:
            raise LoadError(f"the load generator exited with status {self._process.returncode}")
        found = json.loads(out)
        if "error" in found:
            lost = found["errno"] in (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED)
            raise (Unreachable if lost else LoadError)(f"the load generator failed: {found['error']}")
        wall = found["ended"] - found["began"]
        share = (found["cpu"] + found["waited"]) / wall
        return Played(found["began"], found["ended"], found["cpu"], share, found["requests"], found["parked"])


@contextmanager
def playing(port: int, actions: Sequence[Action], others: int, seconds: float, cores: set[int]) -> Iterator[Player]:
    """Play the ranks but 0 of a job, which arrive within so many seconds; 0 for all at once. Raises LoadError."""
    try:
        generator = loadgen.build()
    except (OSError, subprocess.SubprocessError) as error:
        raise LoadError(f"the load generator needs a C compiler: {error}") from None
    with tempfile.NamedTemporaryFile() as file:
        file.write(script(actions))
        file.flush()
        words = ["-p", port, "-n", others, "-A", seconds, "-f", file.name, "-m", "play"]
        # In a session of its own: Ctrl-C is for the parent, which ends it.
        process = subprocess.Popen(
            [generator, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        player = Player(process)
        try:
            os.sched_setaffinity(process.pid, cores)
            yield player
        except LoadError:
            if process.poll():  # then this is the reason
                player.result(0)
            raise
        finally:
            process.kill()
            process.communicate()
