"""A proxy that forwards a job's store traffic unchanged and records it.

Knows sockets, the event loop and the file; must not know the protocol. Invariants: bytes are forwarded before they are
decoded, and no failure of the recording, such as a full disk, stops or delays the job. A thread writes the file several
times per second, so a killed recorder leaves a readable file.
"""

import asyncio
import fcntl
import logging
import os
import queue
import signal
import socket
import stat
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiohappyeyeballs import AddrInfoType, start_connection

from ...auth.secret_files import TlsFiles
from ...base.addresses import format_address
from ...base.errors import DistNetworkError
from ...base.limits import MIB
from ...client.connect import encrypt
from ...client.tls import checked
from ...relay.forwarding import ForwardedConnection
from ...server.listen_socket import BACKLOG, adopt, listen, log_short_backlog, raise_file_limit
from ...server.rate_limited_log import RateLimitedLog
from .observer import Observer, Processes
from .recording import RecordingError, RowEncoder

_INTERVAL: Final = 0.25
"""Seconds between two writes to the file."""
_MOST_UNWRITTEN: Final = 256 * MIB
"""Unwritten bytes above which recording ends, because the disk is too slow."""
_STAGGER: Final = 0.1
"""Seconds before the server's next address is tried in parallel with one that has not answered."""

log = logging.getLogger("tcpstore_async.server")


class RecordingFile:
    """A file written by a thread; compressed if its name ends with .gz.

    While open it is locked against other recorders. Its old contents are kept until `start`.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file. Raises RecordingError if that fails, or another recorder is writing it."""
        self.path = path
        self.error = ""
        """Why recording has stopped; empty if it has not."""
        self._unwritten = 0
        try:
            self._file = os.fdopen(_create(path), "wb", buffering=0)
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from None
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if self._is_regular:  # terminals and pipes may have several writers
            self._lock()
        self._packer = zlib.compressobj(wbits=31) if path.suffix == ".gz" else None
        self._blocks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RecordingError(f"cannot write {self.path}: another recorder is writing to it") from None
        except OSError as error:  # not every file system supports locks
            log.warning("cannot lock %s against other recorders: %s", self.path, error.strerror)

    def start(self) -> None:
        """Truncate the file and start writing."""
        if self._is_regular:
            self._file.truncate(0)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def write(self, block: bytes) -> None:
        """Queue a block of whole rows for writing."""
        if not block or self.error:
            return
        if self._unwritten > _MOST_UNWRITTEN:
            self.error = f"cannot write {self.path} fast enough to keep up with the traffic"
            return
        self._unwritten += len(block)
        self._blocks.put(block)

    def close(self) -> None:
        """Write what is queued, and close the file. A file that was not started is unchanged."""
        if self._thread is not None:
            self._blocks.put(None)
            self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._put(block, zlib.Z_SYNC_FLUSH)
            self._unwritten -= len(block)
        if self._packer is not None:
            self._put(b"", zlib.Z_FINISH)

    def _put(self, block: bytes, mode: int) -> None:
        if self.error:
            return
        data = block if self._packer is None else self._packer.compress(block) + self._packer.flush(mode)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            self.error = f"cannot write {self.path}: {error.strerror}"


def _create(path: Path) -> int:
    """Return a descriptor of a new file, or of an existing one unless another user owns it.

    Another user's link could lead to any of our files, and another user can read their own file. Raises OSError and
    RecordingError.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        pass
    found = os.lstat(path)
    ours = found.st_uid in (0, os.geteuid())
    is_link = stat.S_ISLNK(found.st_mode)
    if not ours and (is_link or stat.S_ISREG(found.st_mode)):
        kind = "symbolic link" if is_link else "file"
        raise RecordingError(
            f"cannot write {path}: it is a {kind} owned by user {found.st_uid}; remove it or choose another path"
        )
    return os.open(path, os.O_WRONLY | (os.O_CREAT if is_link else os.O_NOFOLLOW), 0o666)


class Recorder:
    """Records the traffic of all connections into one file."""

    def __init__(
        self,
        host: str,
        port: int,
        addresses: list[AddrInfoType],
        file: RecordingFile,
        values: bool,
        tls: TlsFiles | None = None,
    ) -> None:
        """`host`, `port` and `addresses` are the server's. `values` includes the contents of values.

        With `tls`, connections to the server are encrypted.
        """
        self.tls = tls
        self.host = host
        self.port = port
        self.addresses = addresses
        self.file = file
        self.processes = Processes()
        self.rows = RowEncoder(self.now(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), values)
        self.entered = False
        """Whether a client has asked for a named store."""
        self.connections = 0
        self.requests = 0
        """Number of requests on ended connections."""
        self.log = RateLimitedLog()
        self.open: set[RecordedConnection] = set()
        self._failed = False

    def now(self) -> float:
        return time.monotonic()

    async def connect(self) -> socket.socket:
        """Return a socket that is connected to the server. Raises OSError."""
        peer = await start_connection(self.addresses, happy_eyeballs_delay=_STAGGER)
        return peer if self.tls is None else await encrypt(peer, self.tls, self.host)

    async def flush_regularly(self) -> None:
        """Flush rows to the file until canceled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            self.flush()

    def flush(self) -> None:
        """Pass the rows so far to the file; log once if recording has failed."""
        self.file.write(self.rows.take())
        if self.file.error and not self._failed:
            self._failed = True
            log.error("recording stopped (traffic is still being forwarded): %s", self.file.error)

    def finish(self) -> None:
        """Close all connections and end the recording."""
        for connection in list(self.open):
            connection.close()
        self.rows.add(self.now(), -1, "END")
        self.flush()
        self.file.close()
        self.log.flush()


