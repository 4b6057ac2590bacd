"""Where ranks are, according to PyTorch's debug server (2.10 or later), where a job runs it.

Knows the page that lists the stacks of all ranks. Must not know sockets.
Invariant: a page of another form says nothing.
"""

import re
from typing import Final

REQUEST: Final = b"GET /stacks HTTP/1.0\r\nHost: localhost\r\n\r\n"
"""For one connection, which ends with the page."""
PORT: Final = 25999
"""Its port on rank 0's host, unless the job has chosen another one."""

_RANK: Final = re.compile(r"(\d{1,7}): [^<]*</h2>\s*<pre>")
_FRAME: Final = re.compile(r'^  File "(?:[^"]*/)?([^"/]+)", line (\d+) in (\S+)$', re.MULTILINE)


def read_stacks(page: str) -> dict[int, tuple[str, ...]]:
    """Return the frames of ranks' main threads, innermost first, each `function (file.py:41)`, keyed by rank."""
    found: dict[int, tuple[str, ...]] = {}
    for part in page.split("<h2>Rank ")[1:]:
        rank = _RANK.match(part)
        main = part.partition("</pre>")[0].rpartition("hread 0x")[2]  # faulthandler lists the main thread last
        if rank is not None and (frames := _FRAME.findall(main)):
            found[int(rank[1])] = tuple(f"{function} ({file}:{line})" for file, line, function in frames)
    return found
