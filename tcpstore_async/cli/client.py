"""The commands that use a running server, ours or PyTorch's.

They parse options, make one call of the asynchronous client and print its result; they do not know how a call is made.
Exit status: 0 success, 1 failure (`check`: a key is missing), 2 usage error, 3 timeout, 4 server unreachable, 5 not
allowed.
"""

import base64
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, NoReturn

import click
from click.shell_completion import get_completion_class

from ..client.aio import AsyncTCPStore
from ..client.credentials import find_token, read_token
from ..client.server_url import ServerUrl, parse_server_url
from ..client.store_name import StoreEndedError, StoreName
from ..client.tls import CA, CERT, KEY, ClientTls, wants_tls
from ..errors import AccessDeniedError, DistError, DistNetworkError, DistStoreError, StoreTimeoutError
from ..limits import Limits
from ..relay.process import RelayProcess
from ..secret_files import TlsFiles
from ..serving import run_loop
from .commands import Commands
from .output import print_error, print_json, print_result, stdout_is_closed

DEFAULT_PORT: Final = 29500
DEFAULT_URL: Final = f"tcp://127.0.0.1:{DEFAULT_PORT}"

FAILED: Final = 1
TIMED_OUT: Final = 3
UNREACHABLE: Final = 4
NOT_ALLOWED: Final = 5

OTHER_SERVER: Final = "PyTorch or compatible"
"""Printed for a server that does not identify itself as ours."""

Operation = Callable[[AsyncTCPStore], Awaitable[Any]]


class ClientContext:
    """What every client command needs: the server's address, the timeout in seconds, the output format, the token."""

    def __init__(
        self, url: ServerUrl, timeout: float, output: str, tls_files: TlsFiles, token_file: str | None = None
    ) -> None:
        self.host, self.port = url.host, url.port
        self.tls = wants_tls(url.tls or None)
        self.tls_files = tls_files
        self.timeout = timeout
        self.output = output
        self.token_file = token_file
        self.store: str | None = None
        """The name of the store that is used; None for the one without a name."""

    def run(self, operation: Operation, otherwise: "Callable[[DistError], Any] | None" = None) -> Any:
        """Connect, execute the operation, disconnect and return its result; exit with the right status on failure.

        If it fails, the result is what `otherwise` returns, unless that is None.
        """
        results: list[Any] = []

        async def main() -> None:
            async with await self.connect() as store:
                results.append(await operation(store))

        try:
            run_loop(main())
        except DistError as error:
            instead = None if otherwise is None else otherwise(error)
            if instead is None:
                self.fail(str(error), _status(error))
            return instead
        except NotImplementedError as error:
            self.fail(str(error), FAILED)
        except UnicodeDecodeError as error:
            self.fail(f"cannot list the keys: {error.object!r} is not UTF-8", FAILED)
        return results[0]

    def run_write(self, key: str, value: bytes, write: Operation) -> None:
        """Execute a write and wait until the server has done it; exit with the right status on failure."""

        async def write_and_ping(store: AsyncTCPStore) -> None:
            try:
                await write(store)
                await store.ping()
            except DistNetworkError:
                reason = _exceeded_limit(key, value)
                if not reason:
                    raise
                await self.check_connection()
                raise DistStoreError(f"the server closed the connection: {reason}") from None

        self.run(write_and_ping)

    async def check_connection(self) -> None:
        """Raise DistNetworkError if the server cannot be reached any more."""
        async with await self.connect():
            pass

    async def connect(self) -> AsyncTCPStore:
        """Return a new store. Raises DistNetworkError, AccessDeniedError."""
        token = None if self.token_file is None else read_token(self.token_file).decode()
        if self.store is not None:
            name = StoreName(self.store)
            name.waits = False
            tls = ClientTls(self.tls_files) if self.tls else None
            return AsyncTCPStore(self.host, self.port, self.timeout, token=token, tls=tls, name=name)
        return await AsyncTCPStore.connect(
            self.host, self.port, timeout=self.timeout, token=token, tls=self.tls, tls_files=self.tls_files, server=""
        )

    @contextmanager
    def plain_address(self, key: str = "") -> Iterator[tuple[str, int]]:
        """Give the host and port of a server for plain connections without tokens: of a relay, if it takes one.

        Raises DistError; AccessDeniedError if the token does not allow to write `key`, unless that is empty.
        """
        token = find_token() if self.token_file is None else read_token(self.token_file)
        if not token and not self.tls:
            yield self.host, self.port
            return

        async def check() -> None:
            async with await self.connect() as store:
                await store.check([])
                if key:
                    await store.delete_key(key)

        run_loop(check())
        url = str(ServerUrl(self.host, self.port, self.tls))
        relay = RelayProcess(url, token=token.decode(), files=self.tls_files if self.tls else None, quiet=True)
        with closing(relay):
            yield "127.0.0.1", relay.port

    def fail(self, text: str, status: int) -> NoReturn:
        print_error(text, status, self.output)
        sys.exit(status)

    def show(self, name: str, value: Any) -> None:
        """Print a result as it is, or as a JSON object."""
        if self.output == "json":
            print_json(_jsonable(name, value))
        elif isinstance(value, bytes):
            print_result(value, nl=False)
        elif value is not None:
            print_result(str(value).lower() if isinstance(value, bool) else value)

    def answer(self, name: str, yes: bool) -> None:
        """Print a yes or no, and exit with 0 or 1, even if standard output is closed."""
        if not stdout_is_closed():
            self.show(name, yes)
        if not yes:
            sys.exit(FAILED)


