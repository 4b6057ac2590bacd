"""`tcpstore record` and `tcpstore replay`: real servers of all kinds, real clients, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from client.fakes import fake_server
from conformance.frames import add, get, set_, wait
from support import LIMIT, RawPeer, Server, free_port, listening, server_of, tcpstore, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.base.errors import QueueEmptyError, StoreTimeoutError
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.tools.load.recorder import RecordingFile
from tcpstore_async.tools.load.recording import RecordingError, RowEncoder, read_recording

pytestmark = pytest.mark.unmeasured

COMMAND = [sys.executable, "-m", "tcpstore_async"]


@contextmanager
def recorder(upstream: int, file: Path, *options: str, prefix: Sequence[str] = ()) -> Iterator[Server]:
    """`tcpstore record`, in front of a server at this port."""
    url = f"tcp://127.0.0.1:{upstream}"
    with listening(["record", "--upstream", url, "-w", str(file), "--port", "0", *options], prefix=prefix) as found:
        event = json.loads(found.ready)
        assert (event["event"], event["role"], event["pid"]) == ("ready", "recorder", found.process.pid)
        yield found


def stop(proxy: Server, number: int = signal.SIGINT) -> tuple[int, str]:
    """End a recorder; return its exit status and standard error."""
    status = proxy.stop(number)
    assert "Traceback" not in proxy.log()
    return status, proxy.log()


def replay(file: Path, port: int, *options: str) -> subprocess.CompletedProcess[bytes]:
    done = tcpstore("replay", str(file), "--url", f"tcp://127.0.0.1:{port}", *options)
    assert b"Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(b"\n") <= 1 + done.stderr.startswith(b"Warning: the server already has ")
    return done


def replay_json(file: Path, port: int, *options: str) -> dict[str, Any]:
    done = replay(file, port, "--speed", "0", "-o", "json", *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["different"] == 0
    return report


@pytest.fixture(params=["ours", "libuv", "legacy"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


# A job


async def rank(port: int, number: int, ranks: int, seed: int, full: bool) -> None:
    """Do at random what ranks do. `full`: also what the legacy server has not.

    Ranks meet where real ones do: at counters, barriers, COMPARE_SETs and keys that they wait for.
    """
    rng = random.Random(seed * 1000 + number)
    async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT) as store:
        await store.add("joined", 1)
        await store.set(f"address/{number}", f"10.0.0.{number}:" + "x" * rng.randrange(50))
        await store.wait([f"address/{other}" for other in range(ranks)])
        state: str | bytes = ""
        for turn in range(30):
            key = f"key-{number}-{rng.randrange(3)}"
            choice = rng.randrange(13 if full else 9)
            if choice == 0:
                await store.set(key, rng.randbytes(rng.randrange(40)))
            elif choice == 1:
                await store.add("sum", rng.randrange(-3, 4))
            elif choice == 2:
                await store.check([key])
            elif choice == 3:
                await store.delete_key(key)
            elif choice == 4:
                state = await store.compare_set("state", state, f"of {number} in {turn}")
            elif choice == 5:
                await store.get(f"address/{rng.randrange(ranks)}")
            elif choice == 6:
                await store.compare_set(f"own-{number}", rng.choice(["", "a", "b"]), rng.choice("abc"))
            elif choice == 7:
                await store.add(f"only-{number}", turn)
            elif choice == 8:
                try:
                    await store.wait([f"nobody-{turn}"], timeout=0.002)
                except StoreTimeoutError:
                    pass
            elif choice == 9:
                await store.append(key, rng.randbytes(3))
            elif choice == 10:
                await store.multi_set([f"m-{number}-{turn % 3}", key], [b"1", rng.randbytes(5)])
            elif choice == 11:
                await store.multi_get([f"address/{rng.randrange(ranks)}" for _ in range(3)])
            else:
                await store.queue_push(f"queue-{number}", rng.randbytes(9))
                if rng.random() < 0.5:
                    try:
                        await store.queue_pop(f"queue-{number}", False)
                    except QueueEmptyError:
                        pass
        await store.barrier("end", ranks)


def job(port: int, seed: int, ranks: int = 4, full: bool = True) -> None:
    async def main() -> None:
        await asyncio.gather(*(rank(port, number, ranks, seed, full) for number in range(ranks)))
        if full:
            async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT) as store:
                await store.num_keys()

    asyncio.run(main())


@pytest.mark.parametrize("values", [True, False])
def test_a_recorded_job_replays_with_the_same_replies(kind: str, values: bool, tmp_path: Path) -> None:
    file = tmp_path / "job.gz"
    with server_of(kind) as port, recorder(port, file, *["--values"] * values) as proxy:
        for seed in range(3):
            job(proxy.port, seed, full=kind != "legacy")
        status, said = stop(proxy)
    assert status == 0
    assert said.splitlines()[-1].startswith("recorded ")
    recording = read_recording(file)
    assert recording.complete
    assert not any(connection.opaque for connection in recording.connections)
    for _ in range(2):
        with server_of(kind) as port:
            report = replay_json(file, port)
    assert report["requests"] == len(recording.steps)
    assert report["replies"] == sum(step.reply is not None for step in recording.steps)
    assert report["ranks"] == recording.ranks


def test_copies_of_a_job(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file, "--values") as proxy:
        job(proxy.port, 7)
        stop(proxy, signal.SIGTERM)
    recording = read_recording(file)
    assert recording.ranks == 1  # all connections are of this process
    with tcpstore_server() as server:
        report = replay_json(file, server.port, "--ranks", "5")
        assert (report["copies"], report["ranks"]) == (5, 5)
        assert report["requests"] == 5 * len(recording.steps)
        listed = tcpstore("keys", "--raw", "--url", f"tcp://127.0.0.1:{server.port}").stdout.decode().split()
    copies = [sum(name.startswith(f"replay-{copy}/") for name in listed) for copy in range(1, 5)]
    assert copies[0] > 10
    assert set(copies) == {copies[0]}
    assert len(listed) == 5 * copies[0]


def test_the_recorded_times_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file) as proxy, RawPeer(proxy.port) as peer:
        peer.ping()
        time.sleep(0.4)
        peer.ping()
        stop(proxy)
    for speed, least in (("1", 0.4), ("4", 0.1)):
        with tcpstore_server() as server:
            done = replay(file, server.port, "--speed", speed, "-o", "json")
        report = json.loads(done.stdout)
        assert report["seconds"] >= least
        assert report["recorded_seconds"] >= 0.4


def test_keys_that_the_server_has_already_are_counted(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "job"
    with server_of(kind) as port, recorder(port, file) as proxy:
        with RawPeer(proxy.port) as peer:
            peer.send(set_(b"/k", b"v"))
            peer.ping()
        stop(proxy)
        done = replay(file, port)
        assert done.stderr == (
            b"Warning: the server already has 1 key, so replies may differ from the recording; use an empty server, "
            b"such as a new `tcpstore serve`\n"
        )
        assert replay_json(file, port)["keys_before"] == 1
    with server_of(kind) as port:
        assert replay(file, port).stderr == b""
        assert replay_json(file, port)["keys_before"] == 1


def test_differences_are_counted_and_the_first_is_described(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file, "--values") as proxy:
        job(proxy.port, 3)
        stop(proxy)
    with tcpstore_server() as server:
        with RawPeer(server.port) as peer:
            peer.ask(add(b"/joined", 9), 8)
        done = replay(file, server.port, "--speed", "0")
    assert done.returncode == 1
    assert b"match the recording" in done.stdout
    assert re.search(rb"replies differ; first: connection \d, request ", done.stderr)
    assert b"ADD /joined: recorded 1, got 10" in done.stderr


def rows(*lines: str) -> bytes:
    """A recording of two connections of two processes, and these rows."""
    head = RowEncoder(0.0, "2026-11-22T12:00:00Z").take().decode().splitlines()
    for number in range(2):
        head += [f'[1,{number},"OPEN",0]', f'[1,{number},"VALIDATE"]']
        head += [f'[1,{number},"PING",{number}]', f'[1,{number},"REPLY"]']
    return ("\n".join([*head, '["K","/k"]', '["V",4]', *lines, '[1,-1,"END"]']) + "\n").encode()


@pytest.mark.parametrize("speed", ["0", "1"])
def test_a_write_before_the_end_of_a_connection_is_confirmed(kind: str, speed: str, tmp_path: Path) -> None:
    """Connection 0 ends with a SET, which has no reply, and connection 1 depends on it."""
    file = tmp_path / "job"
    file.write_bytes(
        rows('[9,0,"SET",0,0]', '[9,0,"CLOSE","client",33,4]', '[9,1,"GET",0]', '[9,1,"REPLY",0]',
             '[9,1,"CLOSE","client",33,4]')
    )  # fmt: skip
    with server_of(kind) as port:
        done = replay(file, port, "--speed", speed, "--timeout", "5", "-o", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["replies"], report["different"], report["fences"]) == (3, 0, 1)


GETS = (
    '[9,0,"SET",0,0]', *['[9,0,"GET",0]', '[9,0,"REPLY",0]'] * 5, '[9,1,"GET",0]', '[9,1,"REPLY",0]',
    '[9,1,"CLOSE","client",33,4]', '[9000000,0,"GET",0]', '[9,0,"REPLY",0]', '[9,0,"CLOSE","client",33,4]',
)  # fmt: skip
"""9 replies, of which the last one is due after nine seconds."""


def started_replay(file: Path, port: int, *options: str, **given: Any) -> subprocess.Popen[bytes]:
    words = [*COMMAND, "replay", str(file), "--url", f"tcp://127.0.0.1:{port}", *options]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given}
    return subprocess.Popen(words, cwd=tempfile.gettempdir(), **given)


def test_a_server_that_dies_during_a_replay(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_bytes(rows(*GETS))
    with tcpstore_server() as server:
        process = started_replay(file, server.port, "--timeout", "0.3")
        with process, RawPeer(server.port) as peer:
            peer.ask(wait(b"/k"), 1)
            time.sleep(1)
            server.stop(signal.SIGKILL)
            said, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, said) == (4, b"")
    assert errors.decode() == (
        f"Error: the server at 127.0.0.1:{server.port} is gone: Connection refused; "
        "8 of 9 replies matched the recording before that\n"
    )


def test_a_connection_that_the_server_closes_early(tmp_path: Path) -> None:
    """Its missing replies count as different ones; the server is there for the others."""
    file = tmp_path / "job"
    file.write_bytes(rows(*GETS))

    def talk(peer: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port), LIMIT) as upstream:
            while True:
                for ready in select.select([peer, upstream], [], [])[0]:
                    data = ready.recv(65536)
                    if not data or (ready is peer and data.startswith(b"\x01")):
                        return
                    (upstream if ready is peer else peer).sendall(data)

    with tcpstore_server() as server, fake_server(talk) as fake:
        with RawPeer(server.port) as peer:
            peer.send(set_(b"/k", b"abcd"))
            peer.ping()
        done = replay(file, fake.port, "--speed", "0", "-o", "json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["replies"], report["different"], report["broken"]) == (9, 6, 1)
    assert b"6 of 9 replies differ; first: connection 0, request " in done.stderr
    assert b"the server closed the connection" in done.stderr


def test_a_timeout_has_the_differences_so_far(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_bytes(
        rows('[9,0,"ADD",0,1]', '[9,0,"REPLY",5]', '["K","/absent"]', '["L",[1]]', '[9,1,"WAIT",0]', '[9,1,"REPLY"]')
    )
    with tcpstore_server() as server:
        done = replay(file, server.port, "--speed", "0", "--timeout", "0.3")
    assert done.returncode == 3
    assert done.stderr.startswith(
        b"Error: no progress for 0.3 s: 1 of 2 connections unfinished; connection 1, request 3, WAIT /absent has not "
        b"been answered; 1 reply differs; first: connection 0, request 3, ADD /k"
    )
    assert b": recorded 5, got 1" in done.stderr


def test_a_replay_with_more_connections_than_open_files(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_bytes(rows(*GETS))
    with tcpstore_server() as server:
        limited = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # noqa: E731
        with started_replay(file, server.port, "--ranks", "200", preexec_fn=limited) as process:
            said, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, said) == (1, b"")
    needed = b"the replay needs 200 simultaneous connections, but the limit on open files (ulimit -Hn) allows only "
    assert needed in errors
    assert errors.count(b"\n") == 1


@contextmanager
def long_replay(tmp_path: Path, *options: str, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A replay that has got at least 6 of 8 replies and awaits the time of the last one."""
    file = tmp_path / "job"
    done = ('["K","/done"]', '[9,0,"SET",1,0]')
    file.write_bytes(rows(*GETS[:-6], *done, '[99000000,0,"GET",0]', *GETS[-2:], GETS[-4]))
    with tcpstore_server() as server:
        process = started_replay(file, server.port, *options, **given)
        with process, RawPeer(server.port) as peer:
            try:
                peer.ask(wait(b"/done"), 1)
                yield process
            finally:
                process.kill()


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_replay_prints_what_was_played(tmp_path: Path, number: signal.Signals, output: str) -> None:
    with long_replay(tmp_path, "-o", output) as process:
        process.send_signal(number)
        said, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -number
    if output == "json":
        report = json.loads(said)
        assert (report["interrupted"], report["different"]) == (True, 0)
        assert 6 <= report["replies"] <= 7
        assert json.loads(errors) == {"error": "interrupted", "status": 128 + number}
    else:
        assert said.startswith(b"interrupted while playing the job: 2 ranks, 2 connections, ")
        assert re.search(rb"\nreplies that match the recording: ([67]) of \1\n$", said)
        assert errors == b"Error: interrupted\n"


