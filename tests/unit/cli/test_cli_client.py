"""The client commands against our server and both of PyTorch's: results and exit status."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

import support
from support import LIMIT, server_of, tcpstore_server
from tcpstore_async.base.version import VERSION
from tcpstore_async.cli import main
from tcpstore_async.client.server_url import FORM

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted]

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def tcpstore(*words: str, url: str = "", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    done = support.tcpstore(*words, stdin=stdin, env={**os.environ, "TCPSTORE_URL": url} if url else None)
    assert b"Traceback" not in done.stderr
    return done


def in_this_process(*words: str, url: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    done = CliRunner().invoke(main, words, input=stdin, env={"TCPSTORE_URL": url})
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout_bytes, done.stderr_bytes)


@pytest.fixture(scope="module", params=["ours", "libuv", "legacy"])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Run]]:
    """A server, and what runs a command on it: in a process of its own with our server, so that it need not be with
    the others.
    """
    run = tcpstore if request.param == "ours" else in_this_process

    def runner(port: int) -> Run:
        return lambda *words, stdin=b"": run(*words, url=f"tcp://127.0.0.1:{port}", stdin=stdin)

    with server_of(request.param) as port:
        yield request.param, runner(port)


def test_the_commands(backend: tuple[str, Run]) -> None:
    kind, run = backend
    assert float(run("ping").stdout) >= 0
    assert run("set", "a", "hello").returncode == 0
    assert run("get", "a").stdout == b"hello"
    assert run("set", "bytes", "-", stdin=b"\xff\0\n").returncode == 0
    assert run("get", "bytes").stdout == b"\xff\0\n"
    assert json.loads(run("get", "bytes", "-o", "json").stdout) == {"value_base64": "/wAK"}
    assert json.loads(run("get", "a", "-o", "json").stdout) == {"value": "hello"}
    assert run("add", "n", "5").stdout == b"5\n"
    assert run("add", "n", "-7").stdout == b"-2\n"
    assert run("append", "a", "!").returncode == 0
    assert run("compare-set", "a", "hello!", "bye").stdout == b"bye"
    assert run("check", "a", "n").returncode == 0
    assert run("check", "a", "missing").returncode == 1
    assert run("wait", "a", "n").returncode == 0
    assert run("keys").stdout == b"a\nbytes\nn\n"
    assert json.loads(run("keys", "--prefix", "b", "-o", "json").stdout) == {"keys": ["bytes"]}
    assert run("num-keys").stdout == b"3\n"
    assert run("delete", "a").returncode == 0
    assert run("delete", "a").returncode == 1
    assert run("barrier", "b", "--world-size", "1").returncode == 0
    assert b"num_keys: 3\n" in run("info").stdout
    server = json.loads(run("info", "-o", "json").stdout)["server"]
    assert (server == "tcpstore_async") == (kind == "ours")
    pushed = run("queue", "push", "q", "item")
    if kind == "legacy":
        assert pushed.returncode == 1
        assert b"has no queues (PyTorch added them in 2.8, but not to its legacy server)" in pushed.stderr
        return
    assert pushed.returncode == 0
    assert run("queue", "len", "q").stdout == b"1\n"
    assert run("queue", "pop", "q").stdout == b"item"
    empty = run("queue", "pop", "q", "--no-block")
    assert (empty.returncode, empty.stderr) == (1, b"Error: queue is empty\n")


def test_add_to_text_exits_with_1(backend: tuple[str, Run]) -> None:
    _, run = backend
    assert run("set", "text", "abc").returncode == 0
    done = run("add", "text", "1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"Error: the server closed the connection: the value of 'text' is probably not a number\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_item_that_cannot_be_printed_goes_back() -> None:
    with tcpstore_server() as server:
        words = ["--url", f"tcp://127.0.0.1:{server.port}"]
        assert tcpstore("queue", "push", "q", "item", *words).returncode == 0
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "tcpstore_async", "queue", "pop", "q", *words]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT, check=False)
        assert (done.returncode, done.stderr) == (
            1,
            b"Error: cannot write to standard output: No space left on device\n",
        )
        assert tcpstore("queue", "pop", "q", *words).stdout == b"item"


def test_timeout_exits_with_3(backend: tuple[str, Run]) -> None:
    _, run = backend
    for words in (["get", "never"], ["wait", "never"], ["barrier", "never-complete", "--world-size", "2"]):
        done = run(*words, "--timeout", "0.5")
        assert done.returncode == 3
        assert done.stderr.startswith((b"Error: wait timeout after 500ms", b"Error: barrier timeout after 500ms"))
        assert done.stderr.count(b"\n") == 1


def test_unreachable_server_exits_with_4() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = tcpstore("get", "a", "--url", f"tcp://127.0.0.1:{port}", "--timeout", "0.1")
        assert done.returncode == 4
        assert f"(127.0.0.1, {port})".encode() in done.stderr
        assert done.stderr.count(b"\n") == 1


def test_info_local() -> None:
    assert b"limits.key_bytes: 8192\n" in tcpstore("info", "--local").stdout
    assert set(json.loads(tcpstore("info", "--local", "-o", "json").stdout)) == {"version", "build", "loop", "limits"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = tcpstore("completion", shell)
    assert done.returncode == 0
    assert f"_TCPSTORE_COMPLETE={shell}_complete".encode() in done.stdout


def test_bash_completes_commands() -> None:
    """Run the completion function as bash does when Tab is pressed."""
    script = tcpstore("completion", "bash").stdout.decode()
    folder = os.path.dirname(sys.executable)
    typed = 'COMP_WORDS=(tcpstore ch); COMP_CWORD=1; _tcpstore_completion tcpstore; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{typed}"],
        capture_output=True,
        timeout=LIMIT,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    assert done.stdout == b"check\n", done.stderr


def test_several_keys_are_deleted(backend: tuple[str, Run]) -> None:
    _, run = backend
    for key in ("job/1", "job/2", "job/3", "jo", "other"):
        assert run("set", key, "x").returncode == 0
    done = run("delete", "jo", "other", "gone")
    assert (done.returncode, done.stdout) == (1, b"2\n")  # one of them did not exist
    done = run("delete", "job/1", "job/2", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"deleted": 2})
    assert run("check", "job/3").returncode == 0
    assert json.loads(run("delete", "job/3", "-o", "json").stdout) == {"deleted": True}


def test_keys_of_a_prefix_are_deleted(backend: tuple[str, Run]) -> None:
    _, run = backend
    for key in ("run7/1", "run7/2", "run8/1"):
        assert run("set", key, "x").returncode == 0
    done = run("delete", "--prefix", "run7/")
    assert (done.returncode, done.stdout) == (0, b"2\n")
    assert run("keys", "--prefix", "run").stdout == b"run8/1\n"
    assert run("delete", "--prefix", "run7/").stdout == b"0\n"
    assert run("delete", "run8/1").returncode == 0


def test_what_delete_refuses() -> None:
    for words in ([], ["a", "--prefix", "b"], ["--prefix", ""]):
        assert tcpstore("delete", *words).returncode == 2
    assert b"it is empty, and would delete all keys" in tcpstore("delete", "--prefix", "").stderr


AT_ONCE = (["ping"], ["info"], ["keys"], ["num-keys"], ["check", "a"], ["queue", "len", "q"], ["latency"])


def test_who_operates_a_server_learns_at_once_that_there_is_none() -> None:
    """Without a limit of time: these would try forever."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for words in AT_ONCE:
            done = tcpstore(*words, "--url", address, "--timeout", "-1")
            error = f"Error: cannot connect to tcp://{address}: Connection refused; start a server there, or retry"
            assert (done.returncode, done.stderr) == (4, f"{error} with --wait\n".encode()), words
            done = tcpstore(*words, "--url", address, "--timeout", "0.1", "--wait")
            assert (done.returncode, b"Gave up after 0.1 s" in done.stderr) == (4, True)


