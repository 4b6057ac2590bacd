"""Write what docs/reference.md and docs/compatibility.md derive from the code: `python tools/make_reference.py`.

Methods, errors, commands and metrics. Docstrings and the help of commands say what they do.

The classes tell which store has which method. The differences from PyTorch's stores are declared here, each with the
probes that show it. tests/contract/test_table.py runs tests/contract/table_probes.py on PyTorch's stores and on ours:
the results differ where the table says so, and nowhere else. tests/test_docs.py checks that the pages are up to date.

Not probed, because PyTorch's behaviour is unsafe or not deterministic:

* `multi_set` with fewer values than keys on FileStore and HashStore: PyTorch's reads out of bounds.
* A timeout of 0 for an existing key on a TCPStore: PyTorch's may return before the reply arrives.
* Queues on PyTorch's legacy server, which closes the connection. A client that takes our server for one is probed.
* Precision of timeouts, crashes and second processes: separate tests, which name rows of docs/quirks.md.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

import tcpstore_async
from tcpstore_async import AsyncTCPStore, FileStore, HashStore, PrefixStore, Store, TCPStore
from tcpstore_async.cli import main
from tcpstore_async.cli.options import ConnectionOption
from tcpstore_async.diagnosis.facts import NamedStore, OtherStores
from tcpstore_async.diagnosis.rates import Histogram, Look, Stats
from tcpstore_async.tools.web.metrics import expose

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMPATIBILITY, REFERENCE = DOCS / "compatibility.md", DOCS / "reference.md"

STORES: tuple[type, ...] = (TCPStore, FileStore, HashStore, PrefixStore)
"""Those with a counterpart in PyTorch."""

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

_HANDLERS = (
    "signal handlers run while it blocks, so Ctrl-C interrupts it at once; PyTorch's runs none before it returns"
)
_LIMITS = (
    "a timeout of 0 checks once and a negative one waits forever; in PyTorch's, 0 waits forever and a negative timeout "
    "expires at once"
)
_HASH_TEXT = "the timeout error names the timeout and the keys; PyTorch's reads `Wait timeout`"
_FILE_TEXT = (
    "on a timeout, raises StoreTimeoutError, a DistStoreError, which names the timeout and the keys; PyTorch's raises "
    "RuntimeError with `Wait timeout` or another message"
)
_INT = "also accepts an int"
_INT_TIMEOUT = "also accepts an int as the timeout"
_ANY_TIMEOUT = "also accepts an int as the timeout, and None for the store's"
_LONGEST = "limits a timeout to 300 years; PyTorch's wraps around"

COMMON_DIFFERENCES = {_HANDLERS, _LIMITS, _HASH_TEXT, _FILE_TEXT, _INT, _INT_TIMEOUT, _ANY_TIMEOUT, _LONGEST}
"""Those of all blocking methods, or all timeouts, which `render_methods` lists once."""


def _of_waiting() -> list[Difference]:
    """Return the differences that all blocking methods share."""
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
            (method, ("TCPStore", "HashStore") if queues else BASES, _HANDLERS, ("freed by a signal's handler",))
        )
        found.append((method, ("HashStore",) if queues else LOCAL, _LIMITS, ("*timeout 0", "*timeout below 0")))
        found.append((method, ("HashStore",), _HASH_TEXT, probes))
        if not queues:
            found.append((method, ("FileStore",), _FILE_TEXT, probes))
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
    ("barrier", BASES, _INT_TIMEOUT, ("timeout in seconds",)),
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
        _HASH_TEXT,
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
    ("set_timeout", BASES, _INT, ("an int",)),
    ("set_timeout", BASES, _LONGEST, ("the longest",)),
    (
        "wait",
        BASES,
        _ANY_TIMEOUT,
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
        row[2] not in COMMON_DIFFERENCES
        for base in BASES
        if method in PYTORCH["PrefixStore"]
        for row in differences(base, method)
    )


def public(store: type) -> set[str]:
    """Return the public attributes."""
    return {name for name in dir(store) if not name.startswith("_")} | ({"host", "port"} & _assigned(store))


def _assigned(store: type) -> set[str]:
    """Return the public attributes that instances have and the class does not."""
    return {"host", "port"} if store in (TCPStore, AsyncTCPStore) else set()


def notes() -> list[str]:
    """Return every difference that is not a common one, in the order of the table."""
    found: dict[str, None] = {}
    for _, _, text, _ in sorted(DIFFERENCES, key=lambda row: row[0]):
        if text not in COMMON_DIFFERENCES:
            found[text] = None
    return list(found)


def cell(store: type, name: str) -> str:
    if name not in public(store):
        return "–"
    if name not in PYTORCH[store.__name__]:
        return "ours only"
    found = {text for _, _, text, _ in differences(store.__name__, name)} - COMMON_DIFFERENCES
    numbers = sorted(notes().index(text) + 1 for text in found)
    parts = [", ".join(map(str, numbers))] if numbers else []
    if store is PrefixStore and differs_underneath(name):
        parts.insert(0, "forwards")
    return "; ".join(parts) or "same"


def render_methods() -> str:
    """Return the table and its notes as Markdown."""
    rows = {name: [cell(store, name) for store in STORES] for name in sorted(set().union(*map(public, STORES)))}
    same = [f"`{name}`" for name, cells in rows.items() if {*cells} <= {"same", "–"}]
    ours = [f"`{name}`" for name, cells in rows.items() if {*cells} == {"ours only"}]
    different = [name for name in rows if f"`{name}`" not in same + ours]
    lines = [
        "On every store, our methods",
        "",
        "* accept [keyword arguments](reference.md#stores); of PyTorch's, only `barrier` and `queue_pop` do;",
        "* have their own messages for TypeError, which name the argument, and for AttributeError;",
        "* accept an int as a timeout, and `wait` None for the store's; they limit it to 300 years, where PyTorch's "
        "wraps around;",
        "* run signal handlers while they block, so Ctrl-C interrupts them at once; PyTorch's run none before they "
        "return;",
        "* raise StoreTimeoutError, a DistStoreError, on a timeout; PyTorch's FileStore raises RuntimeError. With a "
        "server of ours, its text says why, behind PyTorch's words; on FileStore and HashStore, it names the timeout "
        "and the keys, where PyTorch's reads `Wait timeout`;",
        "* append to PyTorch's message of a lost connection which call was awaiting a reply, and for how long.",
        "",
        "On FileStore and HashStore, a timeout of 0 checks once and a negative one waits forever, as on TCPStore; in "
        "PyTorch's, 0 waits forever and a negative one expires at once.",
        "",
        f"The rest of {', '.join(same)} is the same, and {', '.join(ours)} only ours. These differ; PrefixStore "
        "*forwards* most calls, so it differs as the underlying store does:",
        "",
        "| | " + " | ".join(store.__name__ for store in STORES) + " |",
        "|---" * (len(STORES) + 1) + "|",
        *(f"| `{name}` | " + " | ".join(rows[name]) + " |" for name in different),
        "",
        *(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(notes(), 1)),
    ]
    return "\n".join(lines)


OF_THE_STORE = ("timeout", "set_timeout", "has_extended_api", "clone", "close")
"""Members of `Store` that concern the store as a whole: the last rows of the reference."""

RETURNS: dict[Any, str] = {None: "–", list[str]: "list of str", list[bytes]: "list of bytes", "Store": "a store"}
"""How the reference writes types, if not by their names."""


def render_members() -> str:
    """Return the table of what the methods of every store do, from their signatures and docstrings."""
    names = [name for name in vars(Store) if not name.startswith("_")]
    names.sort(key=lambda name: OF_THE_STORE.index(name) if name in OF_THE_STORE else -1)
    return "\n".join(["| method | returns | |", "|---|---|---|", *map(_member_row, names)])


def _member_row(name: str) -> str:
    member = getattr(Store, name)
    function: Any = member.fget if isinstance(member, property) else member
    signature = inspect.signature(function)
    given = ", ".join(str(one.replace(annotation=one.empty)) for one in [*signature.parameters.values()][1:])
    call = name if isinstance(member, property) else f"{name}({given})"
    returns = RETURNS.get(signature.return_annotation) or signature.return_annotation.__name__
    return f"| `{call}` | {returns} | {_first_sentence(function.__doc__)} |"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]


# Errors


def render_errors() -> str:
    """Return the table of public errors, each below its bases."""
    names = [getattr(tcpstore_async, name) for name in tcpstore_async.__all__]
    found = [one for one in names if isinstance(one, type) and issubclass(one, Exception)]
    found.sort(key=lambda one: [base.__name__ for base in reversed(one.__mro__)])
    rows = [
        f"| `{one.__name__}` | `{one.__bases__[0].__name__}` | {_first_sentence(one.__doc__ or '')} |" for one in found
    ]
    return "\n".join(["| error | base | |", "|---|---|---|", *rows])


# Commands


def render_commands() -> str:
    """Return the table of commands, with their own options and the first sentence of their help."""
    return "\n".join(["| command | |", "|---|---|", *_command_rows(main, "")])


COMMON = {"--help", "--output", "--store", "--admin", "--wait"}
"""Options that many commands have; the page says which."""


def _command_rows(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        if not isinstance(command, click.Group) or command.invoke_without_command:
            shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
            own = [max(one.opts, key=len) for one in shown if not isinstance(one, ConnectionOption)]
            options = ", ".join(f"`{option}`" for option in own if option not in COMMON or name == "serve")
            does = _first_sentence(command.help or "")
            yield f"| `{path}{name}` | {does} {options} |" if options else f"| `{path}{name}` | {does} |"
        if isinstance(command, click.Group):
            yield from _command_rows(command, f"{path}{name} ")


# Metrics


def render_metrics() -> str:
    """Return a table of metrics for each type, from what the server of them exposes."""
    look = Look({}, _example(Stats), [], [], [_example(NamedStore)], _example(OtherStores))
    rows: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(expose(look, "")[1].decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        name += f"{{{', '.join(labels)}}}" if labels else ""
        rows.setdefault(family.type, [f"| {family.type} | |", "|---|---|"]).append(
            f"| `{name}` | {family.documentation} |"
        )
    return "\n\n".join("\n".join(table) for table in rows.values())


def _example(kind: Any) -> Any:
    """Return a value of a type, as a server might report it."""
    if kind is Histogram:
        return Histogram([], [0], 0.0)
    if isinstance(kind, types.UnionType):
        return _example(typing.get_args(kind)[0])
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: _example(field.type) for field in msgspec.structs.fields(kind)})
    return {"x": 0} if typing.get_origin(kind) is dict else kind()


# Pages

PARTS = {
    COMPATIBILITY: {"methods": render_methods},
    REFERENCE: {
        "methods": render_members,
        "errors": render_errors,
        "commands": render_commands,
        "metrics": render_metrics,
    },
}
"""For each page, the functions that render its generated parts, by the names in its comments."""


def render(page: Path) -> str:
    """Return the text of a page with its generated parts up to date."""
    text = page.read_text()
    for name, part in PARTS[page].items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        if not after:
            raise ValueError(f"{page.name} has no {begin} with an {end}")
        text = f"{before}{begin}\n\n{part()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in PARTS:
        page.write_text(render(page))
