"""The thread in a rank that tells where it is: when there is one, whom it answers, and what is left of it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support import LIMIT, run_python
from tcpstore_async.stacks import asking, flight_recorder, responder
from tcpstore_async.stacks.asking import ask, dumped
from tcpstore_async.stacks.frames import written
from tcpstore_async.stacks.report import Collective

pytestmark = pytest.mark.needs_proc

HERE = """
import os, socket, sys, threading
from pathlib import Path
def there():
    threads = any(thread.name == "tcpstore stacks" for thread in threading.enumerate())
    files = sum("tcpstore-stacks" in os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{name}"))
    sockets = f"@tcpstore-stacks-{os.getpid()}\\n" in Path("/proc/net/unix").read_text()
    return int(threads), files, int(sockets)
"""
"""Defines what there is of a responder in this process: threads, files in memory and sockets."""

NOTHING, ONE = "(0, 0, 0)", "(1, 1, 1)"


def run(program: str, **env: str) -> list[str]:
    return run_python(HERE + textwrap.dedent(program), **{"TCPSTORE_STACKS": "", **env}).splitlines()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A responder in this process."""
    monkeypatch.setenv("TCPSTORE_STACKS", "1")
    responder.start()
    yield os.getpid()
    responder.stop()


STORE = """
from tcpstore_async import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False): print(there())
"""
ASYNC_STORE = """
import asyncio
from tcpstore_async import AsyncTCPStore, serve
async def main():
    async with serve("127.0.0.1", 0) as server, await AsyncTCPStore.connect("127.0.0.1", server.port): print(there())
asyncio.run(main())
"""
AUTOLOAD = "from tcpstore_async.autoload import autoload; autoload(); print(there())"


@pytest.mark.parametrize("program", [STORE, ASYNC_STORE, AUTOLOAD])
@pytest.mark.parametrize(("value", "expected"), [("1", ONE), ("0", NOTHING), ("", NOTHING)])
def test_the_environment_starts_it(program: str, value: str, expected: str) -> None:
    assert run(program, TCPSTORE_STACKS=value) == [expected]


def test_starting_and_stopping_it_again() -> None:
    program = """
        from tcpstore_async.stacks import responder, switch
        for _ in range(20):
            switch.start(); switch.start(); print(there())
            responder.stop(); responder.stop(); print(there())
    """
    assert run(program, TCPSTORE_STACKS="1") == [ONE, NOTHING] * 20


def test_a_forked_child_has_none_until_it_starts_its_own() -> None:
    program = """
        import warnings
        from tcpstore_async.stacks import responder
        from tcpstore_async.stacks.asking import ask
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads
        responder.start()
        if pid := os.fork():
            os.waitpid(pid, 0)
            print(there(), list(ask([os.getpid()], 60).values())[0] is not None)
        else:
            before = there()
            caught = responder.takes(os.getpid(), responder.free_signal())
            responder.start()
            print(before, there(), caught, list(ask([os.getpid()], 60).values())[0] is not None, flush=True)
            os._exit(0)
    """
    assert run(program, TCPSTORE_STACKS="1") == [f"{NOTHING} {ONE} False True", f"{ONE} True"]


def test_a_program_that_is_executed_inherits_nothing() -> None:
    program = """
        import subprocess
        from tcpstore_async.stacks import responder
        responder.start()
        code = "import os; print(*[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]])"
        print("tcpstore" in subprocess.check_output([sys.executable, "-c", code], close_fds=False, text=True))
    """
    assert run(program, TCPSTORE_STACKS="1") == ["False"]


def test_its_answer_has_the_frames_of_the_main_thread(running: int) -> None:
    answer = ask([running], 60.0)[running]
    assert answer is not None
    assert any(frame.startswith("ask (asking.py:") for frame in answer.frames)
    assert 10 < len(answer.frames) <= 24
    assert answer.collectives == ()


def test_frames_written_by_a_signal(running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_DUMP_SECONDS", LIMIT)
    frames = dumped([running], float("inf"))[running]
    assert re.fullmatch(r"_(read|signalled) \(asking\.py:\d+\)", frames[0])


PRETENDER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"\\0tcpstore-stacks-{os.getpid()}")
listener.listen()
print(1, flush=True)
connection = listener.accept()[0]
connection.sendall(sys.stdin.buffer.read())
"""
"""Answers what it is given."""


def answered(said: bytes) -> responder.Answer | None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PRETENDER], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.write(said)
        process.stdin.close()
        try:
            return ask([process.pid], LIMIT)[process.pid]
        finally:
            process.kill()


def test_an_answer_that_is_none_of_ours() -> None:
    assert answered(b'{"more": ' + b"[" * 50_000) is None
    assert answered(b"{}") is None


def test_an_answer_that_is_too_long_is_clipped() -> None:
    """In a report that has no space left, it took the place of all others."""
    entered = [Collective("g" * 200, "all_reduce", number, "s" * 200, 1e300) for number in range(100)]
    entered += [Collective("g", "all_reduce", -1), Collective("g", "all_reduce", 1 << 60)]
    found = answered(msgspec.json.encode(responder.Answer(("f" * 200,) * 40, tuple(entered[-42:]))))
    assert found is not None
    assert [len(frame) for frame in found.frames] == [128] * 24
    assert 0 < len(found.collectives) <= 32
    assert {(len(one.group), len(one.sizes), one.since) for one in found.collectives} == {(128, 128, 1e9)}
    assert all(0 <= one.number < 100 for one in found.collectives)


def test_a_file_on_a_disk_is_not_written_to(tmp_path: Path) -> None:
    """What a descriptor's name says may be a lie: root's own file was emptied."""
    path = tmp_path / "memfd"
    path.write_text("kept")
    with path.open() as file:
        with pytest.raises(FileNotFoundError):
            asking._opened(f"/proc/self/fd/{file.fileno()}")
        path.unlink()
        with pytest.raises(FileNotFoundError):
            asking._opened(f"/proc/self/fd/{file.fileno()}")
        assert file.read() == "kept"


def test_no_signal_goes_to_a_main_thread_that_blocks_it() -> None:
    """Another thread's frames were shown as the main thread's, or the signal came when nothing handled it."""
    program = """
        import signal
        from tcpstore_async.stacks import asking, responder
        responder.start()
        number = responder.free_signal() + 1
        print(responder.takes(os.getpid(), number), end=" ")
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        print(responder.takes(os.getpid(), number), asking.dumped([os.getpid()], float("inf")))
    """
    assert run(program, TCPSTORE_STACKS="1") == ["True False {}"]


def test_a_responder_outlives_a_lack_of_descriptors() -> None:
    program = """
        import resource
        from tcpstore_async.stacks import responder
        from tcpstore_async.stacks.asking import ask
        responder.start()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with socket.socket(socket.AF_UNIX) as one:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            one.connect(f"\\0tcpstore-stacks-{os.getpid()}")
            responder.time.sleep = lambda seconds: full.set()
            full = threading.Event()
            print(full.wait(60), end=" ")
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        print(ask([os.getpid()], 60)[os.getpid()] is not None)
    """
    assert run(program, TCPSTORE_STACKS="1") == ["True True"]


def test_a_name_that_is_no_utf_8() -> None:
    assert written([("f", "/tmp/\udcff.py", 1)]) == ("f (?.py:1)",)


def test_no_signal_goes_to_a_process_without_a_handler() -> None:
    """It would end it."""
    code = "import os, time; os.memfd_create('tcpstore-stacks-60'); print(1, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert dumped([process.pid], float("inf")) == {}
            assert process.poll() is None
        finally:
            process.kill()
    assert dumped([process.pid], float("inf")) == {}


def test_another_process_that_answers_in_its_name() -> None:
    pid = 2**22 + 1  # more than the kernel gives
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{responder.NAME}{pid}")
        listener.listen()
        assert ask([pid], 60.0) == {}


@pytest.mark.parametrize("sent", [b"", b"{", b'{"frames": 1}', b"x" * (1 << 17)])
def test_a_wrong_answer_is_none(sent: bytes) -> None:
    """In a process without a responder, whose name another part of the program has."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{responder.NAME}{os.getpid()}")
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                try:
                    connection.sendall(sent)
                except OSError:
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask([os.getpid()], 60.0) == {os.getpid(): None}
        thread.join()


