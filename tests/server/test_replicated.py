"""Servers of a replicated store on a real etcd: what the command line says and does, and faults under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import etcd_cluster
from etcd_cluster import Cluster
from faults.rounds import rounds
from support import LIMIT, free_port, tcpstore, until
from tcpstore_async import TCPStore

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted("etcd and processes take the time")]

PROGRAMS = etcd_cluster.programs()
if not PROGRAMS:
    pytest.skip("there is no etcd: make etcd", allow_module_level=True)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with etcd_cluster.cluster(PROGRAMS[0]) as cluster:
        yield cluster


class Process:
    """A server process, which says on its standard output what it has become."""

    def __init__(self, etcd: Cluster, name: str, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        words = ["serve", "--port", str(self.port), "--etcd", ",".join(etcd.urls), "--store-name", name, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tcpstore_async", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self, number: signal.Signals = signal.SIGKILL) -> str:
        """End it in this way; return what it has logged."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        with self.process:
            _, errors = self.process.communicate(timeout=LIMIT)
        return errors


def command(*words: str) -> str:
    done = tcpstore(*words)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_life(etcd: Cluster) -> None:
    """One serves, the other stands by; kill -9, `promote`, SIGTERM: a job goes on, and each says where it stands."""
    http = free_port()
    one, two = Process(etcd, "life"), None
    try:
        said = one.said()
        assert (said["role"], said["event"]) == ("server", "ready")
        two = Process(etcd, "life", "--http", f"127.0.0.1:{http}")
        standby = two.said()
        assert (standby["role"], standby["serves"]) == ("standby", one.address)
        url = f"tcp://{one.address},{two.address}"
        command("set", "--url", url, "key", "value")
        assert command("get", "--url", f"tcp://{two.address}", "key").strip() == "value"
        code, why = asked(f"http://127.0.0.1:{http}/readyz")
        assert (code, why) == (503, f"this server stands by: {one.address} serves\n")
        assert "tcpstore_serving 0.0" in asked(f"http://127.0.0.1:{http}/metrics")[1]
        with TCPStore("127.0.0.1", 29500, is_master=True, server=url) as store:
            assert store.add("count", 1) == 1
            one.end()
            assert store.add("count", 1) == 2
            serving = two.said()
            assert serving["role"] == "server"
            assert serving["epoch"] > said["epoch"]
            one = Process(etcd, "life", port=one.port)
            assert one.said()["role"] == "standby"
            until(lambda: tcpstore("promote", "--url", f"tcp://{two.address}").returncode == 0)  # it has to see it
            assert one.said()["role"] == "server"
            assert two.said()["role"] == "standby"
            assert store.add("count", 1) == 3
            assert "SIGTERM" in one.end(signal.SIGTERM)
            assert two.said()["role"] == "server"
            assert store.add("count", 1) == 4
            until(lambda: asked(f"http://127.0.0.1:{http}/readyz") == (200, "ready\n"))  # it looks once a second
            assert "tcpstore_serving 1.0" in asked(f"http://127.0.0.1:{http}/metrics")[1]
    finally:
        one.end()
        if two is not None:
            two.end()


def test_the_end_for_good(etcd: Cluster) -> None:
    """`tcpstore stop` and SIGINT leave nothing behind."""
    for way in ("stop", "interrupt"):
        server = Process(etcd, "ends")
        server.said()
        command("set", "--url", f"tcp://{server.address}", "key", "value")
        if way == "stop":
            command("stop", "--url", f"tcp://{server.address}")
        server.end(signal.SIGINT)
    server = Process(etcd, "ends")
    server.said()
    assert command("num-keys", "--url", f"tcp://{server.address}").strip() == "0"
    server.end(signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--etcd", "127.0.0.1:2379"], 2, "is not of the form http://HOST:PORT"),
        (["--etcd", "http://a:1,https://b:1"], 2, "either all URLs begin with https://, or none"),
        (["--etcd", "http://a:1", "--persist", "folder"], 2, "--etcd cannot be used with --persist"),
        (["--etcd", "http://a:1", "--backend", "threaded"], 2, "leave out --etcd"),
        (["--store-name", "a"], 2, "need --etcd"),
        (["--etcd", "http://a:1", "--store-name", "a/b"], 1, "has a slash"),
        (["--etcd", "http://a:99999"], 2, "is not of the form http://HOST:PORT"),
        (["--etcd", "http://no.such.host.invalid:2379", "--host", "0.0.0.0"], 1, "give --host ADDRESS"),
        (["--etcd", "http://127.0.0.1:1"], 1, "no member of etcd answers at http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_line(options: list[str], status: int, said: str, tmp_path: Path) -> None:
    done = tcpstore("serve", "--port", str(free_port()), *options)
    assert done.returncode == status
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_server_says_at_once_that_it_waits_for_etcd() -> None:
    done = tcpstore("serve", "--port", str(free_port()), "--etcd", "http://127.0.0.1:1")
    waiting, gave_up = [line for line in done.stderr.decode().splitlines() if "etcd" in line]
    assert "waiting: etcd at http://127.0.0.1:1: failed to connect" in waiting
    assert "no member of etcd answers" in gave_up


def test_other_settings_than_the_others(etcd: Cluster) -> None:
    server = Process(etcd, "settings")
    server.said()
    other = Process(etcd, "settings", "--link-grace", "7")
    assert "link-grace=30, and this one has link-grace=7" in other.end(signal.SIGCONT)
    assert other.process.returncode == 1
    server.end(signal.SIGINT)


def test_the_address_that_others_are_told(etcd: Cluster) -> None:
    """Of a server that listens everywhere, it is the one by which it reaches etcd."""
    one, two = Process(etcd, "everywhere", "--host", "0.0.0.0"), None
    try:
        one.said()
        two = Process(etcd, "everywhere")
        assert two.said()["serves"] == one.address
    finally:
        one.end()
        if two is not None:
            two.end()


@pytest.mark.parametrize("fault", ["server", "term", "stopped", "leader"])
def test_a_fault_under_load(fault: str) -> None:
    found = rounds(fault, 2, 1, PROGRAMS[0])
    assert not found["wrong"]
    assert found["kills"] == 2
