"""What is in deploy/: command lines as they are, but for address and port; files as their own tools read them."""

from __future__ import annotations

import functools
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any, NamedTuple

import click
import pytest

import etcd_cluster
from server.test_auth import KEY_LINE
from support import LIMIT, RawPeer, free_port, secret_file, tcpstore_server, until
from tcpstore_async import TCPStore
from tcpstore_async.cli import main
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
    "--host=::": "--host=127.0.0.1",
    "29500": "0",
    "--port=29400": "--port=0",
    "--port=29500": "--port=0",
    "--store-ports=30000-30999": "--store-ports=any",
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
    if not {"--port", "--port=0"} & {*words}:  # a relay's default
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
    command = shlex.split(setting(DEPLOY / "tcpstore.service", "ExecStart"))
    assert command[command.index("--port") + 1] == port
    assert setting(DEPLOY / "tcpstore.socket", "DeferAcceptSec") == str(DEFER_ACCEPT)


def test_root_can_look_into_the_service(tmp_path: Path, environment: dict[str, str]) -> None:
    """Its /tmp is hidden from others; its runtime directory is not."""
    unit = DEPLOY / "tcpstore.service"
    words = shlex.split(setting(unit, "ExecStart"))
    path = Path(words[words.index("--admin") + 1])
    assert path.parent == Path("/run", setting(unit, "RuntimeDirectory"))
    command = f"tcpstore who --admin {path}"
    assert command in unit.read_text()
    assert any(command in page.read_text() for page in (ROOT / "docs").glob("*.md"))
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

REPLICATED = DEPLOY / "replicated"
MANIFESTS = [*sorted(DEPLOY.glob("kubernetes-*.yaml")), REPLICATED]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")

Object = dict[str, Any]


