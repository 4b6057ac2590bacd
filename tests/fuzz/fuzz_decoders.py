"""Atheris target for one of the decoders in decoders.py, which says what must hold; any exception is a find.

    timeout 180 python tests/fuzz/fuzz_decoders.py identity -max_len=512 FINDS SEEDS

FINDS is a folder for what the fuzzer finds, SEEDS one that is filled with what decoders.py has to begin with.
tests/fuzz/test_decoders.py replays these, and what was found, without atheris.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))

with atheris.instrument_imports(include=["tcpstore_async"]):
    from fuzz.decoders import DECODERS, SEEDS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    seeds = Path(sys.argv[-1])
    seeds.mkdir(exist_ok=True)
    for seed, data in SEEDS[name].items():
        Path(seeds, seed).write_bytes(data)
    atheris.Setup(sys.argv, DECODERS[name])
    atheris.Fuzz()
