"""Long commands in steps, so that none of them holds the event loop for long.

Two kinds of work are cut into portions, both written as generators that yield after each. `Running` is a command that
is not done: its session accepts no other until it is. `Later` is what a finished command leaves behind, such as waking
100,000 waiters; this cannot be observed, because what concerns a waiter is done before that waiter sends or receives
anything else (`Later.resolve`).

This module knows nothing of sessions, sockets and clocks, nor who calls `step` when. Short commands never come here.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from ..wire.values import Framed, Growing, pack
from .accounts import Account
from .waiter_types import Waiter

UNCUT: Final = 2**62
"""A portion that holds everything: nothing is done in steps."""

_LISTING_PIECE: Final = 1024 * 1024
"""Size in bytes at which a piece of a key listing is complete."""

_FREED: Final = 8 * 1024 * 1024
"""Bytes that are freed in one step."""

Steps = Generator[None, None, Any]
"""What a command does, step by step; it returns what the command returns, and may raise PeerError."""


class Running:
    """A command that is carried out in steps."""

    def __init__(self, steps: Steps | None, result: Any = None, request: list[Any] | None = None) -> None:
        """Without `steps`, the `result` is a reply in pieces that is complete already."""
        self.steps = steps
        self.result = result
        """What the command returns, once it is done."""
        self.request = request
        """The list of keys or items in its request, if it holds that. To be freed in steps at the end."""
        self.held: int = 0
        """Bytes of the request that it holds. (They are not measured again, which takes long for many keys.)"""
        self.determined = steps is None
        """Whether the reply is determined already: what other commands send to its session must follow it."""
        self.behind: list[Framed] = []
        """Replies that have to follow it."""
        self.account: Account | None = None
        """What is counted for its client, if that is limited. The caller of `step` charges it."""

    def step(self) -> bool:
        """Handle a portion; return True once all is done. Raises PeerError."""
        if self.steps is not None:
            try:
                next(self.steps)
            except StopIteration as end:
                self.result = end.value
            else:
                return False
        return True

    def abandon(self) -> None:
        """Stop, because the session has gone."""
        if self.steps is not None:
            self.steps.close()


def pause() -> Steps:
    """End a command without a reply, but serve others before its session's next command."""
    yield
    return []


class Later:
    """Work that a finished command leaves behind."""

    def __init__(
        self, steps: Iterator[None], resolve: Callable[[Waiter], object] | None = None, aside: bool = False
    ) -> None:
        self.steps = steps
        self.resolve = resolve
        """Does at once what concerns one waiter."""
        self.aside = aside
        """Whether no reply and no wake-up depends on it: it frees memory, or forgets. Its steps are no events."""

    def step(self) -> bool:
        """Do a portion; return True once all is done."""
        for _ in self.steps:
            return False
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

    def is_complete(self) -> bool:
        return self.at == len(self.keys)

    def add(self, most: int) -> None:
        """Encode at most so many further names."""
        stop = min(self.at + most, len(self.keys))
        portion = self.keys[self.at : stop]
        self.keys[self.at : stop] = [b""] * len(portion)  # so that not all are freed at once
        self.at = stop
        part = b"".join([pack(key) for key in portion])
        self.parts.append(part)
        self.parts_size += len(part)
        if self.is_complete() or self.parts_size >= _LISTING_PIECE:
            self.pieces.append(b"".join(self.parts))
            self.parts = []
            self.parts_size = 0


def free_value(growing: Growing) -> Iterator[None]:
    """Free a large value that was replaced or deleted."""
    pieces = growing.pieces
    while True:
        freed = 0
        while pieces and freed < _FREED:
            freed += len(pieces.pop())
        if not pieces:
            return
        yield


def free_dict(items: dict[Any, Any], portion: int) -> Iterator[None]:
    """Free a large dict."""
    while True:
        for _ in range(min(portion, len(items))):
            items.popitem()
        if not items:
            return
        yield
