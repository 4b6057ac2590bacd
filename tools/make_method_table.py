"""Writes the table of methods into docs/compatibility.md: `python tools/make_method_table.py`.

Which store has which method is looked up in the classes; how it differs from PyTorch's stands here, in one sentence
each, with the probes that show it. tests/contract/test_table.py proves the page fresh, and makes the calls of
tests/contract/table_probes.py on PyTorch's stores and on ours: what is said to be the same is, and what is said to
differ does.

Not tried, because PyTorch cannot be asked safely, or not twice with the same answer:

* `multi_set` with fewer values than keys on FileStore and HashStore: PyTorch's reads memory that is not its own.
* A timeout of 0 for what is there on a TCPStore: PyTorch's does not wait for the answer, which may be there or not.
* Queues on PyTorch's legacy server, which loses the connection. A client that takes our server for one is tried.
* That timeouts are kept to the millisecond, and everything else that takes a clock, a crash or a second process: those
  are tests of their own, which docs/quirks.md names.
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

LOCAL = ("FileStore", "HashStore")
BASES = ("TCPStore", *LOCAL)
OF_ITS_OWN = frozenset(["list_keys"])
"""Methods of PrefixStore that do not go through to the store under it, in PyTorch or here."""

Difference = tuple[str, tuple[str, ...], str, tuple[str, ...]]


def _of_waiting() -> list[Difference]:
    """What is the same for all methods that wait."""
    handlers = (
        "handlers of signals run while it waits, so Ctrl-C ends it at once; PyTorch's lets none run before it is over"
    )
    limits = (
        "a timeout of 0 is one look and a negative one for ever; PyTorch's takes 0 for ever, and a negative one for "
        "none at all"
    )
    hash_text = "when time is up, the text names the time and the keys; PyTorch's says `Wait timeout`"
    file_text = (
        "when time is up, raises StoreTimeoutError, a DistStoreError, whose text names the time and the keys; "
        "PyTorch's raises RuntimeError, with `Wait timeout` or a text of its own"
    )
    timeout_message = {
        "barrier": ("not complete",),
        "get": ("nothing there",),
        "multi_get": ("nothing there", "one missing"),
        "queue_pop": ("nothing there",),
        "wait": ("nothing there*", "some missing"),
    }
    found: list[Difference] = []
    for method, probes in timeout_message.items():
        queues = method == "queue_pop"  # of which PyTorch's FileStore has none
        found.append(
            (method, ("TCPStore", "HashStore") if queues else BASES, handlers, ("freed by a signal's handler",))
        )
        found.append((method, ("HashStore",) if queues else LOCAL, limits, ("*timeout 0", "*timeout below 0")))
        found.append((method, ("HashStore",), hash_text, probes))
        if not queues:
            found.append((method, ("FileStore",), file_text, probes))
    return found


_NO_QUEUES = "there are queues; PyTorch's raises NotImplementedError"
_LEGACY = "works with `use_libuv=False`, if the server turns out to be ours; PyTorch's raises NotImplementedError"
_ASSIGNABLE = "may be assigned to; PyTorch's may not"

DIFFERENCES: list[Difference] = [
    *_of_waiting(),
    ("add", ("HashStore",), "wakes those who wait for the key", ("wakes",)),
    ("add", LOCAL, "the ValueError for a value that is no number names the key; PyTorch's says `stoll`", ("to text",)),
    ("add", LOCAL, "the empty value is no number; PyTorch's takes it for 0", ("to the empty value",)),
    (
        "append",
        ("FileStore",),
        "appends a value that equals the present one, too; PyTorch's loses it",
        ("the present value",),
    ),
    ("barrier", BASES, "takes an int as timeout, too", ("timeout in seconds",)),
    (
        "barrier",
        LOCAL,
        "who comes when the world is complete passes, whatever its size; PyTorch's lets only who completes it pass",
        ("of none", "of fewer than are there"),
    ),
    (
        "barrier",
        ("HashStore",),
        "when time is up, the text names the time and the keys; PyTorch's says `Wait timeout`",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("FileStore", "PrefixStore"),
        "heeds `set_timeout`; PyTorch's waits for 300 s unless it is given a timeout",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("PrefixStore",),
        "is the barrier of the store under it: over a TCPStore one call, with its texts and sizes; PyTorch's makes two "
        "keys there",
        (
            "its key is there",
            "its keys",
            "larger, *",
            "of fewer than are there",
            "of none",
            "not complete",
            "timeout 0",
        ),
    ),
    ("clone", ("FileStore",), "keeps the timeout", ("timeout",)),
    (
        "compare_set",
        ("TCPStore",),
        "one that stores nothing wakes nobody; that of PyTorch's server wakes all who wait for the key",
        ("that failed wakes",),
    ),
    (
        "delete_key",
        ("FileStore",),
        "says whether the key was there; PyTorch's always says yes",
        ("not there", "twice"),
    ),
    (
        "has_extended_api",
        ("FileStore",),
        "True: `append`, `multi_get` and `multi_set` are single operations",
        ("asked",),
    ),
    ("host", ("TCPStore",), _ASSIGNABLE, ("given",)),
    (
        "list_keys",
        ("FileStore",),
        "leaves PyTorch's counters out, of which it lists `efcount/` and `leanup/`",
        ("none", "some", "deleted", "beside *"),
    ),
    (
        "list_keys",
        ("PrefixStore",),
        "lists keys that begin with the prefix and a slash; PyTorch's also those that only begin with the prefix, and "
        "takes as many characters off",
        ("beside a longer prefix",),
    ),
    (
        "multi_set",
        LOCAL,
        "raises DistStoreError if there are not as many values as keys; PyTorch's misbehaves",
        ("more values than keys",),
    ),
    ("port", ("TCPStore",), _ASSIGNABLE, ("given",)),
    ("queue_len", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_pop", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_push", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_len", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_pop", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_push", ("TCPStore",), _LEGACY, ("legacy",)),
    ("set_timeout", BASES, "takes an int, too", ("an int",)),
    ("set_timeout", BASES, "cuts a timeout beyond 300 years to that; PyTorch's wraps", ("the longest",)),
    (
        "wait",
        BASES,
        "takes an int as timeout, too, and None for the store's",
        ("timeout in seconds", "timeout None"),
    ),
]
"""Method, stores, how ours differ from PyTorch's of the same name, and patterns of the names of probes that show it."""

