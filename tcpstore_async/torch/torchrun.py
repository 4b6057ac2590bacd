"""`torchrun --rdzv-backend=tcpstore`: PyTorch's dynamic rendezvous with agents and workers on our servers.

PyTorch finds `create_handler` through the entry point `torchrun.handlers`, which is `autoload.torchrun_handler`.

Two invariants. An agent never joins the rendezvous of a job that has closed or whose agents have stopped sending
heartbeats: the next job with the same id gets an epoch, and so keys, of its own. Workers of one round never see the
keys of another: each round has a server of its own, and a name in the workers' environment for those that join a server
that runs already.
"""

import inspect
import logging
import math
import os
import secrets
import time
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from .. import errors
from ..rendezvous_url import ROUND_VARIABLE
from .stores import PrefixStore, Store, TCPStore

BACKEND: Final = "tcpstore"
DEFAULT_PORT: Final = 29400
"""The default port of torchrun's own backend."""

_NO_STATE: Final = C10dRendezvousBackend._NULL_SENTINEL.encode()

_BEAT: Final = "tcpstore.beat"
_CLOSED: Final = "tcpstore.closed"
"""Keys in which the agents of an epoch leave their last heartbeat, and that it is closed."""

_ROUND_KEY: Final = "tcpstore.round"

_KEEP_ALIVE: Final = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
"""Seconds between an agent's heartbeats, and how many may be missing before it is taken for dead."""

_LOOKS: Final = 20
"""How many times a possibly dead agent is checked within its keep-alive time."""

log = logging.getLogger("tcpstore_async.torchrun")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous handler of one agent. The endpoint's host hosts the server unless one runs there already.

    Options in `--rdzv-conf`, times in seconds: is_host, read_timeout (60), join_timeout (600), last_call_timeout (30),
    close_timeout (30), keep_alive_interval (5), keep_alive_max_attempt (3). Raises ValueError if one of them is not
    positive, RendezvousConnectionError if the server cannot be reached. Takes up to keep_alive_interval *
    keep_alive_max_attempt if the last agents of a job with this id seem to be dead.
    """
    keep_alive = _keep_alive(params)
    read_timeout = timedelta(seconds=_positive(params, "read_timeout", 60))
    timeouts = RendezvousTimeout(
        *(_seconds(params, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
    )
    store = _open_store(params, read_timeout)
    epoch = _enter(store, params.run_id, timedelta(seconds=math.prod({**_KEEP_ALIVE, **keep_alive}.values())))
    made: RendezvousHandler = _Handler.from_backend(
        params.run_id,
        epoch,
        _Backend(epoch, params.run_id),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        timeouts,
        **keep_alive,
    )
    return made


class _Backend(C10dRendezvousBackend):
    """PyTorch's backend under our name, which torchrun compares with `--rdzv-backend`.

    With each state, this agent writes a heartbeat for agents that must not unpickle the state.
    """

    @property
    def name(self) -> str:
        return BACKEND

    def set_state(self, state: bytes, token: Any = None) -> Any:
        cast(Any, self)._call_store("set", _BEAT, f"{time.time():.3f}")
        return super().set_state(state, token)


class _Handler(DynamicRendezvousHandler):
    """PyTorch's handler, but each round has a server of its own for its workers, and a name in their environment."""

    def next_rendezvous(self) -> Any:
        self._close_server()
        found = super().next_rendezvous()
        os.environ[ROUND_VARIABLE] = _name_round(found.store, found.rank)  # workers inherit it
        return found

    def set_closed(self) -> None:
        """Close the rendezvous as PyTorch does, and mark the epoch as closed."""
        self._mark_closed()
        super().set_closed()

    def shutdown(self) -> bool:
        """Shut down as PyTorch does, and close the stores; the server's grace lets the other agents do the same."""
        try:
            self._mark_closed()
            return bool(super().shutdown())
        finally:
            os.environ.pop(ROUND_VARIABLE, None)
            self._close_server()
            cast(PrefixStore, self._store).close()

    def _mark_closed(self) -> None:
        try:
            cast(PrefixStore, self._store).set(_CLOSED, "1")
        except errors.DistError as error:  # the store's host may have gone first, and the epoch with it
            log.info("could not mark the epoch as closed: %s", error)

    def _close_server(self) -> None:
        server, self._shared_tcp_store_server = getattr(self, "_shared_tcp_store_server", None), None
        self._bootstrap_store_info = None
        if server is not None:
            server.close()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return TCPStore("localhost", master_port, is_master=True)


