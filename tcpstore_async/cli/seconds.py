"""The type of options that are a number of seconds."""

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A range that rejects NaN, which no bound excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return number
