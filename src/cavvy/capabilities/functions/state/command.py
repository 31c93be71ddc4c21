"""`cavvy state`: lists and removes dicts, queues, and the volumes of the server's machine and of
hosts reached by SSH.
"""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import call_server, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out

if TYPE_CHECKING:
    from cavvy.capabilities.functions.state.wire import StateView
    from cavvy.client.wire import VolumeView


@click.group("state", cls=CommandGroup)
def command() -> None:
    """List and remove the dicts, queues and volumes of a project.

    Programs make dicts and queues: cavvy.Dict("NAME") and cavvy.Queue("NAME"). The volumes are
    folders that jobs make on the server's own machine, and on hosts reached by SSH.
    """


@command.command("list")
@project_option
@output_option
def list_state(project: str, output: str) -> None:
    """List the dicts, queues and volumes with their sizes.

    The entries of a volume are its files, and its size is what they take on the disk. If the
    server or a host cannot tell them, the rest is listed, with a note.
    """
    from cavvy.capabilities.functions.state import wire
    from cavvy.client import ApiError

    told = "dicts, queues and volumes"
    with session() as client:
        found = [
            *wire.list_objects(client, project, "dict"),
            *wire.list_objects(client, project, "queue"),
        ]
        volumes = []
        try:  # the server counts the files one by one
            volumes = client.volumes(project)
        except ApiError as error:
            told = "dicts and queues"
            note_out(f"the volumes of {project} cannot be listed: {error.message}")
    rows = [*map(_show_object, found), *map(_show_volume, volumes)]
    for each in volumes:
        if each.problem:
            note_out(f"the files of the volume {each.name} cannot be counted: {each.problem}")
    columns = [
        TableColumn("name"),
        TableColumn("kind"),
        TableColumn("entries"),
        TableColumn("bytes", "SIZE", formatting.show_size),
        TableColumn("place", drop=4),
        TableColumn("changed_at", "CHANGED", formatting.show_ago, drop=1),
        TableColumn("created_at", "CREATED", formatting.show_ago, drop=3),
        TableColumn("user", drop=2),
    ]
    empty = f'project {project} has no {told}; cavvy.Dict("NAME")["key"] = 1 makes a dict'
    rows_out(columns, rows, output, empty=empty)


def _show_object(found: "StateView") -> dict[str, object]:
    return {
        "name": found.name,
        "kind": found.kind,
        "entries": found.entries,
        "bytes": found.bytes,
        "place": "-",
        "user": found.user or "-",
        "created_at": found.created_at,
        "changed_at": found.changed_at,
    }


def _show_volume(volume: "VolumeView") -> dict[str, object]:
    return {
        "name": volume.name,
        "kind": "volume",
        "entries": volume.files,
        "bytes": volume.size_bytes,
        "place": f"{volume.provider}/{volume.host}" if volume.host else volume.provider,
        "user": "-",
        "created_at": None,
        "changed_at": volume.changed_at,
    }


@command.command("rm")
@click.argument("kind", type=click.Choice(["dict", "queue", "volume"]))
@click.argument("name")
@click.option(
    "--provider",
    default="",
    help="The provider whose volume is removed, if several have one of this name.",
)
@project_option
def remove(kind: str, name: str, provider: str, project: str) -> None:
    """Remove a dict, a queue or a volume with all that it has.

    A volume that a running job uses is not removed.
    """
    from cavvy.capabilities.functions.state import wire

    if kind == "volume":
        with session() as client:
            client.delete_volume(project, name, provider)
    else:
        call_server(wire.delete_object, project, "dict" if kind == "dict" else "queue", name)
    text_out(f"the {kind} {name} was removed")
