"""`cavvy drill`: rehearses failures on the user's own jobs."""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import named, project_option, session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import read_length


@click.group("drill", cls=CommandGroup)
def command() -> None:
    """Rehearse failures on your own jobs to check that the jobs survive them."""


@command.command("preempt")
@job_argument
@project_option
@click.option(
    "--notice",
    default="30s",
    help="Time between the notice and the removal of the nodes.",
)
def preempt(name: str, project: str, notice: str) -> None:
    """Give a running job a preemption notice and then reclaim its nodes, as a spot market would."""
    from cavvy.domain.units import format_duration

    length = read_length(notice, "--notice")
    with session() as client:
        job = client.drill_preempt(project, name, notice_s=length.total_seconds())
    click.echo(f"{job.name}: the job's nodes will be reclaimed in {format_duration(length)}")
    click.echo(f"watch it resume: cavvy logs -f {named(project, job.name)}")
