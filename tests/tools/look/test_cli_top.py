"""`tcpstore top`: what is on the screen, and that the terminal is as it was before, whatever ends the command."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from commands import run_command
from support import LIMIT, RawPeer, Server, blob, keys, tcpstore_server
from tcpstore_async.cli import main
from tcpstore_async.client.admin import ask
from tcpstore_async.diagnosis.rates import Look, between, read_look
from tcpstore_async.tools.look.top import screen


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    with tcpstore_server() as server, RawPeer(server.port) as one, RawPeer(server.port) as two:
        one.send(b"\x01" + blob(b"/[bold]large\x1b[2J") + blob(b"x" * 5000))
        one.join(1)
        two.send(b"\x06" + keys(b"/missing") + b"\x0d" + b"abcd")
        two.read(4)
        yield server


def look_at(server: Server) -> Look:
    return read_look(ask(Path(json.loads(server.ready)["admin"]), ["stats", "waits", "largest"], 60.0))


def drawn(server: Server, world_size: int | None, width: int = 120, height: int = 40) -> str:
    look = look_at(server)
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    before = look_at(server).stats
    before.commands["SET"] -= 10
    before.uptime -= 1.0
    console.print(screen(look, between(before, look.stats), world_size, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen(server: Server) -> None:
    text = drawn(server, 4)
    assert f"tcpstore 127.0.0.1:{server.port}" in text
    assert "connections 2 of " in text
    assert "waiting 1" in text
    assert "1 of 4 ranks have joined" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["SET"][1] == "1"
    assert rows["missing"][:1] == ["1"]
    assert "pid" in rows["missing"]
    assert rows["[bold]large\\x1b[2J"] == ["4.9", "KiB"]  # no markup, and escaped
    assert "\x1b" not in text
    assert "1 rank has joined" in drawn(server, None)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_it_fits_into_a_terminal(server: Server, width: int) -> None:
    text = drawn(server, 4, width, 24)
    assert max(len(line) for line in text.splitlines()) <= width
    if width >= 80:
        assert len(text.splitlines()) <= 24


def test_as_json(server: Server) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    done = CliRunner().invoke(main, ["top", "-o", "json", "--url", url, "--world-size", "4"])
    found: Any = json.loads(done.stdout)
    assert found.keys() == {"server", "now", "joined", "world_size", "waits", "largest", "stores", "other_stores"}
    assert (found["joined"], found["world_size"]) == (1, 4)
    assert [(one["key"], one["waiting"]) for one in found["waits"]] == [("missing", 1)]
    assert found["largest"][0] == {"key": "[bold]large\x1b[2J", "bytes": 5000, "store": None}
    assert found["now"]["connections"] == 2


def test_without_a_terminal(server: Server) -> None:
    done = run_command(server, "top")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr


@contextmanager
def terminal(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], int, list[Any]]]:
    """The command on a terminal, the other end of that, and the terminal's attributes before."""
    mine, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with subprocess.Popen(
            [sys.executable, "-m", "tcpstore_async", "top", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
        ) as process:
            yield process, mine, before
            assert termios.tcgetattr(theirs) == before
            process.kill()
    finally:
        os.close(mine)
        os.close(theirs)


def read_until(fd: int, text: bytes) -> bytes:
    data = b""
    while text not in data:
        data += os.read(fd, 4096)
    return data


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda process, fd: os.write(fd, b"xq"), 0),
        (lambda process, fd: process.send_signal(signal.SIGINT), -signal.SIGINT),
        (lambda process, fd: process.send_signal(signal.SIGTERM), -signal.SIGTERM),
    ],
)
def test_the_terminal_is_restored(
    server: Server, end: Callable[[subprocess.Popen[bytes], int], object], status: int
) -> None:
    with terminal("--url", f"tcp://127.0.0.1:{server.port}", "-i", "0.1") as (process, fd, _):
        read_until(fd, b"\x1b[?1049h")
        read_until(fd, b"q: quit")
        end(process, fd)
        read_until(fd, b"\x1b[?1049l")
        assert process.wait(LIMIT) == status


def test_a_server_that_ends(sockets: Path) -> None:
    """The error is printed once the screen is gone, so that it stays."""
    with (
        tcpstore_server() as server,
        terminal("--url", f"tcp://127.0.0.1:{server.port}", "-i", "0.1") as (process, fd, _),
    ):
        read_until(fd, b"q: quit")
        server.stop()
        shown = read_until(fd, b"Error: ")
        assert b"\x1b[?1049l" in shown
        assert process.wait(LIMIT) == 4


def test_without_rich(server: Server, tmp_path: Path) -> None:
    hidden = tmp_path / "rich.py"
    hidden.write_text("raise ImportError")
    monkey = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", monkey)
        with terminal("--url", f"tcp://127.0.0.1:{server.port}") as (process, fd, _):
            assert b"pip install" in read_until(fd, b"tcpstore-async[top]")
            assert process.wait(LIMIT) == 1
