"""install() and uninstall(), by hand and by the environment, and what they cost who does not want them."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import tcpstore_async.torch as ours
from support import free_port
from tcpstore_async import TCPStore as PlainTCPStore
from torch_forker import Program
from versions import QUIET, VERSION, needs, since, unsaid

pytestmark = pytest.mark.measured

handlers: Any = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers

CPP_STORE: Any = dist.TCPStore

NAMES = ("TCPStore", "FileStore", "HashStore", "PrefixStore", "Store", "destroy_process_group", "init_process_group")


def present() -> list[Any]:
    """Whatever `install` may replace."""
    rpc: Any = dist.rpc
    return [
        *(getattr(dist, name) for name in NAMES),
        vars(CPP_STORE)["__init__"],
        vars(distributed_c10d.ProcessGroupGloo)["__init__"],
        *(handlers[scheme] for scheme in ("tcp", "env", "file")),
        distributed_c10d.destroy_process_group,
        distributed_c10d._unregister_all_process_groups,
        distributed_c10d.rendezvous,
        getattr(distributed_c10d, "_finalize_shrunk_group", None),
        rpc.init_rpc,
        rpc._init_rpc_backend,
        rpc.shutdown,
        dist.rendezvous,
    ]


def test_uninstall_restores_the_same_objects() -> None:
    before = present()
    try:
        ours.install()
        assert dist.TCPStore is before[0]
        assert present() != before
        ours.install("python", classes=True)
        assert [getattr(dist, name) for name in NAMES[:4]] == [getattr(ours, name) for name in NAMES[:4]]
        ours.install(classes=True)
        ours.install()
        assert dist.TCPStore is before[0]
    finally:
        ours.uninstall()
    assert all(one is other for one, other in zip(present(), before, strict=True))
    ours.uninstall()
    assert all(one is other for one, other in zip(present(), before, strict=True))


def test_an_unknown_client_is_a_value_error() -> None:
    before = present()
    with pytest.raises(ValueError, match="client must be native or python, not 'rust'"):
        ours.install("rust")
    assert present() == before


def test_rendezvous_checks_its_arguments_when_called() -> None:
    """As PyTorch's, not when its result is asked for."""
    with pytest.raises(RuntimeError, match=r"^No rendezvous handler for nowhere://"):
        ours.rendezvous("nowhere://")
    for given in ((1, -1), (-1, 2), (1, 2)):
        with pytest.raises(AssertionError, match="has node-specific arguments"):
            ours.rendezvous("tcp://127.0.0.1:1?rank=1&world_size=2", *given)
    with pytest.raises(RuntimeError, match="`rank` must be an integer"):
        ours.rendezvous("env://", 1.5)  # type: ignore[arg-type]


class Strict(dist.Store):
    """A store of a program's own, that takes values as PyTorch's C++ side hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: Any, value: Any) -> None:
        assert (type(key), type(value)) == (str, bytes)
        self.values[key] = value

    def append(self, key: Any, value: Any) -> None:
        self.set(key, self.values.get(key, b"") + value)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> Any:
        assert type(expected) is bytes
        self.set(key, desired)
        return desired

    def multi_set(self, keys: Any, values: Any) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: Any, value: Any) -> None:
        self.set(key, value)


def test_a_prefix_passes_bytes_to_a_store_made_in_python() -> None:
    below = Strict()
    prefix: Any = ours.PrefixStore("p", below)
    prefix.set("a", "1")
    prefix.append("a", "2")
    prefix.compare_set("b", "", "3")
    prefix.multi_set(["c", "d"], ["4", b"5"])
    prefix.queue_push("e", "6")
    assert below.values == {"p/a": b"12", "p/b": b"3", "p/c": b"4", "p/d": b"5", "p/e": b"6"}


def test_a_prefix_over_pytorchs_store_under_classes() -> None:
    """RPC and torchrun's own backend make one."""
    below = dist.HashStore()
    ours.install(classes=True)
    try:
        made: Any = dist.PrefixStore
        prefix = made("p", below)
        assert isinstance(prefix, made)
        prefix.set("k", "v")
        assert below.get("p/k") == b"v"
        prefix.close()
    finally:
        ours.uninstall()


# By the environment

autoload = since(2, 5, "autoload")

SAY = """
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as handlers
store = next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))[0]
print(*(one.__module__.partition(".")[0] for one in (type(store), dist.TCPStore, handlers["tcp"])))
"""
"""Prints whose client, whose class and whose rendezvous a program gets."""


