"""Long commands in steps, so that none of them holds the event loop for long.

Two kinds of work are cut into portions. An `IncrementalCommand` is a command that is still running: its session accepts
no other until it is done. `DeferredWork` is what a finished command leaves behind, such as waking 100,000 waiters;
this cannot be observed, because what concerns a waiter is done before that waiter sends or receives anything else
(`DeferredWork.resolve`).

This module knows nothing of sessions, sockets and clocks, nor who calls `step` when. Short commands never come here.
"""

from collections.abc import Callable
from typing import Any, Final

from ..wire.values import Framed, Growing, pack
from .accounts import Account
from .waiter_types import Waiter

UNCUT: Final = 2**62
"""A portion that holds everything: nothing is done in steps."""

_LISTING_PIECE: Final = 1024 * 1024
"""Bytes from which on no more names are added to a piece of a key listing."""

_FREED: Final = 8 * 1024 * 1024
"""Bytes that are freed in one step."""


class IncrementalCommand:
    """A command that is carried out in steps."""

    def __init__(self) -> None:
        self.result: Any = None
        """What the command returns, once it is done."""
        self.keeps = False
        """Whether it holds its request. (What that holds is not measured again, which takes long for many keys.)"""
        self.held: int = 0
        """Bytes of the request that it holds."""
        self.determined = False
        """Whether the reply is determined already: what other commands send to its session must follow it."""
        self.behind: list[Framed] = []
        """Replies that have to follow it."""
        self.account: Account | None = None
        """What is counted for its client, if that is limited. The caller of `step` charges it."""

    def step(self, most: int) -> bool:
        """Handle the next `most` keys, or as many registrations; True once all is done. Raises PeerError."""
        return True

    def abandon(self) -> None:
        """Stop, because the session has gone."""


class ReplyInPieces(IncrementalCommand):
    """A reply that is complete already, in pieces."""

    def __init__(self, pieces: list[Framed]) -> None:
        super().__init__()
        self.result = pieces
        self.determined = True


class Pause(IncrementalCommand):
    """The end of a command without a reply, to serve others before its session's next command."""

    def step(self, most: int) -> bool:
        self.result = []
        return True


class KeyListing:
    """The names of all keys as the reply to LIST_KEYS, made once for all clients that ask before the keys change."""

    def __init__(self, keys: list[bytes], size: int, changes: int) -> None:
        self.size = size
        """Bytes of the reply."""
        self.changes = changes
        """`Keyspace.changes` when the names were collected."""
        self.keys = keys
        self.at = 0
        self.pieces: list[Framed] = [len(keys).to_bytes(8, "little")]
        self.parts: list[Framed] = []
        """Names for the next piece."""
        self.parts_size: int = 0

    def step(self, most: int) -> bool:
        """Encode at most so many names; True once all are encoded."""
        stop = min(self.at + most, len(self.keys))
        portion = self.keys[self.at : stop]
        self.keys[self.at : stop] = [b""] * len(portion)  # so that not all are freed at once
        self.at = stop
        part = b"".join([pack(key) for key in portion])
        self.parts.append(part)
        self.parts_size += len(part)
        done = stop == len(self.keys)
        if done or self.parts_size >= _LISTING_PIECE:
            self.pieces.append(b"".join(self.parts))
            self.parts = []
            self.parts_size = 0
        return done


class ListKeys(IncrementalCommand):
    """LIST_KEYS of many keys."""

    def __init__(self, listing: KeyListing, on_complete: Callable[[KeyListing], object]) -> None:
        super().__init__()
        self.determined = True
        self.listing = listing
        self.on_complete = on_complete

    def step(self, most: int) -> bool:
        listing = self.listing
        if listing.at < len(listing.keys):  # else another client's command has completed it
            if not listing.step(most):
                return False
            self.on_complete(listing)
        self.result = listing.pieces
        return True


class DeferredWork:
    """Work that a finished command leaves behind."""

    def step(self, most: int) -> bool:
        """Do the next portion; True once all is done."""
        raise NotImplementedError

    def resolve(self, waiter: Waiter) -> None:
        """Do now what concerns this waiter."""


class FreeValue(DeferredWork):
    """Free a large value that was replaced or deleted."""

    def __init__(self, growing: Growing) -> None:
        self.pieces = growing.pieces

    def step(self, most: int) -> bool:
        freed = 0
        while self.pieces and freed < _FREED:
            freed += len(self.pieces.pop())
        return not self.pieces


class FreeDict(DeferredWork):
    """Free a large dict."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items

    def step(self, most: int) -> bool:
        items = self.items
        for _ in range(min(most, len(items))):
            items.popitem()
        return not items
