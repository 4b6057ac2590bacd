"""What a recorder takes from a connection that presents a token: everything but that."""

from __future__ import annotations

from conformance.frames import auth, get, set_
from support import HANDSHAKE, blob
from tcpstore_async.tools.load.observer import Observer, Processes
from tcpstore_async.tools.load.recording import RowEncoder


def test_tokens_are_not_recorded() -> None:
    rows = RowEncoder(0.0, "now", values=True)
    observer = Observer(rows, 0, "10.0.0.7", Processes(), 0.0)
    data = HANDSHAKE + auth(b"tcps1.the.token") + set_(b"/k", b"v") + get(b"/k")
    for at in range(len(data)):
        observer.sent(data[at : at + 1], 1.0)
    observer.replied(blob(b'{"status":"ok","id":"of the token"}') + blob(b"v"), 2.0)
    observer.closed("client", 3.0)
    taken = rows.take()
    assert not observer.opaque
    assert b"token" not in taken
    assert b"AUTH" not in taken
    assert [name in taken for name in (b'"VALIDATE"', b'"SET"', b'"GET"', b'"REPLY"')] == [True] * 4
