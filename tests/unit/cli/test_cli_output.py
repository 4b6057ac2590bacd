"""Output of the client commands: completeness, escaping, errors, JSON; and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from support import LIMIT, free_port, tcpstore, tcpstore_server
from tcpstore_async.cli import main, output

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted]

COMMAND = [sys.executable, "-m", "tcpstore_async"]

STORE = """
import sys, tcpstore_async
store = tcpstore_async.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
exec(sys.stdin.read())
store.num_keys()
store.close()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tcpstore_server() as server:
        yield f"tcp://127.0.0.1:{server.port}"


def prepare(url: str, code: str) -> None:
    command = [sys.executable, "-c", STORE, url.rpartition(":")[2]]
    subprocess.run(command, cwd=tempfile.gettempdir(), input=code.encode(), timeout=LIMIT, check=True)


def run(
    url: str, *words: str, shell: str | None = None, data: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command; in a shell, which may redirect it, if there is a script."""
    env = {**os.environ, "TCPSTORE_URL": url, **env}
    done = (
        tcpstore(*words, stdin=data, env=env)
        if shell is None
        else subprocess.run(
            ["bash", "-c", shell, "bash", *COMMAND, *words],
            cwd=tempfile.gettempdir(),
            env=env,
            input=data,
            capture_output=True,
            timeout=LIMIT,
            check=False,
        )
    )
    assert b"Traceback" not in done.stderr
    return done


# Complete output


def test_slow_reader_gets_complete_output_unbuffered(url: str) -> None:
    """Without a buffer, a write may be partial."""
    assert run(url, "set", "big", "-", data=bytes(3_000_000)).returncode == 0
    shell = '{ "$@"; echo $? >&2; } | { sleep 0.5; wc -c; }'
    done = run(url, "get", "big", shell=shell, PYTHONUNBUFFERED="1")
    assert (done.stdout.strip(), done.stderr) == (b"3000000", b"0\n")


class Half:
    """A raw stream of which every other write is refused and every other one takes half."""

    def __init__(self) -> None:
        self.taken = b""
        self.writes = 0
        self.read, self.write_end = os.pipe()

    def fileno(self) -> int:
        return self.write_end

    def write(self, data: memoryview) -> int | None:
        self.writes += 1
        if self.writes % 2:
            return None
        count = (len(data) + 1) // 2
        self.taken += data[:count]
        return count


def test_partial_writes_are_continued() -> None:
    stream = Half()
    output._write_all(stream, b"0123456789")
    assert stream.taken == b"0123456789"


def test_closed_stdout_is_an_error(url: str) -> None:
    assert run(url, "set", "k", "v", shell='"$@" >&-').returncode == 0
    done = run(url, "get", "k", shell='"$@" >&-')
    assert (done.returncode, done.stderr) == (1, b"Error: cannot write to standard output: it is closed\n")
    assert run(url, "check", "k", shell='"$@" >&-').returncode == 0
    assert run(url, "check", "missing", shell='"$@" >&-').returncode == 1


# Untrusted names


NAME = "\x1b]0;owned\x07second\nline\u202e"


@pytest.fixture
def named(url: str) -> Iterator[str]:
    prepare(url, f"store.set({NAME!r}, {NAME!r}); store.set('plain', '1')")
    yield url
    prepare(url, f"store.delete_key({NAME!r})")


def test_name_is_one_escaped_line(named: str) -> None:
    assert b"\\x1b]0;owned\\x07second\\nline\\u202e\n" in run(named, "keys").stdout
    assert b"second\nline" in run(named, "keys", "--raw").stdout


def test_name_is_escaped_on_a_terminal(named: str) -> None:
    """Run the command with a pseudo-terminal."""
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, "keys", "--url", named],
        cwd=tempfile.gettempdir(), stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, check=True,
    )  # fmt: skip
    assert b"\\x1b]0;owned\\x07second\\nline\\u202e\r\n" in done.stdout
    assert b"\x1b" not in done.stdout


def test_a_key_that_is_not_utf8_does_not_hide_the_others(url: str) -> None:
    written = [b"\xffa", b"\\xffa", "bad\u00e4".encode(), b"bad\xe4"]
    prepare(url, f"[store.set(key, 'value') for key in {written!r}]")
    try:
        assert run(url, "keys", "--prefix", "bad").stdout.splitlines() == [b"bad\xc3\xa4", b"bad\\xe4"]
        assert set(written) <= set(run(url, "keys", "--raw").stdout.splitlines())
        assert run(url, "keys", "--prefix", "\udcff", "--raw").stdout == b"\xffa\n"
        shown = json.loads(run(url, "keys", "-o", "json").stdout)["keys"]
        assert shown.count("\\xffa") == 2
        by_size = json.loads(run(url, "keys", "--sort", "size", "-o", "json").stdout)["keys"]
        assert sorted(one["key"] for one in by_size) == sorted(shown)
        by_size = json.loads(run(url, "keys", "--sort", "size", "--prefix", "bad\udce4", "-o", "json").stdout)["keys"]
        assert [one["key"] for one in by_size] == ["bad\\xe4"]
    finally:
        prepare(url, f"[store.delete_key(key) for key in {written!r}]")


def test_json_has_no_control_characters(url: str) -> None:
    said = output.to_json({"keys": ["\x1b\x7f\x9b\u202e\ufeff", "ä"]})
    assert said == '{"keys":["\\u001b\\u007f\\u009b\\u202e\\ufeff","ä"]}'
    assert json.loads(said) == {"keys": ["\x1b\x7f\x9b\u202e\ufeff", "ä"]}


def test_error_is_one_escaped_line(url: str) -> None:
    done = run(url, "wait", NAME, "--timeout", "0.2")
    assert done.returncode == 3
    assert done.stderr == b"Error: wait timeout after 200ms, keys: /\\x1b]0;owned\\x07second\\nline\\u202e\n"


def test_error_in_json(url: str) -> None:
    done = run(url, "get", "never", "-o", "json", "--timeout", "0.2")
    assert done.returncode == 3
    assert json.loads(done.stderr) == {"error": "wait timeout after 200ms, keys: /never", "status": 3}
    assert done.stdout == b""


@pytest.mark.parametrize("select", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["get"], "Missing argument 'KEY'."),
        (["add", "n", "x"], "Invalid value for 'AMOUNT': 'x' is not an integer"),
        (["get", "k", "--timeout", "soon"], "Invalid value for '--timeout': 'soon' is not a valid float."),
        (["queue", "len"], "Missing argument 'KEY'."),
        (["nonsense"], "No such command 'nonsense'."),
        ([], "Missing command."),
    ],
    ids=["argument", "amount", "option", "subcommand", "command", "nothing"],
)
def test_usage_error_in_json(words: list[str], select: list[str], error: str) -> None:
    for line in ([*words, *select], [*select, *words]):
        result = CliRunner().invoke(main, line)
        assert (result.exit_code, result.stdout) == (2, "")
        assert json.loads(result.stderr) == {"error": error, "status": 2}


@pytest.mark.parametrize(
    "words", [["get"], ["get", "-o", "text"], ["get", "-o", "json", "-o", "text"], ["get", "--", "-o", "json", "x"]]
)
def test_usage_error_in_text(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")


def test_output_error_in_json() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "info", "--local", "-o", "json"], stdout=full, stderr=subprocess.PIPE, timeout=LIMIT, check=False
        )
    assert done.returncode == 1
    error = "cannot write to standard output: No space left on device"
    assert json.loads(done.stderr) == {"error": error, "status": 1}


# Arguments


def test_options_before_the_command(url: str) -> None:
    port = url.rpartition(":")[2]
    assert run("tcp://127.0.0.1:1", "--url", f"tcp://127.0.0.1:{port}", "-o", "json", "num-keys").stdout.startswith(
        b"{"
    )
    assert run("tcp://127.0.0.1:1", f"--url={url}", "queue", "len", "q").stdout == b"0\n"
    assert b"No such option" in run(url, "--prot", "1", "get").stderr


def test_invalid_amount(url: str) -> None:
    done = run(url, "add", "n", str(2**63))
    assert done.returncode == 2
    assert b"is out of range for a 64-bit integer" in done.stderr


def test_error_names_the_exceeded_limit(url: str) -> None:
    for words in (["set", "k", "-"], ["append", "k", "-"], ["queue", "push", "k", "-"]):
        done = run(url, *words, data=bytes(9_000_000))
        assert done.returncode == 1
        assert b"the 9000000-byte value probably exceeds the server's limit (8388608" in done.stderr
    done = run(url, "set", "k" * 9000, "v")
    assert (done.returncode, b"the 9001-byte key probably exceeds the server's limit (8192" in done.stderr) == (
        1,
        True,
    )
    done = run(f"tcp://127.0.0.1:{free_port()}", "set", "k", "-", "--timeout", "0.2", data=bytes(9_000_000))
    assert done.returncode == 4


def test_help_of_barrier(url: str) -> None:
    said = run(url, "barrier", "--help").stdout
    assert b"WORLD_SIZE" not in said
    assert b"--world-size N" in said


# Ctrl-C


@pytest.mark.unmeasured
@pytest.mark.parametrize("module", ["click", "uvloop", "tcpstore_async.cli.client"])
def test_ctrl_c_during_an_import(module: str) -> None:
    code = (
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['tcpstore', 'check', 'k']\n"
        "import runpy; runpy.run_module('tcpstore_async', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tempfile.gettempdir(), capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.unmeasured
@pytest.mark.needs_proc
@pytest.mark.parametrize(
    "words",
    [["check", "k"], ["get", "k"], ["queue", "pop", "k"], ["barrier", "k", "--world-size", "2"], ["bench"]],
    ids=" ".join,
)
def test_ctrl_c_is_130_in_a_shell(words: list[str]) -> None:
    """The command dies of the signal, so that a shell's loop ends too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            ["bash", "-c", '"$@"; echo $?', "bash", *COMMAND, *words, "--timeout", "-1", "--url", url],
            cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as shell:  # fmt: skip
            silent.settimeout(LIMIT)
            peer, _ = silent.accept()
            [command] = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
            os.kill(int(command), signal.SIGINT)
            out, errors = shell.communicate(timeout=LIMIT)
            peer.close()
    assert (out, errors) == (b"130\n", b"Error: interrupted\n" if words == ["bench"] else b"")


_LOGGING = """
import logging
from tcpstore_async.cli.stdio import log_without_blocking

log_without_blocking()
log = logging.getLogger("tcpstore_async.server")
log.warning("refused: %s", "\\x1b]0;owned\\x07\\n2026-11-23 all is well\\u202e")
try:
    raise ValueError("\\x1b[2J")
except ValueError:
    log.exception("internal error")
"""


def test_log_lines_are_printable() -> None:
    """A relay, for one, logs why a server refused it, in the server's words."""
    done = subprocess.run([sys.executable, "-c", _LOGGING], capture_output=True, timeout=LIMIT, check=True)
    first, second, *traceback = done.stderr.decode().splitlines()
    assert first.endswith(r"WARNING refused: \x1b]0;owned\x07\n2026-11-23 all is well\u202e")
    assert second.endswith("ERROR internal error")
    assert traceback[-1] == r"ValueError: \x1b[2J"
    assert b"\x1b" not in done.stderr
