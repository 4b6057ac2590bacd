"""Prepared requests: joining, barriers and one operation of each kind.

Invariant: every connection sends the same bytes, except for eight digits that hold the rank. Knows commands and the
sizes of their replies; must not know sockets or measurements.
"""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from ...session.client import ClientSession
from ...wire.commands import BY_METHOD
from ...wire.values import pack
from .generator import Step

RANK: Final = b"00000000"
"""Placeholder for the rank, in eight digits."""
NONCE: Final = 20_260
"""The number in PINGs."""


def encode_request(method: str, *fields: object) -> bytes:
    """Encode a request as a client sends it. Values must be framed."""
    return ClientSession().request(BY_METHOD[method], fields)[0]


def make_step(request: bytes, reply: int, expect: bytes = b"", last: int = 0, then: bytes = b"") -> Step:
    """Make a step from a request with placeholders for the rank. `reply` is in bytes."""
    offsets = []
    at = request.find(RANK)
    while at >= 0:
        offsets.append(at)
        at = request.find(RANK, at + len(RANK))
    return Step(request, reply, tuple(offsets), expect, last, then)


PONG: Final = struct.pack("<I", NONCE)


def join() -> list[Step]:
    """Return the steps of PyTorch's constructor: VALIDATE and PING, then ADD to the key that counts the ranks."""
    hello = ClientSession().hello(NONCE)[0]
    return [make_step(hello, 4, PONG), make_step(encode_request("add", b"init/", 1), 8)]


def hello() -> list[Step]:
    """Return the steps of a connection that does not join: VALIDATE and PING."""
    return join()[:1]


def store_based_barrier(key: bytes, ranks: int) -> list[Step]:
    """Return the steps of torch.distributed's barrier: ADD; the last rank SETs the key that all WAIT for."""
    opened = key + b":last_worker"
    return [
        make_step(encode_request("add", key, 1), 8),
        make_step(encode_request("add", key, 0), 8, last=ranks, then=encode_request("set", opened, pack(b"1"))),
        make_step(encode_request("wait", [opened]), 1, b"\0"),
    ]


def one_message_barrier(key: bytes, ranks: int) -> list[Step]:
    """Return the step of a BARRIER, which PyTorch's libuv server has too."""
    return [make_step(encode_request("barrier", key, ranks), 1, b"\0")]


def confirmed(request: bytes) -> Step:
    """Append a PING to a write without reply: the write is done when the PING is answered."""
    return make_step(request + encode_request("ping", NONCE), 4, PONG)


class Operation(NamedTuple):
    """One kind of request, with the steps that prepare and delete its keys."""

    before: list[Step]
    request: Step
    after: list[Step]


class Keys:
    """The keys of an operation, which begin with `prefix` and the rank, and its value of `size` bytes."""

    def __init__(self, prefix: bytes, size: int) -> None:
        self.value = pack(bytes(size))
        self.size = size
        self.one = prefix + RANK + b"/value"
        self.sum = prefix + RANK + b"/sum"
        self.many = [prefix + RANK + b"/many/%d" % number for number in range(8)]
        self.set = confirmed(encode_request("set", self.one, self.value))


def operation(name: str, prefix: bytes, size: int) -> Operation:
    """Return an operation by name, with values of `size` bytes. Raises KeyError if it is not in OPERATIONS."""
    return OPERATIONS[name](Keys(prefix, size))


def _delete_all(*keys: bytes) -> list[Step]:
    return [make_step(encode_request("delete_key", key), 8) for key in keys]


def _set(keys: Keys) -> Operation:
    return Operation([], keys.set, _delete_all(keys.one))


def _get(keys: Keys) -> Operation:
    return Operation([keys.set], make_step(encode_request("get", keys.one), 8 + keys.size), _delete_all(keys.one))


def _add(keys: Keys) -> Operation:
    return Operation([], make_step(encode_request("add", keys.sum, 1), 8), _delete_all(keys.sum))


def _check(keys: Keys) -> Operation:
    return Operation([keys.set], make_step(encode_request("check", [keys.one]), 1, b"\0"), _delete_all(keys.one))


def _wait(keys: Keys) -> Operation:
    return Operation([keys.set], make_step(encode_request("wait", [keys.one]), 1, b"\0"), _delete_all(keys.one))


def _compare_set(keys: Keys) -> Operation:
    request = encode_request("compare_set", keys.one, keys.value, keys.value)
    return Operation([keys.set], make_step(request, 8 + keys.size), _delete_all(keys.one))


def _delete(keys: Keys) -> Operation:
    request = encode_request("set", keys.one, keys.value) + encode_request("delete_key", keys.one)
    return Operation([], make_step(request, 8, struct.pack("<q", 1)), _delete_all(keys.one))


def _multi_set(keys: Keys) -> Operation:
    return Operation([], confirmed(_set_many(keys)), _delete_all(*keys.many))


def _multi_get(keys: Keys) -> Operation:
    request = make_step(encode_request("multi_get", keys.many), len(keys.many) * (8 + keys.size))
    return Operation([confirmed(_set_many(keys))], request, _delete_all(*keys.many))


def _set_many(keys: Keys) -> bytes:
    return encode_request("multi_set", [(key, keys.value) for key in keys.many])


def _ping(keys: Keys) -> Operation:
    return Operation([], make_step(encode_request("ping", NONCE), 4, PONG), [])


OPERATIONS: Final[dict[str, Callable[[Keys], Operation]]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "check": _check,
    "wait": _wait,
    "compare-set": _compare_set,
    "delete": _delete,
    "multi-set": _multi_set,
    "multi-get": _multi_get,
    "ping": _ping,
}
"""Operations by name. A write without a reply is followed by a PING; `delete` is a SET and a DELETE_KEY; `multi-set`
and `multi-get` have eight keys."""