def _status(error: DistError) -> int:
    """Return the exit status for an error."""
    kinds = (
        (StoreEndedError, FAILED),
        (StoreTimeoutError, TIMED_OUT),
        (AccessDeniedError, NOT_ALLOWED),
        (DistNetworkError, UNREACHABLE),
    )
    return next((status for kind, status in kinds if isinstance(error, kind)), FAILED)


def _exceeded_limit(key: str, value: bytes) -> str:
    """Describe the default limit, of our server and PyTorch's, that a key or value exceeds; empty if none."""
    limits = Limits()
    for what, size, name, limit in (
        ("key", len(_bytes(key)) + 1, "key_bytes", limits.key_bytes),
        ("value", len(value), "value_bytes", limits.value_bytes),
    ):
        if size > limit:
            return (
                f"the {size}-byte {what} probably exceeds the server's limit ({limit} by default; see --limit {name})"
            )
    return ""


def _jsonable(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bytes):
        return {name: value}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def parse_url(ctx: click.Context, param: click.Parameter, text: str) -> ServerUrl:
    """Return the address of an option tcp://HOST:PORT, or tcps://HOST:PORT for TLS. Raises BadParameter."""
    try:
        return parse_server_url(text, DEFAULT_PORT)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def url_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option --url with this help, which a command gets as a `ServerUrl`."""
    return click.option(
        "--url",
        envvar="TCPSTORE_URL",
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        callback=parse_url,
        help=text,
    )


_TLS_OPTIONS: Final = (
    ("--tls-ca", CA, "For tcps://, trust these CAs (PEM) instead of the system's."),
    ("--tls-cert", CERT, "For tcps://, present this client certificate (PEM) to the server."),
    ("--tls-key", KEY, "The private key of --tls-cert (PEM, not encrypted)."),
)


def tls_client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to what connects to a server, which gets them as `tls_ca`, `tls_cert` and `tls_key`."""
    for name, variable, text in reversed(_TLS_OPTIONS):
        command = click.option(name, envvar=variable, default="", metavar="FILE", show_envvar=True, help=text)(command)
    return command


def parse_seconds(ctx: click.Context, param: click.Parameter, number: float) -> float:
    if math.isnan(number) or number == math.inf:
        raise click.BadParameter(f"{number} is not a finite number; use a negative number for no timeout", ctx, param)
    return number


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format of results and errors.",
)

