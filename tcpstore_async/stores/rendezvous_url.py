"""Rendezvous by URL: tcp://, tcps://, env://, file:// and registered schemes give a store, a rank and a world size.

Invariant: a URL and an environment mean the same as in PyTorch, errors included; extensions are opt-in and have their
own variables and parameters (TCPSTORE_JOIN, `join`). This module must not know how stores work.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from numbers import Integral
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import ParseResult, quote, urlparse, urlunparse

from ..base.addresses import unbracketed
from ..base.coercion import Timeout
from ..client.server_url import ServerUrl, bracket_hint
from ..client.url_variables import SERVER_URL
from .base import Store
from .file import FileStore
from .prefix import PrefixStore
from .tcp import TCPStore

log = logging.getLogger("tcpstore_async.stores")

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)

ROUND_VARIABLE: Final = "TCPSTORE_ROUND"
"""Environment variable that our torchrun handler sets for workers: the name of their round, which is never reused."""

Found = tuple[Store, int, int]
"""The store, this process's rank and the world size."""

Handler = Callable[..., Iterator[Found]]


class Place(NamedTuple):
    """The server where the ranks of a job meet, and this process's rank."""

    host: str
    port: int
    rank: int
    world_size: int
    use_libuv: bool
    prefix: str
    """Prefix of every key on a server that is already running; empty if rank 0 hosts one."""
    tls: bool | None = None
    """Whether to use TLS; None leaves it to TCPSTORE_TLS."""

    def hosts(self) -> bool:
        """Return whether this process hosts the server."""
        return self.rank == 0 and not self.prefix and not self.agent_hosts()

    def agent_hosts(self) -> bool:
        """Return whether torchrun's agent hosts the server."""
        return _is_agent_address(self.host, self.port)


class FilePlace(NamedTuple):
    """The file where the ranks of a job meet, and this process's rank."""

    path: str
    rank: int
    world_size: int


P = TypeVar("P", Place, FilePlace)
S = TypeVar("S")


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Found]:
    """Meet the other ranks at a URL: yield the store, this process's rank and the world size, once.

    A `rank` or `world_size` of -1 is taken from the URL or the environment. The option `timeout`, 30 minutes by
    default, applies to the rendezvous and to the store.

    Raises the same errors as PyTorch, with the same texts: RuntimeError for an unknown scheme, AssertionError if the
    rank or the world size is given twice, ValueError if a parameter is missing or not a number, and the errors of the
    stores. A second `next()` raises RuntimeError.
    """
    if not isinstance(url, (str, bytes)):
        raise RuntimeError(f"`url` must be a string. {type(url)}: {url}")
    if not isinstance(rank, Integral):
        raise RuntimeError(f"`rank` must be an integer. {rank}")
    if not isinstance(world_size, Integral):
        raise RuntimeError(f"`world_size` must be an integer. {world_size}")
    parts: Any = urlparse(url)
    if rank != -1 or world_size != -1:
        parts = _with_ranks(url, parts, rank, world_size)
    handler = _handlers.get(parts.scheme)
    if handler is None:
        raise RuntimeError(f"No rendezvous handler for {parts.scheme}://")
    return handler(urlunparse(parts), **options)


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a handler for the URLs of a scheme. `rendezvous` calls it with the URL and its options.

    Raises RuntimeError if the scheme already has a handler.
    """
    if scheme in _handlers:
        raise RuntimeError(f"Rendezvous handler for {scheme}:// already registered")
    _handlers[scheme] = handler


# Parsing


def read_tcp(url: str) -> Place:
    """Parse tcp://HOST:PORT?rank=R&world_size=N, optionally with use_libuv=0|1 and join=0|1. Raises ValueError.

    tcps:// is the same with TLS.
    """
    parts = urlparse(url)
    if "," in parts.netloc:
        raise _error(
            "tcp",
            f"the URL has several servers, which no rank hosts: set {SERVER_URL}={parts.scheme}://{parts.netloc}, and "
            "let the URL name the store of the job, as in tcp://job-17:1",
        )
    try:
        port = parts.port
    except ValueError as error:
        hint = bracket_hint(url)
        if not hint:
            raise
        raise _error("tcp", f"{error}{hint}") from None
    if port is None:
        raise _error("tcp", "port number missing")
    query = _query(parts.query)
    rank, world_size = _ranks(query, "tcp")
    if parts.hostname is None:
        raise AssertionError("hostname cannot be None")
    return _place(parts.hostname, port, rank, world_size, query, True if parts.scheme == "tcps" else None)


def read_env(url: str) -> Place:
    """Parse env://, which uses MASTER_ADDR, MASTER_PORT and, unless the query has them, RANK and WORLD_SIZE.

    Raises ValueError.
    """
    query = _query(urlparse(url).query)
    rank = int(query["rank"]) if "rank" in query else _number("RANK")
    world_size = int(query["world_size"]) if "world_size" in query else _number("WORLD_SIZE")
    host, port = unbracketed(_variable("MASTER_ADDR")), _number("MASTER_PORT")
    if port not in range(65536):
        raise ValueError(f"port must have value from 0 to 65535 but was {port}. Check MASTER_PORT.")
    return _place(host, port, rank, world_size, query)


def read_file(url: str) -> FilePlace:
    """Parse file:///PATH?rank=R&world_size=N. Raises ValueError."""
    parts = urlparse(url)
    if not parts.path:
        raise _error("file", "path missing")
    return FilePlace(parts.path, *_ranks(_query(parts.query), "file"))


