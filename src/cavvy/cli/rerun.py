"""`cavvy rerun`: runs a job again, unchanged or with changed parameters."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, named, project_option, session
from cavvy.cli.task.load import param_option, read_params, show_value, yes_option
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.domain.tasks import TaskSpec


@click.command("rerun")
@job_argument
@project_option
@param_option
@detach_option
@yes_option
def command(name: str, project: str, param: tuple[str, ...], detach: bool, yes: bool) -> None:
    """Run a job again with the same task, the same parameters and the same copy of its working
    folder. --param changes a parameter. An array is run again as a whole.
    """
    import msgspec

    from cavvy.cli.reach.arrays import array_instead, follow_to_end
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.cli.task.submission import submit
    from cavvy.client import ApiError
    from cavvy.domain.jobs import RunOrigin
    from cavvy.domain.tasks import TaskSpec

    changed = read_params(param)
    with session() as client:
        array = None
        try:
            old = client.job(project, name)
        except ApiError as error:
            array = array_instead(client, project, name, error)
            old = client.job(project, array.jobs[0].id)
        origin = msgspec.json.decode(old.origin, type=RunOrigin)
        task = msgspec.json.decode(old.task, type=TaskSpec)
        if array is None:
            _check_single(old.name, task)
        if not origin.task_text:
            reason = f"{name} was not submitted from a file and cannot be run again"
            raise CommandFailure(reason, "submit its task again")
        params = {**_show_params(task), **changed}
        try:
            new = submit(
                client,
                origin.task_text,
                path=f"the task of {name}",
                params=params,
                project=project,
                origin=msgspec.structs.replace(
                    origin, rerun_of=array.array.id if array else old.id
                ),
                name=task.name,
                consent=yes or old.consented,
                ceiling_micros=old.ceiling_micros,
            )
        except ApiError as error:
            if error.code != "invalid-task":
                raise
            known = ", ".join(task.params) or "none"
            hint = f"the task of {name} cannot be changed; the task's parameters: {known}"
            raise CommandFailure(error.message, hint) from error
        if array is not None:
            click.echo(f"{new.name}: {new.members} jobs queued, a rerun of {array.array.name}")
            if not detach:
                follow_to_end(client, new)
            return
        why = find_wait(client, project, new.id) if detach else ""
        click.echo(f"{new.name}: queued, a rerun of {old.name}{why and f'; {why}'}")
        click.echo(f"compare the jobs: cavvy diff {old.name} {named(project, new.name)}")
        if not detach:
            follow(client, project, new.name)


def _show_params(task: "TaskSpec") -> dict[str, str]:
    """Return the parameters of the task as options give them, except those of its sweep."""
    swept = {each.name for each in task.sweep}
    return {key: show_value(value) for key, value in task.params.items() if key not in swept}


def _check_single(name: str, task: "TaskSpec") -> None:
    """Raise CommandFailure if the job can only be run again together with others."""
    from cavvy.domain.arrays import is_array
    from cavvy.domain.services import is_replica

    if is_array(task):
        raise CommandFailure(
            f"{name} is a job of an array, which cannot be run again alone",
            f"`cavvy retry {name}` queues it again after a failure; "
            f"`cavvy rerun {name.rpartition('.')[0]}` runs the whole array again",
        )
    if is_replica(name):
        raise CommandFailure(
            f"{name} is a replica of a service, not a job that can be run again",
            "`cavvy serve FILE` starts the service's replicas",
        )
