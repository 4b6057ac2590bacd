"""Serves answers over HTTP/1.1, to browsers and collectors of metrics.

Knows sockets and HTTP. Must not know what is answered.
Invariants: a bounded number of connections, each with a bounded request and a deadline for it. Only GET and HEAD are
served, and change nothing. Lines are sent no faster than they are read, and for a minute at most. A page of another
origin can neither embed nor read an answer, whatever name it has resolved to this address: a request must name the host
by an address, as localhost, or by the name given at the start.
"""

import io
import ipaddress
import itertools
import logging
import socket
import threading
import time
from collections import OrderedDict
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from ...server.peer_user import PeerUsers, UnknownOwnerError
from .answers import TEXT, Answer, Answers, Lines

log = logging.getLogger("tcpstore_async.web")

MOST_CONNECTIONS: Final = 32

_MOST_BYTES: Final = 16 * 1024
"""Most bytes of a request."""
_REQUEST_SECONDS: Final = 15.0
"""Longest time from one answer to the end of the next request."""
_WRITE_SECONDS: Final = 15.0
"""Timeout of one write."""
_LINES_SECONDS: Final = 60.0
"""Longest time to write all lines of an answer."""
_CLOSE_SECONDS: Final = 1.0
"""Longest time until an evicted connection is closed."""

_RETRY_SECONDS: Final = 5

_LINES: Final = "application/x-ndjson"

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 5\r\n\r\n"

_PROBES: Final = ("/livez", "/readyz")
"""Paths of health checks."""
_FOR_EVERYBODY: Final = (*_PROBES, "/metrics")
"""Paths whose answers name no key, host or rank; and stores only for the same user."""


class HttpServer(ThreadingHTTPServer):
    """Serves on a listening socket."""

    daemon_threads = True
    block_on_close = False  # the end of the process closes connections

    def __init__(
        self, listener: socket.socket, answers: Answers, names: frozenset[str], users: PeerUsers | None = None
    ) -> None:
        """`names` are the accepted names of the host, in lower case, besides its addresses.

        With `users`, only processes of this process's user on this host, and root's, see answers with keys or hosts.
        """
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.answers = answers
        self.names = names
        self._users = users
        self._users_lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._awaiting: OrderedDict[socket.socket, None] = OrderedDict()
        """Connections that have not sent their next request in full, longest wait first."""
        self._awaiting_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, unless too many others are serving a request."""
        if not self._free.acquire(blocking=False) and not self._take_place():
            with suppress(OSError):
                request.setblocking(False)
                request.send(_FULL)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def _take_place(self) -> bool:
        """Close the connection that has sent no request for longest, and take its place; return False if there is none.

        Otherwise a few silent peers could block health checks.
        """
        with self._awaiting_lock:
            if not self._awaiting:
                return False
            oldest, _ = self._awaiting.popitem(last=False)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=_CLOSE_SECONDS)

    def await_request(self, connection: socket.socket) -> None:
        """Note that a connection must send a request."""
        with self._awaiting_lock:
            self._awaiting[connection] = None

    def request_arrived(self, connection: socket.socket) -> None:
        """Note that a connection has sent its request, or has ended."""
        with self._awaiting_lock:
            self._awaiting.pop(connection, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; its descriptor may be reused from now on."""
        self.request_arrived(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a connection failed."""
        log.debug("an HTTP connection failed", exc_info=True)

    def is_same_user(self, connection: socket.socket) -> bool:
        """Return whether the peer may see everything."""
        if self._users is None:
            return True
        with self._users_lock:
            try:
                return self._users.look_up(connection) in (self._users.user, 0)
            except UnknownOwnerError:
                return False


class _Input(io.RawIOBase):
    """The input of a connection, which ends if a request has too many bytes or is too late."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = 0.0
        self._left = 0

    def begin(self) -> None:
        """Expect a request."""
        self._deadline = time.monotonic() + _REQUEST_SECONDS
        self._left = _MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0 or self._left <= 0:
            raise TimeoutError("the request is too long, or took too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # HTTP/0.9 has no headers, which protect the answers
    disable_nagle_algorithm = True  # lines are written one by one
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._input = _Input(self.connection)
        self.rfile = io.BufferedReader(self._input)

    def handle_one_request(self) -> None:
        self._input.begin()
        self.server.await_request(self.connection)
        super().handle_one_request()

    def version_string(self) -> str:
        return "tcpstore"

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_HEAD(self) -> None:
        self._send(self._answer())

    def _answer(self) -> Answer | Lines:
        self.server.request_arrived(self.connection)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read
            return Answer(400, TEXT, b"requests with a body are not accepted\n")
        hosts = self.headers.get_all("Host") or []
        if len(hosts) > 1 or not all(self._is_own(host) for host in hosts):
            return Answer(421, TEXT, b"use this host's address, localhost, or the name given to --http\n")
        path, _, parameters = self.path.partition("?")
        try:
            query = dict(parse_qsl(parameters, max_num_fields=16))
        except ValueError:
            return Answer(400, TEXT, b"invalid query\n")
        same_user = path in _PROBES or self.server.is_same_user(self.connection)
        if path not in _FOR_EVERYBODY:
            if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and path != "/":
                return Answer(403, TEXT, b"cross-site requests are not allowed\n")
            if not same_user:
                return Answer(
                    403, TEXT, b"only processes running as the server's user, on the server's host, may access this\n"
                )
        found = self.server.answers.answer(path, query, self.headers.get("Accept", ""), names=same_user)
        return Answer(404, TEXT, b"there is nothing here\n") if found is None else found

    def _is_own(self, host: str) -> bool:
        """Return whether the host of a request is this one: a foreign name may be made to resolve to this address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.server.names:
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True

    def _send(self, answer: Answer | Lines) -> None:
        if isinstance(answer, Lines):
            with closing(answer.rest):
                self._send_lines(answer)
            return
        self._send_head(answer.status, answer.type)
        if answer.status == 405:
            self.send_header("Allow", "GET, HEAD")
        if answer.retry:
            self.send_header("Retry-After", str(_RETRY_SECONDS))
        self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _send_head(self, status: int, content: str) -> None:
        self.connection.settimeout(_WRITE_SECONDS)
        self.send_response(status)
        for name, text in _HEADERS.items():
            self.send_header(name, text)
        self.send_header("Content-Type", content)

    def _send_lines(self, answer: Lines) -> None:
        """Send lines as they arrive, then close the connection; the last line says that it is the last."""
        self.close_connection = True
        self._send_head(200, _LINES)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        deadline = time.monotonic() + _LINES_SECONDS
        for line in itertools.chain([answer.first], answer.rest):
            self.connection.settimeout(min(_WRITE_SECONDS, max(0.001, deadline - time.monotonic())))
            self.wfile.write(line)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an error of the base class, which reports unknown methods as 501."""
        self.close_connection = True
        code = 405 if code == 501 else code
        self._send(Answer(code, TEXT, f"{code} {self.responses.get(code, ('error',))[0]}\n".encode()))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: any peer could fill the log."""
