"""`cavvy rm`: removes ended jobs with their events, logs and checkpoints."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs
from cavvy.cli.reach.arrays import array_instead
from cavvy.cli.reach.session import list_jobs, project_option, session
from cavvy.cli.view.failure import CommandFailure, confirm
from cavvy.cli.view.formatting import ENDED, show_size

if TYPE_CHECKING:
    from cavvy.client.client import ApiClient


_SHOWN = 20  # names in a question


@click.command("rm")
@click.argument("names", nargs=-1, shell_complete=complete_jobs)
@project_option
@click.option("--ended", is_flag=True, help="Remove all ended jobs of the project.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def command(names: tuple[str, ...], project: str, ended: bool, yes: bool) -> None:
    """Remove ended jobs with their events, logs and checkpoints.

    The bills of removed jobs are kept; `cavvy cost` shows them. Jobs that have not ended are not
    removed. An array is removed as a whole, when all its jobs have ended.
    """
    if bool(names) == ended:
        raise CommandFailure("expected either names of jobs or --ended", "`cavvy ps` lists jobs", 2)
    with session() as client:
        if ended:
            rows = list_jobs(client, project, ENDED, arrays=True)[0]
            found = {row.name: sum(row.members.values()) for row in rows}
        else:
            found = dict(_find_ended(client, project, name) for name in names)
        if found and not yes:
            several = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            shown = [
                f"the {count:,} jobs of {name}" if count else name for name, count in found.items()
            ]
            confirm(f"remove {', '.join(shown[:_SHOWN])}{several}, with logs and checkpoints?")
        for name, count in found.items():
            _remove(client, project, name, is_array=bool(count), skip_busy=ended)
        if not found:
            click.echo(f"project {project} has no ended jobs")


def _find_ended(client: "ApiClient", project: str, name: str) -> tuple[str, int]:
    """Return the name of the ended job or array with this name or ID, and the number of the array's
    jobs or 0. Raises CommandFailure.
    """
    from cavvy.client import ApiError

    try:
        job = client.job(project, name)
    except ApiError as error:
        array = array_instead(client, project, name, error)
        if any(each.phase not in ENDED for each in array.jobs):
            hint = f"`cavvy stop {name}` stops all its jobs"
            message = f"{name} has jobs that have not ended ({array.array.reason})"
            raise CommandFailure(f"{message}, so it is not removed", hint) from None
        return array.array.name, len(array.jobs)
    if job.phase not in ENDED:
        hint = f"`cavvy stop {job.name}` stops the job"
        raise CommandFailure(f"{job.name} is {job.phase}, so it is not removed", hint)
    return job.name, 0


def _remove(
    client: "ApiClient", project: str, name: str, *, is_array: bool, skip_busy: bool
) -> None:
    """Remove a job or an array. If its nodes are not released yet, raises CommandFailure or, with
    `skip_busy`, only prints a message.
    """
    from cavvy.client import ApiError
    from cavvy.client.array_wire import remove_array

    try:
        removed = remove_array(client, project, name) if is_array else client.remove(project, name)
    except ApiError as error:
        if not skip_busy or error.code != "job-not-ended":
            raise
        click.echo(f"{name} is not removed: its nodes are not released yet", err=True)
        return
    size = f", with {show_size(removed.freed_bytes)} of checkpoints" if removed.freed_bytes else ""
    click.echo(f"{name} is removed{size}")
    if removed.kept:
        click.echo(f"some files of {name} could not be deleted: {removed.kept}", err=True)