def test_a_long_replay_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        with long_replay(tmp_path, stderr=theirs) as process:
            said = b""
            while b" unfinished" not in said:
                assert select.select([ours], [], [], LIMIT)[0]
                said += os.read(ours, 1000)
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT)
        assert said.startswith(b"\r\x1b[Kplayed 11 of 12 requests, 2 of 2 connections unfinished")
        assert os.read(ours, 1000).endswith(b"\r\x1b[KError: interrupted\r\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_replay_without_a_server(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file) as proxy:
        stop(proxy)
    assert replay(file, free_port(), "--timeout", "0.3").returncode == 4
    assert replay(tmp_path / "none", free_port()).returncode == 1
    summary = replay(file, free_port(), "--summary")
    assert summary.returncode == 0
    assert b"0 ranks, 0 connections, 0 requests" in summary.stdout


def test_a_recording_of_stores_with_names_is_refused(tmp_path: Path) -> None:
    """Its keys are those of several stores. The recorder says so at once, and the summary has all."""
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file, "--values") as proxy:
        for host in ("one", "two"):
            with TCPStore(host, 1, 1, True, LIMIT, server=f"tcp://127.0.0.1:{proxy.port}") as store:
                store.set("k", host)
                assert store.get("k") == host.encode()
        status, said = stop(proxy)
        assert status == 0
        assert said.count("can be summarized but not replayed") == 1
        assert "; to replay it, record the job without TCPSTORE_SERVER_URL or server=, and torchrun with" in said
        done = replay(file, server.port)
        assert (done.returncode, done.stdout) == (1, b"")
        (line,) = done.stderr.splitlines()
        assert b"cannot replay a recording of named stores (2 connections used one)" in line
        commands = replay(file, server.port, "--summary").stdout
        assert b"ENTER " in commands
        assert b"END_STORE " in commands


