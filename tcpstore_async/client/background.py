"""The background loop: watches the connections of synchronous stores while no call is in progress.

One asyncio loop per process, in a daemon thread, serves every synchronous store. It starts with the first call of the
first store, or shortly after that call if a process group is being formed, and ends with the last store. It detects
idle connections that are lost. A single link that was reset is reconnected (`resume.resume_idle`); otherwise the store
is lost: its next call fails at once, its descriptors close and its waiting threads wake. The kernel keeps idle
connections alive (`connect._KEEP_ALIVE`, every 180 s, before firewalls and NAT drop them); a peer that no longer
answers its probes is an error of the socket, which the loop reports like any other loss.

The loop must not know the protocol, and never stands between a call and its reply: calls write and read in their own
threads. Replies do not wake it, because its epoll set asks for hang-ups and errors only. Without epoll (macOS) it looks
at idle connections once a second.

Invariants:

* The loop's thread never blocks: if a lock is taken, it tries again later. Stopping it therefore takes little time,
  even for a signal handler in the middle of a call.
* The thread does not exist while the process forks: Python does not warn about it, and the child inherits none of its
  descriptors. The loop starts again with the next call of a store, in the parent and in the child; in the parent at
  the latest a little later, because a store may be idle for longer than its session is kept.
* Signals are blocked in the loop's thread: handlers and EINTR stay with the main thread.
* Nothing starts, stops or extends the loop in the main thread, where a signal handler may raise between any two
  bytecodes and leak a thread or a descriptor, or leave a store unwatched (`call_uninterrupted`, `defer`).
"""

import _thread
import asyncio
import atexit
import functools
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final, Protocol

THREAD_NAME: Final = "tcpstore client"

_RETRY_SECONDS: Final = 0.05
"""Seconds until a lost connection is checked again if it was in use or its store locked."""

_SWEEP_SECONDS: Final = 1.0
"""Seconds between checks of all idle connections where there is no epoll."""

_DEFER_SECONDS: Final = 0.1
"""Seconds until `defer` makes a call; most process groups form in less."""

_SIGNALS: Final = frozenset(signal.valid_signals())
"""All signals, computed once because it takes long."""

_CANCEL_SECONDS: Final = 0.1
"""Seconds between two attempts to cancel a task."""

_STOP_SECONDS: Final = 1.0
"""Seconds that a fork, the last `close`, or the exit of the interpreter waits for the thread."""

_HANG_UP: Final[int] = getattr(select, "EPOLLRDHUP", 0)  # EPOLLHUP and EPOLLERR are always reported
_EDGE: Final[int] = getattr(select, "EPOLLET", 0)
_BATCH: Final = 1024


class Client(Protocol):
    """The pool of one store. The module calls its methods from any thread."""

    def check_idle(self) -> bool:
        """Detect the loss of idle connections, without waiting. Return False to be called again soon."""
        ...

    def unwatched(self) -> None:
        """Have the next call call `watch`, because the loop has stopped."""
        ...

    def watch(self) -> bool:
        """Hand the connections to a loop by the module's `watch`, without waiting. Return False to be called again."""
        ...


class Service(Protocol):
    """I/O that the loop does for synchronous stores, such as that of a held port."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on this loop, in whose thread this is called. Idempotent."""
        ...

    def detach(self) -> None:
        """Stop serving until the next `attach`."""
        ...

    def finish(self) -> None:
        """Finish without a loop."""
        ...


