"""The server of a master lives as long as its owner wants, however that was started and ends."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from commands import run_command
from faults.fault_helpers import program, until
from faults.owner_programs import HOST, PLACES, RELEASE, STREAMS, WAIT, Owner, owner, port_is_free, seen
from support import LIMIT, RawPeer, free_port
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.serving import build
from tcpstore_async.stores.agent import Agent, Options, RoundsClosed

pytestmark = [pytest.mark.interpreted, pytest.mark.needs_proc]

SOURCES = Path(__file__).parent.parent.parent / "tcpstore_async"

# How an owner ends

WORKER = "if os.fork() == 0:\n    os.read(IN, 1)\n    os._exit(0)\n"
"""Outlives the owner: waits for standard input, which the test holds open."""

ENDINGS = {
    "returns": "",
    "raises SystemExit": "sys.exit(0)",
    "leaves by os._exit": "os._exit(0)",
    "gets SIGABRT": "os.kill(os.getpid(), 6)",
    "gets SIGTERM": "import signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "leaves a forked worker": WORKER + "os._exit(0)",
    "returns and leaves a forked worker": WORKER,
    "leaves a multiprocessing worker": """
import multiprocessing
multiprocessing.get_context("fork").Process(target=os.read, args=(IN, 1)).start()
os._exit(0)
""",
    "leaves a worker's worker": "if os.fork() == 0:\n    if os.fork() == 0:\n        os.read(IN, 1)\n    os._exit(0)\n",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_server_ends_with_its_owner(ending: str, backend: str) -> None:
    with owner(WAIT + ENDINGS[ending], backend=backend) as program:
        program.go_on()
        program.process.wait(LIMIT)
        assert program.server.ended()
        assert port_is_free(program.port)


@pytest.mark.parametrize("end", ["", "os._exit(0)"], ids=["killed", "left by os._exit, as multiprocessing does"])
@pytest.mark.parametrize("worker", ["", WORKER], ids=["alone", "with a worker"])
# quirk: server-process
def test_an_owner_that_ends_without_a_word_takes_the_server_with_it(worker: str, end: str, backend: str) -> None:
    """The port is free at once; the ranks have their grace, as after a stop."""
    then = WAIT + worker + end if end else worker + WAIT
    with owner(then, backend=backend) as program, RawPeer(program.port) as peer:
        peer.ping()
        if end:
            program.go_on()
        else:
            program.process.kill()
        until(lambda: port_is_free(program.port), "the port is free")
        peer.ping()
        assert program.server.running()
        peer.close()
        assert program.server.ended()


HOLD = """
def hold():
    alive = os.open({alive!r}, os.O_WRONLY)
    tell = lambda: os.write(alive, b"%d\\n" % os.getpid())
    tell()
    os.register_at_fork(after_in_child=tell)
    with open({go_on!r}):
        pass

"""
"""Names the process and its children, and waits for the test. A FIFO is open as long as any of them runs."""

HOLD_LATER = """
from tcpstore_async.server.process.child import Owner
report_ready = Owner.report_ready
Owner.report_ready = lambda *arguments: [hold(), report_ready(*arguments)]
"""

MOMENTS = {
    "before it forks": ("if os.fork():", "hold()\n"),
    "when it has forked": ("try:\n", "hold()\n"),
    "when it serves": ("child_main(int(", HOLD_LATER),
}
"""Where in the program of a server process it waits, and by what."""

STARTS = """
import sys
from tcpstore_async.server import master
from tcpstore_async.server.process import parent
define, place, hold, port, backend = sys.argv[1:]
before, found, after = parent._PROGRAM.partition(place)
assert found
parent._PROGRAM = "import os" + define + before + hold + found + after
master.host(int(port), backend=backend)
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_owner_killed_while_its_server_starts_leaves_nothing(moment: str, backend: str, tmp_path: Path) -> None:
    alive, go_on = str(tmp_path / "alive"), str(tmp_path / "go on")
    os.mkfifo(alive)
    os.mkfifo(go_on)
    port = free_port()
    with ExitStack() as stack:
        reading = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reading)

        def heard() -> bytes:
            poll = select.poll()
            poll.register(reading, select.POLLIN)
            assert poll.poll(LIMIT * 1000), "a process runs on"
            said = os.read(reading, 4096)
            for pid in said.split():
                with suppress(ProcessLookupError):  # it has ended
                    stack.enter_context(seen(int(pid)))
            return said

        define = HOLD.format(alive=alive, go_on=go_on)
        process = stack.enter_context(program(STARTS, define, *MOMENTS[moment], str(port), backend))
        assert heard()
        assert not port_is_free(port)
        process.kill()
        process.wait(LIMIT)
        stack.callback(os.close, os.open(go_on, os.O_RDWR))
        while heard():
            pass
        until(lambda: port_is_free(port), "nobody has the socket")


