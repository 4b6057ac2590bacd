"""`tcpstore help`: what many commands have in common, or the help of one command."""

from typing import cast

import click

from .commands import Group
from .options import ConnectionOption
from .output import print_result

CONNECTION = "connection"

_INTRODUCTION = (
    "Options of the connection to a server. The last line of a command's --help says which of them it has. They may "
    "also precede its name, as in 'tcpstore --url URL get KEY'."
)


@click.command("help")
@click.argument("topic", nargs=-1, metavar=f"[{CONNECTION}|COMMAND]")
@click.pass_context
def help_command(ctx: click.Context, topic: tuple[str, ...]) -> None:
    """Explain the options of a connection, or a command."""
    root = ctx.find_root()
    program = root.command
    assert isinstance(program, Group)
    if topic == (CONNECTION,):
        print_result(_connection(program, ctx))
        return
    if not topic:
        print_result(root.get_help())
        return
    context, command = root, cast("click.Command | None", program)
    for name in topic:
        command = command.get_command(context, name) if isinstance(command, click.Group) else None
        if command is None:
            ctx.fail(f"No such command or topic {' '.join(topic)!r}.")
        context = click.Context(command, context, name)
    print_result(context.get_help())


def _connection(program: Group, ctx: click.Context) -> str:
    command = program.get_command(ctx, "get")
    assert command is not None
    described = [one.describe(ctx) for one in command.params if isinstance(one, ConnectionOption)]
    formatter = ctx.make_formatter()
    formatter.write_text(_INTRODUCTION)
    formatter.write_paragraph()
    formatter.write_dl([one for one in described if one is not None])
    return formatter.getvalue().rstrip("\n")
