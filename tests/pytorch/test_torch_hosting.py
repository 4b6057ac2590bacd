"""PyTorch's own TCPStore under install(): whoever makes one as a master gets a client of a server of ours."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

import tcpstore_async
import tcpstore_async.torch as ours
from client.fakes import PROBE, proxy_to
from client.test_joins import Cutter
from pytorch.test_torch_install import say
from support import LIMIT, blob, free_port, tcpstore_server
from tcpstore_async.client import requests
from tcpstore_async.torch import native_server, pytorchs_server, tcpstore_patch
from torch_forker import Program
from versions import since, unsaid

pytestmark = pytest.mark.measured

Cpp: Any = dist.TCPStore
static: Any = importlib.import_module("torch.distributed.elastic.rendezvous.static_tcp_rendezvous")

SECONDS = timedelta(seconds=LIMIT)

follows = pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="open descriptors cannot be listed here")


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    ours.install()
    pytorchs_server._said.clear()
    yield
    ours.uninstall()
    gc.collect()
    native_server.stop_unused()


def joined(port: int) -> int | None:
    """How many ranks have joined our server at this port; None if it is PyTorch's."""
    with tcpstore_async.TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        client = store._connection()
        return int(client.call(requests.count(0))) if client.extended() else None


def in_use(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Sub(Cpp):  # type: ignore[misc]
    """A subclass, as libraries define them."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, is_master=True, wait_for_workers=False)


MAKERS: dict[str, Callable[[int], Any]] = {
    "positions": lambda port: Cpp("127.0.0.1", port, 1, True, SECONDS),
    "names": lambda port: Cpp(host_name="127.0.0.1", port=port, is_master=True, timeout=SECONDS),
    "by another name": lambda port: static.TCPStore("127.0.0.1", port, 1, True, SECONDS, multi_tenant=True),
    "subclass": Sub,
    "legacy": lambda port: Cpp("127.0.0.1", port, 1, True, SECONDS, use_libuv=False),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("fixed", [True, False])
# quirk: install-repr
def test_a_master_is_a_client_of_our_server(make: Callable[[int], Any], fixed: bool) -> None:
    asked = free_port() if fixed else 0
    store = make(asked)
    assert type(store) in (dist.TCPStore, Sub)
    assert isinstance(store, Cpp)
    assert store.port == asked or not fixed
    assert joined(store.port) in (0, 1)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_clients_are_pytorchs_and_all_join_once(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        master = pool.submit(Cpp, "127.0.0.1", port, 3, True, SECONDS)
        clients = [pool.submit(Cpp, "127.0.0.1", port, 3, False, SECONDS) for _ in range(2)]
        stores = [future.result(LIMIT) for future in (master, *clients)]
    assert joined(port) == 3
    stores[1].set("k", "v")
    assert stores[0].get("k") == b"v"


def test_a_master_that_does_not_wait_for_workers_does_not_join() -> None:
    store = Cpp("127.0.0.1", 0, 3, True, SECONDS, wait_for_workers=False)
    assert joined(store.port) == 0


def test_a_master_on_a_given_listening_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = Cpp("127.0.0.1", port, 1, True, SECONDS, master_listen_fd=os.dup(listener.fileno()))
    assert joined(store.port) == 1


@follows
def test_multi_tenant_masters_share_one_server(port: int) -> None:
    first, second = [Cpp("127.0.0.1", port, None, True, SECONDS, multi_tenant=True) for _ in range(2)]
    first.set("k", "v")
    del first
    assert second.get("k") == b"v"
    del second
    assert not in_use(port)


def test_a_multi_tenant_master_shares_a_server_of_pytorchs(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """It was started before install()."""
    ours.uninstall()
    first = Cpp("127.0.0.1", port, None, True, SECONDS, multi_tenant=True)
    ours.install()
    second = Cpp("127.0.0.1", port, None, True, SECONDS, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    assert joined(port) is None
    assert f"using PyTorch's own server on port {port} instead of tcpstore_async's: " in caplog.text


def test_a_port_that_is_taken(port: int) -> None:
    store = Cpp("127.0.0.1", port, 1, True, SECONDS)
    for multi_tenant in (False, True):
        listener = socket.create_server(("", 0))
        other = port if not multi_tenant else listener.getsockname()[1]
        with listener, pytest.raises(dist.DistNetworkError, match=r"^The server socket has failed to listen on any"):
            Cpp("127.0.0.1", other, 1, True, SECONDS, multi_tenant=multi_tenant)
    assert store.port == port


def test_missing_workers_are_a_timeout(port: int) -> None:
    with pytest.raises(
        dist.DistStoreError, match=r"^Timed out after 1 seconds waiting for clients. 1/2 clients joined"
    ):
        Cpp("127.0.0.1", port, 2, True, timedelta(seconds=1))
    assert not in_use(port)


@pytest.mark.parametrize(
    "given", [("127.0.0.1",), ("127.0.0.1", 0, 1, True, "soon"), (1, 0, 1, True), ("h", 0, 1, True, 1, 2, 3, 4, 5, 6)]
)
def test_wrong_arguments_raise_pytorchs_error(given: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        Cpp(*given)


def test_a_timeout_of_0_raises_at_once(port: int) -> None:
    """Our stores would wait for ever, PyTorch's raises at once."""
    with pytest.raises(dist.DistNetworkError):
        Cpp("127.0.0.1", port, 2, True, timedelta(0))


def test_rank_0_is_a_client_where_the_agent_hosts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank 0 that hosts at its address is a client of it, as with PyTorch's."""
    agent = Cpp("127.0.0.1", port, 1, True, SECONDS)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(port))
    rank = Cpp("127.0.0.1", port, 1, True, SECONDS)
    agent.set("k", "v")
    assert rank.get("k") == b"v"
    assert joined(port) == 2