def say(code: str, *flags: str, **env: str) -> tuple[str, str]:
    """What a program prints, and on stderr."""
    done = subprocess.run(
        [sys.executable, *(flags or QUIET), "-c", code],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return unsaid(done.stdout).strip(), done.stderr.strip()


def run(code: str, *arguments: str, **env: str) -> tuple[str, str]:
    """The same for a program that may find PyTorch imported."""
    with Program(code, *arguments, env=env) as program:
        printed = program.output()
        assert program.wait() == 0, program.errors()
        return unsaid(printed).strip(), program.errors().strip()


def autoloaded(code: str, **env: str) -> tuple[str, str]:
    """The same after what PyTorch calls when it is imported."""
    return run("from tcpstore_async.autoload import autoload; autoload()\n" + code, **env)


@autoload
@pytest.mark.parametrize(
    ("value", "expected", "start"),
    [
        ("1", "torch torch tcpstore_async", say),
        ("python", "tcpstore_async torch tcpstore_async", autoloaded),
        ("python,Classes", "tcpstore_async tcpstore_async tcpstore_async", say),
        ("0", "torch torch torch", autoloaded),
    ],
)
def test_the_environment_installs(value: str, expected: str, start: Callable[..., tuple[str, str]]) -> None:
    assert start(SAY, TCPSTORE_INSTALL=value) == (expected, "")


@autoload
def test_importing_our_package_first_installs_as_well() -> None:
    assert say("import tcpstore_async.torch" + SAY, TCPSTORE_INSTALL="1") == ("torch torch tcpstore_async", "")


@autoload
def test_an_unknown_word_is_a_warning() -> None:
    text = "ignoring TCPSTORE_INSTALL, so PyTorch will use its own stores: expected 1, python or classes"
    printed, warned = say(SAY, "-W", "ignore:Failed to initialize NumPy:UserWarning", TCPSTORE_INSTALL="yes")
    assert printed == "torch torch torch"
    assert text in warned
    printed, warned = say(SAY, TCPSTORE_INSTALL="yes")
    assert (printed, warned) == ("torch torch torch", f"{text}, got 'yes'"), "where warnings are errors"


@autoload
def test_another_word_for_1_is_a_warning() -> None:
    expected = "TCPSTORE_INSTALL=native means 1, and a later version will not know it: use 1"
    assert autoloaded(SAY, TCPSTORE_INSTALL="native") == ("torch torch tcpstore_async", expected)


@autoload
@pytest.mark.parametrize("value", ["native,python", "0,python", "0,classes"])
def test_contradictory_words_install_nothing(value: str) -> None:
    printed, warned = autoloaded(SAY, TCPSTORE_INSTALL=value)
    assert printed == "torch torch torch"
    assert warned.endswith(f"conflicting values: 0 excludes all others, and native excludes python: {value!r}")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("streams", [pytest.param("2>/dev/full", marks=pytest.mark.exhaustive), "2>&-"])
def test_an_unknown_word_without_a_usable_stderr(streams: str) -> None:
    python = shlex.join([sys.executable, *QUIET, "-c", "import torch; print(1)"])
    env = {**os.environ, "TCPSTORE_INSTALL": "yes"}
    line = f"exec {python} {streams}"
    done = subprocess.run(["sh", "-c", line], cwd=tempfile.gettempdir(), env=env, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"1\n")


@autoload
def test_a_program_whose_showwarning_raises() -> None:
    code = """
import warnings
def refuse(*given, **named): raise RuntimeError("no")
warnings.showwarning = refuse
import torch; print(torch.__name__)"""
    printed, warned = say(code, "-W", "ignore:Failed to initialize NumPy:UserWarning", TCPSTORE_INSTALL="yes")
    assert printed == "torch"
    assert warned.startswith("ignoring TCPSTORE_INSTALL")


@autoload
def test_without_the_variable_nothing_is_imported() -> None:
    """PyTorch calls us, and of this package nothing but that function is imported."""
    code = "import sys, torch; print(*sorted(name for name in sys.modules if name.startswith('tcpstore')))"
    assert say(code) == ("tcpstore_async tcpstore_async.autoload tcpstore_async.base tcpstore_async.base.version", "")


@pytest.mark.parametrize("client", ["native", "python"])
def test_destroying_a_group_after_uninstall_closes_its_store(client: str, port: int) -> None:
    """And then everything is PyTorch's own: its server gets the same port."""
    code = f"""
import torch.distributed as dist, tcpstore_async.torch as ours
before = dist.destroy_process_group
ours.install({client!r})
url = "tcp://127.0.0.1:{port}?rank=0&world_size=1"
dist.init_process_group("gloo", init_method=url)
ours.uninstall()
dist.destroy_process_group()
print(dist.destroy_process_group is before)
dist.init_process_group("gloo", init_method=url)
dist.destroy_process_group()"""
    assert run(code) == ("True", "")


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_0_or_less_does_not_hang(seconds: int, port: int) -> None:
    """The other rank is missing: PyTorch says so at once, and so does every client under install()."""
    code = f"""
import sys, torch.distributed as dist
from datetime import timedelta
if sys.argv[1]:
    import tcpstore_async.torch
    tcpstore_async.torch.install(sys.argv[1])
url = "tcp://127.0.0.1:{port}?rank=1&world_size=2"
try: dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds={seconds}))
except dist.DistNetworkError as e: print(str(e).splitlines()[0])"""
    for client in ("", "native", "python"):
        printed, _ = run(code, client)
        limit = f"{seconds}s" if VERSION < (2, 5) and not client else f"{1000 * seconds}ms"
        text = f"The client socket has timed out after {limit} while trying to connect to (127.0.0.1, {port})."
        assert printed == text, client


def test_without_pytorch_the_import_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\ntry: import tcpstore_async.torch\nexcept ImportError as e: print(e)"
    )
    text = "tcpstore_async.torch needs PyTorch 2.4 or later, which is not installed: pip install torch"
    assert say(code) == (text, "")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("raise ImportError('libcudart.so: no')", "; the installed one cannot be imported: libcudart.so: no"),
        ("import no_such", "; the installed one cannot be imported: No module named 'no_such'"),
        ("__version__ = '2.3.1+cpu'", ", found 2.3.1+cpu: pip install --upgrade torch"),
    ],
)
def test_an_unsuitable_pytorch_is_an_import_error(content: str, text: str, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(content)
    (package / "distributed.py").write_text("")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
try: import tcpstore_async.torch
except ImportError as e: print(e)"""
    assert say(code) == (f"tcpstore_async.torch needs PyTorch 2.4 or later{text}", "")


@pytest.mark.parametrize("client", ["native", "python"])
def test_destroy_process_group_imported_before_install(client: str, port: int) -> None:
    """Its server goes all the same: another process gets the port."""
    code = f"""
from torch.distributed import destroy_process_group, init_process_group
import socket, tcpstore_async.torch as ours
ours.install({client!r})
init_process_group("gloo", init_method="tcp://127.0.0.1:{port}?rank=0&world_size=1")
destroy_process_group()
socket.create_server(("127.0.0.1", {port})).close()
print("free")"""
    assert run(code) == ("free", "")


@pytest.mark.parametrize("client", ["native", "python"])
def test_the_store_of_a_group_that_could_not_be_made(client: str, port: int) -> None:
    """What was opened for it goes with `uninstall` or the next rendezvous, wherever that is."""
    code = f"""
import socket, torch.distributed as dist, tcpstore_async.torch as ours
from torch.distributed import distributed_c10d
before = distributed_c10d._unregister_all_process_groups
def fail():
    try: dist.init_process_group("cpu:nccl", init_method="tcp://127.0.0.1:{port}?rank=0&world_size=1")
    except Exception as error: print(type(error).__name__)
ours.install({client!r})
fail()
with socket.socket() as peer: print(peer.connect_ex(("127.0.0.1", {port})))
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
socket.create_server(("127.0.0.1", {port})).close()
dist.destroy_process_group()
fail()
ours.uninstall()
socket.create_server(("127.0.0.1", {port})).close()
print(distributed_c10d._unregister_all_process_groups is before)"""
    out, _ = run(code)
    assert out.splitlines()[1::2] == ["0", "True"]


@pytest.mark.parametrize(
    "meanwhile",
    [
        'next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1")); ours.uninstall()',
        "distributed_c10d._unregister_all_process_groups()",
    ],
    ids=["a rendezvous elsewhere", "the end of another group"],
)
def test_the_store_of_a_group_that_another_thread_makes_stays_open(meanwhile: str, port: int) -> None:
    code = f"""
import threading, torch.distributed as dist, tcpstore_async, tcpstore_async.torch as ours
from torch.distributed import distributed_c10d
from datetime import timedelta
ours.install()
def join():
    try: dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=limit)
    except Exception as error: print("no other rank came")
