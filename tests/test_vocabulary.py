"""One word for one thing: the field's words, in code and documents alike.

docs/design.md lists the terms. Here are the words that this project once used in a private sense, and what to write
instead. Identifiers, comments, docstrings and other strings are searched, and all text that is not Python.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("tcpstore_async", "demo", "examples") for path in (ROOT / folder).rglob("*.py"))
TOOLS = sorted(path for folder in ("bench", "tools") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
TESTED = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
"""Modules of tests. This one quotes the words."""

OTHERS = ("Makefile", "pyproject.toml", "setup.py", ".gitignore", ".pre-commit-config.yaml")
FOLDERS = (
    ".ci",
    ".github",
    "bench",
    "deploy",
    "docs",
    "examples",
    "tcpstore_async/tools/web/page",
    "tests/simulation",
    "tools",
)
SUFFIXES = {
    "",
    ".c",
    ".cfg",
    ".css",
    ".html",
    ".js",
    ".json",
    ".md",
    ".service",
    ".sh",
    ".socket",
    ".toml",
    ".yaml",
    ".yml",
}
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / name for name in OTHERS if (ROOT / name).exists()),
        *(
            path
            for folder in FOLDERS
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix in SUFFIXES
        ),
    }
)
"""Documents, and all text that is not in modules of Python."""

INSTEAD = {
    "bell": "callback",
    "blob": "value",
    "complaint": "rate-limited log",
    "dirty": "pending flush",
    "door": "transport, connection",
    "floor": "layer; lower bound",
    "herd": "ranks, peers; thundering herd is fine",
    "lane": "connection",
    "newcomer": "new connection, rank of the next round",
    "room": "module; capacity, buffer, space",
    "shape": "codec, layout",
    "unread": "unsent",
}
"""Words that have no place here, in the singular, and what to write."""

PHRASES = {
    r"(?<![a-z])(?:in|out of) line(?!s?\b [\d{]| with| of code)(?![a-z])": "queue of waiters, or waiting",
    r"(?:join|joins|joined|leave|leaves|before) the line(?![a-z])": "queue of waiters",
    r"(?:next|first|place) in (?:the |a |one )?line(?![a-z])": "queue of waiters",
    r"long line (?:of waiters|under|for)|waiting line": "queue of waiters",
    r"(?<![a-z])(?:its|their|whose|have a|had a) turns?(?![a-z])": "iteration, lock",
    r"turns? of (?:this|that|a|another|other) (?:thread|process)": "lock",
    r"(?<![a-z])(?:take|takes|took) turns?(?![a-z])": "lock, queue",
}
"""Phrases in which a word that is fine elsewhere has a private sense."""

ALLOWED = (
    r"thundering[- _]herds?",
    r"(?:mak(?:e|es|ing)|made|no|enough|has|have|leaves?)[ _]room(?![a-z])|(?<![a-z])room (?:for|to)(?![a-z])",  # space
    r"math\.floor",
    r"--dirty",  # git's
    r"for \w+ in lines?",  # code in an f-string
    r"unread_(?:soft|hard)_bytes|`herd`|`newcomers`",  # limits and scenarios that the changelog names
    r"bench/spike/doors\.py",  # in an old commit
    r"/blob/",  # in URLs of GitHub
)

FRAMES = re.compile(r"_*blob(?:_of)?")
"""In tests, the function that writes a key or a value as it is in a frame, with its length before it."""

NO_TEXT_LINES = (
    "keyspace.py",
    "waiters.py",
    "waiter_types.py",
    "pool.py",
    "wait_queue.py",
    "aio.py",
    "async_connection.py",
)
"""Modules in which a line would not be one of text."""

_WORDS = {word: re.compile(rf"(?<![a-z]){word}s?(?![a-z])") for word in INSTEAD}
_PHRASES = {re.compile(pattern): instead for pattern, instead in PHRASES.items()}
_ANY = re.compile("|".join([*PHRASES, *INSTEAD]))
"""What most texts have not, so that nothing more has to be searched for."""
_ALLOWED = re.compile("|".join(ALLOWED))
_TURNS = re.compile(r"_*(?:turns|Turns?|(?:take|end)_turn)")
_TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def in_text(text: str) -> Iterator[str]:
    """Yield each word or phrase of a text that must not be there, with what to write."""
    text = re.sub(r"\s*\n[\s#]*", " ", text).lower()
    if not _ANY.search(text):
        return
    text = _ALLOWED.sub("", text)
    for word, pattern in _WORDS.items():
        if pattern.search(text):
            yield f"{word} (say: {INSTEAD[word]})"
    for pattern, instead in _PHRASES.items():
        if found := pattern.search(text):
            yield f"{found[0]!r} (say: {instead})"


@functools.cache
def in_words(name: str) -> tuple[str, ...]:
    """Return each word of an identifier that must not be there. Most identifiers occur many times."""
    return tuple(in_text(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)))


def in_name(name: str, file: str) -> Iterator[str]:
    """Yield what is wrong with an identifier."""
    for found in in_words(name):
        yield f"{name}: {found}"
    if _TURNS.fullmatch(name):
        yield f"{name}: turn (say: lock, queue)"
    if file in NO_TEXT_LINES and re.fullmatch(r"_*lines?", name):
        yield f"{name}: line (say: queue, waiters)"


def in_source(path: Path) -> Iterator[str]:
    """Yield what is wrong in a module, with line numbers."""
    comment: list[str] = []
    in_test = path.is_relative_to(ROOT / "tests")
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        found: Iterator[str] = iter(())
        if token.type == tokenize.NAME:
            if token.line[: token.end[1]].endswith("math.floor"):
                continue
            found = iter(()) if in_test and FRAMES.fullmatch(token.string) else in_name(token.string, path.name)
        elif token.type in _TEXT:
            found = in_text(token.string)
        for what in found:
            yield f"{path.relative_to(ROOT)}:{token.start[0]}: {what}"
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            comment.append(token.string)
        elif token.type != tokenize.NL:
            comment.clear()
        if len(comment) > 1:  # a phrase may be broken between two lines
            for what in set(in_text(" ".join(comment[-2:]))) - set(in_text(comment[-2])) - set(in_text(comment[-1])):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {what}"


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS, *TESTED], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_uses_the_fields_words(path: Path) -> None:
    found = list(dict.fromkeys([*in_text(path.stem), *in_source(path)]))
    assert not found, "\n".join(found)


def test_all_kinds_of_files_are_read() -> None:
    read = {str(path.relative_to(ROOT)) for path in [*SOURCES, *TOOLS, *TESTED, *PAGES]}
    for path in (
        *("Makefile", "pyproject.toml", "README.md", "setup.py", ".ci/run", ".github/workflows/tests.yml"),
        *("deploy/Containerfile", "deploy/tcpstore.service", "deploy/kubernetes-plain.yaml", "docs/design.md"),
        *(
            "tcpstore_async/tools/web/page/app.js",
            "tcpstore_async/tools/web/page/style.css",
            "tests/support.py",
            "tools/mutate.py",
        ),
        *("bench/loadgen/loadgen.c", "examples/README.md", "tests/unit/wire/test_codecs.py"),
    ):
        assert path in read


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_names_of_tests_use_the_fields_words(path: Path) -> None:
    names = [path.stem, *re.findall(r"^ *(?:async )?def (test_\w+)|^class (\w+)", path.read_text(), re.MULTILINE)]
    names = ["".join(name) for name in names]
    found = [f"{name}: {what}" for name in names for what in in_text(name.replace("_", " "))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_the_fields_words(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for what in in_text(line)
    ]
    found += [what for what in in_text(path.read_text()) if not any(what in line for line in found)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the door's connection", "Rooms", "FairLane", "_check_room", "a waiter in line for it", "out of line",
        "whose turn it is", "its turn", "the next in line", "a herd of ranks", "room: int", "tell_of_room",
        "dirty sessions", "joins the\nline", "in\nline for a lock",
    ],
)  # fmt: skip
def test_private_senses_are_found(text: str) -> None:
    assert list(in_name(text, "x.py") if text.isidentifier() else in_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "the command line", "one line of JSON", "the end of the line", "in line 3", "log lines", "in turn", "in turns",
        "one turn of the loop", "it turns out", "headroom", "a thundering herd", "THUNDERING_HERD", "explained",
        "_make_room", "room for a key", "indoors", "in line with", "return the sum",
    ],
)  # fmt: skip
def test_technical_senses_are_not(text: str) -> None:
    assert not list(in_name(text, "x.py") if text.isidentifier() else in_text(text))
