"""Defines all settings with their units, defaults and effects. Reads the values of
the settings from a TOML file and the environment.

The settings are the rows of `settings.csv`; `python -m cavvy.settings` also writes
`docs/reference/settings.md` from them.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct, field
from cavvy.frame.discover import read_rows
from cavvy.named_files import read_named_text

Scalar = str | int | float | bool


class SettingsError(Exception):
    """Raised if a file or variable with settings is invalid. The message names the location, and
    `hint` suggests a fix.
    """

    code = "settings-invalid"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Setting(Struct, frozen=True, kw_only=True):
    """One setting. The setting's unit is the suffix of its name, or is stated in `text`."""

    name: str
    default: Scalar
    text: str
    consequence: str
    minimum: float | None = None

    @property
    def variable(self) -> str:
        return "CAVVY_" + self.name.upper().replace(".", "_")


def _make_setting(row: Mapping[str, str]) -> Setting:
    """Create a setting from its row in the table. The value is a whole number if the row has a
    minimum, and a string otherwise.
    """
    is_number = row["minimum"] != ""
    return Setting(
        name=row["name"],
        default=int(row["default"]) if is_number else row["default"],
        text=row["text"],
        consequence=row["consequence"],
        minimum=int(row["minimum"]) if is_number else None,
    )


def _read_settings() -> Iterator[Setting]:
    yield from map(_make_setting, read_table(__package__, "settings"))
    own = read_rows("settings", lambda capability: capability.settings)
    yield from map(_make_setting, own)


SETTINGS = tuple(_read_settings())
_TABLES = {setting.name.partition(".")[0] for setting in SETTINGS}
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class Settings(Struct, frozen=True, kw_only=True):
    """The settings in use. `values` contains every setting; `providers` contains the table of each
    provider.
    """

    home: Path
    file: Path
    values: Mapping[str, Scalar]
    providers: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)

    def whole(self, name: str) -> int:
        """Return the value of a setting whose default is an int."""
        return int(self.values[name])

    def text(self, name: str) -> str:
        """Return the value of a setting whose default is a string."""
        return str(self.values[name])


