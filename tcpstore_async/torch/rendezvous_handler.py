"""`torchrun --rdzv-backend=tcpstore`: the rendezvous of an elastic job on our servers.

torchrun reaches `create_handler` through its entry point, `tcpstore_async/torchrun.py`. The semantics are those of
PyTorch's dynamic rendezvous, but the server keeps the state of all agents (`keyspace/rounds.py`) instead of a value
that each agent reads and writes, so an agent's requests do not grow with the number of agents.

Three invariants. An agent never joins the rendezvous of a job that has closed: the next job with the same id gets an
epoch, and so keys, of its own, and a late agent is refused (`stores/late_agent.py`). Workers of one round never see the
keys of another: each round has a store of its own, and a name in the environment for workers that join a running
server. Nothing that the server sends is unpickled.
"""

import atexit
import functools
import itertools
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.elastic.utils.distributed import get_free_port

from ..base import errors
from ..base.addresses import format_address
from ..base.coercion import to_seconds
from ..base.deadline import Deadline
from ..client.connect import connect_blocking
from ..client.credentials import find_token
from ..client.server_url import Address, ServerUrl
from ..client.servers import Servers
from ..client.store_name import StoreName
from ..client.store_port import direct_address
from ..client.tls_settings import wants_tls
from ..relay.named_ports import LastingPort
from ..relay.process import RelayProcess
from ..relay.shared import RELAY
from ..server.rate_limited_log import RateLimitedLog
from ..stores.agent import Agent, Options, Pulse, Round, RoundsClosed, State, agent_name, how_ended, is_closed
from ..stores.late_agent import describe_end, own_origin, why_late
from ..stores.rendezvous_url import ROUND_VARIABLE
from ..stores.tcp import TOKEN_KEYS
from ..stores.tcp import TCPStore as PlainTCPStore
from .stores import PrefixStore, Store, TCPStore, host_for_others

BACKEND: Final = "tcpstore"

DEFAULT_PORT: Final = 29400
"""The default port of torchrun's own backend."""

_TIMEOUTS: Final = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}
"""Defaults in seconds, which are PyTorch's."""

_ROUND_KEY: Final = "tcpstore.round"

_HOST_KEY: Final = "tcpstore.host"
"""Key of the name of the agent that hosts the server; missing if none does."""

_HOST_TRIES: Final = 10
"""Checks of that key, at most one per second, after which an agent assumes that no agent hosts the server."""

_FRESH: Final = 1.0
"""Seconds for which the state of the rounds is not requested again, as in PyTorch."""

_NAMED: Final = 0
"""Port that stands for a named store on the agents' server, instead of a server of the workers' own."""

_MAX_RUN_ID: Final = 100
"""Characters of the run id in the names of stores, whose length is limited."""

_free_port: Final[Callable[[], int]] = get_free_port

log = logging.getLogger("tcpstore_async.torchrun")

_numbers: Final = itertools.count()

