"""The request of each method of a store: its command and fields, made from the user's arguments.

It knows the command of each method, and PyTorch's texts of timeouts; it must not know connections, waiting or threads.
Invariant: an invalid argument (hence `object`) raises TypeError or ValueError here, before anything is sent.
"""

from itertools import count as count_from
from typing import Any, Final

from ..base.addresses import format_address
from ..base.coercion import in_milliseconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ..base.deadline import MIN_ROUND_TRIP
from ..base.errors import StoreTimeoutError
from ..base.keys import stored_key, stored_keys, wait_timeout_message
from ..base.limits import Limits
from ..wire.codecs import NO_REPLY, Fields
from ..wire.commands import BY_METHOD, JOINS_KEY, SERVER_KEY, WORKERS_KEY, Command
from ..wire.values import Framed, pack

Request = tuple[Command, Fields]

_SET: Final = BY_METHOD["set"]
_GET: Final = BY_METHOD["get"]
_ADD: Final = BY_METHOD["add"]
_COMPARE_SET: Final = BY_METHOD["compare_set"]
_APPEND: Final = BY_METHOD["append"]
_CHECK: Final = BY_METHOD["check"]
_WAIT: Final = BY_METHOD["wait"]
_FETCH: Final = BY_METHOD["fetch"]
_DELETE_KEY: Final = BY_METHOD["delete_key"]
_MULTI_GET: Final = BY_METHOD["multi_get"]
_MULTI_SET: Final = BY_METHOD["multi_set"]
_QUEUE_PUSH: Final = BY_METHOD["queue_push"]
_QUEUE_POP: Final = BY_METHOD["queue_pop"]
_LEASE: Final = BY_METHOD["lease"]
_LEASE_LATER: Final = BY_METHOD["lease_later"]
_CONFIRM: Final = BY_METHOD["confirm"]
_GIVE_BACK: Final = BY_METHOD["give_back"]
_QUEUE_LEN: Final = BY_METHOD["queue_len"]
_BARRIER: Final = BY_METHOD["barrier"]

NUM_KEYS: Final[Request] = BY_METHOD["num_keys"], ()
LIST_KEYS: Final[Request] = BY_METHOD["list_keys"], ()
NO_KEY: Final[Request] = _CHECK, ([],)
"""A fence that every server answers at once; older servers of PyTorch have no PING."""
HAS_EXTENSION: Final[Request] = _CHECK, ([SERVER_KEY],)
WHO_ARE_YOU: Final[Request] = _GET, (SERVER_KEY,)
DEPART: Final[Request] = BY_METHOD["depart"], ()
END_STORE: Final[Request] = BY_METHOD["end_store"], ()
JOINS: Final[Request] = _GET, (JOINS_KEY,)

_tickets: Final = count_from(1)

ANOTHER: Final = "a different server is now listening at the address of this store's server"

_CALLED: Final = {"fetch": "get", "lease": "queue_pop", "lease_later": "queue_pop", "give_back": "queue_pop"}
"""The caller's method, where the command has another name."""

_MOST_SHOWN: Final = 3
"""Keys of a request that an error shows."""

_LONGEST_SHOWN: Final = 100
"""Characters of each."""

VALUE_BYTES: Final = Limits().value_bytes
"""Bytes of the longest value that a server accepts by default."""


def set_(key: object, value: object) -> Request:
    return _SET, (stored_key(key), pack(to_bytes("value", value)))


def get(name: bytes) -> Request:
    return _GET, (name,)


def fetch(name: bytes) -> Request:
    return _FETCH, (name,)


def add(key: object, amount: object) -> Request:
    return _ADD, (stored_key(key), to_int64("amount", amount))


def compare_set(key: object, expected: object, desired: object) -> Request:
    return _COMPARE_SET, (stored_key(key), pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired)))


def append(key: object, value: object) -> Request:
    return _APPEND, (stored_key(key), pack(to_bytes("value", value)))


def check(names: list[bytes]) -> Request:
    return _CHECK, (names,)


def wait(names: list[bytes]) -> Request:
    return _WAIT, (names,)


def delete_key(key: object) -> Request:
    return _DELETE_KEY, (stored_key(key),)


def multi_get(names: list[bytes]) -> Request:
    return _MULTI_GET, (names,)


def multi_set(keys: object, values: object) -> Request:
    """Raises DistStoreError, as in PyTorch, if the numbers of keys and values differ."""
    pairs = to_pairs(stored_keys(keys), to_bytes_list("values", values))
    return _MULTI_SET, ([(name, pack(value)) for name, value in pairs],)


def queue_push(key: object, value: object) -> Request:
    return _QUEUE_PUSH, (stored_key(key), pack(to_bytes("value", value)))


def queue_pop(name: bytes) -> Request:
    return _QUEUE_POP, (name,)


def lease(name: bytes, block: bool) -> Request:
    """Return a pop that has to be confirmed; its ticket, the second field, is unique in this process."""
    return (_LEASE_LATER if block else _LEASE), (name, next(_tickets))


