"""`cavvy rerun`: runs a job again, unchanged or with changed parameters."""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, named, project_option, session
from cavvy.cli.task.load import param_option, read_params, yes_option
from cavvy.cli.view.failure import CommandFailure


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
    from cavvy.cli.reach.arrays import array_instead, follow_to_end
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.cli.task.submission import submit
    from cavvy.client import ApiError
    from cavvy.client.reruns import NotRepeatable, read_run

    changed = read_params(param)
    with session() as client:
        array = None
        try:
            old = client.job(project, name)
        except ApiError as error:
            array = array_instead(client, project, name, error)
            old = client.job(project, array.jobs[0].id)
        try:
            whole = array is not None
            run = read_run(old, array.array.id if array else old.id, is_whole_array=whole)
        except NotRepeatable as error:
            raise CommandFailure(str(error), error.hint) from error
        try:
            new = submit(
                client,
                run.text,
                path=f"the task of {name}",
                params={**run.params, **changed},
                project=project,
                origin=run.origin,
                name=run.name,
                consent=yes or old.consented,
                ceiling_micros=old.ceiling_micros,
            )
        except ApiError as error:
            if error.code != "invalid-task":
                raise
            known = ", ".join(run.task.params) or "none"
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
