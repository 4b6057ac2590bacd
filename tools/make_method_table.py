"""Write the methods into docs/compatibility.md and docs/reference.md: `python tools/make_method_table.py`.

The classes tell which store has which method, and the docstrings of `Store` what they do. The differences from
PyTorch's stores are declared here, each with the probes that show it. tests/contract/test_table.py checks that the
pages are up to date and runs tests/contract/table_probes.py on PyTorch's stores and on ours: the results differ where
the table says so, and nowhere else.

Not probed, because PyTorch's behaviour is unsafe or not deterministic:

* `multi_set` with fewer values than keys on FileStore and HashStore: PyTorch's reads out of bounds.
* A timeout of 0 for an existing key on a TCPStore: PyTorch's may return before the reply arrives.
* Queues on PyTorch's legacy server, which closes the connection. A client that takes our server for one is probed.
* Precision of timeouts, crashes and second processes: separate tests, which name rows of docs/quirks.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, Store, TCPStore

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMPATIBILITY, REFERENCE = DOCS / "compatibility.md", DOCS / "reference.md"
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
"""Methods that PrefixStore does not forward to the underlying store, in PyTorch or here."""

Difference = tuple[str, tuple[str, ...], str, tuple[str, ...]]


def _of_waiting() -> list[Difference]:
    """Return the differences that all blocking methods share."""
    handlers = (
        "signal handlers run while it blocks, so Ctrl-C interrupts it at once; PyTorch's runs none before it returns"
    )
    limits = (
        "a timeout of 0 checks once and a negative one waits forever; in PyTorch's, 0 waits forever and a negative "
        "timeout expires at once"
    )
    hash_text = "the timeout error names the timeout and the keys; PyTorch's reads `Wait timeout`"
    file_text = (
        "on a timeout, raises StoreTimeoutError, a DistStoreError, which names the timeout and the keys; PyTorch's "
        "raises RuntimeError with `Wait timeout` or another message"
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


_NO_QUEUES = "has queues; PyTorch's raises NotImplementedError"
_LEGACY = "works with `use_libuv=False` if the server is ours; PyTorch's raises NotImplementedError"
_ASSIGNABLE = "can be assigned; PyTorch's cannot"

DIFFERENCES: list[Difference] = [
    *_of_waiting(),
    ("add", ("HashStore",), "wakes callers that wait for the key; PyTorch's does not", ("wakes",)),
    (
        "add",
        LOCAL,
        "the ValueError for a value that is not a number names the key; PyTorch's reads `stoll`",
        ("to text",),
    ),
    ("add", LOCAL, "an empty value is not a number; PyTorch's takes it for 0", ("to the empty value",)),
    (
        "append",
        ("FileStore",),
        "appends a value equal to the present one; PyTorch's loses it",
        ("the present value",),
    ),
    ("barrier", BASES, "also accepts an int as the timeout", ("timeout in seconds",)),
    (
        "barrier",
        ("TCPStore",),
        "the timeout error also says how many have arrived, and who has not, if the server knows",
        ("larger, after it was complete",),
    ),
    (
        "barrier",
        LOCAL,
        "a caller that arrives after the world is complete passes; PyTorch's passes only the one that completes it",
        ("of none", "of fewer than are there"),
    ),
    (
        "barrier",
        ("HashStore",),
        "the timeout error names the timeout and the keys; PyTorch's reads `Wait timeout`",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("FileStore", "PrefixStore"),
        "uses the timeout of `set_timeout`; PyTorch's waits 300 s unless the call has a timeout",
        ("not complete, the store's timeout",),
    ),
    (
        "barrier",
        ("PrefixStore",),
        "is the underlying store's barrier: over a TCPStore one request, with its messages and world sizes; PyTorch's "
        "creates two keys there",
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
        "a call that stores nothing wakes nobody; with PyTorch's server it wakes all that wait for the key",
        ("that failed wakes",),
    ),
    (
        "delete_key",
        ("FileStore",),
        "returns whether the key existed; PyTorch's always returns True",
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
        "omits PyTorch's internal counters; PyTorch's lists them as `efcount/` and `leanup/`",
        ("none", "some", "deleted", "beside *"),
    ),
    (
        "list_keys",
        ("PrefixStore",),
        "lists keys that begin with the prefix and a slash; PyTorch's also lists keys that merely begin with the "
        "prefix, and removes as many characters",
        ("beside a longer prefix",),
    ),
    (
        "multi_set",
        LOCAL,
        "raises DistStoreError if the numbers of keys and values differ; PyTorch's does not check",
        ("more values than keys",),
    ),
    ("port", ("TCPStore",), _ASSIGNABLE, ("given",)),
    ("queue_len", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_pop", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_push", ("FileStore",), _NO_QUEUES, ("*",)),
    ("queue_len", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_pop", ("TCPStore",), _LEGACY, ("legacy",)),
    ("queue_push", ("TCPStore",), _LEGACY, ("legacy",)),
    ("set_timeout", BASES, "also accepts an int", ("an int",)),
    ("set_timeout", BASES, "limits a timeout to 300 years; PyTorch's wraps around", ("the longest",)),
    (
        "wait",
        BASES,
        "also accepts an int as the timeout, and None for the store's",
        ("timeout in seconds", "timeout None"),
    ),
]
"""Method, stores, how ours differ from PyTorch's, and patterns for the names of the probes that show it."""