def confirm(lease: Request) -> Request:
    return _CONFIRM, (lease[1][1],)


def give_back(lease: Request) -> Request:
    return _GIVE_BACK, (lease[1][1],)


def push_back(name: bytes, item: Framed) -> Request:
    """Return an item of QUEUE_POP to the end of the queue."""
    return _QUEUE_PUSH, (name, item)


def queue_len(name: bytes) -> Request:
    return _QUEUE_LEN, (name,)


def barrier(key: object, world_size: object) -> Request:
    return _BARRIER, (stored_key(key), to_int64("world_size", world_size))


def wait_count(name: bytes, count: int) -> Request:
    return BY_METHOD["wait_count"], (name, count)


def count(workers: int) -> Request:
    """Add to PyTorch's counter of workers; the reply is the new count."""
    return _ADD, (WORKERS_KEY, workers)


def join(token: bytes) -> Request:
    """Count one worker, once per token. With an empty token, the reply is how many have joined and not been lost."""
    return BY_METHOD["join"], (WORKERS_KEY, pack(token))


def meet(key: bytes, agent: bytes, least: int, most: int, left: int) -> Request:
    """Join a round of `least` to `most` agents, having left the round `left`."""
    return BY_METHOD["meet"], (key, pack(agent), least, most, left)


def attend(key: bytes, agent: bytes, action: int, number: int = 0) -> Request:
    """Execute an action of an agent (`keyspace/agents.py`), and request the state of the rounds."""
    return BY_METHOD["attend"], (key, pack(agent), action, number)


def introduce(known: dict[str, str]) -> Request:
    """Send the server a description of this client."""
    return BY_METHOD["introduce"], ([(name.encode(), pack(text.encode())) for name, text in known.items()],)


def enter(items: dict[str, str]) -> Request:
    """Enter a named store."""
    return BY_METHOD["enter"], ([(name.encode(), pack(text.encode())) for name, text in items.items()],)


def auth(token: bytes) -> Request:
    """Present a token."""
    return BY_METHOD["auth"], (pack(token),)


def timeout_message(request: Request, seconds: float) -> str:
    """Return the text of a timeout, PyTorch's where it has one."""
    command, fields = request
    text: Any = f"{command.method} timeout after {in_milliseconds(seconds)}ms"
    if command is _BARRIER:
        return f"{text}, key: {fields[0][1:].decode(errors='replace')}"
    if command is _WAIT:
        return wait_timeout_message(fields[0], seconds)
    if command is _LEASE:
        return timeout_message(queue_pop(fields[0]), seconds)
    if command is _FETCH or command is _LEASE_LATER:
        return timeout_message(wait([fields[0]]), seconds)
    return str(text)


def describe(request: Request) -> str:
    """Return a request in the caller's terms for an error, with some of its keys: `wait('a', 'b', 'c' and 8 more)`."""
    command, fields = request
    name = _CALLED.get(command.method, command.method)
    first: Any = fields[0] if fields else b""
    named: list[Any] = first if isinstance(first, list) else [first]
    keys = [_shown(key[0] if isinstance(key, tuple) else key) for key in named[:_MOST_SHOWN]]
    more = f" and {len(named) - _MOST_SHOWN} more" if len(named) > _MOST_SHOWN else ""
    text = ", ".join([key for key in keys if key])
    return f"{name}({text}{more})"


def _shown(key: object) -> str:
    """Return a stored key as printable text, shortened; "" if it is not a key."""
    if not isinstance(key, bytes) or not key:
        return ""
    text = (key[1:] if key.startswith(b"/") else key).decode(errors="replace")
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")


def lost_during(request: Request, silence: str) -> str:
    """Return the end of the error of a call whose connection was lost; `silence` is the text of `describe_silence`."""
    doing = "sending" if request[0].reply is NO_REPLY else "awaiting the reply to"
    return f" ({doing} {describe(request)}{'; ' if silence else ''}{silence})"


def late(request: Request, seconds: float, cause: BaseException | None = None) -> StoreTimeoutError:
    """Return the error of a call that timed out.

    Its cause is set here, even to None, to hide the context: compiled code ignores `raise … from`.
    """
    error = StoreTimeoutError(timeout_message(request, seconds))
    error.__cause__ = cause
    return error


def unconfirmed_at_close(host: str, port: int) -> str:
    """Return the log line of a client whose last writes were not confirmed before it closed."""
    return (
        f"the server at {format_address(host, port)} did not answer within {MIN_ROUND_TRIP:g} s: the store is closed, "
        "and its last writes may not have been executed"
    )


def size_hint(longest: int) -> str:
    """Return the end of the error of a lost connection if its longest request may be the cause, else ""."""
    if longest <= VALUE_BYTES:
        return ""
    return (
        f" (the longest request sent was {longest} bytes; a server closes the connection when a value exceeds its"
        f" limit, by default {VALUE_BYTES} bytes)"
    )
