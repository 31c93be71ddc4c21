"""`remuda down`: stop and remove everything of ours that runs or bills."""

from typing import TYPE_CHECKING

import click

from remuda.cli.output import Column, output_option, rows_out
from remuda.cli.session import Failure, session

if TYPE_CHECKING:
    from remuda.client.wire import Found


@click.command("down")
@click.option("--all", "everything", is_flag=True, help="Of all projects.")
@click.option("-p", "--project", default=None, help="Of this project only.")
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped and removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
def command(everything: bool, project: str | None, dry_run: bool, yes: bool, output: str) -> None:
    """Stop every unfinished job and remove whatever runs or bills, known to the database or not."""
    import sys

    if everything == (project is not None):
        raise Failure("say --all, or --project NAME", exit_code=2)
    with session() as client:
        found = client.down(project=project, dry_run=True)
        if found and not dry_run and not yes:
            found_out(found, "table")
            if not sys.stdin.isatty():
                raise Failure("without a terminal, removing needs --yes", "or --dry-run to only look", exit_code=2)
            click.confirm(f"remove these {len(found)}?", abort=True)
        if found and not dry_run:
            found = client.down(project=project)
    found_out(found, output)


def found_out(found: "list[Found]", output: str) -> None:
    """Print what `down` or `gc` found and did."""
    columns = [
        Column("kind"),
        Column("name", wide=True),
        Column("where", wide=True),
        Column("why", wide=True),
        Column("done", "REMOVED"),
    ]
    rows_out(
        columns, [(f.kind, f.name, f.where, f.why, f.done) for f in found], output, empty="nothing runs, nothing bills"
    )