def kubectl(manifest: str, *words: str) -> list[Object]:
    """Have kubectl change objects, without a cluster, and return them."""
    line = ["kubectl", *words, "--local", "-f", "-", "-o", "json"]
    settings = {**os.environ, "KUBECONFIG": os.devnull}
    done = subprocess.run(
        line, input=manifest, env=settings, timeout=LIMIT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(done.stderr)
    objects, text = [], done.stdout.strip()
    while text:
        found, end = json.JSONDecoder().raw_decode(text)
        objects.append(found)
        text = text[end:].lstrip()
    return objects


@functools.cache
def text_of(manifest: Path) -> str:
    """Return the objects of a file, or those that Kustomize makes of a folder."""
    if not manifest.is_dir():
        return manifest.read_text()
    done = run(["kubectl", "kustomize", str(manifest)], manifest, {**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def read(manifest: str) -> list[Object]:
    """Return objects with all their fields, even those that their kinds do not have."""
    objects = kubectl(manifest, "annotate", "unused-")
    for found in objects:
        if not found["metadata"]["annotations"]:
            del found["metadata"]["annotations"]
    return objects


def known(found: Object) -> Object:
    """Return an object that has pods with those fields that Kubernetes knows. Raises ValueError for wrong types."""
    return kubectl(json.dumps(found), "set", "serviceaccount", "nobody")[0]


JOB = "batch/v1"
POD = "v1"
KINDS = {JOB: "Job", POD: "Pod"}
"""Kinds that kubectl knows, of templates."""

JOB_SET: Object = {
    "replicatedJobs": [{"name": str, "dependsOn": [{"name": str, "status": {"Ready", "Complete"}}], "template": JOB}],
    "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
    "failurePolicy": {"maxRestarts": int, "restartStrategy": {"Recreate", "BlockingRecreate"}},
}
RUNTIME: Object = {"mlPolicy": {"numNodes": int, "torch": {}}, "template": {"spec": JOB_SET}}
TRAINER = "trainer.kubeflow.org/v1alpha1"
LABELS = {"matchLabels": dict}
SPECS: dict[tuple[str, str], Object] = {
    ("v1", "Service"): {
        "clusterIP": {"None"},
        "publishNotReadyAddresses": bool,
        "internalTrafficPolicy": {"Local"},
        "selector": dict,
        "ports": [{"name": str, "port": int, "targetPort": str}],
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector": LABELS,
        "policyTypes": [{"Ingress", "Egress"}],
        "ingress": [{"from": [{"podSelector": LABELS}], "ports": [{"protocol": {"TCP"}, "port": int, "endPort": int}]}],
        "egress": [{"to": [{"podSelector": LABELS}], "ports": [{"protocol": {"TCP", "UDP"}, "port": int}]}],
    },
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable": int, "selector": LABELS},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "leaderWorkerTemplate": {
            "size": int,
            "restartPolicy": {"RecreateGroupOnPodRestart"},
            "leaderTemplate": POD,
            "workerTemplate": POD,
        },
    },
    (TRAINER, "TrainingRuntime"): RUNTIME,
    (TRAINER, "ClusterTrainingRuntime"): RUNTIME,
    (TRAINER, "TrainJob"): {
        "runtimeRef": {"apiGroup": {"trainer.kubeflow.org"}, "kind": str, "name": str},
        "trainer": {"image": str, "command": [str], "numNodes": int, "numProcPerNode": int},
    },
}
"""What the definitions of these kinds have for the fields that our files use, in all versions since JobSet 0.8,
LeaderWorkerSet 0.4 and Kubeflow Trainer 2.1."""


def wrong_fields(found: Object) -> list[str]:
    """Return the fields of an object that its kind does not have, or whose values it does not take."""
    spec = SPECS.get((found["apiVersion"], found["kind"]))
    if spec is None:
        return _dropped(found)
    names = {"name": str, "labels": dict}
    rest = {name: value for name, value in found.items() if name not in ("apiVersion", "kind")}
    return _misfits(rest, {"metadata": names, "spec": spec})


def _misfits(value: Any, allowed: Any, path: str = "") -> list[str]:
    if isinstance(allowed, str):
        return _dropped({"metadata": {}, **value, "apiVersion": allowed, "kind": KINDS[allowed]}, path)
    if isinstance(allowed, dict):
        if not isinstance(value, dict):
            return [path]
        return [
            wrong
            for name, inner in value.items()
            for wrong in (_misfits(inner, allowed[name], f"{path}.{name}") if name in allowed else [f"{path}.{name}"])
        ]
    if isinstance(allowed, list):
        if not isinstance(value, list):
            return [path]
        return [wrong for n, inner in enumerate(value) for wrong in _misfits(inner, allowed[0], f"{path}[{n}]")]
    fits = value in allowed if isinstance(allowed, set) else isinstance(value, allowed)
    return [] if fits else [path]


def _dropped(value: Object, path: str = "") -> list[str]:
    """Return the fields that kubectl does not keep as they are."""
    try:
        return _missing(value, known(value), path)
    except ValueError as error:
        return [f"{path}: {error}"]


def _missing(value: Any, kept: Any, path: str) -> list[str]:
    if isinstance(value, dict) and isinstance(kept, dict):
        return [
            lost
            for name, inner in value.items()
            for lost in (_missing(inner, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"])
        ]
    if isinstance(value, list) and isinstance(kept, list) and len(value) == len(kept):
        return [
            lost for n, inner in enumerate(zip(value, kept, strict=True)) for lost in _missing(*inner, f"{path}[{n}]")
        ]
    return [] if value == kept else [path]


@needs_kubectl
@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_manifests_have_only_fields_of_their_kinds(file: Path) -> None:
    for found in read(text_of(file)):
        assert wrong_fields(found) == []


@needs_kubectl
def test_a_runtime_may_be_for_all_namespaces() -> None:
    text = (DEPLOY / "kubernetes-trainer.yaml").read_text()
    for found in read(re.sub("kind: TrainingRuntime$", "kind: ClusterTrainingRuntime", text, flags=re.MULTILINE)):
        assert wrong_fields(found) == []


@needs_kubectl
@pytest.mark.parametrize(
    ("file", "field", "misspelled"),
    [
        ("kubernetes-plain.yaml", "readinessProbe", "readynessProbe"),
        ("kubernetes-plain.yaml", "completionMode", "mode"),
        ("kubernetes-jobset.yaml", "dependsOn", "dependOn"),
        ("kubernetes-jobset.yaml", "status: Ready", "status: Running"),
        ("kubernetes-jobset.yaml", "backoffLimit", "backofLimit"),
        ("kubernetes-lws.yaml", "startupProbe", "startProbe"),
        ("kubernetes-trainer.yaml", "numNodes: 2", "numNodes: two"),
        ("kubernetes-trainer.yaml", "mountPath", "path"),
        ("replicated", "podAntiAffinity", "podAntiafinity"),
        ("replicated", "maxUnavailable: 1", "maxUnavailable: one"),
    ],
)
def test_wrong_fields_are_found(file: str, field: str, misspelled: str) -> None:
    text = text_of(DEPLOY / file)
    assert field in text
    assert any(wrong_fields(found) for found in read(text.replace(field, misspelled)))


def inside(value: Any, key: str) -> list[Object]:
    """Return all objects with this key, however deep they are."""
    if isinstance(value, list):
        return [found for inner in value for found in inside(inner, key)]
    if not isinstance(value, dict):
        return []
    return ([value] if key in value else []) + [found for inner in value.values() for found in inside(inner, key)]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def serving(pod: Object) -> list[Object]:
    return [found for found in containers(pod) if found.get("command", ())[:2] == ["tcpstore", "serve"]]


def parse(words: list[str]) -> Object:
    """Return the options of a command line of ours, as the command itself parses them."""
    assert words[0] == "tcpstore"
    command, found, rest = main.resolve_command(click.Context(main), words[1:])
    assert command is not None
    assert found is not None
    return found.make_context(command, rest).params


@needs_kubectl
@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_our_commands_in_manifests(file: Path) -> None:
    lines = [found["command"] for found in inside(read(text_of(file)), "command")]
    ours = [line for line in lines if line[0] == "tcpstore"]
    assert ours
    for line in ours:
        parse(line)


@needs_kubectl
@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_variables_in_manifests_are_read(file: Path) -> None:
    used = {variable["name"] for found in inside(read(text_of(file)), "env") for variable in found["env"]}
    ours = {variable for variable in used if variable.startswith("TCPSTORE_")}
    known = set(re.findall(r"`(TCPSTORE_[A-Z_]+)`", (ROOT / "docs" / "reference.md").read_text()))
    assert ours <= known
    of_pytorch = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
    of_pytorch |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"}
    of_torchrun = {variable for variable in used if variable.startswith("PET_")}
    assert used - ours - of_pytorch - of_torchrun <= {"TRAIN_JOB", "POD"}


SERVING = [file for file in MANIFESTS if file.name != "kubernetes-daemonset.yaml"]


@needs_kubectl
@pytest.mark.parametrize("file", SERVING, ids=name)
def test_a_server_in_a_pod(file: Path) -> None:
    """It disconnects peers before it has too much memory, and can be looked into."""
    [(pod, server)] = [(pod, one) for pod in inside(read(text_of(file)), "containers") for one in serving(pod)]
    memory = server["resources"]["limits"]["memory"]
    assert memory.endswith("Gi")
    assert 1.5 * parse(server["command"])["limits"].budget_bytes < int(memory.removesuffix("Gi")) << 30
    assert server["securityContext"]["readOnlyRootFilesystem"]
    [volume] = [mount["name"] for mount in server["volumeMounts"] if mount["mountPath"] == "/tmp"]
    assert {"name": volume, "emptyDir": {}} in pod["volumes"]


@needs_kubectl
@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_names_in_a_manifest_are_those_of_other_parts(file: Path) -> None:
    objects = read(text_of(file))
    for found in inside(objects, "replicatedJobs"):
        jobs = [job["name"] for job in found["replicatedJobs"]]
        assert set(found["successPolicy"]["targetReplicatedJobs"]) < set(jobs)
        for n, job in enumerate(found["replicatedJobs"]):
            assert {needed["name"] for needed in job.get("dependsOn", ())} <= set(jobs[:n])
    for found in inside(objects, "runtimeRef"):
        kind, name = found["runtimeRef"]["kind"], found["runtimeRef"]["name"]
        assert [kind, name] in [[other["kind"], other["metadata"]["name"]] for other in objects]
    labels = [found["metadata"]["labels"] for found in inside(objects, "spec") if "labels" in found.get("metadata", ())]
    for found in objects:
        wanted = [inner["matchLabels"] for inner in inside(found, "matchLabels")]
        wanted += [found["spec"]["selector"]] if found["kind"] == "Service" else []
        for selected in wanted:
            assert any(selected.items() <= had.items() for had in labels)
    for found in objects:
        claims = {claim["metadata"]["name"] for claim in found.get("spec", {}).get("volumeClaimTemplates", ())}
        for pod in inside(found, "containers"):
            volumes = {volume["name"] for volume in pod.get("volumes", ())} | claims
            assert {mount["name"] for one in containers(pod) for mount in one.get("volumeMounts", ())} == volumes
    for found in inside(objects, "completions"):
        assert found["completions"] == found["parallelism"]
        sizes = {
            variable["value"]
            for inner in inside(found, "value")
            for variable in [inner]
            if inner["name"] == "WORLD_SIZE"
        }
        assert sizes == {str(found["completions"])}


def variables(container: Object, fields: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Return the variables of a container, as Kubernetes sets them; `given` are those that a controller puts first."""
    made = dict(given)
    for variable in container["env"]:
        text = variable["value"] if "value" in variable else fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        made[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], text)
    return made


RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
JOB_NAME = "metadata.labels['batch.kubernetes.io/job-name']"
JOB_SET_NAME = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"


@needs_kubectl
@pytest.mark.parametrize(
    ("file", "address"),
    [
        ("kubernetes-plain.yaml", "tcpstore"),
        ("kubernetes-jobset.yaml", "train-17-store-0-0.train-17"),
        ("kubernetes-lws.yaml", "vllm-0.vllm.default"),
    ],
)
def test_ranks_find_the_store(file: str, address: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """Two ranks, with the variables of their pods, on the server of the manifest; meanwhile, the page's command."""
    pods = inside(read((DEPLOY / file).read_text()), "containers")
    [server] = [one for pod in pods for one in serving(pod)]
    rank = next(one for pod in pods for one in pod["containers"] if "env" in one)
    [asking] = re.findall(r"^kubectl exec \S+.* -- (tcpstore who --missing.*)$", section(file), re.MULTILINE)
    with started(server["command"], tmp_path, environment) as port:
        for probe in inside(server, "exec"):
            asked = [*probe["exec"]["command"], "--url", f"tcp://127.0.0.1:{port}"]
            assert run(asked, tmp_path, environment).returncode == 0

        def start(number: int) -> subprocess.Popen[str]:
            fields = {INDEX: str(number), RESTARTS: "0", JOB_NAME: "train-17"}
            given = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(number)}
            made = variables(rank, fields, given)
            made = {name: text.replace(f"{address}:29500", f"127.0.0.1:{port}") for name, text in made.items()}
            if made.get("MASTER_ADDR") == address:
                made |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if file == "kubernetes-lws.yaml":  # what vLLM has from its command line
                made |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29501"}
            return subprocess.Popen(
                [sys.executable, "-c", JOINING], env=environment | made, cwd=tmp_path, stdout=subprocess.PIPE, text=True
            )

        with start(0) as first:
            words = [f"{address}:29501" if word == "NAME" else word for word in shlex.split(asking)]
            words += ["--url", f"tcp://127.0.0.1:{port}"]
            until(lambda: "missing: rank 1" in run(words, tmp_path, environment).stdout)
            with start(1) as second:
                assert [one.communicate(timeout=LIMIT)[0] for one in (first, second)] == ["0 of 2\n", "1 of 2\n"]


def section(file: str) -> str:
    """Return the part of the page that is about a file; the table at its top links to it."""
    [heading] = re.findall(rf"^\| \[(\w+)s?\]\(.*{re.escape(file)}", PAGE, re.MULTILINE)
    heading = {"TrainJobs": "Kubeflow Trainer", "Jobs": "Jobs"}.get(heading, heading.removesuffix("s"))
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


SECRETS = """#!/bin/sh
mkdir "$4" && cd "$4" && shift 4
for given; do
    given=${given#--from-file=}
    cp "../${given#*=}" "${given%%=*}"
done
"""
"""Stands for `kubectl create secret generic NAME --from-file=…`, and makes a folder."""


@needs_kubectl
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_pod_with_a_token(tmp_path: Path, environment: dict[str, str]) -> None:
    """The secrets are made as the manifest says; two ranks use the relay that has one of them."""
    text = (DEPLOY / "kubernetes-secure.yaml").read_text()
    pods = inside(read(text), "containers")
    (tmp_path / "kubectl").write_text(SECRETS)
    (tmp_path / "kubectl").chmod(0o755)
    lines = "\n".join(line[4:] for line in text.splitlines() if line.startswith("#   "))
    assert "DNS:train-17-store" in lines
    script = "set -e\n" + lines.replace("DNS:train-17-store", "IP:127.0.0.1")
    subprocess.run(["sh", "-c", script], env=environment, cwd=tmp_path, timeout=LIMIT, check=True)
    [server] = [one for pod in pods for one in serving(pod)]
    [relay] = [one for pod in pods for one in pod.get("initContainers", ())]
    [rank] = [one for pod in pods for one in pod["containers"] if one is not server]
    [asking] = re.findall(r"^kubectl exec deployment/train-17-store -- (.*)$", PAGE, re.MULTILINE)
    secrets = {"server": str(tmp_path / "train-17-store"), "relay": str(tmp_path / "train-17-token")}
    serve = [word.replace("/secrets", secrets["server"]) for word in server["command"]]
    with started(serve, tmp_path, environment) as port:
        forward = [word.replace("train-17-store:29400", f"127.0.0.1:{port}") for word in relay["command"]]
        trusted = {name: text.replace("/secrets", secrets["relay"]) for name, text in variables(relay, {}, {}).items()}
        with started(forward, tmp_path, environment | trusted) as local:
            probe = [word.replace("29500", str(local)) for word in relay["startupProbe"]["exec"]["command"]]
            assert run(probe, tmp_path, environment).returncode == 0
            given = environment | variables(rank, {}, {}) | {"MASTER_PORT": str(local)}
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", JOINING], env=given | {"RANK": str(number)}, cwd=tmp_path,
                    stdout=subprocess.PIPE, text=True,
                )
                for number in range(2)
            ]  # fmt: skip
            assert [one.communicate(timeout=LIMIT)[0] for one in ranks] == ["0 of 2\n", "1 of 2\n"]
            done = run(shlex.split(asking.replace("29400", str(port))), tmp_path, environment)
            assert (done.returncode, done.stderr) == (1, "")  # the ranks have left: it cannot tell whether they hang


@needs_kubectl
def test_torchrun_finds_the_store() -> None:
    launcher: Any = pytest.importorskip("torch.distributed.run")
    pods = inside(read((DEPLOY / "kubernetes-trainer.yaml").read_text()), "containers")
    [node] = [one for pod in pods for one in pod["containers"] if one["name"] == "node"]
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}  # as Trainer adds them
    given |= {"PET_MASTER_ADDR": "train-17-node-0-0.train-17", "PET_MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as patched:
        for variable, text in variables(node, {JOB_SET_NAME: "train-17"}, given).items():
            patched.setenv(variable, text)
        config, _, _ = launcher.config_from_args(launcher.parse_args(["train.py"]))
    assert (config.rdzv_backend, config.run_id) == ("tcpstore", "train-17")
    assert config.rdzv_endpoint == "train-17-store-0-0.train-17:29500"


@needs_kubectl
def test_what_the_page_has_torchrun_do() -> None:
    launcher: Any = pytest.importorskip("torch.distributed.run")
    [fields] = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n    - name: rank\n"
    [found] = read(pod + indent(fields, " " * 6))
    assert _dropped(found) == []
    [rank] = found["spec"]["containers"]
    assert [variable["name"] for variable in rank["env"]] == ["TCPSTORE_ATTEMPT"]
    assert rank["command"][0] == "torchrun"
    config, _, _ = launcher.config_from_args(launcher.parse_args(rank["command"][1:]))
    service = read((DEPLOY / "kubernetes-plain.yaml").read_text())[1]["metadata"]["name"]
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("tcpstore", f"{service}:29500")


@needs_kubectl
def test_the_page_looks_into_pods_that_exist() -> None:
    """The commands parse, and Kubernetes gives these names to what the files make."""
    asked = re.findall(r"^kubectl exec (\S+)(?: -c (\S+))? -- (.*)$", PAGE, re.MULTILINE)
    made = set()
    for found in (found for file in MANIFESTS for found in read(text_of(file))):
        kind, name = found["kind"], found["metadata"]["name"]
        made |= {f"{kind.lower()}/{name}", f"{name}-0"}
        jobs = inside(found, "replicatedJobs")
        made |= {f"job/train-17-{job['name']}-0" for inner in jobs for job in inner["replicatedJobs"]}
    assert len(asked) >= 5
    for target, container, line in asked:
        assert target in made
        assert container in ("", "store")
        parse(shlex.split(line))


@needs_kubectl
def test_kustomize_takes_the_server(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "kubernetes-plain.yaml", tmp_path)
    images = "images: [{name: registry.example/tcpstore-async, newName: mine.example/store}]"
    (tmp_path / "kustomization.yaml").write_text(f"resources: [kubernetes-plain.yaml]\n{images}\n")
    done = run(["kubectl", "kustomize", str(tmp_path)], tmp_path, {**os.environ})
    assert done.returncode == 0, done.stderr
    assert "image: mine.example/store:latest\n" in done.stdout


# A replicated store

COMPOSE = DEPLOY / "compose-replicated.yaml"
SLURM_REPLICATED = str(DEPLOY / "slurm-replicated.sh")
needs_etcd = pytest.mark.skipif(
    not etcd_cluster.programs() or find_spec("grpc") is None, reason="there is no etcd, or no gRPC: make etcd"
)


class Kubelet(Template):
    """How commands name variables."""

    pattern = r"\$\((?P<braced>\w+)\)|(?P<escaped>(?!))|(?P<named>(?!))|(?P<invalid>(?!))"  # type: ignore[assignment]


class Part(NamedTuple):
    """A container."""

    command: list[str]
    env: dict[str, str]


def of_kubernetes() -> dict[str, Part]:
    """Return the containers of the overlay, keyed by their pods' names."""
    found = {}
    for one in read(text_of(REPLICATED)):
        for pod in inside(one, "containers"):
            [container] = pod["containers"]
            for number in range(one["spec"].get("replicas", 1)):
                own = f"{one['metadata']['name']}-{number}"
                env = variables({"env": [], **container}, {"metadata.name": own}, {})
                found[own] = Part(shlex.split(Kubelet(shlex.join(container["command"])).substitute(env)), {})
    return found


def of_compose() -> dict[str, Part]:
    """Return the containers of the compose file."""
    [found] = read(f"apiVersion: none/v1\nkind: Compose\nmetadata: {{name: none}}\n{COMPOSE.read_text()}")
    parts = {}
    for own, service in found["services"].items():
        program = "etcd" if "etcd" in service["image"] else "tcpstore"
        parts[own] = Part([program, *service.get("command", ())], service.get("environment", {}))
    return parts


def on_loopback(text: str, number: int, ports: dict[str, str]) -> str:
    """Give each host a loopback address of its own; `number` says which is ours."""
    text = re.sub(r"\b[a-z-]+?-?(\d)(?:\.[a-z-]+)?(?=:\d)", lambda match: f"127.0.0.{int(match[1]) + 1}", text)
    text = re.sub(r"\b0\.0\.0\.0|\[::\]|(?<=--host=)::", f"127.0.0.{number + 1}", text)
    return re.sub(r"\b(?:2379|2380|29500|9400)\b", lambda match: ports[match[0]], text)


def answers(url: str) -> int:
    """Return the status of a health check; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@needs_kubectl
@needs_etcd
@pytest.mark.parametrize("parts", [of_kubernetes, of_compose])
def test_a_replicated_store(parts: Callable[[], dict[str, Part]], tmp_path: Path, environment: dict[str, str]) -> None:
    """What the containers run, on loopback: the server that serves is killed, then a member of etcd."""
    (tmp_path / "etcd").symlink_to(etcd_cluster.programs()[0])
    ports = {port: str(free_port()) for port in ("2379", "2380", "29500", "9400")}
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(own: str, part: Part) -> None:
        number = int(own[-1]) if own[-1].isdigit() else 0
        folder = tmp_path / own
        folder.mkdir()
        words = [on_loopback(word, number, ports).replace("/data", str(folder)) for word in part.command]
        words = [re.sub(r"^--port=.*", "--port=0", word) if "relay" in words else word for word in words]
        env = {key: on_loopback(text, number, ports).replace("/data", str(folder)) for key, text in part.env.items()}
        with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
            running[own] = subprocess.Popen(words, cwd=folder, env=environment | env, stdout=out, stderr=log)

    def kill(own: str) -> None:
        process = running.pop(own)
        process.kill()
        process.wait()

    def said(own: str) -> list[Object]:
        """Return what a server has announced so far."""
        assert running[own].poll() is None, (tmp_path / own / "log").read_text()
        return [
            json.loads(line)
            for line in (tmp_path / own / "out").read_text().splitlines(keepends=True)
            if line[-1:] == "\n"
        ]

    try:
        every = parts()
        etcds, servers = [own for own in every if "etcd" in own], [own for own in every if "store" in own]
        servers = [own for own in servers if own not in etcds and "relay" not in own]
        [relay] = [own for own in every if "relay" in own]
        assert (len(etcds), len(servers)) == (3, 2)
        for own in etcds:
            start(own, every[own])
        health = [f"http://127.0.0.{number + 1}:{ports['2379']}/health" for number in range(3)]
        until(lambda: [answers(url) for url in health] == [200] * 3)
        for own in servers:
            start(own, every[own])
        until(lambda: all(map(said, servers)))
        first, other = sorted(servers, key=lambda own: str(said(own)[-1]["role"]))
        assert [said(own)[-1]["role"] for own in (first, other)] == ["server", "standby"]
        start(relay, every[relay])
        until(lambda: said(relay))
        with TCPStore("127.0.0.1", said(relay)[0]["port"], timeout=LIMIT) as store:
            assert store.add("counter", 1) == 1
            kill(first)
            assert store.add("counter", 1) == 2
            until(lambda: said(other)[-1]["role"] == "server")
            kill(etcds[0])
            assert store.add("counter", 1) == 3
    finally:
        for own in list(running):
            kill(own)


NEWER = [program for program in etcd_cluster.programs() if etcd_cluster.version_of(program) >= "3.5"]


@needs_kubectl
@needs_etcd
@pytest.mark.skipif(not NEWER, reason="there is no etcd 3.5, as in the overlay: make etcd")
def test_what_kubernetes_asks_a_replicated_store(tmp_path: Path, environment: dict[str, str]) -> None:
    """Both servers are ready and alive; of etcd, a member without the others is alive, and not ready."""
    pods = inside(read(text_of(REPLICATED)), "containers")
    probes = {
        (one["name"], kind): one[kind]
        for pod in pods
        for one in pod["containers"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        if kind in one
    }
    for pod in pods:
        for one in pod["containers"]:
            named = {port["name"] for port in one["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = one.get(kind, {})
                assert {asked["port"] for asked in (probe.get("httpGet"), probe.get("tcpSocket")) if asked} <= named
    assert "httpGet" not in probes["store", "readinessProbe"]
    alive = probes["store", "livenessProbe"]["httpGet"]["path"]
    with etcd_cluster.cluster(NEWER[0]) as members:
        options = ["--etcd", ",".join(members.urls), "--http", "127.0.0.1:0"]
        with tcpstore_server(*options) as one, tcpstore_server(*options) as other:
            ready = [json.loads(server.ready) for server in (one, other)]
            assert [server["role"] for server in ready] == ["server", "standby"]
            until(lambda: [answers(server["http"].rstrip("/") + alive) for server in ready] == [200, 200])
            for server in ready:
                socket.create_connection(("127.0.0.1", server["port"])).close()
        members.kill(0, 1)
        paths = [probes["etcd", kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")]
        until(lambda: [answers(f"{members.urls[2]}{path}") for path in paths] == [200, 503])


# Slurm


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_is_one(script: Path) -> None:
    for shell in filter(shutil.which, ("sh", "bash")):
        assert subprocess.run([shell, "-n", script], timeout=LIMIT, check=False).returncode == 0
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


SRUN_ON_NODES = """#!/bin/sh
nodes=
while :; do
    case $1 in --nodelist=*) nodes=${1#*=} ;; --*) ;; *) break ;; esac
    shift
done
[ -n "$nodes" ] || exec ./srun-tasks "$@"
tasks=
for node in $(echo "$nodes" | tr , " "); do
    SLURMD_NODENAME=$node "$@" &
    tasks="$tasks $!"
done
trap 'kill $tasks' TERM
wait
wait
"""
"""Stands for Slurm's: starts tasks on nodes, and passes on what ends it."""

RANK_THAT_GOES_ON = """
import os, pathlib, sys, time
from tcpstore_async import rendezvous

store, rank, world = next(rendezvous("env://"))
store.add("counter", 1)
pathlib.Path(f"begun{rank}").touch()
while not os.path.exists("killed"):
    time.sleep(0.01)
if store.add("counter", 1) == 2 * world:
    store.set("all", b"")
store.wait(["all"])
sys.stdout.write(f"{rank} of {world}\\n")
"""


@needs_etcd
def test_a_job_whose_store_outlives_a_server(tmp_path: Path, slurm: dict[str, str]) -> None:
    """The nodes are loopback addresses. The server that serves is killed while the ranks are there."""
    (tmp_path / "srun").rename(tmp_path / "srun-tasks")
    for command, text in (("srun", SRUN_ON_NODES), ("scontrol", "#!/bin/sh\nprintf '127.0.0.%s\\n' 1 2 3 4\n")):
        (tmp_path / command).write_text(text)
        (tmp_path / command).chmod(0o755)
    (tmp_path / "etcd").symlink_to(etcd_cluster.programs()[0])
    (tmp_path / "rank.py").write_text(RANK_THAT_GOES_ON)
    job = {**slurm, "SLURM_JOB_ID": str(os.getpid())}
    with open(tmp_path / "log", "wb") as log:
        words = [SLURM_REPLICATED, sys.executable, "rank.py"]
        script = subprocess.Popen(words, cwd=tmp_path, env=job, stdout=subprocess.PIPE, stderr=log, text=True)
    with script:
        begun = [tmp_path / f"begun{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in begun) or script.poll() is not None)
        assert script.poll() is None, (tmp_path / "log").read_text()
        said = re.findall(
            r'^\{"event":"ready","role":"server".*"pid":(\d+)', (tmp_path / "log").read_text(), re.MULTILINE
        )
        os.kill(int(said[-1]), signal.SIGKILL)
        (tmp_path / "killed").touch()
        ranks, _ = script.communicate(timeout=LIMIT)
    assert (script.returncode, sorted(ranks.splitlines())) == (0, ["0 of 2", "1 of 2"]), (tmp_path / "log").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []


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
