"""What a command takes, as in CONTRIBUTING.md, "Add an opcode": these tests name what is missing, and where it goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import own_cases
from conformance.extension import extension_cases
from conformance.script import Deed
from conformance.vectors import libuv_vectors
from properties.test_codec_properties import REPLIES, REQUESTS
from support import LIMIT
from tcpstore_async import PrefixStore, Store, TCPStore, serve
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client import capabilities, requests
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.observe.history import _NO_VALUES, History
from tcpstore_async.server.features import attach_features
from tcpstore_async.session import identity
from tcpstore_async.session.identity import LINKS, NAMES, SINGLE_LINKS
from tcpstore_async.session.store import Store as ServedStore
from tcpstore_async.wire import codecs
from tcpstore_async.wire.codecs import ReplyCodec, RequestCodec
from tcpstore_async.wire.commands import (
    BY_METHOD,
    BY_OPCODE,
    COMMANDS,
    EXTENSION,
    HANDSHAKE,
    INTERNAL,
    MAGIC,
    MUTATES,
    PARKS,
    Command,
)

ROOT = Path(__file__).parent.parent
CLIENT = [
    *(ROOT / "tcpstore_async" / "client").glob("*.py"),
    ROOT / "tcpstore_async" / "session" / "client.py",
    ROOT / "tcpstore_async" / "links" / "link_client.py",
    ROOT / "tcpstore_async" / "links" / "single_client.py",
]
"""Where requests are made."""

STOCK = range(19)

commands = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def test_every_stock_opcode_is_declared() -> None:
    assert [BY_OPCODE[opcode] is not None for opcode in STOCK] == [True] * len(STOCK)


@commands
def test_a_command_has_documentation(command: Command) -> None:
    """It becomes a cell of a table in Markdown."""
    assert command.doc.endswith("."), f"the row of {command.name} in wire/commands.py has no documentation"
    assert not {"|", "\n"} & set(command.doc)
    for codec, layout in ((command.request, command.request.layout), (command.reply, command.reply.layout)):
        assert layout or codec in (codecs.NOTHING, codecs.NO_REPLY), f"a codec of {command.name} has no layout"


def test_the_documentation_of_validate_has_the_magic_number() -> None:
    assert f"{MAGIC:#x}" in BY_METHOD["validate"].doc


@commands
def test_a_command_has_its_method(command: Command) -> None:
    """Else a server closes the connection, as for an opcode that there is not."""
    store = ServedStore(Limits())
    attach_features(store, "one", "uv")
    served = store.first if command.flags & HANDSHAKE else store.slot(command.opcode)
    assert served is not None, f"nothing executes {command.name}: neither a session, nor a keyspace, nor a feature"


@commands
def test_a_command_has_a_client_method(command: Command) -> None:
    if command.flags & INTERNAL:
        sent = "|".join(re.escape(f"BY_METHOD[{quote}{command.method}{quote}]") for quote in "\"'")
        assert command.method == "ping" or any(re.search(sent, path.read_text()) for path in CLIENT), (
            f"no client sends {command.name}; without INTERNAL, the stores need methods"
        )
        return
    missing = list(_methods_missing(command))
    assert not missing, f"{command.name} is no internal command: add {'; '.join(missing)}"


def _methods_missing(
    command: Command, sync: type[TCPStore] = TCPStore, asynchronous: type[AsyncTCPStore] = AsyncTCPStore
) -> Iterator[str]:
    """Yield what users lack who want to call this command's method, and where to add it."""
    method = command.method
    parts: list[tuple[type, str]] = [
        (sync, "stores/tcp"), (PrefixStore, "stores/prefix"), (asynchronous, "client/aio")
    ]  # fmt: skip
    if f'BY_METHOD["{method}"]' not in (ROOT / "tcpstore_async" / "client" / "requests.py").read_text():
        yield f'a request with BY_METHOD["{method}"] to client/requests.py'
    for kind, file in ((Store, "stores/base"), *parts):
        if not inspect.isfunction(vars(kind).get(method)):
            yield f"{kind.__name__}.{method} to {file}.py"


