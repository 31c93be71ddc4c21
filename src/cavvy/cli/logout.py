"""`cavvy logout`: forgets a server."""

import click

from cavvy.cli.reach.session import failures


@click.command("logout")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Forget a server and its token; the default is the server that commands use. The token stays
    valid until `cavvy token revoke` revokes it.
    """
    from cavvy.client.contexts import LOCAL, read_contexts, write_contexts
    from cavvy.client.state import default_home

    with failures():
        contexts = read_contexts(default_home())
        name = name or contexts.current
        if name == LOCAL:
            click.echo("commands use this machine's own server, so there is no server to forget")
            return
        contexts.switched(name)  # reports an unknown name
        write_contexts(default_home(), contexts.without(name))
    click.echo(f"{name} is forgotten; `cavvy token revoke` makes the server's token invalid")
