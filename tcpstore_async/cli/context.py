"""What commands that use a server have in common: its address, the timeout, the output format, credentials.

Knows options, exit statuses and how a client is started. Must not know what a command asks for. Methods import what
connects themselves: commands that only query an admin socket must start fast.
"""

import base64
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ..auth.secret_files import TlsFiles
from ..base.addresses import unbracketed
from ..base.errors import AccessDeniedError, DistError, DistNetworkError, DistStoreError, StoreTimeoutError
from ..client.server_url import FORM, Address, HttpUrl, ServerUrl, bracket_hint, parse_http_url, parse_server_url
from ..client.tls_settings import CA, CERT, KEY, wants_tls
from ..client.url_variables import COMMANDS_URL, advice_for_commands
from .options import ConnectionOption, Decorator, add_options
from .output import ProgressLine, print_error, print_json, print_result, stdout_is_closed

if TYPE_CHECKING:
    from ..client.aio import AsyncTCPStore

DEFAULT_PORT: Final = 29500
DEFAULT_URL: Final = f"tcp://127.0.0.1:{DEFAULT_PORT}"

FAILED: Final = 1
TIMED_OUT: Final = 3
UNREACHABLE: Final = 4
NOT_ALLOWED: Final = 5

OTHER_SERVER: Final = "PyTorch or compatible"
"""Printed for a server that does not identify itself as ours."""

Operation = Callable[["AsyncTCPStore"], Awaitable[Any]]


class ClientContext:
    """Options of a client command: the server's address, the timeout in seconds, the output format, the token.

    `store` is the name of the store, None for the unnamed one. A command that waits retries a server that refuses
    connections, and waits for a missing store, until the timeout. The address may be that of the HTTP process, which
    only answers queries about the server.
    """

    def __init__(
        self,
        url: ServerUrl | HttpUrl,
        timeout: float,
        output: str,
        tls_files: TlsFiles,
        token_file: str | None = None,
        store: str | None = None,
        waits: bool = True,
    ) -> None:
        self.host, self.port = url.host, url.port
        self.http = url if isinstance(url, HttpUrl) else None
        self.servers: list[Address] = []
        """The addresses of the servers; none if the address is that of the HTTP process."""
        if isinstance(url, ServerUrl):
            self.servers = url.all()
            self.tls = wants_tls(url.tls or None)
            self.address = str(url._replace(tls=self.tls))
        self.tls_files = tls_files
        self.timeout = timeout
        self.output = output
        self.token_file = token_file
        self.store = store or None
        self.waits = waits
        self.is_default = False
        """Whether the address is the default one, since none was given."""

    def run(
        self, operation: Operation, otherwise: "Callable[[DistError], Any] | None" = None, awaited: str = ""
    ) -> Any:
        """Connect, execute the operation, disconnect and return its result; exit with the right status on failure.

        If it fails and `otherwise` returns a result, return that instead. A progress line on a terminal says what is
        waited for: the server, then what is `awaited` there.
        """
        from ..serving import run_loop

        results: list[Any] = []
        began = time.monotonic()
        limit = "" if self.timeout < 0 else f" of {self.timeout:g}"

        async def main(progress: ProgressLine) -> None:
            def say(what: str) -> None:
                progress.describe = lambda: f"waiting for {what} ({time.monotonic() - began:.0f}{limit} s)"

            say(f"{self.address} to accept a connection" if self.store is None else f"the store {self.store!r}")
            async with await self.connect() as store:
                say(f"{awaited} at {self.address}" if awaited else f"the reply of {self.address}")
                results.append(await operation(store))

        try:
            with ProgressLine() as progress:
                run_loop(main(progress))
        except DistError as error:
            instead = None if otherwise is None else otherwise(error)
            if instead is None:
                self.fail(str(error), exit_status(error))
            return instead
        except NotImplementedError as error:
            self.fail(str(error), FAILED)
        return results[0]

    def run_write(self, key: str, value: bytes, write: Operation) -> None:
        """Execute a write, wait until the server has executed it, and exit with the right status on failure."""

        async def write_and_ping(store: "AsyncTCPStore") -> None:
            try:
                await write(store)
                await store.ping()
            except DistNetworkError:
                reason = _exceeded_limit(key, value)
                if not reason:
                    raise
                await self.check_connection()  # a server that runs has closed the connection because of this write
                raise DistStoreError(f"the server closed the connection: {reason}") from None

        self.run(write_and_ping)

    async def check_connection(self) -> None:
        """Raise DistNetworkError if the server cannot be reached."""
        async with await self.connect():
            pass

    async def connect(self) -> "AsyncTCPStore":
        """Return a new store. Raises DistNetworkError, AccessDeniedError."""
        from ..client.aio import AsyncTCPStore
        from ..client.credentials import read_token
        from ..client.servers import Servers
        from ..client.store_name import StoreName

        token = None if self.token_file is None else read_token(self.token_file).decode()
        name = None
        if self.store is not None:
            name = StoreName(self.store)
            name.waits = self.waits
        try:
            return await AsyncTCPStore._connect(
                Servers(*self.servers), self.timeout, token, self.tls, self.tls_files, name, not self.waits
            )
        except ConnectionRefusedError:
            raise DistNetworkError(
                f"cannot connect to {self.address}: Connection refused; start a server there, or retry with --wait"
            ) from None

    @contextmanager
    def plain_address(self, key: str = "") -> Iterator[tuple[str, int]]:
        """Yield a host and port for plain connections without tokens: those of a relay if one is needed.

        Connections there use the store of --store. Raises DistError; AccessDeniedError if the token does not allow
        writing `key`, if one is given.
        """
        from ..client.credentials import find_token, read_token
        from ..relay.process import RelayProcess
        from ..serving import run_loop

        token = find_token() if self.token_file is None else read_token(self.token_file)
        if not token and not self.tls and self.store is None and len(self.servers) == 1:
            yield self.host, self.port
            return

        async def check() -> None:
            async with await self.connect() as store:
                await store.check([])
                if key:
                    await store.delete_key(key)

        run_loop(check())
        relay = RelayProcess(
            self.address,
            token=token.decode(),
            files=self.tls_files if self.tls else None,
            quiet=True,
            store=self.store or "",
        )
        with closing(relay):
            yield "127.0.0.1", relay.port

    def fail(self, text: str, status: int) -> NoReturn:
        advice = advice_for_commands() if self.is_default and status in (TIMED_OUT, UNREACHABLE) else ""
        if advice:
            text = f"{text} {advice}"
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


