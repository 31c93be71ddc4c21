"""`cavvy wait`: waits until jobs are running or have ended."""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import JOBS_LISTING, complete_jobs
from cavvy.cli.reach.arrays import array_instead, exit_code_of, follow_array
from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED
from cavvy.cli.view.groups import NameArgument

if TYPE_CHECKING:
    from cavvy.client import ApiClient, wire

_SHORTEST_S, _LONGEST_S = 0.2, 2.0  # seconds between two requests to the server


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


def wait_for_all(
    client: "ApiClient",
    project: str,
    names: Sequence[str],
    reached: Collection[str] = ENDED,
    until: float | None = None,
    *,
    graph: bool = False,
) -> int:
    """Wait for jobs and arrays, and print how they ended. Return the exit code of the first that
    did not succeed, or 0. In a graph, jobs do not count that ended because of another job.
    """
    from cavvy.client import ApiError

    code = 0
    for name in names:
        try:
            job = _wait(client, project, name, reached, until)
        except ApiError as error:
            name = array_instead(client, project, name, error).array.id
            found = follow_array(client, project, name, reached, until)
            click.echo(f"{found.array.name}: {found.array.reason}")
            ended = [each for each in found.jobs if each.phase in ENDED]
            code = code or exit_code_of(ended)
            continue
        click.echo(f"{job.name}: {job.phase}, {job.reason}")
        if graph and job.stop_cause in ("dependency", "group"):
            continue
        if job.phase in ENDED and job.phase != "done":
            code = code or job.exit_code or 1
    return code


def _wait(
    client: "ApiClient", project: str, name: str, reached: Collection[str], until: float | None
) -> "wire.JobDetail":
    pause, told = _SHORTEST_S, ""
    while (job := client.job(project, name, session=True)).phase not in reached:
        name = job.id  # The name of a session may later refer to the machine's next session.
        if until is not None and time.monotonic() >= until:
            raise CommandFailure(
                f"{job.name} is still {job.phase}: {job.reason}",
                f"the job continues; `cavvy status {job.name}` shows its state",
                exit_code=124,
            )
        if pause > _SHORTEST_S and job.phase == "queued" and job.reason != told:
            told = job.reason
            click.echo(f"{job.name}: queued, {told}", err=True)
        time.sleep(pause)
        pause = min(_LONGEST_S, pause * 1.5)
    return job
