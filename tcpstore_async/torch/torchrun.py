"""`torchrun --rdzv-backend=tcpstore`: agents meet on our server, and their workers on one too.

Knows: PyTorch's dynamic rendezvous, what tells a finished one from one that goes on. Must not know: how a store works.
Invariants: agents of a job that is over, closed or left without a heartbeat, are never met: the next job of the same
name has an epoch, and with it keys, of its own. Workers of one round never see the keys of another.
"""

import base64
import binascii
import logging
import pickle
from datetime import datetime, timedelta, timezone
from typing import Any, Final, cast

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from .. import errors
from .stores import PrefixStore, Store, TCPStore

BACKEND: Final = "tcpstore"
DEFAULT_PORT: Final = 29400
"""Where torchrun's own backend listens, too."""

_NO_STATE: Final = C10dRendezvousBackend._NULL_SENTINEL.encode()

log = logging.getLogger("tcpstore_async.torchrun")


def handler() -> Any:
    """What the entry point `torchrun.handlers` names: the function that makes a handler of parameters."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of one agent. The endpoint's host hosts the server, unless one runs there already.

    Options in `--rdzv-conf`, in seconds where they are times: is_host, read_timeout (60), join_timeout (600),
    last_call_timeout (30), close_timeout (30), keep_alive_interval (5), keep_alive_max_attempt (3). Raises
    RendezvousConnectionError if the server cannot be reached.
    """
    interval = params.get_as_int("keep_alive_interval", 5) or 5
    attempts = params.get_as_int("keep_alive_max_attempt", 3) or 3
    store = _open_store(params)
    epoch = _enter(store, params.run_id, timedelta(seconds=interval * attempts))
    made: RendezvousHandler = _Handler.from_backend(
        params.run_id,
        epoch,
        _Backend(epoch, params.run_id),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(
            *(_seconds(params, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
        ),
        keep_alive_interval=interval,
        keep_alive_max_attempt=attempts,
    )
    return made


class _Backend(C10dRendezvousBackend):
    """PyTorch's, under our name, which torchrun compares with what it was asked for."""

    @property
    def name(self) -> str:
        return BACKEND


class _Handler(DynamicRendezvousHandler):
    """PyTorch's, but each round has a server of its own for its workers."""

    def next_rendezvous(self) -> Any:
        self._close_server()
        return super().next_rendezvous()

    def shutdown(self) -> bool:
        """As PyTorch's, and what was opened is closed: the other agents have the server's grace to do the same."""
        try:
            return bool(super().shutdown())
        finally:
            self._close_server()
            cast(PrefixStore, self._store).close()

    def _close_server(self) -> None:
        server, self._shared_tcp_store_server = getattr(self, "_shared_tcp_store_server", None), None
        self._bootstrap_store_info = None
        if server is not None:
            server.close()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return TCPStore("localhost", master_port, is_master=True)


def _open_store(params: RendezvousParameters) -> Store:
    """Host the server, or join the one that runs."""
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    asked = params.get_as_bool("is_host")
    hosts = _matches_machine_hostname(host) if asked is None else asked
    timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
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


# Epochs


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
    """Why the rendezvous of an epoch is not to be joined; empty if it is."""
    key = f"torch.rendezvous.{run_id}"
    raw = keys.get(key) if keys.check([key]) else _NO_STATE
    if raw == _NO_STATE:
        return ""
    try:
        state: Any = pickle.loads(base64.b64decode(raw))
    except (binascii.Error, pickle.UnpicklingError, EOFError, AttributeError):
        return ""  # it is for the rendezvous itself to complain about
    closed, beats = state.closed, list(state.last_heartbeats.values())
    if closed:
        return "closed"
    now = datetime.now(timezone.utc)
    if beats and all(now - (beat if beat.tzinfo else beat.replace(tzinfo=timezone.utc)) > patience for beat in beats):
        return "no agent has been heard of lately"
    return ""
