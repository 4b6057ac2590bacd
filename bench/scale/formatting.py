"""Format servers, numbers and ratios for readers.

Must not know files, samples or figures.
Invariant: a server is never named without its transport, a number never without its unit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.scale.results import Transport
from bench.stats import Ratio

SERVERS = {
    "uvloop": "ours on uvloop",
    "relay": "ours behind relays of 8 ranks",
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
    """Return a server's display name; an unknown one keeps its own."""
    return SERVERS.get(name, name)


def series(name: str, transport: Transport) -> str:
    """Return a server's display name with its transport."""
    return f"{server(name)}, {TRANSPORTS[transport]}"


def capitalized(name: str) -> str:
    """Capitalize the first letter only."""
    return name[:1].upper() + name[1:]


def sort_key(name: str, transport: Transport) -> tuple[int, str, bool]:
    """Sort ours first, then PyTorch's, the control, and others by name."""
    names = list(SERVERS)
    return (names.index(name) if name in names else len(names), name, transport != "sockets")


def digits(value: float, significant: int = 3) -> str:
    """Round to this many significant digits, but keep all before the point; separate thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    # Take the exponent of the rounded number: 0.9999 is 1.00 in three digits.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    after = max(0, significant - 1 - exponent)
    return f"{value:,.{after}f}"


def seconds(value: float) -> str:
    """Format seconds in a suitable unit: 15.3 µs."""
    return _scaled(value, _SECONDS)


def num_bytes(value: float) -> str:
    """Format bytes in a suitable unit: 1.50 KiB."""
    return _scaled(value, _BYTES)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return f"0 {units[-1][0] if units is _BYTES else 's'}"
    # 999.9 µs rounds to 1 ms.
    unit, scale = next(((unit, scale) for unit, scale in units if abs(value) >= scale * 0.9995), units[-1])
    return f"{digits(value / scale)} {unit}"


def short(size: int) -> str:
    """Format a size as the libuv tutorial does: 1K, 96K; others in full."""
    if size >= 1024 and size % 1024 == 0:
        return f"{size // 1024}K"
    return f"{size // 1_000_000}M" if size >= 1_000_000 and size % 1_000_000 == 0 else f"{size:,}"


def times(value: float) -> str:
    """Format a ratio: 0.92×."""
    return f"{value:,.2f}×" if 0.1 <= value < 100 else f"{digits(value, 2)}×"


def interval(low: float, high: float) -> str:
    return f"{times(low)[:-1]}–{times(high)[:-1]}"


def ratio(found: Ratio) -> str:
    """Format a ratio with its interval, or say why it has none."""
    if found.verdict == "too few rounds":
        return f"{times(found.median)} ({rounds(found.rounds)}, no interval)"
    if found.verdict == "noise unknown":
        return f"{times(found.median)} (noise unknown)"
    return f"{times(found.median)} ({interval(found.low, found.high)})"


def rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def spread(values: Sequence[float], unit: str = "") -> str:
    """Format the median, and in brackets the least and the greatest value."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}–{max(values):.2f})"
