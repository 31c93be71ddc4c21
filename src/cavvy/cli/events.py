"""`cavvy events`: shows a job's history: each step with its reason."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, PATIENCE_S, project_option, session
from cavvy.cli.view.formatting import show_clock, show_time
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import EventView


@click.command("events")
@job_argument
@project_option
@click.option("-f", "--follow", is_flag=True, help="Follow the events until the job ends.")
@output_option
def command(name: str, project: str, follow: bool, output: str) -> None:
    """Show a job's history: each step with its reason."""
    from cavvy.cli.view.formatting import story_line

    with session(patience_s=FOLLOW_PATIENCE_S if follow else PATIENCE_S) as client:
        if follow and output == "table":
            for event in client.follow(project, name):
                click.echo(f"{show_clock(event.at)}  {story_line(event)}")
            return
        events: list[EventView] = []
        while page := client.events(project, name, after=events[-1].id if events else 0).events:
            events += page
    _events_out(events, output)


def _events_out(events: "list[EventView]", output: str) -> None:
    # If all events happened on one day, the heading shows the day instead of each row.
    days = {show_time(event.at, "%Y-%m-%d") for event in events}
    columns = [
        TableColumn("at", min(days), lambda at: show_time(at, "%H:%M:%S", zone=False))
        if len(days) == 1
        else TableColumn("at", "TIME"),
        TableColumn("id", hidden=True),
        TableColumn("attempt", "TRY", lambda number: str(number or "-"), drop=2),
        TableColumn("rank", drop=1),
        TableColumn("kind"),
        TableColumn("text", wrap=True),
    ]
    rows_out(columns, events, output)
