"""Types for options with numbers. Unlike click's own types, the types of this module refuse nan and
inf, and their messages contain no type names of click.
"""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A finite number."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from cavvy.domain.units import read_number

        try:
            number = read_number(str(value))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"expected a number, not {value!r}", param, ctx)
        return float(super().convert(number, param, ctx))


class WholeRange(click.IntRange):
    """A whole number."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            if not str(value).isascii():
                raise ValueError
            number = int(value)
        except ValueError:
            self.fail(f"expected a whole number, not {value!r}", param, ctx)
        return int(super().convert(number, param, ctx))
