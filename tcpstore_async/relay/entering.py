"""Enter a named store for the ranks of a relay, as PyTorch's client cannot name one.

The relay sends a VALIDATE of its own, in place of the rank's, and ENTER for each rank. This module knows these two
commands; it must not know descriptors or links.

Invariant: nothing that a rank sends reaches the server before the rank is in the store.
"""

from typing import Final

from ..base.errors import ProtocolError
from ..client.store_name import StoreName
from ..session.identity import ENTERED, read_enter_reply
from ..wire.commands import BY_METHOD, MAGIC
from ..wire.values import PREFIX

_MOST_REPLY: Final = 64 * 1024


class Entry:
    """The bytes sent for each rank before its own, and the decoder of the reply."""

    def __init__(self, store: StoreName, address: str) -> None:
        """`address` is the relay's: where the owner runs, programs may publish it as that of the store."""
        store = store.once()
        store.relay = address
        validate = BY_METHOD["validate"]
        command, fields = store.request()
        self.greeting: bytes = validate.prefix + validate.request.encode((MAGIC,))
        """What each rank sends first. Not passed on."""
        self.request: bytes = self.greeting + command.prefix + command.request.encode(fields)

    def refusal(self, reply: bytes) -> str | None:
        """Return why the server refused a rank, "" if it is in the store, or None if the reply is incomplete.

        Raises ProtocolError.
        """
        size = int.from_bytes(reply[:PREFIX], "little")
        if size > _MOST_REPLY or len(reply) > PREFIX + size:
            raise ProtocolError("invalid reply to ENTER")
        if len(reply) < PREFIX or len(reply) < PREFIX + size:
            return None
        entered = read_enter_reply(reply[PREFIX:])
        return "" if entered.status == ENTERED else entered.reason or entered.status
