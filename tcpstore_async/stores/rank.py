"""How a rank joins: once, and on the server of its own round.

It knows PyTorch's counter of workers, the number of ranks that the server's owner announces, and when a join may be
sent again. It must not know how servers are hosted or connections made.

Invariants: a server of ours counts a rank once (`keyspace/joins.py`), however many connections that takes; PyTorch's
never counts it twice. Repeated joins back off.
"""

import logging
import os
import time
from typing import Final

from ..base.deadline import Deadline, backoff
from ..base.errors import DistNetworkError, StoreTimeoutError
from ..client import requests
from ..client.sync_client import TCPClient
from ..wire.commands import JOINS_KEY
from ..wire.values import unpack

log = logging.getLogger("tcpstore_async.stores")

_ROUND_SECONDS: Final = 10.0
"""Longest wait in seconds of a rank that may have joined the server of an earlier round."""

_MOST_LOSSES: Final = 8
"""Connections closed by a server in a row, during a join, that are an error."""

_NOTABLE_LOSSES: Final = 2
"""Losses from which the error mentions them."""

YES: Final = ("1", "t", "true", "y", "yes")
"""Values of TORCHELASTIC_USE_AGENT_STORE that PyTorch takes for true, in lower case."""


def new_token() -> bytes:
    """Return a new token, under which one rank is counted once."""
    return os.urandom(16)


class Rank:
    """A rank that joins a world of a given size, if need be over several connections."""

    def __init__(
        self, world: int, is_master: bool, deadline: Deadline, token: bytes = b"", hosts: bool = False
    ) -> None:
        """`token` is one under which the rank may have been counted already; `hosts` says whether it has a server."""
        self.world = world
        self.is_master = is_master
        self.hosts = hosts
        self.deadline = deadline
        self.losses = 0
        """Connections in a row that the same server closed during a join."""
        self._token = token or new_token()
        self._instance = ""
        self._counted = False
        """Whether PyTorch's server may have counted this rank, so that the join must not be sent again."""
        self._has_waited = False
        """Whether it has waited long enough for a newer round."""

    def join(self, client: TCPClient) -> bool:
        """Join; return whether the server is that of this rank's round. Raises DistNetworkError."""
        if not self._is_ours(client):
            self._counted = True  # before the request, whose reply may be lost
            client.call(requests.count(1), self._deadline())
            return True
        joined = client.call(requests.join(self._token), self._deadline())
        self.losses = 0
        client.farewell = requests.DEPART
        return joined <= self.world or self._belongs(client, 0)

    def may_join(self, client: TCPClient) -> bool:
        """Return whether the server is that of this rank's round, before joining."""
        return not self._is_ours(client) or self._belongs(client, 1)

    def pause(self) -> bool:
        """Wait after a lost connection before the next; return False if there must be none."""
        self.losses += 1
        if self._counted or self.hosts or self.losses >= _MOST_LOSSES or self.deadline.passed():
            return False
        wait = backoff(self.losses)
        left = self.deadline.left()
        time.sleep(wait if left is None else min(wait, left))
        return True

    def blame(self, error: DistNetworkError) -> DistNetworkError:
        """Return the error, with the number of connections that the server closed during a join."""
        if self.losses < _NOTABLE_LOSSES:
            return error
        return DistNetworkError(
            f"{str(error).rstrip('.')}; the server closed {self.losses} connections in a row while this rank was "
            "joining: see the server's log"
        )

    def _is_ours(self, client: TCPClient) -> bool:
        """Return whether the server is one of ours; forget the losses of another instance."""
        ours = client.extended(requests.HAS_EXTENSION, self.deadline.timeout, self._deadline().began)
        instance = client.identity.instance if client.identity is not None else ""
        if instance != self._instance:
            self._instance = instance
            self.losses = 0
        return ours

    def _deadline(self) -> Deadline:
        """Return the deadline of the next call."""
        timeout = self.deadline.timeout
        return Deadline.of_a_call(timeout, self.deadline.began if timeout else None)

    def _belongs(self, client: TCPClient, coming: int) -> bool:
        """Return whether to stay on a server that has more ranks than the world, with `coming` still to be counted.

        Its owner may host it for another world size or expect more ranks, or this rank may replace a lost one.
        Otherwise the rank may be early for the next round: it waits until the owner expects more ranks or the server
        stops. If neither happens for long, it is one rank too many and stays, as in PyTorch.
        """
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in YES
        if self.is_master or self._has_waited or self.world == 1 or agents:  # a world of one has its master only
            return True
        there = client.call(requests.join(b""), self._deadline()) + coming
        announced = self._announced(client)
        if not announced or there <= self.world or there <= announced or announced % self.world:
            return announced != 0
        log.info(
            "%s:%d has more ranks than world_size; checking whether a newer round is starting", client.host, client.port
        )
        limit = min(_ROUND_SECONDS, _ROUND_SECONDS if self.deadline.timeout < 0 else self.deadline.timeout / 2)
        left = self.deadline.left()
        try:
            client.call_blocking(
                requests.wait_count(JOINS_KEY, there), limit if left is None else max(1e-3, min(limit, left))
            )
            return self._announced(client) != 0
        except StoreTimeoutError:
            self._has_waited = True
            return True
        except DistNetworkError:
            return False

    def _announced(self, client: TCPClient) -> int | None:
        """Return how many ranks the owner expects: None without an owner, 0 if the server is about to stop."""
        count = unpack(client.call(requests.JOINS, self._deadline()))
        return int(count) if count else None
