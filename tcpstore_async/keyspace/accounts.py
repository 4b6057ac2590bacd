"""What the holders of one token have stored, and may still store: measured, never estimated.

While a command of theirs runs, or one of their connections ends, the keyspace counts for an account what it grows and
shrinks by (`Registrations.charge`). This module must not know tokens, commands, or what is stored.
"""

from ..base.errors import NotAllowedError, counted
from ..base.mypyc_shim import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Usage:
    """What the holders of one token make the server hold, in all stores."""

    def __init__(self, identity: str, max_keys: int, max_bytes: int) -> None:
        self.identity = identity
        self.max_keys = max_keys
        self.max_bytes = max_bytes
        """How many keys and queues, and bytes, they may store; 0 for any number."""
        self.keys: int = 0
        self.bytes: int = 0
        self.guards: int = 0
        """Number of stores with a guard that counts here."""
        self.command: str = ""
        """The name of the command that is running, for the refusal."""
        self.nameless = Account(self)
        """Of that, what is in the store without a name."""

    def allows(self, keys: int, size: int) -> bool:
        """Return whether so many keys and bytes more may be stored."""
        return not (
            (self.max_keys and keys > 0 and self.keys + keys > self.max_keys)
            or (self.max_bytes and size > 0 and self.bytes + size > self.max_bytes)
        )

    def demand(self, keys: int, size: int, gone_keys: int, gone_bytes: int) -> None:
        """Raise NotAllowedError if so many keys and bytes more may not be stored. Changes nothing.

        `gone_keys` and `gone_bytes`, 0 or less, are those that are counted but that others have deleted.
        """
        if self.allows(keys + gone_keys, size + gone_bytes):
            return
        held_keys, held_bytes = self.keys + gone_keys, self.bytes + gone_bytes
        if self.max_keys and keys > 0 and held_keys + keys > self.max_keys:
            grown, held, most = counted(keys, "key"), held_keys, self.max_keys
        else:
            grown, held, most = counted(size, "byte"), held_bytes, self.max_bytes
        raise NotAllowedError(
            f"{self.command} would add {grown}; {held:,} of the {most:,} allowed for token {self.identity} are in use"
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class Account:
    """What the holders of one token have stored in one store."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.keys: int = 0
        self.bytes: int = 0

    def add(self, keys: int, size: int) -> None:
        """Count what the store has grown by. Where others' keys are deleted, nothing is left to count."""
        keys = max(-self.keys, keys)
        size = max(-self.bytes, size)
        self.keys += keys
        self.bytes += size
        self.usage.keys += keys
        self.usage.bytes += size

    def gone(self, keys: int, size: int) -> tuple[int, int]:
        """Return what is counted beyond what the whole store holds, as numbers to add: others have deleted it."""
        return min(0, keys - self.keys), min(0, size - self.bytes)

    def close(self) -> None:
        """Count nothing any more: the store has ended."""
        self.add(-self.keys, -self.bytes)