def test_a_command_waits_for_a_server() -> None:
    port = support.free_port()
    found: list[subprocess.CompletedProcess[bytes]] = []
    words = ("ping", "--wait", "--timeout", str(LIMIT))
    waiting = threading.Thread(target=lambda: found.append(in_this_process(*words, url=f"127.0.0.1:{port}")))
    waiting.start()
    with support.listening(["serve", "--port", str(port)]):
        waiting.join(LIMIT)
        assert found[0].returncode == 0, found


@pytest.mark.parametrize(
    ("words", "awaited"),
    [
        (["get", "never"], "the key 'never' at "),
        (["wait", "never", "x"], "2 keys, 'never' and others at "),
        (["queue", "pop", "never"], "an item of the queue 'never' at "),
        (["barrier", "b", "--world-size", "2"], "2 callers at 'b' at "),
        (["get", "x", "--store", "none:1"], "the store 'none:1' ("),
    ],
)
def test_what_a_command_waits_for_is_said_on_a_terminal(words: list[str], awaited: str) -> None:
    with tcpstore_server() as server:
        command = [sys.executable, "-m", "tcpstore_async", *words, "--url", f"127.0.0.1:{server.port}"]
        mine, theirs = pty.openpty()
        try:
            with subprocess.Popen(
                [*command, "--timeout", str(LIMIT)], stderr=theirs, stdout=subprocess.PIPE
            ) as process:
                os.close(theirs)
                said = b""
                while f"waiting for {awaited}" not in said.decode():
                    assert select.select([mine], [], [], LIMIT)[0], said
                    said += os.read(mine, 4096)
                process.kill()
        finally:
            os.close(mine)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "tcp://127.0.0.1:{}", "[::1]:{}", "localhost:{}"])
def test_addresses(address: str) -> None:
    with tcpstore_server("--host", "::") as server:
        assert tcpstore("ping", "--url", address.format(server.port)).returncode == 0


def test_an_address_that_is_none() -> None:
    for address in ("nonsense", "127.0.0.1", "[::1]", ":29500", "node7:", "node7:x", "tcp://node7:x", "udp://node7:1"):
        done = tcpstore("ping", "--url", address)
        assert done.returncode == 2, address
        assert done.stderr.decode().endswith(f"{address!r} is not of the form HOST:PORT, {FORM}\n"), done.stderr
    for address in ("::1:29500", "tcp://::1:29500"):
        done = tcpstore("ping", "--url", address)
        assert done.returncode == 2
        assert done.stderr.endswith(b"write an IPv6 address in brackets, as in tcp://[::1]:29500\n"), done.stderr


def test_version() -> None:
    for option in ("-V", "--version"):
        assert tcpstore(option).stdout.endswith(f", version {VERSION}\n".encode())
