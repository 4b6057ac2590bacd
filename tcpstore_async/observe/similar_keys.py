"""Families of keys that differ in a number, and the existing keys most similar to one that does not exist.

A wrong key mostly differs from an existing one in a number, a prefix or a letter. Must not know what keys mean, who
wrote them or where they are stored.

Invariant: comparing two keys takes a time and memory that are bounded.
"""

import re
from bisect import insort
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

MOST: Final = 5
"""Most keys that are found for one."""

LONGEST: Final = 512
"""Bytes of the longest key that is compared."""

_PROBES: Final = 8
"""Numbers tried on either side of each number of a key."""

_PLACES: Final = 4
"""Numbers of a key, the last ones, for which others are tried."""

_MOST_UNLIKE: Final = 0.4
"""Share of the bytes of two similar keys that may be outside of a common beginning and end, unless they end alike."""

_MOST_NUMBERS: Final = 16
"""Most numbers of a key that are compared as such."""

_OTHER_LETTERS: Final = LONGEST
"""Counts like as many other numbers."""

_NUMERALS: Final = "0123456789"
_DIGITS: Final = re.compile(r"[0-9]+")
_DIGITS_OF_BYTES: Final = re.compile(rb"[0-9]+")
_MOST_DIGITS: Final = 9
"""Most digits of a number that identifies a rank or step."""


class Family(NamedTuple):
    """Keys that differ in one number: the text before it, and after it."""

    before: str
    after: str

    def key(self, number: int) -> str:
        return f"{self.before}{number}{self.after}"

    def __str__(self) -> str:
        return f"{self.before}*{self.after}"


def family_of(key: str) -> tuple[Family, int] | None:
    """Return the family of a key by its last number, and that number; None if it has none."""
    before = key.rstrip(_NUMERALS)
    digits, after = key[len(before) :], ""
    if not digits:
        found = _DIGITS.search(key[::-1])  # forwards, the time could grow with the square of the length
        if found is None:
            return None
        begin, end = len(key) - found.end(), len(key) - found.start()
        before, digits, after = key[:begin], key[begin:end], key[end:]
    if len(digits) > _MOST_DIGITS or (digits[0] == "0" and digits != "0"):
        return None
    return Family(before, after), int(digits)


def number_after(before: str, key: str) -> int | None:
    """Return the number at the end of a key that surely belongs to the family with `before` and no `after`; else None.

    Much faster than `family_of`.
    """
    if key.startswith(before):
        digits = key[len(before) :]
        if digits.isdecimal() and digits[0] != "0" and digits.isascii() and len(digits) < _MOST_DIGITS:
            return int(digits)
    return None


def neighbours(key: str, exists: Callable[[str], bool]) -> list[str]:
    """Return, for each number in a key, the existing key that differs only in it, by little, and least."""
    found: list[str] = []
    for match in list(_DIGITS.finditer(key))[-_PLACES:]:
        digits = match[0]
        if len(digits) > _MOST_DIGITS:
            continue
        before, after, number = key[: match.start()], key[match.end() :], int(digits)
        padded = len(digits) if digits[0] == "0" else 0
        for distance in range(1, _PROBES + 1):
            near = [f"{before}{number - distance:0{padded}}{after}"] if number >= distance else []
            near = [name for name in [*near, f"{before}{number + distance:0{padded}}{after}"] if exists(name)]
            if near:
                found.append(near[0])
                break
    return found


class Nearest:
    """Finds, among existing keys, the ones most similar to one that does not exist, each in a different way.

    They differ in their numbers, or share most of their beginning and end.
    """

    def __init__(self, wanted: bytes) -> None:
        self._wanted = wanted
        self._letters = _without_numbers(wanted)
        self._end = self._letters.rpartition(b"/")[2]
        self._numbers = _numbers(wanted)
        if len(self._numbers) > _MOST_NUMBERS:
            self._numbers = []
        self._found: list[tuple[int, float, float, bytes, bytes]] = []
        """Nearest first: how many numbers differ, by how much, the age, the key, and in which way it differs."""

    def add(self, key: bytes, age: float) -> None:
        """Compare an existing key; of equally near ones, prefer the one with the least `age`."""
        if len(key) > LONGEST or len(self._wanted) > LONGEST or key == self._wanted:
            return
        way = _without_numbers(key)
        numbers = _numbers(key) if self._numbers and way == self._letters else []
        if numbers and len(numbers) == len(self._numbers):
            apart = [abs(one - other) for one, other in zip(self._numbers, numbers, strict=True)]
            measure = float(sum(apart))
            way = bytes([far > 0 for far in apart])
            places = sum(way)
        else:
            measure = _unlikeness(self._wanted, key)
            end = way.rpartition(b"/")[2]
            if measure > _MOST_UNLIKE and (not end or end != self._end):
                return
            places = _OTHER_LETTERS + (end != self._end)  # another end means something else
        found = self._found
        if len(found) == MOST and (places, measure, age) >= found[-1][:3]:
            return
        for one in found:
            if one[4] == way:
                if one[:3] <= (places, measure, age):
                    return
                found.remove(one)
                break
        insort(found, (places, measure, age, key, way))
        del found[MOST:]

    def found(self) -> list[bytes]:
        """Return the most similar keys, nearest first."""
        return [one[3] for one in self._found]


def _without_numbers(key: bytes) -> bytes:
    return key.translate(None, b"0123456789")


def _numbers(key: bytes) -> list[int]:
    return [int(digits[0][:18]) for digits in islice(_DIGITS_OF_BYTES.finditer(key), _MOST_NUMBERS + 1)]


def _unlikeness(one: bytes, other: bytes) -> float:
    """Return the share of the bytes of two keys that are not in a common beginning or end.

    Integers compare many bytes at once.
    """
    shorter = min(len(one), len(other))
    if not shorter:
        return 1.0
    differ = int.from_bytes(one[:shorter], "big") ^ int.from_bytes(other[:shorter], "big")
    begin = shorter - (differ.bit_length() + 7) // 8
    differ = int.from_bytes(one[-shorter:], "big") ^ int.from_bytes(other[-shorter:], "big")
    end = ((differ & -differ).bit_length() - 1) // 8 if differ else shorter
    return 1.0 - 2.0 * min(begin + end, shorter) / (len(one) + len(other))
