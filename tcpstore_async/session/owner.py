"""What moves a session's bytes, as the session knows it; `transport.py` has all of it."""

from ..base.mypyc_shim import mypyc_attr
from .store import Store


@mypyc_attr(allow_interpreted_subclasses=True)
class Owner:
    """The transport of one session."""

    def wake(self, reply: bytes) -> bool:
        """Send the reply that ends a wait, if that costs less than to flush it later and nothing is ahead of it.

        Returns whether it is sent. This must not fail.
        """
        return False

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        """See `Waiter.skip_suspended`."""
        return False

    def awaited_since(self) -> float:
        """Return since when the peer could send VALIDATE, in seconds of the server's clock; infinite if it cannot."""
        raise NotImplementedError

    def shares_connection(self) -> bool:
        """Return whether there are other sessions on the same connection, and closing this one leaves it open."""
        return False

    def refused_before(self) -> str:
        """Return why another connection of the same process and token has just been closed; empty if none was."""
        return ""
