"""From a URL to a store, a rank and a world size: tcp://, env:// and file://, and whatever else is registered.

Knows: what PyTorch's URLs and environment variables mean, and its errors; who hosts. Must not know: how stores work.
Invariant: the same URL and environment mean here what they mean in PyTorch; what goes beyond is asked for by name.
"""

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from numbers import Integral
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import ParseResult, quote, urlparse, urlunparse

from .coercion import Timeout
from .stores.base import Store
from .stores.file import FileStore
from .stores.prefix import PrefixStore
from .stores.tcp import TCPStore

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)

ROUND_VARIABLE: Final = "TCPSTORE_ROUND"
"""In the environment of workers: what our torchrun handler calls their round. The same for all, never used again."""

Found = tuple[Store, int, int]
"""A store, this process's rank, and how many there are."""

Handler = Callable[..., Iterator[Found]]


class Place(NamedTuple):
    """Where the ranks of a job meet on a server, and who this process is among them."""

    host: str
    port: int
    rank: int
    world_size: int
    use_libuv: bool
    prefix: str
    """Before every key, on a server that runs already; empty where rank 0 hosts."""

    def hosts(self) -> bool:
        """Whether this process is to host the server."""
        return self.rank == 0 and not self.prefix and not _is_agent_address(self.host, self.port)


class FilePlace(NamedTuple):
    """The same for a file."""

    path: str
    rank: int
    world_size: int


P = TypeVar("P", Place, FilePlace)
S = TypeVar("S")


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Found]:
    """Meet at a URL: yields the store, this process's rank and the world size, once.

    `rank` and `world_size` go into the query unless they are -1, which leaves them to the URL or the environment.
    `timeout`, 30 minutes by default, is that of meeting and of the store. Errors and their texts are PyTorch's:
    RuntimeError for a scheme that nobody handles, AssertionError if rank or size are given twice, ValueError for
    what is missing or no number; and those of the stores. Asking for more than the one result raises RuntimeError.
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
    """Have `rendezvous` call a handler for URLs of this scheme; it gets the URL and the options.

    Raises RuntimeError if there is one already.
    """
    if scheme in _handlers:
        raise RuntimeError(f"Rendezvous handler for {scheme}:// already registered")
    _handlers[scheme] = handler


# What a URL means


def read_tcp(url: str) -> Place:
    """tcp://HOST:PORT?rank=R&world_size=N, with use_libuv=0 or 1 and join=1 if wanted."""
    parts = urlparse(url)
    if parts.port is None:
        raise _error("tcp", "port number missing")
    query = _query(parts.query)
    rank, world_size = _ranks(query, "tcp")
    if parts.hostname is None:
        raise AssertionError("hostname cannot be None")
    return _place(parts.hostname, parts.port, rank, world_size, query)


def read_env(url: str) -> Place:
    """env://, with MASTER_ADDR and MASTER_PORT; rank and size from the query, else from RANK and WORLD_SIZE."""
    query = _query(urlparse(url).query)
    rank = int(query["rank"]) if "rank" in query else _number("RANK")
    world_size = int(query["world_size"]) if "world_size" in query else _number("WORLD_SIZE")
    host, port = _variable("MASTER_ADDR"), _number("MASTER_PORT")
    if port not in range(65536):
        raise ValueError(f"port must have value from 0 to 65535 but was {port}. It is that of MASTER_PORT.")
    return _place(host, port, rank, world_size, query)


def read_file(url: str) -> FilePlace:
    """file:///PATH?rank=R&world_size=N."""
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
    """The pairs of a query; of the same name the last counts. Nothing is unquoted. Raises IndexError without a `=`."""
    found = {}
    for pair in filter(None, text.split("&")):
        name, *values = pair.split("=")
        if not values:
            raise IndexError(f"list index out of range: {pair!r} in the URL's query has no value")
        found[name] = values[0]
    return found


def _ranks(query: dict[str, str], scheme: str) -> tuple[int, int]:
    if "rank" not in query:
        raise _error(scheme, "rank parameter missing")
    if "world_size" not in query:
        raise _error(scheme, "world size parameter missing")
    return int(query["rank"]), int(query["world_size"])


def _place(host: str, port: int, rank: int, world_size: int, query: dict[str, str]) -> Place:
    """Of use_libuv only exactly 1 means yes; the query comes before the environment."""
    libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    join = query.get("join", os.environ.get("TCPSTORE_JOIN", "")) or "0"
    if join not in ("0", "1"):
        raise ValueError(f"TCPSTORE_JOIN, or join in the URL, must be 1 or 0, not {join!r}")
    return Place(host, port, rank, world_size, libuv, _job_prefix() if join == "1" else "")


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
        raise ValueError(f"{error}, which is the value of {name}") from None


def _error(scheme: str, text: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {text}")


def _is_agent_address(host: str, port: int) -> bool:
    """Whether torchrun's agent hosts the server at this address, by the rule of PyTorch's rendezvous since 2.15.

    TCPStore's own rule is another one: `stores.tcp._is_agent_port`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return (host, str(port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))


def _job_prefix() -> str:
    """What keeps the keys of this job, and this attempt of it, apart from all others on the same server."""
    job = os.environ.get("TCPSTORE_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if not job:
        raise ValueError(
            "to join a server that runs already, a job needs a name that no other job on it has: set TCPSTORE_JOB"
        )
    return f"{quote(job, safe='')}/{_attempt()}"  # a name with a slash must not lie among another job's keys


def _attempt() -> str:
    """The attempt the user names, else the round our torchrun handler names, else torchrun's count of a lone agent."""
    named = os.environ.get("TCPSTORE_ATTEMPT")
    if named:
        if not re.fullmatch("[0-9]+", named):
            raise ValueError(f"TCPSTORE_ATTEMPT must be a number, not {named!r}")
        return named
    made = os.environ.get(ROUND_VARIABLE)
    if made:
        return made
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if count and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # each agent counts only those restarts that its own workers caused
        raise ValueError(
            "torchrun tells the workers of several agents nothing that they have in common and that a restart changes, "
            "so their keys cannot be kept apart on a server that runs already: use --rdzv-backend=tcpstore, "
            "or set TCPSTORE_ATTEMPT to a number that is the same on all ranks and new after a restart"
        )
    return count or "0"


# Handlers


def open_store(place: Place, timeout: Timeout) -> Store:
    """The store of a place; rank 0 hosts it, unless somebody else does."""
    if place.prefix:
        joined = TCPStore(place.host, place.port, timeout=timeout, use_libuv=place.use_libuv)
        return PrefixStore(place.prefix, joined, owns=True)
    return TCPStore(
        place.host,
        place.port,
        place.world_size,
        place.hosts(),
        timeout,
        multi_tenant=True,
        use_libuv=place.use_libuv,
    )


def _open_file(place: FilePlace, timeout: Timeout) -> FileStore:
    return FileStore(place.path, place.world_size, timeout=timeout, new_round=True)


def make_handlers(
    open_store: Callable[[Place, Timeout], S], open_file: Callable[[FilePlace, Timeout], S]
) -> dict[str, Callable[..., Iterator[tuple[S, int, int]]]]:
    """Return handlers of tcp://, env:// and file:// URLs, by scheme, whose stores these functions open."""
    return {
        "tcp": _handler(read_tcp, open_store, "re-rendezvous using tcp://"),
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
