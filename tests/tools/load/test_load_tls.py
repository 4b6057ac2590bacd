"""`bench`, `record` and `replay` with a server that requires TLS and tokens of everybody."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.test_auth import KEY_LINE, KEYS, tcpstore
from support import LIMIT, Server, listening, secret_file, tcpstore_server
from tcpstore_async import TCPStore
from tls.certificates import certificates

TLS = ("--tls-ca", certificates().ours.ca)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, tcpstore_server(*secured(Path(folder))) as found:
        yield found


def secured(folder: Path) -> list[str]:
    keys = secret_file(folder / "keys", KEY_LINE)
    return ["--token-keys", str(keys), "--require-auth=all", *certificates().serving()]


def run(server: Server, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    return tcpstore(*words, "--url", f"tcps://127.0.0.1:{server.port}", *TLS, TCPSTORE_TOKEN=token)


def test_a_benchmark(server: Server) -> None:
    done = run(server, KEYS.create(), "bench", "--ranks", "4", "--requests", "40", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert ([row["requests"] for row in result["operations"]], result["server"]) == ([40] * 4, "tcpstore_async")
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=KEYS.create(), tls=False) as store:
        assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("token", "status", "error"),
    [
        ("", 5, "the server requires a token"),
        (KEYS.create(prefix="job/"), 5, "grants access only to keys with the prefix 'job/'"),
        (KEYS.create(rights="read"), 5, "requires write access"),
        (KEYS.create(seconds=-1), 5, "expired at"),
    ],
)
def test_a_benchmark_that_is_not_allowed(server: Server, token: str, status: int, error: str) -> None:
    done = run(server, token, "bench", "--ranks", "2", "--requests", "2")
    assert (done.returncode, error in done.stderr, done.stdout) == (status, True, "")


@pytest.mark.parametrize(("options", "error"), [((), "requires a token"), (("--require-tls",), "requires TLS")])
def test_a_plain_benchmark_without_a_token_says_what_it_lacks(
    options: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    with tcpstore_server(*secured(tmp_path), *options) as server:
        done = tcpstore("bench", "--ranks", "2", "--requests", "2", "--url", f"tcp://127.0.0.1:{server.port}")
    assert (done.returncode, done.stdout) == (5, "")
    assert f"the server {error}" in done.stderr


def test_a_recording_over_tls_and_its_replay(server: Server, tmp_path: Path) -> None:
    file, token = tmp_path / "job.jsonl", KEYS.create(prefix="job/")
    url = f"tcps://127.0.0.1:{server.port}"
    with listening(["record", "--upstream", url, *TLS, "-w", str(file), "--port", "0"], None) as recorder:
        with TCPStore("127.0.0.1", recorder.port, timeout=LIMIT, token=token) as store:
            store.set("job/k", "v")
            assert store.get("job/k") == b"v"
            assert store.delete_key("job/k")
        assert recorder.stop(signal.SIGTERM) == 0
    assert token not in file.read_text()
    assert "job/k" in file.read_text()
    replayed = run(server, token, "replay", str(file), "-o", "json")
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert json.loads(replayed.stdout)["different"] == 0
    refused = run(server, "", "replay", str(file))
    assert (refused.returncode, "the server requires a token" in refused.stderr) == (5, True)
