"""The commands that ask a server something, ours or PyTorch's.

Knows: options, how results print, exit codes. Must not know: how a call is made.
Exit status: 0 done (for `check`: present), 1 failed (for `check`: absent), 2 usage, 3 timed out, 4 unreachable.
"""

import base64
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import click
import msgspec
from click.shell_completion import get_completion_class

from ..client.aio import AsyncTCPStore
from ..errors import DistError, DistNetworkError, DistStoreError, StoreTimeoutError
from ..limits import Limits
from ..serving import build, run_loop
from ..version import VERSION
from .commands import Commands
from .output import is_closed, say, say_error, say_json, shown, shown_in_a_line

DEFAULT_URL: Final = "tcp://127.0.0.1:29500"
DEFAULT_PORT: Final = 29500

FAILED: Final = 1
TIMED_OUT: Final = 3
UNREACHABLE: Final = 4

Ask = Callable[[AsyncTCPStore], Awaitable[Any]]


class ClientContext:
    """What every client command needs: where the server is, how long to wait, how to print."""

    def __init__(self, url: tuple[str, int], timeout: float, output: str) -> None:
        self.host, self.port = url
        self.timeout = timeout
        self.output = output

    def ask(self, ask: Ask) -> Any:
        """Connect, ask, and leave; exits with the right status if that fails."""
        answers: list[Any] = []

        async def main() -> None:
            async with await AsyncTCPStore.connect(self.host, self.port, timeout=self.timeout) as store:
                answers.append(await ask(store))

        try:
            run_loop(main())
        except StoreTimeoutError as error:
            self.fail(str(error), TIMED_OUT)
        except DistNetworkError as error:
            self.fail(str(error), UNREACHABLE)
        except (DistError, NotImplementedError) as error:
            self.fail(str(error), FAILED)
        except UnicodeDecodeError as error:
            self.fail(f"a name on this server is not UTF-8: {error.object!r}", FAILED)
        return answers[0]

    async def demand_a_server(self) -> None:
        """Raises DistNetworkError if there is none any more."""
        async with await AsyncTCPStore.connect(self.host, self.port, timeout=self.timeout):
            pass

    def write(self, key: str, content: bytes, write: Ask) -> None:
        """Have a value stored, and hear that it was; exits with the right status if that fails."""

        async def ask(store: AsyncTCPStore) -> None:
            try:
                await write(store)
                await store.ping()
            except DistNetworkError:
                over = _over_a_limit(key, content)
                if not over:
                    raise
                await self.demand_a_server()
                raise DistStoreError(f"the server closed the connection: {over}") from None

        self.ask(ask)

    def fail(self, text: str, status: int) -> NoReturn:
        say_error(text, status, self.output)
        sys.exit(status)

    def show(self, name: str, value: Any) -> None:
        """Print a result: raw, or as an object of JSON."""
        if self.output == "json":
            say_json(_jsonable(name, value))
        elif isinstance(value, bytes):
            say(value, nl=False)
        elif value is not None:
            say(str(value).lower() if isinstance(value, bool) else value)

    def answer(self, name: str, yes: bool) -> None:
        """Print a yes or no and exit with 0 or 1, which is the answer even where nothing can be printed."""
        if not is_closed():
            self.show(name, yes)
        if not yes:
            sys.exit(FAILED)


def _over_a_limit(key: str, content: bytes) -> str:
    """Which limit that servers have, ours and PyTorch's, this key or value is over; empty if none."""
    limits = Limits()
    for what, size, name, limit in (
        ("a key", len(_bytes(key)) + 1, "key_bytes", limits.key_bytes),
        ("a value", len(content), "value_bytes", limits.value_bytes),
    ):
        if size > limit:
            return (
                f"{what} of {size} bytes may be more than it takes, which is {limit} unless --limit {name} changes it"
            )
    return ""


def _jsonable(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bytes):
        return {name: value}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def _parse_url(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text)
        if parts.scheme != "tcp" or not parts.hostname or parts.path.strip("/"):
            raise ValueError
        return parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form tcp://HOST:PORT", ctx, param) from None


