"""`cavvy gc`: what runs or bills but is not wanted."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import output_option


@click.command("gc")
@click.option("--remove", is_flag=True, help="Remove what was found; without it, only show.")
@output_option
def command(remove: bool, output: str) -> None:
    """Find what runs or bills under this installation's name and belongs to no unfinished job."""
    from cavvy.cli.down import found_out

    with session() as client:
        found = client.gc(dry_run=not remove)
    found_out(found, output)
    if found and not remove and output == "table":
        click.echo("remove them: cavvy gc --remove")
    elif output == "table" and any(not each.done for each in found):
        click.echo(
            "what is not removed was seen too lately to be sure; ask again in half a minute, or "
            "cavvy down --all"
        )