def _name_round(store: Any, rank: int) -> str:
    """Agree with the other agents on a name for the round.

    It is random, because the server that the workers join may hold keys of earlier jobs that began at epoch 0 too.
    """
    if rank == 0:
        store.set(_ROUND_KEY, secrets.token_hex(8))
    return bytes(store.get(_ROUND_KEY)).decode()


def _open_store(params: RendezvousParameters, timeout: timedelta) -> Store:
    """Host the server, or connect to the one that runs already."""
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    asked = params.get_as_bool("is_host")
    hosts = _matches_machine_hostname(host) if asked is None else asked
    try:
        if hosts:
            try:
                store = TCPStore(host, port, is_master=True, timeout=timeout, multi_tenant=True)
                log.info("hosting the rendezvous server on port %d", store.port)
                return store
            except errors.DistNetworkError:
                if asked:
                    raise
                log.info("port %d is in use: connecting to the server there", port)
        return TCPStore(host, port, timeout=timeout)
    except errors.DistError as error:
        raise RendezvousConnectionError(f"cannot use the store at {host}:{port}: {error}") from error


def _seconds(params: RendezvousParameters, name: str) -> timedelta | None:
    number = params.get_as_int(name)
    return None if number is None else timedelta(seconds=number)


def _keep_alive(params: RendezvousParameters) -> dict[str, int]:
    """Return the keep-alive options that PyTorch's handler accepts: that of 2.6 accepts none and uses the defaults."""
    wanted = {name: _positive(params, name, default) for name, default in _KEEP_ALIVE.items()}
    accepted = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return {name: number for name, number in wanted.items() if name in accepted}


def _positive(params: RendezvousParameters, name: str, default: int) -> int:
    number = cast(int, params.get_as_int(name, default))
    if number <= 0:
        raise ValueError(f"The {name.replace('_', ' ')} must be a positive integer.")
    return number


# Epochs


class _Traces(NamedTuple):
    """What the agents of an epoch have written there."""

    closed: bool
    beat: bytes
    """When an agent last wrote the state, by its own clock; empty if there is no heartbeat."""
    state: bytes
    """PyTorch's pickled state. It is only compared, never unpickled here: the server is unauthenticated, so anybody may
    have written it."""


def _enter(store: Store, run_id: str, keep_alive: timedelta) -> Store:
    """Return the keys of a job's current epoch, or of a new epoch if the current one is over."""
    key = f"tcpstore.epoch.{run_id}"
    while True:
        epoch = int(store.compare_set(key, "", "0"))
        keys = PrefixStore(f"tcpstore.{run_id}.{epoch}", store, owns=True)
        over = _why_over(keys, run_id, keep_alive)
        if not over:
            return keys
        log.info("epoch %d of %s is over (%s): entering the next one", epoch, run_id, over)
        store.compare_set(key, str(epoch), str(epoch + 1))  # another agent may have done so already


def _why_over(keys: Store, run_id: str, keep_alive: timedelta) -> str:
    """Return why the rendezvous of an epoch must not be joined; empty if it may be.

    The age of a heartbeat proves nothing, as clocks differ: the agents are dead if nothing changes for `keep_alive`.
    """
    first = _read_traces(keys, run_id)
    if first.closed:
        return "closed"
    if not first.state or _is_recent(first.beat, keep_alive):
        return ""
    log.info("waiting up to %g s for a heartbeat from the last agents of %s", keep_alive.total_seconds(), run_id)
    end = time.monotonic() + keep_alive.total_seconds()
    while time.monotonic() < end:
        time.sleep(keep_alive.total_seconds() / _LOOKS)
        traces = _read_traces(keys, run_id)
        if traces.closed:
            return "closed"
        if traces != first:
            return ""
    return "no heartbeat"


def _is_recent(beat: bytes, keep_alive: timedelta) -> bool:
    """Whether a heartbeat is recent by this machine's clock."""
    try:
        return abs(time.time() - float(beat)) <= keep_alive.total_seconds()
    except ValueError:
        return False


def _read_traces(keys: Store, run_id: str) -> _Traces:
    state = _get_or_empty(keys, f"torch.rendezvous.{run_id}")
    return _Traces(keys.check([_CLOSED]), _get_or_empty(keys, _BEAT), b"" if state == _NO_STATE else state)


def _get_or_empty(keys: Store, key: str) -> bytes:
    return keys.get(key) if keys.check([key]) else b""
