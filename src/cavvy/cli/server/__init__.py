"""`cavvy server`: controls the embedded server, which other commands start when needed."""

from collections.abc import Callable, Mapping

import click

from cavvy.cli.reach.session import failures, make_failure, make_patience
from cavvy.cli.server.backup import adopt_command, backup_command, restore_command
from cavvy.cli.server.setup import command as setup_command
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.job_output import JobOutput, show_whole
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import json_option


@click.group("server", cls=CommandGroup)
def command() -> None:
    """Start, stop and inspect the embedded server, share it with a team, and back it up.

    For a team: `init` creates the first admin; `user`, `role`, `token` and `trust` say who may use
    the server, and `audit` who did what. `backup` and `restore` save it.

    Commands start the server when they need it. The server stops automatically after a while
    without work. Jobs keep running while the server is stopped.
    """


for each in (setup_command, adopt_command, backup_command, restore_command):
    command.add_command(each)

# Options that set a setting of the server for this start.
_OPTIONS = {
    "database": ("URL", "Keep jobs in this PostgreSQL database; later starts also use it."),
    "files": ("PLACE", "The folder or bucket for the files that servers of --database share."),
    "listen": ("ADDRESS:PORT", "Also listen on this address for users."),
    "tls-cert": (
        "FILE",
        "The TLS certificate for --listen, in PEM; required if other machines connect.",
    ),
    "tls-key": ("FILE", "The key of the certificate, in PEM."),
}


def _server_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, (metavar, text) in reversed(_OPTIONS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    return command


@command.command("start")
@_server_options
def start(**chosen: str | None) -> None:
    """Start the server in the background, unless it is running.

    Other commands also start the server if it is not running. An automatic start uses the settings
    file, so put options that must apply to every start into that file.
    """
    from cavvy.client.connection import connect_embedded, ensure_server
    from cavvy.client.state import default_home, server_holds_lock

    given = [name for name, value in chosen.items() if value]
    if given and server_holds_lock(default_home()):
        raise CommandFailure(
            f"a server is running, so --{given[0].replace('_', '-')} has no effect",
            "stop the server first: cavvy server stop",
        )
    _set(chosen)
    with failures():
        server = ensure_server(patience=make_patience())
        with connect_embedded(start=False, patience=make_patience()) as client:
            problem = client.server().problem
    click.echo(
        f"the server is running (process {server.pid}, cavvy {server.version}) at "
        f"{server.listen or server.address}"
    )
    if problem:
        click.echo(f"cavvy: {problem}", err=True)


@command.command("run")
@_server_options
@click.option(
    "--wait",
    is_flag=True,
    help="If another server is active, wait and take over when that server has ended.",
)
def run(wait: bool, **chosen: str | None) -> None:
    """Run the server in the foreground, for service managers and containers. The server writes its
    log to standard error, does not stop when it is idle, and ends on SIGTERM; jobs keep running.
    """
    import os
    import sys

    _set(chosen)
    os.environ.setdefault("CAVVY_SERVER_IDLE_STOP_S", "0")
    program = [sys.executable, "-P", "-m", "cavvy.server.embedded"]
    os.execv(sys.executable, [*program, "--wait"] if wait else program)


@command.command("init")
@click.option("--admin", metavar="NAME", help="The name of the admin's account.")
@click.option("--url", help="The URL at which users reach the server, such as a proxy's URL.")
def init(admin: str | None, url: str | None) -> None:
    """Create the first admin of a shared server, and print the admin's sign-in command.

    Run this command once, as the user who runs the server. Without --admin, the command asks for
    the name.
    """
    from cavvy.cli.server.setup import show_first_admin

    show_first_admin(admin, url)


@command.command("stop")
def stop() -> None:
    """Stop the server and wait until it has ended; jobs keep running."""
    from cavvy.client.connection import stop_server

    with failures():
        stopped = stop_server(patience=make_patience())
    click.echo("the server has stopped; jobs keep running" if stopped else "no server is running")


@command.command("restart")
@click.pass_context
def restart(context: click.Context) -> None:
    """Restart the server, for example to apply changed settings; jobs keep running."""
    from cavvy.cli.reach.providers import load_providers

    load_providers()  # so that the server keeps running if its settings are wrong
    context.invoke(stop)
    context.invoke(start)


@command.command("status")
@json_option
def status(output: str) -> None:
    """Show whether the server is running, and its details. The exit code is 3 if no server is
    running.
    """
    from cavvy.cli.view.output import json_out, pairs_out
    from cavvy.client import ApiError
    from cavvy.client.connection import connect_embedded

    try:
        with connect_embedded(start=False, patience=make_patience()) as client:
            server = client.server()
    except ApiError as error:
        if error.code != "server-not-running":
            raise make_failure(error) from error
        raise CommandFailure(
            "no server is running",
            "commands start the server when they need it; `cavvy server start` starts it now",
            3,
        ) from error
    facts = {name: getattr(server, name) for name in server.__struct_fields__}
    if output == "json":
        json_out(facts)
    else:
        pairs_out([(name.replace("_", " "), _shown(value)) for name, value in facts.items()])


@command.command("logs")
@count_option("-n", "--lines", default=50, help="The number of lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
def logs(lines: int, follow: bool) -> None:
    """Print the end of the server's own log."""
    import os

    from cavvy.client.state import default_home

    path = os.path.join(default_home(), "server.log")
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - lines * 4096))
            last = b"\n".join(file.read().splitlines()[-lines:])
            click.echo(show_whole(last).decode("utf-8", "replace"))
            end = file.tell()
    except FileNotFoundError:
        raise CommandFailure(
            f"there is no {path}", "no server has run with this state folder yet"
        ) from None
    if follow:
        _follow(path, end)


def _set(chosen: Mapping[str, str | None]) -> None:
    """Set these settings for the server that this command starts."""
    import os

    for name, value in chosen.items():
        if value:
            is_path = name.startswith(("tls_", "files")) and "://" not in value
            path = os.path.abspath(value) if is_path else value
            os.environ[f"CAVVY_SERVER_{name.upper()}"] = path


def _follow(path: str, offset: int) -> None:
    """Print new lines of the log. When the server starts a new log file, continue in that file."""
    import os
    import time

    file = open(path, "rb")  # noqa: SIM115 - a new log means a new file
    file.seek(offset)
    output = JobOutput()
    try:
        while True:
            if part := file.read():
                output.write(part)
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