def test_the_extension_is_not_sent_to_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file) as proxy:
        job(proxy.port, 1)
        stop(proxy)
    with server_of("libuv") as port:
        done = replay(file, port)
    assert done.returncode == 1
    assert b"tcpstore_async extension commands (" in done.stderr


def test_the_server_closes_as_recorded(tmp_path: Path) -> None:
    """ADD to what is not a number, an unknown opcode, and a peer that sends no request of the protocol."""
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file) as proxy:
        for data in (set_(b"/k", b"x") + add(b"/k", 0), b"\xf0"):
            with RawPeer(proxy.port) as peer:
                peer.send(data)
                assert peer.closed()
        with RawPeer(proxy.port, validate=False) as peer:
            peer.send(b"SSH-2.0-OpenSSH\r\n")
            assert peer.closed()
        stop(proxy)
    recording = read_recording(file)
    assert [(one.opaque, one.closed_by_server) for one in recording.connections] == [
        (False, True), (True, True), (True, True),
    ]  # fmt: skip
    with tcpstore_server() as server:
        assert replay_json(file, server.port)["opaque"] == 2


# The recorder


def test_bytes_pass_unchanged_in_both_directions(tmp_path: Path) -> None:
    """Large values, cut anywhere, while nobody reads for a while."""
    value = random.Random(5).randbytes(6 << 20)
    with tcpstore_server() as server, recorder(server.port, tmp_path / "job", "--values") as proxy:
        with RawPeer(proxy.port) as peer:
            frame = set_(b"/k", value)
            for at in range(0, len(frame), 333_333):
                peer.send(frame[at : at + 333_333])
            for _ in range(3):
                peer.send(get(b"/k"))
            time.sleep(0.2)
            for _ in range(3):
                assert peer.read(8 + len(value)) == frame[-8 - len(value) :]
        stop(proxy)
    recording = read_recording(tmp_path / "job")
    assert [(one.size, one.content == value) for one in recording.values] == [(len(value), True)]


