"""`cavvy secret` and `cavvy project credential`: manage values that jobs receive as environment
variables, and a project's own credentials at providers. A value is never shown again after it is
set.
"""

from typing import IO, TYPE_CHECKING

import click

from cavvy.cli.reach.session import call_server, find_project_note, named, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.named_file import NamedFile
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.account_wire import SecretKeyRow


@click.group("secret", cls=CommandGroup)
def command() -> None:
    """Set, list and delete secrets.

    A task lists the secrets that it uses; each secret becomes an environment variable of the same
    name. Values are encrypted at rest and are never shown again.
    """


@command.command("set")
@click.argument("name")
@project_option
@click.option("--file", type=NamedFile(), help="Read the value from a file; - is standard input.")
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
        there = named(project, name)
        hint = (
            f"write `printf %s VALUE | cavvy secret set {there}`, or call it in a terminal, where "
            f"it asks for the value; `cavvy secret delete {there}` removes the secret"
        )
        raise CommandFailure("the value is empty", hint, exit_code=2)
    with session() as client:
        client.put_secret(project, name, value)
        undo = f"`cavvy secret delete {named(project, name)}` removes the secret"
        note = find_project_note(client, project, undo)
    click.echo(f"secret {name} of project {project} is set")
    if note:
        click.echo(note, err=True)


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


@command.command("keys")
@output_option
def list_keys(output: str) -> None:
    """List the keys that encrypt secrets, the current key first. Only admins may list the keys."""
    from cavvy.cli.view.output import TableColumn, rows_out
    from cavvy.client.account_wire import list_keys

    with session() as client:
        found = list_keys(client)
    rows = [
        (
            key.id or "-",
            "current" if key.current else "former",
            key.secrets,
            key.files,
            _show_place(key),
        )
        for key in found
    ]
    columns = [
        TableColumn("id", "KEY"),
        TableColumn("state"),
        TableColumn("secrets"),
        TableColumn("files"),
        TableColumn("place", wrap=True),
    ]
    rows_out(columns, rows, output, empty="no keys")


def _show_place(key: "SecretKeyRow") -> str:
    if key.place is not None:
        return key.place
    return (
        "the server does not have this key"
        if key.id
        else "encrypted before version 2; rotate the key"
    )


@command.command("rotate")
def rotate() -> None:
    """Encrypt all secrets of all projects again. Only admins may run this command.

    If the key is in the server's state folder, the server creates a new key, and keeps the former
    key to decrypt older data. If the setting secrets.key names a key, the server uses that key and
    creates new data keys. The data keys of stored files are encrypted again with the keys that the
    table [files] of the settings names. New files get new data keys.
    """
    from cavvy.client.account_wire import rotate_key

    with session() as client:
        done = rotate_key(client)
    for secret in done.unreadable:
        click.echo(f"{secret.project}/{secret.name} is unchanged: {secret.reason}", err=True)
    plural = "secret is" if done.encrypted == 1 else "secrets are"
    click.echo(f"{done.encrypted} {plural} encrypted with {done.id} ({done.place})")
    if done.files:
        data_keys = "data key of files is" if done.files == 1 else "data keys of files are"
        click.echo(f"{done.files} {data_keys} encrypted again")
    if done.unreadable:
        raise CommandFailure(f"{len(done.unreadable)} secrets could not be read")


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
            "the value is not UTF-8 text", "encode the value, for example with base64", exit_code=2
        ) from None


@click.group("credential", cls=CommandGroup)
def credential_command() -> None:
    """Set, list and remove a project's own credentials for providers.

    With its own credential, a project and its subprojects run their jobs in the project's account
    instead of the server's account. Credentials are stored encrypted, stay on the server and are
    never shown again.
    """


@credential_command.command("set")
@click.argument("provider")
@project_option
@click.option(
    "--key-file",
    type=NamedFile(),
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


@credential_command.command("list")
@project_option
@output_option
def list_own(project: str, output: str) -> None:
    """List the providers for which the project has its own credential."""
    from cavvy.client.account_wire import list_credentials

    found = call_server(list_credentials, project)
    rows = [(each.provider, each.updated_at, each.problem or "in use") for each in found]
    columns = [
        TableColumn("provider"),
        TableColumn("updated_at", "SET AT"),
        TableColumn("state", wrap=True),
    ]
    empty = f"project {project} has no credentials of its own"
    rows_out(columns, rows, output, empty=empty)


@credential_command.command("remove")
@click.argument("provider")
@project_option
def remove(provider: str, project: str) -> None:
    """Remove a credential. The server refuses to remove a credential while machines
    use the credential.
    """
    from cavvy.client.account_wire import remove_credential

    call_server(remove_credential, project, provider)
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