limit = timedelta(seconds=3)
making = threading.Thread(target=join)
making.start()
other = tcpstore_async.TCPStore("127.0.0.1", {port}, 2, timeout=60)
other.wait(["default_pg/0//cpu//0/0"])
{meanwhile}
print(other.num_keys() > 0)
making.join()
other.close()"""
    assert run(code)[0] == "True\nno other rank came"  # Gloo logs that on standard error


@needs("clone")
@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this PyTorch cannot shrink groups")
@pytest.mark.parametrize("client", ["native", "python"])
def test_shrinking_the_default_group_keeps_its_store(client: str, port: int) -> None:
    """PyTorch destroys it on the way and goes on with the same store. This is the part after what only NCCL can."""
    code = f"""
import socket, torch, torch.distributed as dist, tcpstore_async.torch as ours
from torch.distributed import distributed_c10d
ours.install({client!r})
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}?rank=0&world_size=1")
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
group = dict(process_group=dist.group.WORLD, is_default_group=True)
distributed_c10d._finalize_shrunk_group(group, set(), backend)
del backend, group
store = distributed_c10d._get_default_store()
store.set("k", "v")
print(store.clone().get("k"))
dist.destroy_process_group()
socket.create_server(("127.0.0.1", {port})).close()"""
    assert run(code)[0] == "b'v'"


def test_the_server_of_a_programs_own_rendezvous() -> None:
    """It is stopped at the next rendezvous once nobody holds the store, and not as long as PyTorch does."""
    code = f"""