UNNAMED = EVERYWHERE - set("barrier clone has_extended_api list_keys num_keys queue_pop timeout".split())
"""The methods whose arguments have no names in PyTorch."""

BY_NAME = "by name"
"""The probe that gives arguments by name."""


def differences(store: str, method: str) -> list[Difference]:
    """How a method of a store differs, whatever is under it."""
    return [row for row in DIFFERENCES if row[0] == method and store in row[1]]


def differs_underneath(method: str) -> bool:
    """Whether a PrefixStore's method is that of the store under it, and differs on one."""
    return method not in OF_ITS_OWN and any(
        differences(base, method) for base in BASES if method in PYTORCH["PrefixStore"]
    )


def public(store: type) -> set[str]:
    """What users may call or read."""
    return {name for name in dir(store) if not name.startswith("_")} | ({"host", "port"} & _assigned(store))


def _assigned(store: type) -> set[str]:
    """What is not in the class, but on every instance."""
    return {"host", "port"} if store in (TCPStore, AsyncTCPStore) else set()


def notes() -> list[str]:
    """Every sentence once, in the order in which the table comes to it."""
    found: dict[str, None] = {}
    for _, _, text, _ in sorted(DIFFERENCES, key=lambda row: row[0]):
        found[text] = None
    return list(found)


def cell(store: type, name: str) -> str:
    if name not in public(store):
        return "–"
    if store is AsyncTCPStore:
        return "yes"
    if name not in PYTORCH[store.__name__]:
        return "ours only"
    numbers = sorted({notes().index(text) + 1 for _, _, text, _ in differences(store.__name__, name)})
    said = [f"differs ({', '.join(map(str, numbers))})"] if numbers else []
    if store is PrefixStore and differs_underneath(name):
        said.insert(0, "as under it")
    return ", ".join(said) or "same"


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
        "*As under it*: a PrefixStore's method differs as that of the store under it does.",
        "",
        "Every cell was tried on both. On every store, ours besides:",
        "",
        "* take arguments by the names in [reference.md](reference.md); of PyTorch's methods only `barrier` and "
        "`queue_pop` have names for them, the others raise TypeError;",
        "* have texts of their own for TypeErrors, which name the argument, and for AttributeErrors;",
        "* raise StoreTimeoutError, a DistStoreError, where time is up and PyTorch's raise DistStoreError.",
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
