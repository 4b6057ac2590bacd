"""Does the time that a forged token takes to be refused depend on where it differs? `python -m bench.token_timing`.

Tokens of several kinds are checked in random order, so that whatever disturbs the machine meets all kinds alike. All
are made from the same valid ones, right before: where one lies in memory must not tell it from others. Each kind is
compared with the first: the probability that a check of it takes longer (Mann-Whitney, ties count half), with its
99 % interval from 20 blocks. The last kind is the first one once more: what differs between these two is the
measurement's error.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import statistics
import time

from tcpstore_async.tokens import TokenKeys

OTHER = TokenKeys([("k1", b"of a server that has nothing to do with it")])

_TOKENS = 512
"""Tokens of each kind."""

_BLOCKS = 20

_STUDENT = 2.861
"""The quantile of Student's distribution for 99 % and so many blocks."""


Change = tuple[slice, bytes]
"""A part of a token, and what stands there in the forged one."""


def kinds(token: bytes) -> dict[str, Change]:
    """Return what is changed in a valid token, by kind. The length stays as it is."""
    mac = token.rindex(b".") + 1
    claims = token.index(b".", token.index(b".") + 1) + 1
    middle = (mac + len(token)) // 2
    first: Change = slice(mac, mac + 1), b"!"
    return {
        "signature, first byte": first,
        "signature, middle byte": (slice(middle, middle + 1), b"!"),
        "signature, last byte": (slice(len(token) - 1, len(token)), b"!"),
        "all of the signature": (slice(mac, len(token)), b"!" * (len(token) - mac)),
        "claims, first byte": (slice(claims, claims + 1), b"!"),
        "unknown key": (slice(claims - 3, claims - 1), b"zz"),
        "signature, first again": first,
    }


def measure(keys: TokenKeys, tries: int, rng: random.Random) -> dict[str, list[int]]:
    """Return the times, in ns, of so many checks of each kind."""
    valid = [keys.create(prefix="job/").encode() for _ in range(_TOKENS)]
    changes = kinds(valid[0])
    names = list(changes)
    made_of = list(changes.values())
    order = list(range(len(names))) * tries
    rng.shuffle(order)
    neutral = OTHER.create(prefix="job/").encode()
    taken = []
    clock, check, choice = time.perf_counter_ns, keys.check, rng.choice
    for number in order:  # nothing here but the token may depend on the kind
        made = bytearray(choice(valid))
        part, other = made_of[number]
        made[part] = other
        token = bytes(made)
        check(neutral, 0)  # so that caches and predictions are the same, however the token was made
        began = clock()
        check(token, 0)
        taken.append(clock() - began)
    by_kind: dict[str, list[int]] = {name: [] for name in changes}
    for number, nanoseconds in zip(order, taken, strict=True):
        by_kind[names[number]].append(nanoseconds)
    return by_kind


def superiority(these: list[int], those: list[int]) -> float:
    """Return the probability that one of these is above one of those; ties count half."""
    marked = sorted([(value, True) for value in these] + [(value, False) for value in those])
    ranks = 0.0
    at = 0
    while at < len(marked):
        stop = at
        mine = 0
        while stop < len(marked) and marked[stop][0] == marked[at][0]:
            mine += marked[stop][1]
            stop += 1
        ranks += mine * (at + stop + 1) / 2
        at = stop
    n = len(these)
    return (ranks - n * (n + 1) / 2) / (n * len(those))


def compare(these: list[int], those: list[int]) -> tuple[float, float]:
    """Return the mean of that over blocks of successive checks, and half the width of its 99 % interval.

    What disturbs the machine lasts for many checks: single ones are not independent of each other, blocks are.
    """
    size = len(these) // _BLOCKS
    parts = [slice(size * number, size * (number + 1)) for number in range(_BLOCKS)]
    found = [superiority(these[part], those[part]) for part in parts]
    return statistics.mean(found), _STUDENT * statistics.stdev(found) / math.sqrt(_BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100_000, help="checks of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    keys = TokenKeys([("k1", secrets.token_bytes(32)), ("k2", secrets.token_bytes(32))])
    taken = measure(keys, given.tries, rng)
    first, reference = next(iter(taken.items()))
    print(f"{given.tries:,} checks of each kind; P: that one takes longer than one of {first!r}, 99 % interval")
    for name, times in taken.items():
        found, half = compare(times, reference)
        verdict = "no difference" if abs(found - 0.5) <= half else "DIFFERS"
        text = "" if times is reference else f"  P = {found:.4f} ± {half:.4f}  {verdict}"
        print(f"{name:24} median {statistics.median(times):6.0f} ns{text}")


if __name__ == "__main__":
    main()
