"""The background loop: what must happen to the connections of synchronous stores while nobody makes a call.

One asyncio loop per process, in a daemon thread, serves every synchronous store. It starts with the first call of the
first store, or shortly after that call if a process group is being formed, and ends with the last store. It notices
idle connections that are lost. If one is a single link's and was reset, it connects again (`resume.resume_idle`);
otherwise the store is lost: its next call fails at once, its descriptors close and its waiting threads wake. Nothing
here keeps idle connections alive, because the kernel does (`connect._KEEP_ALIVE` sets TCP keep-alive to 180 s, more
often than firewalls and NAT drop idle connections); a peer that no longer answers keep-alive probes is an error of the
socket, which the loop reports like any other loss.

The loop must not know the protocol, and never stands between a call and its reply: calls write and read in their own
threads. Replies do not wake it, because its epoll set asks for hang-ups and errors only. Without epoll (macOS) it looks
at idle connections once a second.

Invariants:

* The loop's thread never blocks: a lock that is taken makes it try again later. So whoever stops it, even a signal
  handler in the middle of a call, waits only briefly.
* The thread does not exist while the process forks: Python does not warn about it, and the child inherits none of its
  descriptors. The loop starts again with the next call of a store, in the parent and in the child.
* Signals are blocked in the loop's thread: handlers and EINTR stay with the main thread.
* What starts, stops or extends the loop never runs in the main thread, where a signal handler may raise between any two
  steps and leave a thread, a descriptor or a store that is not watched behind (`uninterrupted`, `soon`).
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
from typing import Final, Protocol

THREAD_NAME: Final = "tcpstore client"

_RETRY_SECONDS: Final = 0.05
"""Seconds until a lost connection is checked again that was in use, or whose store was locked."""

_SWEEP_SECONDS: Final = 1.0
"""Seconds between two checks of all idle connections where there is no epoll."""

_SOON_SECONDS: Final = 0.1
"""Seconds by which `soon` is late: by then most process groups have formed."""

_SIGNALS: Final = frozenset(signal.valid_signals())
"""Found with the module, because that takes long."""

_STOP_SECONDS: Final = 1.0
"""Seconds that a fork, the last `close`, or the end of the interpreter waits for the thread."""

_HANG_UP: Final[int] = getattr(select, "EPOLLRDHUP", 0)  # EPOLLHUP and EPOLLERR are always reported
_EDGE: Final[int] = getattr(select, "EPOLLET", 0)
_BATCH: Final = 1024


class Client(Protocol):
    """The pool of one store. Both methods are called by the module, from any thread."""

    def check_idle(self) -> bool:
        """Note the loss of idle connections, without waiting. Return False to be called again soon."""
        ...

    def unwatched(self) -> None:
        """The loop has stopped: call `watch` with the next call."""
        ...


class Carried(Protocol):
    """What the loop keeps going on behalf of synchronous stores: the bridge of a TLS connection."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on this loop, in whose thread this is called. Idempotent."""
        ...

    def detach(self) -> None:
        """Stop serving until the next `attach`."""
        ...

    def finish(self) -> None:
        """Bring it to its end, without a loop."""
        ...


