"""Types what a page says, command by command, into one shell on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support import LIMIT, free_port, until

ROOT = Path(__file__).parent.parent.parent

PORTS = re.compile(r"\b(29[456]\d\d|9400)\b")
"""Ports of the pages, on which something else may listen here: another one stands for each."""

STAYS = re.compile(r"\btcpstore (serve|relay|http|stat -i)\b")
"""Commands that go on until they are stopped. Their first line says that they are ready."""


def blocks(text: str, *languages: str) -> list[str]:
    """Return the blocks of a page in these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """Yield the commands in the blocks of a text; where there are prompts, not what is printed."""
    for block in blocks(text, "sh", "bash", "console"):
        shows = re.search(r"^\$ ", block, re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#") and (not shows or line.startswith("$ ")):
                yield line.removeprefix("$ ")


class PageShell:
    """A shell in a folder; commands that stay go on in the background."""

    def __init__(
        self, folder: Path, programs: Mapping[str, str], replaced: Sequence[tuple[str, str]], env: Mapping[str, str]
    ) -> None:
        """`programs` are shell scripts that stand for what is not here; `replaced` are patterns and texts for them."""
        self.folder = folder
        self.replaced = replaced
        self.ran: list[str] = []
        self.errors = ""
        """What the last command has printed on standard error."""
        self.ports: dict[str, str] = {}
        """Keyed by the page's."""
        self.serving: dict[str, int] = {}
        """The processes that serve, by their ports."""
        ours = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}"
        (folder / "bin").mkdir(parents=True)
        known = {"tcpstore": f'{ours} -m tcpstore_async "$@"', "python": f'{ours} "$@"', **programs}
        for name, text in known.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash"], cwd=folder, env={**env, "PATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def port(self, port: str) -> str:
        """Return the port that stands for one of the page's."""
        return self.ports.setdefault(port, str(free_port()))

    def here(self, command: str) -> str:
        """Return a command of the page for this machine."""
        for pattern, text in self.replaced:
            command = re.sub(pattern, text, command)
        return PORTS.sub(lambda found: self.port(found[0]), command)

    def type(self, command: str) -> str:
        """Run a command of the page, which succeeds; return what it prints."""
        self.ran.append(command)
        if stays := STAYS.search(command):
            self._start(command, stays[1].split()[0])
            return ""
        status, printed = self.run(command)
        assert status == 0, (command, printed, self.errors)
        return printed

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit status, and what it prints."""
        status = self._tell(f"{{ {self.here(command)}\n}} >out 2>err </dev/null; echo $?")
        self.errors = self.read("err")
        return int(status), self.read("out")

    def _start(self, command: str, name: str) -> None:
        command = re.sub(r"( *&)?( +#.*)?$", "", command)
        to_file = re.search(r" > (\w+)$", command)
        out, log = to_file[1] if to_file else f"{name}.out", f"{name}.log"
        if name == "serve" and "--port " not in command:
            command += " --port 29500"
        named = re.search(r"--port (\d+)", command)
        port = self.here(named[1]) if named else name
        if port in self.serving:
            self.stop(port)
        for file in (out, log):
            (self.folder / file).write_text("")
        self._tell(f"{{ {self.here(command)}\n}} >{out} 2>{log} </dev/null & disown; echo")
        until(lambda: "\n" in self.read(out) or "Error" in self.read(log))
        first = self.read(out).partition("\n")[0]
        assert first, (command, self.read(log))
        if first.startswith("{"):
            self.serving[port] = json.loads(first)["pid"]
            (self.folder / f"{name}.pid").write_text(str(self.serving[port]))

    def background(self, command: str) -> None:
        """Run a command that ends later: see `wait`."""
        self._tell(f"{{ {self.here(command)}\n}} >job.out 2>job.err </dev/null & job=$!; echo")

    def wait(self) -> None:
        """Wait for the last command in the background, if any, which succeeds."""
        assert self._tell('[ -z "$job" ] || wait $job; echo $?') == "0\n", (self.read("job.out"), self.read("job.err"))

    def _tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def stop(self, port: str) -> None:
        """Stop what serves at a port, and wait for its end."""
        pid = self.serving.pop(port)
        self._tell(f"kill {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.01; done; echo")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:
            self.process.wait(LIMIT)


@contextmanager
def page_shell(
    folder: Path,
    programs: Mapping[str, str],
    replaced: Sequence[tuple[str, str]] = (),
    env: Mapping[str, str] = os.environ,
) -> Iterator[PageShell]:
    """A shell that is killed at the end, with everything that it has started."""
    shell = PageShell(folder, programs, replaced, env)
    try:
        yield shell
    finally:
        shell.kill()