def test_another_user_gets_no_answer(running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -2)
    monkeypatch.setattr(responder, "peer_process", lambda _: (0, 12345))
    assert ask([running], 60.0) == {running: None}


def test_it_starts_where_another_listens_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, it does not, and nothing fails."""
    monkeypatch.setenv("TCPSTORE_STACKS", "1")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{responder.NAME}{os.getpid()}")
        before = sorted(os.listdir("/proc/self/fd"))
        responder.start()
        assert sorted(os.listdir("/proc/self/fd")) == before
        responder.stop()


class Recorder:
    """Stands for PyTorch's module, and has a dump of NCCL's form as well."""

    @staticmethod
    def _dump_nccl_trace_json(collectives: bool, active: bool) -> bytes:
        entry = (
            b'{"process_group": ["%s", "%s"], "profiling_name": "nccl:%s", "collective_seq_id": %d, "is_p2p": %s, '
            b'"time_created_ns": 0, "input_sizes": [[3, 4], [5]]}'
        )
        entries = [
            entry % (b"0", b"default_pg", b"all_reduce", 1, b"false"),
            entry % (b"0", b"default_pg", b"broadcast", 2, b"false"),
            entry % (b"0", b"default_pg", b"send", 2, b"true"),
            entry % (b"1", b"undefined", b"barrier", 9, b"false"),
        ]
        return b'{"version": "2.10", "entries": [%s]}' % b", ".join(entries)


def test_the_last_collective_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, flight_recorder._MODULE, Recorder)
    found = [(one.group, one.name, one.number, one.sizes) for one in flight_recorder.last_collectives()]
    assert found == [("default_pg", "broadcast", 2, "[3, 4], [5]"), ("1", "barrier", 9, "[3, 4], [5]")]


@pytest.mark.parametrize("dump", [b"", b"[]", b'{"entries": [{"name": 1}]}', None])
def test_a_recorder_of_another_form_is_silent(dump: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @staticmethod
        def _dump_fr_trace_json(collectives: bool, active: bool) -> bytes | None:
            return dump

    monkeypatch.setitem(sys.modules, flight_recorder._MODULE, Other)
    assert flight_recorder.last_collectives() == ()


def test_memory_that_a_responder_needs(tmp_path: Path) -> None:
    """At rest and after questions: less than a mebibyte."""
    program = """
        from tcpstore_async.stacks import responder
        from tcpstore_async.stacks.asking import ask
        def resident():
            words = Path("/proc/self/status").read_text().split()
            return int(words[words.index("VmRSS:") + 1])
        before = resident()
        responder.start()
        for _ in range(100):
            assert ask([os.getpid()], 60)[os.getpid()] is not None
        print(resident() - before)
    """
    (used,) = run(program, TCPSTORE_STACKS="1")
    assert int(used) < 1024
