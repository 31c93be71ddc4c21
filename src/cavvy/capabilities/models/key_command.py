"""`cavvy model key`: keys of users that sign published models in the place of the server."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.capabilities.models.model_keys import ListChange, SigningKey
    from cavvy.client import ApiClient

PASSPHRASE = "CAVVY_KEY_PASSPHRASE"
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("key", cls=CommandGroup)
def command() -> None:
    """Sign models with keys that the server does not have.

    A server that was broken into cannot publish a version of a model for devices if the model has a
    key of `cavvy model key set`, and the lists of keys have one of `cavvy model key take`.
    """


@command.command("new")
@click.argument("file", type=_FILE)
@click.option("--no-passphrase", is_flag=True, help="Do not encrypt the key, as for a CI job.")
def new(file: Path, no_passphrase: bool) -> None:
    """Make a signing key in a new file. Keep a copy: it cannot be made again.

    The file is encrypted with a passphrase, which is asked for, or read from CAVVY_KEY_PASSPHRASE.
    """
    from cavvy.capabilities.models.model_keys import make_key

    passphrase = "" if no_passphrase else _ask_passphrase(confirm=True)
    with _refusals():
        try:
            made = make_key(file, passphrase)
        except OSError as error:
            told = f"the key {file} cannot be written: {error.strerror}"
            raise CommandFailure(told, "name another file", exit_code=2) from error
    click.echo(f"made the key {made.key_id} in {file}")
    click.echo(f"to sign a model with it: cavvy model key set MODEL --key {file}")


@command.command("list")
@project_option
@output_option
def list_all(project: str, output: str) -> None:
    """List who signs what: the keys of the project's lists and models.

    What users sign expires, and then stops updates: `cavvy model key renew`. From 60 days before,
    this command and `cavvy edge list` say so.
    """
    from cavvy.capabilities.models.model_keys import list_expiring

    with session() as client, _refusals():
        described = read_change(client, project).describe()
        expiring = list_expiring(client, project, datetime.now(UTC))
    rows = [
        {"list": role, "key": key, "signed_by": by, "versions": count, "expires_at": expires}
        for role, key, by, expires, count in described
    ]
    columns = [
        TableColumn("list"),
        TableColumn("signed_by", "SIGNED BY"),
        TableColumn("key"),
        TableColumn("versions"),
        TableColumn("expires_at", "EXPIRES", formatting.show_time),
    ]
    rows_out(columns, rows, output, empty="no keys")
    for each in expiring:
        note_out(each)


@command.command("set")
@click.argument("model")
@click.option("--key", type=_FILE, help="The key, of `cavvy model key new`.")
@click.option("--server", is_flag=True, help="Let the server sign again, with a new key.")
@click.option("--owner", type=_FILE, help="The key of `cavvy model key take`, if it was used.")
@project_option
def set_key(model: str, key: Path | None, server: bool, owner: Path | None, project: str) -> None:
    """Let a key sign the versions of a model from now on, in the place of the key that does.

    The key signs the versions that the server lists now, so set it while you trust the server. This
    also replaces a key that was lost or stolen. Devices follow at their next update.
    """
    from cavvy.capabilities.models.wire import (
        SignedListsAsk,
        replace_signed_lists,
        rotate_signing_keys,
    )
    from cavvy.client.errors import ApiError

    if (key is None) == (not server):
        raise CommandFailure("expected one of --key FILE and --server", exit_code=2)
    with session() as client, _refusals():
        signing, owning = read_key(key), read_key(owner)
        try:
            change = read_change(client, project)
        except ApiError as error:
            if error.code != "model-not-found":
                raise
            rotate_signing_keys(client, project)  # a project without a model has no lists yet
            change = read_change(client, project)
        known = change.versions_of(model)
        change.set_key(model, signing, owning)
        lists, keys = change.result()
        replace_signed_lists(client, project, SignedListsAsk(lists=lists, keys=keys))
    who = f"the key {signing.key_id[:16]}" if signing else "the server"
    click.echo(f"{who} signs the model {model}, also these versions: {', '.join(known) or 'none'}")
    if signing and change.describe()[1][2] == "server":
        told = (
            "the server could still name another key for it: `cavvy model key take` prevents this"
        )
        note_out(told)


@command.command("take")
@click.option("--key", type=_FILE, required=True, help="The key, of `cavvy model key new`.")
@click.option("--former", type=_FILE, help="The key that was used before with this command.")
@project_option
def take(key: Path, former: Path | None, project: str) -> None:
    """Take the keys of the lists of keys from the server: it then cannot name a key for a model.

    The key signs the lists `root` and `targets`, and the server gets new keys for the rest. From
    then on, a new model needs `cavvy model key set`, and this command replaces the keys, after the
    server was broken into too. Without the key and its copies, devices must enrol again.
    """
    from cavvy.capabilities.models.wire import SignedListsAsk, replace_signed_lists

    with session() as client, _refusals():
        signing, known = read_key(key), read_key(former)
        assert signing is not None
        change = read_change(client, project)
        change.take_keys(signing, known)
        lists, keys = change.result()
        replace_signed_lists(client, project, SignedListsAsk(lists=lists, keys=keys))
    click.echo(f"the key {signing.key_id[:16]} signs the lists root and targets of {project}")
    left = [role for role, _, by, _, _ in change.describe() if by == "server"]
    models = [role.removeprefix("model-") for role in left if role.startswith("model-")]
    if models:
        told = f"the server still signs {', '.join(models)}; `cavvy model key set` gives them a key"
        note_out(told)
    note_out("devices follow at their next update; keep copies of the key")


@command.command("renew")
@click.option("--key", type=_FILE, required=True, help="The key that signs the lists.")
@project_option
def renew(key: Path, project: str) -> None:
    """Sign again what a key signs, for two years from now; the list `root` for ten."""
    from cavvy.capabilities.models.wire import SignedListsAsk, replace_signed_lists, sign_model

    with session() as client, _refusals():
        signing = read_key(key)
        assert signing is not None
        change = read_change(client, project)
        roles = change.renew(signing)
        lists, _ = change.result()
        own = {role: text for role, text in lists.items() if not role.startswith("model-")}
        if own:
            replace_signed_lists(client, project, SignedListsAsk(lists=own))
        for role in lists.keys() - own.keys():
            sign_model(client, project, role.removeprefix("model-"), lists[role])
    if not roles:
        raise CommandFailure(
            f"the key {key} signs nothing", "`cavvy model key list` lists the keys"
        )
    click.echo(f"signed again: {', '.join(roles)}")


def read_change(client: "ApiClient", project: str) -> "ListChange":
    """Return the project's lists, to be changed."""
    from cavvy.capabilities.models.model_keys import ListChange
    from cavvy.capabilities.models.wire import read_signed_lists

    found = read_signed_lists(client, project)
    return ListChange(found.lists, found.held)


