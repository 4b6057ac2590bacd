"""Atheris target: whatever arrives, a session answers or raises PeerError, and memory stays within Limits.

    timeout 180 python tests/fuzz/fuzz_session.py -max_len=1024 FINDS tests/fuzz/corpus

FINDS is a folder for what the fuzzer finds. An input is a program for the machine in machine.py, which checks the
invariant; any exception is a find. tests/fuzz/test_corpus.py replays the corpus without atheris.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))

with atheris.instrument_imports(include=["tcpstore_async"]):
    from fuzz.machine import run


def fuzz(program: bytes) -> None:
    run(program)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