import gc, socket, torch.distributed as dist, tcpstore_async.torch as ours
ours.install()
def meet(port): return next(dist.rendezvous(f"tcp://127.0.0.1:{{port}}?rank=0&world_size=1"))[0]
def taken(port):
    with socket.socket() as peer: return peer.connect_ex(("127.0.0.1", port)) == 0
store = meet({free_port()})
port = store.port
held = dist.PrefixStore("a", store)
del store
held.set("k", "v")
again = dist.PrefixStore("a", meet(port))
print(again.get("k"), held.get("k"))
del again, held
gc.collect()
meet(0)
print(taken(port))
last = meet(port)
print(last.num_keys())
del last
gc.collect()
ours.uninstall()
print(taken(port))"""
    assert run(code) == ("b'v' b'v'\nFalse\n1\nFalse", "")


def test_the_python_store_of_a_programs_own_rendezvous() -> None:
    """It stays open, whatever ends, until the program closes it."""
    code = """
import gc, socket, torch.distributed as dist, tcpstore_async.torch as ours
ours.install("python")
store = next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))[0]
port = store.port
dist.init_process_group("gloo", store=dist.PrefixStore("a", store), rank=0, world_size=1)
held = dist.PrefixStore("b", store)
del store
dist.destroy_process_group()
gc.collect()
ours.uninstall()
held.set("k", "v")
print(held.get("k"))
held.underlying_store.close()
socket.create_server(("127.0.0.1", port)).close()"""
    assert run(code) == ("b'v'", "")


def test_rendezvous_in_threads_after_failed_ones() -> None:
    code = """
import threading, torch.distributed as dist, tcpstore_async.torch as ours
ours.install()
def fail():
    try: dist.init_process_group("cpu:nccl", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
    except Exception: pass
def meet():
    try: next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))
    except Exception as error: print(repr(error))
