"""`cavvy state`: lists and removes dicts and queues."""

import click

from cavvy.cli.reach.session import call_server, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out


@click.group("state", cls=CommandGroup)
def command() -> None:
    """List and remove the dicts and queues of a project.

    Programs make them: cavvy.Dict("NAME") and cavvy.Queue("NAME").
    """


@command.command("list")
@project_option
@output_option
def list_state(project: str, output: str) -> None:
    """List the dicts and queues with their sizes."""
    from cavvy.capabilities.functions.state import wire

    with session() as client:
        found = [
            *wire.list_objects(client, project, "dict"),
            *wire.list_objects(client, project, "queue"),
        ]
    rows = [
        {
            "name": each.name,
            "kind": each.kind,
            "entries": each.entries,
            "bytes": each.bytes,
            "user": each.user or "-",
            "created_at": each.created_at,
            "changed_at": each.changed_at,
        }
        for each in found
    ]
    columns = [
        TableColumn("name"),
        TableColumn("kind"),
        TableColumn("entries"),
        TableColumn("bytes", "SIZE", formatting.show_size),
        TableColumn("changed_at", "CHANGED", formatting.show_ago, drop=1),
        TableColumn("created_at", "CREATED", formatting.show_ago, drop=3),
        TableColumn("user", drop=2),
    ]
    empty = f'project {project} has no dicts and queues; cavvy.Dict("NAME")["key"] = 1 makes one'
    rows_out(columns, rows, output, empty=empty)


@command.command("rm")
@click.argument("kind", type=click.Choice(["dict", "queue"]))
@click.argument("name")
@project_option
def remove(kind: str, name: str, project: str) -> None:
    """Remove a dict or a queue with all that it has."""
    from cavvy.capabilities.functions.state import wire

    call_server(wire.delete_object, project, "dict" if kind == "dict" else "queue", name)
    text_out(f"the {kind} {name} was removed")
