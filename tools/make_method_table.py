"""Writes the table of methods into docs/compatibility.md: `python tools/make_method_table.py`.

Which store has which method is looked up in the classes; how it differs from PyTorch's stands here, in one sentence
each. tests/contract/test_table.py proves the page fresh, and what is said of PyTorch's classes true.
"""

from __future__ import annotations

from pathlib import Path

from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, TCPStore

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- methods -->", "<!-- /methods -->"

STORES: tuple[type, ...] = (TCPStore, FileStore, HashStore, PrefixStore, AsyncTCPStore)

EVERYWHERE = frozenset(
    "add append barrier check clone compare_set delete_key get has_extended_api list_keys multi_get multi_set num_keys "
    "queue_len queue_pop queue_push set set_timeout timeout wait".split()
)
PYTORCH: dict[str, frozenset[str]] = {
    "TCPStore": EVERYWHERE | {"host", "port", "libuvBackend"},
    "FileStore": EVERYWHERE | {"path"},
    "HashStore": EVERYWHERE,
    "PrefixStore": EVERYWHERE | {"underlying_store"},
}
"""What PyTorch's classes of the same name have, in version 2.13."""

ALL = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
WAITING = (
    "a timeout of 0 is one look and a negative one for ever; it is kept to the millisecond; Ctrl-C ends it at once"
)

DIFFERENCES: list[tuple[str, tuple[str, ...], str]] = [
    ("add", ("HashStore",), "wakes those who wait for the key"),
    ("add", ("FileStore", "HashStore"), "the ValueError for a value that is no number names the key"),
    ("append", ("FileStore",), "appends a value that equals the present one, too; PyTorch's loses it"),
    ("barrier", ("FileStore", "HashStore"), "who comes when the world is complete passes, whatever its size"),
    ("barrier", ("PrefixStore",), "is the underlying store's: one call, and its timeout"),
    ("clone", ("FileStore",), "keeps the timeout"),
    ("clone", ("PrefixStore",), "closes the underlying clone when it is closed"),
    ("delete_key", ("FileStore",), "says whether the key was there; PyTorch's always says yes"),
    ("get", ALL, WAITING),
    ("has_extended_api", ("FileStore",), "True: `append`, `multi_get` and `multi_set` are single operations"),
    ("list_keys", ("FileStore",), "leaves PyTorch's counters out, of which it lists `efcount/` and `leanup/`"),
    ("list_keys", ("PrefixStore",), "lists keys that begin with the prefix and a slash, without both"),
    ("multi_get", ALL, WAITING),
    (
        "multi_set",
        ("FileStore", "HashStore"),
        "raises DistStoreError if there are not as many values as keys; PyTorch's misbehaves",
    ),
    ("queue_len", ("FileStore",), "there are queues; PyTorch's raises NotImplementedError"),
    ("queue_pop", ("FileStore",), "there are queues; PyTorch's raises NotImplementedError"),
    ("queue_push", ("FileStore",), "there are queues; PyTorch's raises NotImplementedError"),
    ("queue_pop", ("TCPStore", "HashStore", "PrefixStore"), WAITING),
    ("set_timeout", ALL, "takes an int, too"),
    ("wait", ALL, WAITING),
]
"""Method, stores, and how ours differ from PyTorch's of the same name."""


def public(store: type) -> set[str]:
    """What users may call or read."""
    return {name for name in dir(store) if not name.startswith("_")} | ({"host", "port"} & _assigned(store))


def _assigned(store: type) -> set[str]:
    """What is not in the class, but on every instance."""
    return {"host", "port"} if store in (TCPStore, AsyncTCPStore) else set()


def notes() -> list[str]:
    """Every sentence once, in the order in which the table comes to it."""
    found: dict[str, None] = {}
    for _, _, text in sorted(DIFFERENCES, key=lambda row: row[0]):
        found[text] = None
    return list(found)


def cell(store: type, name: str) -> str:
    if name not in public(store):
        return "–"
    if store is AsyncTCPStore:
        return "yes"
    if name not in PYTORCH[store.__name__]:
        return "ours only"
    numbers = sorted(
        notes().index(text) + 1 for row, stores, text in DIFFERENCES if row == name and store.__name__ in stores
    )
    return ", ".join(f"differs ({number})" for number in numbers) or "same"


def render_methods() -> str:
    """The table and its notes, in Markdown."""
    names = sorted(set().union(*map(public, STORES)), key=str.lower)
    lines = [
        "| | " + " | ".join(store.__name__ for store in STORES) + " |",
        "|---" * (len(STORES) + 1) + "|",
        *(f"| `{name}` | " + " | ".join(cell(store, name) for store in STORES) + " |" for name in names),
        "",
        "*same*: as PyTorch's class of that name; *ours only*: it has none of that name. Of `AsyncTCPStore`, which has "
        "no counterpart, methods are awaited.",
        "",
        *(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(notes(), 1)),
    ]
    return "\n".join(lines)


def put(page: str) -> str:
    """The page with the table in it, at its end if it has had none."""
    table = f"{BEGIN}\n\n{render_methods()}\n\n{END}"
    if BEGIN not in page:
        return f"{page or '# Compatibility'}\n## Methods\n\n{table}\n".replace(
            "# Compatibility\n##", "# Compatibility\n\n##"
        )
    before, _, rest = page.partition(BEGIN)
    return before + table + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text() if PAGE.exists() else ""))
