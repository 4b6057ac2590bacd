"""Which of many keys are most like some that do not exist.

A key that nobody will write mostly differs from one that exists in a number, a prefix or a letter. Must not know what
keys mean, who wrote them or where they are stored.

Invariant: the cost is bounded, and grows with the number of keys, not with that number times the number of keys that
are wanted. It is paid in portions, so that a server can serve others in between.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from typing import Final, NamedTuple

MOST: Final = 5
"""Keys that are named as the nearest ones."""

_PROBES: Final = 8
"""Numbers on either side that are tried in place of each number of a key."""

_PLACES: Final = 4
"""Numbers of a key, the last ones, for which that is done."""

COMPARISONS: Final = 2_000_000
"""Keys with the same text but other numbers that are looked at, in all: a microsecond for each in plain Python."""

_SAME_END: Final = 200
"""Keys with the same last component that are looked at, for each that is wanted."""

_ENDS: Final = 100_000
"""The same in all."""

_SIMILAR: Final = 20_000
"""Pairs of texts that are compared letter by letter, in all: a microsecond for each letter."""

_TEXTS: Final = 1000
"""Texts that are kept while existing keys are looked at."""

_LEAST_RATIO: Final = 0.7
_LONGEST: Final = 256
"""Characters of a key above which it is not compared letter by letter."""

_PORTION: Final = 500
"""Keys that are compared in one portion; texts that are compared letter by letter count 50."""

_LETTERS: Final = 50

_NUMERALS: Final = "0123456789"
_DIGITS: Final = re.compile(r"[0-9]+")
_MOST_DIGITS: Final = 9


class Family(NamedTuple):
    """Keys that differ in one number: what precedes it, and what follows."""

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
    """Return the number of a key that is sure to be of the family of `before`, which nothing follows; else None.

    This is much faster than `family_of`.
    """
    if key.startswith(before):
        digits = key[len(before) :]
        if digits.isdecimal() and digits[0] != "0" and digits.isascii() and len(digits) < _MOST_DIGITS:
            return int(digits)
    return None


def without_numbers(key: str) -> str:
    """Return a key with its numbers left out."""
    return _DIGITS.sub("#", key)


def numbers(key: str) -> tuple[int, ...]:
    """Return the numbers in a key."""
    return tuple([int(digits[:18]) for digits in _DIGITS.findall(key)])


def neighbours(key: str, exists: Callable[[str], bool]) -> list[str]:
    """Return for each number in a key the existing key that differs in it only, by little, and least."""
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
    """Looks for the existing keys most like some wanted ones: which differ in one number; or end alike; or differ in
    some letters.

    First `look` at the existing keys, then call `compare` until it is done. Keys wanted first get more care.
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
        """`age` of an existing key decides between keys that are equally near. `similar` is how many texts are compared
        letter by letter at most, and `longest` how many characters they have; `numbered` is how many keys with the same
        text but other numbers are looked at.
        """
        self._age = age
        self._similar_left = similar
        self._longest = longest
        self._numbered_left = numbered
        self._candidates: dict[str, dict[str, bool]] = {}
        self._ends: set[str] = set()
        self._texts: set[str] = set()
        self._far: set[str] = set()
        """Texts of wanted keys without a neighbour: the numbers of others have to be compared."""
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
        """By text: the first key that has it."""
        self._text_before: dict[str, str] = {}
        """By what precedes the last number of a key: the text of that, for the keys that follow."""
        self._work = self._compare()

    def look(self, names: Iterable[str]) -> None:
        """Take note of existing keys."""
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
        """Do the same as `without_numbers`, faster for many keys that differ in a number at their end."""
        before = name.rstrip(_NUMERALS)
        text = self._text_before.get(before)
        if text is None:
            if len(self._text_before) >= _TEXTS:
                self._text_before.clear()
            text = self._text_before[before] = without_numbers(before)
        return text if len(before) == len(name) else text + "#"

    def compare(self) -> bool:
        """Compare a portion of what was looked at; True once all is done."""
        for _ in self._work:
            return False
        return True

    def nearest(self, wanted: str) -> list[str]:
        """Return the keys most like a wanted one, the nearest first."""
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
                    best.look(parsed[text][at : at + _PORTION])
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
        """Find keys whose text differs in some letters, the two most similar."""
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
    """For each place of a number the key that differs only there, and least; else one that differs in two."""

    def __init__(self, wanted: tuple[int, ...], age: Callable[[str], float]) -> None:
        self._wanted = wanted
        self._age = age
        self._best: dict[int, tuple[int, float, str]] = {}
        self._twice = ""
        self._least = 0

    def look(self, keys: list[tuple[tuple[int, ...], str]]) -> None:
        """Consider keys with the same text, and their numbers."""
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
    """Return a measure of how much a key differs: one with another last component is another thing."""
    other_end = without_numbers(_end(wanted)) != without_numbers(_end(key))
    return other_end, _difference(wanted, key), age


def _two_least_different(wanted: str, keys: list[str]) -> list[str]:
    return sorted(keys, key=lambda key: _difference(wanted, key))[:2]


def _difference(one: str, other: str) -> int:
    """Return how many characters remain of both without what they begin with, and end with, in common."""
    shorter = min(len(one), len(other))
    begin = 0
    while begin < shorter and one[begin] == other[begin]:
        begin += 1
    end = 0
    while end < shorter - begin and one[-1 - end] == other[-1 - end]:
        end += 1
    return len(one) + len(other) - 2 * (begin + end)
