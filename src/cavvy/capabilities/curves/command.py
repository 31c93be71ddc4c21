"""`cavvy curves`: draws what a job's program reports in the terminal."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.newest import find_newest
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.capabilities.curves.wire import Curve

_COLUMNS = ("name", "attempt", "rank", "values", "low", "high", "last")
_POINTS = ("name", "attempt", "rank", "step", "time_ms", "value")
_DRAWN = 4  # curves that are drawn unless some are named
_HEIGHT, _WIDEST = 8, 100  # characters
_ALL = 20_000  # values of a curve in JSON and CSV


@click.command("curves")
@click.argument("name", required=False)
@click.argument("figures", nargs=-1)
@count_option("--rank", least=0, multiple=True, help="Only this rank; may be repeated.")
@count_option("--attempt", help="Only this attempt.")
@click.option(
    "--by",
    type=click.Choice(["step", "time"]),
    default="step",
    show_default=True,
    help="What the horizontal axis shows.",
)
@output_option
@project_option
def command(
    name: str | None,
    figures: tuple[str, ...],
    rank: tuple[int, ...],
    attempt: int | None,
    by: str,
    output: str,
    project: str,
) -> None:
    """Show the curves of what a job's program reports: all that it prints such as `loss=0.3`.

    Without FIGURES, the first ones are drawn and all are listed. Without NAME, this is the newest
    job of the task in the current folder. With -o csv or json, every value is printed.
    """
    from cavvy.capabilities.curves.wire import read_curves

    points = 4 * _WIDEST if output == "table" else _ALL
    with session() as client:
        name = name or find_newest(client, project, "curves")
        found = read_curves(
            client, project, name, names=figures, ranks=rank, attempt=attempt, points=points
        ).curves
        if not found:
            raise _refuse(name, figures)
    if output == "table":
        _draw_all(found, by, drawn=len(figures) or _DRAWN)
    else:
        rows_out(
            _POINTS,
            [
                (each.name, each.attempt, each.rank, *point)
                for each in found
                for point in zip(each.steps, each.times_ms, each.values, strict=True)
            ],
            output,
        )


def _refuse(name: str, figures: Sequence[str]) -> CommandFailure:
    if figures:
        return CommandFailure(
            f"{name} has reported no {' and no '.join(figures)}",
            f"`cavvy curves {name}` lists what it has reported",
        )
    return CommandFailure(
        f"{name} has reported no values yet",
        "print them as in `step 12 loss=0.71`, or call `cavvy.train`; "
        f"`cavvy logs {name}` shows what it prints",
    )


def _draw_all(found: "Sequence[Curve]", by: str, drawn: int) -> None:
    from cavvy.capabilities.curves.order import prominence

    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each)
    names = sorted(by_name, key=prominence)
    for name in names[:drawn]:
        _draw_one(name, by_name[name], by)
    rows = [
        (each.name, each.attempt, each.rank, each.count, each.low, each.high, each.last)
        for name in names
        for each in by_name[name]
    ]
    columns = [TableColumn(each) for each in _COLUMNS]
    rows_out(columns, rows)


def _draw_one(name: str, curves: "Sequence[Curve]", by: str) -> None:
    from cavvy.capabilities.curves.drawing import draw

    begin = min(each.times_ms[0] for each in curves)
    lines = [
        (
            each.steps if by == "step" else [(at - begin) / 1000 for at in each.times_ms],
            each.values,
        )
        for each in curves
    ]
    width = min(_WIDEST, get_terminal_size().columns if sys.stdout.isatty() else 80)
    unit = "step" if by == "step" else "seconds"
    click.echo(f"{name}, by {unit}")
    for row in draw(lines, width, _HEIGHT):
        click.echo(row)
    click.echo()