def _with_ranks(url: str, parts: ParseResult, rank: int, world_size: int) -> ParseResult:
    query = _query(parts.query)
    if "rank" in query or "world_size" in query:
        raise AssertionError(f"The url: {url} has node-specific arguments(rank, world_size) already.")
    if rank != -1:
        query["rank"] = str(rank)
    if world_size != -1:
        query["world_size"] = str(world_size)
    return parts._replace(query="&".join(f"{name}={text}" for name, text in query.items()))


def _query(text: str) -> dict[str, str]:
    """Parse a query as PyTorch does: the last of equal names wins, and nothing is unquoted. Raises IndexError."""
    parameters = {}
    for pair in filter(None, text.split("&")):
        name, *values = pair.split("=")
        if not values:
            raise IndexError(f"parameter {pair!r} in the URL's query has no value")
        parameters[name] = values[0]
    return parameters


def _ranks(query: dict[str, str], scheme: str) -> tuple[int, int]:
    if "rank" not in query:
        raise _error(scheme, "rank parameter missing")
    if "world_size" not in query:
        raise _error(scheme, "world size parameter missing")
    return int(query["rank"]), int(query["world_size"])


def _place(host: str, port: int, rank: int, world_size: int, query: dict[str, str], tls: bool | None = None) -> Place:
    """Build a `Place`. The query has precedence over the environment; any use_libuv other than 1 means no."""
    libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    join = query.get("join", os.environ.get("TCPSTORE_JOIN", "")) or "0"
    if join not in ("0", "1"):
        raise ValueError(f"TCPSTORE_JOIN or the URL's join parameter must be 0 or 1, not {join!r}")
    prefix = ""
    if join == "1":
        prefix = _job_prefix()
        _warn_of_joining(ServerUrl(host, port, tls is True))
    return Place(host, port, rank, world_size, libuv, prefix, tls)


_warned = False


def _warn_of_joining(server: ServerUrl) -> None:
    """Name what replaces TCPSTORE_JOIN, once in a process."""
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "TCPSTORE_JOIN (join=1) and TCPSTORE_JOB are deprecated: set %s=%s, and let the address name the store of "
            "the job, for example MASTER_ADDR=job-17 MASTER_PORT=1",
            SERVER_URL,
            server,
        )


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise _error("env", f"environment variable {name} expected, but not set")
    return text


