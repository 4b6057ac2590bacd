"""What the pages tell readers to type is typed: their commands run on this machine, their programs run.

Replaced are addresses and ports, so that a test neither listens on the network nor fights for a port. What is not on
this machine, such as a batch system, is listed with what checks it. The tutorial's programs have tests of their own.
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

import tcpstore_async
from support import LIMIT, free_port
from tcpstore_async.cli import main

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("tutorial", "pytorch", "operate", "hangs"))]

ELSEWHERE = {
    "make": "tests/test_docs.py",
    "pip": "tests/test_install.py",
    "sbatch": "tests/test_deploy.py",
    "ssh": "forwards the port of a page that tests/tools/web tries",
    "vllm": "not on this machine; tests/names/test_many_groups.py runs a program of its kind",
}
"""Programs that are not run, and what tries them, or what they start, instead."""

STAYS = re.compile(r"\btcpstore (serve|relay|http|stat -i)\b")
"""Commands that go on until they are stopped. Their first line says that they are ready."""

MAY_FAIL = {"doctor": "this machine may lack what it looks for"}

TRAIN = """
import os, time
import torch.distributed
torch.distributed.init_process_group("gloo", init_method="env://")
torch.distributed.barrier()
while not os.path.exists("end"):
    time.sleep(0.01)
torch.distributed.destroy_process_group()
"""


def blocks(text: str, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Reader:
    """Types commands, line by line, into a shell that remembers what was exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[str]] = {}
        """What was started and goes on, by its port; a server on the same port replaces it."""
        self.ports: dict[str, str] = {}
        self.shows_output = False
        """Whether comments say what is printed."""
        for name in ELSEWHERE:
            self._program(name, "exit 0")
        self._program("tcpstore", f'exec {shlex.quote(sys.executable)} -m tcpstore_async "$@"')
        self._program("python", f'exec {shlex.quote(sys.executable)} "$@"')
        (folder / "train.py").write_text(TRAIN)
        path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TCPSTORE_")},
            "PATH": path, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "XDG_RUNTIME_DIR": str(folder),
        }  # fmt: skip
        (folder / "exported").write_text("")

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def _port(self, found: re.Match[str]) -> str:
        return self.ports.setdefault(found[0], str(free_port()))

    def _here(self, line: str) -> str:
        """Return the line for this machine."""
        line = re.sub(r" +#.*", "", line)
        line = re.sub(r"\b(HOST|STORE)\b|(?<=--host )::", "127.0.0.1", line)
        line = re.sub(r"\b(29[456]\d\d|9400)\b", self._port, line)
        line = line.replace("--nnodes 2", "--nnodes 1").replace("--nproc-per-node 8", "--nproc-per-node 2")
        return line.replace("…", "model")

    def type(self, line: str) -> None:
        """Type a line. What a comment of the tutorial says is printed is printed."""
        shown = re.search(r"^tcpstore (?:get|add|keys).*?# (?:.* exit status )?(.+)$", line)
        line = self._here(line)
        if line.startswith("export "):
            with (self.folder / "exported").open("a") as exported:
                exported.write(line + "\n")
            return
        if line == "kill %1":
            _end(self.running.popitem()[1])
        elif STAYS.search(line):
            self._start(line)
        elif line.endswith(" &"):
            (self.folder / "end").unlink(missing_ok=True)
            self.running[line] = self._shell(line.removesuffix(" &"))
        else:
            (self.folder / "end").touch()
            with self._shell(line) as shell:
                try:
                    said, _ = shell.communicate(timeout=LIMIT)
                finally:
                    _end(shell)
            may_fail = any(f"tcpstore {name}" in line for name in MAY_FAIL)
            assert shell.returncode == 0 or may_fail, f"{line}: {said}{self._log()}"
            if shown and self.shows_output:
                assert ", ".join(said.split()) == shown[1], line

    def _start(self, line: str) -> None:
        # A page's reader has one command line with --port; a relay is at its own default.
        if "serve" in line and "--port " not in line:
            line = line.replace(
                "tcpstore serve", f"tcpstore serve --port {self.ports.setdefault('29500', str(free_port()))}"
            )
        to_file = re.search(r"> (\w+)", line)
        line = re.sub(r" > \w+|( &)$", "", line)
        port = re.search(r"--port (\d+)", line)
        key = port[1] if port else line
        if key in self.running:
            _end(self.running.pop(key))
        shell = self._shell(line, exec_=True)
        self.running[key] = shell
        assert shell.stdout is not None
        ready = shell.stdout.readline()
        assert ready, f"{line}: {self._log()}"
        if to_file:
            (self.folder / to_file[1]).write_text(ready)

    def _shell(self, line: str, exec_: bool = False) -> subprocess.Popen[str]:
        if exec_ and "=" not in line.split()[0]:
            line = f"exec {line}"
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
            ["bash", "-c", f". ./exported; {line}"],
            cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip

    def _log(self) -> str:
        return (self.folder / "log").read_text()

    def done(self) -> None:
        """Let the jobs in the background end by themselves, and end the rest."""
        (self.folder / "end").touch()
        for line, shell in self.running.items():
            if line.endswith("&"):
                said, _ = shell.communicate(timeout=LIMIT)
                assert shell.returncode == 0, f"{line}: {said}{self._log()}"


