"""`cavvy log`: reports values from a shell script of a job."""

import click

from cavvy.cli.view.numbers import NumberRange
from cavvy.sdk.curves import log


@click.command("log", no_args_is_help=True)
@click.argument("values", nargs=-1, required=True, metavar="NAME=NUMBER...")
@click.option(
    "--step", type=NumberRange(min=0), help="The step of the values; by default, they are counted."
)
def command(values: tuple[str, ...], step: float | None) -> None:
    """Report values from a job's script, so that they become curves: `cavvy log loss=0.3 --step 3`.

    Outside a job, nothing is kept, and a note says so. Python programs call `cavvy.log`.
    """
    log(dict(map(_read, values)), step=step)


def _read(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        if name:
            return name, float(number)
    except ValueError:
        pass
    raise click.BadParameter(
        f"{text!r} is no value; expected NAME=NUMBER, such as loss=0.3", param_hint="VALUES"
    )