def test_missing_methods_are_named() -> None:
    assert [text.partition(" to ")[2] for text in _methods_missing(BY_METHOD["wait_count"])] == [
        "stores/base.py", "stores/tcp.py", "stores/prefix.py", "client/aio.py"
    ]  # fmt: skip
    unknown = Command(0xFF, "UNKNOWN", codecs.KEY, codecs.WAKE, "unknown", PARKS, "")
    assert "client/requests.py" in next(_methods_missing(unknown))


SAMPLES = {"keys": ["k"], "values": ["v"]}
"""Arguments by the names of parameters; others get text, or 1 if they are numbers."""


def _samples(method: Callable[..., Any]) -> list[Any]:
    """Return arguments for the parameters without defaults."""
    parameters = [*inspect.signature(method).parameters.items()][1:]
    return [
        SAMPLES.get(name, 1 if one.annotation in (int, "int") else "k")
        for name, one in parameters
        if one.default is one.empty
    ]


def test_a_view_forwards_every_method() -> None:
    """Else one that `Store` implements over others would be many calls, and one with a key would miss the prefix."""
    methods = {name for name, value in vars(Store).items() if inspect.isfunction(value) and not name.startswith("_")}
    missing = methods - set(vars(PrefixStore))
    assert not missing, f"add these methods to stores/prefix.py: {missing}"


class _Gated(TCPStore):
    def join(self, key: str) -> None:
        request = requests.join(key.encode())
        self._supporting(capabilities.EXTENSION, request).call(request)


class _AsyncGated(AsyncTCPStore):
    async def join(self, key: str) -> None:
        request = requests.join(key.encode())
        await self._require(capabilities.EXTENSION, request)
        await self._call(request)


class _Ungated(TCPStore):
    def join(self, key: str) -> None:
        self._connection().call(requests.join(key.encode()))


