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
import persisted
from tcpstore_async.serving import build

WANTED = os.environ.get("TCPSTORE_TEST_BUILD") or "interpreted"
"""`interpreted` or `compiled`."""


PROC = Path("/proc/self/fd").exists()
"""Whether tests that are marked `needs_proc` can run. tests/test_platforms.py finds those that should be marked."""


def pytest_configure() -> None:
    persisted.install()
    unusable = builds.why_unusable(WANTED)
    if unusable:
        raise pytest.UsageError(unusable)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make check` ignores it, and so would the processes of tests


FOLDERS = {
    "unit": "compiled",
    "conformance": "compiled repeated",
    "properties": "compiled repeated",
    "fuzz": "compiled repeated",
    "contract": "compiled repeated",
    "pytorch": "slow",
    "interop": "slow measured",
    "faults": "slow compiled",
    "client": "compiled",
    "stacks": "slow measured",
    "relay": "slow compiled measured",
    "server": "compiled",
    "tools": "slow measured",
    "tls": "slow compiled measured",
    ".": "unmeasured",
    "log": "compiled",
    "linear": "",
    "simulation": "compiled repeated",
    "bench": "slow",
    "names": "slow",
}
"""The folders in the order in which they run, and the marks of all tests there; pyproject.toml says what these mean.

What is quick and telling comes first, mostly in memory. Then come the longest files: at the end, one of them would keep
one processor busy. Other marks are at the files (`pytestmark`, as a statement of one line), tests and parameters.
"""


def folder_of(path: Path) -> str:
    place = path.relative_to(Path(__file__).parent).parts
    return place[0] if len(place) > 1 else "."


@functools.cache
def marks_of(path: Path) -> set[str]:
    """Return the marks of all tests of a file, which is not imported for that."""
    own = re.search(r"^pytestmark = .*", path.read_text(), re.MULTILINE)
    return {*FOLDERS[folder_of(path)].split(), *(re.findall(r"\bmark\.(\w+)", own[0]) if own else ())}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files of which nothing would run: importing them takes time, and may import PyTorch."""
    wanted = config.option.markexpr
    if collection_path.suffix != ".py" or wanted not in ("not slow", "compiled"):
        return None
    marks = marks_of(collection_path)
    ignored = "slow" in marks if wanted == "not slow" else "compiled" not in marks or "interpreted" in marks
    return ignored or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude what all tests share from garbage collections: else each takes a third of a second."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not PROC and item.get_closest_marker("needs_proc"):
            item.add_marker(pytest.mark.skip(reason="there is no /proc here"))
        interpreted = item.get_closest_marker("interpreted")
        if interpreted and interpreted.args and WANTED == "compiled":
            item.add_marker(pytest.mark.skip(reason=interpreted.args[0]))
        for mark in FOLDERS[folder_of(item.path)].split():
            if mark != "compiled" or not interpreted:
                item.add_marker(mark)
    order = list(FOLDERS)
    items.sort(key=lambda item: order.index(folder_of(item.path)))
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)


def pytest_report_header() -> str:
    return f"tcpstore_async: {build()} build"


class _Errors(logging.Handler):
    """Collect what a loop logs because it has no caller to raise it to."""

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
    """Collect what a module left, so that this module fails and not a later one."""
    yield
    gc.collect()
    texts = "\n".join(_loop_errors.texts)
    _loop_errors.texts.clear()
    assert not texts, texts


@pytest.fixture(scope="module")
def module_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the admin sockets of a module's servers, in this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        yield _sockets_below(tmp_path_factory.mktemp("run"), patch)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for one test; the folder does not exist yet."""
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    return _sockets_below(private, monkeypatch)


def _sockets_below(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "tcpstore"
