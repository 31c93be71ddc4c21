"""`cavvy credential`: manages a project's own credentials at providers."""

from typing import IO

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("credential", cls=CommandGroup)
def command() -> None:
    """Set, list and remove a project's own credentials for providers.

    With its own credential, a project and its subprojects run their jobs in the project's account
    instead of the server's account. Credentials are stored encrypted, stay on the server and are
    never shown again.
    """


@command.command("set")
@click.argument("provider")
@project_option
@click.option(
    "--key-file",
    type=click.File("rb"),
    required=True,
    help="The file with the key, as for the provider's setting key_file; - is standard input.",
)
@click.option(
    "--setting",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of the provider, such as regions=eu-west-1; repeatable.",
)
def set_credential(
    provider: str, project: str, key_file: IO[bytes], settings: tuple[str, ...]
) -> None:
    """Set the project's credential for a provider, after the server has tested the credential."""
    from cavvy.client.account_wire import CredentialAsk, put_credential

    values = dict(_read_setting(each) for each in settings)
    try:
        key = key_file.read().decode()
    except UnicodeDecodeError:
        raise CommandFailure("the key file is not text", exit_code=2) from None
    with session() as client:
        put_credential(
            client, project, provider, CredentialAsk(settings=values, keys={"key_file": key})
        )
    click.echo(f"project {project} uses its own credential for {provider}")


@command.command("list")
@project_option
@output_option
def list_own(project: str, output: str) -> None:
    """List the providers for which the project has its own credential."""
    from cavvy.client.account_wire import list_credentials

    with session() as client:
        found = list_credentials(client, project)
    rows = [(each.provider, each.updated_at, each.problem or "in use") for each in found]
    columns = [
        TableColumn("provider"),
        TableColumn("updated_at", "SET AT"),
        TableColumn("state", wrap=True),
    ]
    empty = f"project {project} has no credentials of its own"
    rows_out(columns, rows, output, empty=empty)


@command.command("remove")
@click.argument("provider")
@project_option
def remove(provider: str, project: str) -> None:
    """Remove a credential. The server refuses to remove a credential while machines
    use the credential.
    """
    from cavvy.client.account_wire import remove_credential

    with session() as client:
        remove_credential(client, project, provider)
    click.echo(f"project {project} no longer has a credential for {provider}")


def _read_setting(text: str) -> tuple[str, str | int | float | bool]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandFailure(f"--setting {text}: expected NAME=VALUE", exit_code=2)
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