async def _not_gated(
    method: str, sync: type[TCPStore] = TCPStore, asynchronous: type[AsyncTCPStore] = AsyncTCPStore
) -> list[str]:
    """Return which clients call a method of the extension on a server that does not have it."""
    arguments = _samples(getattr(sync, method))
    found: list[str] = []

    def call(port: int) -> None:
        with sync("127.0.0.1", port, timeout=LIMIT) as store, contextlib.suppress(NotImplementedError):
            getattr(store, method)(*arguments)
            found.append(f"TCPStore.{method} in stores/tcp.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "EXTENSION", BY_METHOD[method].since - 1)
        async with serve("127.0.0.1", 0) as server:
            await asyncio.to_thread(call, server.port)
            async with await asynchronous.connect("127.0.0.1", server.port, timeout=LIMIT) as store:
                with contextlib.suppress(NotImplementedError):
                    await getattr(store, method)(*arguments)
                    found.append(f"AsyncTCPStore.{method} in client/aio.py")
    return found


async def test_methods_of_the_extension_are_gated() -> None:
    """A server that does not know the command closes the connection, and with it the store."""
    methods = [command.method for command in COMMANDS if command.since and not command.flags & INTERNAL]
    found = [where for method in methods if hasattr(TCPStore, method) for where in await _not_gated(method)]
    assert not found, f"check capabilities.EXTENSION before the request is sent: {found}"


async def test_that_a_method_is_not_gated_is_noticed() -> None:
    assert await _not_gated("join", _Gated, _AsyncGated) == []
    assert await _not_gated("join", _Ungated, _AsyncGated) == ["TCPStore.join in stores/tcp.py"]


_ARRIVALS = ("cancel_wait", "depart")
"""What a history notes because a session has arrived somewhere, and does not show it any more."""


@commands
def test_who_wrote_a_value_is_noted(command: Command) -> None:
    """Of every command that changes what is stored under a key, but those that are known to change no value."""
    noted = History(ServedStore(Limits())).recorded(command.method, len) is not len
    assert noted == bool(command.flags & MUTATES and command.method not in _NO_VALUES) or command.method in _ARRIVALS


@commands
def test_a_command_has_codecs_for_both_directions(command: Command) -> None:
    """That they round-trip is shown in tests/properties/test_codec_properties.py, for every codec."""
    shown = {id(getattr(codecs, name)) for name, _ in [*REQUESTS, *REPLIES]}
    assert id(command.request) in shown
    assert id(command.reply) in shown
    assert type(command.request).decode is not RequestCodec.decode
    assert type(command.request).encode is not RequestCodec.encode
    assert type(command.reply).decode is not ReplyCodec.decode
    assert command.reply.measure is None or command.method == "list_keys", "Store._list_keys would execute it"


@functools.cache
def _opcodes_in_vectors() -> frozenset[int]:
    """Return the opcodes that peers send in the recorded vectors and in our own cases."""
    found: set[int] = set()
    for script in [*libuv_vectors(), *own_cases(), *extension_cases()]:
        sent: dict[str, bytes] = {}
        for step in script.steps:
            if step.deed is Deed.SAY:
                sent[step.peer] = sent.get(step.peer, b"") + step.data
        for data in sent.values():
            found |= _opcodes(data)
    return frozenset(found)


def _opcodes(data: bytes) -> set[int]:
    """Return the opcodes of the frames at the start of some bytes."""
    found: set[int] = set()
    at = 0
    while at < len(data) and (command := BY_OPCODE[data[at]]) is not None:
        found.add(command.opcode)
        try:
            _, stop = command.request.decode(_nothing, data, at + 1, len(data), Limits())
        except PeerError:
            break
        if stop < 0:
            break
        at = stop
    return found


def _nothing(*fields: Any) -> None:
    return None


@commands
def test_a_command_has_a_vector(command: Command) -> None:
    assert command.opcode in _opcodes_in_vectors(), f"no vector in tests/conformance sends {command.name}"


def test_no_recorded_vector_is_missing() -> None:
    for name, least in (("vectors.json", 190), ("vectors_badinput.json", 160)):
        assert len(json.loads((ROOT / "tests" / "conformance" / name).read_text())) >= least


@commands
def test_a_command_is_in_the_specification(command: Command) -> None:
    assert f"| {command.opcode} | {command.name} |" in (ROOT / "docs" / "wire.md").read_text(), (
        "run tools/make_wire_doc.py"
    )


VERSIONS = {
    int(version): int(last)
    for last, version in re.findall(
        r"(\d+) in version (\d+)",
        (ROOT / "docs" / "wire.md").read_text().partition("* `extension`:")[2].split("\n")[0],
    )
}
"""By version of the extension that the specification states: its last opcode."""

ours = pytest.mark.parametrize(
    "command", [one for one in COMMANDS if one.opcode >= 64], ids=lambda command: command.name
)


@ours
def test_a_command_of_the_extension_belongs_to_a_version(command: Command) -> None:
    version = min((one for one, last in VERSIONS.items() if command.opcode <= last), default=None)
    assert command.since, f"the row of {command.name} in wire/commands.py needs since={EXTENSION + 1}"
    assert version == command.since, "run tools/make_wire_doc.py"


def test_the_versions_of_the_extension() -> None:
    """Each adds commands, and the latest is the one that servers announce."""
    assert list(VERSIONS) == list(range(1, EXTENSION + 1))
    assert sorted(set(VERSIONS.values())) == list(VERSIONS.values())
    assert VERSIONS[EXTENSION] == max(command.opcode for command in COMMANDS)
    assert VERSIONS[LINKS] >= BY_METHOD["link"].opcode > VERSIONS[LINKS - 1]
    assert VERSIONS[SINGLE_LINKS] >= BY_METHOD["taken"].opcode > VERSIONS[SINGLE_LINKS - 1]
    assert VERSIONS[NAMES] >= BY_METHOD["end_store"].opcode > VERSIONS[NAMES - 1]