UNNAMED = EVERYWHERE - set("barrier clone has_extended_api list_keys num_keys queue_pop timeout".split())
"""Methods whose arguments are positional only in PyTorch."""

BY_NAME = "by name"
"""The probe that passes arguments by keyword."""


def differences(store: str, method: str) -> list[Difference]:
    """Return how a method of a store differs, whatever the underlying store."""
    return [row for row in DIFFERENCES if row[0] == method and store in row[1]]


def differs_underneath(method: str) -> bool:
    """Whether PrefixStore forwards a method to the underlying store, which differs from PyTorch's."""
    return method not in OF_ITS_OWN and any(
        differences(base, method) for base in BASES if method in PYTORCH["PrefixStore"]
    )


def public(store: type) -> set[str]:
    """Return the public attributes."""
    return {name for name in dir(store) if not name.startswith("_")} | ({"host", "port"} & _assigned(store))


def _assigned(store: type) -> set[str]:
    """Return the public attributes that instances have and the class does not."""
    return {"host", "port"} if store in (TCPStore, AsyncTCPStore) else set()


def notes() -> list[str]:
    """Return every difference once, in the order of the table."""
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
    parts = [f"differs ({', '.join(map(str, numbers))})"] if numbers else []
    if store is PrefixStore and differs_underneath(name):
        parts.insert(0, "as underlying")
    return ", ".join(parts) or "same"


def render_methods() -> str:
    """Return the table and its notes as Markdown."""
    names = sorted(set().union(*map(public, STORES)), key=str.lower)
    lines = [
        "| | " + " | ".join(store.__name__ for store in STORES) + " |",
        "|---" * (len(STORES) + 1) + "|",
        *(f"| `{name}` | " + " | ".join(cell(store, name) for store in STORES) + " |" for name in names),
        "",
        "*same*: as in PyTorch's class of that name; *ours only*: PyTorch's class has no such method; *as underlying*: "
        "PrefixStore forwards the call, so it differs as the underlying store does. `AsyncTCPStore` has no "
        "counterpart; its methods are coroutines.",
        "",
        "Every cell has been tried on PyTorch's stores and on ours. On every store, our methods also:",
        "",
        "* accept keyword arguments, by the names in [reference.md](reference.md); of PyTorch's only `barrier` and "
        "`queue_pop` do, and the others raise TypeError;",
        "* have their own messages for TypeError, which name the argument, and for AttributeError;",
        "* raise StoreTimeoutError, a DistStoreError, on a timeout where PyTorch's raise DistStoreError; with a server "
        "of ours, its text says why, as far as the server knows it, behind PyTorch's words;",
        "* append to PyTorch's message of a lost connection which call was awaiting a reply, and how long nothing had "
        "arrived.",
        "",
        *(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(notes(), 1)),
    ]
    return "\n".join(lines)


OF_THE_STORE = ("timeout", "set_timeout", "has_extended_api", "clone", "close")
"""Members of `Store` that concern the store as a whole: the last rows of the reference."""

RETURNS: dict[Any, str] = {None: "–", list[str]: "list of str", list[bytes]: "list of bytes", "Store": "a store"}
"""How the reference writes types, if not by their names."""


def render_reference() -> str:
    """Return the table of what the methods of every store do, from their signatures and docstrings."""
    names = [name for name in vars(Store) if not name.startswith("_")]
    names.sort(key=lambda name: OF_THE_STORE.index(name) if name in OF_THE_STORE else -1)
    return "\n".join(["| method | returns | |", "|---|---|---|", *map(_reference_row, names)])


def _reference_row(name: str) -> str:
    member = getattr(Store, name)
    function: Any = member.fget if isinstance(member, property) else member
    signature = inspect.signature(function)
    given = ", ".join(str(one.replace(annotation=one.empty)) for one in [*signature.parameters.values()][1:])
    call = name if isinstance(member, property) else f"{name}({given})"
    returns = RETURNS.get(signature.return_annotation) or signature.return_annotation.__name__
    return f"| `{call}` | {returns} | {' '.join(function.__doc__.split())} |"


def put(page: str, table: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page, table in ((COMPATIBILITY, render_methods()), (REFERENCE, render_reference())):
        page.write_text(put(page.read_text(), table))
