"""Options with numbers. Unlike click's own types, the types of this module refuse nan and inf, and
their messages contain no type names of click. `read_length` reads a length of time.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click

from cavvy.cli.view.failure import CommandFailure

Made = TypeVar("Made", bound=Callable[..., Any] | click.Command)


def _say_range(kind: click.FloatRange | click.IntRange) -> str:
    """Return which numbers are accepted, such as "of 1 or more" or "from 0 to 100"."""
    least = None if kind.min is None else f"{kind.min:g}"
    most = None if kind.max is None else f"{kind.max:g}"
    if least is None:
        return f"of at most {most}"
    if kind.min_open:
        return f"above {least}" if most is None else f"above {least}, at most {most}"
    return f"of {least} or more" if most is None else f"from {least} to {most}"


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
        try:
            return float(super().convert(number, param, ctx))
        except click.BadParameter:
            self.fail(f"expected a number {_say_range(self)}, not {value}", param, ctx)


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
        try:
            return int(super().convert(number, param, ctx))
        except click.BadParameter:
            self.fail(f"expected a whole number {_say_range(self)}, not {value}", param, ctx)


def count_option(
    *names: str, least: int = 1, most: int | None = None, **more: Any
) -> Callable[[Made], Made]:
    """Add an option with a whole number of at least `least` and at most `most`."""
    return click.option(*names, type=WholeRange(least, most), **more)


def positive_option(*names: str, **more: Any) -> Callable[[Made], Made]:
    """Add an option with a number above 0."""
    return click.option(*names, type=NumberRange(min=0, min_open=True), **more)


def amount_option(*names: str, **more: Any) -> Callable[[Made], Made]:
    """Add an option with a number of at least 0."""
    return click.option(*names, type=NumberRange(min=0), **more)


def read_length(text: str, option: str) -> timedelta:
    """Return the length of time that an option names. Raises CommandFailure."""
    from cavvy.domain.units import UnitError, parse_duration

    try:
        return parse_duration(text)
    except UnitError as error:
        raise CommandFailure(f"{option} {text}: {error}", exit_code=2) from error


def read_usd(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the micro-dollars of an option in dollars."""
    from cavvy.domain.units import UnitError, parse_usd

    try:
        return None if value is None else parse_usd(value).micros
    except UnitError as error:
        raise click.BadParameter(str(error)) from error
