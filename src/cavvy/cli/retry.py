"""`cavvy retry`: queues an ended job again."""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, project_option, session


@click.command("retry")
@job_argument
@project_option
@detach_option
def command(name: str, project: str, detach: bool) -> None:
    """Queue an ended job again, or all failed and stopped jobs of an array. A job resumes from its
    newest checkpoint.
    """
    from cavvy.cli.reach.arrays import array_instead, exit_code_of, follow_array
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.client import ApiError
    from cavvy.client.array_wire import retry_array

    with session() as client:
        try:
            seen = client.events(project, name).last
        except ApiError as error:
            array_id = array_instead(client, project, name, error).array.id
            array = retry_array(client, project, array_id)
            click.echo(f"{array.name}: {array.reason}")
            if not detach:
                jobs = follow_array(client, project, array.id).jobs
                raise SystemExit(exit_code_of(jobs)) from None
            return
        job = client.retry(project, name)
        why = find_wait(client, project, job.id) if detach else ""
        click.echo(f"{job.name}: {job.phase}{why and f', {why}'}")
        if not detach:
            follow(client, project, job.name, after=seen, first=job.attempt + 1)