@pytest.mark.parametrize("client", ["native", "python"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_server_of_an_agent_without_install_is_one_warning(
    client: str, installed: bool, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged by rank 0: a program that calls install() itself comes too late for the agent that launched it."""
    if not installed:
        ours.uninstall()
    agent = Cpp("127.0.0.1", port, 1, True, SECONDS)
    ours.install(client)
    for name, text in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        store, *_ = next(dist.rendezvous("env://"))
        store.set(rank, "v")
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    expected = [
        f"127.0.0.1:{port} is PyTorch's own server instead of tcpstore_async's: "
        "torchrun's agent hosts it and was started without TCPSTORE_INSTALL=1; set it for the launcher"
    ]
    assert lines == ([] if installed else expected)
    assert agent.get("1") == b"v"


@pytest.fixture
def under_an_agent(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process rank 1 of 2 under an agent that hosts the server at a port."""

    def be(port: int) -> None:
        for name, text in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": "1",
        }.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    return be


def test_a_worker_joins_its_agents_server_in_two_round_trips(under_an_agent: Callable[[int], None]) -> None:
    """Beside those of its client, which connects during the first. It says who it is, is counted, and says farewell."""
    with tcpstore_server() as server, proxy_to(server.port) as proxy:
        under_an_agent(proxy.port)
        store, *_ = next(dist.rendezvous("env://"))
        assert joined(server.port) == 1
        (number,) = [number for number, sent in enumerate(proxy.sent) if PROBE in sent]
        assert proxy.connections == 2
        assert proxy.senders[number] == ["c", "s"] * 2
        sent = bytes(proxy.sent[number])
        assert blob(b"rank") + blob(b"1") in sent
        assert sent.endswith(bytes([requests.DEPART[0].opcode]))
        assert isinstance(store, Cpp)
        store.set("k", "v")
        assert store.get("k") == b"v"


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_that_loses_its_connection_is_counted_once(
    before: bool, under_an_agent: Callable[[int], None]
) -> None:
    with tcpstore_server() as server:
        cutter = Cutter(server.port, "q")
        cutter.times, cutter.before = 2, before
        try:
            under_an_agent(cutter.port)
            store, *_ = next(dist.rendezvous("env://"))
            assert cutter.times <= 0
            assert joined(server.port) == 1
            store.set("k", "v")
            assert store.get("k") == b"v"
        finally:
            cutter.stop()


def test_a_worker_is_counted_once_by_an_agent_without_install(port: int, under_an_agent: Callable[[int], None]) -> None:
    ours.uninstall()
    agent = Cpp("127.0.0.1", port, 1, True, SECONDS)
    ours.install()
    under_an_agent(port)
    store, *_ = next(dist.rendezvous("env://"))
    with tcpstore_async.TCPStore("127.0.0.1", port, timeout=LIMIT) as look:
        assert look._connection().call(requests.count(0)) == 2  # with the agent
    store.set("k", "v")
    assert agent.get("k") == b"v"


def test_the_constructor_takes_pytorchs_parameters() -> None:
    """What is passed by position means the same."""
    said = str(Cpp.__init__.__doc__).split("(", 1)[1].split(") ->")[0]
    named = [part.split(":")[0].strip() for part in said.split(",") if ":" in part]
    assert [name for name in named if name.isidentifier()][1:] == list(tcpstore_patch._PARAMETERS.parameters)


# How long the server lives


@follows
def test_the_server_stops_with_the_store(port: int) -> None:
    for _ in range(2):
        store = Cpp("127.0.0.1", port, 1, True, SECONDS)
        assert in_use(port)
        del store
        assert not in_use(port)


@follows
# quirk: install-server-end
def test_the_server_runs_while_cpp_holds_the_store(port: int) -> None:
    prefix = dist.PrefixStore("p", Cpp("127.0.0.1", port, 1, True, SECONDS))
    gc.collect()
    prefix.set("k", "v")
    assert joined(port) == 1
    again: Any = prefix.underlying_store
    del prefix
    assert again.get("p/k") == b"v"
    del again
    other = Cpp("127.0.0.1", 0, 1, True, SECONDS)
    assert not in_use(port)
    assert in_use(other.port)


@follows
def test_the_server_outlives_uninstall(port: int) -> None:
    store = Cpp("127.0.0.1", port, 1, True, SECONDS)
    ours.uninstall()
    store.set("k", "v")
    assert joined(port) == 1
    del store
    assert not in_use(port)


def run(code: str, *arguments: object, **env: str) -> tuple[str, str]:
    """Run a program, as if it imported PyTorch itself; return its stdout and stderr."""
    autoload = "from tcpstore_async.autoload import autoload; autoload()\n"
    with Program(autoload + code, *arguments, env=env) as program:
        return unsaid(program.output()).strip(), program.errors()


@since(2, 5, "autoload")
def test_a_group_over_a_store_that_only_cpp_holds(port: int) -> None:
    """A child that is forked meanwhile does not stop the server; at the exit it stops."""
    code = f"""
import os, socket, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
child = os.fork()
if not child:
    del store
    os._exit(0)
os.waitpid(child, 0)
del store
dist.barrier()
print(type(dist.distributed_c10d._get_default_store().underlying_store) is dist.TCPStore)
import tcpstore_async
print(tcpstore_async.TCPStore("127.0.0.1", {port})._connection().extended())"""
    assert say(code, TCPSTORE_INSTALL="1", PYTHONWARNINGS="ignore")[0] == "True\nTrue"
    assert not in_use(port)


ENDS = """
import builtins, torch.distributed as dist, tcpstore_async.torch as ours
theirs = dist.TCPStore("127.0.0.1", 0, 1, True)
ours.install({client!r}, classes={classes})

class Cycle:
    def __init__(self, *held):
        self.held = held, self

def make():
    return dist.TCPStore("127.0.0.1", 0, 1, True)

server = make()
builtins.last = make()
builtins.over = dist.PrefixStore("p", builtins.last)
Cycle(make(), dist.PrefixStore("p", server))
Cycle(dist.PrefixStore("only", dist.PrefixStore("above", make())))
Cycle(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), dist.HashStore())
dist.init_process_group("gloo", store=make(), rank=0, world_size=1)
dist.barrier()
over.set("k", "v")
print(over.get("k").decode())"""
"""Leaves stores open at the exit of the interpreter, in every way there is to hold one."""


@pytest.mark.parametrize(("client", "classes"), [("native", False), ("python", True)])
def test_open_stores_do_not_delay_or_crash_the_exit(client: str, classes: bool) -> None:
    """Neither C++ destructors nor stopping servers keep the interpreter from exiting, or crash it."""
    assert say(ENDS.format(client=client, classes=classes))[0] == "v"


# Types


IS_INSTANCE = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
store = dist.distributed_c10d._get_default_store()
assert isinstance(store, dist.PrefixStore) and not isinstance(store, dist.TCPStore)
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
assert isinstance(store, dist.TCPStore) and not isinstance(store, (dist.FileStore, dist.HashStore)), type(store)
other = dist.TCPStore(store.host, store.port, timeout=store.timeout, is_master=False, wait_for_workers=False)
store.set("k", "v")
print(other.get("k").decode())
dist.destroy_process_group()"""
"""What torch_checkpointing does with the store of the default group."""


@since(2, 5, "autoload")
@pytest.mark.parametrize("mode", ["0", "1", "python", "classes", "python,classes"])
def test_the_store_of_a_group_is_an_instance_of_pytorchs_classes(mode: str, port: int) -> None:
    stdout, stderr = run(IS_INSTANCE.format(port=port), TCPSTORE_INSTALL=mode)
    assert stdout == "v", stderr


@pytest.mark.parametrize("name", ["TCPStore", "FileStore", "HashStore", "PrefixStore"])
# quirk: install-types
def test_isinstance_works_in_both_directions(name: str, tmp_path: Path) -> None:
    server = Cpp("127.0.0.1", 0, None, True, SECONDS)
    make: dict[str, Callable[[Any], Any]] = {
        "TCPStore": lambda kind: kind("127.0.0.1", server.port, timeout=SECONDS),
        "FileStore": lambda kind: kind(str(tmp_path / kind.__module__), 1),
        "HashStore": lambda kind: kind(),
        "PrefixStore": lambda kind: kind("p", server),
    }
    theirs, mine = getattr(dist, name), getattr(ours, name)
    others = [getattr(dist, other) for other in make if other != name] + [getattr(ours, o) for o in make if o != name]

    Subclass: Any = type("Subclass", (mine,), {})
    for store in make[name](theirs), make[name](mine):
        assert isinstance(store, (theirs,))
        assert isinstance(store, (mine,))
        assert isinstance(store, dist.Store)
        assert not isinstance(store, (Subclass, *others))
    sub = make[name](Subclass)
    assert isinstance(sub, Subclass)
    assert isinstance(sub, (mine,))
    assert sub.__class__ is Subclass
    assert not isinstance(sub, tuple(others))
    assert issubclass(theirs, mine)
    assert issubclass(Subclass, mine)
    assert not issubclass(theirs, Subclass)
    assert not issubclass(dist.Store, mine)
    assert not isinstance(3, (mine, Subclass))


# Which sockets are a client's


class Handle:
    """In the place of a server."""

    port = pid = 0
    released = False

    def release(self) -> None:
        self.released = True


@follows
def test_a_server_runs_while_the_socket_of_its_client_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        number = listener.getsockname()[1]
        store, handle = dist.HashStore(), Handle()
        client = socket.create_connection(("127.0.0.1", number))
        elsewhere = socket.create_connection(other.getsockname())
        ((fd, *_),) = sockets = native_server.sockets_to(number)
        assert fd == client.fileno()
        server: Any = native_server.NativeServer(store, cast(Any, handle), sockets)
        del store
        assert not handle.released
        client.close()
        native_server.stop_unused()
        assert handle.released
        server.release()
        elsewhere.close()


def test_a_server_runs_until_it_is_released_if_the_socket_is_unknown() -> None:
    store, handle = dist.HashStore(), Handle()
    server = native_server.NativeServer(store, cast(Any, handle), frozenset())
    del store
    native_server.stop_unused()
    assert not handle.released
    server.release()
    assert handle.released


WORLD_WITHIN_A_LIMIT = """
import os, re, resource, signal, sys
from datetime import timedelta
import torch.distributed as dist

way, port, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ranks = 3

def join(rank):
    if way == "rendezvous":
        url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={ranks}"
        return next(dist.rendezvous(url, timeout=timedelta(seconds=90)))[0]
    return dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=90))

resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
others = []
for rank in range(1, ranks):
    others.append(os.fork())
    if not others[-1]:
        join(rank).barrier("over", ranks)
        os._exit(0)
try:
    store = join(0)
    store.barrier("over", ranks)
    print("fits", [os.waitpid(pid, 0)[1] for pid in others])
except dist.DistStoreError as error:
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    print(re.sub("port [0-9]+", "port", str(error)))
"""


@pytest.mark.parametrize("way", ["rendezvous", "TCPStore"])
# quirk: open-files
def test_a_world_of_pytorchs_clients_needs_more_connections_than_ranks(way: str) -> None:
    """While they join, some have two: with the limit that is named all join, with less it is an error at once."""

    def form(limit: int) -> str:
        return run(WORLD_WITHIN_A_LIMIT, way, free_port(), limit, TCPSTORE_INSTALL="1")[0]

    said = form(82)
    needed = re.search(r"a limit of at least (\d+)$", said)
    assert needed, said
    assert f"cannot accept 3 ranks, which need {5 if way == 'rendezvous' else 4} connections at once" in said
    assert form(int(needed[1])) == "fits [0, 0]"
    assert "cannot accept 3 ranks, which" in form(int(needed[1]) - 1)


# Where our server cannot be started

UNSTARTED = """
import logging, os, sys, warnings, torch.distributed as dist
from datetime import timedelta
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
way, reason, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if reason == "thread":
    os.environ["TCPSTORE_SERVER"] = "thread"
