"""`cavvy server`: the embedded server, which other commands start by themselves."""

import click

from cavvy.cli.view.failure import CommandFailure


@click.group("server")
def command() -> None:
    """Start, stop and inspect the embedded server.

    Commands that need it start it by themselves, and it stops by itself when it has had nothing to
    do for a while. Jobs run on while it is away.
    """


@command.command("start")
def start() -> None:
    """Start the server in the background, unless it runs."""
    from cavvy.client import ApiError
    from cavvy.client.embedded import ensure_server

    try:
        server = ensure_server()
    except ApiError as error:
        raise CommandFailure(error.message, error.hint) from error
    click.echo(
        f"the server runs (process {server.pid}, cavvy {server.version}) at "
        f"{server.listen or server.address}"
    )


@command.command("stop")
def stop() -> None:
    """Stop the server and wait for its end; jobs run on."""
    from cavvy.client import ApiError
    from cavvy.client.embedded import stop_server

    try:
        stopped = stop_server()
    except ApiError as error:
        raise CommandFailure(error.message, error.hint) from error
    click.echo("the server has stopped; jobs run on" if stopped else "no server runs")


@command.command("restart")
@click.pass_context
def restart(context: click.Context) -> None:
    """Stop the server and start it again, which makes changed settings take effect; jobs run on."""
    context.invoke(stop)
    context.invoke(start)


@command.command("status")
@click.option(
    "-o",
    "--output",
    type=click.Choice(("table", "json")),
    default="table",
    show_default=True,
    help="How to say it.",
)
def status(output: str) -> None:
    """Say whether the server runs and what it is; exits with 3 where it does not."""
    from cavvy.cli.view.output import json_out, pairs_out
    from cavvy.client import Unreachable, connect

    try:
        with connect(start=False) as client:
            server = client.server()
    except Unreachable as error:
        raise CommandFailure(
            "no server runs", "commands that need it start it; or `cavvy server start`", 3
        ) from error
    facts = {name: getattr(server, name) for name in server.__struct_fields__}
    if output == "json":
        json_out(facts)
    else:
        pairs_out([(name.replace("_", " "), _shown(value)) for name, value in facts.items()])


@command.command("logs")
@click.option(
    "-n", "--lines", default=50, show_default=True, type=click.IntRange(1), help="How many lines."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what the server writes from now on.")
def logs(lines: int, follow: bool) -> None:
    """Print the end of the server's own log."""
    import os

    from cavvy.client.state import default_home

    path = os.path.join(default_home(), "server.log")
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - lines * 4096))
            click.echo(b"\n".join(file.read().splitlines()[-lines:]).decode("utf-8", "replace"))
            end = file.tell()
    except FileNotFoundError:
        raise CommandFailure(
            f"there is no {path}", "no server has run for this state folder yet"
        ) from None
    if follow:
        _follow(path, end)


def _follow(path: str, offset: int) -> None:
    """Print what is added, also after the server began a new file."""
    import os
    import time

    file = open(path, "rb")  # noqa: SIM115 - replaced when the log is
    file.seek(offset)
    try:
        while True:
            if part := file.read():
                click.echo(part.decode("utf-8", "replace"), nl=False)
                continue
            if os.path.exists(path) and not os.path.samestat(
                os.stat(path), os.fstat(file.fileno())
            ):
                file.close()
                file = open(path, "rb")  # noqa: SIM115
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo()
    finally:
        file.close()


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.0f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else value
