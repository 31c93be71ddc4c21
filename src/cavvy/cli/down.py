"""`cavvy nodes down` and `cavvy nodes gc`: terminate all nodes and jobs that this installation
manages, or only the nodes and unfinished uploads that belong to no unfinished job.
"""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure, confirm
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import CleanupItem


_PATIENCE_S = 120.0
_LOOK_AGAIN_S = 0.2


@click.command("down")
@click.option("--all", "everything", is_flag=True, help="All projects.")
@click.option("-p", "--project", metavar="NAME", help="Only this project.")
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped and removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--wait/--no-wait", default=True, help="Wait until everything is removed.")
@output_option
def command(
    everything: bool, project: str | None, dry_run: bool, yes: bool, wait: bool, output: str
) -> None:
    """Stop every unfinished job and machine, and terminate all nodes that this installation
    manages, including nodes that are not in the database.

    Jobs get their grace period to save their work. The exit code is 1 if nodes or jobs are left
    after two minutes.
    """
    from msgspec.structs import replace

    if everything == (project is not None):
        hint = "`cavvy nodes down --dry-run --all` shows what would end"
        raise CommandFailure("expected either --all or --project NAME", hint, exit_code=2)
    with session() as client:
        found = client.down(project=project, dry_run=True)
        if found and not dry_run and not yes:
            found_out(found, "table", "")
            confirm(f"remove these {len(found)} items?")
        if found and not dry_run:
            found = client.down(project=project)
            left = _wait(client, project, found) if wait else set()
            found = [
                replace(each, done=each.done and (each.kind, each.name) not in left)
                for each in found
            ]
    found_out(found, output, nothing_runs(project))
    if (
        not dry_run
        and wait
        and any(each.done is False and each.kind not in ("provider", "upload") for each in found)
    ):
        raise CommandFailure(
            "some nodes or jobs are not removed yet",
            "`cavvy nodes` and `cavvy nodes gc` show the remaining items; run this command again",
        )


def _wait(
    client: "ApiClient", project: str | None, found: "list[CleanupItem]"
) -> set[tuple[str, str]]:
    """Wait until every item in `found` is removed, for at most two minutes. Returns the kind and
    name of each item that is left.
    """
    import time

    asked = {(each.kind, each.name) for each in found if each.done}
    until = time.monotonic() + _PATIENCE_S
    while True:
        left = {("job", row.job) for row in client.nodes(project)}
        left |= {
            ("machine", each.name) for each in client.machines(project) if each.state != "stopped"
        }
        if any(kind == "gang" for kind, _ in asked):
            left |= {(each.kind, each.name) for each in client.down(project=project, dry_run=True)}
        left &= asked
        if not left or time.monotonic() > until:
            return left
        time.sleep(_LOOK_AGAIN_S)


def found_out(
    found: "list[CleanupItem]",
    output: str,
    empty: str,
) -> None:
    """Print the items that `down` or `gc` has found and removed."""
    columns = [
        TableColumn("kind"),
        TableColumn("name"),
        TableColumn("where", drop=1),
        TableColumn("why", wrap=True),
        TableColumn("done", "REMOVED"),
    ]
    rows_out(columns, found, output, empty=empty)


def nothing_runs(project: str | None) -> str:
    """Return the message that nothing is running in the project or, if `project` is None, in any
    project.
    """
    where = "" if project is None else f" in project {project}"
    return f"nothing is running{where}, and nothing is billed"


@click.command("gc")
@click.option(
    "--remove",
    is_flag=True,
    help="Remove the nodes and uploads that are found; by default, they are only listed.",
)
@output_option
def gc_command(remove: bool, output: str) -> None:
    """Find nodes of this installation that belong to no unfinished job, and uploads that were
    incomplete when their attempt ended. The server also aborts incomplete uploads automatically.
    """
    with session() as client:
        found = client.gc(dry_run=not remove)
    found_out(found, output, "nothing to remove; `cavvy nodes` lists nodes that run or are billed")
    if found and not remove and output == "table":
        click.echo("remove them: cavvy nodes gc --remove")
    elif output == "table" and any(not each.done for each in found):
        click.echo(
            "items first seen less than half a minute ago are not removed yet; run this command "
            "again later, or run `cavvy nodes down --all`"
        )