def exit_status(error: Exception) -> int:
    """Return the exit status for an error."""
    from ..client.store_name import StoreEndedError

    kinds = (
        (StoreEndedError, FAILED),
        (StoreTimeoutError, TIMED_OUT),
        (AccessDeniedError, NOT_ALLOWED),
        (DistNetworkError, UNREACHABLE),
    )
    return next((status for kind, status in kinds if isinstance(error, kind)), FAILED)


def _exceeded_limit(key: str, value: bytes) -> str:
    """Describe the default limit, of our server and PyTorch's, that a key or value exceeds; empty if none."""
    from ..base.limits import Limits

    limits = Limits()
    for what, size, name, limit in (
        ("key", len(os.fsencode(key)) + 1, "key_bytes", limits.key_bytes),
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
    """Return the address given as HOST:PORT, tcp://HOST:PORT, or tcps://HOST:PORT for TLS. Raises BadParameter.

    Several are separated by commas. Only a URL may leave out the port.
    """
    bare = "://" not in text.partition(",")[0]
    url = f"tcp://{text}" if bare else text
    try:
        return parse_server_url(url, 0 if bare else DEFAULT_PORT)
    except ValueError:
        only = "; only who, waiters, stat, top and stores take http://" if text.startswith("http://") else ""
        wrong = f"{text!r} is not of the form HOST:PORT, {FORM}{bracket_hint(url)}{only}"
        raise click.BadParameter(wrong, ctx, param) from None


def parse_one_url(ctx: click.Context, param: click.Parameter, text: str) -> ServerUrl:
    """Return the address of a single server, given as for `parse_url`. Raises BadParameter."""
    url = parse_url(ctx, param, text)
    if url.others:
        raise click.BadParameter(f"{text!r} has several servers; give one", ctx, param)
    return url


def _parse_any_url(ctx: click.Context, param: click.Parameter, text: str) -> ServerUrl | HttpUrl:
    """Return the address given as for `parse_url`, or as http://HOST:PORT. Raises BadParameter."""
    if not text.startswith("http://"):
        return parse_url(ctx, param, text)
    try:
        return parse_http_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


ParseUrl = Callable[[click.Context, click.Parameter, str], ServerUrl | HttpUrl]


def url_option(text: str, parse: ParseUrl = parse_url, cls: type[click.Option] = click.Option) -> Decorator:
    """Return the option --url with this help, converted by `parse`."""
    return click.option(
        "--url",
        cls=cls,
        envvar=COMMANDS_URL,
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        callback=parse,
        help=text,
    )


tls_client_options: Final = add_options(
    *[
        click.option(
            name, cls=ConnectionOption, envvar=variable, default="", metavar="FILE", show_envvar=True, help=text
        )
        for name, variable, text in (
            ("--tls-ca", CA, "For tcps://, trust these CAs (PEM) instead of the system's."),
            ("--tls-cert", CERT, "For tcps://, present this client certificate (PEM) to the server."),
            ("--tls-key", KEY, "The private key of --tls-cert (PEM, not encrypted)."),
        )
    ]
)


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
    cls=ConnectionOption,
    type=click.Path(),
    metavar="FILE",
    help="File with the token to present; default: TCPSTORE_TOKEN, or the file named by TCPSTORE_TOKEN_FILE.",
)


