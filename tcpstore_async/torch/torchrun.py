"""`torchrun --rdzv-backend=tcpstore`: agents meet on our server, and their workers on one too.

Knows: PyTorch's dynamic rendezvous, what tells a finished one from one that goes on. Must not know: how a store works.
Invariants: agents of a job that is over, closed or left without a heartbeat, are never met: the next job of the same
name has an epoch, and with it keys, of its own. Workers of one round never see the keys of another: it has a server of
its own, and a name, in their environment, for those who join a server that runs already.
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
"""Where torchrun's own backend listens, too."""

_NO_STATE: Final = C10dRendezvousBackend._NULL_SENTINEL.encode()

_BEAT: Final = "tcpstore.beat"
_CLOSED: Final = "tcpstore.closed"
"""What an epoch's agents say to those who come later, in keys of ours."""

_ROUND_KEY: Final = "tcpstore.round"

_KEEP_ALIVE: Final = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
"""The seconds between an agent's heartbeats, and how many of these may be missing until it is taken for dead."""

_LOOKS: Final = 20
"""How often an agent that may be dead is looked for within the time that it has to show itself."""

log = logging.getLogger("tcpstore_async.torchrun")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of one agent. The endpoint's host hosts the server, unless one runs there already.

    Options in `--rdzv-conf`, in seconds where they are times: is_host, read_timeout (60), join_timeout (600),
    last_call_timeout (30), close_timeout (30), keep_alive_interval (5), keep_alive_max_attempt (3). Raises
    ValueError if one of them is not a positive number, RendezvousConnectionError if the server cannot be reached.
    If the last agents of a job of this name seem to be dead, this takes keep_alive_interval * keep_alive_max_attempt.
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
    """PyTorch's, under our name, which torchrun compares with what it was asked for.

    It leaves a heartbeat beside each state that this agent writes, for those who must not unpickle that.
    """

    @property
    def name(self) -> str:
        return BACKEND

    def set_state(self, state: bytes, token: Any = None) -> Any:
        cast(Any, self)._call_store("set", _BEAT, f"{time.time():.3f}")
        return super().set_state(state, token)


class _Handler(DynamicRendezvousHandler):
    """PyTorch's, but each round has a server of its own for its workers, and a name that they are told."""

    def next_rendezvous(self) -> Any:
        self._close_server()
        found = super().next_rendezvous()
        os.environ[ROUND_VARIABLE] = _name_round(found.store, found.rank)  # workers inherit it
        return found

    def set_closed(self) -> None:
        """As PyTorch's, and whoever looks at this epoch from now on knows."""
        self._leave_mark()
        super().set_closed()

    def shutdown(self) -> bool:
        """As PyTorch's, and what was opened is closed: the other agents have the server's grace to do the same."""
        try:
            self._leave_mark()
            return bool(super().shutdown())
        finally:
            os.environ.pop(ROUND_VARIABLE, None)
            self._close_server()
            cast(PrefixStore, self._store).close()

    def _leave_mark(self) -> None:
        try:
            cast(PrefixStore, self._store).set(_CLOSED, "1")
        except errors.DistError as error:  # the host of the store may have gone first: so has the epoch
            log.info("the epoch could not be marked as closed: %s", error)

    def _close_server(self) -> None:
        server, self._shared_tcp_store_server = getattr(self, "_shared_tcp_store_server", None), None
        self._bootstrap_store_info = None
        if server is not None:
            server.close()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return TCPStore("localhost", master_port, is_master=True)


def _name_round(store: Any, rank: int) -> str:
    """What all agents of a round call it. Random: the server that the workers join may know of earlier epoch 0s."""
    if rank == 0:
        store.set(_ROUND_KEY, secrets.token_hex(8))
    return bytes(store.get(_ROUND_KEY)).decode()