_ended_here: Final[set[str]] = set()
"""Ids of jobs whose workers have succeeded under an agent of this process, whose next agent starts the job again."""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous handler of one agent. The endpoint's host hosts the server unless one runs there already.

    Options in `--rdzv-conf`, times in seconds: is_host, read_timeout (60), join_timeout (600), last_call_timeout (30),
    close_timeout (30), heartbeat_timeout (5), keep_alive_interval (5), keep_alive_max_attempt (3). With relay=1, or
    TCPSTORE_RELAY=1 in the environment, the agent runs a relay for its workers, with 0 none; by default, if the server
    keeps its stores when it is killed. With tls=1, or TCPSTORE_TLS=1, the
    servers that agents host offer TLS, and agents, relays and the ports of workers use it. With named_store=0, each
    round's workers get a server of their own. A server that an agent hosts runs in a thread of it if TCPSTORE_SERVER
    asks for that or no process can be started. With reuse_id=1, the agent starts a job again whose last run ended
    successfully; with reuse_id=0, it never does. Raises ValueError if one of the times is not positive,
    RendezvousClosedError if the agent is late, and RendezvousConnectionError if the server cannot be reached or is not
    ours.
    """
    if not params.run_id:
        raise ValueError("The run id must be a non-empty string.")
    read_timeout = timedelta(seconds=_positive(params, "read_timeout", 60))
    options = Options(
        least=params.min_nodes,
        most=params.max_nodes,
        join=_seconds(params, "join"),
        last_call=_seconds(params, "last_call"),
        close=_seconds(params, "close"),
        heartbeat=_seconds(params, "heartbeat"),
        keep_alive_interval=_positive(params, "keep_alive_interval", 5),
        keep_alive_max_attempt=_positive(params, "keep_alive_max_attempt", 3),
    )
    relay = params.get_as_bool("relay", {"0": False, "1": True}.get(os.environ.get(RELAY, "")))
    named = bool(params.get_as_bool("named_store", True))
    reuse = params.get_as_bool("reuse_id")
    store = _open_store(params, read_timeout, params.get_as_bool("tls"))
    try:
        address = params.local_addr or socket.getfqdn()
        if store._plain._hosted is not None or store._plain._owns:
            store.set(_HOST_KEY, _own_name(address))  # first, as others may be connected and check it already
        key = _enter(store, params.run_id, reuse)
        return _Handler(params.run_id, store, key, options, address, relay, named)
    except RendezvousClosedError:
        store.close()
        raise
    except (errors.DistError, NotImplementedError) as error:
        store.close()
        raise RendezvousConnectionError(str(error)) from error


class _RoundStore(PlainTCPStore):
    """The named store of a round's workers, as its owner, an agent, holds it."""

    def __init__(self, name: str, server: ServerUrl, timeout: timedelta, token: str | None, durable: bool) -> None:
        """Create the store. Raises ConnectionRefusedError if the server is gone, unless that is `durable`.

        Raises DistError if the server does not support named stores, or the token does not allow all keys.
        """
        self._store_name = name
        self._refused_is_final = not durable
        super().__init__(*server[:2], is_master=True, timeout=timeout, token=token, tls=server.tls, server=str(server))
        try:
            self.num_keys()  # raises with a token for some keys only
        except BaseException:
            self.close()
            raise

    def _name(self, ranks: int | None) -> StoreName:
        return StoreName(self._store_name, owner=os.urandom(16).hex())


class _Replicated(PlainTCPStore):
    """The store of the agents on the first of several servers that serves."""

    def __init__(self, servers: list[Address], timeout: timedelta, tls: bool | None) -> None:
        self._others = tuple(servers[1:])
        super().__init__(*servers[0], timeout=timeout, tls=tls)


