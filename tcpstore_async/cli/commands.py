"""Groups of commands, which take the options of a command before its name, too.

Knows: click. Must not know: what a command does.
"""

from typing import Any

import click

from ..interrupts import end_at_once

_VALUED = ("--url", "--timeout", "--output", "-o")
"""Options of every client command. Each has a value."""


class Commands(click.Group):
    """`tcpstore --url URL get KEY` is `tcpstore get --url URL KEY`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        count = _leading(args)
        if 0 < count < len(args):
            args = [args[count], *args[:count], *args[count + 1 :]]
        return super().parse_args(ctx, args)


class Program(Commands):
    """The outermost group, which is called as a program."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        end_at_once()
        return self.main(*given, **named)


def _leading(args: list[str]) -> int:
    """How many words at the beginning are such options with their values."""
    at = 0
    while at < len(args):
        word = args[at]
        if word in _VALUED:
            at += 2
        elif word.startswith("-o") or word.partition("=")[0] in _VALUED:
            at += 1
        else:
            break
    return at
