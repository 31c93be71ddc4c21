"""`cavvy server setup`: sets up a server for a team, with questions or options.

Creates the first admin of a server that a team shares, and the admin's first token.

Error messages for commands that use the state folder while no server runs.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from cavvy.cli.reach.session import failures, make_patience
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.account_wire import AccountClient, TokenAsk
from cavvy.client.addresses import check_address, name_host
from cavvy.client.errors import ApiError
from cavvy.client.state import host_name

if TYPE_CHECKING:
    from cavvy.client import ApiClient


_OPTIONS = {
    "listen": (
        "ADDRESS:PORT",
        "The address on which the server listens for users, such as 0.0.0.0:7443.",
    ),
    "tls-cert": ("FILE", "The certificate and its chain of authorities, in PEM."),
    "tls-key": ("FILE", "The key of the certificate, in PEM."),
    "database": ("URL", "A PostgreSQL database, or sqlite for a file in the state folder."),
    "admin": ("NAME", "The name of the admin's account."),
    "url": ("URL", "The URL that users enter; needed if there is a proxy in front of the server."),
}

_LABEL = "first sign-in"
_VALID_S = 90 * 24 * 3600


def _answer_options(command: click.decorators.FC) -> click.decorators.FC:
    for name, (metavar, text) in reversed(_OPTIONS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    return command


@click.command("setup")
@_answer_options
@click.option(
    "--jobs-here/--no-jobs-here", default=None, help="Whether jobs may run on this machine."
)
@click.option(
    "--start/--no-start",
    "starts",
    default=True,
    help="Start the server and create the admin, or only write the settings for a service manager.",
)
def command(jobs_here: bool | None, starts: bool, **given: str | None) -> None:
    """Set up a server for a team: write its settings, start it, create the first admin, and print
    the admin's sign-in command.

    Run this command once, as the user who runs the server. The command asks for missing options.
    """
    from cavvy import settings
    from cavvy.client.state import default_home, server_holds_lock

    with folder_failures():
        usual = settings.load({**os.environ, "CAVVY_CONFIG": ""}).file
        file = os.environ.get("CAVVY_CONFIG") or str(usual)
        if os.path.exists(file) and os.path.getsize(file):
            raise CommandFailure(
                f"{file} exists, and this command does not change it",
                "edit the file (docs/reference/settings.md lists the settings), then run "
                "`cavvy server restart` and `cavvy server init`",
            )
        if server_holds_lock(default_home()):
            raise CommandFailure("a server is running", "stop the server first: cavvy server stop")
        answers = _complete(given, jobs_here, starts=starts)
        text = make_settings(answers)
        _check(text)
        _write(file, text)
    click.echo(f"wrote {file}", err=True)
    if not starts:
        click.echo("start the server, then create the admin: cavvy server init", err=True)
        return
    show_first_admin(answers["admin"], answers["url"] or None)


def make_settings(answers: Mapping[str, str]) -> str:
    """Return the text of the settings file."""
    import json

    lines = [
        "# Written by `cavvy server setup`. docs/reference/settings.md lists all settings.",
        "",
    ]
    lines += ["[server]", "idle_stop_s = 0"]
    for name in ("listen", "tls_cert", "tls_key", "database"):
        if answers[name]:
            lines.append(f"{name} = {json.dumps(answers[name], ensure_ascii=False)}")
    if answers["jobs_here"] == "no":
        lines += ["", "[providers.local]", "enabled = false"]
    return "\n".join(lines) + "\n"


def _complete(
    given: Mapping[str, str | None], jobs_here: bool | None, *, starts: bool
) -> dict[str, str]:
    """Return all answers, from the options or from questions to the user. Files get absolute
    paths.
    """
    found = {name: text for name, text in given.items() if text is not None}
    if jobs_here is not None:
        found["jobs_here"] = "yes" if jobs_here else "no"
    found.setdefault("url", "")
    if not starts:
        found.setdefault("admin", "")
    for name, (question, default) in _questions().items():
        if name.startswith("tls_") and _is_local(found["listen"]):
            found.setdefault(name, "")  # without TLS, behind a proxy or for tests
        if name not in found:
            if not sys.stdin.isatty():
                _refuse(name)
            found[name] = click.prompt(question, default=default, err=True).strip()
    if found["jobs_here"] not in ("yes", "no"):
        raise CommandFailure(f"expected yes or no, not {found['jobs_here']!r}", exit_code=2)
    found["database"] = "" if found["database"] == "sqlite" else found["database"]
    for name in ("tls_cert", "tls_key"):
        found[name] = found[name] and os.path.abspath(found[name])
    return found


def _questions() -> Mapping[str, tuple[str, str | None]]:
    """Return the question for each answer, and its default."""
    from getpass import getuser

    return {
        "listen": ("Address and port for users", "0.0.0.0:7443"),
        "tls_cert": ("File with the certificate, in PEM", None),
        "tls_key": ("File with its key", None),
        "database": ("URL of a PostgreSQL database, or sqlite", "sqlite"),
        "jobs_here": ("May jobs run on this machine? (yes or no)", "no"),
        "admin": ("Name of the admin", getuser()),
    }


def _is_local(listen: str) -> bool:
    return listen.startswith(("127.", "[::1]"))


def _refuse(name: str) -> NoReturn:
    option = {"jobs_here": "--jobs-here or --no-jobs-here"}.get(name, f"--{name.replace('_', '-')}")
    raise CommandFailure(
        f"there is no terminal to ask questions on, and {option} is missing",
        "`cavvy server setup --help` lists the options",
        exit_code=2,
    )


def _check(text: str) -> None:
    """Check the address, the certificate and the database in the same way as the server does.
    Raises StateDirError, SettingsError, StoreError.
    """
    import tempfile

    from cavvy import settings
    from cavvy.server.database import SCHEMES
    from cavvy.server.user_listener import listen_for_users
    from cavvy.store.leases import list_replicas

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as draft:
        draft.write(text)
        draft.flush()
        kept = {name: value for name, value in os.environ.items() if "SERVER_" not in name}
        made = settings.load({**kept, "CAVVY_CONFIG": draft.name})
    if listener := listen_for_users(made):
        listener.sock.close()
    if url := made.text("server.database"):
        if not url.startswith(SCHEMES):
            raise CommandFailure(f"the database is {url!r}; expected {SCHEMES[0]}… or sqlite")
        for server in list_replicas(url):
            raise CommandFailure(
                f"process {server.pid} on {server.host} uses this database",
                "use another database; docs/guides/postgresql.md explains how servers share "
                "a database",
            )


def _write(file: str, text: str) -> None:
    from cavvy.client.state import write_private

    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    write_private(file, text.encode())  # the URL of a database may contain a password


def show_first_admin(admin: str | None, url: str | None) -> None:
    """Start the server if it is not running, create the first admin, and print the admin's
    sign-in command. Without `admin`, ask for a name. Raises CommandFailure.
    """
    from getpass import getuser

    from cavvy.client.connection import connect_embedded, ensure_server

    with failures():
        server = ensure_server(patience=make_patience())
        url = url.rstrip("/") if url else find_url(server.listen, host_name())
        check_address(url)
        admin = admin or click.prompt("Name of the admin", default=getuser(), err=True)
        with connect_embedded(patience=make_patience()) as client:
            token = create_first_admin(client, admin)
    click.echo(f"{admin} has all rights on this server. To sign in from any machine:", err=True)
    click.echo(f"cavvy login {url} --token {token}")
    click.echo("save this line; its token cannot be shown again", err=True)


def create_first_admin(client: "ApiClient", name: str) -> str:
    """Create an account with all rights, and return a token for it. If the account exists, for
    example after an interrupted attempt, it becomes the admin. Raises CommandFailure if an admin
    already exists, and ApiError if the server refuses a request.
    """
    accounts = AccountClient(client)
    admins = sorted(each.account for each in accounts.roles(None) if each.role == "admin")
    if admins:
        raise CommandFailure(
            f"this server already has an admin: {', '.join(admins)}",
            f"`cavvy server token create --user {admins[0]}` creates another token",
        )
    try:
        accounts.add_account(name, "user")
    except ApiError as error:
        if error.code != "name-taken":
            raise
    # The token is created before the role, so that the command can be repeated after an
    # interruption.
    made = accounts.create_token(TokenAsk(account=name, label=_LABEL, expires_s=_VALID_S))
    accounts.grant_role(name, "admin", None)
    return made.token


def find_url(listen: str | None, host: str) -> str:
    """Return the URL at which users reach a server that listens on the address `listen` of the
    machine `host`. Raises CommandFailure if the server listens only on its Unix socket.
    """
    if listen is None:
        raise CommandFailure(
            "the server can be reached only by the user who runs it, on this machine",
            "restart the server with an address: cavvy server start --listen 0.0.0.0:443 "
            "--tls-cert FILE --tls-key FILE; if users connect through a proxy, give the proxy's "
            "URL with --url",
        )
    return name_host(listen, host)


@contextmanager
def folder_failures() -> Iterator[None]:
    """Turn errors of the state folder, the settings, the database and the disk into a
    CommandFailure.
    """
    from cavvy.providers.base import ProviderError
    from cavvy.server.state_dir import StateDirError
    from cavvy.settings import SettingsError
    from cavvy.store.base import StoreError

    try:
        yield
    except (StateDirError, SettingsError) as error:
        raise CommandFailure(error.message, error.hint) from error
    except StoreError as error:
        raise CommandFailure(str(error)) from error
    except ProviderError as error:
        raise CommandFailure(str(error), "`cavvy check` checks every provider") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "check the path, the permissions and the free space"
        raise CommandFailure(f"{where}{error.strerror or error}", hint) from error
