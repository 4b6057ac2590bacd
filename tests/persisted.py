"""Journals for the servers of tests that know of none, if TCPSTORE_TEST_PERSIST says how often they are synced.

`make test-persist` runs tests in that way: with a journal, peers see what they see without one.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tcpstore_async import serving

PROGRAM = f"""
import sys
sys.path.append({os.path.dirname(__file__)!r})
import persisted
persisted.install()
"""
"""What a program does first, so that its servers keep journals, too."""

SYNC = os.environ.get("TCPSTORE_TEST_PERSIST", "")


def folder() -> str:
    return tempfile.mkdtemp(prefix="tcpstore-journal-")


def options(words: list[str]) -> list[str]:
    """Return the options of a command line, with a journal."""
    if not SYNC or words[0] != "serve" or {"threaded", "--persist", "--owner-pid"} & {*words}:
        return words
    return [*words, "--persist", folder(), "--sync", SYNC]


def install() -> None:
    """Have servers of this process keep a journal."""
    if SYNC:
        plain = serving.serve

        def serve(*given: Any, **named: Any) -> Any:
            if named.get("backend") != "threaded":
                named = {"persist": folder(), "sync": SYNC, **named}
            return plain(*given, **named)

        serving.serve = serve
