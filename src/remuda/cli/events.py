"""`remuda events`: a job's story, each step with its reason."""

from typing import TYPE_CHECKING

import click

from remuda.cli.output import Column, output_option, rows_out
from remuda.cli.session import project_option, session

if TYPE_CHECKING:
    from remuda.client.wire import EventView


@click.command("events")
@click.argument("name")
@project_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@output_option
def command(name: str, project: str, follow: bool, output: str) -> None:
    """Tell a job's story, each step with its reason."""
    columns = [
        Column("at", "TIME (UTC)"),
        Column("id", hidden=True),
        Column("attempt", "TRY", right=True),
        Column("rank", right=True),
        Column("kind"),
        Column("text", wide=True),
    ]
    with session() as client:
        if follow and output == "table":
            for event in client.follow(project, name):
                click.echo(event_line(event))
            return
        events: list[EventView] = []
        while page := client.events(project, name, after=events[-1].id if events else 0).events:
            events += page
    rows_out(columns, [(e.at, e.id, e.attempt, e.rank, e.kind, e.text) for e in events], output)


def event_line(event: "EventView") -> str:
    """One event as one line."""
    rank = f" rank {event.rank}" if event.rank is not None else ""
    return f"{event.at:%H:%M:%S}  {event.kind}{rank}: {event.text}"