def parse_store(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Return the name of a store; an address on loopback stands for a store of this host, as in programs and errors.

    Raises BadParameter for an invalid name.
    """
    if text is None:
        return None
    from ..client.store_name import StoreName, is_local, name_of  # not at the top: other commands must start fast

    host, _, port = text.rpartition(":")
    host = unbracketed(host)
    if port.isascii() and port.isdecimal() and is_local(host):
        text = name_of(host, int(port))
    try:
        return StoreName(text).name
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


keys_store_option = click.option(
    "--store",
    envvar="TCPSTORE_STORE",
    show_envvar=True,
    metavar="NAME",
    callback=parse_store,
    help="Use this named store, as 'tcpstore stores' prints it, or localhost:PORT; '' for the one without a name.",
)
"""For commands that use keys; the value is `ClientContext.store`."""

wait_option = click.option(
    "--wait", is_flag=True, help="Retry a server that refuses connections, and wait for --store, until --timeout."
)
"""For commands that otherwise fail at once; the value is `ClientContext.waits`."""


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all client commands to a command, which gets them as a `ClientContext`.

    The context also has the values of --store and --wait, if the command has these options.
    """
    return _with_context(function, parse_url)


def looking_command(function: Callable[..., None]) -> Callable[..., None]:
    """Do the same for a command that may also query the HTTP process of a server elsewhere."""
    return _with_context(function, _parse_any_url)


def _with_context(function: Callable[..., None], parse: ParseUrl) -> Callable[..., None]:
    def command(
        url: ServerUrl | HttpUrl,
        timeout: float,
        output: str,
        tls_ca: str,
        tls_cert: str,
        tls_key: str,
        token_file: str | None,
        store: str | None = None,
        wait: bool = True,
        **given: Any,
    ) -> None:
        files = TlsFiles(tls_ca, tls_cert, tls_key)
        context = ClientContext(url, timeout, output, files, token_file, store, wait)
        source = click.get_current_context().get_parameter_source("url")
        context.is_default = source is click.core.ParameterSource.DEFAULT
        function(context, **given)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    timeout_option = click.option(
        "--timeout",
        cls=ConnectionOption,
        type=float,
        default=10.0,
        show_default=True,
        callback=parse_seconds,
        help="Timeout in seconds; negative for none.",
    )
    url = url_option(
        "Address of the server: HOST:PORT, tcp://HOST:PORT, or tcps://HOST:PORT for TLS. who, waiters, stat, top and "
        "stores also take http://HOST:PORT, that of its HTTP process; otherwise, commands that query the admin socket "
        "need an address of this machine.",
        parse,
        ConnectionOption,
    )
    return add_options(output_option, url, timeout_option, token_file_option, tls_client_options)(command)
