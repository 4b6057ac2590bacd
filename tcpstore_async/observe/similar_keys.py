"""Search of existing keys for the ones most similar to keys that do not exist.

A wrong key mostly differs from an existing one in a number, a prefix or a letter. Must not know what keys mean, who
wrote them or where they are stored.

Invariant: the cost is bounded, and grows with the number of keys, not with that number times the number of wanted keys.
It is paid in portions, so that a server can serve others in between.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from typing import Final, NamedTuple

MOST: Final = 5
"""Most keys returned as the nearest ones."""

_PROBES: Final = 8
"""Numbers tried on either side of each number of a key."""

_PLACES: Final = 4
"""Numbers of a key, the last ones, for which others are tried."""

COMPARISONS: Final = 2_000_000
"""Most keys with the same text but other numbers compared, in all: 1 µs each in plain Python."""

_SAME_END: Final = 200
"""Most keys with the same last component compared with one wanted key."""

_ENDS: Final = 100_000
"""Most keys with the same last component compared, in all."""

_SIMILAR: Final = 20_000
"""Most pairs of texts compared by edit distance, in all: 1 µs for each letter."""

_TEXTS: Final = 1000
"""Texts cached while keys are added."""

_LEAST_RATIO: Final = 0.7
"""Least similarity, from 0 to 1, of two texts."""

_LONGEST: Final = 256
"""Characters of a text above which it is not compared by edit distance."""

_PORTION: Final = 500
"""Keys compared in one portion."""

_LETTERS: Final = 50
"""Keys that one comparison by edit distance counts as."""

_NUMERALS: Final = "0123456789"
_DIGITS: Final = re.compile(r"[0-9]+")
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


def without_numbers(key: str) -> str:
    """Return a key with `#` in place of its numbers."""
    return _DIGITS.sub("#", key)


def numbers(key: str) -> tuple[int, ...]:
    """Return the numbers in a key."""
    return tuple([int(digits[:18]) for digits in _DIGITS.findall(key)])


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


def _no_age(key: str) -> float:
    return 0.0


class Search:
    """Search of existing keys for the most similar to wanted ones: with other numbers, another prefix or other letters.

    First `add` the existing keys, then call `compare` until it returns True. The first wanted keys get more effort.
    """

    def __init__(
        self,
        wanted: list[str],
        exists: Callable[[str], bool],
        age: Callable[[str], float] = _no_age,
        similar: int = _SIMILAR,
        longest: int = _LONGEST,
        numbered: int = COMPARISONS,
    ) -> None:
        """Look for `wanted` keys; of equally near existing keys, prefer the one with the least `age`.

        At most `similar` texts of at most `longest` characters are compared by edit distance, and `numbered` keys with
        the same text but other numbers.
        """
        self._age = age
        self._similar_left = similar
        self._longest = longest
        self._numbered_left = numbered
        self._candidates: dict[str, dict[str, bool]] = {}
        self._ends: set[str] = set()
        self._texts: set[str] = set()
        self._far: set[str] = set()
        """Texts of wanted keys without a neighbour, for which all keys of the same text must be compared."""
        for name in wanted:
            near = neighbours(name, exists)
            self._candidates[name] = dict.fromkeys(near, True)
            text = without_numbers(name)
            self._texts.add(text)
            if not near:
                self._far.add(text)
            self._ends.add(_end(name))
        self._same_text: dict[str, list[str]] = {}
        self._same_end: dict[str, list[str]] = {}
        self._first_of: dict[str, str] = {}
        """The first key of each other text."""
        self._text_before: dict[str, str] = {}
        """Cache: the text of what precedes the last number of a key."""
        self._work = self._compare()

    def add(self, names: Iterable[str]) -> None:
        """Add existing keys."""
        for name in names:
            text = self._text(name)
            if text not in self._texts:
                if text not in self._first_of:
                    self._first_of[text] = name
            elif text in self._far:
                self._same_text.setdefault(text, []).append(name)
            end = _end(name)
            if end in self._ends:
                alike = self._same_end.setdefault(end, [])
                if len(alike) < _SAME_END:
                    alike.append(name)

    def _text(self, name: str) -> str:
        """Return `without_numbers`; faster for many keys that differ in a number at their end."""
        before = name.rstrip(_NUMERALS)
        text = self._text_before.get(before)
        if text is None:
            if len(self._text_before) >= _TEXTS:
                self._text_before.clear()
            text = self._text_before[before] = without_numbers(before)
        return text if len(before) == len(name) else text + "#"

    def compare(self) -> bool:
        """Compare a portion of the keys; return True once all are compared."""
        for _ in self._work:
            return False
        return True

    def nearest(self, wanted: str) -> list[str]:
        """Return the keys most similar to a wanted one, nearest first."""
        found = [name for name in self._candidates[wanted] if name != wanted]
        found.sort(key=lambda name: _distance(wanted, name, self._age(name)))
        return found[:MOST]

    def _compare(self) -> Iterator[None]:
        ends_left = _ENDS
        parsed: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        similar: dict[str, list[str]] = {}
        for name, candidates in self._candidates.items():
            text = without_numbers(name)
            same = self._same_text.get(text, [])
            if not candidates and len(same) <= self._numbered_left:
                self._numbered_left -= len(same)
                if text not in parsed:
                    parsed[text] = []
                    for at in range(0, len(same), _PORTION):
                        parsed[text] += [(numbers(other), other) for other in same[at : at + _PORTION]]
                        yield
                best = _OtherNumber(numbers(name), self._age)
                for at in range(0, len(same), _PORTION):
                    best.add(parsed[text][at : at + _PORTION])
                    yield
                candidates.update(dict.fromkeys(best.found(), True))
            alike = self._same_end.get(_end(name), [])[:ends_left]
            ends_left -= len(alike)
            for other in _two_least_different(name, alike):
                candidates.setdefault(other, True)
            yield
            if len(candidates) < 2:
                if text not in similar:
                    similar[text] = []
                    yield from self._find_similar(text, similar[text])
                candidates.update(dict.fromkeys(similar[text], True))

    def _find_similar(self, text: str, similar: list[str]) -> Iterator[None]:
        """Append the keys of the two most similar texts."""
        if len(text) > self._longest:
            return
        matcher = SequenceMatcher(autojunk=False)
        matcher.set_seq2(text)
        found: list[tuple[float, str]] = []
        cost = 0
        for other in self._first_of:
            if self._similar_left <= 0:
                break
            both = len(other) + len(text)
            if len(other) > self._longest or 2 * min(len(other), len(text)) < _LEAST_RATIO * both:
                continue
            self._similar_left -= 1
            cost += _LETTERS
            matcher.set_seq1(other)
            if matcher.quick_ratio() >= _LEAST_RATIO:
                cost = _PORTION
                ratio = matcher.ratio()
                if ratio >= _LEAST_RATIO:
                    found.append((-ratio, other))
            if cost >= _PORTION:
                cost = 0
                yield
        similar += [self._first_of[other] for _, other in sorted(found)[:2]]


class _OtherNumber:
    """For each place of a number, the key that differs only there, and least; failing that, one that differs in two."""

    def __init__(self, wanted: tuple[int, ...], age: Callable[[str], float]) -> None:
        self._wanted = wanted
        self._age = age
        self._best: dict[int, tuple[int, float, str]] = {}
        self._twice = ""
        self._least = 0

    def add(self, keys: list[tuple[tuple[int, ...], str]]) -> None:
        """Compare keys with the same text, given with their numbers."""
        wanted = self._wanted
        for found, name in keys:
            places = [place for place in range(len(wanted)) if found[place] != wanted[place]]
            if len(places) == 1:
                place = places[0]
                far = abs(found[place] - wanted[place])
                known = self._best.get(place)
                if known is None or far < known[0] or (far == known[0] and self._age(name) < known[1]):
                    self._best[place] = far, self._age(name), name
            elif len(places) == 2 and not self._best:
                far = sum([abs(found[place] - wanted[place]) for place in places])
                if not self._twice or far < self._least:
                    self._twice, self._least = name, far

    def found(self) -> list[str]:
        if self._best:
            return [name for _, _, name in self._best.values()]
        return [self._twice] if self._twice else []


def _end(key: str) -> str:
    """Return the last component of a key."""
    return key.rpartition("/")[2]


def _distance(wanted: str, key: str, age: float) -> tuple[bool, int, float]:
    """Return a sort key of how much a key differs: first by another last component, which means something else."""
    other_end = without_numbers(_end(wanted)) != without_numbers(_end(key))
    return other_end, _difference(wanted, key), age


def _two_least_different(wanted: str, keys: list[str]) -> list[str]:
    return sorted(keys, key=lambda key: _difference(wanted, key))[:2]


def _difference(one: str, other: str) -> int:
    """Return the number of characters of both that are not in a common prefix or suffix."""
    shorter = min(len(one), len(other))
    begin = 0
    while begin < shorter and one[begin] == other[begin]:
        begin += 1
    end = 0
    while end < shorter - begin and one[-1 - end] == other[-1 - end]:
        end += 1
    return len(one) + len(other) - 2 * (begin + end)
