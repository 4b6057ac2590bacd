"""What `tcpstore doctor --etcd` checks: judgements, and a real etcd where there is one."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import etcd_cluster
from support import LIMIT, free_port, tcpstore, until
from tcpstore_async.server.etcd_options import EtcdOptions
from tcpstore_async.tools.doctor.etcd import (
    check_alarms,
    check_commits,
    check_etcd,
    check_history,
    check_lease,
    check_members,
    check_quota,
    read_metrics,
)
from tcpstore_async.tools.doctor.finding import FAIL, OK, SKIP, WARN, Finding

pytestmark = pytest.mark.unmeasured

A, B, C = (f"http://{name}:2379" for name in "abc")


def test_members() -> None:
    found = check_members({A: "3.4.23", B: "3.5.16", C: "3.5.16"}, {})
    assert (found.status, found.text) == (OK, "3 of 3 members answer, with etcd 3.4.23, 3.5.16")
    found = check_members({A: "3.4.23", B: "3.4.23"}, {C: "Connection refused"})
    assert (found.status, found.text) == (WARN, f"2 of 3 members answer, with etcd 3.4.23; {C}: Connection refused")
    found = check_members({A: "3.3.25", B: "3.4.0", C: "3.10.0"}, {})
    assert found.status == FAIL
    assert found.text.endswith(f"too old at {A}")
    assert check_members({}, {A: "no leader"}).status == FAIL
    assert check_members({A: "3.5.1"}, {}).status == WARN


def test_alarms() -> None:
    assert check_alarms(set()) == Finding("etcd alarms", OK, "none")
    found = check_alarms({"memberID:1 alarm:NOSPACE "})
    assert found.status == FAIL
    assert "defrag" in found.fix
    assert "defrag" not in check_alarms({"memberID:1 alarm:CORRUPT "}).fix


def test_the_quota() -> None:
    gib = 2.0**30
    found = check_quota(gib / 2, gib / 4, 2 * gib)
    assert (found.status, found.text) == (OK, "the database has 512.0 MiB of 2.0 GiB")
    assert check_quota(1.5 * gib, gib, 2 * gib).fix.endswith("a larger --quota-backend-bytes")
    assert check_quota(1.5 * gib, gib / 2, 2 * gib).fix.startswith("etcdctl defrag")
    assert check_quota(gib, None, None).status == SKIP


@pytest.mark.parametrize(
    ("revision", "compacted", "status"), [(70_000, 60_000, OK), (500, -1, SKIP), (70_000, -1, WARN), (None, None, SKIP)]
)
def test_the_history(revision: float | None, compacted: float | None, status: str) -> None:
    found = check_history(revision, compacted)
    assert found.status == status
    assert ("--auto-compaction-mode=periodic" in found.fix) == (compacted == -1)


def test_commits_and_the_lease() -> None:
    found = check_commits([0.001] * 19 + [0.1])
    assert (found.status, found.text) == (OK, "a commit takes 1.0 ms (p50), 100.0 ms (p99 of 20)")
    assert check_commits([0.03] * 20).status == WARN
    assert check_commits([0.001] * 19 + [0.6]).status == WARN
    assert check_lease(2).status == OK
    assert "election" in check_lease(6).fix


@contextmanager
def showing(text: str) -> Iterator[str]:
    """A page with a text; yields its URL."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(LIMIT)


def test_metrics() -> None:
    with showing('# HELP a text\na 2.147483648e+09\nb{c="d"} 1\ne -1\n') as url:
        assert read_metrics(url, None, LIMIT) == {"a": 2**31, "e": -1}


def test_no_etcd() -> None:
    pytest.importorskip("grpc")
    url = f"http://127.0.0.1:{free_port()}"
    [found] = check_etcd(EtcdOptions([url], "default", None, ""), 1.0)
    assert (found.status, found.text) == (FAIL, f"0 of 1 members answer: {url}: Connection refused")


@pytest.mark.parametrize(
    "words",
    [["--etcd", "tcp://a:1"], ["--etcd-ca", "x"], ["--etcd", A, "--etcd-cert", "x"], ["--etcd", f"{A},https://b:1"]],
)
def test_usage_errors(words: list[str]) -> None:
    assert tcpstore("doctor", *words).returncode == 2


def doctor(*words: str) -> tuple[int, dict[str, Finding]]:
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "TCPSTORE_URL")}
    done = tcpstore("doctor", *words, "-o", "json", env=env)
    checks = [Finding(**check) for check in json.loads(done.stdout)["checks"]]
    return done.returncode, {found.check: found for found in checks if found.check.startswith("etcd")}


@pytest.mark.slow
@pytest.mark.skipif(not etcd_cluster.programs(), reason="there is no etcd: make etcd")
def test_a_real_etcd() -> None:
    """With all members, without one, and without two; nothing is left behind."""
    with etcd_cluster.cluster(etcd_cluster.programs()[0]) as members:
        urls = ",".join(members.urls)
        _, found = doctor("--etcd", urls)
        assert {name: one.status for name, one in found.items()} == {
            "etcd": OK, "etcd alarms": OK, "etcd quota": OK, "etcd history": SKIP, "etcd commit": OK, "etcd lease": OK
        }  # fmt: skip
        left = members.ask(0, "kv/range", key="L3RjcHN0b3JlLw==", range_end="L3RjcHN0b3JlMA==")  # /tcpstore/
        assert left is not None
        assert "kvs" not in left
        members.kill((members.leader() + 1) % etcd_cluster.MEMBERS)
        _, found = doctor("--etcd", urls)
        assert (found["etcd"].status, found["etcd commit"].status) == (WARN, OK)
        members.kill(members.leader())
        until(lambda: doctor("--etcd", urls, "--timeout", "1")[0] == 1)