for _ in range(4):
    fail()
    fail()
    threads = [threading.Thread(target=meet) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
ours.uninstall()"""
    assert run(code)[0] == ""


class _Group:
    """Instead of a gloo group of so many ranks, which could not be made here."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *given: Any, **named: Any) -> None:
        self.made.append((*given, *named.values()))


@pytest.mark.parametrize(
    ("given", "named", "switches", "advice"),
    [
        (("store", 0, 65), {}, {}, True),
        (("store", 0), {"size": 65, "timeout": 1}, {"GLOO_ENABLE_STORE_V2_API": "0"}, True),
        (("store", 0, 65), {}, {"GLOO_ENABLE_STORE_V2_API": "true"}, True),  # which gloo does not take for yes
        (("store", 0, 65), {}, {"GLOO_ENABLE_STORE_V2_API": "True"}, False),
        ((), {"store": "store", "rank": 0, "size": 65}, {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}, True),
        (("store", 0, 64), {}, {}, False),
        (("store", 1, 65), {}, {}, False),
        (("store", 0, 65), {}, {"GLOO_ENABLE_STORE_V2_API": "1"}, False),
        (("store", 0, 65), {}, {"TORCH_GLOO_LAZY_INIT": "True"}, False),
        ((), {}, {}, False),
        (("store", 0, "many"), {}, {}, False),
        ((dist.HashStore(), 0, 65), {}, {}, False),
        ((dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore())), 0, 65), {}, {}, False),
        ((ours.PrefixStore("a", ours.HashStore()), 0, 65), {}, {}, False),
    ],
)
def test_a_large_gloo_group_gives_advice(
    given: tuple[Any, ...],
    named: dict[str, Any],
    switches: dict[str, str],
    advice: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", _Group)
    _Group.made.clear()
    ours.install()
    try:
        distributed_c10d.ProcessGroupGloo(*given, **named)
    finally:
        ours.uninstall()
    assert _Group.made == [(*given, *named.values())]
    said = [record.getMessage() for record in caplog.records if "gloo group" in record.getMessage()]
    assert len(said) == advice
    assert all("65 ranks sends 12,675 requests" in text and "GLOO_ENABLE_STORE_V2_API=1" in text for text in said)


def test_a_token_protects_the_server_of_a_group(port: int) -> None:
    """PyTorch's own client has none, so a server that requires one is not even started for it."""
    code = f"""
import os, sys, torch.distributed as dist, tcpstore_async.torch as ours
from tcpstore_async import TCPStore
os.environ["TCPSTORE_TOKEN"] = "a secret of all ranks".replace(" ", "-")
ours.install(sys.argv[1])
url = "tcp://127.0.0.1:{port}?rank=0&world_size=1"
try:
    dist.init_process_group("gloo", init_method=url)
    try: TCPStore("127.0.0.1", {port}, timeout=10, token="").num_keys()
    except dist.DistError as e: print(e)
    except RuntimeError as e: print(e)
    dist.destroy_process_group()
except RuntimeError as e: print(str(e).partition(",")[0])"""
    assert run(code, "python")[0] == "the server requires a token: set TCPSTORE_TOKEN_FILE"
    assert run(code, "native")[0] == "PyTorch's C++ client cannot present a token"


def test_pytorchs_client_beside_an_agents_server_needs_no_token() -> None:
    """Rank 0 of torchrun's workers asks to host, and the agent already does: a server that admits everybody."""
    code = """
import os, sys, torch.distributed as dist, tcpstore_async.torch as ours
ours.install("native", classes=True)
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 1, True, wait_for_workers=False)
store.set("k", "v")
print(store.get("k"))"""
    with PlainTCPStore("127.0.0.1", 0, is_master=True, timeout=60, token="secret", require_auth="") as agents:
        env = {"MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TCPSTORE_TOKEN": "secret"}
        assert run(code, **env)[0] == "b'v'"


@pytest.mark.parametrize("client", ["native", "python"])
@pytest.mark.parametrize("first", ["group", "rpc"])
def test_rpc_leaves_its_file_and_a_next_rendezvous_begins_anew(first: str, client: str, tmp_path: Path) -> None:
    """In PyTorch nothing closes RPC's store; a group over the same file may end before or after it."""
    code = """
import os, sys, warnings, torch.distributed as dist, torch.distributed.rpc as rpc, tcpstore_async.torch as ours
warnings.simplefilter("ignore")
first, client, path = sys.argv[1:]
ours.install(client)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{path}")
ends = [dist.destroy_process_group, rpc.shutdown]
for end in ends if first == "group" else reversed(ends):
    end()
    print(os.path.exists(path))
store, *_ = next(dist.rendezvous(f"file://{path}?rank=0&world_size=1"))
print(store.num_keys() < 2)
store.close()
print(os.path.exists(path))
rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
ours.uninstall()
before = rpc.shutdown
rpc.shutdown()
print(rpc.shutdown is not before)"""
    path = tmp_path / "meeting"
    out, _ = run(code, first, client, str(path))
    assert out.splitlines() == ["True", "True", "True", "False", "True"]
    assert path.exists()
