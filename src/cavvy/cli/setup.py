"""`cavvy setup`: asks for what a provider needs, checks it, and writes it to the settings file."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.check import ProviderFinding, examine_one, load_known
from cavvy.cli.reach.arguments import complete_providers
from cavvy.cli.reach.providers import foresee_node_endpoint
from cavvy.cli.reach.settings_file import read_table, write_table
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import pairs_out
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.domain.tasks import Scalar
    from cavvy.providers.base import Manifest, ProviderSetting
    from cavvy.providers.registry import KnownProvider
    from cavvy.settings import Settings

_KEY = "key_file"
_LONGEST_KEY = 4096  # characters of a key that is typed or pasted


@click.command("setup")
@click.argument("provider", metavar="[PROVIDER]", required=False, shell_complete=complete_providers)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set this setting of the provider; repeatable.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    help="The file with the API key; - reads the key from standard input, and stores it in a file "
    "of its own.",
)
@click.option("--no-check", is_flag=True, help="Write the settings without asking the provider.")
def command(
    provider: str | None, pairs: tuple[str, ...], key_file: str | None, no_check: bool
) -> None:
    """Set up a provider: ask for what it needs, check that it answers, and write the settings.

    Without PROVIDER, the providers are listed, and a terminal asks which one.

    Nothing is written if the check fails. The other settings and all comments in the file stay. A
    key that you type is not shown, and is stored in a file that only you can read. Keys in the
    variables and files of the provider's own tools are found without a question.

    \b
      cavvy setup runpod
      cavvy setup aws --set regions=us-east-1
      echo $KEY | cavvy setup lambda --key-file -
    """
    from cavvy.cli.task.submission import may_ask
    from cavvy.providers import registry

    provider = provider or _choose_provider(asks=may_ask() and key_file != "-")
    known, installed = load_known(provider)
    entry = installed[provider]
    manifest = registry.manifest_of(entry)
    setup = _Setup(known, entry, manifest, _read_pairs(manifest, pairs))
    if key_file is not None:
        setup.take_key(sys.stdin.read() if key_file == "-" else None, key_file)
    try:
        if no_check:
            setup.check_form()
        else:
            setup.converse(asks=may_ask() and key_file != "-")
        setup.write()
    except BaseException:
        setup.undo()
        raise


def _choose_provider(*, asks: bool) -> str:
    """List the providers and ask for one. Raises CommandFailure if it may not ask."""
    from cavvy.providers import registry

    installed = registry.list_known()
    names = sorted(installed)
    if not asks:
        hint = f"for example `cavvy setup runpod`; there are {', '.join(names)}"
        raise CommandFailure("PROVIDER is missing", hint, exit_code=2)
    pairs_out([(name, registry.manifest_of(installed[name]).title) for name in names])
    kind = click.Choice(names)
    return str(click.prompt("Which provider", type=kind, show_choices=False))


class _Setup:
    """The settings of a provider, as they are found and changed."""

    def __init__(
        self,
        known: "Settings",
        entry: "KnownProvider",
        manifest: "Manifest",
        changes: "dict[str, Scalar]",
    ) -> None:
        self._known, self._entry, self._manifest = known, entry, manifest
        self._changes = changes
        self._key: str | None = None  # a key that has no file yet
        self._made: Path | None = None
        self._old_key: bytes | None = None
        self._before = dict(known.providers.get(manifest.name, {}))
        if self._before.get("enabled") is False:
            changes.setdefault("enabled", True)

    def take_key(self, text: str | None, file: str) -> None:
        """Use the key in a file, or the text of a key. Raises CommandFailure."""
        self._find_setting(_KEY, "--key-file")
        if text is None:
            self._changes[_KEY] = _check_file(file)
            return
        key = text.strip()
        if not key:
            raise CommandFailure("standard input has no key", exit_code=2)
        self._store_key(key)

    def converse(self, *, asks: bool) -> None:
        """Check the settings and, if it `asks`, ask until the provider can be used. Raises
        CommandFailure if it cannot be used."""
        found = self._examine()
        if not self._fails(found):
            return
        if not asks:
            raise CommandFailure(
                f"{self._manifest.name}: {found.problem}; nothing was written",
                "give what is missing with --set NAME=VALUE or --key-file FILE; --no-check writes "
                f"without the check; `cavvy check {self._manifest.name}` lists the settings",
            )
        click.echo(f"{self._manifest.title}\n")
        pairs = [("docs", self._manifest.docs), ("rights needed", self._manifest.rights)]
        pairs_out([(name, text) for name, text in pairs if text])
        click.echo(f"\n{found.problem}\n")
        self._ask_all()
        while self._fails(found := self._examine()):
            click.echo(f"\n{found.problem}\n")
            pair = click.prompt(
                "Another setting, as NAME=VALUE (Enter: end without a change)",
                default="",
                show_default=False,
            ).strip()
            if not pair:
                raise CommandFailure("the provider cannot be used, so nothing was written")
            try:
                self._changes.update(_read_pairs(self._manifest, (pair,)))
            except (CommandFailure, click.UsageError) as error:
                click.echo(str(error))

    def check_form(self) -> None:
        """Check only that the settings are of the right form. Raises CommandFailure."""
        from cavvy.providers import registry
        from cavvy.providers.base import ProviderError

        try:
            registry.check_settings(self._manifest, {**self._before, **self._changes})
        except ProviderError as error:
            raise CommandFailure(str(error), exit_code=2) from error

    def write(self) -> None:
        """Write the settings, and say what to do next."""
        name, file = self._manifest.name, self._known.file
        table = read_table(file, name)
        changes = {key: value for key, value in self._changes.items() if table.get(key) != value}
        if changes or name not in self._known.providers:
            write_table(file, name, changes)
            keys = ", ".join(changes) or "no setting is needed"
            click.echo(f"wrote [providers.{name}] to {file}: {keys}")
        else:
            click.echo(f"{file} has this already")
        self._made = None
        click.echo(f"next: cavvy offers --provider {name}")
        click.echo(
            "A server that runs already uses it after `cavvy server stop`; jobs keep running.",
            err=True,
        )

    def undo(self) -> None:
        """Remove the file of a key that is not used, or restore what was in it."""
        if self._made is not None:
            if self._old_key is None:
                self._made.unlink(missing_ok=True)
            else:
                self._made.write_bytes(self._old_key)

    def _ask_all(self) -> None:
        settings = self._manifest.settings
        for each in settings:
            if each.name == _KEY and _KEY not in self._changes:
                self._ask_key(each)
        for each in settings:
            name = each.name
            if each.of_setup and name not in self._changes and not self._before.get(name):
                click.echo(each.consequence)
                if value := click.prompt(f"{name} (Enter: none)", default="", show_default=False):
                    self._changes |= _read_pairs(self._manifest, (f"{name}={value}",))

    def _ask_key(self, setting: "ProviderSetting") -> None:
        click.echo(setting.consequence)
        while True:
            given = click.prompt(
                "The key, which is not shown, or the path of its file (Enter: neither)",
                default="",
                show_default=False,
                hide_input=True,
            ).strip()
            if not given:
                return
            path = Path(given).expanduser()
            if len(given) < _LONGEST_KEY and ("/" in given or path.exists()):
                if path.is_file():
                    self._changes[_KEY] = str(path.absolute())
                    return
                click.echo("there is no such file")
                continue
            self._store_key(given)
            return

    def _store_key(self, key: str) -> None:
        folder = self._known.file.parent / "keys"
        path = folder / self._manifest.name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._made is None and path.exists():
                self._old_key = path.read_bytes()
            self._made = path
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w") as out:
                os.fchmod(out.fileno(), 0o600)
                out.write(key + "\n")
        except OSError as error:
            raise CommandFailure(f"{path} cannot be written: {error.strerror}") from error
        self._changes[_KEY] = str(path)

    def _find_setting(self, name: str, option: str) -> "ProviderSetting":
        for each in self._manifest.settings:
            if each.name == name:
                return each
        raise CommandFailure(
            f"{option}: {self._manifest.name} has no setting {name}",
            f"`cavvy check {self._manifest.name}` lists its settings",
            exit_code=2,
        )

    def _examine(self) -> ProviderFinding:
        import asyncio

        name = self._manifest.name
        table = {**self._before, **self._changes}
        settings = replace(self._known, providers={**self._known.providers, name: table})
        return asyncio.run(examine_one(self._entry, settings, foresee_node_endpoint(settings)))

    def _fails(self, found: ProviderFinding) -> bool:
        if found.problem or not found.enabled:
            return True
        pairs_out([("ready", self._manifest.title), *found.facts])
        return False


def _read_pairs(manifest: "Manifest", pairs: tuple[str, ...]) -> "dict[str, Scalar]":
    """Return the settings of NAME=VALUE pairs. Raises CommandFailure, UsageError."""
    from cavvy.providers.base import SettingKind

    known = {each.name: each.kind for each in manifest.settings}
    found: dict[str, Scalar] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name:
            raise CommandFailure("--set: expected NAME=VALUE", "such as regions=eu", exit_code=2)
        if name not in known:
            raise CommandFailure(
                f"--set {name}: {manifest.name} has no such setting",
                f"its settings: {', '.join(known) or 'none'}",
                exit_code=2,
            )
        found[name] = (
            _check_file(value)
            if known[name] == SettingKind.KEY_FILE
            else _read_value(known[name], name, value)
        )
    return found


def _read_value(kind: str, name: str, value: str) -> "Scalar":
    from cavvy.providers.base import SettingKind

    words: Mapping[str, bool] = {"true": True, "false": False}
    try:
        match kind:
            case SettingKind.FLAG:
                return words[value.lower()]
            case SettingKind.INTEGER:
                return int(value)
            case SettingKind.NUMBER:
                return float(value)
    except (KeyError, ValueError):
        raise CommandFailure(f"--set {name}: expected {kind}", exit_code=2) from None
    return value


def _check_file(value: str) -> str:
    """Return the path of a key's file. A message never contains what may be the key itself."""
    path = Path(value).expanduser()
    if len(value) > _LONGEST_KEY or not path.is_file():
        raise CommandFailure(
            "the key's file does not exist",
            "name a file; `--key-file -` reads the key itself from standard input",
            exit_code=2,
        )
    return str(path.absolute())
