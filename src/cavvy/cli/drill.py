"""`cavvy drill`: fire drills on one's own jobs."""

import click

from cavvy.cli.reach.session import named, project_option, session
from cavvy.cli.view.failure import CommandFailure


@click.group("drill")
def command() -> None:
    """Fire drills on your own jobs: see them survive before it matters."""


@command.command("preempt")
@click.argument("name")
@project_option
@click.option(
    "--notice",
    default="30s",
    show_default=True,
    help="How long the nodes have from the notice to their end.",
)
def preempt(name: str, project: str, notice: str) -> None:
    """Take a running job's nodes away, as a spot market would, with this much notice."""
    from cavvy.domain.units import UnitError, format_duration, parse_duration

    try:
        length = parse_duration(notice)
    except UnitError as error:
        raise CommandFailure(f"--notice {notice}: {error}", exit_code=2) from error
    with session() as client:
        job = client.drill_preempt(project, name, notice_s=length.total_seconds())
    click.echo(f"{job.name}: its nodes are told that they go in {format_duration(length)}")
    click.echo(f"watch it come back: cavvy logs -f {named(project, job.name)}")
