"""Operations of several requests, written once for both clients.

Each is a generator that yields requests, receives their results, and returns the operation's result. It must not know
connections, deadlines or whether its caller awaits.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, TypeVar

from ..base.coercion import to_bytes
from ..base.keys import BARRIER_LAST, BARRIER_MEMBERS, stored_key
from ..wire.values import EMPTY
from . import requests
from .requests import Request

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_DOUBTS: Final = 8
"""Times that one pop may find a queue both present and empty before it lists the keys to find out what it is."""


def run(call: Callable[[Q], R], exchange: Generator[Q, R, T]) -> T:
    """Run an exchange whose requests `call` makes. What `call` raises is raised in the exchange, too."""
    try:
        request = next(exchange)
        while True:
            try:
                reply = call(request)
            except BaseException as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(call: Callable[[Q], Awaitable[R]], exchange: Generator[Q, R, T]) -> T:
    """Run an exchange as `run` does, with `await`."""
    try:
        request = next(exchange)
        while True:
            try:
                reply = await call(request)
            except BaseException as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


def arrive(key: object, world_size: int) -> Generator[Request, Any, Request]:
    """Arrive at a barrier of two keys, for servers without BARRIER. Return the wait that ends when all have arrived."""
    name = to_bytes("key", key)
    if (yield requests.add(name + BARRIER_MEMBERS, 1)) >= world_size:
        yield requests.set_(name + BARRIER_LAST, b"1")
    return requests.wait([stored_key(name + BARRIER_LAST)])


def is_plain(name: bytes, doubts: int) -> Generator[Request, Any, bool | None]:
    """Return whether a wait for a queue ended because a plain value has its name; None if only LIST_KEYS can tell.

    `doubts` is the number of pops that found nothing. Both a queue and an empty plain value read as an empty value;
    listing the keys would tell, but is expensive, and deferred until `doubts` is high.
    """
    if len((yield requests.get(name))) > len(EMPTY):
        return True
    if doubts < _DOUBTS or not (yield requests.check([name])) or (yield requests.queue_len(name)):
        return False
    return None
