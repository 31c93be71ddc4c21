"""`cavvy retry`: queues an ended job again."""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, project_option, session
from cavvy.cli.task.load import yes_option
from cavvy.cli.task.options import resource_options
from cavvy.cli.view.failure import CommandFailure


@click.command("retry")
@job_argument
@project_option
@resource_options
@detach_option
@yes_option
def command(name: str, project: str, resources: dict[str, object], detach: bool, yes: bool) -> None:
    """Queue an ended job again, or all failed and stopped jobs of an array. A job resumes from its
    newest checkpoint, elsewhere if options such as --provider replace its resources.
    """
    from cavvy.cli.reach.arrays import array_instead, exit_code_of, follow_array
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.cli.task.submission import ask_consent
    from cavvy.client import ApiError
    from cavvy.client.array_wire import retry_array

    with session() as client:
        try:
            seen = client.events(project, name).last
        except ApiError as error:
            array_id = array_instead(client, project, name, error).array.id
            if resources:
                hint = f"retry one of its jobs, such as {name}.0, or `cavvy rerun` the array"
                raise CommandFailure("an array keeps its resources", hint, 2) from error
            array = retry_array(client, project, array_id)
            click.echo(f"{array.name}: {array.reason}")
            if not detach:
                jobs = follow_array(client, project, array.id).jobs
                raise SystemExit(exit_code_of(jobs)) from None
            return
        job = ask_consent(
            yes, lambda consent: client.retry(project, name, resources=resources, consent=consent)
        )
        why = find_wait(client, project, job.id) if detach else ""
        click.echo(f"{job.name}: {job.phase}{why and f', {why}'}")
        if not detach:
            follow(client, project, job.name, after=seen, first=job.attempt + 1)