warnings.simplefilter("default", RuntimeWarning)
if reason == "no process":
    sys.executable = "/nonexistent/python"
minute = timedelta(seconds=60)
def make(port, timeout=minute, ranks=1):
    if way == "TCPStore":
        return dist.TCPStore("127.0.0.1", port, ranks, True, timeout, multi_tenant=True)
    if way == "a subclass":
        return type("Mine", (dist.TCPStore,), {})("127.0.0.1", port, ranks, True, timeout)
    if way == "rendezvous":
        return next(dist.rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size={ranks}", timeout=timeout))[0]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout, ranks, 0)
    return dist.distributed_c10d._get_default_store()
def meet(*given, **named):
    try:
        store = make(*given, **named)
        store.set("k", "v")
        return store
    except Exception as error:
        print(*[one.__name__ for one in type(error).__mro__ if one.__module__.startswith("torch._C")], str(error)[:40])
"""


@pytest.mark.parametrize("mode", ["1", "python", "classes"])
@pytest.mark.parametrize("way", ["TCPStore", "a subclass", "rendezvous", "init_process_group"])
@pytest.mark.parametrize("reason", ["thread", "no process"])
# quirk: install-fallback
def test_pytorchs_server_takes_the_place_of_ours(reason: str, way: str, mode: str, port: int) -> None:
    """With one warning. Our client may use a thread, which then is ours; PyTorch's may not."""
    code = f"""{UNSTARTED}
store = meet(port)
with __import__("tcpstore_async").TCPStore("127.0.0.1", port, timeout=60) as look:
    print("ours" if look._connection().extended() else "PyTorch's")"""
    out, errors = run(code, way, reason, port, TCPSTORE_INSTALL=mode)
    *said, server = out.splitlines()
    if mode == "python" and way in ("rendezvous", "init_process_group"):
        assert (server, said) == ("ours", [])
        assert errors.count("falling back to a thread") == (reason == "no process")
        return
    assert server == "PyTorch's", errors
    (line,) = said
    assert line.startswith(f"tcpstore_async.torch: using PyTorch's own server on port {port} instead of ")
    assert ("unset TCPSTORE_SERVER" if reason == "thread" else "/nonexistent/python") in line
    assert not errors


@pytest.mark.parametrize("reason", ["thread", "no process"])
@pytest.mark.parametrize("mode", ["1", "classes"])
@pytest.mark.parametrize("way", ["TCPStore", "rendezvous"])
def test_stores_share_pytorchs_server_where_it_takes_the_place_of_ours(
    way: str, mode: str, reason: str, port: int
) -> None:
    code = f"""{UNSTARTED}
first, second = meet(port), meet(port)
first.set("shared", "yes")
print(second.get("shared"))"""
    out, _ = run(code, way, reason, port, TCPSTORE_INSTALL=mode)
    assert out.splitlines()[-1] == "b'yes'", out


@pytest.mark.parametrize("mode", ["1", "classes"])
@pytest.mark.parametrize("way", ["TCPStore", "rendezvous", "init_process_group"])
@pytest.mark.parametrize("reason", ["thread", "no process"])
def test_mistakes_are_errors_where_our_server_cannot_be_started(way: str, mode: str, reason: str) -> None:
    """The same as on PyTorch: the port is taken, or not all ranks come."""
    code = f"""{UNSTARTED}
import socket
with socket.create_server(("", 0)) as taken:
    meet(taken.getsockname()[1])
meet(port, timeout=timedelta(seconds=1), ranks=2)
"""
    told, _ = run(code, way, reason, free_port(), TCPSTORE_INSTALL=mode)
    stock, _ = run(code, way, "", free_port(), TCPSTORE_INSTALL="0")
    expected = stock.splitlines()
    assert len(expected) == 2
    assert told.splitlines() == expected


@pytest.mark.parametrize("secured", ["TCPSTORE_TOKEN", "TCPSTORE_TLS"])
@pytest.mark.parametrize("mode", ["1", "classes"])
def test_pytorchs_server_does_not_take_the_place_of_one_that_is_secured(mode: str, secured: str, port: int) -> None:
    code = f"{UNSTARTED}\nassert meet(port) is None"
    env = {secured: "1" if secured == "TCPSTORE_TLS" else "a" * 32}
    out, _ = run(code, "TCPStore", "thread", port, **env, TCPSTORE_INSTALL=mode)
    assert "PyTorch's own server" not in out
    assert len(out.splitlines()) == 1


def test_a_socket_is_given_to_pytorchs_server_if_ours_cannot_be_started() -> None:
    code = f"""{UNSTARTED}
import socket
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = dist.TCPStore("127.0.0.1", port, 1, True, minute, master_listen_fd=listener.detach())
store.set("k", "v")
print(store.port == port)"""
    out, _ = run(code, "", "no process", 0, TCPSTORE_INSTALL="1")
    assert out.splitlines()[1:] == ["True"], out


HANDLER = """
import signal, sys
from datetime import timedelta
import torch.distributed as dist

def interrupt(*_):
    raise RuntimeError("the program's own")

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1.5)
try:
    if sys.argv[1] == "TCPStore":
        dist.TCPStore("127.0.0.1", {port}, 2, True, timedelta(seconds=30))
    else:
        next(dist.rendezvous("tcp://127.0.0.1:{port}?rank=0&world_size=2", timeout=timedelta(seconds=30)))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.unmeasured
@pytest.mark.parametrize("mode", ["1", "python", "classes"])
@pytest.mark.parametrize("way", ["TCPStore", "rendezvous"])
def test_what_a_signal_handler_raises_is_not_taken_for_a_server_that_cannot_be_started(
    way: str, mode: str, port: int
) -> None:
    """It was swallowed, and the store that was returned had no server."""
    stdout, stderr = run(HANDLER.format(port=port), way, TCPSTORE_INSTALL=mode)
    assert stdout == "the program's own"
    assert "PyTorch's own server" not in stderr


@pytest.mark.parametrize("error", ["RuntimeError", "TimeoutError", "OSError"])
def test_what_a_signal_handler_raises_while_the_server_starts_is_raised(error: str, port: int) -> None:
    """It was taken for a server that cannot be started: RuntimeErrors and OSErrors were."""
    program = """
import signal
from tcpstore_async.server.process import parent
spawn = parent._spawn

def spawn_and_wait_for_the_signal(*arguments):
    started = spawn(*arguments)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    return started

parent._spawn = spawn_and_wait_for_the_signal
""" + HANDLER.replace("RuntimeError", error).replace("1.5", "0")
    stdout, stderr = run(program.format(port=port), "TCPStore", TCPSTORE_INSTALL="1")
    assert stdout == "the program's own"
    assert "falling back" not in stderr


@pytest.mark.parametrize("mode", ["1", "classes"])
def test_a_timeout_that_is_enough_for_pytorchs_server_is_enough(mode: str, port: int) -> None:
    program = f"""
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, 1, True, timedelta(milliseconds=50))
store.set_timeout(timedelta(seconds=30))
store.set("a", "b")
print(store.get("a"))
"""
    assert run(program, TCPSTORE_INSTALL=mode)[0] == "b'b'"
