"""One relay for all processes of a host that use a store: found, started again, and gone with its last rank."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.fault_helpers import until
from support import LIMIT, Server, secret_file, tcpstore, tcpstore_server
from support import refused as refuses
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.relay.shared import shared_relay
from tcpstore_async.server.admin_path import own_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sockets")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tcpstore_server("--persist", str(tmp_path_factory.mktemp("journal"))) as server:
        yield server


@pytest.fixture
def owner(server: Server, request: pytest.FixtureRequest) -> Iterator[TCPStore]:
    with TCPStore(request.node.name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        store.set("who", "right one")
        yield store


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=LIMIT, server="")


def relay_of(store: TCPStore, host: str = "127.0.0.1") -> tuple[str, int]:
    known = store._connection().name
    assert known is not None
    assert store._server is not None
    return shared_relay(store._server, known, host, Deadline(LIMIT))


def relays() -> list[Path]:
    return sorted(own_folder().glob("*.relay"))


def pids(path: Path) -> list[int]:
    """The processes that hold a relay's file open."""
    held = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for fd in os.listdir(f"/proc/{process}/fd"):
                if os.readlink(f"/proc/{process}/fd/{fd}") == str(path):
                    held.append(int(process))
                    break
    return held


@pytest.mark.needs_proc
def test_all_find_one_relay_that_ends_with_its_last_rank(owner: TCPStore) -> None:
    with ThreadPoolExecutor(8) as ranks:
        found = set(ranks.map(lambda _: relay_of(owner), range(8)))
    assert len(found) == 1
    (_, port), (path,) = found.pop(), relays()
    (pid,) = pids(path)
    assert pid != os.getpid()
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid())
    with client(port) as rank:
        assert rank.get("who") == b"right one"
        os.kill(pid, signal.SIGTERM)  # which a launcher sends to all processes of a job
        assert rank.get("who") == b"right one"
    until(lambda: not path.exists(), "the file is removed")
    until(lambda: not pids(path) and not Path(f"/proc/{pid}").exists(), "the relay has ended")


def test_it_leaves_the_file_of_a_relay_that_has_taken_its_place(owner: TCPStore) -> None:
    first = relay_of(owner)
    with client(first[1]) as rank:
        assert rank.get("who") == b"right one"
        (path,) = relays()
        path.unlink()
        second = relay_of(owner)
        assert second != first
        with client(second[1]) as other:
            rank.close()
            until(lambda: refuses(first[1]), "the first relay has ended")
            assert relays() == [path]
            assert other.get("who") == b"right one"


def test_another_store_has_another_relay(server: Server, owner: TCPStore) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    with TCPStore("another store", 1, None, True, LIMIT, server=url) as other:
        first, second = relay_of(owner), relay_of(other)
        assert first != second
        with client(first[1]) as rank, client(second[1]) as stranger:
            assert rank.get("who") == b"right one"
            assert stranger.num_keys() == 0


def unlocked(fd: int) -> bool:
    """Whether nobody holds the lock of a file: the kernel releases it a little after its holder is gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


@pytest.mark.needs_proc
def test_a_killed_relay_is_replaced(owner: TCPStore) -> None:
    first = relay_of(owner)
    (path,) = relays()
    held = os.open(path, os.O_RDWR)  # by a process that has nothing to do with it
    try:
        for pid in pids(path):
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        until(lambda: unlocked(held), "the relay is gone")
        second = relay_of(owner)
        assert second != first
        with client(second[1]) as rank:
            assert rank.get("who") == b"right one"
    finally:
        os.close(held)


@pytest.mark.needs_proc
def test_with_a_token_it_is_for_this_user_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = secret_file(tmp_path / "keys", f"one:{'k' * 40}")
    with tcpstore_server(
        "--token-keys", str(keys), "--require-auth=all", "--persist", str(tmp_path / "journal")
    ) as one:
        command = ["token", "create", "--token-keys", str(keys)]
        token = tcpstore(*command).stdout.decode().strip()
        monkeypatch.setenv("TCPSTORE_TOKEN", token)
        with TCPStore("with a token", 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{one.port}") as store:
            host, port = relay_of(store, "192.0.2.1")
            assert host == "127.0.0.1"
            with client(port) as rank:
                assert rank.num_keys() == 0
            for path in relays():
                for pid in pids(path):
                    assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_may_be_in_its_place(owner: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something locked that is no address; a folder whose name is no text; no standard streams."""
    relay_of(owner)
    (path,) = relays()
    with path.open("r+b") as file:
        file.truncate()
        file.write(b"nonsense and more\n")
    with pytest.raises(DistNetworkError, match="cannot start a relay"):
        relay_of(owner)
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(strange, 0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", strange)
    with pytest.raises(DistNetworkError, match="cannot start a relay"):
        relay_of(owner)


@pytest.mark.usefixtures("sockets")
def test_a_process_without_standard_streams(owner: TCPStore, tmp_path: Path) -> None:
    known = owner._connection().name
    assert known is not None
    source = f"""
import os
for fd in (0, 1):
    os.close(fd)
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.client.server_url import ServerUrl
from tcpstore_async.client.store_name import StoreName
from tcpstore_async.relay.shared import shared_relay
name = StoreName({known.name!r})
name.incarnation = {known.incarnation!r}
host, port = shared_relay(ServerUrl(*{tuple(owner._server or ())!r}), name, "127.0.0.1", Deadline(30.0))
os.write(2, b"%d" % port)
"""
    with (tmp_path / "port").open("wb") as said:  # no pipe, of which the relay would hold an end
        subprocess.run([sys.executable, "-c", source], stderr=said, check=True, timeout=LIMIT)
    with client(int((tmp_path / "port").read_text())) as rank:
        assert rank.get("who") == b"right one"


def test_an_address_that_it_cannot_listen_on(owner: TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DistNetworkError, match=r"the relay exited with status 0; see its standard error"):
        relay_of(owner, "192.0.2.1")
    assert "192.0.2.1" in capfd.readouterr().err