def read_key(path: Path | None) -> "SigningKey | None":
    """Return the key of a file. Raises CommandFailure."""
    from cavvy.capabilities.models import model_keys

    with _refusals():
        return None if path is None else model_keys.read_key(path, _ask_passphrase)


def check_key(client: "ApiClient", project: str, model: str, key: "SigningKey") -> None:
    """Raise CommandFailure unless the model has this key."""
    with _refusals():
        read_change(client, project).check_key(f"model-{model}", key)


def sign_version(
    client: "ApiClient",
    project: str,
    name: str,
    key: "SigningKey",
    files: dict[str, str] | None,
    main: str = "",
) -> dict[str, str]:
    """Sign a version MODEL@NUMBER if it has the given files, by their SHA-256 and paths. Return the
    files that were signed. Raises CommandFailure."""
    import json

    from cavvy.capabilities.models.model_keys import ListChange, check_files
    from cavvy.capabilities.models.wire import read_signed_lists, sign_model

    model, _, number = name.rpartition("@")
    path = f"{model}/{number}.json"
    found = read_signed_lists(client, project, model)
    if path not in found.unsigned:
        raise CommandFailure(
            f"{name} needs no signature: it has one, or the server signs {model}",
            f"to sign {model} with your key: cavvy model key set {model} --key FILE",
        )
    manifest = found.unsigned[path].encode()
    with _refusals():
        change = ListChange(found.lists, found.held)
        change.sign_version(model, path, manifest, key)
        if files is not None:
            check_files(manifest, files, main)
    sign_model(client, project, model, change.result()[0][f"model-{model}"])
    return {each["path"]: each["sha256"] for each in json.loads(manifest)["files"]}


@contextmanager
def _refusals() -> Iterator[None]:
    from cavvy.capabilities.models.model_keys import KeyRefused

    try:
        yield
    except KeyRefused as error:
        reason, hint = (*error.args, "")[:2]
        raise CommandFailure(str(reason), str(hint), exit_code=2) from error


def _ask_passphrase(confirm: bool = False) -> str:
    if (known := os.environ.get(PASSPHRASE)) is not None:
        return known
    if not sys.stdin.isatty():
        raise CommandFailure(
            "the key needs a passphrase, and there is no terminal to ask at",
            f"set {PASSPHRASE}" + (", or add --no-passphrase" if confirm else ""),
            exit_code=2,
        )
    found: str = click.prompt(
        "Passphrase of the key", hide_input=True, err=True, confirmation_prompt=confirm
    )
    return found
