"""What moves the bytes of a session: a connection, a session's part of a link, or a single link without a connection.

It must not know what the bytes mean.

Invariant: when the connection breaks, the session leaves, unless a single link keeps it.
"""

from ..base.errors import PeerError
from ..base.mypyc_shim import mypyc_attr
from ..wire.values import Framed
from .owner import Owner
from .server import ServerSession
from .store import Store


@mypyc_attr(allow_interpreted_subclasses=True)
class Transport(Owner):
    """What moves a session's bytes, as far as sessions and servers know it."""

    def __init__(self, store: Store, host: str, port: int, connected_at: float) -> None:
        self.single: Keeper | None = None
        """What keeps the session when the connection breaks."""
        self.session: ServerSession = ServerSession(store, self, host, port, connected_at)

    def flush(self) -> None:
        """Send the session's replies, as far as its peer takes them, at the end of the turn at the latest."""
        raise NotImplementedError

    def close_behind(self, error: PeerError) -> bool:
        """Have the server close for this error behind replies that leave at the end of the turn.

        Returns False if they have left already.
        """
        return False

    def close(self) -> None:
        """Close the connection and take back what its session was offered. Idempotent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Stop reading, and close once all unsent replies are sent."""
        self.close()

    def leave(self, broken: bool) -> None:
        """End the session with its connection, unless that is broken and a single link keeps the session."""
        link = self.single
        if link is not None and broken and not link.over:
            link.detach()
            return
        if link is not None:
            link.forget()
            self.single = None
        self.session.leave()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        """Send replies without their first `taken` bytes; they are counted as unsent, and nothing is ahead of them."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Schedule the requests that the session, which comes from another connection, has held back."""
        raise NotImplementedError

    def survives(self) -> bool:
        """Return whether the session outlives its connection."""
        return self.single is not None

    def awaited_since(self) -> float:
        return self.session.connected_at

    def in_handshake(self) -> bool:
        """Return whether the peer has begun a TLS handshake, or has to, and has not finished it."""
        return False


class Keeper(Transport):
    """A single link, as connections know it: keeps replies until they are acknowledged, and the session meanwhile."""

    over: bool

    def attach(self) -> None:
        """Use the connection of the session that has sent LINK."""
        raise NotImplementedError

    def abandon(self) -> None:
        """End a new link whose connection is gone, or did not take the reply to LINK."""
        raise NotImplementedError

    def received(self, count: int) -> None:
        """Count bytes taken from the client."""
        raise NotImplementedError

    def keep(self, out: list[Framed]) -> None:
        """Keep the session's output, which is about to be sent. May evict the session, which clears its `out`."""
        raise NotImplementedError

    def keep_ahead(self, out: list[Framed]) -> None:
        """As `keep`, some time before it, which then keeps the rest."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give up the broken connection, and wait for the next one until the grace period ends."""
        raise NotImplementedError

    def forget(self) -> None:
        """End the link; the session is then its connection's alone, and ends with it."""
        raise NotImplementedError