def load(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the file that CAVVY_CONFIG names, or else from the default file, if it
    exists. Variables CAVVY_<TABLE>_<KEY> replace values of the file.

    Raises SettingsError for a file that cannot be read, an unknown key or a value of the wrong
    type.
    """
    env = os.environ if environment is None else environment
    file = _config_file(env)
    given = _read(file, must_exist=bool(env.get("CAVVY_CONFIG")))
    values: dict[str, Scalar] = {setting.name: setting.default for setting in SETTINGS}
    for name, value in _flatten(given, file).items():
        values[name] = _checked(name, value, str(file))
    providers = _providers(given.get("providers", {}), file)
    for variable, text in env.items():
        table, _, key = variable.removeprefix("CAVVY_").lower().partition("_")
        if not variable.startswith("CAVVY_") or not key:
            continue
        if table in _TABLES:
            name = f"{table}.{key}"
            values[name] = _checked(name, _scalar(text, name), f"the variable {variable}")
        elif table == "providers" and "_" in key:
            provider, _, key = key.partition("_")
            providers.setdefault(provider, {})[key] = _scalar(text, None)
    return Settings(home=home(env), file=file, values=values, providers=providers)


def home(environment: Mapping[str, str] | None = None) -> Path:
    """Return the state folder: CAVVY_HOME or ~/.cavvy."""
    env = os.environ if environment is None else environment
    return (
        Path(env.get("CAVVY_HOME") or Path(env.get("HOME") or Path.home()) / ".cavvy")
        .expanduser()
        .absolute()
    )


def _config_file(env: Mapping[str, str]) -> Path:
    if given := env.get("CAVVY_CONFIG"):
        return Path(given).expanduser().absolute()
    base = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or Path.home()) / ".config"
    return Path(base) / "cavvy" / "settings.toml"


def _read(file: Path, *, must_exist: bool) -> dict[str, object]:
    try:
        text = read_named_text(file)
    except (FileNotFoundError, NotADirectoryError):  # HOME can be /dev/null
        if must_exist:
            raise SettingsError(
                f"{file}: there is no such file",
                "CAVVY_CONFIG names this file; create the file or unset the variable",
            ) from None
        return {}
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{file}: {error}", "the file is TOML in UTF-8; see docs/reference/settings.md"
        ) from error
    except OSError as error:
        raise SettingsError(
            f"{file}: {error.strerror}", "make the file readable for you"
        ) from error
    import tomllib  # imported here, because most commands read no settings file

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number with 5,000 digits
        raise SettingsError(
            f"{file}: {error}", "the file is TOML; see docs/reference/settings.md"
        ) from error


def _flatten(given: Mapping[str, object], file: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for table, content in given.items():
        if table == "providers":
            continue
        if not isinstance(content, dict) or table not in _TABLES:
            raise _unknown(table, [*_TABLES, "providers"], str(file), "table")
        for key, value in content.items():
            found[f"{table}.{key}"] = value
    return found


def _providers(given: object, file: Path) -> dict[str, dict[str, Scalar]]:
    if not isinstance(given, dict):
        raise SettingsError(
            f"{file}: `providers` must be a table", "write [providers.local] and its keys below it"
        )
    tables: dict[str, dict[str, Scalar]] = {}
    for provider, content in given.items():
        if not isinstance(content, dict):
            raise SettingsError(
                f"{file}: `providers.{provider}` must be a table", f"write [providers.{provider}]"
            )
        for key, value in content.items():
            if not isinstance(value, str | int | float | bool):
                raise SettingsError(
                    f"{file}: `providers.{provider}.{key}` must be a string, number or boolean",
                    _hint_flat(key, value),
                )
        tables[provider] = dict(content)
    return tables


def _hint_flat(key: str, value: object) -> str:
    """Return a hint for a value that is a list or a table but must be a string."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return f'write one string: {key} = "{", ".join(value)}"'
    return "the pages in docs/reference/providers list the settings of each provider"


def _checked(name: str, value: object, where: str) -> Scalar:
    setting = _BY_NAME.get(name)
    if setting is None:
        raise _unknown(name, list(_BY_NAME), where, "setting")
    if type(value) is not type(setting.default):
        expected = "a whole number" if isinstance(setting.default, int) else "a string"
        raise SettingsError(
            f"{where}: `{name}` must be {expected}, not {value!r}",
            f"the default is {setting.default!r}",
        )
    if setting.minimum is not None and isinstance(value, int | float) and value < setting.minimum:
        raise SettingsError(
            f"{where}: `{name}` must be at least {setting.minimum:g}, not {value!r}"
        )
    assert isinstance(value, str | int | float | bool)
    return value


def _scalar(text: str, name: str | None) -> Scalar:
    """Return the value of an environment variable. The variable's text is parsed as TOML. If the
    setting is a string, or if the text is not valid TOML, the value is the text itself.
    """
    setting = _BY_NAME.get(name) if name else None
    if setting is not None and isinstance(setting.default, str):
        return text
    import tomllib

    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # also for a number with 5,000 digits
        return text
    return value if isinstance(value, str | int | float | bool) else text


def _unknown(name: str, known: list[str], where: str, kind: str) -> SettingsError:
    from difflib import get_close_matches

    # In a known section only its names count, or `server.port` would resemble all of its settings.
    section = name.rpartition(".")[0]
    inside = [each for each in known if section and each.rpartition(".")[0] == section]
    ends = {each.removeprefix(f"{section}."): each for each in inside or known}
    close = get_close_matches(name.removeprefix(f"{section}.") if inside else name, ends, n=1)
    hint = f"did you mean `{ends[close[0]]}`?" if close else f"known: {', '.join(sorted(ends))}"
    return SettingsError(f"{where}: there is no {kind} `{name}`", hint)


def reference() -> str:
    """Return the text of docs/reference/settings.md."""
    lines = [
        "# Settings",
        "",
        "Read this page when you want to change how the server works, or look for what a setting "
        "does.",
        "",
        "Written by `python -m cavvy.settings > docs/reference/settings.md`; do not edit.",
        "",
        "Settings are read from `~/.config/cavvy/settings.toml` (or the file named by "
        "`CAVVY_CONFIG`), then from the",
        "environment, which takes precedence. A key that does not exist is an error. The "
        "embedded server reads the settings when it starts:",
        "`cavvy server restart` applies a change, while running jobs continue.",
        "",
        "State (database, logs, socket) is kept in `~/.cavvy`, or in the folder named by "
        "`CAVVY_HOME`.",
        "",
        "```toml",
        "[server]",
        "idle_stop_s = 3600",
        "",
        "[providers.local]",
        "price_usd_hr = 3.60",
        "```",
        "",
        "`[providers.<name>]` contains the settings of one provider; the provider's page lists "
        "these settings. As variables, they are",
        "`CAVVY_PROVIDERS_<NAME>_<KEY>`.",
        "",
    ]
    for setting in SETTINGS:
        lines += [
            f"## {setting.name}",
            "",
            setting.text,
            "",
            f"- default: `{setting.default!r}`" if setting.default != "" else "- default: none",
            f"- variable: `{setting.variable}`",
            f"- consequence: {setting.consequence}",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
