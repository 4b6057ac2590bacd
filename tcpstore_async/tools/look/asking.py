"""What commands that query the admin socket have in common: options, errors, units.

Knows where the socket is, and exit statuses. Must not know what a reply means.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from ...base.errors import DistError, DistNetworkError, ProtocolError
from ...cli.context import NOT_ALLOWED, ClientContext, exit_status, parse_store
from ...client.admin import Where, is_local
from ...server import admin_path
from ...server.port_holder import PROC, arguments_of, find_holder

Answer = TypeVar("Answer")

world_size_option = click.option(
    "--world-size", type=click.IntRange(1), metavar="N", help="Number of ranks, if the server does not know it."
)

admin_option = click.option(
    "--admin",
    type=click.Path(path_type=Path),
    help="Path of the server's admin socket.  [default: the socket of the server that uses --url's port on this "
    "machine]",
)

store_option = click.option("--store", metavar="NAME", callback=parse_store, help="Inspect this named store.")
"""For commands that query; the value is `ClientContext.store`."""


def find_admin(host: str, port: int) -> Path:
    """Return the admin socket of the server at an address of this machine. Raises DistNetworkError."""
    if not is_local(host):
        raise DistNetworkError(
            f"{host} is not an address of this machine: run the command where the server runs, as the same user; who, "
            "waiters, stat, top and stores can ask its HTTP process from here, with --url http://HOST:PORT"
        )
    found = admin_path.find(port)
    if not found:
        folders = " or ".join(map(str, admin_path.folders()))
        raise DistNetworkError(f"there is no admin socket for port {port} in {folders}: {_what_listens(port)}")
    if len(found) > 1:
        raise DistNetworkError(
            f"several servers use port {port}: choose one with --admin ({', '.join(map(str, found))})"
        )
    return found[0]


def _what_listens(port: int) -> str:
    """Return what there is instead of a server that can be asked, and what to do."""
    holder = find_holder("::", port)
    if (holder is None or holder.peer) and PROC.is_dir():  # elsewhere the holder is never known
        return "nothing listens on that port: check it"
    if holder is not None and "relay" in arguments_of(holder.pid):
        return f"{holder} is a relay: ask its server"
    there = "check that what listens there" if holder is None else f"{holder} listens there: check that it"
    return (
        f"{there} is a tcpstore_async server (PyTorch's cannot be asked), in a process of its own, is running as this "
        "user, and was not started with --admin"
    )


def joined_of(joined: int, size: int, where: str = "") -> str:
    """Return how many have joined, of the number that the server expects."""
    if joined <= size:
        return f"{joined} of {size} ranks have joined{where}"
    return (
        f"{joined} have joined{where}, {size} expected: some joined again, or this is the server of torchrun's agents"
    )


def query(context: ClientContext, admin: Path | None, request: Callable[[Where, float | None], Answer]) -> Answer:
    """Call `request` with the place to query and the timeout; exit with the right status on failure."""
    try:
        where = admin or context.http or find_admin(context.host, context.port)
        return request(where, None if context.timeout < 0 else context.timeout)
    except PermissionError as error:
        context.fail(str(error), NOT_ALLOWED)
    except (DistError, ProtocolError) as error:
        context.fail(str(error), exit_status(error))


def in_seconds(number: float | None) -> str:
    """Return a duration as text, for example of a round trip."""
    if number is None:
        return "-"
    if number < 0.001:
        return f"{number * 1e6:.0f} µs"
    return f"{number * 1e3:.1f} ms" if number < 1 else in_seconds_or_more(number)


def in_seconds_or_more(number: float) -> str:
    """Return a duration as text, for example of a wait; less than a second has no unit of its own."""
    if number < 100:
        return f"{number:.1f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.1f} h"


def in_bytes(number: float) -> str:
    """Return a size as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
