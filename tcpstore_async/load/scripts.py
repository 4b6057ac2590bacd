"""Requests that are sent as they stand: what ranks say when they join and meet, and one of each operation.

Knows: the commands and the sizes of their answers. Must not know: sockets, or what is measured.
Invariant: every connection can send the same bytes; where ranks differ, eight digits say which one.
"""

import struct
from collections.abc import Callable
from typing import Final

from ..session.client import ClientSession
from ..values import pack
from ..wire.commands import BY_METHOD
from .generator import Act

RANK: Final = b"00000000"
"""Stands for the rank, in eight digits."""
NONCE: Final = 20_260


def encode_request(method: str, *fields: object) -> bytes:
    """A request, as a client sends it; values are framed already."""
    return ClientSession().request(BY_METHOD[method], fields)[0]


def act(request: bytes, reply: int, expect: bytes = b"", last: int = 0, then: bytes = b"") -> Act:
    """With the places where the rank stands. `reply` is in bytes."""
    places = []
    place = request.find(RANK)
    while place >= 0:
        places.append(place)
        place = request.find(RANK, place + len(RANK))
    return Act(request, reply, tuple(places), expect, last, then)


PONG: Final = struct.pack("<I", NONCE)


def join() -> list[Act]:
    """As PyTorch's constructor: VALIDATE and PING, then ADD on the key that counts the ranks."""
    hello = ClientSession().hello(NONCE)[0]
    return [act(hello, 4, PONG), act(encode_request("add", b"init/", 1), 8)]


def hello() -> list[Act]:
    """VALIDATE and PING: a connection that does not join."""
    return join()[:1]


def store_based_barrier(key: bytes, ranks: int) -> list[Act]:
    """As torch.distributed's: ADD, look at the sum, whoever sees that all are there SETs the key all WAIT for."""
    opened = key + b":last_worker"
    return [
        act(encode_request("add", key, 1), 8),
        act(encode_request("add", key, 0), 8, last=ranks, then=encode_request("set", opened, pack(b"1"))),
        act(encode_request("wait", [opened]), 1, b"\0"),
    ]


def one_message_barrier(key: bytes, ranks: int) -> list[Act]:
    """The BARRIER command, which PyTorch's libuv server has too."""
    return [act(encode_request("barrier", key, ranks), 1, b"\0")]


def confirmed(request: bytes) -> Act:
    """A silent write and a PING behind it, in one message: when that is answered the write has been done."""
    return act(request + encode_request("ping", NONCE), 4, PONG)


class Operation:
    """One kind of request, for a rank of its own: what must be there before, the request, and what is left after."""

    def __init__(self, before: list[Act], request: Act, after: list[Act]) -> None:
        self.before = before
        self.request = request
        self.after = after


class Keys:
    """Whose keys an operation uses: they begin with `prefix` and the rank. `value` is framed, of `size` bytes."""

    def __init__(self, prefix: bytes, size: int) -> None:
        self.value = pack(bytes(size))
        self.size = size
        self.one = prefix + RANK + b"/value"
        self.sum = prefix + RANK + b"/sum"
        self.many = [prefix + RANK + b"/many/%d" % number for number in range(8)]
        self.set = confirmed(encode_request("set", self.one, self.value))


def operation(name: str, prefix: bytes, size: int) -> Operation:
    """An operation by name, with values of `size` bytes. Raises KeyError for a name that is not in OPERATIONS."""
    return OPERATIONS[name](Keys(prefix, size))


def _forget(*keys: bytes) -> list[Act]:
    return [act(encode_request("delete_key", key), 8) for key in keys]


def _set(keys: Keys) -> Operation:
    return Operation([], keys.set, _forget(keys.one))


def _get(keys: Keys) -> Operation:
    return Operation([keys.set], act(encode_request("get", keys.one), 8 + keys.size), _forget(keys.one))


def _add(keys: Keys) -> Operation:
    return Operation([], act(encode_request("add", keys.sum, 1), 8), _forget(keys.sum))


def _check(keys: Keys) -> Operation:
    return Operation([keys.set], act(encode_request("check", [keys.one]), 1, b"\0"), _forget(keys.one))


def _wait(keys: Keys) -> Operation:
    return Operation([keys.set], act(encode_request("wait", [keys.one]), 1, b"\0"), _forget(keys.one))


def _compare_set(keys: Keys) -> Operation:
    request = encode_request("compare_set", keys.one, keys.value, keys.value)
    return Operation([keys.set], act(request, 8 + keys.size), _forget(keys.one))


def _delete(keys: Keys) -> Operation:
    request = encode_request("set", keys.one, keys.value) + encode_request("delete_key", keys.one)
    return Operation([], act(request, 8, struct.pack("<q", 1)), _forget(keys.one))


def _multi_set(keys: Keys) -> Operation:
    return Operation([], confirmed(_set_many(keys)), _forget(*keys.many))


def _multi_get(keys: Keys) -> Operation:
    request = act(encode_request("multi_get", keys.many), len(keys.many) * (8 + keys.size))
    return Operation([confirmed(_set_many(keys))], request, _forget(*keys.many))


def _set_many(keys: Keys) -> bytes:
    return encode_request("multi_set", [(key, keys.value) for key in keys.many])


def _ping(keys: Keys) -> Operation:
    return Operation([], act(encode_request("ping", NONCE), 4, PONG), [])


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
"""By name. A silent write has a PING behind it, whose answer is awaited; a delete is a SET and a DELETE_KEY; the
multi-commands have eight keys."""
