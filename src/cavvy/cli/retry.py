"""`cavvy retry`: queues an ended job again."""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, project_option, session


@click.command("retry")
@job_argument
@project_option
@detach_option
def command(name: str, project: str, detach: bool) -> None:
    """Queue an ended job again. The job resumes from its newest checkpoint."""
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.waiting import find_wait

    with session() as client:
        seen = client.events(project, name).last
        job = client.retry(project, name)
        why = find_wait(client, project, job.id) if detach else ""
        click.echo(f"{job.name}: {job.phase}{why and f', {why}'}")
        if not detach:
            follow(client, project, job.name, after=seen, first=job.attempt + 1)
