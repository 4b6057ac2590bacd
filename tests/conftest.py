"""Which build is tested, and what no test may leave behind.

Warnings are errors (see pyproject.toml), so a socket or a process that nobody closed fails the test or the module that
left it. So does an exception in a callback or a task that nobody awaited, which asyncio would only log.
"""

import functools
import gc
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import builds
from tcpstore_async.serving import build

WANTED = os.environ.get("TCPSTORE_TEST_BUILD") or "interpreted"
"""`interpreted` or `compiled`."""


PROC = Path("/proc/self/fd").exists()
"""Whether tests that are marked `needs_proc` can run. tests/test_platforms.py finds those that should be marked."""


def pytest_configure() -> None:
    unusable = builds.why_unusable(WANTED)
    if unusable:
        raise pytest.UsageError(unusable)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make check` ignores it, and so would the processes of tests


# What runs when. `make test` leaves out what is marked `slow`, `make test-compiled` runs what is marked `compiled`. The
# marks are given here, by folder, file, fixture or parameter; a single test may carry `slow` itself. What is marked
# `exhaustive` runs only if it is asked for: `make test-exhaustive`.

QUICK = ("unit", "conformance", "properties", "fuzz", "contract")
"""Folders that come first: bytes and meaning, mostly in memory."""

LONGEST = (
    *(
        "pytorch",
        "interop",
        "faults",
        "client",
        "relay",
        "server",
        "tools",
        "tls",
        "test_install.py",
        "simulation",
        "bench",
    ),
    *("test_demo.py", "test_builds.py"),
)
"""What comes next, the longest files first: at the end one of them would keep one processor busy."""

SLOW = (
    *("pytorch", "interop", "bench", "faults", "tools/web/test_page.py", "tools/web/test_processes.py"),
    *(
        "unit/cli/test_cli.py",
        "tools/load/test_cli_bench.py",
        "unit/cli/test_cli_client.py",
        "unit/cli/test_cli_output.py",
    ),
    *("client/test_joins.py", "tools/load/test_load.py", "tools/load/test_load_replay.py", "client/test_master.py"),
    *(
        "client/test_signals.py",
        "tools/doctor/test_cli_doctor.py",
        "tools/look/test_cli_look.py",
        "tools/look/test_cli_top.py",
    ),
    *("names", "relay", "tls"),
    *("server/test_server_process.py", "server/test_server_forks.py", "server/test_server_master.py"),
    *("server/test_server_log.py", "server/test_server_threaded.py", "simulation/test_proxied.py"),
    *("server/test_auth.py", "server/test_refusals.py", "server/test_reloading.py"),
    *("test_builds.py", "test_demo.py", "test_deploy.py", "test_examples.py", "test_install.py", "test_tutorial.py"),
)
"""Folders and files that start many processes, import PyTorch, or wait for long."""

SLOW_FIXTURES = {"our_servers", "torch_servers", "outcomes"}
"""What starts processes for tests whose files are quick otherwise."""

QUICK_KINDS = {"hash", "file", "prefix-prefix-hash", "tcp-thread-uv", "tcp-thread-threaded", "async"}
"""Stores with which the contract is tried by `make test`, and on the compiled build. The others are other ways to reach
the same code.
"""

TORCH_SERVERS = {"libuv", "legacy", "torch-libuv"}
"""Parameters that stand for PyTorch's servers."""

COMPILED = (
    "unit",
    "conformance",
    "properties",
    "fuzz",
    "contract",
    "client",
    "server",
    "tls",
    "relay",
    "simulation",
    "faults",
    *("tools/load/test_generator.py", "tools/load/test_load.py"),
)
"""Folders of what compiling can change."""

NOT_COMPILED = (
    *(
        "unit/cli/test_cli_client.py",
        "unit/cli/test_cli_output.py",
        "unit/stores/test_rendezvous_url.py",
    ),
    *("contract/test_table.py", "faults/test_fault_file_store.py", "faults/test_fault_owner.py"),
    *("faults/test_fault_process.py", "client/test_connecting.py", "client/test_master.py"),
    *("server/test_server_process.py", "server/test_server_master.py", "simulation/test_proxied.py"),
    *("server/test_server_log.py", "server/test_server_log_handlers.py", "server/test_server_listening.py"),
    *("server/test_server_port_holder.py", "server/test_server_systemd.py"),
    "relay/test_without_links.py",
)
"""Of these folders, what tries code that is never compiled, or processes."""

MEASURED = (
    *("pytorch/test_torch_hosting.py", "pytorch/test_torch_install.py", "pytorch/test_torch_stores.py"),
    *(
        "pytorch/test_torch_torchrun.py",
        "client/test_joins.py",
        "client/test_master.py",
        "server/test_server_master.py",
        "server/test_auth.py",
        "server/test_refusals.py",
        "server/test_reloading.py",
    ),
    *(
        "tools/web/test_processes.py",
        "interop",
        "unit/cli/test_cli.py",
        "tools/load/test_cli_bench.py",
        "unit/cli/test_cli_client.py",
        "unit/cli/test_cli_output.py",
    ),
    *("tools/look/test_cli_look.py", "tools/look/test_cli_top.py", "names/test_names.py", "relay", "tls"),
)
"""Of the slow folders and files, those that try much in their own process: `make coverage` sees no other."""

NOT_MEASURED = re.compile(
    r"fork|child|multiprocessing|interrupt|ctrl_c|signal|any_moment|a_handler"
    r"|^tests/(bench|simulation|test_)|byte_by_byte|random_pieces|_of_16384|torchrun.py::.*(killed|in_a_row|workers)"
)
"""Tests that `make coverage` leaves out. Coverage holds a lock while it begins with another file: a child forked at
that moment hangs, and so does a process whose signal handler raises then. Others would take minutes, run in other
processes, or try nothing that the rest does not.
"""

EXHAUSTIVE = re.compile(
    r"contract/test_(values|waiting)\.py::.*\[(prefix-hash|tcp-served-uv|tcp-served-threaded|tcp-process-threaded)\b"
    r"|conformance/test_vectors\.py::test_our_server\[threaded-nccl2?_world_of_16384\]"
    r"|conformance/test_vectors\.py::test_(engine_byte_by_byte|link_in_random_pieces_that_breaks)\[((Link|Single)Target-)?nccl2?_world_of_16384\]"
    r"|properties/test_links\.py::test_a_recorded_run_that_breaks_at_any_byte\[.*-[23]\]"
    r"|properties/test_links\.py::test_chosen_runs_equal_the_model\[(150|200|250)\]"
    r"|interop/test_torch_groups\.py::test_a_gloo_group\[(uv-.*-2|threaded-.*-4|relays-.*-2)\]"
    r"|interop/test_torch_groups\.py::test_a_gloo_group\[relays-(group(_with_debug)?|stock_world)-4\]"
    r"|interop/test_torch_groups\.py::test_a_master_that_waits_for_its_workers\[relays-1\]"
    r"|pytorch/test_torch_torchrun\.py::test_a_killed_worker_restarts_the_round\[env2\]"
    r"|pytorch/test_torch_worlds\.py::test_(a_group_that_is_never_destroyed|jobs_in_a_row_on_one_address)\[file.*-python\]"
    r"|pytorch/test_torch_worlds\.py::test_a_world_ends_quietly_whoever_leaves_last\[(python-tcp-3|native-env-0)\]"
    r"|pytorch/test_torch_worlds\.py::test_a_mixed_world\[(stock0-python|stock1-native)\]"
    r"|pytorch/test_torch_worlds\.py::test_jobs_in_a_row_on_one_address\[(env-who1-native|tcp-who2-python)\]"
    r"|pytorch/test_torch_worlds\.py::test_the_backend_that_was_asked_for\[(way0-python|way1-native)\]"
    r"|pytorch/test_torch_worlds\.py::test_a_group_over_a_dropped_store\[(prefix-store v2|file-debug)\]"
    r"|test_install\.py::test_what_must_be_compiled_and_cannot_be_is_an_error\[false\]"
    r"|tools/load/test_cli_bench\.py::.*\blegacy\b"
    r"|client/test_load_replay\.py::test_a_recorded_job_replays_with_the_same_replies\[(libuv|legacy)-False\]"
    r"|simulation/test_proxied\.py::test_runs_have_no_finding\[(uv-15|threaded-0)\]"
)
"""Combinations whose parts are tried in others: marked `exhaustive`, and left out unless `-m exhaustive` wants them. A
test may carry that mark itself.
"""

REPEATED = re.compile(
    r"^tests/(properties|fuzz)/"
    r"|^tests/simulation/test_(simulation|links|real|hogs)\.py"
    r"|^tests/(conformance/test_vectors|unit/session/test_(guard|server)|unit/links/test_link_server|tools/load/test_recording)\.py"
    r"|^tests/contract/test_(values|waiting|table)\.py"
    r"|^tests/(tls|relay)/"
    r"|^tests/client/test_(resumed|pops)\.py"
    r"|^tests/server/test_(auth|refusals|reloading|server_threaded)\.py"
    r"|^tests/faults/test_fault_(abuse|clients|limits|peers)\.py"
)
"""Tests of sessions, engines and their servers that are long or many, or try the same commands in another way: marked
`repeated`. `make check` runs them on the compiled build only, `make test` and `make test-all` on the interpreted one.
"""


@functools.cache
def below(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file of tests is one of these places, or in one."""
    here = path.relative_to(Path(__file__).parent)
    return any(here.is_relative_to(place) for place in places)


def can_be_compiled(path: Path) -> bool:
    return below(path, COMPILED) and not below(path, NOT_COMPILED)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files of which nothing would run: that costs time, and may import PyTorch."""
    if collection_path.suffix != ".py":
        return None
    marked = config.option.markexpr
    left_out = "not slow" in marked and below(collection_path, SLOW)
    return left_out or (marked.startswith("compiled") and not can_be_compiled(collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what all tests have in common out of every garbage collection: else each takes a third of a second."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = [*QUICK, *LONGEST]
    for item in items:
        if not PROC and item.get_closest_marker("needs_proc"):
            item.add_marker(pytest.mark.skip(reason="there is no /proc here"))
        fixtures = set(getattr(item, "fixturenames", ()))
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec else {}
        kind = getattr(params.get("kind"), "name", "")
        servers = {value for value in params.values() if isinstance(value, str)} | {kind}
        torch = not servers.isdisjoint(TORCH_SERVERS) or "torch_servers" in fixtures
        other_kind = bool(kind) and kind not in QUICK_KINDS
        if EXHAUSTIVE.search(item.nodeid):
            item.add_marker("exhaustive")
        if torch or other_kind or below(item.path, SLOW) or fixtures & SLOW_FIXTURES:
            item.add_marker("slow")
        quick = item.get_closest_marker("slow") is None
        if (quick or below(item.path, MEASURED)) and not NOT_MEASURED.search(item.nodeid):
            item.add_marker("measured")
        threads = (
            "our_servers" in fixtures and "threaded" in servers
        )  # of whose server nothing but sessions is compiled
        if can_be_compiled(item.path) and not torch and not other_kind and not threads:
            item.add_marker("compiled")
            may_skip = item.get_closest_marker("skipif") is not None  # perhaps on the compiled build
            if REPEATED.search(item.nodeid) and not may_skip:
                item.add_marker("repeated")

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(Path(__file__).parent).parts[0]
        return places.index(place) if place in places else len(places)

    items.sort(key=rank)
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)


def pytest_report_header() -> str:
    return f"tcpstore_async: {build()} build"


class _Errors(logging.Handler):
    """What a loop logs because there is nobody to raise it to."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture(autouse=True, scope="session")
def _loop_errors() -> Iterator[_Errors]:
    errors = _Errors()
    logging.getLogger("asyncio").addHandler(errors)
    yield errors
    logging.getLogger("asyncio").removeHandler(errors)


@pytest.fixture(autouse=True)
def _no_loop_errors(_loop_errors: _Errors) -> Iterator[None]:
    yield
    texts = "\n".join(_loop_errors.texts)
    _loop_errors.texts.clear()
    assert not texts, texts


@pytest.fixture(autouse=True, scope="module")
def _nothing_left(_loop_errors: _Errors) -> Iterator[None]:
    """Collect what a module left, so that it is that module that fails."""
    yield
    gc.collect()
    texts = "\n".join(_loop_errors.texts)
    _loop_errors.texts.clear()
    assert not texts, texts


@pytest.fixture(scope="module")
def module_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the servers of a module's tests have their admin sockets, those of this process and of its children."""
    with pytest.MonkeyPatch.context() as patch:
        yield _sockets_below(tmp_path_factory.mktemp("run"), patch)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for one test; nothing is there yet."""
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    return _sockets_below(private, monkeypatch)


def _sockets_below(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "tcpstore"
