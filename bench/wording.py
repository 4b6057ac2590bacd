"""How results are put into words: names of servers, numbers with their units.

Knows the names that `bench/records.py` uses. Must not know files, samples or figures.
Invariant: a server is never named without its transport, a number never without its unit.
"""

from __future__ import annotations

import math

from bench.records import Transport
from bench.stats import Ratio

SERVERS = {
    "uvloop": "ours on uvloop",
    "threaded": "ours with threads",
    "libuv": "PyTorch libuv",
    "legacy": "PyTorch legacy",
    "control": "control (the reference again)",
}
"""In the order of legends and tables."""

TRANSPORTS: dict[Transport, str] = {"sockets": "sockets", "memory": "memory (no sockets)"}

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def server(name: str) -> str:
    """As readers know it; one that nobody knows by its own name."""
    return SERVERS.get(name, name)


def line(name: str, transport: Transport) -> str:
    """A server with its transport."""
    return f"{server(name)}, {TRANSPORTS[transport]}"


def first(name: str) -> str:
    """As the first word of a sentence."""
    return name[:1].upper() + name[1:]


def place(name: str, transport: Transport) -> tuple[int, str, bool]:
    """By which servers are sorted: ours, PyTorch's, the control, others by name."""
    names = list(SERVERS)
    return (names.index(name) if name in names else len(names), name, transport != "sockets")


def digits(value: float, significant: int = 3) -> str:
    """With so many significant digits, but all before the point, and commas between thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    # The exponent is that of the rounded number: 0.9999 is 1.00 in three digits.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    after = max(0, significant - 1 - exponent)
    return f"{value:,.{after}f}"


def seconds(value: float) -> str:
    """Seconds, in the unit that suits: 15.3 µs."""
    return _scaled(value, _SECONDS)


def size_of(value: float) -> str:
    """Bytes."""
    return _scaled(value, _BYTES)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return f"0 {units[-1][0] if units is _BYTES else 's'}"
    # One part in a thousand less, so that 999.9 µs is 1 ms.
    unit, scale = next(((unit, scale) for unit, scale in units if abs(value) >= scale * 0.9995), units[-1])
    return f"{digits(value / scale)} {unit}"


def short(size: int) -> str:
    """A size on an axis, as the libuv tutorial writes them: 1K, 96K; those that are no such number in full."""
    if size >= 1024 and size % 1024 == 0:
        return f"{size // 1024}K"
    return f"{size // 1_000_000}M" if size >= 1_000_000 and size % 1_000_000 == 0 else f"{size:,}"


def times(value: float) -> str:
    """A ratio, such as 0.92×."""
    return f"{value:,.2f}×" if 0.1 <= value < 100 else f"{digits(value, 2)}×"


def between(low: float, high: float) -> str:
    return f"{times(low)[:-1]}–{times(high)[:-1]}"


def ratio(found: Ratio) -> str:
    """A ratio with its interval, which it takes `stats.LEAST_ROUNDS` and a known noise to have."""
    if found.verdict == "too few rounds":
        return f"{times(found.median)} ({rounds(found.rounds)}, no interval)"
    if found.verdict == "noise unknown":
        return f"{times(found.median)} (noise unknown)"
    return f"{times(found.median)} ({between(found.low, found.high)})"


def rounds(count: int) -> str:
    """So many: one round, 2 rounds."""
    return "one round" if count == 1 else f"{count} rounds"
