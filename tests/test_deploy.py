"""What is in deploy/: command lines as they are, but for address and port; files as their own tools read them."""

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
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.test_auth import KEY_LINE
from support import LIMIT, RawPeer, secret_file, tcpstore_server
from tcpstore_async.server.listen_socket import DEFER_ACCEPT
from tls.certificates import certificates

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.socket")])
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
SLURM_JOB = str(DEPLOY / "slurm-job.sh")

TO_THIS_MACHINE = {
    "::": "127.0.0.1",
    "29500": "0",
    "tcp://store.example:29500": "tcp://127.0.0.1:1",
    "/run/tcpstore/admin.sock": "admin.sock",
}
"""What is replaced in command lines, so that a test neither listens on the network nor fights for a port or a path."""


def name(path: Path) -> str:
    return path.name


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has this checkout's tcpstore, and what else the test puts into tmp_path."""
    (tmp_path / "tcpstore").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tcpstore_async "$@"\n')
    (tmp_path / "tcpstore").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
    )


@contextmanager
def started(words: list[str], folder: Path, environment: dict[str, str]) -> Iterator[int]:
    """Run a command line that starts a server or a relay; yields its port."""
    words = [TO_THIS_MACHINE.get(word, word) for word in words]
    if "--port" not in words:  # a relay's default
        words += ["--port", "0"]
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line, process.communicate(timeout=LIMIT)
            yield json.loads(line)["port"]
            process.terminate()
            assert process.wait(LIMIT) == 0
        finally:
            process.kill()


# systemd


def setting(unit: Path, key: str) -> str:
    [value] = re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=name)
def test_a_unit_starts_what_tells_systemd_that_it_is_ready(
    unit: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    assert setting(unit, "Type") == "notify"
    assert setting(unit, "LimitCORE") == "0"  # a dump would contain keys, values and tokens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LIMIT)
        environment |= {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": str(10**6 * int(setting(unit, "WatchdogSec"))),
        }
        with started(shlex.split(setting(unit, "ExecStart")), tmp_path, environment):
            assert manager.recv(999).startswith(b"READY=1\n")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_units() -> None:
    done = run(["systemd-analyze", "verify", *map(str, UNITS)], DEPLOY, {**os.environ})
    said = [line for line in done.stderr.splitlines() if "tcpstore" in line]
    assert (done.returncode, said) == (0, [])


def test_the_socket_is_that_of_the_service() -> None:
    port = setting(DEPLOY / "tcpstore.socket", "ListenStream").rpartition(":")[2]
    assert shlex.split(setting(DEPLOY / "tcpstore.service", "ExecStart"))[-1] == port
    assert setting(DEPLOY / "tcpstore.socket", "DeferAcceptSec") == str(DEFER_ACCEPT)


def test_root_can_look_into_the_service(tmp_path: Path, environment: dict[str, str]) -> None:
    """Its /tmp is hidden from others; its runtime directory is not."""
    unit = DEPLOY / "tcpstore.service"
    words = shlex.split(setting(unit, "ExecStart"))
    path = Path(words[words.index("--admin") + 1])
    assert path.parent == Path("/run", setting(unit, "RuntimeDirectory"))
    command = f"tcpstore who --admin {path}"
    assert command in unit.read_text()
    assert command in (ROOT / "docs" / "howto.md").read_text()
    with started(words, tmp_path, environment):
        asking = [TO_THIS_MACHINE.get(word, word) for word in shlex.split(command)]
        done = run(asking, tmp_path, environment)
        assert (done.returncode, done.stderr) == (0, "")


# The container


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def test_what_the_container_runs(tmp_path: Path, environment: dict[str, str]) -> None:
    made = dict(instructions())
    with started(json.loads(made["ENTRYPOINT"]) + json.loads(made["CMD"]), tmp_path, environment) as port:
        with RawPeer(port) as peer:
            peer.ping()
        probe = json.loads(made["HEALTHCHECK"].partition("CMD ")[2])
        probe += ["--url", f"tcp://127.0.0.1:{port}"]
        assert run(probe, tmp_path, environment).returncode == 0


def test_what_the_container_is_built_from() -> None:
    """Everything that building the package reads is copied."""
    assert {kind for kind, _ in instructions()} == {
        "FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"
    }  # fmt: skip
    copied = [word for kind, text in instructions() if kind == "COPY" for word in text.split()[:-1]]
    for path in copied:
        assert (ROOT / path).exists()
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "tcpstore_async"} == set(copied)


