"""Write the table of methods into docs/compatibility.md: `python tools/make_method_table.py`.

The classes tell which store has which method. The differences from PyTorch are declared here, one sentence each, with
the probes that show them. tests/contract/test_table.py checks that the page is up to date, and makes the calls of
tests/contract/table_probes.py on PyTorch's stores and on ours: methods declared the same must agree, and those declared
different must differ.

Not probed, because PyTorch's behaviour is unsafe or not reproducible:

* `multi_set` with fewer values than keys on FileStore and HashStore: PyTorch's reads out of bounds.
* A timeout of 0 for an existing key on a TCPStore: PyTorch's does not wait for the reply, so the result is random.
* Queues on PyTorch's legacy server, which closes the connection. A legacy client of our server is probed.
* Millisecond timeouts, and everything else that takes a clock, a crash or a second process: docs/quirks.md names the
  tests for those.
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
"""Methods of PrefixStore that are not forwarded to the store below, in PyTorch or here."""

Difference = tuple[str, tuple[str, ...], str, tuple[str, ...]]


def _of_waiting() -> list[Difference]:
    """Return the differences that all waiting methods share."""
    handlers = "signal handlers run while it waits, so Ctrl-C ends it at once; in PyTorch they run after the call"
    limits = (
        "a timeout of 0 means to check once, and a negative one means no limit; in PyTorch 0 means no limit, and a "
        "negative one expires at once"
    )
    hash_text = "the timeout error names the time and the keys; PyTorch's is `Wait timeout`"
    file_text = (
        "on timeout, raises StoreTimeoutError, a DistStoreError, which names the time and the keys; PyTorch raises "
        "RuntimeError, with `Wait timeout` or another text"
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
        queues = method == "queue_pop"  # PyTorch's FileStore has none
        found.append(
            (method, ("TCPStore", "HashStore") if queues else BASES, handlers, ("freed by a signal's handler",))
        )
        found.append((method, ("HashStore",) if queues else LOCAL, limits, ("*timeout 0", "*timeout below 0")))
        found.append((method, ("HashStore",), hash_text, probes))
        if not queues:
            found.append((method, ("FileStore",), file_text, probes))
    return found


_NO_QUEUES = "supported; PyTorch raises NotImplementedError"
_LEGACY = "works with `use_libuv=False` if the server is ours; PyTorch raises NotImplementedError"
_ASSIGNABLE = "can be assigned; in PyTorch it is read-only"

DIFFERENCES: list[Difference] = [
    *_of_waiting(),
    ("add", ("HashStore",), "wakes the waiters of the key; PyTorch's does not", ("wakes",)),
    ("add", LOCAL, "the ValueError for a value that is not a number names the key; PyTorch's is `stoll`", ("to text",)),
    ("add", LOCAL, "an empty value is not a number; PyTorch takes it as 0", ("to the empty value",)),
    (
        "append",
        ("FileStore",),
        "appends a value that equals the stored one; PyTorch loses it",
        ("the present value",),
    ),
    ("barrier", BASES, "accepts an int as timeout", ("timeout in seconds",)),
    (
        "barrier",
        LOCAL,
        "callers that arrive after the barrier is complete pass, whatever their world size; in PyTorch only the caller "
        "that completes it passes",
        ("of none", "of fewer than are there"),
    ),
    (
        "barrier",
        ("HashStore",),
        "the timeout error names the time and the keys; PyTorch's is `Wait timeout`",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("FileStore", "PrefixStore"),
        "respects `set_timeout`; PyTorch waits for 300 s unless a timeout is passed",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("PrefixStore",),
        "is the barrier of the store below: over a TCPStore one request, with its error texts and world sizes; PyTorch "
        "uses two keys",
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
    ("clone", ("FileStore",), "keeps the timeout; PyTorch's clone has 300 s", ("timeout",)),
    (
        "compare_set",
        ("TCPStore",),
        "wakes no waiters if it stores nothing; PyTorch's server wakes all waiters of the key",
        ("that failed wakes",),
    ),
    (
        "delete_key",
        ("FileStore",),
        "returns whether the key existed; PyTorch always returns True",
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
        "omits PyTorch's own counters, which PyTorch lists as `efcount/` and `leanup/`",
        ("none", "some", "deleted", "beside *"),
    ),
    (
        "list_keys",
        ("PrefixStore",),
        "lists keys that begin with the prefix and a slash; PyTorch also lists those that only begin with the prefix, "
        "and strips as many characters",
        ("beside a longer prefix",),
    ),
    (
        "multi_set",
        LOCAL,
        "raises DistStoreError unless there are as many values as keys; PyTorch drops values or reads out of bounds",
        ("more values than keys",),
    ),
    ("port", ("TCPStore",), _ASSIGNABLE, ("given",)),
    ("queue_len", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_pop", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_push", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_len", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_pop", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_push", ("TCPStore",), _LEGACY, ("legacy",)),
    ("set_timeout", BASES, "accepts an int", ("an int",)),
    ("set_timeout", BASES, "limits a timeout to 300 years; in PyTorch it overflows", ("the longest",)),
    (
        "wait",
        BASES,
        "accepts an int as timeout, and None for the store's timeout",
        ("timeout in seconds", "timeout None"),
    ),
]
"""Method, stores, how ours differ from PyTorch's of the same name, and patterns of the probes that show it."""

