"""The servers of one store: a replicated store has several, of which one serves.

Knows addresses, and in which order to try them. Must not know how one is tried, or what a server says.

Invariants: an address that was given is never forgotten; of those that servers have told, the latest are kept. A round
tries each address once, whatever is told meanwhile, so servers that name each other are not tried without end.
"""

from collections.abc import Iterator
from typing import Final

from ..base.deadline import backoff
from .server_url import Address, ServerUrl, parse_server_url

_MOST_TOLD: Final = 8

_LONGEST_PAUSE: Final = 0.5


class StandsByError(ConnectionError):
    """The server stands by: another one serves."""

    def __init__(self, server: str) -> None:
        """`server` is the address of the one that serves, as HOST:PORT; empty if none does at the moment."""
        super().__init__(f"it stands by, and {server or 'no server'} serves")
        self.server = server


class Servers:
    def __init__(self, *given: Address) -> None:
        self._given = list(dict.fromkeys(given))
        self._told: list[Address] = []
        self.first: Address = given[0]
        """The one that was reached last, or that another one has told; to be tried first."""

    def all(self) -> list[Address]:
        """Return all addresses: those that were given, then those that were told."""
        return self._given + self._told

    def url(self, tls: bool) -> ServerUrl:
        """Return the URL of all servers, the first one first."""
        return ServerUrl(*self.first, tls, tuple(one for one in self.all() if one != self.first))

    def note(self, error: Exception) -> None:
        """Remember the server that another one has told, and try it next."""
        if isinstance(error, StandsByError) and error.server:
            try:
                url = parse_server_url(f"tcp://{error.server}")
            except ValueError:
                return
            self.first = url.host, url.port
            if self.first not in self.all():
                self._told = [*self._told[1 - _MOST_TOLD :], self.first]

    def leave(self, server: Address) -> None:
        """Try this server last, as it does not have what is looked for."""
        known = self.all()
        if server == self.first:
            self.first = known[(known.index(server) + 1) % len(known)]

    def pause(self, failures: int) -> float:
        """Return the seconds to wait behind so many rounds: not long if another server may soon serve."""
        return backoff(failures, longest=_LONGEST_PAUSE) if len(self.all()) > 1 else backoff(failures)

    def round(self) -> Iterator[Address]:
        """Yield each address once, also those that are told meanwhile."""
        tried: set[Address] = set()
        while rest := [one for one in (self.first, *self.all()) if one not in tried]:
            tried.add(rest[0])
            yield rest[0]
