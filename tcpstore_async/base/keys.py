"""The two forms of a key, the caller's and the stored one, and keys in messages.

TCP and file stores keep a caller's key `k` as `/k`, as PyTorch does; keys without the slash belong to the store itself
(the count of workers, for example). Must not know what is stored under a key.
"""

from collections.abc import Iterable
from typing import Final

from .coercion import in_milliseconds, to_bytes, to_bytes_list

BARRIER_MEMBERS: Final = b"/num_members"
"""Suffix of the counter of a barrier over keys, as in PyTorch."""

BARRIER_LAST: Final = b"/last_member"
"""Suffix of the key that opens a barrier over keys, as in PyTorch."""

GROUP_BARRIER: Final = b"store_based_barrier_key:"
"""Part of the counter of PyTorch's barrier of a process group."""

GROUP_BARRIER_LAST: Final = b":last_worker"
"""Suffix of the key that opens such a barrier."""

COLLECTIVE_LAST: Final = b"/last_members"
"""Suffix of the key that opens a barrier of `StoreCollectives`, ours or PyTorch's."""


def stored_key(key: object) -> bytes:
    """Return the stored form of a caller's key. Raises TypeError."""
    if isinstance(key, str):
        try:
            return b"/" + key.encode()
        except UnicodeEncodeError:
            pass  # to_bytes raises the right error
    return b"/" + to_bytes("key", key)


def stored_keys(keys: object) -> list[bytes]:
    """Return the stored form of a caller's keys. Raises TypeError, which names the index of the wrong one."""
    if isinstance(keys, list):
        try:
            return list(map(stored_key, keys))
        except TypeError:
            pass  # to_bytes_list raises one that names the index
    return [b"/" + key for key in to_bytes_list("keys", keys)]


def caller_keys(keys: list[bytes]) -> list[bytes]:
    """Return the caller's form of stored keys, without the store's own keys."""
    return [key[1:] for key in keys if key.startswith(b"/")]


def caller_key(key: str) -> str:
    """Return the caller's form of a decoded key; a key of the store's own is unchanged."""
    return key.removeprefix("/")


def readable(key: bytes) -> str:
    """Return a key or value as text; bytes that are not UTF-8 are escaped."""
    try:
        return key.decode()  # compiled, a call in C
    except UnicodeDecodeError:
        return key.decode(errors="backslashreplace")


_NAMED: Final = 4
"""Keys of a longer list that a text names."""


def describe_wait(kind: str, keys: list[str], more: int, target: int) -> str:
    """Describe what a waiting peer does; `kind` is `keys`, `value`, `item`, `number`, `barrier`, `round` or `store`.

    `keys` are stored keys, decoded; `more` others are not listed. `target` is the awaited number.
    """
    names = list(map(caller_key, keys[:_NAMED]))
    if kind == "barrier":
        return f"is waiting at barrier {names[0]}"
    if kind == "round":
        return "is waiting for a round of agents to form"
    if kind == "store":
        return f"is waiting for the store {names[0]}"
    if kind == "number":
        return f"is waiting for {names[0]} to reach {target}"
    more += len(keys) - len(names)
    named = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    return f"is waiting for {'an item from queue ' if kind == 'item' else ''}{named or 'keys'}"


def decode_keys(keys: list[bytes]) -> list[str]:
    """Decode keys as UTF-8. Raises UnicodeDecodeError."""
    return [key.decode() for key in keys]


def wait_timeout_message(keys: Iterable[bytes], seconds: float, verb: str = "wait") -> str:
    """Return the text of a timeout in PyTorch's words. `seconds` is the timeout."""
    listed = ", ".join([key.decode(errors="replace") for key in keys])
    return f"{verb} timeout after {in_milliseconds(seconds)}ms, keys: {listed}"