def _number(name: str) -> int:
    text = _variable(name)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{error} (value of {name})") from None


def _error(scheme: str, text: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {text}")


def _is_agent_address(host: str, port: int) -> bool:
    """Return whether torchrun's agent hosts the server at this address, by the rule of PyTorch's rendezvous since 2.15.

    TCPStore has another rule: `stores.tcp._is_agent_port`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return (host, str(port)) == (unbracketed(os.environ.get("MASTER_ADDR", "")), os.environ.get("MASTER_PORT"))


def _job_prefix() -> str:
    """Return the prefix that separates this attempt of this job from all others on a server."""
    job = os.environ.get("TCPSTORE_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if not job:
        raise ValueError(
            "joining a running server requires a job name that is unique on that server: set TCPSTORE_JOB; or, instead "
            "of TCPSTORE_JOIN, set TCPSTORE_SERVER_URL=tcp://HOST:PORT, where a job has a named store"
        )
    return f"{quote(job, safe='')}/{_attempt()}"  # a quoted slash cannot reach into another job's keys


def _attempt() -> str:
    """Return the user's attempt number, our torchrun handler's round, or the restart count of a single agent."""
    attempt = os.environ.get("TCPSTORE_ATTEMPT")
    if attempt:
        if not re.fullmatch("[0-9]+", attempt):
            raise ValueError(f"TCPSTORE_ATTEMPT must be a number, not {attempt!r}")
        return attempt
    round_name = os.environ.get(ROUND_VARIABLE)
    if round_name:
        return round_name
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # Each agent counts only the restarts that its own workers have caused.
        raise ValueError(
            "cannot join a running server from several torchrun agents: torchrun provides no value that all workers "
            "share and that changes with each restart. Use --rdzv-backend=tcpstore, or set TCPSTORE_ATTEMPT to a "
            "number that is the same on all ranks and changes with each restart"
        )
    return restarts or "0"


# Handlers


def open_store(place: Place, timeout: Timeout) -> Store:
    """Open the store of a place; rank 0 hosts the server unless torchrun's agent does or one is joined."""
    if place.prefix:
        joined = TCPStore(place.host, place.port, timeout=timeout, use_libuv=place.use_libuv, tls=place.tls, server="")
        return PrefixStore(place.prefix, joined, owns=True)
    return TCPStore(
        place.host,
        place.port,
        place.world_size,
        place.hosts(),
        timeout,
        multi_tenant=True,
        use_libuv=place.use_libuv,
        tls=place.tls,
    )


def _open_file(place: FilePlace, timeout: Timeout) -> FileStore:
    return FileStore(place.path, place.world_size, timeout=timeout, new_round=True)


def make_handlers(
    open_store: Callable[[Place, Timeout], S], open_file: Callable[[FilePlace, Timeout], S]
) -> dict[str, Callable[..., Iterator[tuple[S, int, int]]]]:
    """Return handlers of tcp://, tcps://, env:// and file:// URLs, keyed by scheme, that open stores with these."""
    return {
        "tcp": _handler(read_tcp, open_store, "re-rendezvous using tcp://"),
        "tcps": _handler(read_tcp, open_store, "re-rendezvous using tcps://"),
        "env": _handler(read_env, open_store, "re-rendezvous using env://"),
        "file": _handler(read_file, open_file, "rerendezvous using file://"),
    }


def _handler(
    read: Callable[[str], P], open_store: Callable[[P, Timeout], S], again: str
) -> Callable[..., Iterator[tuple[S, int, int]]]:
    def rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[S, int, int]]:
        place = read(url)
        store = open_store(place, timeout)
        yield store, place.rank, place.world_size
        raise RuntimeError(f"Unable to perform {again} method")

    return rendezvous


_handlers: Final[dict[str, Handler]] = {**make_handlers(open_store, _open_file)}
