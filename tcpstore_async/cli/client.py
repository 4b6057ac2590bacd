"""The commands that use a running server, ours or PyTorch's.

They parse arguments, make one call of the asynchronous client and print its result. Must not know how a call is made.
Exit status: 0 success, 1 failure (`check`: a key is missing), 2 usage error, 3 timeout, 4 server unreachable, 5
not allowed.
"""

import asyncio
import os
import sys
import time
from typing import Final

import click
from click.shell_completion import get_completion_class

from ..base.errors import DistNetworkError, DistStoreError
from ..client.aio import AsyncTCPStore
from .commands import Commands
from .context import FAILED, ClientContext, client_command, keys_store_option, wait_option
from .output import print_result

_AT_ONCE: Final = 1000
"""Keys deleted concurrently."""


def _int64(ctx: click.Context, param: click.Parameter, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not an integer", ctx, param) from None
    if not -(2**63) <= number < 2**63:
        raise click.BadParameter(f"{text} is out of range for a 64-bit integer", ctx, param)
    return number


def _bytes(text: str) -> bytes:
    return os.fsencode(text)


def _value(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else _bytes(text)


async def ping_milliseconds(store: AsyncTCPStore) -> float:
    """Return the time of one round trip."""
    began = time.perf_counter()
    await store.ping()
    return round((time.perf_counter() - began) * 1000, 3)


@click.command()
@wait_option
@client_command
def ping(context: ClientContext) -> None:
    """Measure the round-trip time to the server, in milliseconds."""
    context.show("milliseconds", context.run(ping_milliseconds))


@click.command()
@click.argument("key")
@keys_store_option
@client_command
def get(context: ClientContext, key: str) -> None:
    """Wait for a key and print its value."""
    context.show("value", context.run(lambda store: store.get(_bytes(key)), awaited=f"the key {key!r}"))


@click.command("set")
@click.argument("key")
@click.argument("value")
@keys_store_option
@client_command
def set_(context: ClientContext, key: str, value: str) -> None:
    """Set a key to a value.

    If VALUE is '-', it is read from standard input. Put '--' before a VALUE like -1.
    """
    data = _value(value)
    context.run_write(key, data, lambda store: store.set(_bytes(key), data))


@click.command()
@click.argument("key")
@click.argument("value")
@keys_store_option
@client_command
def append(context: ClientContext, key: str, value: str) -> None:
    """Append to the value of a key.

    A missing key counts as empty. If VALUE is '-', it is read from standard input.
    """
    data = _value(value)
    context.run_write(key, data, lambda store: store.append(_bytes(key), data))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("key")
@click.argument("amount", callback=_int64)
@keys_store_option
@client_command
def add(context: ClientContext, key: str, amount: int) -> None:
    """Add AMOUNT to a counter and print the sum."""

    async def add_(store: AsyncTCPStore) -> int:
        try:
            return await store.add(_bytes(key), amount)
        except DistNetworkError:
            await context.check_connection()  # a server that runs has closed the connection because of this ADD
            raise DistStoreError(
                f"the server closed the connection: the value of {key!r} is probably not a number"
            ) from None

    context.show("sum", context.run(add_))


@click.command("compare-set")
@click.argument("key")
@click.argument("expected")
@click.argument("desired")
@keys_store_option
@client_command
def compare_set(context: ClientContext, key: str, expected: str, desired: str) -> None:
    """Set KEY to DESIRED if its value is EXPECTED; print the result.

    An empty EXPECTED also matches a missing key.
    """
    context.show("value", context.run(lambda store: store.compare_set(_bytes(key), _bytes(expected), _bytes(desired))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@keys_store_option
@wait_option
@client_command
def check(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Check whether all keys exist.

    Exit with 0 if they do and with 1 if not.
    """
    context.answer("present", context.run(lambda store: store.check(list(map(_bytes, keys)))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@keys_store_option
@client_command
def wait(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Wait until all keys exist."""
    awaited = f"the key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys, {keys[0]!r} and others"
    context.run(lambda store: store.wait(list(map(_bytes, keys))), awaited=awaited)


def _check_prefix(ctx: click.Context, param: click.Parameter, prefix: str | None) -> str | None:
    if prefix == "":  # an unset variable of a script
        raise click.BadParameter("it is empty, and would delete all keys", ctx, param)
    return prefix


@click.command()
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--prefix", metavar="P", callback=_check_prefix, help="Delete all keys that begin with P.")
@keys_store_option
@client_command
def delete(context: ClientContext, keys: tuple[str, ...], prefix: str | None) -> None:
    """Delete keys.

    Print whether the key existed or, for several and with --prefix, how many keys were deleted. Exit with 1 if one of
    the KEYs did not exist. With --prefix, a key that is written meanwhile may remain.
    """
    if bool(keys) == (prefix is not None):
        raise click.UsageError("Give either the keys to delete, or --prefix.")

    async def delete_(store: AsyncTCPStore) -> list[bool]:
        names = list(map(_bytes, keys))
        if prefix is not None:
            names = [name for name in await store._list_keys_as_bytes() if name.startswith(_bytes(prefix))]
        deleted: list[bool] = []
        for at in range(0, len(names), _AT_ONCE):
            deleted += await asyncio.gather(*map(store.delete_key, names[at : at + _AT_ONCE]))
        return deleted

    deleted = context.run(delete_)
    if len(keys) == 1:
        context.answer("deleted", deleted[0])
        return
    context.show("deleted", sum(deleted))
    if not all(deleted) and prefix is None:
        sys.exit(FAILED)


@click.command("num-keys")
@keys_store_option
@wait_option
@client_command
def num_keys(context: ClientContext) -> None:
    """Print the number of keys."""
    context.show("num_keys", context.run(lambda store: store.num_keys()))


@click.group(cls=Commands)
def queue() -> None:
    """Push to a queue, pop from it, or print its length."""


@queue.command()
@click.argument("key")
@click.argument("value")
@keys_store_option
@client_command
def push(context: ClientContext, key: str, value: str) -> None:
    """Append an item to a queue.

    If VALUE is '-', it is read from standard input.
    """
    data = _value(value)
    context.run_write(key, data, lambda store: store.queue_push(_bytes(key), data))


@queue.command()
@click.argument("key")
@click.option("--block/--no-block", default=True, show_default=True, help="Wait for an item if the queue is empty.")
@keys_store_option
@client_command
def pop(context: ClientContext, key: str, block: bool) -> None:
    """Remove the oldest item from a queue and print it.

    If it cannot be printed, it is pushed back to the end of the queue.
    """
    item = context.run(lambda store: store.queue_pop(_bytes(key), block), awaited=f"an item of the queue {key!r}")
    try:
        context.show("value", item)
    except BaseException:
        if item is not None:
            context.run(lambda store: store.queue_push(_bytes(key), item))
        raise


@queue.command("len")
@click.argument("key")
@keys_store_option
@wait_option
@client_command
def len_(context: ClientContext, key: str) -> None:
    """Print the number of items in a queue."""
    context.show("length", context.run(lambda store: store.queue_len(_bytes(key))))


@click.command()
@click.argument("key")
@click.option("--world-size", type=int, required=True, metavar="N", help="Number of callers, this one included.")
@keys_store_option
@client_command
def barrier(context: ClientContext, key: str, world_size: int) -> None:
    """Wait until N callers have arrived at this barrier.

    A barrier is never reset: use a new key for every round.
    """
    context.run(lambda store: store.barrier(_bytes(key), world_size), awaited=f"{world_size} callers at {key!r}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    For bash: run 'tcpstore completion bash > ~/.tcpstore-complete' and add 'source ~/.tcpstore-complete' to ~/.bashrc.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    print_result(kind(ctx.find_root().command, {}, "tcpstore", "_TCPSTORE_COMPLETE").source())