token_file_option = click.option(
    "--token-file",
    type=click.Path(),
    metavar="FILE",
    help="File with the token to present; default: TCPSTORE_TOKEN, or the file named by TCPSTORE_TOKEN_FILE.",
)


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all client commands to a command, which gets them as a `ClientContext`."""

    def command(
        url: ServerUrl,
        timeout: float,
        output: str,
        tls_ca: str,
        tls_cert: str,
        tls_key: str,
        token_file: str | None,
        **given: Any,
    ) -> None:
        function(ClientContext(url, timeout, output, TlsFiles(tls_ca, tls_cert, tls_key), token_file), **given)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        tls_client_options,
        output_option,
        click.option(
            "--timeout",
            type=float,
            default=10.0,
            show_default=True,
            callback=parse_seconds,
            help="Timeout in seconds; negative for none.",
        ),
        url_option("Address of the server; tcps://HOST:PORT for TLS."),
        token_file_option,
    ):
        command = option(command)
    return command


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
@client_command
def ping(context: ClientContext) -> None:
    """Measure the round-trip time to the server, in milliseconds."""
    context.show("milliseconds", context.run(ping_milliseconds))


@click.command()
@click.argument("key")
@client_command
def get(context: ClientContext, key: str) -> None:
    """Wait for a key and print its value."""
    context.show("value", context.run(lambda store: store.get(_bytes(key))))


@click.command("set")
@click.argument("key")
@click.argument("value")
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
@client_command
def add(context: ClientContext, key: str, amount: int) -> None:
    """Add AMOUNT to a counter and print the sum."""

    async def add_(store: AsyncTCPStore) -> int:
        try:
            return await store.add(_bytes(key), amount)
        except DistNetworkError:
            await context.check_connection()
            raise DistStoreError(
                f"the server closed the connection: the value of {key!r} is probably not a number"
            ) from None

    context.show("sum", context.run(add_))


@click.command("compare-set")
@click.argument("key")
@click.argument("expected")
@click.argument("desired")
@client_command
def compare_set(context: ClientContext, key: str, expected: str, desired: str) -> None:
    """Set KEY to DESIRED if its value is EXPECTED; print the result.

    An empty EXPECTED also matches a missing key.
    """
    context.show("value", context.run(lambda store: store.compare_set(_bytes(key), _bytes(expected), _bytes(desired))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@client_command
def check(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Check whether all keys exist.

    Exit with 0 if they do and with 1 if not.
    """
    context.answer("present", context.run(lambda store: store.check(list(map(_bytes, keys)))))


@click.command()
@click.argument("keys", nargs=-1, required=True)
@client_command
def wait(context: ClientContext, keys: tuple[str, ...]) -> None:
    """Wait until all keys exist."""
    context.run(lambda store: store.wait(list(map(_bytes, keys))))


@click.command()
@click.argument("key")
@client_command
def delete(context: ClientContext, key: str) -> None:
    """Delete a key.

    Exit with 1 if it did not exist.
    """
    context.answer("deleted", context.run(lambda store: store.delete_key(_bytes(key))))


@click.command("num-keys")
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
@client_command
def pop(context: ClientContext, key: str, block: bool) -> None:
    """Remove the oldest item from a queue and print it.

    If it cannot be printed, it is pushed back to the end of the queue.
    """
    item = context.run(lambda store: store.queue_pop(_bytes(key), block))
    try:
        context.show("value", item)
    except BaseException:
        if item is not None:
            context.run(lambda store: store.queue_push(_bytes(key), item))
        raise


@queue.command("len")
@click.argument("key")
@client_command
def len_(context: ClientContext, key: str) -> None:
    """Print the number of items in a queue."""
    context.show("length", context.run(lambda store: store.queue_len(_bytes(key))))


@click.command()
@click.argument("key")
@click.option("--world-size", type=int, required=True, metavar="N", help="Number of callers, this one included.")
@client_command
def barrier(context: ClientContext, key: str, world_size: int) -> None:
    """Wait until N callers have arrived at this barrier.

    A barrier is never reset: use a new key for every round.
    """
    context.run(lambda store: store.barrier(_bytes(key), world_size))


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


def add_client_commands(group: click.Group) -> None:
    """Add all client commands to a group."""
    for command in (
        ping, get, set_, add, append, compare_set, check, wait, delete, num_keys, queue, barrier, completion,
    ):  # fmt: skip
        group.add_command(command)
