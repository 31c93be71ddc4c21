"""`cavvy join`: the line that makes any machine a node."""

import click

from cavvy.cli.reach.session import session


@click.command("join")
@click.option(
    "--name", default=None, help="What to call the machine; its own host name by default."
)
@click.option(
    "--group", default=None, help="Machines of one network that may carry one job together."
)
@click.option(
    "--valid-h",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.01, 720),
    help="Hours it can be used.",
)
@click.option(
    "--notebook", is_flag=True, help="Print it for a cell of a notebook, such as Google Colab's."
)
@click.option(
    "--python", "by_python", is_flag=True, help="For machines that have Python and no curl."
)
@click.option("--background", is_flag=True, help="The machine goes on when its shell is closed.")
def command(
    name: str | None,
    group: str | None,
    valid_h: float,
    notebook: bool,
    by_python: bool,
    background: bool,
) -> None:
    """Print a line; pasted into the shell of any machine, it makes that one a node of yours.

    The machine needs to reach this server, nobody needs to reach it. The line is good for one
    machine.
    """
    with session() as client:
        made = client.invite(name=name, group=group, valid_s=valid_h * 3600)
    line = made.python if by_python else made.shell
    if background:  # an argument of the script's, as each of the two lines writes them
        before, after = (
            ('"--",', '"--","--background",')
            if by_python
            else ("sh -s -- ", "sh -s -- --background ")
        )
        line = line.replace(before, after)
    click.echo(("!" if notebook else "") + line)
    click.echo(
        f"good for one machine until {made.expires_at.astimezone():%Y-%m-%d %H:%M}", err=True
    )
