"""Credit: how many bytes the server and a rank may send for one session on a link before the other end allows more.

It knows how much a session can use. It must not know what a frame looks like: `linked_session.py` sends the credit.

Invariant: a rank that has sent whole commands can always send the rest of the one that the session waits for.
"""

from ..session.store import Store
from ..session.transport import Transport
from ..wire.link import REPLY_CREDIT_BYTES, REQUEST_CREDIT_BYTES, VALUE_CREDIT_BYTES


class Credit(Transport):
    """The flow control of a session on a link."""

    def __init__(self, store: Store, host: str, port: int, now: float) -> None:
        self.credit: int = REPLY_CREDIT_BYTES
        """Bytes that the server may send."""
        self.allowed: int = REQUEST_CREDIT_BYTES
        """Bytes that the rank may send."""
        self.low: int = REQUEST_CREDIT_BYTES // 2
        """The rank gets credit when `allowed` falls to this."""
        super().__init__(store, host, port, now)

    def spend(self, count: int) -> bool:
        """Take received bytes off what the rank may send; return False if it was not allowed to send them."""
        self.allowed -= count
        return self.allowed >= 0

    def give_credit(self) -> None:
        """Give the rank credit for commands, and for the missing part of a long value, if it has little left."""
        session = self.session
        value = session.large_value()
        kept = session.input_buffer
        missing = 0
        if value is not None:
            missing = value.size - value.filled
        elif kept is not None:
            missing = session.need - len(kept)
        most = min(REQUEST_CREDIT_BYTES + max(missing, 0), VALUE_CREDIT_BYTES)
        self.low = most // 2
        if self.allowed <= self.low:
            self.send_credit(most - self.allowed)
            self.allowed = most

    def send_credit(self, count: int) -> None:
        """Tell the rank that it may send `count` more bytes."""
        raise NotImplementedError