SHORT_GRACE = """
from tcpstore_async.server.process import parent
start = parent.start
parent.start = lambda *args, **options: start(*args, **options, grace=0.2)
"""


ALONE = Options(1, 1, join=LIMIT, last_call=0.05)
PAIR = ALONE._replace(least=2, most=2)


@pytest.mark.parametrize("end", ["", "hosted.release()\n", "os.kill(os.getpid(), 9)"])
def test_agents_form_no_round_without_the_owner(end: str, backend: str) -> None:
    """Nobody could join it; an agent that waits learns of it at once, while other clients keep their grace."""
    with owner(WAIT + end, backend=backend) as program, ExitStack() as stack:
        stores = [stack.enter_context(TCPStore("127.0.0.1", program.port, timeout=LIMIT)) for _ in range(4)]
        parked, stranger, last, rank = stores
        waiting = Agent(parked, "job", b"a", PAIR)
        late = Agent(stranger, "other job", b"b", ALONE)
        Agent(last, "closed", b"c", ALONE).close()
        rank.set("k", "v")
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(waiting.join)
            until(lambda: Agent(rank, "job", b"", PAIR).look().participants == 1, "the agent waits")
            program.go_on()
            with pytest.raises(DistNetworkError):
                joined.result(LIMIT)
        assert rank.get("k") == b"v"
        with pytest.raises(DistNetworkError):
            late.join()
        with pytest.raises(RoundsClosed):
            Agent(last, "closed", b"c", ALONE).join()
        assert rank.get("k") == b"v"


def test_the_grace_after_a_killed_owner_ends() -> None:
    with owner(WAIT, before=SHORT_GRACE) as program, RawPeer(program.port) as peer:
        peer.ping()
        program.process.kill()
        assert program.server.ended()
        assert peer.closed()


NO_PIDFD = """
import os
del os.pidfd_open
from tcpstore_async.server.process import parent
parent._PROGRAM = "import os\\ndel os.pidfd_open\\n" + parent._PROGRAM
"""


@pytest.mark.parametrize("worker", ["", WORKER], ids=["alone", "with a worker"])
def test_without_a_descriptor_for_processes_it_looks_again_and_again(worker: str) -> None:
    with owner(worker + WAIT, before=NO_PIDFD) as program, RawPeer(program.port) as peer:
        peer.ping()
        program.process.kill()
        until(lambda: port_is_free(program.port), "the port is free")
        peer.close()
        assert program.server.ended()


def test_without_a_descriptor_for_processes_it_is_stopped_all_the_same() -> None:
    with owner(RELEASE, before=NO_PIDFD) as program:
        serves_and_stops(program)


def test_an_owner_that_becomes_another_program_has_let_go(backend: str) -> None:
    """The pid stays, so the end of the control socket is what counts. The ranks keep their grace."""
    become = "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.write(9, b\"new\\\\n\"); os.read(8, 1)'])"
    with owner(WAIT + become, backend=backend) as program:
        with RawPeer(program.port) as peer:
            peer.ping()
            program.go_on()
            assert program.line() == "new"
            until(lambda: port_is_free(program.port), "the port is free")
            peer.ping()
        assert program.server.ended()
        assert program.process.poll() is None


@pytest.mark.parametrize("last", ["", "hosted.release()\n"], ids=["without a release", "after a release"])
# quirk: server-process
def test_ranks_have_their_grace_when_the_owner_returns(last: str, backend: str) -> None:
    with owner(WAIT + last, backend=backend) as program, RawPeer(program.port) as peer:
        peer.ping()
        program.go_on()
        assert program.process.wait(LIMIT) == 0
        assert port_is_free(program.port)
        peer.ping()
        peer.close()
        assert program.server.ended()


