"""Putting the ranks of a relay into a store with a name, since PyTorch's client can say none.

The relay sends ENTER for each rank, after a VALIDATE of its own in place of the rank's. This module knows these two
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
    """What is sent for each rank before its own bytes, and how the reply is read."""

    def __init__(self, name: str) -> None:
        store = StoreName(name)
        store.waits = False
        validate = BY_METHOD["validate"]
        command, fields = store.request()
        self.name = name
        self.greeting: bytes = validate.prefix + validate.request.encode((MAGIC,))
        """What each rank sends first, which is not passed on."""
        self.request: bytes = self.greeting + command.prefix + command.request.encode(fields)

    def refusal(self, reply: bytes) -> str | None:
        """Return why a rank is not in the store, by the server's reply; empty if it is, None if there is more to come.

        Raises ProtocolError.
        """
        size = int.from_bytes(reply[:PREFIX], "little")
        if size > _MOST_REPLY or len(reply) > PREFIX + size:
            raise ProtocolError("invalid reply to ENTER")
        if len(reply) < PREFIX or len(reply) < PREFIX + size:
            return None
        entered = read_enter_reply(reply[PREFIX:])
        return "" if entered.status == ENTERED else entered.reason or entered.status
