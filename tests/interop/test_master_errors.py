"""A master whose socket cannot be had, or is no good: PyTorch's errors in its words, on both backends."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tcpstore_async
from support import tcpstore_server

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the words are those of 2.13")


def bound(kind: socket.SocketKind = socket.SOCK_STREAM, family: int = socket.AF_INET) -> socket.socket:
    made = socket.socket(family, kind)
    if family == socket.AF_INET:
        made.bind(("127.0.0.1", 0))
    return made


def pipe() -> int:
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


DESCRIPTORS: dict[str, tuple[Callable[[], int], int | None]] = {
    "another port": (lambda: bound().detach(), 1),
    "no descriptor": (lambda: 9999, 1),
    "negative": (lambda: -5, 1),
    "no socket": (pipe, 1),
    "udp": (lambda: bound(socket.SOCK_DGRAM).detach(), None),
    "unix": (lambda: bound(family=socket.AF_UNIX).detach(), 1),
    "no port": (lambda: bound().detach(), 0),
}
"""What makes a descriptor, and the port that is asked for; None for its own."""


def refused(store: Any, fd: int | None, port: int, use_libuv: bool) -> tuple[list[str], str]:
    """The classes and the text of the error, without what is another number each time."""
    more = {} if fd is None else {"master_listen_fd": fd}
    with pytest.raises(RuntimeError) as caught:
        store("127.0.0.1", port, 1, True, wait_for_workers=False, use_libuv=use_libuv, **more)
    text = re.sub(r"(fd|port|socket:) \d{2,}|(?<=fd )\d|(?<=socket: )\d", "N", stock_text(caught.value))
    return [kind.__name__ for kind in type(caught.value).__mro__], text


def stock_text(error: BaseException) -> str:
    """An error's text without PyTorch's stack, and without what follows PyTorch's text in ours."""
    return re.sub(r"; port \d+ is in use by .*", "", str(error).partition("\nException raised")[0])


def port_of(fd: int) -> int:
    with closing(socket.socket(fileno=os.dup(fd))) as one:
        number: int = one.getsockname()[1]
        return number


@pytest.mark.parametrize("use_libuv", [True, False])
@pytest.mark.parametrize("what", DESCRIPTORS)
def test_an_unusable_descriptor(what: str, use_libuv: bool) -> None:
    if what == "no port" and use_libuv:
        pytest.skip("it takes that")
    found = []
    for store in (tcpstore_async.TCPStore, dist.TCPStore):
        make, port = DESCRIPTORS[what]
        fd = make()
        found.append(refused(store, fd, port_of(fd) if port is None else port, use_libuv))
        if what == "no socket":
            os.close(fd)
    assert found[0] == found[1]


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_port_that_is_taken(use_libuv: bool) -> None:
    with closing(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)) as taken:
        port = taken.getsockname()[1]
        ours = refused(tcpstore_async.TCPStore, None, port, use_libuv)
        assert ours == refused(dist.TCPStore, None, port, use_libuv)


AGENT = [
    ("y", "P"), ("1", " P"), ("True", "x"), ("True", ""), ("", " P"), ("0", "P"), ("maybe", "P"), (None, "x"),
    ("0", "x"), ("1", "Pz"), ("YES", "P"), ("T", "P"), ("on", "P"), ("1", None), ("1", "9" * 30), ("1", "+P"),
    (" 1", "P"), ("n", "x"),
]  # fmt: skip
"""TORCHELASTIC_USE_AGENT_STORE and MASTER_PORT, in which P is the port."""


@pytest.mark.parametrize(("flag", "master_port"), AGENT)
def test_ranks_that_join_the_agent(flag: str | None, master_port: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with tcpstore_server("--host", "::") as server:
        for name, text in (("TORCHELASTIC_USE_AGENT_STORE", flag), ("MASTER_PORT", master_port)):
            monkeypatch.delenv(name, raising=False)
            if text is not None:
                monkeypatch.setenv(name, text.replace("P", str(server.port)))
        assert outcome(tcpstore_async.TCPStore, server.port) == outcome(dist.TCPStore, server.port)


def outcome(store: Any, port: int) -> tuple[str, str]:
    """What a master becomes of whose port is taken: a client, or an error."""
    try:
        made = store("127.0.0.1", port, 1, True, wait_for_workers=False)
    except RuntimeError as error:
        return type(error).__name__, stock_text(error)
    if isinstance(made, tcpstore_async.TCPStore):
        made.close()
    return "", ""