class _Handler(RendezvousHandler):
    """The rendezvous of one agent. Each round has a store of its own for its workers.

    It is a named store on the agents' server, which workers reach at the server's port for it, else at a port on
    loopback. Where neither is possible, it is the store of a server that the first agent hosts.
    """

    def __init__(
        self, run_id: str, store: Store, key: str, options: Options, address: str, relay: bool | None, named: bool
    ) -> None:
        plain = store._plain
        self._run_id = run_id
        self._tls = plain._tls is not None
        self._agents_server = plain._server or plain._connection().servers.url(self._tls)
        self._made_token = None if find_token() else plain._token.decode() or None
        """The token that this agent has made for its own server, if the environment has none."""
        self._wants_relay = bool(relay)
        self._durable = plain._connection().durable
        """Whether the agents' server comes back when it is killed."""
        self._relays = self._durable if relay is None else relay
        """Whether the workers of a named store get a relay: only behind one do they survive the end of the server."""
        self._wants_named = named
        self._opened: list[TCPStore | _RoundStore | RelayProcess | LastingPort] = []
        """What was opened for the last round's workers, to be closed in reverse order."""
        self._store = store
        self._host_name = ""
        """The agent that hosts the server; empty if unknown, or if none does."""
        self._host_tries = _HOST_TRIES
        self._key = key
        self._address = address
        self._number = next(_numbers)
        self._agent = Agent(store._plain, key, agent_name(address, self._number, own_origin(run_id).run), options)
        self._beats: _Beats | None = None
        self._seen: State | None = None
        self._seen_at = 0.0
        self._at_exit = functools.partial(_end, weakref.ref(self))
        atexit.register(self._at_exit)  # runs before functions that were registered earlier, such as the server's

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers of a round use the agents' server, or one that the first agent hosts."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and wait until it is formed."""
        self._stop_beats()
        self._close_opened()
        self._record("attempts to join the next round")
        try:
            self._translated(self._find_host)
            found = self._join()
            self._beats = _Beats(self._agent)
            store = PrefixStore(f"{self._key}.{found.number}", self._store)
            share = functools.partial(self._share, store, found)
            where, os.environ[ROUND_VARIABLE] = self._translated(share)  # workers inherit it
        except Exception as error:
            self._record(f"failed to join: {type(error).__name__}: {error}", NodeState.FAILED)
            raise
        self._record(f"has joined round {found.number} as rank {found.rank} of {found.world}", rank=found.rank)
        return RendezvousInfo(store, found.rank, found.world, where)

    def is_closed(self) -> bool:
        return self._look().closed

    def set_closed(self) -> None:
        self._close_rounds(succeeded=False)

    def _close_rounds(self, succeeded: bool) -> None:
        self._translated(functools.partial(self._agent.close, succeeded))
        self._seen = None
        self._record("has closed the rendezvous", NodeState.SUCCEEDED)

    def num_nodes_waiting(self) -> int:
        return self._look().waiting

    def end(self) -> None:
        """Stop sending beats, which a server that this agent hosts would not answer as it exits.

        Called at exit, too: torchrun does not shut down the handler when a signal ends it.
        """
        atexit.unregister(self._at_exit)
        self._stop_beats()

    def shutdown(self) -> bool:
        """Close the rendezvous and the stores; the server's grace period lets the other agents do the same."""
        succeeded = sys.exc_info()[0] is None  # if the workers have failed, torchrun calls this during an exception
        self.end()
        try:
            self._close_rounds(succeeded)
            return True
        except RendezvousError as error:  # the agent that hosts the store may have exited first, and the epoch with it
            self._record(f"failed to close the rendezvous: {error}", NodeState.FAILED)
            log.warning("could not close the rendezvous of %s: %s", self._run_id, error)
            return False
        finally:
            if succeeded:
                _ended_here.add(self._run_id)
            os.environ.pop(ROUND_VARIABLE, None)
            self._close_opened()
            self._store.close()

    def _join(self) -> Round:
        try:
            found: Round = self._translated(lambda: self._agent.join(self._report))
            return found
        except RendezvousTimeoutError as error:
            raise RendezvousTimeoutError(f"{error}; {self._where()}") from error.__cause__
        finally:
            self._seen = None

    def _report(self, missing: str) -> None:
        self._find_host()
        log.warning("%s; %s", missing, self._where())

    def _where(self) -> str:
        """Return text with the address of the agents' server and the agent that hosts it."""
        server = f"the rendezvous server is at {format_address(*self._agents_server[:2])}"
        if not self._host_name:
            return server
        if self._host_name != _own_name(self._address):
            return f"{server}, hosted by the agent {self._host_name}"
        return (
            f"{server}, hosted by this agent; agents with another --rdzv-endpoint do not come there: give all the same "
            "one, not each its own host"
        )

    def _find_host(self) -> None:
        """Find out which agent hosts the server, if one does. It may set the key after others have formed a round."""
        if self._host_name or not self._host_tries:
            return
        self._host_tries -= 1
        if self._store.check([_HOST_KEY]):
            self._host_name = self._store.get(_HOST_KEY).decode()

    def _share(self, store: Store, found: Round) -> tuple[RendezvousStoreInfo, str]:
        """Agree with the other agents on the address where the workers meet, and on a name for the round.

        The name is random, because the server that the workers join may hold keys of earlier jobs, which began at epoch
        0, too.
        """
        if found.rank == 0:
            name = secrets.token_hex(8)
            port, token = self._host(self._store_name(found, name))
            store.set(_ROUND_KEY, json.dumps([self._address, port, name, token]))
        address, port, name, token = json.loads(store.get(_ROUND_KEY))
        if port == _NAMED:
            address, port = self._open_port(self._store_name(found, name))
        elif self._wants_relay:
            address, port = self._start_relay(address, port, token)
        return RendezvousStoreInfo(address, port), name

    def _store_name(self, found: Round, name: str) -> str:
        """Return the name of the store of a round's workers, which is unique among all rounds of all jobs."""
        return f"torchrun/{self._run_id[:_MAX_RUN_ID]}/{found.number}/{name}"

    def _host(self, name: str) -> tuple[int, str]:
        """Create the store of the workers; return its server's port, `_NAMED` for the agents' server, and its token."""
        if not self.use_agent_store:
            return _free_port(), ""
        if self._wants_named:
            reason = self._create(name)
            if not reason:
                return _NAMED, ""
            log.warning("the workers get a server of their own instead of a named store: %s", reason)
        host = self._address if self._tls else "localhost"  # a certificate need not name the latter
        token = secrets.token_hex(16) if _has_token() else ""
        required = "all" if self._wants_relay else ""
        server = host_for_others(host, 0, token=token, tls=self._tls, token_keys="", require_auth=required, server="")
        self._opened.append(server)
        if token and not required:
            log.warning(
                "the workers' server on port %d admits clients without a token, because PyTorch's client "
                "cannot present one: with --rdzv-conf relay=1 the server requires one",
                server.port,
            )
        return server.port, token

    def _create(self, name: str) -> str:
        """Create the store with this name on the agents' server; return why it cannot be used, empty if it can.

        Raises DistNetworkError if that server is gone.
        """
        if wants_tls(None) and not self._relays:
            return "the workers use TLS themselves (TCPSTORE_TLS=1), which a loopback port does not support"
        try:
            self._opened.append(
                _RoundStore(name, self._agents_server, self._store.timeout, self._made_token, self._durable)
            )
            return ""
        except ConnectionRefusedError:
            raise errors.DistNetworkError("it refuses connections") from None
        except errors.DistError as error:
            self._agent.look()  # raises if the agents' server is gone, without which the workers need no server
            return str(error)

    def _open_port(self, name: str) -> tuple[str, int]:
        """Return an address where this agent's workers find the named store.

        It is that of a relay, else the server's port for the store if this host can reach one, else a port on loopback.
        """
        try:
            if self._relays:
                return self._add_relay(str(self._agents_server), self._made_token, name)
        except (OSError, errors.DistError) as error:
            log.warning("could not start a relay (%s); each worker connection is forwarded separately", error)
        try:
            if (direct := self._find_port(name)) is not None:
                return direct
            port = LastingPort(self._agents_server, name, self._made_token or "")
        except errors.DistError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._opened.append(port)
        return "127.0.0.1", port.port

    def _find_port(self, name: str) -> tuple[str, int] | None:
        """Return the address of the server's port for the named store; None if this host can reach none.

        Raises DistError if the store cannot be entered.
        """
        server = self._agents_server
        if server.tls:
            return None
        guest = StoreName(name)
        guest.waits = False
        guest.wants_port = True
        seconds = to_seconds("timeout", self._store.timeout)
        token = find_token(self._made_token)
        servers = Servers(*server.all())
        peer, _ = connect_blocking(servers, Deadline(seconds), token=token, name=guest)
        peer.close()
        return direct_address(servers.url(False), guest, seconds)

    def _start_relay(self, address: str, port: int, token: str) -> tuple[str, int]:
        """Start a relay for this agent's workers, and return its address; if it cannot be started, the server's."""
        if not self.use_agent_store:
            log.warning("no relay: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 lets a worker host the server")
            return address, port
        where = format_address(address, port)
        try:
            return self._add_relay(f"{'tcps' if self._tls else 'tcp'}://{where}", token)
        except (OSError, errors.DistError) as error:
            log.warning("could not start a relay (%s); the workers connect to the server at %s", error, where)
            return address, port

    def _add_relay(self, upstream: str, token: str | None, store: str = "") -> tuple[str, int]:
        """Start a relay for this agent's workers, and return its address. Raises DistNetworkError and OSError.

        Other hosts can reach it, so that the workers can pass the address on, unless it has more rights than they.
        """
        private = self._tls or token or find_token()
        host = "127.0.0.1" if private else self._store._plain._connection().local_host() or "127.0.0.1"
        relay = RelayProcess(upstream, token=token, store=store, host=host)
        self._opened.append(relay)
        return host, relay.port

    def _look(self) -> State:
        """Return the state of the rounds, at most a second old."""
        now = time.monotonic()
        if self._seen is None or now - self._seen_at >= _FRESH:
            self._seen = self._translated(self._agent.look)
            self._seen_at = now
            self._translated(self._find_host)
        return self._seen

    def _translated(self, call: Any) -> Any:
        """Make a call; raise PyTorch's exceptions for ours."""
        try:
            return call()
        except RoundsClosed as error:
            if error.redundant:
                raise RendezvousGracefulExitError(
                    f"The rendezvous '{self._run_id}' is closed, terminating pending rendezvous."
                ) from None
            raise RendezvousClosedError(f"another agent has closed the rendezvous {self._run_id!r}") from None
        except errors.StoreTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error
        except errors.DistNetworkError as error:
            raise RendezvousConnectionError(self._gone(error)) from error
        except errors.DistError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _gone(self, error: errors.DistNetworkError) -> str:
        """Return the error text for the loss of the agents' server, and what to do."""
        server = f"the rendezvous server at {format_address(*self._agents_server[:2])}"
        if self._host_name and self._host_name != _own_name(self._address):
            return (
                f"{server} is gone: it exits with the agent that hosts it, {self._host_name} ({error}). Restart the "
                "job; to make it survive the loss of any agent, run `tcpstore serve` on a host that stays up, and pass "
                "its address as --rdzv-endpoint"
            )
        return f"{server} can no longer be reached: {error}. If it has exited, start it again; then restart the job"

    def _stop_beats(self) -> None:
        beats, self._beats = self._beats, None
        if beats is not None:
            beats.stop()

    def _close_opened(self) -> None:
        """Close the store, port, relay and server of the last round's workers."""
        while self._opened:
            self._opened.pop().close()

    def _record(self, what: str, state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        """Log what this agent does, and record it as an event of PyTorch's."""
        message = f"agent {self._address} (pid {os.getpid()}) of {self._run_id} {what}"
        log.info("%s", message)
        construct_and_record_rdzv_event(
            run_id=self._run_id,
            message=message,
            node_state=state,
            name=f"{type(self).__name__}",
            hostname=self._address,
            pid=os.getpid(),
            local_id=self._number,
            rank=rank,
        )


def _end(handler: "weakref.ref[_Handler]") -> None:
    alive = handler()
    if alive is not None:
        alive.end()


class _Beats:
    """A thread that sends an agent's beats until it is stopped or the agent is dropped."""

    def __init__(self, agent: Agent) -> None:
        self._stopped = threading.Event()
        beat = functools.partial(_send_beats, weakref.ref(agent), agent.pulse, self._stopped)
        self._thread = threading.Thread(target=beat, name="tcpstore_async torchrun beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a beat in progress, so that none overlaps the agent's next request."""
        self._stopped.set()
        self._thread.join()


def _send_beats(agent: "weakref.ref[Agent]", pulse: Pulse, stopped: threading.Event) -> None:
    limited = RateLimitedLog(log)
    while not stopped.wait(max(0.0, pulse.due - time.monotonic())):
        alive = agent()
        if alive is None:
            return
        try:
            alive.beat()
        except errors.DistError as error:
            limited.add("heartbeat", f"could not send a keep-alive heartbeat: {error}")
            if not isinstance(error, errors.StoreTimeoutError):
                return  # the connection is lost, and with it the store
        del alive


def _own_name(address: str) -> str:
    """Return the name of this process's agents in errors."""
    return f"{address} (pid {os.getpid()})"


def _has_token() -> bool:
    """Return whether the agents have a token, so that only they can read another one that they share."""
    return bool(find_token() or os.environ.get(TOKEN_KEYS))


def _open_store(params: RendezvousParameters, timeout: timedelta, tls: bool | None) -> Store:
    """Host the server, or connect to a running one; several, which an endpoint may name, run already."""
    servers = [parse_rendezvous_endpoint(one, DEFAULT_PORT) for one in params.endpoint.split(",")]
    host, port = servers[0]
    asked = params.get_as_bool("is_host") if len(servers) == 1 else False
    hosts = _matches_machine_hostname(host) if asked is None else asked
    try:
        if hosts:
            try:
                store = host_for_others(host, port, timeout=timeout, multi_tenant=True, tls=tls)
                log.info("hosting the rendezvous server on port %d", store.port)
                return store
            except errors.DistNetworkError:
                if asked:
                    raise
                log.info("port %d is in use: connecting to the server there", port)
        if len(servers) > 1:
            return TCPStore._of(_Replicated(servers, timeout, tls))
        return TCPStore(host, port, timeout=timeout, tls=tls)
    except errors.DistError as error:
        raise RendezvousConnectionError(f"cannot use the store at {params.endpoint}: {error}") from error


def _seconds(params: RendezvousParameters, name: str) -> int:
    number = cast(int, params.get_as_int(f"{name}_timeout", _TIMEOUTS[name]))
    if number <= 0:
        raise ValueError(f"The {name} timeout ({timedelta(seconds=number)}) must be positive.")
    return number


def _positive(params: RendezvousParameters, name: str, default: int) -> int:
    number = cast(int, params.get_as_int(name, default))
    if number <= 0:
        raise ValueError(f"The {name.replace('_', ' ')} must be a positive integer.")
    return number


def _enter(store: Store, run_id: str, reuse: bool | None) -> str:
    """Return the key of a job's current epoch, or of a new epoch if the current one is closed.

    If the agents of an epoch die without closing it, the server removes them, and the next agents meet in its next
    round. Raises RendezvousClosedError if this agent is late.
    """
    key = f"tcpstore.epoch.{run_id}"
    while True:
        epoch = int(store.compare_set(key, "", "0"))
        name = f"tcpstore.{run_id}.{epoch}"
        closed = is_closed(store._plain, name)
        if closed or epoch:
            _check_late(store, run_id, epoch if closed else epoch - 1, closed, reuse)
        if not closed:
            return name
        log.info("rendezvous %d of %s is closed: joining the next", epoch, run_id)
        store.compare_set(key, str(epoch), str(epoch + 1))  # another agent may have done so already


def _check_late(store: Store, run_id: str, epoch: int, begins: bool, reuse: bool | None) -> None:
    """Raise RendezvousClosedError if the job ended successfully in this epoch and this agent is late for it.

    `begins` is whether this agent would start the next epoch, which logs a warning unless its run is known.
    """
    if reuse or run_id in _ended_here:
        return
    origin = own_origin(run_id)  # before the request, so that a slow reply cannot make this agent look late
    ended = how_ended(store._plain, f"tcpstore.{run_id}.{epoch}")
    if ended is None:
        return
    end = describe_end(run_id, ended)
    late = why_late(origin, ended)
    if begins and reuse is False and not late:
        late = "with reuse_id=0 this agent does not begin it anew"
    if late:
        raise RendezvousClosedError(
            f"{end}, and {late}: there is nothing left to do. To run it again, use another --rdzv-id, or --rdzv-conf "
            "reuse_id=1"
        )
    if begins and not origin.run:
        log.warning(
            "%s; this agent's process began afterwards, so it begins the job anew. If it is only late, it repeats the "
            "work: to have late agents refused, set TCPSTORE_ATTEMPT to the same value for all agents of a run, or use "
            "--rdzv-conf reuse_id=0",
            end,
        )
