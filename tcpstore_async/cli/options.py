"""Parts that options are made of."""

import math
from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def add_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options to a command, in the order of its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class ConnectionOption(click.Option):
    """An option that the help of a command leaves out, since many have it: 'tcpstore help connection' describes it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return None

    def describe(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help of the option."""
        return super().get_help_record(ctx)


class Seconds(click.FloatRange):
    """A range of seconds that rejects NaN, which no bound excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return number
