"""`cavvy events`: shows a job's history, each step with its reason."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import EventView


@click.command("events")
@click.argument("name")
@project_option
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@output_option
def command(name: str, project: str, follow: bool, output: str) -> None:
    """Show a job's history, each step with its reason."""
    from cavvy.cli.view.job_story import story_line

    with session() as client:
        if follow and output == "table":
            for event in client.follow(project, name):
                click.echo(f"{event.at:%H:%M:%S}  {story_line(event)}")
            return
        events: list[EventView] = []
        while page := client.events(project, name, after=events[-1].id if events else 0).events:
            events += page
    _events_out(events, output)


def _events_out(events: "list[EventView]", output: str) -> None:
    # If all events happened on one day, the heading shows the day.
    days = {event.at.date() for event in events}
    clock = len(days) == 1
    columns = [
        TableColumn(
            "at",
            f"{min(days):%Y-%m-%d}" if clock else "TIME (UTC)",
            (lambda at: f"{at:%H:%M:%S}") if clock else None,
        ),
        TableColumn("id", hidden=True),
        TableColumn("attempt", "TRY", lambda number: str(number or "-")),
        TableColumn("rank"),
        TableColumn("kind"),
        TableColumn("text", wrap=True),
    ]
    rows_out(columns, events, output)