def _end(shell: subprocess.Popen[str]) -> None:
    """End a process and those that it has started."""
    if shell.poll() is None:
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(LIMIT)
    if shell.stdout is not None:
        shell.stdout.close()


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    folder.mkdir()
    reader = Reader(folder)
    try:
        yield reader
        reader.done()
    finally:
        for shell in reader.running.values():
            _end(shell)


def commands(text: str) -> Iterator[str]:
    """Yield the command lines of a text's blocks."""
    for block in blocks(text, "sh", "bash", "console"):
        shows = re.search(r"^\$ ", block, re.MULTILINE)
        for line in block.splitlines():
            if line.strip() and not line.startswith("#") and (not shows or line.startswith("$ ")):
                yield line.removeprefix("$ ")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands(page: Path, tmp_path: Path) -> None:
    """The commands of a section work one after the other, with a server at the default address if none is started."""
    for number, text in enumerate(re.split(r"^#+ (?=[^\n]*\n\n)", page.read_text(), flags=re.MULTILINE)):
        lines = list(commands(text))
        if not lines:
            continue
        with reading(tmp_path / str(number)) as reader:
            reader.type("tcpstore serve --port 29500")
            reader.environment["TCPSTORE_URL"] = f"tcp://127.0.0.1:{reader.ports['29500']}"
            reader.shows_output = page.stem == "tutorial"
            for program in blocks(text, "python"):
                (reader.folder / "rank.py").write_text(program.replace("29600", str(free_port())))
            for line in lines:
                reader.type(line)


PRELUDE = """
import tcpstore_async
rank, world_size, store = 0, 1, tcpstore_async.HashStore()
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "tutorial"], ids=lambda page: page.stem)
def test_programs(page: Path, tmp_path: Path) -> None:
    with reading(tmp_path / "here") as reader:
        for text in blocks(page.read_text(), "python"):
            (reader.folder / "program.py").write_text(PRELUDE + text)
            reader.type("python program.py")


DOCUMENTS = [
    path
    for path in sorted({*PAGES, *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("*.md")})
    if path.name not in ("CHANGELOG.md", "NOTEBOOK.md")
]
FILES = [*DOCUMENTS, *(path for path in sorted(ROOT.glob("deploy/*")) if path.suffix != ".json")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_variables(file: Path) -> None:
    """They are those of the reference, and `TCPSTORE_INSTALL` has one of its values."""
    known = set(re.findall(r"`(TCPSTORE_[A-Z]+)`", (ROOT / "docs" / "reference.md").read_text()))
    text = file.read_text()
    assert set(re.findall(r"\bTCPSTORE_[A-Z]+\b", text)) <= known
    values = re.findall(r"\bTCPSTORE_INSTALL=([\w,]+)", text)
    values += re.findall(r"TCPSTORE_INSTALL\n +value: \"?([\w,]+)", text)
    assert set(values) <= {"0", "1", "python", "classes", "python,classes", "native"}


CALLED: dict[str, Callable[..., Any]] = {
    "TCPStore": tcpstore_async.TCPStore,
    "AsyncTCPStore.connect": tcpstore_async.AsyncTCPStore.connect,
    "serve": tcpstore_async.serve,
    "barrier": tcpstore_async.Store.barrier,
}
LOGGERS = {
    name
    for path in (ROOT / "tcpstore_async").rglob("*.py")
    for name in re.findall(r'getLogger\("tcpstore_async\.(\w+)"', path.read_text())
}
OTHERS_ERRORS = {"RendezvousClosedError", "RendezvousConnectionError"}
"""PyTorch's."""


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_calls_and_errors_in_sentences(page: Path) -> None:
    """What a page calls exists and takes these arguments; the errors that it names exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for said in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"\w+Error", said) and said not in OTHERS_ERRORS and not hasattr(builtins, said):
            assert hasattr(tcpstore_async, said) or said in ("ProtocolError", "JournalError", "PeerError"), said
        for name in re.findall(r"\btcpstore_async\.([A-Za-z]\w*)\b(?!\.)", said):
            assert name in LOGGERS or hasattr(tcpstore_async, name), said
        for name, given in re.findall(r"\b([A-Za-z]\w*(?:\.connect)?)\(([^()]*)\)", said):
            if name in CALLED:
                known = inspect.signature(CALLED[name]).parameters
                assert set(re.findall(r"\b(\w+)=(?!=)", given)) <= set(known), said


def test_command_lines_in_sentences() -> None:
    """They name commands and options that exist."""
    wrong = []
    for page in DOCUMENTS:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for said in re.findall(
            r"`(?:tcpstore )?((?<=tcpstore )[^`\n]+|(?:serve|relay|token create|who) --[^`\n]+)`", text
        ):
            words = [word.strip("…()") for word in said.split() if word.strip("…()|")]
            command: click.Command = main
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                name = words.pop(0).split("|")[0].rstrip(",")
                if name == "COMMAND":
                    break
                found = command.get_command(click.Context(command), name)
                if found is None:
                    wrong.append(f"{page.name}: tcpstore {said}")
                    break
                command = found
            known = {option for parameter in (*main.params, *command.params) for option in parameter.opts}
            given = {word.partition("=")[0].partition("|")[0] for word in words if word.startswith("-")}
            if not given <= known | {"--help", "-h", "--"}:
                wrong.append(f"{page.name}: tcpstore {said}")
    assert wrong == []
