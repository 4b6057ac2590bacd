"""Operations on a keyspace of this process, one at a time, that no signal handler finds half done.

Knows: threads, the main thread's signal handlers, fork. Must not know: what an operation does.
Invariant: an operation that has begun is done before another begins, and before a handler that uses a store goes on;
whatever a handler raises, it is done whole.

A handler runs between two bytecodes of the main thread, so in the plain Python build it could call a keyspace in the
midst of one of its methods, or end that by an exception. A thread runs no handlers: it does what the main thread asks
for, if the program has any but Python's own of SIGINT. That takes 0.1 ms; to find that there is none takes 3 µs.
Compiled, a method is one step, and the main thread does it itself.
"""

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` looks up a name for each
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ..session.identity import build

_Result = TypeVar("_Result")

LOCK: Final = threading.RLock()
"""Held while an operation is done, and by who forks. Reentrant: a collection may run a finalizer that uses a store."""

_INTERRUPTIBLE: Final = build() != "compiled"

_SIGNALS: Final = tuple(map(int, signal.valid_signals()))

_USE_NO_STORE: Final = frozenset({signal.SIG_DFL, signal.SIG_IGN, None, signal.default_int_handler})


def do(operation: Callable[[], _Result]) -> _Result:
    """Do an operation, and return or raise what it does."""
    if _INTERRUPTIBLE and _has_handlers():
        return _ask(operation)
    with LOCK:
        return operation()


def _has_handlers() -> bool:
    """Whether a signal handler may run in this thread that uses a store."""
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return False
    try:
        return not _USE_NO_STORE.issuperset(map(_signal.getsignal, _SIGNALS))
    except TypeError:  # one cannot be hashed
        return True


class _Job(Generic[_Result]):
    """An operation that the main thread waits for."""

    def __init__(self, operation: Callable[[], _Result]) -> None:
        self.operation = operation
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()
        self.result: _Result
        self.error: BaseException | None = None

    def run(self) -> None:
        with LOCK:
            try:
                self.result = self.operation()
            except BaseException as error:
                self.error = error
            self.finished = True
        self.done.release()


_jobs: queue.SimpleQueue[_Job[object]] | None = None
"""For the helper, once there is one."""

_asked: Final[list[_Job[object]]] = []
"""What the main thread waits for: more than one job if a handler has interrupted it."""


def _ask(operation: Callable[[], _Result]) -> _Result:
    """Have the helper do it."""
    job = _Job(operation)
    jobs = _jobs or _start()
    if jobs is None:
        job.run()
    else:
        _asked.append(job)  # type: ignore[arg-type]
        try:
            jobs.put(job)  # type: ignore[arg-type]
            job.done.acquire()  # a handler may run meanwhile
        finally:
            _asked.remove(job)  # type: ignore[arg-type]
    if job.error is not None:
        raise job.error
    return job.result


def _start() -> "queue.SimpleQueue[_Job[object]] | None":
    """Start the helper; None if there can be no thread."""
    global _jobs
    jobs: queue.SimpleQueue[_Job[object]] = queue.SimpleQueue()
    try:
        threading.Thread(target=_help, args=[jobs], name="tcpstore hash stores", daemon=True).start()
    except RuntimeError:
        return None
    _jobs = jobs
    return jobs


def _help(jobs: "queue.SimpleQueue[_Job[object]]") -> None:
    while True:
        jobs.get().run()


def forked() -> None:
    """In a forked child, which has the lock, but no helper: a handler that has forked goes on here."""
    global _jobs
    _jobs = None
    LOCK.release()
    for job in list(_asked):
        if not job.finished:
            job.run()
        elif job.done.locked():
            job.done.release()
