"""Whether this process has a responder, which is imported only then: stores start it, and must not take longer for it.

Must not know what a responder does.
"""

import os
import sys
from typing import Final

SWITCH: Final = "TCPSTORE_STACKS"
"""Environment variable: 1 starts a responder, 0 has `install` start none."""


def wanted(default: bool = False) -> bool:
    """Return whether the environment asks for a responder; without a word there, `default`."""
    return os.environ.get(SWITCH, "1" if default else "") == "1" and sys.platform == "linux"


def start(default: bool = False) -> None:
    """Start the responder of this process if it is `wanted`. Idempotent."""
    if wanted(default):
        from . import responder

        responder.start()
