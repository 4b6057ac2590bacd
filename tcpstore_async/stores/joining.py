"""How a rank joins: once, and on the server of its own round.

Knows: PyTorch's counter of workers, what a server's owner announces, when a join may be sent again. Must not know: who
hosts, how connections are made.
Invariants: a rank is counted once by a server of ours, however many connections that takes, and never twice by
PyTorch's. A server that is joined again and again gets time to breathe.
"""

import logging
import os
import time
from typing import Final

from ..client import requests
from ..client.pool import TCPClient
from ..deadline import Deadline, backoff
from ..errors import DistNetworkError, StoreTimeoutError
from ..values import unpack
from ..wire.commands import JOINS_KEY

log = logging.getLogger("tcpstore_async.stores")

_ROUND_SECONDS: Final = 10.0
"""How long a rank that has joined too early holds out for the server of its round, at the most."""

_MOST_LOSSES: Final = 8
"""Connections that one server may close in the midst of a join before that is an error."""

_TELLING: Final = 2
"""So many are no accident."""

_YES: Final = ("1", "t", "true", "y", "yes")


class Rank:
    """A rank that joins a world of so many, on one connection after the other if need be."""

    def __init__(self, world: int, is_master: bool, deadline: Deadline) -> None:
        self.world = world
        self.is_master = is_master
        self.deadline = deadline
        self.losses = 0
        """Connections in a row that the same server closed while they joined."""
        self._token = os.urandom(16)
        self._instance = ""
        self._counted = False
        """Whether a server of PyTorch's may have counted this rank: there it must not be sent again."""
        self._settled = False
        """Whether it has been in doubt long enough."""

    def join(self, client: TCPClient) -> bool:
        """Be counted; whether the server turns out to be that of this rank's round. Raises DistNetworkError."""
        if not self._meets_ours(client):
            self._counted = True
            client.call(requests.count(1), self._patience())
            return True
        joined = client.call(requests.join(self._token), self._patience())
        self.losses = 0
        client.last_word = requests.DEPART
        return joined <= self.world or self._belongs(client, 0)

    def may_join(self, client: TCPClient) -> bool:
        """The same, asked before it is counted."""
        return not self._meets_ours(client) or self._belongs(client, 1)

    def pause(self, error: DistNetworkError) -> None:
        """After a connection was lost: wait until the next may be made. Raises DistNetworkError if none may."""
        self.losses += 1
        if self._counted or self.is_master or self.losses >= _MOST_LOSSES or self.deadline.passed():
            raise self.blame(error) from None
        wait = backoff(self.losses)
        left = self.deadline.left()
        time.sleep(wait if left is None else min(wait, left))

    def blame(self, error: DistNetworkError) -> DistNetworkError:
        """The error, and how often the server has closed the connection in the midst of a join, if that is why."""
        if self.losses < _TELLING:
            return error
        return DistNetworkError(
            f"{error} The server closed {self.losses} connections in a row while this rank joined; see its log."
        )

    def _meets_ours(self, client: TCPClient) -> bool:
        """Whether the server is one of ours; if it is another than before, what went wrong there is of the past."""
        ours = client.extended(requests.HAS_EXTENSION, self.deadline.timeout, self._patience().began)
        instance = client.identity.instance if client.identity is not None else ""
        if instance != self._instance:
            self._instance = instance
            self.losses = 0
        return ours

    def _patience(self) -> Deadline:
        """What is left for the next call."""
        timeout = self.deadline.timeout
        return Deadline.of_a_call(timeout, self.deadline.began if timeout else None)

    def _belongs(self, client: TCPClient, coming: int) -> bool:
        """Whether a server that has more ranks than the world is the one to stay on.

        Its owner may host it for another world, or expect more ranks, or this one may take the place of one that was
        lost. Else it is an early one of the next round, perhaps: it waits until the owner expects more, or goes. If
        neither happens for long it is one too many, and stays, as in PyTorch.
        """
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _YES
        if self.is_master or self._settled or self.world == 1 or agents:  # a world of one is its master alone
            return True
        there = client.call(requests.join(b""), self._patience()) + coming
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
            self._settled = True
            return True
        except DistNetworkError:
            return False

    def _announced(self, client: TCPClient) -> int | None:
        """How many ranks the owner expects; None if there is no owner, 0 if it is about to go."""
        said = unpack(client.call(requests.JOINS, self._patience()))
        return int(said) if said else None
