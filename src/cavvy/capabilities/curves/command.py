"""`cavvy curves`: draws what a job's program reports in the terminal."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.curves.wire import (
    MOST_JOBS,
    MOST_POINTS,
    Curve,
    read_curves,
    read_curves_of_jobs,
    say_gaps,
)
from cavvy.cli.reach.names import find_named
from cavvy.cli.reach.newest import find_newest
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient, ApiError

_SELDOM = ("job", "process", "gaps")  # columns that are shown if something is in them
_POINTS = ("job", "name", "attempt", "rank", "process", "step", "time_ms", "value")
_DRAWN = 4  # curves that are drawn unless some are named
_HEIGHT, _WIDEST = 8, 100  # characters


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
    job of the task in the current folder. Each job of an array and each replica of a service has a
    line. With -o csv or json, the values are printed: all of a curve with up to 20,000, else the
    lowest and highest.
    """
    from cavvy.client import ApiError

    points = 4 * _WIDEST if output == "table" else MOST_POINTS
    with session() as client:
        name = name or find_newest(client, project, "curves")
        found: Sequence[Curve]
        try:
            found = read_curves(
                client, project, name, names=figures, ranks=rank, attempt=attempt, points=points
            ).curves
        except ApiError as error:
            if error.code != "job-not-found":
                raise
            found = _read_others(client, project, name, figures, points, error)
            if rank or attempt:
                raise click.UsageError("--rank and --attempt choose curves of one job") from None
        if not found:
            raise _refuse(name, figures)
    if output == "table":
        _draw_all(found, by, drawn=len(figures) or _DRAWN)
        return
    rows_out(
        _POINTS,
        [
            (each.job or name, each.name, each.attempt, each.rank, each.process, *point)
            for each in found
            for point in _points_of(each)
        ],
        output,
    )
    if short := [each for each in found if each.count > len(each.values)]:
        shown = ", ".join(f"{each.name} ({len(each.values):,} of {each.count:,})" for each in short)
        note_out(f"only the lowest and highest values of each stretch: {shown}")


def _points_of(curve: Curve) -> list[tuple[float, int, float | str]]:
    """Return step, time and value of each point, with those that are no finite numbers."""
    points: list[tuple[float, int, float | str]] = [
        *zip(curve.steps, curve.times_ms, curve.values, strict=True)
    ]
    points += [(each.step, each.time_ms, each.value) for each in curve.gaps]
    return sorted(points, key=lambda each: each[1])


def _read_others(
    client: "ApiClient",
    project: str,
    name: str,
    figures: Sequence[str],
    points: int,
    error: "ApiError",
) -> Sequence[Curve]:
    """Return the curves of the jobs of an array, of the replicas of a service, or of a machine's
    session. Raises `error` if none has this name."""
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService

    found = find_named(client, project, name, error)
    if isinstance(found, ArrayDetail):
        jobs = [each.id for each in found.jobs if each.attempt]
    elif isinstance(found, NamedService):
        jobs = [each.job for each in found.replicas if each.job]
    else:
        jobs = [found.id]
    if len(jobs) > MOST_JOBS:
        note_out(f"the first {MOST_JOBS} of {len(jobs)} jobs")
    if not jobs:
        return []
    asked = jobs[:MOST_JOBS]
    return read_curves_of_jobs(client, project, asked, names=figures, points=points).curves


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


def _draw_all(found: Sequence[Curve], by: str, drawn: int) -> None:
    from cavvy.capabilities.curves.order import prominence

    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each)
    names = sorted(by_name, key=prominence)
    for name in names[:drawn]:
        _draw_one(name, by_name[name], by)
    ordered = [each for name in names for each in by_name[name]]
    columns: dict[str, list[object]] = {
        "job": [each.job for each in ordered],
        "name": [each.name for each in ordered],
        "attempt": [each.attempt for each in ordered],
        "rank": [each.rank for each in ordered],
        "process": [each.process for each in ordered],
        "values": [each.count for each in ordered],
        "low": [each.low for each in ordered],
        "high": [each.high for each in ordered],
        "last": [each.last for each in ordered],
        "gaps": [say_gaps(each) for each in ordered],
    }
    shown = {name: own for name, own in columns.items() if name not in _SELDOM or any(own)}
    rows_out([TableColumn(each) for each in shown], [*zip(*shown.values(), strict=True)])


def _draw_one(name: str, curves: Sequence[Curve], by: str) -> None:
    from cavvy.capabilities.curves.drawing import draw

    curves = [each for each in curves if each.values]
    if not curves:
        click.echo(f"{name} has no finite values\n")
        return
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
