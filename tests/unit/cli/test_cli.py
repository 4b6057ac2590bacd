"""`tcpstore serve`: output, addresses, limits and shutdown."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner
from web.requests import until

from support import LIMIT, RawPeer, blob, refused, tcpstore_server
from tcpstore_async.cli import main
from tcpstore_async.cli.listen import write_atomically
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.server.admin_path import find
from tcpstore_async.serving import build

pytestmark = [pytest.mark.slow, pytest.mark.measured]

COMMAND = [sys.executable, "-m", "tcpstore_async", "serve"]


@contextmanager
def serving(folder: Path, *options: str, inherit: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run `tcpstore serve` with exactly these options; kill it at the end if the test has not stopped it."""
    process = subprocess.Popen(
        [*COMMAND, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if inherit is None else (inherit,),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    event: dict[str, object] = json.loads(process.stdout.readline())
    return event


def end(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    """Stop the server, which must exit with status 0; return the rest of its stdout and stderr."""
    process.send_signal(number)
    rest = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    return rest


def fail(folder: Path, *options: str) -> str:
    """Run `serve`, which must fail with status 1 and without a traceback; return its stderr."""
    done = subprocess.run([*COMMAND, *options], cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def usage_error(*options: str) -> str:
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 2
    return result.output


def wait_until_refused(port: int) -> None:
    """Wait until the server no longer listens."""
    deadline = time.monotonic() + LIMIT
    while not refused(port):
        assert time.monotonic() < deadline, "the server still listens"


# Readiness


def test_ready_line(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0") as process:
        event = ready(process)
        port = event["port"]
        assert isinstance(port, int)
        assert event == {
            "event": "ready",
            "host": "127.0.0.1",
            "port": port,
            "pid": process.pid,
            "backend": "uv",
            "build": build(),
            "admin": str(find(port)[0]),
        }
        with RawPeer(port) as peer:
            peer.ping()
        stdout, stderr = end(process)
        assert stdout == ""  # only one line was printed
        assert f"listening on 127.0.0.1:{port}, up to " in stderr


def test_port_file_is_replaced_atomically(tmp_path: Path) -> None:
    file, other_name = tmp_path / "folder" / "port", tmp_path / "same"
    file.parent.mkdir()
    file.write_text("an old port, and a long one\n")
    other_name.hardlink_to(file)
    with serving(tmp_path, "--port", "0", "--port-file", str(file)) as process:
        event = ready(process)
        assert file.read_text() == f"{event['port']}\n"
        assert other_name.read_text() == "an old port, and a long one\n"  # replaced, not overwritten
        assert list(file.parent.iterdir()) == [file]  # no temporary file stays behind
        end(process)


def test_port_file_does_not_follow_links(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "port"
    victim.write_text("precious\n")
    file.symlink_to(victim)
    write_atomically(file, "29500\n")
    assert victim.read_text() == "precious\n"
    assert (file.read_text(), file.is_symlink()) == ("29500\n", False)


PLANTS = """
import os, sys
from pathlib import Path
from tcpstore_async.cli.listen import write_atomically
victim, file = map(Path, sys.argv[1:])

def plant(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = Path(arguments[0]).absolute()
        if path.parent == file.parent and not os.path.lexists(path):
            path.symlink_to(victim)

sys.addaudithook(plant)
write_atomically(file, "29500\\n")
"""
"""Whatever name in the folder is about to be written to, there is a link by then."""


def test_port_file_is_created_exclusively(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "folder" / "port"
    victim.write_text("precious\n")
    file.parent.mkdir()
    command = [sys.executable, "-c", PLANTS, str(victim), str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert victim.read_text() == "precious\n"
    assert [path.is_symlink() for path in file.parent.iterdir()] == [True], "one was planted, nothing written beside it"
    assert done.stderr.endswith(f"ClickException: cannot write the port to {file}: File exists\n")


def test_failed_port_file_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "port" / "in the way").mkdir(parents=True)
    with pytest.raises(ClickException, match="Is a directory"):
        write_atomically(tmp_path / "port", "29500\n")
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_unwritable_port_file(tmp_path: Path) -> None:
    assert "nowhere" in fail(tmp_path, "--port", "0", "--port-file", str(tmp_path / "nowhere" / "port"))


# Addresses


def test_listens_on_exactly_the_host_given(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0", "--host", "127.0.0.2") as process:
        event = ready(process)
        assert event["host"] == "127.0.0.2"
        port = event["port"]
        assert isinstance(port, int)
        socket.create_connection(("127.0.0.2", port), LIMIT).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LIMIT)
        end(process)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_wildcard_host_accepts_ipv4_and_ipv6(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0", "--host", "::") as process:
        event = ready(process)
        assert event["host"] == "::"
        port = event["port"]
        assert isinstance(port, int)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), LIMIT).close()
        end(process)


def test_listen_fd(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with serving(tmp_path, "--listen-fd", str(listener.fileno()), inherit=listener.fileno()) as process:
            listener.close()
            assert ready(process)["port"] == port
            with RawPeer(port) as peer:
                peer.ping()
            end(process)


def test_invalid_listen_fd(tmp_path: Path) -> None:
    said = fail(tmp_path, "--listen-fd", "999")
    assert said.endswith("Error: cannot listen on file descriptor 999: Bad file descriptor\n")


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = fail(tmp_path, "--port", str(port))
    assert said.startswith(f"Error: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert f"by pid {os.getpid()} (" in said or not Path("/proc/net/tcp").exists()
    assert said.count("\n") == 1


def test_foreign_host(tmp_path: Path) -> None:
    said = fail(tmp_path, "--port", "0", "--host", "192.0.2.1")  # an address for documentation
    assert said.startswith("Error: cannot listen on 192.0.2.1:0: ")
    assert said.count("\n") == 1


# Shutdown


def test_sigterm_ends_at_once_without_connections() -> None:
    with tcpstore_server("--grace", "100000") as server:
        assert server.stop(signal.SIGTERM) == 0


def test_sigint_does_not_wait_for_connections() -> None:
    with tcpstore_server("--grace", "100000") as server, RawPeer(server.port) as peer:
        peer.ping()
        assert server.stop(signal.SIGINT) == 0
        assert peer.closed()


def test_sigterm_drains_connections() -> None:
    with tcpstore_server("--grace", "100000") as server, RawPeer(server.port) as peer, RawPeer(server.port) as waiting:
        peer.ping()
        waiting.ping()
        server.process.send_signal(signal.SIGTERM)
        wait_until_refused(server.port)
        waiting.send(b"\x06" + (1).to_bytes(8, "little") + blob(b"key"))
        peer.send(b"\x01" + blob(b"key") + blob(b"value"))
        assert waiting.read(1) == b"\x00"
        waiting.close()
        peer.ping()
        assert server.process.poll() is None
        peer.close()
        assert server.process.wait(LIMIT) == 0


def test_grace_period_expires() -> None:
    with tcpstore_server("--grace", "0.2") as server, RawPeer(server.port) as peer:
        peer.ping()
        assert server.stop(signal.SIGTERM) == 0
        assert peer.closed()
        assert "closing 1 connection still open after 0.2 s" in server.log()


def test_sessions_of_a_broken_link_last_for_the_grace_period() -> None:
    with tcpstore_server("--link-grace", "7.5") as server, RawPeer(server.port) as peer:
        peer.send(ClientLink().request(validate=False))
        (size,) = struct.unpack("<Q", peer.read(8))
        assert json.loads(peer.read(size))["grace"] == 7.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_grace_period(number: int) -> None:
    with tcpstore_server("--grace", "100000") as server, RawPeer(server.port) as peer:
        peer.ping()
        server.process.send_signal(signal.SIGTERM)
        wait_until_refused(server.port)
        assert server.stop(number) == 0
        assert peer.closed()


# Options


def test_limit() -> None:
    with tcpstore_server("--limit", "key_bytes=4", "--limit", "keys=1") as server, RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"1234") + blob(b"value"))
        peer.ping()
        peer.send(b"\x01" + blob(b"12345"))
        assert peer.closed()
        assert "limit exceeded: key_bytes=5 (max 4)" in server.log()


@pytest.mark.parametrize("number", ["", "=", "=many", "=-1", "=1.5", "=1e9"])
def test_malformed_limit(number: str) -> None:
    assert "is not of the form NAME=NUMBER" in usage_error("--limit", f"keys{number}")


def test_unknown_limit() -> None:
    said = usage_error("--limit", "kyes=1")
    assert "unknown limit 'kyes'" in said
    assert "budget_bytes" in said  # the known ones are listed


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "http"],
        ["--grace", "-1"],
        ["--grace", "long"],
        ["--listen-fd", "-1"],
        ["--backend", "other"],
        ["--port-file", "/"],
        ["--prot", "1"],
        ["here"],
    ],
    ids=" ".join,
)
def test_bad_options(options: list[str]) -> None:
    usage_error(*options)


@pytest.mark.parametrize(
    "options",
    [["--tls-cert", "c", "--tls-key", "k"], ["--token-keys", "keys"], ["--link-grace", "30"]],
    ids=" ".join,
)
# quirk: legacy-server
def test_the_threaded_backend_serves_nothing_in_the_clear_instead(options: list[str]) -> None:
    said = usage_error("--backend", "threaded", *options)
    assert (
        f"has no TLS, tokens, links or journal: leave out {', '.join(one for one in options if one[0] == '-')}." in said
    )


def test_bad_options_as_a_process(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--port", "many"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_the_tests_run_outside_the_checkout(tmp_path: Path) -> None:
    """The server processes import the same package as the tests."""
    found = subprocess.run(
        [sys.executable, "-c", "import tcpstore_async; print(tcpstore_async.__file__)"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    import tcpstore_async

    assert found.stdout.strip() == tcpstore_async.__file__


# The log's format


def test_json_log(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0", "--log-format", "json") as process:
        assert ready(process)["event"] == "ready"  # as without
        stdout, stderr = end(process)
    assert stdout == ""
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert any(line["message"].startswith("listening on 127.0.0.1:") for line in lines)
    assert {line["logger"] for line in lines} == {"tcpstore_async.server"}


def test_an_error_is_the_last_line_of_a_json_log(tmp_path: Path) -> None:
    last = json.loads(fail(tmp_path, "--host", "192.0.2.1", "--port", "0", "--log-format", "json").splitlines()[-1])
    assert last["level"] == "CRITICAL"
    assert last["message"].startswith("cannot listen on 192.0.2.1:0: ")


def test_a_masters_server_does_not_linger() -> None:
    words = ("--owner-pid", "1", "--control-fd", "3", "--listen-fd", "4", "--linger")
    assert "--linger cannot be used with --owner-pid" in usage_error(*words)


def test_who_does_not_wait_for_imports_of_other_commands() -> None:
    """They would take a fifth of the second in which it is to answer."""
    program = (
        "import sys; from tcpstore_async.cli import main; main.commands['who']; "
        "print([name for name in ('asyncio', 'ssl', 'tcpstore_async.serving') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_log_level() -> None:
    """Of the server, and of its HTTP process."""
    with tcpstore_server("--log-level", "warning", "--http", "0.0.0.0:0") as server:
        until(lambda: "is reachable from other hosts" in server.log())
        assert server.stop(signal.SIGTERM) == 0
        lines = server.log().splitlines()
    assert all(" WARNING " in line for line in lines), lines


def test_help_shows_commands_and_hides_options_of_other_processes() -> None:
    assert "serve" in CliRunner().invoke(main, ["--help"]).output
    for command, hidden in (
        ("serve", ["--owner-pid", "--control-fd"]),
        ("relay", ["--owner-fd"]),
        ("http", ["--owner-fd", "--listen-fd", "--name"]),
    ):
        text = CliRunner().invoke(main, [command, "--help"]).stdout
        assert "internal" not in text
        assert not [name for name in hidden if f"{name} " in text]
