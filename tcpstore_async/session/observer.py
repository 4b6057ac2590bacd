"""What may observe the sessions of a store: told of each command that writes, and of each session that leaves.

It knows neither sessions nor what is remembered of them; `observe/history.py` does.

Invariant: what a peer is sent does not depend on whether its store is observed.
"""

from typing import Any, Final

from ..wire.codecs import Handler
from .budget import Holder

NEVER: Final = -1.0
"""When a session was last heard, if it never was, has left, or its store is not observed."""


class Observer:
    """Remembers what the sessions of one store do."""

    def recorded(self, method: str, call: Handler) -> Handler:
        """Return `call`, which executes the command with this method, or a function that also notes what it has done.

        Nothing is noted of a command that raises.
        """
        raise NotImplementedError

    def leaves(self, session: Holder) -> None:
        """Note a session that is about to leave."""
        raise NotImplementedError

    def dispose(self) -> tuple[list[dict[bytes, Any]], list[list[Any]]]:
        """Forget everything, as the store has ended; return what may be long, to be freed in portions."""
        raise NotImplementedError
