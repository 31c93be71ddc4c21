"""`cavvy today`."""

from datetime import datetime

import click

from cavvy import Client


@click.command("today")
def command() -> None:
    """List the jobs that were submitted today."""
    today = datetime.now().astimezone().date()
    with Client() as client:
        for job in client.jobs():
            status = job.last_status
            if status.submitted_at.astimezone().date() == today:
                click.echo(f"{status.name}  {status.phase}")