UNNAMED = EVERYWHERE - set("barrier clone has_extended_api list_keys num_keys queue_pop timeout".split())
"""The methods whose arguments have no names in PyTorch."""

BY_NAME = "by name"
"""The probe that gives arguments by name."""


def differences(store: str, method: str) -> list[Difference]:
    """Return the differences of a store's method, whatever is below the store."""
    return [row for row in DIFFERENCES if row[0] == method and store in row[1]]


def differs_underneath(method: str) -> bool:
    """Return whether a PrefixStore's method is that of the store below, and differs on one of these."""
    return method not in OF_ITS_OWN and any(
        differences(base, method) for base in BASES if method in PYTORCH["PrefixStore"]
    )


def public(store: type) -> set[str]:
    """Return the names that users can call or read."""
    return {name for name in dir(store) if not name.startswith("_")} | ({"host", "port"} & _assigned(store))


def _assigned(store: type) -> set[str]:
    """Return the attributes that only instances have."""
    return {"host", "port"} if store in (TCPStore, AsyncTCPStore) else set()


def notes() -> list[str]:
    """Return every sentence once, in the order of the table."""
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
    found = [f"differs ({', '.join(map(str, numbers))})"] if numbers else []
    if store is PrefixStore and differs_underneath(name):
        found.insert(0, "as below")
    return ", ".join(found) or "same"


def render_methods() -> str:
    """Return the table and its notes, in Markdown."""
    names = sorted(set().union(*map(public, STORES)), key=str.lower)
    lines = [
        "| | " + " | ".join(store.__name__ for store in STORES) + " |",
        "|---" * (len(STORES) + 1) + "|",
        *(f"| `{name}` | " + " | ".join(cell(store, name) for store in STORES) + " |" for name in names),
        "",
        "*same*: as PyTorch's class of that name; *ours only*: PyTorch's class has no such method; *as below*: differs "
        "where the method of the store below differs. `AsyncTCPStore` has no counterpart; its methods are coroutines.",
        "",
        "Every cell was tested on both. In addition, all our stores",
        "",
        "* accept arguments by the names in [reference.md](reference.md); in PyTorch only those of `barrier` and "
        "`queue_pop` have names, and the other methods raise TypeError;",
        "* have their own texts for TypeErrors, which name the argument, and for AttributeErrors;",
        "* raise StoreTimeoutError, a DistStoreError, on timeout, where PyTorch raises DistStoreError.",
        "",
        *(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(notes(), 1)),
    ]
    return "\n".join(lines)


def put(page: str) -> str:
    """Return the page with the table in it, at the end if there was none."""
    table = f"{BEGIN}\n\n{render_methods()}\n\n{END}"
    if BEGIN not in page:
        return f"{page or '# Compatibility'}\n## Methods\n\n{table}\n".replace(
            "# Compatibility\n##", "# Compatibility\n\n##"
        )
    before, _, rest = page.partition(BEGIN)
    return before + table + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text() if PAGE.exists() else ""))
