"""A program whose stores cannot be made, in every way there is: says what each of them leaves behind, as JSON.

Its arguments are the module with the class `TCPStore`, and where our server listens that holds named stores. Nothing is
collected: only what nobody refers to is gone.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TCPStore: Any = importlib.import_module(sys.argv[1]).TCPStore
NAMES = sys.argv[2]
SECOND = timedelta(seconds=1)
made: list["weakref.ref[Any]"] = []


class Watched(TCPStore):  # type: ignore[misc]
    def __new__(cls, *_: Any, **__: Any) -> Any:
        store = super().__new__(cls)
        made.append(weakref.ref(store))
        return store


class Local:
    """Stands for what the caller has in a local variable."""


def free_port() -> int:
    with socket.socket() as peer:
        peer.bind(("127.0.0.1", 0))
        return int(peer.getsockname()[1])


def port_taken(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        Watched("127.0.0.1", port, 1, True, SECOND)


def nobody_joins(port: int) -> None:
    Watched("127.0.0.1", port, 2, True, SECOND)


def no_answer(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        Watched("127.0.0.1", port, None, False, SECOND)


def refused(port: int) -> None:
    Watched("127.0.0.1", port, None, False, SECOND)


def unreachable(port: int) -> None:
    Watched("240.0.0.1", port, None, False, SECOND)


def unknown(port: int) -> None:
    Watched("no.such.host.invalid", port, None, False, SECOND)


def interrupted(port: int) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    Watched("127.0.0.1", port, 2, True, timedelta(seconds=60))


def no_names(port: int) -> None:
    os.environ["TCPSTORE_SERVER_URL"] = f"tcp://127.0.0.1:{port}"
    Watched("127.0.0.1", port, 1, True, SECOND)


def name_taken(port: int) -> None:
    os.environ["TCPSTORE_SERVER_URL"] = NAMES
    first = Watched("127.0.0.1", port, 1, True)
    try:
        Watched("127.0.0.1", port, 1, True, SECOND)
    finally:
        getattr(first, "close", int)()  # PyTorch's has none
        del first


def no_such_name(port: int) -> None:
    os.environ["TCPSTORE_SERVER_URL"] = NAMES
    Watched("127.0.0.1", port, None, False, SECOND)


def fails(how: Callable[[int], None], port: int) -> "weakref.ref[Local]":
    local = Local()
    try:
        how(port)
    except BaseException:
        return weakref.ref(local)
    finally:
        os.environ.pop("TCPSTORE_SERVER_URL", None)
    raise AssertionError(how)


def shows_locals(how: Callable[[int], None], port: int) -> None:
    """As pytest and others do; before Python 3.13 the frames keep what is shown."""
    try:
        how(port)
    except BaseException as error:
        assert list(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    finally:
        os.environ.pop("TCPSTORE_SERVER_URL", None)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_free(port: int) -> bool:
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            peer.bind(("127.0.0.1", port))
            peer.listen()
        except OSError:
            return False
        return True


WAYS = (
    *(port_taken, nobody_joins, refused, unreachable, unknown, interrupted, no_names, name_taken, no_such_name),
    *((no_answer,) if TCPStore.__module__.startswith("tcpstore_async") else ()),  # PyTorch's client waits for ever
)
fails(name_taken, free_port())  # what is imported and started at the first time stays
fails(unknown, free_port())
gc.collect()
gc.disable()
left: dict[str, Any] = {}
for way in WAYS:
    made.clear()
    before, port = descriptors(), free_port()
    local = fails(way, port)
    for thread in threading.enumerate():  # one may still wait for the end of the server
        if thread.name.startswith("tcpstore server"):
            thread.join(60)
    left[way.__name__] = {
        "stores": sum(store() is not None for store in made),
        "locals": local() is not None,
        "descriptors": descriptors() - before,
        "threads": sum(thread.name.startswith("tcpstore server") for thread in threading.enumerate()),
        "port": not is_free(port),
    }
    assert made
for way in (port_taken, nobody_joins, refused, interrupted, no_names, name_taken):
    shows_locals(way, free_port())
print(json.dumps(left))
