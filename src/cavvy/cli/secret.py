"""`cavvy secret`: manages values that jobs get as environment variables. A value is never shown
again after it is set.
"""

from typing import IO

import click

from cavvy.cli.reach.session import named, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import output_option


@click.group("secret")
def command() -> None:
    """Set, list and delete secrets.

    A task lists the secrets that it uses; each becomes an environment variable of that name.
    Values are encrypted at rest and are never shown again.
    """


@command.command("set")
@click.argument("name")
@project_option
@click.option(
    "--file", type=click.File("rb"), help="Read the value from a file; - is standard input."
)
def set_secret(name: str, project: str, file: IO[bytes] | None) -> None:
    """Set a secret. The value is read from a prompt, a file or a pipe. A value cannot be given as
    an argument, because other users of the machine can see arguments.
    """
    if "=" in name:
        hint = (
            f"pass the value to `cavvy secret set {named(project, name.partition('=')[0])}` "
            "through a pipe, or enter it when asked"
        )
        raise CommandFailure("a secret's name cannot contain =", hint, exit_code=2)
    value = _read_value(name, file)
    if not value:
        hint = f"to remove the secret: `cavvy secret delete {named(project, name)}`"
        raise CommandFailure("the value is empty", hint, exit_code=2)
    with session() as client:
        client.put_secret(project, name, value)
    click.echo(f"secret {name} of project {project} is set")


@command.command("list")
@project_option
@output_option
def list_secrets(project: str, output: str) -> None:
    """List the names of a project's secrets."""
    from cavvy.cli.view.output import TableColumn, rows_out

    with session() as client:
        rows = [(secret.name, secret.updated_at) for secret in client.secrets(project)]
    empty = (
        f"project {project} has no secrets; set one with `cavvy secret set "
        f"{named(project, 'NAME')}`"
    )
    rows_out([TableColumn("name"), TableColumn("updated_at", "SET AT")], rows, output, empty=empty)


@command.command("delete")
@click.argument("name")
@project_option
def delete(name: str, project: str) -> None:
    """Delete a secret. Running jobs keep the value that they received."""
    with session() as client:
        client.delete_secret(project, name)
    click.echo(f"secret {name} of project {project} is deleted")


def _read_value(name: str, file: IO[bytes] | None) -> str:
    import sys

    if file is None and sys.stdin.isatty():
        return str(click.prompt(f"value of {name}", hide_input=True))
    data = file.read() if file is not None else sys.stdin.buffer.read()
    try:
        # Editors add a newline at the end, which is not part of the secret.
        return bytes(data).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise CommandFailure(
            "the value is not UTF-8 text", "encode it, for example with base64", exit_code=2
        ) from None