class BackgroundLoop:
    """An event loop in a daemon thread, and the connections that it watches."""

    def __init__(self) -> None:
        """Raises OSError if the process has no descriptor left."""
        self.clients: dict[Client, set[int]] = {}
        self.stopping = False
        self._owners: dict[int, Client] = {}
        self._retrying: set[Client] = set()
        self._loop = asyncio.SelectorEventLoop()  # not the policy's: nothing here has to be fast, and asyncio is there
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
        """Stop the thread, which closes its descriptors, and wait for that, within a limit."""
        self.stopping = True
        for client in list(self.clients):
            client.unwatched()
        try:
            self.call_soon(self._loop.stop)
        except RuntimeError:
            pass  # closed already
        if self._thread.ident == threading.get_ident():  # a garbage collection there may close a store
            return
        # Neither `join` nor `current_thread`: in a thread of `uninterrupted` they would register a dummy for good.
        if self._done.wait(_STOP_SECONDS):
            _await_exit(self._thread.native_id)

    def is_current(self) -> bool:
        """Return whether this is the loop's thread."""
        return self._thread.ident == threading.get_ident()

    def close_inherited(self) -> None:
        """In a forked child: close the parent's epoll set, which knows the parent's connections."""
        if self._epoll is not None:
            self._epoll.close()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Have the loop's thread call this; from any thread. Raises RuntimeError if the loop has ended."""
        self._loop.call_soon_threadsafe(callback)

    def check_soon(self, client: Client) -> None:
        """Have `check_idle` of a client called."""
        try:
            self.call_soon(functools.partial(self._check, client))
        except RuntimeError:
            pass  # the loop has ended

    def watch(self, client: Client, descriptors: list[int]) -> bool:
        """Watch these connections of a client; False if the loop is about to stop."""
        watched = self.clients.setdefault(client, set())
        for fd in descriptors:
            watched.add(fd)
            self._owners[fd] = client
            try:
                if self._epoll is not None:
                    self._epoll.register(fd, _HANG_UP | _EDGE)
            except (OSError, ValueError):
                pass  # the connection has been closed meanwhile, or the set
        return not self.stopping

    def forget(self, client: Client) -> None:
        """Stop watching what a client is about to close."""
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

    def attach_soon(self, carried: Carried) -> None:
        """Serve a bridge. Raises RuntimeError if the loop has ended."""
        self.call_soon(functools.partial(carried.attach, self._loop))

    def _attach_all(self) -> None:
        for carried in list(_carried):
            carried.attach(self._loop)

    def stop_if_idle(self) -> None:
        """In the loop's thread: stop if neither stores nor bridges need it."""
        if self.clients or _carried or self.stopping:
            return
        if not _changing.acquire(blocking=False):
            self._loop.call_later(_RETRY_SECONDS, self.stop_if_idle)
            return
        try:
            _end_if_idle(self)
        finally:
            _changing.release()

    def await_end(self) -> None:
        """Wait, within a limit, for the end of a thread that has been told to stop."""
        if self.stopping and self._thread.ident != threading.get_ident() and self._done.wait(_STOP_SECONDS):
            _await_exit(self._thread.native_id)

    def _close(self) -> None:
        for carried in list(_carried):
            carried.detach()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()
        if self._epoll is not None:
            self._epoll.close()

    def _report(self) -> None:
        assert self._epoll is not None
        for client in {self._owners.get(fd) for fd, _ in self._epoll.poll(0, _BATCH)}:
            if client is not None:
                self._check(client)

    def _check(self, client: Client) -> None:
        self._retrying.discard(client)
        if client in self.clients and not client.check_idle() and client not in self._retrying:
            self._retrying.add(client)
            self._loop.call_later(_RETRY_SECONDS, self._check, client)

    def _sweep(self) -> None:
        for client in list(self.clients):
            client.check_idle()
        self._loop.call_later(_SWEEP_SECONDS, self._sweep)


_carried: Final[set[Carried]] = set()
"""The bridges of synchronous stores. They outlive a loop, which is stopped while the process forks."""

_loop: BackgroundLoop | None = None
_alive: Final[set[BackgroundLoop]] = set()
"""Those whose threads have not ended, also after `stop`."""
_changing = threading.Lock()
"""Held by whoever starts or stops the loop: a thread that no signal handler interrupts, or a fork. So whoever waits for
it never waits for a call that it has interrupted."""
_ended = False


def running() -> BackgroundLoop | None:
    """Return the process's loop, if there is one."""
    return _loop


def is_running_here() -> bool:
    """Return whether this is the loop's thread, which must not wait."""
    loop = _loop
    return loop is not None and loop.is_current()


def uninterrupted(function: Callable[[], object]) -> None:
    """Call a function where no signal handler can interrupt it, and wait for it, within a limit.

    Python runs handlers in the main thread only, so there another thread makes the call; if a handler raises while this
    waits, the call goes on. The function must not wait for a lock that its caller, or an interrupted call, may hold.
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
    except RuntimeError:  # no thread can be started
        function()
        return
    if done.acquire(timeout=2 * _STOP_SECONDS):
        _await_exit(native[0])


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class _Late:
    """A thread that makes calls after a delay; there is none while there is nothing to call."""

    def __init__(self) -> None:
        self.refuses = False
        """Whether there must be no such thread, because the process forks or ends."""
        self._due: set[Callable[[], bool]] = set()
        self._running = threading.Lock()
        """Held by the thread that makes the calls; a second one ends at once."""
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[tuple[_thread.LockType, list[int]]] = []
        """Of each thread: a lock that it releases at its end, and its number in the kernel, once it runs."""

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

    def end(self) -> None:
        """Drop what is due, and wait for the end of the threads, within a limit."""
        self.refuses = True
        self._due.clear()
        self._hurry.put(None)
        for ended, native in self._threads:
            if ended.acquire(timeout=_STOP_SECONDS):
                ended.release()
                _await_exit(native[0])

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
        seconds = _SOON_SECONDS
        while self._due:
            self._wait(seconds)
            seconds = _RETRY_SECONDS
            self._due.difference_update([function for function in list(self._due) if function()])

    def _wait(self, seconds: float) -> None:
        try:
            self._hurry.get(timeout=seconds)
        except queue.Empty:
            pass


_late = _Late()


def soon(function: Callable[[], bool]) -> None:
    """Call a function a little later, until it returns True, where no signal handler can interrupt it.

    May be called again until then. It must not wait for a lock. A fork, after which the function is not called, and the
    end of the process wait until it has returned.
    """
    try:
        _late.add(function)
    except RuntimeError:  # no thread can be started
        function()


def _await_exit(native_id: int | None) -> None:
    """Wait until the kernel no longer counts a thread that has ended, because a fork looks at that."""
    task = f"/proc/self/task/{native_id}"
    end = time.monotonic() + _STOP_SECONDS
    while os.path.exists(task) and time.monotonic() < end:
        time.sleep(1e-5)


def watch(client: Client, descriptors: list[int]) -> bool:
    """Watch connections until `release`; start the loop if there is none. To be called by `uninterrupted`.

    Returns False if the next call has to try again, because the loop is just being started or stopped. That there can
    be no thread is no error: then the next call notices a loss.
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
    """Watch a descriptor that stands for another connection now."""
    loop = _loop
    if loop is not None and client in loop.clients:
        loop.watch(client, [descriptor])


