"""What a connection may cost: a store of 96,000 ranks must stay small."""

import struct
import sys
import tracemalloc

import pytest

from support import HANDSHAKE, blob
from tcpstore_async import Limits
from tcpstore_async.observe.history import History
from tcpstore_async.serving import build
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store

BUDGET = {"compiled": 440, "interpreted": 760 if sys.version_info < (3, 14) else 1_440}
"""Bytes of one session with all that is known of its peer, after the start of a rank.

From 3.14 on, Python shares the names of fewer attributes among objects, so that each session has a dictionary.
"""

SESSIONS = 2_000


@pytest.mark.parametrize("observed", [False, True])
def test_a_session_stays_within_its_budget(observed: bool) -> None:
    store = Store(Limits())
    if observed:
        store.observe(History(store))
    start = HANDSHAKE + b"\x0d1234" + b"\x04" + blob(b"init/") + struct.pack("<q", 1)
    sessions: list[ServerSession] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(SESSIONS):
            session = ServerSession(store, None, "127.0.0.1", 10_000 + number, 1.5)
            session.receive(start)
            session.out.clear()
            session.unsent = 0
            sessions.append(session)
        each = (tracemalloc.get_traced_memory()[0] - before) / SESSIONS
    finally:
        tracemalloc.stop()
    assert each <= BUDGET[build()], f"{each:.0f} bytes a session"
