"""`cavvy wait`: waits until jobs are running or have ended."""

import time

import click

from cavvy.cli.reach.arguments import JOBS_LISTING, complete_jobs
from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, project_option, session
from cavvy.cli.reach.waiting import wait_for_all
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED
from cavvy.cli.view.groups import NameArgument


@click.command("wait")
@click.argument(
    "names",
    nargs=-1,
    required=True,
    cls=NameArgument,
    listing=JOBS_LISTING,
    shell_complete=complete_jobs,
)
@project_option
@click.option(
    "--for",
    "what",
    type=click.Choice(["end", "running"]),
    default="end",
    help="Wait until all jobs have ended (end), or until each job is running or has ended "
    "(running).",
)
@click.option("--timeout", metavar="TIME", help="Give up after this time, such as 90s or 2h.")
def command(names: tuple[str, ...], project: str, what: str, timeout: str | None) -> None:
    """Wait for jobs, or all jobs of an array, and say why a queued job waits. The exit code is the
    code of the first job that failed, or 0 if no job failed. After the timeout, the exit code is
    124.
    """
    from cavvy.domain.units import UnitError, parse_duration

    try:
        until = time.monotonic() + parse_duration(timeout).total_seconds() if timeout else None
    except UnitError as error:
        raise CommandFailure(f"--timeout: {error}", "write, for example, 90s or 2h", 2) from error
    reached = ENDED | {"running"} if what == "running" else ENDED
    with session(patience_s=FOLLOW_PATIENCE_S) as client:
        raise SystemExit(wait_for_all(client, project, names, reached, until))