# Kubernetes


def commands(path: Path) -> list[list[str]]:
    """Command lines in a manifest, which are written as one line each."""
    found = re.findall(r"^\s*command: \[(tcpstore, .*)\]$", path.read_text(), re.MULTILINE)
    return [[word.strip().strip('"') for word in line.split(", ")] for line in found]


def test_what_the_base_runs(tmp_path: Path, environment: dict[str, str]) -> None:
    serve, ping = commands(DEPLOY / "kustomize" / "base" / "store.yaml")
    with started(serve, tmp_path, environment) as port:
        assert run([*ping, "--url", f"tcp://127.0.0.1:{port}"], tmp_path, environment).returncode == 0


@pytest.mark.parametrize("file", ["kustomize/base/store.yaml", "kubernetes-secure.yaml"])
def test_a_server_disconnects_peers_before_it_has_too_much_memory(file: str) -> None:
    text = (DEPLOY / file).read_text()
    [budget] = re.findall(r"budget_bytes=(\d+)", text)
    [gibibytes] = re.findall(r"limits: {memory: (\d+)Gi}", text)
    assert 1.5 * int(budget) < int(gibibytes) << 30


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kustomize_takes_the_base() -> None:
    done = run(["kubectl", "kustomize", str(DEPLOY / "kustomize" / "base")], DEPLOY, {**os.environ})
    assert done.returncode == 0, done.stderr
    made = {re.findall(r"^kind: (\w+)$", text, re.MULTILINE)[0]: text for text in done.stdout.split("\n---\n")}
    assert set(made) == {"NetworkPolicy", "Service", "StatefulSet"}
    label = "app.kubernetes.io/name: tcpstore\n"
    assert f"  selector:\n    {label}" in made["Service"] + "\n"
    for where in ("  selector:\n    matchLabels:\n      ", "    metadata:\n      labels:\n        "):
        assert where + label in made["StatefulSet"]
    assert f"  podSelector:\n    matchLabels:\n      {label}" in made["NetworkPolicy"]
    peers = made["NetworkPolicy"].partition("  ingress:\n")[2].partition("    ports:")[0]
    assert peers == '  - from:\n    - podSelector:\n        matchLabels:\n          tcpstore-client: "true"\n'


# Slurm


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_is_one(script: Path) -> None:
    assert subprocess.run(["sh", "-n", script], timeout=LIMIT, check=False).returncode == 0
    assert os.access(script, os.X_OK)
    assert "\nset -eu\n" in script.read_text()


RANK = """
import os, sys
from tcpstore_async import TCPStore

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, timeout=60) as store:
    store.set(f"rank{rank}", os.environ["LOCAL_RANK"])
    store.wait([f"rank{other}" for other in range(world)])
    sys.stdout.write(f"rank {rank} of {world} {sys.argv[1]}\\n")
"""

SRUN = """#!/bin/sh
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_LOCALID=1 "$@"
status=$?
wait
exit $status
"""


