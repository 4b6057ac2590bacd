"""`tcpstore doctor`: output and exit status."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from support import free_port, secret_file, server_of, tcpstore, tcpstore_server
from tcpstore_async.base.version import VERSION
from tls.certificates import Certificates

pytestmark = pytest.mark.unmeasured


def doctor(*words: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "TCPSTORE_URL")}
    done = tcpstore("doctor", *words, env=env)
    assert done.stderr == b"" or done.returncode == 2
    return done.returncode, (done.stdout or done.stderr).decode()


def findings(*words: str) -> tuple[int, dict[str, Any]]:
    status, text = doctor(*words, "-o", "json")
    report = json.loads(text)
    found = {finding["check"]: finding for finding in report["checks"]}
    assert report["failed"] == sum(finding["status"] == "fail" for finding in found.values())
    assert (status == 1) == (report["failed"] > 0)
    assert {tuple(finding) for finding in found.values()} == {("check", "status", "text", "fix")}
    return status, found


@pytest.mark.parametrize("kind", ["ours", "libuv"])
def test_a_server(kind: str) -> None:
    with server_of(kind) as port:
        _, found = findings("--url", f"tcp://127.0.0.1:{port}")
    described = f"tcpstore_async {VERSION} (uv backend, " if kind == "ours" else "PyTorch's server"
    assert found["server"]["status"] == "ok"
    assert found["server"]["text"].startswith(described)
    assert found["round trip"]["text"].startswith("a round trip takes ")
    assert "port" not in found  # no other server is to be started
    assert "accept queue" in found


def test_a_server_that_cannot_be_reached() -> None:
    port = free_port()
    status, found = findings("--url", f"tcp://127.0.0.1:{port}", "--timeout", "0.2")
    assert status == 1
    assert found["server"]["status"] == "fail"
    assert "refused" in found["server"]["text"]
    assert found["server"]["fix"] == f"on 127.0.0.1: tcpstore serve --host :: --port {port}"


def test_a_peer_that_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        status, found = findings("--url", url, "--timeout", "0.2")
    assert status == 1
    if Path("/proc/net/tcp").exists():
        assert f"cannot be used: pid {os.getpid()} (" in found["server"]["text"]
        assert found["server"]["text"].endswith(") holds the port and does not answer")
        assert found["server"]["fix"].endswith(f"ps -o stat,wchan:32,args -p {os.getpid()}")
    else:
        assert "no answer" in found["server"]["text"]


def test_a_server_with_tls(tmp_path: Path) -> None:
    known = Certificates(tmp_path)
    with tcpstore_server("--tls-cert", known.server.cert, "--tls-key", known.server.key) as server:
        url = f"tcps://127.0.0.1:{server.port}"
        _, found = findings("--url", url, "--tls-ca", known.ours.ca)
        assert found["server"]["status"] == "ok"
        status, found = findings("--url", url, "--tls-ca", known.others.ca, "--timeout", "2")
        assert (status, found["server"]["status"]) == (1, "fail")
        assert "certificate" in found["server"]["text"]
        status, found = findings("--url", url, "--tls-ca", "/nonexistent", "--timeout", "2")
        assert (status, found["server"]["status"]) == (1, "fail")
        assert "/nonexistent" in found["server"]["text"]


def test_a_server_that_wants_a_token(tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", f"first:{'5e' * 32}\n")
    made = tcpstore("token", "create", "--token-keys", str(keys)).stdout.decode()
    token = secret_file(tmp_path / "token", made)
    with tcpstore_server("--token-keys", str(keys), "--require-auth=all") as server:
        url = f"tcp://127.0.0.1:{server.port}"
        status, found = findings("--url", url)
        assert (status, found["server"]["status"]) == (1, "fail")
        assert found["server"]["fix"] == "export TCPSTORE_TOKEN_FILE=FILE (from tcpstore token create)"
        _, found = findings("--url", url, "--token-file", str(token))
        assert found["server"]["status"] == "ok"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found = findings("--port", str(port))
        assert status == 1
        text = found["port"]["text"]
        assert text.startswith(f"port {port} is in use")
        if Path("/proc/net/tcp").exists():
            assert f" by pid {os.getpid()} (" in text
            assert found["port"]["fix"].endswith(f"kill {os.getpid()}")
    _, found = findings("--port", str(port))
    assert found["port"]["status"] == "ok"


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--port", "0"], ["--url", "http://x"], ["--timeout", "nan"]])
def test_usage_errors(words: list[str]) -> None:
    assert doctor(*words)[0] == 2
