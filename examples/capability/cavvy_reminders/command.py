"""`cavvy remind`."""

import click

from cavvy.cli.reach.session import call_server, project_option
from cavvy_reminders.wire import ReminderAsk, add_reminder


@click.command("remind")
@click.argument("text")
@click.option("--in", "after_s", type=int, default=60, help="In how many seconds.")
@project_option
def command(text, after_s, project):
    """Be reminded of TEXT; `cavvy notify add … --on reminder` says where."""
    made = call_server(add_reminder, project, ReminderAsk(text=text, after_s=after_s))
    click.echo(f"you are reminded of {made.text!r} in {after_s} s")