def _open_store(params: RendezvousParameters, timeout: timedelta) -> Store:
    """Host the server, or join the one that runs."""
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    asked = params.get_as_bool("is_host")
    hosts = _matches_machine_hostname(host) if asked is None else asked
    try:
        if hosts:
            try:
                store = TCPStore(host, port, is_master=True, timeout=timeout, multi_tenant=True)
                log.info("hosting the server of the rendezvous at port %d", store.port)
                return store
            except errors.DistNetworkError:
                if asked:
                    raise
                log.info("port %d is taken: joining the server that is there", port)
        return TCPStore(host, port, timeout=timeout)
    except errors.DistError as error:
        raise RendezvousConnectionError(f"The store at {host}, port {port} cannot be used: {error}") from error


def _seconds(params: RendezvousParameters, name: str) -> timedelta | None:
    number = params.get_as_int(name)
    return None if number is None else timedelta(seconds=number)


def _keep_alive(params: RendezvousParameters) -> dict[str, int]:
    """What is asked for, as far as PyTorch's handler can be told: that of 2.6 keeps to the defaults."""
    asked = {name: _positive(params, name, default) for name, default in _KEEP_ALIVE.items()}
    takes = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return {name: number for name, number in asked.items() if name in takes}


def _positive(params: RendezvousParameters, name: str, default: int) -> int:
    number = cast(int, params.get_as_int(name, default))
    if number <= 0:
        raise ValueError(f"The {name.replace('_', ' ')} must be a positive integer.")
    return number


# Epochs


class _Signs(NamedTuple):
    """What the agents of an epoch have left there."""

    closed: bool
    beat: bytes
    """When, by its own clock, an agent last wrote the state; empty if none has said so."""
    state: bytes
    """PyTorch's own, pickled, and never unpickled here: whoever reaches an unauthenticated server may have written it.
    That it changes is what is seen of it."""


def _enter(store: Store, run_id: str, patience: timedelta) -> Store:
    """The keys of the present epoch of a job, or of a new one if that is over."""
    key = f"tcpstore.epoch.{run_id}"
    while True:
        epoch = int(store.compare_set(key, "", "0"))
        keys = PrefixStore(f"tcpstore.{run_id}.{epoch}", store, owns=True)
        over = _is_over(keys, run_id, patience)
        if not over:
            return keys
        log.info("epoch %d of %s is over (%s): entering the next one", epoch, run_id, over)
        store.compare_set(key, str(epoch), str(epoch + 1))  # if another has done so, that is as well


def _is_over(keys: Store, run_id: str, patience: timedelta) -> str:
    """Why the rendezvous of an epoch is not to be joined; empty if it is.

    Heartbeats far from now prove nothing, as clocks differ: if they stay the same for `patience`, they are the last.
    """
    first = _signs(keys, run_id)
    if first.closed:
        return "closed"
    if not first.state or _is_recent(first.beat, patience):
        return ""
    log.info("looking for up to %g s whether the agents of %s are alive", patience.total_seconds(), run_id)
    end = time.monotonic() + patience.total_seconds()
    while time.monotonic() < end:
        time.sleep(patience.total_seconds() / _LOOKS)
        signs = _signs(keys, run_id)
        if signs.closed:
            return "closed"
        if signs != first:
            return ""
    return "no agent has been heard of lately"


def _is_recent(beat: bytes, patience: timedelta) -> bool:
    """Whether this heartbeat is fresh if this clock is right."""
    try:
        return abs(time.time() - float(beat)) <= patience.total_seconds()
    except ValueError:
        return False


def _signs(keys: Store, run_id: str) -> _Signs:
    state = _left(keys, f"torch.rendezvous.{run_id}")
    return _Signs(keys.check([_CLOSED]), _left(keys, _BEAT), b"" if state == _NO_STATE else state)


def _left(keys: Store, key: str) -> bytes:
    """The value of a key that may not be there: empty then."""
    return keys.get(key) if keys.check([key]) else b""
