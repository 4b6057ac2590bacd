"""The load generator against our server, and `compare.py`'s report of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPARE = ROOT / "bench/compare.py"
SERVER = f"{sys.executable} -m tcpstore_async serve --port {{port}}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cc") or not shutil.which("taskset"), reason="needs a C compiler and taskset"),
]


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMPARE), "--no-netns", "--reps", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)


def test_every_mode_runs_on_our_server(tmp_path: Path) -> None:
    out = tmp_path / "records"
    modes = "init,barrier,barrier18,ping,add,check,get,setget,tget,mget,bigset,bigget,park,wake,readywait,mget128,add@4"
    done = compare(
        "--server", f"ours={SERVER}", "--json", str(out), f"all: -n 4 -t 0.05 -w 0.01 -r 2 -b 65536 -m {modes}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.get("op", record["mode"]) for record in records] == [
        mode.partition("@")[0] for mode in modes.split(",")
    ]
    assert all(record.get("ops", 1) > 0 for record in records)


def test_a_wrong_reply_fails_the_run() -> None:
    echo = (
        "import socket, sys\n"
        "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "while True:\n"
        "    peer = listener.accept()[0]\n"
        "    first = peer.recv(6)\n"
        "    while data := peer.recv(4096):\n"
        "        peer.sendall(data[-4:] if len(data) < 11 else bytes(4096))\n"
    )
    done = compare("--server", f'echo={sys.executable} -c "{echo}" {{port}}', "one: -n 1 -t 0.05 -w 0.01 -m get")
    assert done.returncode == 1
    assert "FAILED echo, one" in done.stdout


def test_the_same_server_twice_is_reported_as_a_ratio() -> None:
    done = compare("--server", f"ours={SERVER}", "--control", "add: -n 2 -t 0.05 -w 0.01 -m add")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "control" in done.stdout
    assert "x " in done.stdout


def test_a_server_that_is_stopped_until_all_have_connected() -> None:
    done = compare("--server", f"ours={SERVER}", "saturated: -n 100 -S -m init")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saturated | init" in done.stdout


def test_a_build_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUILD", "interpreted")
    done = compare("--against", str(ROOT), "busy: join 2 2")  # has no row that is judged, and might be slower by chance
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing is slower"
    assert "before" in done.stdout
    assert "now" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give --server or --against"),
        (["--against", "no-such-revision"], "neither a folder with the package nor a git revision"),
        (["--against", str(ROOT), "--base", "libuv"], "--base cannot be used with --against"),
        (["--server", f"ours={SERVER}", "--server", "ours=true"], "there are two servers of that name"),
        (["--server", "ours"], "expected NAME=COMMAND, libuv or legacy"),
    ],
)
def test_what_cannot_be_compared(words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUILD", "interpreted")
    done = compare(*words)
    assert done.returncode == 2
    assert reason in done.stderr


@pytest.mark.parametrize("modes", ["wake", "park,readywait"])
def test_only_parked_ranks_are_woken(modes: str) -> None:
    done = compare("--server", f"ours={SERVER}", f"ids: -n 4 -k 2 -m {modes}")
    assert done.returncode == 1
    assert "wake follows park, and nothing else does" in done.stdout
