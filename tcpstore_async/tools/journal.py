"""`tcpstore journal`: check and print the journal of a server, which may be running.

Knows the files, and commands as they arrived. Must not know what an event does. Only `snapshot` changes anything: a
server's process runs it.
Invariant: values, tokens and secrets are printed only on request, or not at all.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from ..base.errors import PeerError, counted
from ..cli.output import print_json, print_result
from ..log.encoding import JournalError, decode
from ..log.events import RECEIVE, Event
from ..log.journal import read_records, read_snapshot, segments_of
from ..log.records import Reader
from ..log.snapshot import sessions_of
from ..server.snapshots import NOT_NOW, give_way, make_snapshot
from ..wire.codecs import Fields
from ..wire.commands import Command
from ..wire.values import unpack
from .load.observer import RequestDecoder

_LEFT_OUT: Final = frozenset("tu")
"""Kinds of fields that are not printed: tokens, and the numbers of the handshake."""

_NEVER: Final = frozenset({"LINK", "AUTH"})
"""Commands that contain secrets."""

_folder = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group()
def journal() -> None:
    """Check and print the journal of a server that runs with --persist, or ran."""


@journal.command()
@_folder
def verify(folder: Path) -> None:
    """Check the journal in FOLDER: every checksum, and that nothing is missing in between.

    A record at the end that is not whole is no error: the server was killed, or its machine went down, while it was
    written, and nobody was answered. Exits with 1 if the journal is damaged.
    """
    try:
        snapshot = read_snapshot(folder)
        reader = Reader(snapshot)
        count = sum(1 for _ in read_records(folder, reader))
    except JournalError as error:
        raise click.ClickException(f"the journal is damaged: {error}") from None
    segments = segments_of(folder, reader.first)
    before = "" if snapshot is None else f"a snapshot behind {counted(snapshot.number, 'record')}, and "
    torn = f", and {counted(reader.torn, 'byte')} of one that is not whole, which the next server cuts"
    records = f"{counted(count, 'record')} in {counted(len(segments), 'segment')}"
    print_result(f"{before}{records}, all whole{torn if reader.torn else ''}")


@journal.command()
@_folder
@click.option("--values", is_flag=True, help="Print values, which may be secret, instead of their sizes.")
@click.option("--from", "first", type=click.IntRange(0), default=0, metavar="N", help="Begin with record N.")
@click.option("-o", "output", type=click.Choice(["text", "json"]), default="text", help="Format of the output.")
def dump(folder: Path, values: bool, first: int, output: str) -> None:
    """Print what is in the journal in FOLDER, one line for each event, with the server's time in seconds.

    Commands are printed as they were received on each connection; what arrived over a link is not decoded. Tokens and
    secrets are not printed.
    """
    try:
        for number, now, what in _events(folder, values):
            if number < first:
                continue
            if output == "json":
                print_json({"record": number, "at": now, "event": what})
            else:
                print_result(f"{number} {now:.6f} {what}")
    except JournalError as error:
        raise click.ClickException(str(error)) from None


@journal.command(hidden=True)
@_folder
@click.pass_context
def snapshot(context: click.Context, folder: Path) -> None:
    """Make a snapshot behind the complete segments of the journal in FOLDER, for the server that holds it.

    Ends when standard input does.
    """
    give_way()
    threading.Thread(target=_follow, daemon=True).start()
    try:
        if make_snapshot(folder):
            context.exit(NOT_NOW)
    except (JournalError, OSError) as error:
        raise click.ClickException(f"cannot make a snapshot of {folder}: {error}") from None


def _follow() -> None:
    """End this process when its owner has closed the other end of its standard input."""
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def _events(folder: Path, values: bool) -> Iterator[tuple[int, float, str]]:
    decoders: dict[int, RequestDecoder | None] = {}
    snapshot = read_snapshot(folder)
    if snapshot is not None:  # requests of older sessions may have begun before it
        decoders.update(dict.fromkeys(sessions_of(snapshot.state)))
    for record in read_records(folder, Reader(snapshot)):
        for event in decode(record.events, record.now):
            for what in _describe(event, decoders, values):
                yield record.number, record.now, what


def _describe(event: Event, decoders: dict[int, RequestDecoder | None], values: bool) -> Iterator[str]:
    """Yield what an event was: each command that a session has received, or the call."""
    kind, name = event.subject
    shown = name.hex() if isinstance(name, bytes) else str(name or "")
    subject = f"{kind} {shown}".rstrip()
    if event.method != RECEIVE or kind != "session":
        yield f"{subject}: {event.method}"
        return
    decoder = decoders.setdefault(name, RequestDecoder())
    data = event.given[0]
    if decoder is None:
        yield f"{subject}: {counted(len(data), 'byte')}"
        return
    try:
        for command, fields in decoder.receive(data):
            yield f"{subject}: {_command(command, fields, values)}"
            if command.name == "LINK" and not any(item == b"single" for item, _ in fields[0]):  # frames follow
                decoders[name] = None
                return
    except PeerError:
        decoders[name] = None


def _command(command: Command, fields: Fields, values: bool) -> str:
    if command.name in _NEVER:
        return command.name
    shown = [_field(kind, field, values) for kind, field in zip(command.request.kinds, fields, strict=True)]
    return " ".join([command.name, *filter(None, shown)])


def _field(kind: str, field: Any, values: bool) -> str:
    if kind in _LEFT_OUT:
        return ""
    if kind == "k":
        return _key(field)
    if kind == "l":
        return f"[{', '.join(map(_key, field))}]"
    if kind in ("i", "m"):
        return f"[{', '.join([f'{_key(key)}={_value(value, values)}' for key, value in field])}]"
    return _value(field, values) if kind == "v" else str(field)


def _key(key: bytes) -> str:
    return ascii(key.decode(errors="surrogateescape"))[1:-1]


def _value(framed: bytes, shown: bool) -> str:
    value = unpack(framed)
    return ascii(value.decode(errors="surrogateescape")) if shown else f"({counted(len(value), 'byte')})"