class BackgroundLoop:
    """An event loop in a daemon thread, and the connections that it watches."""

    def __init__(self) -> None:
        """Raises OSError if the process has no descriptor left."""
        self.clients: dict[Client, set[int]] = {}
        self.stopping = False
        self._owners: dict[int, Client] = {}
        self._retrying: set[Client] = set()
        self._loop = asyncio.SelectorEventLoop()  # not the policy's: fast enough, and imported already
        try:
            self._epoll = select.epoll() if hasattr(select, "epoll") else None
        except OSError:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._done = threading.Event()

    def start(self) -> None:
        """Raises RuntimeError if no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def stop(self) -> None:
        """Stop the thread, which closes its descriptors, and wait for it, within a limit."""
        self.stopping = True
        for client in list(self.clients):
            client.unwatched()
        with suppress(RuntimeError):  # closed already
            self.call_soon(self._loop.stop)
        if self.is_current():  # a garbage collection in the loop's thread may close a store
            return
        # Neither `join` nor `current_thread`: in a thread of `call_uninterrupted` they would register a dummy for good.
        if self._done.wait(_STOP_SECONDS):
            _await_exit(self._thread.native_id)

    def is_current(self) -> bool:
        """Return whether this is the loop's thread."""
        return self._thread.ident == threading.get_ident()

    def close_inherited(self) -> None:
        """Close the parent's epoll set in a forked child, as it knows the parent's connections."""
        if self._epoll is not None:
            self._epoll.close()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Have the loop's thread make a call; from any thread. Raises RuntimeError if the loop has ended."""
        self._loop.call_soon_threadsafe(callback)

    def attach_soon(self, service: Service) -> None:
        """Attach a service. Raises RuntimeError if the loop has ended."""
        self.call_soon(functools.partial(service.attach, self._loop))

    def watch(self, client: Client, descriptors: list[int]) -> bool:
        """Watch these connections of a client; return False if the loop is about to stop."""
        watched = self.clients.setdefault(client, set())
        for fd in descriptors:
            watched.add(fd)
            self._owners[fd] = client
            try:
                if self._epoll is not None:
                    self._epoll.register(fd, _HANG_UP | _EDGE)
            except (OSError, ValueError):
                pass  # the connection or the set has been closed meanwhile
        return not self.stopping

    def forget(self, client: Client) -> None:
        """Stop watching a client, which is about to close its connections."""
        for fd in self.clients.pop(client, ()):
            if self._owners.get(fd) is client:
                del self._owners[fd]
                try:
                    if self._epoll is not None:
                        self._epoll.unregister(fd)
                except (OSError, ValueError):
                    pass  # closed before

    # In the loop's thread

    def _run(self) -> None:
        _block_signals()
        try:
            if self._epoll is not None:
                self._loop.add_reader(self._epoll.fileno(), self._report)
            else:
                self._loop.call_later(_SWEEP_SECONDS, self._sweep)
            self._loop.call_soon(self._attach_all)
            self._loop.run_forever()
        finally:
            self._close()
            _alive.discard(self)
            self._done.set()

    def _attach_all(self) -> None:
        for service in list(_services):
            service.attach(self._loop)

    def stop_if_idle(self) -> None:
        """In the loop's thread, stop it if neither stores nor services need it."""
        if not self.stopping and not _stop_if_idle(0):
            self._loop.call_later(_RETRY_SECONDS, self.stop_if_idle)

    def _close(self) -> None:
        for service in list(_services):
            service.detach()
        tasks = asyncio.all_tasks(self._loop)
        while tasks:
            for task in tasks:
                task.cancel()  # `asyncio.wait_for` swallows it if what it waits for has just ended
            _, tasks = self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        self._loop.close()
        if self._epoll is not None:
            self._epoll.close()

    def _report(self) -> None:
        assert self._epoll is not None
        for client in {self._owners.get(fd) for fd, _ in self._epoll.poll(0, _BATCH)}:
            if client is not None:
                self.check(client)

    def check(self, client: Client) -> None:
        self._retrying.discard(client)
        if client in self.clients and not client.check_idle() and client not in self._retrying:
            self._retrying.add(client)
            self._loop.call_later(_RETRY_SECONDS, self.check, client)

    def _sweep(self) -> None:
        for client in list(self.clients):
            client.check_idle()
        self._loop.call_later(_SWEEP_SECONDS, self._sweep)


_services: Final[set[Service]] = set()
"""Services of synchronous stores. They outlive a loop, which is stopped while the process forks."""

_loop: BackgroundLoop | None = None
"""The process's loop, if there is one."""

_alive: Final[set[BackgroundLoop]] = set()
"""Loops whose threads have not ended, even if they were told to stop."""

_changing = threading.Lock()
"""Held while the loop is started or stopped: by a thread that no signal handler interrupts, or by a fork. So a handler
that waits for it never waits for a call that it has interrupted."""

_ended = False
"""Whether the interpreter exits."""


def running() -> BackgroundLoop | None:
    """Return the process's loop, if there is one."""
    return _loop


def exiting() -> bool:
    """Return whether the interpreter exits."""
    return _ended


def is_running_here() -> bool:
    """Return whether this is the loop's thread, which must not wait."""
    loop = _loop
    return loop is not None and loop.is_current()


