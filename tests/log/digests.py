"""Executes the records of a journal again and prints digests of the state, the same in every process and build.

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
from tcpstore_async.log.encoding import decode
from tcpstore_async.log.journal import read_instance
from tcpstore_async.log.records import Reader
from tcpstore_async.log.replay import Replayer
from tcpstore_async.server.snapshots import engine_of

EVERY = 100


def look(folder: Path) -> dict[str, Any]:
    engine = engine_of(read_instance(folder))
    outputs = None if engine.links is None else engine.links.outputs
    assert outputs is not None
    replayer = Replayer(engine, lambda session, pieces: None)
    reader = Reader()
    count, wrong, digests = 0, [], []
    for segment in sorted(folder.glob("log-*")):
        for record in reader.read(segment.read_bytes()):
            for event in decode(record.events, record.now):
                replayer.execute(event)
            if outputs.take() != record.outputs:
                wrong.append(record.number)
            count += 1
            if count % EVERY == 0:
                digests.append(digest(engine, replayer.sessions))
    digests.append(digest(engine, replayer.sessions))
    return {"records": count, "wrong": wrong, "digests": digests}


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