def test_ranks_have_their_grace_when_the_owner_is_killed_after_a_release(backend: str) -> None:
    with owner(RELEASE, backend=backend) as program, RawPeer(program.port) as peer:
        peer.ping()
        program.go_on()
        assert program.line() == "released"
        program.process.kill()
        program.process.wait(LIMIT)
        peer.ping()
        peer.close()
        assert program.server.ended()


@pytest.mark.parametrize("group", [False, True], ids=["to the server", "to the process group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_for_the_ranks_do_not_end_it(number: signal.Signals, group: bool, backend: str) -> None:
    immune = f"import signal\nos.setpgid(0, 0)\nsignal.signal({int(number)}, lambda *_: None)\n"
    with owner(WAIT, before=immune, backend=backend) as program, RawPeer(program.port) as peer:
        if group:
            os.killpg(program.process.pid, number)
        else:
            program.server.signal(number)
        peer.ping()
        assert program.server.running(0.1)
        peer.ping()


INTERRUPTED = """
try:
    say("waits")
    os.read(IN, 1)
except KeyboardInterrupt:
    pass
"""


def test_an_owner_interrupted_by_the_keyboard_stops_it_in_order(backend: str) -> None:
    with owner(INTERRUPTED, before="os.setpgid(0, 0)\n", backend=backend) as program:
        assert program.line() == "waits"
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.process.wait(LIMIT) == 0
        assert program.server.ended()
        assert port_is_free(program.port)


# However it was started


def serves_and_stops(program: Owner) -> None:
    """A round trip, a release, and the end."""
    with RawPeer(program.port) as peer:
        peer.ping()
    for fd in range(2):
        assert os.readlink(f"/proc/{program.server.pid}/fd/{fd}") == "/dev/null"
    assert os.readlink(f"/proc/{program.server.pid}/fd/2").startswith("socket:")
    assert os.getsid(program.server.pid) not in (os.getsid(0), os.getsid(program.process.pid))
    program.go_on()
    assert program.line() == "released"
    assert port_is_free(program.port)
    assert program.server.ended()
    program.go_on()
    assert program.process.wait(LIMIT) == 0


STATES = {
    "as usual": "",
    "no standard streams": "for fd in range(3): os.close(fd)\n",
    "no standard input and output": "os.close(0)\nos.close(1)\n",
    "no standard output and error": "os.close(1)\nos.close(2)\n",
    "SIGCHLD ignored": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
    "all signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n",
    "an odd umask": "os.umask(0o777)\n",
    "an empty environment": "os.environ.clear()\n",
    "variables for the user's program": "os.environ.update(PYTHONINSPECT='1', PYTHONPATH='/', PYTHONDEVMODE='1')\n",
    "PYTHONHOME": "os.environ['PYTHONHOME'] = sys.base_prefix\n",
    "no working directory": "import tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())\n",
}


@pytest.mark.parametrize("state", STATES)
def test_an_owner_in_an_odd_state(state: str) -> None:
    with owner(RELEASE, before=STATES[state]) as program:
        assert ("tcpstore_async__mypyc" in program.server.maps()) == (build() == "compiled")
        serves_and_stops(program)


@pytest.mark.parametrize("options", [["-S"], ["-I"], ["-S", "-I"], ["-X", "utf8"], ["-O"], ["-B"]], ids=" ".join)
def test_an_interpreter_with_options(options: list[str]) -> None:
    """Without `site`, or isolated, the program is passed the package's location."""
    with owner(RELEASE, options, before=f"sys.path += {PLACES}\n") as program:
        assert ("tcpstore_async__mypyc" in program.server.maps()) == (build() == "compiled")
        serves_and_stops(program)


def test_the_package_in_a_zip_file(tmp_path: Path) -> None:
    archive = tmp_path / "päckage.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in SOURCES.rglob("*.py"):
            packed.write(path, path.relative_to(SOURCES.parent))
    places = [str(archive), *PLACES]
    with owner(RELEASE, ["-S", "-I"], before=f"sys.path += {places}\n") as program:
        assert "tcpstore_async__mypyc" not in program.server.maps(), "it is the same build as its owner"
        serves_and_stops(program)


def test_the_package_in_a_directory_that_was_added(tmp_path: Path) -> None:
    """A relative path, after a change of the working directory."""
    shutil.copytree(SOURCES, tmp_path / "lib" / "tcpstore_async")
    elsewhere = f"sys.path[1:1] = ['lib', *{PLACES}]\nimport tcpstore_async.server.process.parent\nos.chdir('/')\n"
    with owner(RELEASE, ["-S", "-I"], before=elsewhere, cwd=str(tmp_path)) as program:
        environment = Path("/proc", str(program.server.pid), "cmdline").read_bytes().decode()
        assert str(tmp_path / "lib") in environment
        serves_and_stops(program)


def test_nothing_in_the_current_directory_is_imported(tmp_path: Path) -> None:
    trap = "import os\nos.write(2, b'imported: ' + __file__.encode())\nos._exit(7)\n"
    for name in "asyncio socket signal uvloop msgspec tcpstore_async sitecustomize types click".split():
        (tmp_path / f"{name}.py").write_text(trap)
    here = (
        "import tcpstore_async.server.process.parent, asyncio, msgspec, tempfile\n"
        "sys.path[:0] = ['', os.getcwd(), '.']\n"
    )
    with owner(RELEASE, ["-I"], before=f"sys.path += {PLACES}\n" + here, cwd=str(tmp_path)) as program:
        serves_and_stops(program)


def test_the_users_program_is_not_run_again(tmp_path: Path) -> None:
    """The program has no `if __name__`."""
    script = tmp_path / "train.py"
    script.write_text(STREAMS + "say('once')\n" + HOST)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.count("once") == 1
    assert done.stderr == ""


DAEMON = """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
"""


def test_a_daemon_hosts() -> None:
    with owner(RELEASE.removesuffix(WAIT), before=DAEMON) as program:
        with RawPeer(program.port) as peer:
            peer.ping()
        program.go_on()
        assert program.line() == "released"
        assert program.server.ended()
        assert port_is_free(program.port)


WORKERS = """
import multiprocessing, os, sys

def work(pipe):
    from tcpstore_async.server import master
    hosted = master.host(0)
    pipe.send((hosted.port, hosted.pid))
    pipe.recv()
    if sys.argv[2] == "releases":
        hosted.release()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=[theirs], daemon=True)
    process.start()
    print(*pipe.recv(), flush=True)
    sys.stdin.readline()
    pipe.send(None)
    process.join()
    print("over", process.exitcode, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("last", ["releases", "returns"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_daemonic_multiprocessing_worker_hosts(method: str, last: str, tmp_path: Path) -> None:
    """Such a process may have no multiprocessing children of its own."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    process = subprocess.Popen(
        [sys.executable, script, method, last], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port, pid = map(int, process.stdout.readline().split())
        with seen(pid) as server:
            with RawPeer(port) as peer:
                peer.ping()
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "over 0\n"
            assert server.ended()
            assert port_is_free(port)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(LIMIT)


# A forked child of the owner


CHILD = """
import signal
if os.fork() == 0:
    signal.alarm(60)
    hosted.announce(3)
    hosted.complete()
    hosted.release()
    again = master.host(0, multi_tenant=True)
    say(again.port, again.pid)
    os.read(IN, 1)
    again.release()
    say("child released")
    sys.exit()
"""


def test_a_forked_child_cannot_end_its_parents_server_and_may_have_one(backend: str) -> None:
    with owner(CHILD + WAIT, backend=backend) as program, RawPeer(program.port) as peer:
        peer.ping()
        port, pid = map(int, program.line().split())
        assert port != program.port
        with seen(pid) as another:
            with RawPeer(port) as other:
                other.ping()
            program.go_on()  # either of the two reads that line
            peer.ping()
            program.go_on()
            assert program.line() == "child released"
            assert another.ended()
            assert program.process.wait(LIMIT) == 0


# By the command line, which is the same server


@contextmanager
def serve(
    listener: socket.socket, *, owner_pid: int | None = None, backend: str = "uv"
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """`tcpstore serve` as an owner starts it, and the owner's end of the control socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT)
    fds = (listener.fileno(), theirs.fileno())
    command = [sys.executable, "-m", "tcpstore_async", "serve", "--grace", "60", "--backend", backend]
    with ours, tempfile.TemporaryFile() as output:
        with theirs, listener:
            owned = ["--listen-fd", fds[0], "--owner-pid", owner_pid or os.getpid(), "--control-fd", fds[1]]
            process = subprocess.Popen(
                [*command, *map(str, owned)], cwd=tempfile.gettempdir(), pass_fds=fds, stdout=output, stderr=output
            )
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait(LIMIT)


def heard(control: socket.socket) -> dict[str, object]:
    """Return the next message of the server."""
    line = b""
    while not line.endswith(b"\n"):
        part = control.recv(1)
        assert part, f"it ended after saying {line!r}"
        line += part
    event: dict[str, object] = json.loads(line)
    return event


def test_messages_on_the_control_socket(backend: str) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with serve(listener, backend=backend) as (process, control):
        ready = heard(control)
        assert isinstance(capacity := ready.pop("max_connections"), int)
        assert capacity > 0
        assert ready == {"event": "ready", "port": port, "pid": process.pid, "backend": backend}
        with RawPeer(port) as peer:
            peer.ping()
            peer.join(3)
            process.terminate()
            process.send_signal(signal.SIGINT)
            control.sendall(b"joins 2\njoi")
            control.sendall(b"ns 1\nwhat is that\ncomplete 0.0\n")
            peer.ping()
            with RawPeer(port) as other:
                other.ping()
                control.sendall(b"stop\n")
                assert heard(control) == {"event": "stopped"}, "every connection came after the round was complete"
                assert peer.closed()
                assert other.closed()
        assert process.wait(LIMIT) == 0


def test_connections_that_are_left_are_counted(backend: str) -> None:
    listener = listen("127.0.0.1", 0)
    with serve(listener, backend=backend) as (process, control):
        with RawPeer(int(str(heard(control)["port"]))) as peer:
            peer.ping()
            control.sendall(b"stop\n")
            assert heard(control) == {"event": "stopped", "remaining": 1}
            peer.ping()
        assert process.wait(LIMIT) == 0


def test_an_owner_that_was_gone_before_it_was_watched() -> None:
    """Its pid has been reused, and another process holds its end of the control socket."""
    with serve(listen("127.0.0.1", 0), owner_pid=1) as (process, control):
        assert heard(control)["event"] == "ready"
        assert heard(control) == {"event": "stopped"}
        assert process.wait(LIMIT) == 0
        assert control.recv(1) == b""


def test_what_it_cannot_listen_on_is_reported() -> None:
    with serve(socket.socket(type=socket.SOCK_DGRAM)) as (process, control):
        said = heard(control)
        assert said["event"] == "failed"
        assert "it is not a TCP socket" in str(said["error"])
        assert process.wait(LIMIT) == 1


@pytest.mark.parametrize(
    "words",
    [
        "--owner-pid 1",
        "--control-fd 3",
        "--owner-pid 1 --control-fd 3",
        "--listen-fd 3 --control-fd 3",
        "--listen-fd 3 --owner-pid 1",
        "--listen-fd 3 --owner-pid 1 --control-fd 3 --port-file port",
        "--listen-fd 3 --owner-pid 0 --control-fd 3",
    ],
)
def test_options_that_do_not_go_together(words: str) -> None:
    done = run_command(None, "serve", *words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error" in done.stderr


def test_a_server_outlives_the_thread_that_started_it() -> None:
    """The owner is a process: a parent-death signal would be sent when the thread ends."""
    in_a_thread = """
import threading
from tcpstore_async.server import master

def host(port, host=master.host):
    def run():
        hosts.append(host(port))

    hosts = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return hosts[0]

master.host = host
"""
    with owner(WAIT, before=in_a_thread) as program:
        assert program.server.running(0.1)
        with RawPeer(program.port) as peer:
            peer.ping()
        program.go_on()
        assert program.process.wait(LIMIT) == 0
        assert program.server.ended()
