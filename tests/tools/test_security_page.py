"""docs/security.md: its commands run as they are printed, in their order, and do what it says of them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from page_shell import ROOT, PageShell, commands

from conformance.frames import get, set_
from support import RawPeer, blob, tcpstore, until
from tcpstore_async.base.limits import Limits
from tcpstore_async.cli import main
from tcpstore_async.server.log_handlers import _MOST_PER_SECOND
from tcpstore_async.tools.web.http import MOST_CONNECTIONS

PAGE = (ROOT / "docs" / "security.md").read_text()

FOREIGN = {"--rdzv-backend", "--rdzv-conf"}
"""torchrun's options."""


def section(heading: str) -> list[str]:
    """Return the commands of a section."""
    return list(commands(PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]))


class Shell(PageShell):
    def follow(self, heading: str) -> str:
        """Run the commands of a section, which succeed; return what they print."""
        return "".join(map(self.type, section(heading)))

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


RELOAD = 'test "$*" = "reload tcpstore" && kill -HUP "$(cat serve.pid)"'
"""What stands for systemctl does as the unit says."""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(
        tmp_path, {"systemctl": RELOAD}, () if socket.has_dualstack_ipv6() else [("::", "127.0.0.1")], os.environ
    )
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
    server, relay = shell.port("29400"), shell.port("29500")

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
    assert shell.ran == list(commands(PAGE))
    for port in (relay, server):
        shell.stop(port)


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
