"""Which build is tested, and what no test may leave behind.

Warnings are errors (see pyproject.toml), so a socket or a process that nobody closed fails the test or the module that
left it. So does an exception in a callback or a task that nobody awaited, which asyncio would only log.
"""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import builds
from tcpstore_async.serving import build

WANTED = os.environ.get("TCPSTORE_TEST_BUILD") or "interpreted"
"""`interpreted` or `compiled`."""


def pytest_configure() -> None:
    complaint = builds.complaint(WANTED)
    if complaint:
        raise pytest.UsageError(complaint)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = ("pytorch", "faults", "interop", "client")
"""Folders with files that take long, the longest first: one that came last would keep one processor busy alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return SLOW.index(folder) if folder in SLOW else len(SLOW)

    items.sort(key=rank)


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
