"""The path of a server's admin socket, which other processes find by the server's port.

Knows files and their owners. Must not know what is said over the socket.
Invariants: the default path is in a folder that only this user can enter. An existing file is replaced only if it is a
socket on which no process listens; the new one appears under its name once it listens. The server that made it removes
it, unless another one has replaced it.
"""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..base.errors import DistNetworkError

_MOST_BYTES: Final = 107
"""Longest path of a socket on Linux; other systems allow slightly less."""

_BACKLOG: Final = 16


def folders() -> list[Path]:
    """Return the folders of the admin sockets of this user's servers, the preferred one first."""
    shared = Path("/tmp") / f"tcpstore-{os.geteuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_private(runtime):
        return [Path(runtime) / "tcpstore", shared]
    return [shared]


def find(port: int) -> list[Path]:
    """Return the admin sockets of this user's servers with this port, usually one."""
    found: list[Path] = []
    for folder in folders():
        if _is_private(folder):
            found += [
                path for path in [folder / f"{port}.sock", *sorted(folder.glob(f"{port}-*.sock"))] if is_live(path)
            ]
    return found


def own_folder() -> Path:
    """Return the preferred folder, which is created if need be. Raises DistNetworkError."""
    folder = folders()[0]
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise DistNetworkError(f"cannot create the directory {folder}: {error.strerror}") from None
    if not _is_private(folder):
        raise DistNetworkError(
            f"{folder} must be a directory that belongs to this user and that no other user can access"
        )
    return folder


def default_path(port: int) -> Path:
    """Return the path for a server with this port, and create its folder. Raises DistNetworkError."""
    folder = own_folder()
    _remove_leftovers(folder)
    path = folder / f"{port}.sock"
    return folder / f"{port}-{os.getpid()}.sock" if is_live(path) else path


def is_live(path: Path) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


def listen(path: Path) -> socket.socket:
    """Listen at a path, for this user only; return the socket. Raises DistNetworkError."""
    temporary = path.with_name(f".{os.urandom(4).hex()}")
    if len(os.fsencode(path)) > _MOST_BYTES or len(os.fsencode(temporary)) > _MOST_BYTES:
        raise DistNetworkError(f"cannot listen at {path}: the path of a Unix socket is limited to {_MOST_BYTES} bytes")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise DistNetworkError(f"cannot listen at {path}: it exists and is not a socket")
            if is_live(path):
                raise DistNetworkError(f"cannot listen at {path}: another server is listening there")
        try:
            listener.bind(str(temporary))
            os.chmod(temporary, 0o600)  # before listen(), so that no other user can connect
            listener.listen(_BACKLOG)
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise DistNetworkError(f"cannot listen at {path}: {error.strerror}") from None
        raise
    return listener


def identify(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file at a path, for `remove`; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: Path, identity: tuple[int, int] | None) -> None:
    """Remove the file at a path if it is still the same."""
    if identity is not None and identify(path) == identity:
        with suppress(OSError):
            path.unlink()


def _is_private(folder: str | Path) -> bool:
    """Return whether this is a folder, not a link, that belongs to this user and that no other can enter."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _remove_leftovers(folder: Path) -> None:
    """Remove the sockets of servers that were killed."""
    with suppress(OSError):
        for path in folder.glob("*.sock"):
            identity = identify(path)  # first: a server that starts now may put its own socket there
            if not is_live(path):
                remove(path, identity)