def check_soon(client: Client) -> None:
    """Have `check_idle` called, if the loop watches this client."""
    loop = _loop
    if loop is not None:
        loop.check_soon(client)


def spawn(work: Coroutine[object, object, None], report: Callable[["asyncio.Task[None]"], object]) -> None:
    """In the loop's thread: run a coroutine, which is cancelled when the loop stops, and report its end."""
    asyncio.get_running_loop().create_task(work).add_done_callback(report)


def carry(carried: Carried) -> bool:
    """Keep a bridge going until it calls `drop`; return False if no thread can be started for that."""
    loop = _loop
    if loop is not None and loop.is_current():
        _carried.add(carried)
        loop.attach_soon(carried)
        return True
    uninterrupted(functools.partial(_carry, carried))
    return carried in _carried


def _carry(carried: Carried) -> None:
    if _ended or not _changing.acquire(timeout=2 * _STOP_SECONDS):
        return
    try:
        loop = _started()
        if loop is not None:
            _carried.add(carried)
            loop.attach_soon(carried)
    finally:
        _changing.release()


def drop(carried: Carried) -> None:
    """A bridge has ended; with the last one, and without stores to watch, so does the loop."""
    _carried.discard(carried)
    loop = _loop
    if loop is not None and not _carried and not loop.clients:
        try:
            loop.call_soon(loop.stop_if_idle)
        except RuntimeError:
            pass  # it has ended


def call_soon(callback: Callable[[], object]) -> None:
    """Have the loop's thread call this; without a loop, call it."""
    loop = _loop
    try:
        if loop is not None:
            loop.call_soon(callback)
            return
    except RuntimeError:
        pass  # it has just ended
    callback()


def await_idle_loops() -> None:
    """Wait for the end of loops that have nothing left to do, within a limit."""
    loop = _loop
    if loop is not None:
        if _carried or loop.clients or loop.is_current():
            return
        uninterrupted(_stop_idle)
    for stopping in list(_alive):
        stopping.await_end()


def _stop_idle() -> None:
    if not _changing.acquire(timeout=_STOP_SECONDS):
        return
    try:
        if _loop is not None:
            _end_if_idle(_loop)
    finally:
        _changing.release()


def release(client: Client) -> None:
    """Stop watching a client, which is about to close its connections; with the last one, stop the loop."""
    if _loop is not None:
        uninterrupted(functools.partial(_release, client))


def _release(client: Client) -> None:
    loop = _loop
    if loop is None:
        return
    loop.forget(client)
    if loop.clients or _carried:
        return
    if not _changing.acquire(timeout=_STOP_SECONDS):
        return  # the loop is being stopped, which takes too long
    try:
        _end_if_idle(loop)
    finally:
        _changing.release()


def _end_if_idle(loop: BackgroundLoop) -> None:
    """Stop a loop that neither stores nor bridges need. Needs `_changing`."""
    global _loop
    if _loop is loop and not loop.clients and not _carried:
        _loop = None
        loop.stop()


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
    _late.end()
    held = _changing.acquire(timeout=_STOP_SECONDS)
    _loop = None
    for loop in list(_alive):
        loop.stop()
    return held


_held: Final[list[bool]] = []
"""Whether the fork under way holds `_changing`."""

_inherited: Final[list[BackgroundLoop]] = []
"""In a forked child: loops of the parent that did not stop in time. Kept, so that nothing warns that they are open."""


def _before_fork() -> None:
    _held.append(_stop())


def _after_fork_in_parent() -> None:
    global _late
    if not _ended:
        _late = _Late()
    if _held and _held.pop():
        if _carried and not _ended:  # a thread may be waiting for a reply behind a bridge
            _started()
        _changing.release()


def _after_fork_in_child() -> None:
    global _changing, _late
    _changing = threading.Lock()
    _late = _Late()
    _held.clear()
    _carried.clear()
    _inherited.extend(_alive)
    _alive.clear()
    for loop in _inherited:
        loop.close_inherited()


def _at_exit() -> None:
    global _ended
    _ended = True
    if _stop():
        _changing.release()
    for carried in list(_carried):
        carried.finish()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