def call_uninterrupted(function: Callable[[], object]) -> None:
    """Call a function where no signal handler can interrupt it, and wait for it, within a limit.

    Python runs handlers in the main thread, for which another thread therefore makes the call; it continues if a
    handler raises during the wait. The function must not wait for a lock that its caller or an interrupted call may
    hold.
    """
    if threading.get_ident() != threading.main_thread().ident:
        function()
        return
    done = _thread.allocate_lock()
    done.acquire()
    native: list[int] = []

    def run() -> None:
        native.append(threading.get_native_id())
        try:
            function()
        finally:
            done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # a signal handler raised it
        function()  # no thread can be started
        return
    if done.acquire(timeout=2 * _STOP_SECONDS):
        _await_exit(native[0])


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class _DeferredCalls:
    """Calls that a thread makes after a delay. The thread exists only while calls are due."""

    def __init__(self) -> None:
        self.refuses = False
        """Whether there must be no thread, because the process forks or exits."""
        self._due: set[Callable[[], bool]] = set()
        self._running = threading.Lock()
        """Held by the thread that makes the calls; a second one ends at once."""
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[tuple[_thread.LockType, list[int]]] = []
        """For each thread, a lock that it releases at its end, and its id in the kernel, once it runs."""

    def add(self, function: Callable[[], bool]) -> None:
        """Have a function called until it returns True. Raises RuntimeError if no thread can be started."""
        if not self.refuses:
            self._due.add(function)
            if not self._running.locked():
                ended = _thread.allocate_lock()
                ended.acquire()
                native: list[int] = []
                _thread.start_new_thread(self._run, (ended, native))
                self._threads = [one for one in self._threads if one[0].locked()] + [(ended, native)]

    def end(self) -> set[Callable[[], bool]]:
        """Drop all calls, and wait for the end of the threads, within a limit; return the functions."""
        self.refuses = True
        dropped = self._due.copy()
        self._due.clear()
        self._hurry.put(None)
        for ended, native in self._threads:
            if ended.acquire(timeout=_STOP_SECONDS):
                ended.release()
                _await_exit(native[0])
        return dropped

    def _run(self, ended: _thread.LockType, native: list[int]) -> None:
        native.append(threading.get_native_id())
        try:
            _block_signals()
            while self._due and self._running.acquire(blocking=False):
                try:
                    self._make_calls()
                finally:
                    self._running.release()
        finally:
            ended.release()

    def _make_calls(self) -> None:
        seconds = _DEFER_SECONDS
        while self._due:
            self._wait(seconds)
            seconds = _RETRY_SECONDS
            self._due.difference_update([function for function in list(self._due) if function()])

    def _wait(self, seconds: float) -> None:
        try:
            self._hurry.get(timeout=seconds)
        except queue.Empty:
            pass


_deferred = _DeferredCalls()


def defer(function: Callable[[], bool]) -> None:
    """Call a function a little later, until it returns True, where no signal handler can interrupt it.

    It may be deferred again until then. The function must not wait for a lock. A fork, like the exit of the process,
    waits for a call in progress and drops the function, which the parent process then defers again.
    """
    try:
        _deferred.add(function)
    except RuntimeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # a signal handler raised it
        function()  # no thread can be started


def _await_exit(native_id: int | None) -> None:
    """Wait until the kernel no longer counts a thread that has ended: Python warns of threads when it forks."""
    task = f"/proc/self/task/{native_id}"
    end = time.monotonic() + _STOP_SECONDS
    while os.path.exists(task) and time.monotonic() < end:
        time.sleep(1e-5)


def watch(client: Client, descriptors: list[int]) -> bool:
    """Watch connections until `release`; start the loop if there is none. Call it by `call_uninterrupted`.

    Returns False to be called again, because the loop is being started or stopped. If no thread can be started, the
    next call notices a loss instead.
    """
    descriptors = [fd for fd in descriptors if fd >= 0]
    if not descriptors or _ended:
        return True
    loop = _loop
    if loop is None:
        if not _changing.acquire(blocking=False):
            return False
        try:
            loop = _started()
        finally:
            _changing.release()
    return loop is None or loop.watch(client, descriptors)


def watch_again(client: Client, descriptor: int) -> None:
    """Watch a descriptor that refers to another connection now."""
    loop = _loop
    if loop is not None and client in loop.clients:
        loop.watch(client, [descriptor])


