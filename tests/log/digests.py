"""Executes the records of a journal behind its snapshot again, and prints digests of the state, the same everywhere.

    python tests/log/digests.py DIR

Reads only. Prints one line of JSON: how many records there are, those behind which links were sent something else than
before, and a digest of the state behind every hundredth record and the last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from replaying import digest
from tcpstore_async.log.events import Engine
from tcpstore_async.log.journal import read_instance, read_records, read_snapshot
from tcpstore_async.log.records import Reader
from tcpstore_async.log.replay import Replayer
from tcpstore_async.log.snapshot import restore
from tcpstore_async.server.persistence import execute
from tcpstore_async.server.snapshots import engine_of
from tcpstore_async.wire.values import framed

EVERY = 100


def contents(engine: Engine) -> dict[str, Any]:
    """The values and queues of each store, by name, and how many wait there: what they mean, in JSON."""
    found: dict[str, Any] = {}
    for store in engine.root.hub.stores:
        keyspace = store.keyspace
        values = {repr(key): repr(framed(value)) for key, value in keyspace.values.items()}
        queues = {repr(key): [repr(bytes(item)) for item in items] for key, items in keyspace.queues.items()}
        found[store.name] = {"values": values, "queues": queues, "awaited": sorted(map(repr, keyspace.waiters))}
    return found


def look(folder: Path, meaning: bool = False) -> dict[str, Any]:
    """Return what is printed; with `meaning`, what the state means instead of digests, which any change changes."""
    engine = engine_of(read_instance(folder))
    outputs = None if engine.links is None else engine.links.outputs
    assert outputs is not None
    replayer = Replayer(engine, lambda session, pieces: None)
    snapshot = read_snapshot(folder)
    restore(snapshot, replayer)
    count, wrong, digests = 0, [], []
    for record in read_records(folder, Reader(snapshot)):
        if not execute(replayer, record, outputs):
            wrong.append(record.number)
        count += 1
        if count % EVERY == 0:
            digests.append(digest(engine, replayer.sessions))
    digests.append(digest(engine, replayer.sessions))
    if meaning:
        return {"records": count, "wrong": wrong, "stores": contents(engine)}
    return {"records": count, "wrong": wrong, "digests": digests}


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
