"""Queries to a server's admin socket, and the ranks of this machine's processes.

Knows a Unix socket and /proc. Must not know what a reply means. `admin_http.py` queries servers of other machines.
"""

import json
import os
import socket
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from ..base.errors import DistNetworkError, StoreTimeoutError
from .server_url import HttpUrl

_WANTED: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
_MOST_ENVIRONMENT: Final = 1024 * 1024

_CONNECT_AGAIN: Final = 0.05
"""Seconds between attempts to connect while the backlog is full."""

Where = Path | HttpUrl
"""A server's admin socket on this machine, or the HTTP process that passes on its replies."""


def ask(
    where: Where, parts: list[str], timeout: float | None, endless: bool = False, **more: object
) -> Iterator[bytes]:
    """Yield the lines of the reply to a request for these parts, with `more` fields.

    `timeout` is in seconds, for the whole reply, or for the first part of an `endless` one; None means none. Raises
    DistNetworkError if nothing listens there, PermissionError if it is another user's, and StoreTimeoutError.
    """
    if isinstance(where, HttpUrl):
        from .admin_http import ask_over_http  # not for commands that query a socket, which have to start fast

        assert not endless
        chunks = ask_over_http(where, parts, timeout, **more)
    else:
        chunks = _ask_here(where, parts, timeout, endless, **more)
    rest = b""
    with closing(chunks):
        for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines


def _ask_here(
    path: Path, parts: list[str], timeout: float | None, endless: bool, **more: object
) -> Generator[bytes, None, None]:
    """Yield the reply of an admin socket, in chunks."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            peer.settimeout(timeout)
            _connect(peer, path, deadline)
            peer.sendall(json.dumps({"ask": parts, **more}).encode() + b"\n")
            while True:
                if deadline is not None:
                    peer.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = peer.recv(256 * 1024)
                if not chunk:
                    return
                yield chunk
                if endless:
                    deadline = None
                    peer.settimeout(None)
        except TimeoutError:
            raise StoreTimeoutError(f"no complete reply from the admin socket {path} within {timeout:g} s") from None
        except FileNotFoundError:
            raise DistNetworkError(f"there is no admin socket {path}: is the server running?") from None
        except PermissionError:
            raise PermissionError(
                f"the admin socket {path} belongs to another user: run the command as that user"
            ) from None
        except OSError as error:
            raise DistNetworkError(f"cannot use the admin socket {path}: {error.strerror}") from None


def _connect(peer: socket.socket, path: Path, deadline: float | None) -> None:
    """Connect, retrying while the backlog is full: the kernel waits for it only on sockets without a timeout.

    Raises OSError, and StoreTimeoutError at the deadline.
    """
    while True:
        try:
            return peer.connect(str(path))
        except BlockingIOError:
            if deadline is not None and time.monotonic() > deadline:
                raise StoreTimeoutError(
                    f"the server is not accepting queries: the queue of its admin socket {path} is full"
                ) from None
            time.sleep(_CONNECT_AGAIN)


def is_local(host: str) -> bool:
    """Return whether an address or a host name is this machine's."""
    return bool(find_local([host]))


def find_local(hosts: Iterable[str]) -> set[str]:
    """Return which addresses and host names are this machine's.

    Binding fails for another machine's address, so one socket per family serves until it is bound.
    """
    found: set[str] = set()
    with ExitStack() as stack:
        probes: dict[int, socket.socket] = {}
        for host in hosts:
            for family, address in _addresses(host):
                try:
                    if family not in probes:
                        probes[family] = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                    probes[family].bind(address)
                except OSError:
                    continue
                probes.pop(family).close()
                found.add(host)
                break
    return found


def _addresses(host: str) -> list[tuple[int, Any]]:
    """Return the family and the socket address of each address of a host; none if it cannot be resolved."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # most are literals, which need no resolver
        return [(family, (host, 0))]
    except OSError:
        pass
    try:
        return [(one[0], one[4]) for one in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def read_environment(pid: int) -> dict[str, str]:
    """Return the variables of a process's initial environment that describe its rank.

    Empty if there is no such process on this machine, or it is another user's.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            raw = file.read(_MOST_ENVIRONMENT)
    except OSError:
        return {}
    found: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        text = os.fsdecode(name)
        if text in _WANTED:
            found[text] = value.decode(errors="replace")
    return found
