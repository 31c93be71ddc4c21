"""`cavvy stop`: stops jobs."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs
from cavvy.cli.reach.session import list_jobs, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED, UNFINISHED

if TYPE_CHECKING:
    from cavvy.client import Client


@click.command("stop")
@click.argument("names", nargs=-1, shell_complete=complete_jobs)
@project_option
@click.option("--all", "everything", is_flag=True, help="Stop all unfinished jobs of the project.")
@click.option("--wait/--no-wait", default=True, help="Wait until they have ended.")
def command(names: tuple[str, ...], project: str, everything: bool, wait: bool) -> None:
    """Stop jobs: each gets its grace period to save its work, then its nodes are released."""

    if bool(names) == everything:
        raise CommandFailure(
            "expected either names of jobs or --all", "`cavvy ps` lists jobs", exit_code=2
        )
    with session() as client:
        if everything:
            names = tuple(row.name for row in list_jobs(client, project, UNFINISHED)[0])
        for name in names:
            job = client.stop(project, name)
            if job.phase in ENDED:
                click.echo(f"{job.name}: {job.phase}, {job.reason}")
            elif wait:
                _wait(client, project, job.name)
            else:
                click.echo(f"{job.name}: stopping")
        if not names:
            click.echo(f"project {project} has no unfinished jobs")


def _wait(client: "Client", project: str, name: str) -> None:
    for _ in client.follow(project, name):
        pass
    job = client.job(project, name)
    click.echo(f"{name}: {job.phase}, {job.reason}")