def _seconds(ctx: click.Context, param: click.Parameter, number: float) -> float:
    if math.isnan(number) or number == math.inf:
        raise click.BadParameter("must be a number of seconds; a negative one means for ever", ctx, param)
    return number


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all client commands, as one `Asker`."""

    def command(url: tuple[str, int], timeout: float, output: str, **given: Any) -> None:
        function(ClientContext(url, timeout, output), **given)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option(
            "-o",
            "--output",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Print the bare result, or an object of JSON.",
        ),
        click.option(
            "--timeout",
            type=float,
            default=10.0,
            show_default=True,
            callback=_seconds,
            help="Seconds; negative: for ever.",
        ),
        click.option(
            "--url",
            envvar="TCPSTORE_URL",
            default=DEFAULT_URL,
            show_default=True,
            show_envvar=True,
            callback=_parse_url,
            help="The server.",
        ),
    ):
        command = option(command)
    return command


def _int64(ctx: click.Context, param: click.Parameter, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number", ctx, param) from None
    if not -(2**63) <= number < 2**63:
        raise click.BadParameter(f"{text} does not fit 64 bits", ctx, param)
    return number


def _bytes(text: str) -> bytes:
    return os.fsencode(text)


def _value(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else _bytes(text)


@click.command()
@client_command
def ping(context: ClientContext) -> None:
    """Say whether the server answers, and how fast."""

    async def ask(store: AsyncTCPStore) -> float:
        began = time.perf_counter()
        await store.ping()
        return round((time.perf_counter() - began) * 1000, 3)

    context.show("milliseconds", context.ask(ask))


@click.command()
@click.argument("key")
@client_command
def get(context: ClientContext, key: str) -> None:
    """Print a value, as soon as there is one."""
    context.show("value", context.ask(lambda store: store.get(_bytes(key))))


@click.command("set")
@click.argument("key")
@click.argument("value")
@client_command
def set_(context: ClientContext, key: str, value: str) -> None:
    """Store a value; '-' reads it from standard input. Before a value like -1 say --, which ends the options."""
    content = _value(value)
    context.write(key, content, lambda store: store.set(_bytes(key), content))


@click.command()
@click.argument("key")
@click.argument("value")
@client_command
def append(context: ClientContext, key: str, value: str) -> None:
    """Append to a value; '-' reads from standard input."""
    content = _value(value)
    context.write(key, content, lambda store: store.append(_bytes(key), content))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("key")
@click.argument("amount", callback=_int64)
@client_command
def add(context: ClientContext, key: str, amount: int) -> None:
    """Add to a counter and print the sum."""

    async def ask(store: AsyncTCPStore) -> int:
        try:
            return await store.add(_bytes(key), amount)
        except DistNetworkError:
            await context.demand_a_server()
            raise DistStoreError(f"the server closed the connection: the value of {key!r} may be no number") from None

    context.show("sum", context.ask(ask))


@click.command("compare-set")
@click.argument("key")
@click.argument("expected")
@click.argument("desired")
@client_command
def compare_set(context: ClientContext, key: str, expected: str, desired: str) -> None:
    """Store DESIRED if the value is EXPECTED; print the value afterwards.

    EXPECTED '' also means that the key is missing.
    """
    context.show("value", context.ask(lambda store: store.compare_set(_bytes(key), _bytes(expected), _bytes(desired))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@client_command
def check(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Exit with 0 if all keys are there, with 1 if not."""
    context.answer("present", context.ask(lambda store: store.check(list(map(_bytes, keys)))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@client_command
def wait(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Wait until all keys are there."""
    context.ask(lambda store: store.wait(list(map(_bytes, keys))))


@click.command()
@click.argument("key")
@client_command
def delete(context: ClientContext, key: str) -> None:
    """Remove a key; exit with 1 if it was not there."""
    context.answer("deleted", context.ask(lambda store: store.delete_key(_bytes(key))))


@click.command()
@click.option("--prefix", default="", help="Only keys that begin so.")
@click.option("--raw", is_flag=True, help="Print names as they are.")
@client_command
def keys(context: ClientContext, prefix: str, raw: bool) -> None:
    """Print the names of the keys, one a line, sorted.

    Line breaks in a name are escaped, and on a terminal all control characters, unless --raw says otherwise; -o json
    is unambiguous.
    """
    found: list[str] = context.ask(lambda store: store.list_keys())
    names = sorted(name for name in found if name.startswith(prefix))
    if context.output == "json":
        say_json({"keys": names})
    elif names:
        say("\n".join(names if raw else map(shown_in_a_line, names)))


@click.command("num-keys")
@client_command
def num_keys(context: ClientContext) -> None:
    """Print how many keys there are."""
    context.show("num_keys", context.ask(lambda store: store.num_keys()))


@click.group(cls=Commands)
def queue() -> None:
    """Push to a queue, pop from it, or print its length."""


@queue.command()
@click.argument("key")
@click.argument("value")
@client_command
def push(context: ClientContext, key: str, value: str) -> None:
    """Append an item; '-' reads it from standard input."""
    content = _value(value)
    context.write(key, content, lambda store: store.queue_push(_bytes(key), content))


@queue.command()
@click.argument("key")
@click.option("--block/--no-block", default=True, show_default=True, help="Wait for an item.")
@client_command
def pop(context: ClientContext, key: str, block: bool) -> None:
    """Take the oldest item and print it."""
    context.show("value", context.ask(lambda store: store.queue_pop(_bytes(key), block)))


@queue.command("len")
@click.argument("key")
@client_command
def len_(context: ClientContext, key: str) -> None:
    """Print how many items there are."""
    context.show("length", context.ask(lambda store: store.queue_len(_bytes(key))))


@click.command()
@click.argument("key")
@click.option("--world-size", type=int, required=True, metavar="N", help="How many have to arrive.")
@client_command
def barrier(context: ClientContext, key: str, world_size: int) -> None:
    """Wait until as many callers have arrived at this key as --world-size says, this one among them.

    A barrier is never reset: use a new key for every round.
    """
    context.ask(lambda store: store.barrier(_bytes(key), world_size))


@click.command()
@click.option("--local", is_flag=True, help="This installation, without asking a server.")
@client_command
def info(context: ClientContext, local: bool) -> None:
    """Print what is known of the server, or of this installation."""

    async def ask(store: AsyncTCPStore) -> dict[str, Any]:
        began = time.perf_counter()
        await store.ping()
        took = round((time.perf_counter() - began) * 1000, 3)
        known = {
            "host": context.host,
            "port": context.port,
            "num_keys": await store.num_keys(),
            "ping_milliseconds": took,
        }
        server = await store.server()
        return {
            **known,
            **(msgspec.to_builtins(server) if server else {"server": "PyTorch's, or one that speaks as it"}),
        }

    known = _local() if local else context.ask(ask)
    if context.output == "json":
        say_json(known)
        return
    lines = []
    for name, value in known.items():
        if isinstance(value, dict):
            lines += [f"{name}.{inner}: {number}" for inner, number in value.items()]
        else:
            lines.append(shown(f"{name}: {value}"))
    say("\n".join(lines))


def _local() -> dict[str, Any]:
    limits = msgspec.to_builtins(Limits())
    return {"version": VERSION, "build": build(), "loop": "uvloop", "limits": limits}


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete this command.

    For bash: tcpstore completion bash > ~/.tcpstore-complete; then put 'source ~/.tcpstore-complete' into ~/.bashrc.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(ctx.find_root().command, {}, "tcpstore", "_TCPSTORE_COMPLETE").source())


def add_client_commands(group: click.Group) -> None:
    """Add them to the command line."""
    for command in (
        ping, get, set_, add, append, compare_set, check, wait, delete, keys, num_keys, queue, barrier, info,
        completion,
    ):  # fmt: skip
        group.add_command(command)
