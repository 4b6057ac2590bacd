"""docs/security.md: its commands run as they are printed, in their order, and do what it says of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from conformance.frames import get, set_
from support import LIMIT, RawPeer, blob, free_port, tcpstore, until
from tcpstore_async.base.limits import Limits
from tcpstore_async.cli import main
from tcpstore_async.server.log_handlers import _MOST_PER_SECOND
from tcpstore_async.tools.web.http import MOST_CONNECTIONS

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()

FOREIGN = {"--rdzv-backend", "--rdzv-conf"}
"""torchrun's options."""


def commands(text: str) -> list[str]:
    """Return the commands in the blocks of a text, without comments."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line and not line.startswith("#")]


def section(heading: str) -> list[str]:
    """Return the commands of a section."""
    return commands(PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])


class Shell:
    """A shell that runs commands one by one; those that serve go on in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []
        self.serving: list[int] = []
        """The processes that serve."""
        self.errors = ""
        """What the last command has printed on standard error."""
        self.ports = {"29400": str(free_port()), "29500": str(free_port())}
        """What replaces the ports of the page, on which something else may listen."""
        self.process = subprocess.Popen(
            ["sh"], cwd=folder, env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def here(self, text: str) -> str:
        """Return a text of the page with the ports of this test."""
        for port, own in self.ports.items():
            text = text.replace(port, own)
        return text if socket.has_dualstack_ipv6() else text.replace("::", "127.0.0.1")

    def follow(self, heading: str) -> str:
        """Run the commands of a section, which succeed; return what they print."""
        printed = ""
        for command in section(heading):
            self.ran.append(command)
            if serves := re.search(r"tcpstore (serve|relay) ", command):
                self._start(command, serves[1])
            else:
                status, text = self.run(command)
                assert status == 0, (command, self.errors)
                printed += text
        return printed

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit status, and what it prints."""
        status = self._tell(f"{{ {self.here(command)}\n}} >out 2>err </dev/null; echo $?")
        self.errors = self.read("err")
        return int(status), self.read("out")

    def _start(self, command: str, name: str) -> None:
        for file in ("out", "log"):
            (self.folder / f"{name}.{file}").touch()
        self._tell(f"{{ {self.here(command)}\n}} >{name}.out 2>{name}.log </dev/null & echo")
        until(lambda: self.read(f"{name}.out").endswith("\n") or "Error" in self.read(f"{name}.log"))
        assert self.read(f"{name}.out"), self.read(f"{name}.log")
        pid = json.loads(self.read(f"{name}.out"))["pid"]
        self.serving.append(pid)
        (self.folder / f"{name}.pid").write_text(str(pid))

    def _tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def logged(self, text: str) -> None:
        """Wait until the server has logged this."""
        until(lambda: text in self.read("serve.log"))

    def ask(self, *words: str, ca: str = "store.pem", token: str = "job17.token") -> tuple[int, str]:
        """Run a command of this test's own, and return its exit status, and what it prints or why it failed."""
        files = {"TCPSTORE_CA": ca, "TCPSTORE_TOKEN_FILE": token}
        env = {**os.environ, **{name: str(self.folder / file) for name, file in files.items() if file}}
        if "--url" not in words:
            words = (*words, "--url", f"tcps://localhost:{self.ports['29400']}")
        done = tcpstore(*words, env=env)
        return done.returncode, (done.stderr if done.returncode else done.stdout).decode()

    def stop(self) -> None:
        """Stop what serves, relays first."""
        for pid in reversed(self.serving):
            os.kill(pid, signal.SIGTERM)
        self._tell("wait; echo")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:
            self.process.wait(LIMIT)


RELOAD = 'test "$*" = "reload tcpstore" && kill -HUP "$(cat serve.pid)"'
"""What stands for systemctl does as the unit says."""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "bin").mkdir()
    ours = f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m tcpstore_async "$@"'
    for name, text in (("tcpstore", ours), ("systemctl", RELOAD)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.kill()


RENEW = """openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=store \
    -addext subjectAltName=DNS:localhost -keyout new.key -out new.pem
cat store.pem new.pem > both.pem
mv new.key store.key && mv new.pem store.pem && systemctl reload tcpstore"""


@pytest.mark.skipif(sys.platform != "linux", reason="--same-user needs Linux")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_the_commands_run_from_top_to_bottom(shell: Shell) -> None:
    server, relay = shell.ports.values()

    def refused(answer: tuple[int, str], reason: str) -> None:
        assert answer[0] == 5, answer
        assert reason in answer[1]

    shell.follow("In brief")
    secrets = ("store.key", "token.keys", "job.token")
    assert {stat.S_IMODE((shell.folder / name).stat().st_mode) for name in secrets} == {0o600}
    refused(shell.ask("get", "k", "--url", f"tcp://127.0.0.1:{server}", token=""), "the server requires TLS")
    refused(shell.ask("get", "k", token=""), "the server requires a token")
    with RawPeer(int(relay)) as stock:
        stock.send(set_(b"/k", b"v"))
        assert stock.ask(get(b"/k"), 9) == blob(b"v")
        assert "WARNING" not in shell.read("serve.log").replace(" WARNING closed the connection", "")
        assert "WARNING" not in shell.read("relay.log")

        shell.follow("Require tokens")
        [job] = re.findall(r"created token (\w+) ", shell.errors)
        assert shell.follow("Encrypt connections") == "hello"
        refused(shell.ask("set", "18/greeting", "hello"), "only to keys with the prefix '17/'")
        refused(shell.ask("keys"), "covers the whole store")

        shell.follow("Rotate keys")
        shell.logged("SIGHUP: reloaded the token keys 2026b, 2026a and 0 revoked tokens")
        assert shell.run("tcpstore token create --token-keys token.keys > next.token")[0] == 0
        assert "signed by 2026b" in shell.errors
        assert shell.run(RENEW)[0] == 0, shell.errors
        until(lambda: shell.read("serve.log").count("reloaded the certificate") == 2)
        assert shell.ask("get", "17/greeting", ca="both.pem") == (0, "hello")

        shell.run(f"export TOKEN_ID={job}")
        shell.follow("Revoke")
        shell.logged("the token keys 2026b, 2026a and 1 revoked token")
        refused(shell.ask("get", "17/greeting"), f"token {job} is revoked")
        stock.ping()
        assert shell.run("echo $(head -1 token.keys) > token.keys; systemctl reload tcpstore")[0] == 0
        assert stock.closed()
        shell.logged("the key 2026a, which signed token")
        assert shell.ask("get", "k", token="next.token") == (0, "v")
    assert shell.ran == commands(PAGE)
    shell.stop()


def test_systemctl_reloads_as_the_test_does() -> None:
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in (ROOT / "deploy" / "tcpstore.service").read_text()


def options(command: click.Command) -> Iterator[str]:
    """Yield the options of a command and of those below it."""
    for parameter in command.params:
        yield from parameter.opts
    for other in command.commands.values() if isinstance(command, click.Group) else ():
        yield from options(other)


def test_options_commands_and_variables_that_the_page_names_exist() -> None:
    named = {word.partition("=")[0] for word in re.findall(r"(?<![\w-])--[a-z][a-z=-]+", PAGE)}
    assert named - set(options(main)) == FOREIGN
    assert set(re.findall(r"\btcpstore ([a-z]+)", PAGE)) <= set(main.commands)
    sources = "".join(path.read_text() for path in (ROOT / "tcpstore_async").rglob("*.py"))
    assert [name for name in set(re.findall(r"\bTCPSTORE_\w+", PAGE)) if f'"{name}"' not in sources] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("At most {} events per second get a line", Limits().audit_lines),
        ("passes on at most {} lines a second", _MOST_PER_SECOND),
        ("with at most {} connections", MOST_CONNECTIONS),
    ],
)
def test_numbers_are_those_of_the_code(text: str, number: int) -> None:
    assert text.format(number) in re.sub(r"\s+", " ", PAGE)
