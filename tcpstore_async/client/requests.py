"""The request of each method of a store: its command and fields, made from the user's arguments.

The module knows which method is which command, and what PyTorch's client says when a call times out; it must not know
connections, waiting or threads. Invariant: an invalid argument (hence `object`) raises
TypeError or ValueError here, before anything is sent.
"""

from itertools import count as count_from
from typing import Any, Final

from ..coercion import in_milliseconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ..errors import StoreTimeoutError
from ..keys import stored_key, stored_keys, wait_timeout_message
from ..limits import Limits
from ..values import Framed, pack
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD, JOINS_KEY, SERVER_KEY, WORKERS_KEY, Command

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

JOINS: Final[Request] = _GET, (JOINS_KEY,)

_tickets: Final = count_from(1)

ANOTHER: Final = "a different server now listens at the address of this store's server"

VALUE_BYTES: Final = Limits().value_bytes
"""The size of a value that every server accepts unless it was started with another limit."""


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
    """Raises DistStoreError, as PyTorch does, if the numbers of keys and values differ."""
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
    """Return what QUEUE_POP took to the end of the queue."""
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
    """Execute an action of an agent (`agents.py`), and request the state of the rounds."""
    return BY_METHOD["attend"], (key, pack(agent), action, number)


def introduce(known: dict[str, str]) -> Request:
    """Send the server a description of this client."""
    return BY_METHOD["introduce"], ([(name.encode(), pack(text.encode())) for name, text in known.items()],)


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


def late(request: Request, seconds: float, cause: BaseException | None = None) -> StoreTimeoutError:
    """Return the error of a call that timed out.

    Its cause is set here, None included, which hides the context: compiled code ignores `raise … from`.
    """
    error = StoreTimeoutError(timeout_message(request, seconds))
    error.__cause__ = cause
    return error


def size_hint(longest: int) -> str:
    """Return the end of the error of a lost connection whose longest request may be the cause."""
    if longest <= VALUE_BYTES:
        return ""
    return (
        f" (a request of {longest} bytes had been sent: a server closes the connection when a value exceeds its"
        f" limit, by default {VALUE_BYTES} bytes)"
    )
