"""What commands say about themselves: the options of a connection stand once, in `tcpstore help connection`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from support import free_port
from tcpstore_async.cli import main

OPTIONS = ["--url", "--timeout", "--token-file", "--tls-ca", "--tls-cert", "--tls-key"]
ALL = "See 'tcpstore help connection' for --url, --timeout, --token-file, --tls-*."
SOME = {
    "doctor": "See 'tcpstore help connection' for --tls-*, --token-file.",
    "record": "See 'tcpstore help connection' for --tls-*.",
    "relay": "See 'tcpstore help connection' for --tls-*, --token-file.",
}
"""Commands that have only some of the options, or options of those names with another meaning."""


def said(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0
    return done.stdout


def commands(group: click.Group, *path: str) -> Iterator[tuple[list[str], click.Command]]:
    """Yield the commands, and the words that call them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield [*path, name], command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


EVERY = {" ".join(words): command for words, command in commands(main)}
CONNECTING = [name for name, command in EVERY.items() if {"url", "tls_ca"} <= {one.name for one in command.params}]


def test_the_topic_has_every_option_once() -> None:
    text = said("help", "connection")
    assert re.findall(r"^(-\S+)", text, re.MULTILINE) == OPTIONS
    for variable in ("TCPSTORE_URL", "TCPSTORE_TOKEN_FILE", "TCPSTORE_CA", "TCPSTORE_CERT", "TCPSTORE_KEY"):
        assert variable in text


@pytest.mark.parametrize("name", sorted({*CONNECTING, *SOME}))
def test_a_command_refers_to_the_topic_in_its_last_line(name: str) -> None:
    text = said(*name.split(), "--help")
    last = SOME.get(name, ALL)
    assert text.splitlines()[-1] == f"  {last}"
    for option in OPTIONS:
        left_out = option in last or (option.startswith("--tls-") and "--tls-*" in last)
        assert not (left_out and re.search(rf"^  {option}\b", text, re.MULTILINE)), option


def test_most_commands_connect() -> None:
    assert {"get", "queue pop", "who", "stores", "stores drop", "top", "bench", "replay"} < {*CONNECTING}
    assert "serve" not in CONNECTING


@pytest.mark.parametrize("name", ["serve", "completion", "token create"])
def test_other_commands_do_not(name: str) -> None:
    assert "help connection" not in said(*name.split(), "--help")


def test_what_help_leaves_out_is_completed() -> None:
    complete = ShellComplete(main, {}, "tcpstore", "_TCPSTORE_COMPLETE").get_completions
    assert [one.value for one in complete(["get"], "--u")] == ["--url"]


def test_help_of_a_command_and_of_the_program() -> None:
    assert said("help", "get") == said("get", "--help")
    assert said("help") == said("--help")
    assert said("help", "queue", "push") == said("queue", "push", "--help")
    done = CliRunner().invoke(main, ["help", "nope"])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "Error: No such command or topic 'nope'.")


# The variable that holds the address


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the default address, which is this one here, and the variable is that of stores in programs."""
    monkeypatch.delenv("TCPSTORE_URL", raising=False)
    monkeypatch.setenv("TCPSTORE_SERVER_URL", "tcp://node7:29500")
    for name in ("get", "check", "who"):
        [url] = [one for one in EVERY[name].params if one.name == "url"]
        monkeypatch.setattr(url, "default", f"tcp://127.0.0.1:{free_port()}")


ADVICE = "(TCPSTORE_SERVER_URL is for stores in programs; to use that server in commands, set TCPSTORE_URL)"


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("words", [["check", "k"], ["get", "k", "--timeout", "0.1"], ["who"]], ids=" ".join)
def test_only_the_variable_of_stores_is_set(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 4
    assert done.stderr.endswith(f" {ADVICE}\n")
    given = CliRunner().invoke(main, [*words, "--url", f"127.0.0.1:{free_port()}"])
    assert given.exit_code == 4
    assert "TCPSTORE_SERVER_URL" not in given.stderr
    monkeypatch.setenv("TCPSTORE_SERVER_URL", "")
    assert "TCPSTORE_SERVER_URL" not in CliRunner().invoke(main, words).stderr
