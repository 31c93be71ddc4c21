"""`cavvy gc`: finds and removes nodes and unfinished uploads that belong to no unfinished job."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import output_option


@click.command("gc")
@click.option(
    "--remove",
    is_flag=True,
    help="Remove the nodes and uploads that are found; by default, they are only listed.",
)
@output_option
def command(remove: bool, output: str) -> None:
    """Find nodes of this installation that belong to no unfinished job, and uploads that were
    incomplete when their attempt ended. The server also aborts incomplete uploads automatically.
    """
    from cavvy.cli.down import found_out

    with session() as client:
        found = client.gc(dry_run=not remove)
    found_out(found, output, "nothing to remove; `cavvy nodes` lists nodes that run or are billed")
    if found and not remove and output == "table":
        click.echo("remove them: cavvy gc --remove")
    elif output == "table" and any(not each.done for each in found):
        click.echo(
            "items first seen less than half a minute ago are not removed yet; run this command "
            "again later, or run `cavvy down --all`"
        )
