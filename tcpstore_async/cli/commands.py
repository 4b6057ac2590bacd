"""The command groups: options before a command's name, and usage errors in the chosen output format."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import IO, Any, Final, cast

import click

from ..base.interrupts import reset_sigint
from .options import ConnectionOption
from .output import print_error

_OPTIONS: Final = (
    "--url",
    "--timeout",
    "--output",
    "-o",
    "--tls-ca",
    "--tls-cert",
    "--tls-key",
    "--token-file",
    "--store",
)
"""Options of client commands that may precede the name. Each takes a value."""


class Group(click.Group):
    """A group whose commands refer to 'tcpstore help connection' in the last line of their help."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            names = [one.opts[0] for one in command.params if isinstance(one, ConnectionOption)]
            shown = dict.fromkeys("--tls-*" if name.startswith("--tls-") else name for name in names)
            if shown:
                command.epilog = f"See 'tcpstore help connection' for {', '.join(shown)}."
        return command


class Commands(Group):
    """A group that accepts the options of a client command before its name.

    `tcpstore --url URL get KEY` is `tcpstore get --url URL KEY`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        count = _count_leading_options(args)
        if 0 < count < len(args):  # move the name to the front
            args = [args[count], *args[:count], *args[count + 1 :]]
        elif count and not ctx.resilient_parsing:
            ctx.fail("Missing command.")
        return super().parse_args(ctx, args)


class ProgramCommands(Mapping[str, click.Command]):
    """The commands of the program by name, each imported on use.

    A few commands have most of the imports, which take longer than other commands run.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places` maps the name of a command to MODULE:NAME, with the module relative to the package."""
        self._places = places

    def __getitem__(self, name: str) -> click.Command:
        module, _, found = self._places[name].partition(":")
        return cast(click.Command, getattr(import_module(f"tcpstore_async.{module}"), found))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Program(Commands):
    """The outermost group, called as the program.

    With `-o json` every error, usage errors included, is printed as a JSON object.
    """

    def __call__(self, *given: Any, **named: Any) -> Any:
        reset_sigint()
        return self.main(*given, **named)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        wants_json = _wants_json(args)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except click.ClickException as error:
            raise (_JsonError(error) if wants_json else error) from None
        context.meta[_WANTS_JSON] = wants_json
        return context

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            raise (_JsonError(error) if ctx.meta[_WANTS_JSON] else error) from None


_WANTS_JSON: Final = "tcpstore_async.wants_json"


class _JsonError(click.ClickException):
    """A click error that is printed as a JSON object."""

    def __init__(self, error: click.ClickException) -> None:
        super().__init__(error.format_message())
        self.exit_code = error.exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        print_error(self.message, self.exit_code, "json")


def _wants_json(args: list[str]) -> bool:
    """Return whether a command line, valid or not, selects JSON output."""
    output = ""
    for index, word in enumerate(args):
        if word == "--":
            break
        if word in ("-o", "--output"):
            output = args[index + 1] if index + 1 < len(args) else ""
        elif word.startswith("-o"):
            output = word[2:]
        elif word.startswith("--output="):
            output = word.partition("=")[2]
    return output == "json"


def _count_leading_options(args: list[str]) -> int:
    """Return the number of leading words that are options of client commands, values included."""
    at = 0
    while at < len(args):
        word = args[at]
        if word in _OPTIONS:
            at += 2
        elif word.startswith("-o") or word.partition("=")[0] in _OPTIONS:
            at += 1
        else:
            break
    return at