def test_a_recorder_that_is_killed_leaves_a_readable_file(tmp_path: Path) -> None:
    for name in ("job", "job.gz"):
        file = tmp_path / name
        with tcpstore_server() as server, recorder(server.port, file) as proxy, RawPeer(proxy.port) as peer:
            for _ in range(100):
                peer.ping()
            deadline = time.monotonic() + LIMIT
            while len(read_recording(file).steps if file.stat().st_size else []) < 101:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            proxy.process.kill()
            assert peer.closed()
        recording = read_recording(file)
        assert not recording.complete
        with tcpstore_server() as server:
            report = replay_json(file, server.port)
        assert (report["requests"], report["complete"]) == (101, False)


def test_a_full_disk_does_not_end_the_job() -> None:
    with tcpstore_server() as server, recorder(server.port, Path("/dev/full")) as proxy, RawPeer(proxy.port) as peer:
        peer.ping()
        time.sleep(0.6)
        peer.ping()
        status, said = stop(proxy)
    assert status == 1
    assert "recording stopped (traffic is still being forwarded): cannot write /dev/full: No space" in said
    assert said.splitlines()[-1] == "Error: cannot write /dev/full: No space left on device"
    assert "recorded " not in said


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("-w", "/nowhere/file"), 1, "Error: cannot write /nowhere/file: No such file or directory"),
        (("--host", "192.0.2.1"), 1, "Error: cannot listen on 192.0.2.1:29500"),
        (("--upstream", "tcp://no.such.host.invalid:1"), 1, "Error: cannot resolve no.such.host.invalid"),
        (("--upstream", "tcp://127.0.0.1:29617", "--port", "29617"), 1, "is the recorder's own address"),
        (("--port", "0", "--port-file", "/nowhere/port"), 1, "Error: cannot write the port to /nowhere/port: No such"),
        (("--upstream", "nonsense"), 2, "'nonsense' is not of the form HOST:PORT, tcp://HOST:PORT"),
    ],
)
def test_a_recorder_that_does_not_start_says_why_and_keeps_the_recording(
    options: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "job"
    file.write_bytes(b"precious")
    done = tcpstore("record", "--upstream", "tcp://127.0.0.1:1", "-w", str(file), *options)
    *before, last = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (status, b"")
    assert said in last
    assert status == 2 or "--port-file" in options or not before
    assert b"Traceback" not in done.stderr
    assert file.read_bytes() == b"precious"


def test_a_recorder_needs_a_file() -> None:
    assert b"Missing option '-w'" in tcpstore("record", "--upstream", "tcp://127.0.0.1:1").stderr


def test_two_recorders_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_bytes(b"older, and longer than what is recorded now" * 99)
    with tcpstore_server() as server, recorder(server.port, file) as proxy, RawPeer(proxy.port) as peer:
        peer.ping()
        second = tcpstore("record", "--upstream", f"tcp://127.0.0.1:{server.port}", "-w", str(file), "--port", "0")
        peer.ping()
        status, said = stop(proxy)
    assert (second.returncode, second.stdout) == (1, b"")
    assert second.stderr == f"Error: cannot write {file}: another recorder is writing to it\n".encode()
    assert status == 0
    assert said.splitlines()[-1] == "recorded 3 requests from 1 connection and 1 process"
    assert read_recording(file).complete


def test_requests_that_make_a_connection_a_link_are_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with tcpstore_server() as server, recorder(server.port, file) as proxy:
        with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            store.set("k", "v" * 2000)
            for _ in range(3):
                assert len(store.get("k")) == 2000
        _, said = stop(proxy)
    steps = len(read_recording(file).steps)
    assert said.splitlines()[-1].startswith(f"recorded {steps} requests from 1 connection")


def test_the_server_may_start_after_the_clients(tmp_path: Path) -> None:
    port = free_port()
    with recorder(port, tmp_path / "job") as proxy, RawPeer(proxy.port) as peer:
        peer.send(b"\x0d\x07\0\0\0")
        time.sleep(0.3)
        with tcpstore_server("--port", str(port)):
            assert peer.read(4) == b"\x07\0\0\0"
        assert peer.closed()
        status, said = stop(proxy)
    assert status == 0
    assert f"cannot connect to 127.0.0.1:{port} for 127.0.0.1, retrying: " in said


def test_a_client_that_closes_at_once_has_sent_what_it_sent(tmp_path: Path) -> None:
    keys = [b"/%d" % number for number in range(20)]
    with tcpstore_server() as server, recorder(server.port, tmp_path / "job") as proxy:
        for key in keys:
            with RawPeer(proxy.port) as peer:
                peer.send(set_(key, b"v"))
        with RawPeer(proxy.port) as peer:
            peer.send(wait(*keys))
            assert peer.read(1) == b"\0"
        with RawPeer(proxy.port) as peer:
            peer.send(get(keys[0]))
            peer.socket.shutdown(socket.SHUT_WR)
            assert peer.read(9) == b"\1" + bytes(7) + b"v"
            assert peer.closed()
        assert stop(proxy)[0] == 0
    assert read_recording(tmp_path / "job").complete


def test_a_client_that_gave_up_before_the_server_came_is_not_connected(tmp_path: Path) -> None:
    port = free_port()
    with recorder(port, tmp_path / "job") as proxy:
        with RawPeer(proxy.port) as peer:
            peer.send(set_(b"/k", b"v"))
            time.sleep(0.3)
            peer.socket.shutdown(socket.SHUT_WR)
            assert peer.closed()
        with tcpstore_server("--port", str(port)), RawPeer(proxy.port) as peer:
            time.sleep(1)
            peer.send(get(b"/k"))
            assert peer.read(8) == bytes(8)
        assert stop(proxy)[0] == 0


def test_a_server_that_dies_takes_its_clients_with_it(tmp_path: Path) -> None:
    with tcpstore_server() as server, recorder(server.port, tmp_path / "job") as proxy:
        peers = [RawPeer(proxy.port) for _ in range(3)]
        for peer in peers:
            peer.ping()
            peer.send(wait(b"/k"))
        server.stop(signal.SIGKILL)
        for peer in peers:
            assert peer.closed()
            peer.close()
        assert stop(proxy)[0] == 0
    recording = read_recording(tmp_path / "job")
    assert [one.closed_by_server for one in recording.connections] == [True] * 3


def test_the_port_file_and_an_inherited_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, tcpstore_server() as server:
        os.set_inheritable(listener.fileno(), True)
        process = subprocess.Popen(
            [
                *COMMAND, "record", "--upstream", f"tcp://127.0.0.1:{server.port}", "-w", str(tmp_path / "job"),
                "--listen-fd", str(listener.fileno()), "--port-file", str(tmp_path / "port"),
            ],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(listener.fileno(),),
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            assert (tmp_path / "port").read_text() == f"{port}\n"
            with RawPeer(port) as peer:
                peer.ping()
            process.terminate()
            assert process.wait(LIMIT) == 0


def test_too_many_connections_do_not_end_the_recorder(tmp_path: Path) -> None:
    limited = ["prlimit", "--nofile=60:60"]
    with tcpstore_server() as server, recorder(server.port, tmp_path / "job", prefix=limited) as proxy:
        peers = [RawPeer(proxy.port) for _ in range(40)]
        peers[0].ping()
        for peer in peers:
            peer.close()
        time.sleep(0.2)
        with RawPeer(proxy.port) as peer:
            peer.ping()
        assert proxy.stop(signal.SIGTERM) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else")
@pytest.mark.parametrize("kind", ["symbolic link", "file"])
def test_what_someone_else_has_planted_is_not_written_to(kind: str, tmp_path: Path) -> None:
    mine, planted = tmp_path / "mine", tmp_path / "job"
    mine.write_bytes(b"precious")
    if kind == "file":
        planted.write_bytes(b"precious")
    else:
        planted.symlink_to(mine)
    os.lchown(planted, 12345, 12345)
    with pytest.raises(RecordingError) as caught:
        RecordingFile(planted)
    what = f"it is a {kind} owned by user 12345"
    assert str(caught.value) == f"cannot write {planted}: {what}; remove it or choose another path"
    assert planted.read_bytes() == b"precious"


@pytest.mark.parametrize("there", [False, True])
def test_a_link_of_ones_own_is_followed(there: bool, tmp_path: Path) -> None:
    """As /dev/stdout is one."""
    mine, link = tmp_path / "mine", tmp_path / "job"
    if there:
        mine.write_bytes(b"older")
    link.symlink_to(mine)
    file = RecordingFile(link)
    file.start()
    file.write(b"row")
    file.close()
    assert mine.read_bytes() == b"row"
    assert link.is_symlink()
