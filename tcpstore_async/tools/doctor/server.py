"""Checks of a server: whether it can be reached, what it is, and how long a round trip takes."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from ...base.addresses import format_address
from ...base.errors import AccessDeniedError, DistError
from ...client.aio import AsyncTCPStore
from ...client.connect import NO_ANSWER
from ...server.port_holder import Holder
from ...session.identity import Identity
from .finding import FAIL, OK, WARN, Finding

_ROUND_TRIPS: Final = 20

_SLOW: Final = 0.02
"""Seconds of a round trip above which the network or the server is slow."""


class Way(NamedTuple):
    """How a server is reached."""

    host: str
    port: int
    connect: Callable[[], Awaitable[AsyncTCPStore]]
    """Returns a store, to be closed after use. Raises DistError."""


def check_server(way: Way, seconds: float, find_listener: Callable[[], Holder | None] = lambda: None) -> list[Finding]:
    """Check a server, ours or PyTorch's, within `seconds`.

    `find_listener` returns the process that listens there, if it is on this machine and can be found.
    """
    host, port = way.host, way.port

    def unreachable(reason: str) -> Finding:
        listener = find_listener() if NO_ANSWER in reason else None
        return _unreachable(host, port, reason) if listener is None else _silent(host, port, listener)

    connected: list[float] = []
    try:
        return asyncio.run(asyncio.wait_for(_examine(way, connected), seconds + 1))
    except asyncio.TimeoutError:
        return [unreachable(f"{NO_ANSWER} within {seconds:g} s")]
    except AccessDeniedError as error:
        text = f"{format_address(host, port)} refuses this client: {error}"
        return [Finding("server", FAIL, text, _credentials(str(error)))]
    except DistError as error:
        if connected:
            text = f"{format_address(host, port)} accepts the connection and then closes it: {error}"
            return [Finding("server", FAIL, text, "see its log; if it requires a token, use --token-file FILE")]
        return [unreachable(str(error))]


def _credentials(refusal: str) -> str:
    """Return the command that gives a client the missing credentials."""
    if "requires TLS" in refusal:
        return "export TCPSTORE_TLS=1 TCPSTORE_CA=FILE (the certificate of the CA that signed the server's)"
    return "export TCPSTORE_TOKEN_FILE=FILE (from tcpstore token create)"


def _unreachable(host: str, port: int, reason: str) -> Finding:
    text = f"{format_address(host, port)} cannot be used: {reason}"
    return Finding("server", FAIL, text, f"on {host}: tcpstore serve --host :: --port {port}")


def _silent(host: str, port: int, listener: Holder) -> Finding:
    """Report a listener that does not answer: no other server could use the port."""
    if listener.pid:
        fix = f"see what that process is doing (T is stopped): ps -o stat,wchan:32,args -p {listener.pid}"
    else:
        fix = "run this command as root, outside of containers, to see which process that is"
    text = f"{format_address(host, port)} cannot be used: {listener} holds the port and does not answer"
    return Finding("server", FAIL, text, fix)


async def _examine(way: Way, connected: list[float]) -> list[Finding]:
    """Return the findings about a server; append to `connected` the seconds that connecting took."""
    began = time.perf_counter()
    async with await way.connect() as store:
        connected.append(time.perf_counter() - began)
        server = await store.server()
        trips = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            await store.ping()
            trips.append(time.perf_counter() - began)
    where = f"{format_address(way.host, way.port)}, connected in {1000 * connected[0]:.1f} ms"
    return [Finding("server", OK, f"{_described(server)} at {where}"), round_trips(trips)]


def _described(server: Identity | None) -> str:
    if server is None:
        return "PyTorch's server or a compatible one (unknown version)"
    return f"{server.server} {server.version} ({server.backend} backend, {server.build} build)"


def round_trips(trips: list[float]) -> Finding:
    """Judge the seconds that round trips took."""
    median = statistics.median(trips)
    text = f"a round trip takes {1000 * median:.2f} ms (median), {1000 * max(trips):.2f} ms (maximum)"
    if median <= _SLOW:
        return Finding("round trip", OK, text)
    return Finding("round trip", WARN, text, "tcpstore serve on a host that is closer or less busy")
