"""What the pages tell readers to type is typed: their commands run on this machine, their programs run.

Replaced are addresses and ports, so that a test neither listens on the network nor fights for a port. What is not on
this machine, such as a batch system, is listed with what checks it. The tutorial's programs have tests of their own.
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from page_shell import ROOT, STAYS, PageShell, blocks, commands, page_shell

import etcd_cluster
import tcpstore_async
from support import free_port, until
from tcpstore_async.cli import main

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("tutorial", "pytorch", "operate", "hangs"))]

ELSEWHERE = {
    "make": "tests/test_docs.py",
    "pip": "tests/test_install.py",
    "sbatch": "tests/test_deploy.py",
    "ssh": "forwards the port of a page that tests/tools/web tries",
    "vllm": "not on this machine; tests/names/test_many_groups.py runs a program of its kind",
}
"""Programs that are not run, and what tries them, or what they start, instead."""

MAY_FAIL = {
    "doctor": "this machine may lack what it looks for",
    "who --missing": "no rank is connected",
    "stacks": "no rank is connected",
}

TRAIN = """
import os, time
import torch.distributed
torch.distributed.init_process_group("gloo", init_method="env://")
torch.distributed.barrier()
while not os.path.exists("end"):
    time.sleep(0.01)
torch.distributed.destroy_process_group()
"""


REPLACED = [
    (r" +#.*", ""),
    (r"\b(HOST|STORE)\b|(?<=--host )::", "127.0.0.1"),
    ("--nnodes 2", "--nnodes 1"),
    ("--nproc-per-node 8", "--nproc-per-node 2"),
    ("…", "model"),
]
"""What is for a cluster, or for readers."""


@contextmanager
def reading(folder: Path) -> Iterator[PageShell]:
    """A shell in which no variable of ours is set, with a program to train."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TCPSTORE_")}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["XDG_RUNTIME_DIR"] = str(folder)
    with page_shell(folder, dict.fromkeys(ELSEWHERE, "exit 0"), REPLACED, env) as shell:
        (folder / "train.py").write_text(TRAIN)
        yield shell


def follow(shell: PageShell, line: str, shows_output: bool) -> None:
    """Type a line. What its comment says is printed is, if comments say that."""
    end = shell.folder / "end"
    if line == "kill %1":
        shell.stop([*shell.serving][-1])
    elif line.endswith(" &") and not STAYS.search(line):
        end.unlink(missing_ok=True)
        shell.background(line.removesuffix(" &"))
    elif name := next((name for name in MAY_FAIL if f"tcpstore {name}" in line), ""):
        assert shell.run(line)[0] in (0, 1), name
    else:
        end.touch()
        said = shell.type(line)
        shown = re.search(r"^tcpstore (?:get|add|keys).*?# (?:.* exit status )?(.+)$", line)
        if shown and shows_output:
            assert ", ".join(said.split()) == shown[1], line


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands(page: Path, tmp_path: Path) -> None:
    """The commands of a section work one after the other, with a server at the default address if none is started."""
    for number, text in enumerate(re.split(r"^#+ (?=[^\n]*\n\n)", page.read_text(), flags=re.MULTILINE)):
        lines = list(commands(text))
        if not lines:
            continue
        with reading(tmp_path / str(number)) as shell:
            shell.type("tcpstore serve --port 29500")
            shell.run(f"export TCPSTORE_URL=tcp://127.0.0.1:{shell.port('29500')}")
            for program in blocks(text, "python"):
                (shell.folder / "rank.py").write_text(program.replace("29600", str(free_port())))
            for line in lines:
                follow(shell, line, page.stem == "tutorial")
            (shell.folder / "end").touch()
            shell.wait()


@pytest.mark.slow
@pytest.mark.skipif(
    not etcd_cluster.programs() or find_spec("grpc") is None, reason="there is no etcd, or no gRPC: make etcd"
)
def test_a_store_outlives_its_server(tmp_path: Path) -> None:
    """What the page says, with torchrun: the server that serves is killed, and the job goes on."""
    page = (ROOT / "docs" / "survive.md").read_text().partition("\n## Outlive its host\n")[2].partition("\n## ")[0]
    _, export, doctor, serve, _, torchrun, relay = commands(page)
    with etcd_cluster.cluster(etcd_cluster.programs()[0]) as members:
        here = [
            ("http://E1:2379,http://E2:2379,http://E3:2379", ",".join(members.urls)),
            *((f"\\b{host}:29400", f"127.0.0.1:{port}") for host, port in (("A", 29400), ("B", 29450))),
            *((pattern, text) for pattern, text in REPLACED if pattern != "…"),
            ("…", "train.py"),
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TCPSTORE_")}
        with page_shell(tmp_path, {}, here, env | {"XDG_RUNTIME_DIR": str(tmp_path)}) as shell:
            (tmp_path / "train.py").write_text(TRAIN.replace("while", "open('begun', 'w').close()\nwhile"))
            shell.type(export)
            shell.run(doctor)
            assert re.search("^ok +etcd ", shell.read("out"), re.MULTILINE)
            shell.type(serve)
            shell.type(serve.replace("29400", "29450"))
            shell.type(relay)
            shell.background(torchrun)
            until((tmp_path / "begun").exists)
            os.kill(shell.serving.pop(shell.port("29400")), signal.SIGKILL)
            (tmp_path / "end").touch()
            shell.wait()


PRELUDE = """
import tcpstore_async
rank, world_size, store = 0, 1, tcpstore_async.HashStore()
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "tutorial"], ids=lambda page: page.stem)
def test_programs(page: Path, tmp_path: Path) -> None:
    with reading(tmp_path / "here") as shell:
        for text in blocks(page.read_text(), "python"):
            (shell.folder / "program.py").write_text(PRELUDE + text)
            shell.type("python program.py")


DOCUMENTS = [
    path
    for path in sorted({*PAGES, *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("*.md")})
    if path.name not in ("CHANGELOG.md", "NOTEBOOK.md")
]
FILES = [*DOCUMENTS, *(path for path in sorted(ROOT.glob("deploy/**/*")) if path.is_file() and path.suffix != ".json")]


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
