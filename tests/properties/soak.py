"""Compare sessions with the model for long: `python tests/properties/soak.py --commands 10000000 --seed 1`.

Commands are made in seeded epochs. A difference is shrunk and printed with the seed of its epoch, which `--epoch`
reproduces.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from properties.fleet import Difference, Driver, Step, run_epoch, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epoch", type=int, help="run only the epoch of this seed")
    options = parser.parse_args()
    if options.epoch is not None:
        return _epoch(options.epoch)
    began = time.monotonic()
    reported = began
    done = epochs = 0
    while done < options.commands:
        seed = options.seed * 1_000_000_000 + epochs
        try:
            done += run_epoch(seed)
        except Exception:
            return _epoch(seed)
        epochs += 1
        if time.monotonic() > reported + 30:
            reported = time.monotonic()
            print(f"{done:,} commands, {(reported - began) / done * 1e6:.1f} µs each", file=sys.stderr, flush=True)
    print(f"seed {options.seed}: {done:,} commands, {epochs:,} epochs, {time.monotonic() - began:.0f} s, no difference")
    return 0


def _epoch(seed: int) -> int:
    steps: list[Step] = []
    try:
        print(f"epoch {seed}: {run_epoch(seed, steps):,} commands, no difference")
        return 0
    except Exception as error:
        print(f"epoch {seed}: {error if isinstance(error, Difference) else repr(error)}"[:2000])
    driver = Driver(seed)
    for step in shrink(driver.slots, driver.fleet.soft, steps, driver.lists):
        print(f"    {step}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