def check_soon(client: Client) -> None:
    """Have `check_idle` called, if the loop watches this client."""
    loop = _loop
    if loop is not None:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon(functools.partial(loop.check, client))


def spawn(work: Coroutine[object, object, None], report: Callable[["asyncio.Task[None]"], object]) -> None:
    """In the loop's thread, run a coroutine, which is cancelled when the loop stops, and report its end."""
    asyncio.get_running_loop().create_task(work).add_done_callback(report)


def add_service(service: Service) -> bool:
    """Run a service until `remove_service`; return False if no thread can be started for it."""
    loop = _loop
    if loop is not None and loop.is_current():
        _services.add(service)
        loop.attach_soon(service)
        return True
    call_uninterrupted(functools.partial(_add_service, service))
    return service in _services


def _add_service(service: Service) -> None:
    if _ended or not _changing.acquire(timeout=2 * _STOP_SECONDS):
        return
    try:
        loop = _started()
        if loop is not None:
            _services.add(service)
            loop.attach_soon(service)
    finally:
        _changing.release()


def remove_service(service: Service) -> None:
    """Remove a service that has ended; stop the loop if nothing else needs it."""
    _services.discard(service)
    loop = _loop
    if loop is not None and not _services and not loop.clients:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon(loop.stop_if_idle)


def call_soon(callback: Callable[[], object]) -> None:
    """Have the loop's thread make a call; without a loop, make it here."""
    loop = _loop
    try:
        if loop is not None:
            loop.call_soon(callback)
            return
    except RuntimeError:
        pass  # it has just ended
    callback()


def release(client: Client) -> None:
    """Stop watching a client, which is about to close its connections; with the last one, stop the loop."""
    if _loop is not None:
        call_uninterrupted(functools.partial(_release, client))


def _release(client: Client) -> None:
    loop = _loop
    if loop is not None:
        loop.forget(client)
        _stop_if_idle()


def _stop_if_idle(seconds: float = _STOP_SECONDS) -> bool:
    """Stop the loop if neither stores nor services need it; return False if it is still being started or stopped."""
    global _loop
    loop = _loop
    if loop is None or loop.clients or _services:
        return True
    if not _changing.acquire(timeout=seconds):
        return False
    try:
        if _loop is loop and not loop.clients and not _services:  # neither came while this was waiting
            _loop = None
            loop.stop()
        return True
    finally:
        _changing.release()


def _started() -> BackgroundLoop | None:
    """Return the loop, a new one if there is none, or None if there can be none. Needs `_changing`."""
    global _loop
    if _loop is None:
        try:
            loop = BackgroundLoop()
        except OSError:
            return None
        _loop = loop
        _alive.add(loop)
        try:
            loop.start()
        except RuntimeError:
            _loop = None
            _alive.discard(loop)
    return _loop


def _stop() -> bool:
    """Stop the loop although it has clients. Return whether `_changing` is held now, so that none is started."""
    global _loop
    _dropped.update(_deferred.end())
    held = _changing.acquire(timeout=_STOP_SECONDS)
    _loop = None
    for loop in list(_alive):
        _dropped.update([client.watch for client in list(loop.clients)])
        loop.stop()
    return held


_dropped: Final[set[Callable[[], bool]]] = set()
"""What the parent process of a fork defers again: calls that were due, and the watch over the loop's clients."""


_held: Final[list[bool]] = []
"""Whether the fork in progress holds `_changing`."""

_inherited: Final[list[BackgroundLoop]] = []
"""In a forked child, loops of the parent that did not stop in time. Kept so that nothing warns that they are open."""


def _before_fork() -> None:
    _held.append(_stop())


def _after_fork_in_parent() -> None:
    global _deferred
    if not _ended:
        _deferred = _DeferredCalls()
    if _held and _held.pop():
        if _services and not _ended:  # they go on without a call of a store
            _started()
        _changing.release()
    while _dropped:
        defer(_dropped.pop())


def _after_fork_in_child() -> None:
    global _changing, _deferred
    _changing = threading.Lock()
    _deferred = _DeferredCalls()
    _held.clear()
    _dropped.clear()
    _services.clear()
    _inherited.extend(_alive)
    _alive.clear()
    for loop in _inherited:
        loop.close_inherited()


def _at_exit() -> None:
    global _ended
    _ended = True
    if _stop():
        _changing.release()
    for service in list(_services):
        service.finish()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