class RecordedConnection(ForwardedConnection):
    """A client's connection and its counterpart to the server."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.connect)
        self.recorder = recorder
        self._observer: Observer | None = None
        self._ended = False

    def accepted(self, address: str) -> None:
        recorder = self.recorder
        recorder.open.add(self)
        self._observer = Observer(recorder.rows, recorder.connections, address, recorder.processes, recorder.now())
        recorder.connections += 1
        super().accepted(address)

    def failed(self, address: str, error: OSError) -> None:
        recorder = self.recorder
        where = format_address(recorder.host, recorder.port)
        recorder.log.add("upstream", f"cannot connect to {where} for {address}, retrying: {error.strerror or error}")

    def passed(self, by_client: bool, data: bytes) -> None:
        """Forward bytes, then record them."""
        super().passed(by_client, data)
        observer = self._observer
        if observer is None:
            return
        try:
            (observer.sent if by_client else observer.replied)(data, self.recorder.now())
        except Exception as error:  # a defect here must not end the job
            self._observer = None
            self.recorder.log.add("defect", f"stopped recording a connection: {type(error).__name__}: {error}")
        else:
            if observer.entered and not self.recorder.entered:
                self.recorder.entered = True
                log.warning(
                    "the job uses named stores: its recording can be summarized but not replayed; to replay it, record "
                    "the job without TCPSTORE_SERVER_URL or server=, and torchrun with --rdzv-conf named_store=0"
                )

    def ended(self, by_client: bool) -> None:
        """Record that one side has closed the connection."""
        if self._ended:
            return
        self._ended = True
        observer = self._observer
        if observer is not None:
            self._observer = None
            self.recorder.requests += observer.count
            observer.closed("client" if by_client else "server", self.recorder.now())

    def lost(self, by_client: bool, error: Exception | None) -> None:
        super().lost(by_client, error)
        self.recorder.open.discard(self)


async def record(
    upstream: tuple[str, int],
    path: Path,
    *,
    host: str,
    port: int,
    fd: int | None = None,
    values: bool = False,
    tls: TlsFiles | None = None,
    ready: Callable[[str, int], None],
) -> Recorder:
    """Forward connections to the server at `upstream` and record them into a file, until SIGTERM or SIGINT.

    `ready` is called with host and port once connections are accepted; an existing file is kept until it returns.
    Returns the recorder, whose `file.error` tells whether all was written. Raises DistNetworkError if the address, or
    the socket `fd`, cannot be used, or the server's name cannot be resolved, and RecordingError if the file cannot be
    written. With `tls`, connections to the server are encrypted.
    """
    raise_file_limit()
    files = None if tls is None else checked(tls)
    addresses = await _resolve(*upstream)
    listener = listen(host, port) if fd is None else adopt(fd)
    try:
        if listener.getsockname()[:2] in [address[4][:2] for address in addresses]:
            raise RecordingError(f"{format_address(*upstream)} is the recorder's own address, not a server's")
        recorder = Recorder(*upstream, addresses, RecordingFile(path), values, files)
        try:
            await _forward(recorder, listener, ready)
        finally:
            recorder.finish()
    finally:
        with suppress(OSError):
            listener.close()
    return recorder


async def _resolve(host: str, port: int) -> list[AddrInfoType]:
    """Look up the server's name, once. Raises DistNetworkError."""
    try:
        return [*await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DistNetworkError(f"cannot resolve {host}: {reason}") from None


async def _forward(recorder: Recorder, listener: socket.socket, ready: Callable[[str, int], None]) -> None:
    """Accept connections until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    log_short_backlog()
    stop: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.set_exception_handler(lambda _, context: _log_failure(recorder, context))
    server = await loop.create_server(lambda: RecordedConnection(recorder).client, sock=listener, backlog=BACKLOG)
    ready(*listener.getsockname()[:2])
    recorder.file.start()
    flushing = loop.create_task(recorder.flush_regularly())
    try:
        await stop
        server.close()
    finally:
        flushing.cancel()


def _log_failure(recorder: Recorder, context: dict[str, Any]) -> None:
    """Log an error of the loop itself, such as too many open files."""
    error = context.get("exception")
    text = str(context.get("message", "error"))
    recorder.log.add("loop", text if error is None else f"{text}: {error or type(error).__name__}")
