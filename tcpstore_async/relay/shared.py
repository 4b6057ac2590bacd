"""One relay for all processes of a host that use a named store, started by the first of them.

PyTorch's clients lose their connections when a server ends; behind a relay they do not notice if it comes back. The
relay holds a lock on a file with its address, where the other processes find it. This module knows both sides of that
file; it must not know who uses the relay, or what a relay does.

Invariants: while the file is locked, its relay starts or serves. Whoever has read the address has a second to connect:
the relay removes the file that long before it ends. It ends when its last rank has left, whichever process has started
it, and is no child of that process, which may wait for all of its children.
"""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ..base.addresses import spelled
from ..base.deadline import Deadline
from ..base.errors import DistError, DistNetworkError
from ..client.credentials import find_token
from ..client.server_url import ServerUrl, parse_server_url
from ..client.store_name import StoreName
from ..client.tls_settings import files_from_environment
from ..server.admin_path import identify, own_folder, remove
from ..server.listen_socket import listen, raise_file_limit
from ..server.owned_process import OwnedProcess
from ..server.process.child import ignore_signals
from .process import read_port

if TYPE_CHECKING:
    from .core import Relay

RELAY: Final = "TCPSTORE_RELAY"
"""Environment variable: 0 has PyTorch's clients connect directly, 1 has each torchrun agent run a relay."""

_PROGRAM: Final = """# the relay of this host's processes for a store
if os.fork():
    os._exit(0)
from tcpstore_async.relay.shared import main
main()
"""

_UNUSED_SECONDS: Final = 1.0
"""Time without a rank after which the relay removes the file, and after which it ends."""

_FIRST_SECONDS: Final = 10.0
"""Time until the first rank has to come."""

_POLL_SECONDS: Final = 0.02
"""Time between two looks at a relay that another process is starting."""

_START_SECONDS: Final = 30.0
"""Time for a relay to start, after which its ranks do without."""

_CONNECT_SECONDS: Final = 2.0

_LONGEST: Final = 256
"""Most bytes of an address in the file."""


class _Order(msgspec.Struct, array_like=True):
    """What the process of a relay is told."""

    server: str
    store: str
    incarnation: str
    host: str
    path: str
    lock: int
    """Descriptor of the locked file."""


def shared_relay(server: ServerUrl, name: StoreName, host: str, deadline: Deadline) -> tuple[str, int]:
    """Return the address of this host's relay for a store that has been entered; start the relay if there is none.

    It listens on `host`, an IP address, but on loopback, and for this user only, if the connection to the server is
    encrypted or a token is presented, as its ranks are let in without that. Raises DistNetworkError.
    """
    token = find_token()
    if server.tls or token:
        host = "127.0.0.1"
    key = json.dumps([server.tls, name.name, name.incarnation, host, hashlib.sha256(token).hexdigest()])
    left = deadline.left()
    limit = Deadline(_START_SECONDS if left is None else min(left, _START_SECONDS))
    try:
        path = own_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.relay"
        order = _Order(str(server), name.name, name.incarnation, host, str(path), -1)
        address = _find(path, order, limit)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DistNetworkError(
            f"cannot start a relay for the store {spelled(name.name)!r} on {server}: {error}"
        ) from None
    return address


def _find(path: Path, order: _Order, deadline: Deadline) -> tuple[str, int]:
    """Return the address in a file, after starting the relay if there is none. Raises what `_look` does."""
    tries = 2  # it may be killed while it starts
    while True:
        try:
            address = _look(path, order, deadline)
            if address is not None:
                return address
        except DistNetworkError:
            tries -= 1
            if not tries:
                raise
        if deadline.left() == 0:
            raise TimeoutError("it does not start")
        time.sleep(_POLL_SECONDS)


def _look(path: Path, order: _Order, deadline: Deadline) -> tuple[str, int] | None:
    """Return the address in a file, after starting the relay if there is none; None while another process does."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        file = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # the relay's standard streams take the numbers below
    finally:
        os.close(opened)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            address = _read(file)
            if address is None or _listens(address):
                return address
            remove(path, _identity(file))  # it was killed, and a process that it has nothing to do with holds the lock
            return None
        if identify(path) != _identity(file):
            return None  # its relay has removed it
        os.ftruncate(file, 0)
        order.lock = file
        _start(order, deadline)
        return _read(file)
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _read(file: int) -> tuple[str, int] | None:
    line = os.pread(file, _LONGEST, 0)
    if not line.endswith(b"\n"):
        return None
    host, port = line.decode().split()
    return host, int(port)


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _start(order: _Order, deadline: Deadline) -> None:
    """Start a relay, and wait until it listens. Raises OSError, SubprocessError and DistNetworkError."""
    arguments = [msgspec.json.encode(order).decode()]
    process = OwnedProcess(arguments, program=_PROGRAM, stdout=subprocess.PIPE, pass_fds=[order.lock])
    with closing(process):
        read_port(process.process, deadline.left())


# The relay's process


def main() -> None:
    """Be the relay that the order on the command line describes."""
    import uvloop

    order = msgspec.json.decode(sys.argv[1], type=_Order)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s relay: %(message)s")
    ignore_signals()
    raise_file_limit()
    try:
        uvloop.run(_serve(order))
    except DistError as error:
        sys.exit(f"tcpstore: the relay for the store {spelled(order.store)!r} has failed: {error}")


async def _serve(order: _Order) -> None:
    from ..serving import tune_gc  # not for processes that only look for a relay
    from .running import relay

    server = parse_server_url(order.server)
    name = StoreName(order.store)
    name.incarnation = order.incarnation
    listener = listen(order.host, 0)
    here = listener.getsockname()[:2]
    async with relay(
        server.all(),
        listener=listener,
        same_user=server.tls or bool(find_token()),
        tls=files_from_environment() if server.tls else None,
        store=name,
    ) as running:
        tune_gc()
        os.pwrite(order.lock, "{} {}\n".format(*here).encode(), 0)
        with suppress(OSError):  # the process that has started it has ended
            os.write(1, json.dumps({"port": here[1]}).encode() + b"\n")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(running.used.wait(), _FIRST_SECONDS)
        await _unused(running)
        remove(Path(order.path), _identity(order.lock))  # not that of a relay that has taken its place
        await _unused(running)


async def _unused(running: "Relay") -> None:
    """Wait until no rank has been connected for a while."""
    await asyncio.sleep(_UNUSED_SECONDS)
    while running.count:
        await running.empty.wait()
        await asyncio.sleep(_UNUSED_SECONDS)