@pytest.fixture
def slurm(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a batch script of two tasks, with commands that stand for Slurm's."""
    (tmp_path / "rank.py").write_text(RANK)
    for command, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\necho another\n")):
        (tmp_path / command).write_text(text)
        (tmp_path / command).chmod(0o755)
    (tmp_path / "tmp").mkdir()
    allotted = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    return {**environment, **allotted, "TMPDIR": str(tmp_path / "tmp")}


def test_a_job_with_a_store_of_its_own(tmp_path: Path, slurm: dict[str, str]) -> None:
    done = run([SLURM_JOB, sys.executable, "rank.py", "of mine"], tmp_path, slurm)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 of mine", "rank 1 of 2 of mine"]
    assert re.search(r"^ok    server ", done.stderr, re.MULTILINE)  # doctor's report
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_job_that_fails(tmp_path: Path, slurm: dict[str, str]) -> None:
    assert run([SLURM_JOB, "false"], tmp_path, slurm).returncode == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_job_whose_server_does_not_start(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "tcpstore").write_text('#!/bin/sh\necho "Error: no such luck" >&2\nexit 1\n')
    done = run([SLURM_JOB, "true"], tmp_path, slurm)
    assert (done.returncode, done.stderr) == (1, "Error: no such luck\n")


def prolog(script: str, folder: Path, store: str = "") -> str:
    """The text of a script of a cluster with tokens, with this test's folders and server instead of the cluster's."""
    text = (DEPLOY / script).read_text()
    for place, own in (("/run/tcpstore", folder / "run"), ("/etc/tcpstore", folder / "etc")):
        assert place in text
        text = text.replace(place, str(own))
    return text.replace("store.example:29400", store)


@pytest.fixture
def cluster(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a job on a node that has the cluster's keys; commands that were run are in `tmp_path/pids`."""
    (tmp_path / "etc").mkdir()
    secret_file(tmp_path / "etc" / "token.keys", KEY_LINE)
    shutil.copy(certificates().ours.ca, tmp_path / "etc" / "ca.pem")
    tcpstore = (tmp_path / "tcpstore").read_text()
    (tmp_path / "tcpstore").write_text(tcpstore.replace("\nexec ", f"\necho $$ >>{tmp_path}/pids\nexec "))
    allotted = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_JOB_UID": str(os.getuid())}
    return {**environment, **allotted}


JOINING = """
import sys
from tcpstore_async import rendezvous

store, rank, world = next(rendezvous("env://"))
store.set(f"rank{rank}", b"here")
store.wait([f"rank{other}" for other in range(world)])
sys.stdout.write(f"{rank} of {world}\\n")
"""


def test_a_job_with_a_token_of_its_own(tmp_path: Path, cluster: dict[str, str]) -> None:
    keys = str(tmp_path / "etc" / "token.keys")
    options = ["--token-keys", keys, "--require-auth=all", *certificates().serving(), "--require-tls"]
    with tcpstore_server(*options) as server:
        script = prolog("slurm-secure-prolog.sh", tmp_path)
        subprocess.run(["sh", "-c", script], env=cluster, cwd=tmp_path, timeout=LIMIT, check=True)
        folder = tmp_path / "run" / "17"
        assert [path.name for path in folder.iterdir()] == ["token"]
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "token")] == [0o700, 0o600]
        script = prolog("slurm-secure-task-prolog.sh", tmp_path, f"127.0.0.1:{server.port}")
        tasks = [
            subprocess.Popen(
                ["sh", "-c", script], env=cluster | {"SLURM_LOCALID": str(task)}, cwd=tmp_path, stdout=subprocess.PIPE,
                text=True,
            )
            for task in reversed(range(2))
        ]  # fmt: skip
        try:
            said = [task.communicate(timeout=LIMIT)[0] for task in tasks]
            assert said[0] == said[1]
            exported = dict(line.removeprefix("export ").split("=", 1) for line in said[0].splitlines())
            assert (exported["MASTER_ADDR"], exported["MASTER_PORT"]) == ("job-17", "29500")
            relay = exported["TCPSTORE_SERVER_URL"]
            assert not relay.endswith(":20017")  # nor another port on which a stranger could listen first
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", JOINING], env={**cluster, **exported, "RANK": str(rank), "WORLD_SIZE": "2"},
                    cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                )
                for rank in range(2)
            ]  # fmt: skip
            assert [rank.communicate(timeout=LIMIT)[0] for rank in ranks] == ["0 of 2\n", "1 of 2\n"]
        finally:
            os.kill(int((tmp_path / "pids").read_text().split()[-1]), signal.SIGTERM)


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to give files to another user")
def test_a_prolog_writes_and_changes_nothing_where_the_user_could_have_put_a_link(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """What the user's other processes can reach while root is at work is neither written to nor given away."""
    user = 65534
    folder = tmp_path / "run" / "17"
    folder.mkdir(parents=True)  # left behind by the job before it was requeued
    os.chown(folder, user, user)
    (folder / "token").symlink_to(tmp_path / "mine")
    (tmp_path / "tcpstore").write_text(f'#!/bin/sh\nstat -c "%u %a" "{folder}" >"{tmp_path}/seen"\necho made\n')
    script = prolog("slurm-secure-prolog.sh", tmp_path)
    job = {**cluster, "SLURM_JOB_UID": str(user)}
    subprocess.run(["sh", "-c", script], env=job, cwd=tmp_path, timeout=LIMIT, check=True)
    assert (tmp_path / "seen").read_text() == "0 700\n"
    assert not (tmp_path / "mine").exists()
    assert (folder / "token").read_text() == "made\n"
    assert [path.stat().st_uid for path in (folder, folder / "token")] == [user, user]
