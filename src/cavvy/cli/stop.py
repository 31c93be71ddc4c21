"""`cavvy stop`: stops jobs."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs, needless_yes_option
from cavvy.cli.reach.arrays import find_array, follow_array
from cavvy.cli.reach.session import list_jobs, named, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED, UNFINISHED

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail


@click.command("stop")
@click.argument("names", nargs=-1, shell_complete=complete_jobs)
@project_option
@click.option("--all", "everything", is_flag=True, help="Stop all unfinished jobs of the project.")
@click.option("--wait/--no-wait", default=True, help="Wait until the jobs have ended.")
@needless_yes_option
def command(names: tuple[str, ...], project: str, everything: bool, wait: bool) -> None:
    """Stop jobs, or all jobs of an array. Each job gets its grace period to save its work; then its
    nodes are released.

    A service starts a new replica when it needs one. `cavvy unserve` ends services.
    """

    if bool(names) == everything:
        raise CommandFailure(
            "expected either names of jobs or --all", "`cavvy ps` lists jobs", exit_code=2
        )
    with session() as client:
        if everything:
            rows = list_jobs(client, project, UNFINISHED, arrays=True)[0]
            ids = [row.id for row in rows if not row.members]
            arrays = [row.id for row in rows if row.members]
        else:
            found = [_find(client, project, name) for name in names]
            ids = [each for each in found if isinstance(each, str)]
            arrays = [each.array.id for each in found if not isinstance(each, str)]
        for array_id in arrays:
            _stop_array(client, project, array_id, wait=wait)
        # Each job is stopped by its ID. If a request with a name were sent again, it could stop the
        # machine's next session.
        for job_id in ids:
            job = client.stop(project, job_id)
            if job.phase in ENDED:
                click.echo(f"{job.name}: {job.phase}, {job.reason}")
            elif wait:
                _wait(client, project, job.id)
            else:
                click.echo(f"{job.name}: stopping")
        if not ids and not arrays:
            click.echo(f"project {project} has no unfinished jobs")
        _tell_services(client, project, None if everything else ids)


def _tell_services(client: "ApiClient", project: str, stopped: "list[str] | None") -> None:
    """Say that services go on, and how to end them: the services whose replicas are among the
    `stopped` jobs, or all services of the project if `stopped` is None.
    """
    from cavvy.client import ApiError
    from cavvy.client.service_wire import list_services

    try:
        services = [each for each in list_services(client, project) if each.state != "ending"]
    except ApiError:  # the jobs are stopped, and the user may lack the right to see services
        return
    for each in services:
        if stopped is None or {replica.job for replica in each.replicas} & set(stopped):
            ends = f"`cavvy unserve {named(project, each.name)}` ends the service"
            click.echo(
                f"note: service {each.name} goes on, and starts a new replica when it needs one; "
                f"{ends}",
                err=True,
            )


def _stop_array(client: "ApiClient", project: str, array_id: str, *, wait: bool) -> None:
    from cavvy.client.array_wire import stop_array

    array = stop_array(client, project, array_id)
    if wait:
        array = follow_array(client, project, array_id).array
    click.echo(f"{array.name}: {array.reason}")


def _find(client: "ApiClient", project: str, name: str) -> "str | ArrayDetail":
    """Return the ID of a job, or an array. If `name` is a machine and neither of them, raises a
    CommandFailure that shows the command to stop the machine.
    """
    from cavvy.client import ApiError

    try:
        return client.job(project, name, session=True).id
    except ApiError as error:
        if error.code == "job-not-found" and (array := find_array(client, project, name)):
            return array
        machines = client.machines(project) if error.code == "job-not-found" else []
        if not any(each.name == name for each in machines):
            raise
        hint = f"`cavvy machines stop {named(project, name)}` stops the machine {name}"
        raise CommandFailure(error.message, hint) from error


def _wait(client: "ApiClient", project: str, job_id: str) -> None:
    for _ in client.follow(project, job_id):
        pass
    job = client.job(project, job_id)
    click.echo(f"{job.name}: {job.phase}, {job.reason}")
