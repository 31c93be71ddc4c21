"""Creates the providers that the settings enable. No module outside of this registry names a
provider.

A provider is a module or package that defines `MANIFEST: Manifest`; `installed` finds it. The
manifest names what makes the provider (`Manifest.cloud`), or the package defines `make(context:
ProviderContext) -> Provider`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import (
    Manifest,
    Provider,
    ProviderContext,
    ProviderError,
    ProviderSetting,
    SettingKind,
)
from cavvy.providers.installed import KnownProvider as KnownProvider
from cavvy.providers.installed import NotInstalled, list_enabled, suggest
from cavvy.providers.installed import list_known as list_known
from cavvy.providers.state import MemoryProviderState, ProviderState

Tables = Mapping[str, Mapping[str, Scalar]]  # the tables [providers.<name>] of the settings file

ENABLED = ProviderSetting(
    name="enabled",
    kind=SettingKind.FLAG,
    default=True,
    consequence="If `false`, the provider is disabled: its offers are not used, and its gangs are "
    "not managed.",
)


class BadSettings(ProviderError):
    """Raised if a settings table is for a provider that is not installed, or has an unknown key or
    an invalid value. The message names the invalid table, key or value, and suggests a valid one.
    """


def manifests() -> Sequence[Manifest]:
    """Return the manifests of all installed providers, sorted by name. The call imports the modules
    of all providers. Packages that are no working providers are omitted, as users may have no use
    for them; `cavvy check` shows what is wrong with them.
    """
    found = []
    for _, known in sorted(list_known().items()):
        with suppress(BadSettings):
            found.append(manifest_of(known))
    return found


def enabled(tables: Tables) -> Sequence[KnownProvider]:
    """Return the providers that the settings enable. Imports no provider. Raises BadSettings if the
    provider of a table is not installed.
    """
    try:
        return list_enabled(tables)
    except NotInstalled as error:
        raise BadSettings(str(error)) from error


def load(
    tables: Tables,
    context: ProviderContext,
    state: Callable[[str], ProviderState] | None = None,
) -> dict[str, Provider]:
    """Import and create the enabled providers. See `make` for `context` and `state`.

    Raises BadSettings, and Refused if a provider cannot be created with its settings.
    """
    return {
        known.name: make(known, tables.get(known.name, {}), context, state)
        for known in enabled(tables)
    }


def make(
    known: KnownProvider,
    table: Mapping[str, Scalar],
    context: ProviderContext,
    state: Callable[[str], ProviderState] | None = None,
    account: str = "",
) -> Provider:
    """Create one provider with its settings table. Raises BadSettings, and the provider's own
    errors.

    `context.home` is the folder of all providers; each provider gets a subfolder. `state` returns
    the document store of the named provider; if `state` is None, documents exist only in memory.
    A second instance of a provider, for another account, has the name `account`: its subfolder has
    this name, and `state` is called with this name.
    """
    settings = check_settings(manifest_of(known), table)
    folder = context.home / (account or known.name)
    # create the state folder too, because it may not exist yet
    for each in (context.home.parent, context.home, folder):
        try:
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadSettings(
                f"the folder {each} cannot be created ({error.strerror}); set CAVVY_HOME to a "
                "folder that you can write to"
            ) from error
    documents = MemoryProviderState() if state is None else state(account or known.name)
    context = replace(context, home=folder, settings=settings, state=documents)
    package = _module(known)
    if known.module.startswith(f"{__package__}."):
        return make_from(package, context)
    with _blaming(known.name, "created"):
        provider = make_from(package, context)
        if provider is None:
            raise TypeError("make(context) returned None instead of a provider")
    return provider


def make_from(package: object, context: ProviderContext) -> Provider:
    """Create the provider of an imported package. `context.settings` must already contain the
    defaults. Raises BadSettings, and the provider's own errors.
    """
    if make_provider := getattr(package, "make", None):
        provider: Provider = make_provider(context)
        return provider
    manifest: Manifest = package.MANIFEST  # type: ignore[attr-defined]  # checked by manifest_of
    cloud = _find(manifest, manifest.cloud)
    provider = (
        _find(manifest, manifest.layer)(manifest, context, cloud)
        if manifest.layer
        else cloud(manifest, context)
    )
    return provider


def _find(manifest: Manifest, path: str) -> Callable[..., Any]:
    """Import what a manifest names as MODULE:NAME."""
    module, _, name = path.partition(":")
    found = getattr(import_part(manifest.name, module), name, None) if module and name else None
    if not callable(found):
        raise BadSettings(
            f"provider {manifest.name!r}: {path!r} in its manifest names no class or function; "
            "expected cloud='MODULE:NAME', or a function make(context) in its package"
        )
    return cast("Callable[..., Any]", found)


def manifest_of(known: KnownProvider) -> Manifest:
    """Import one provider and return its manifest. Raises BadSettings if the module is not a
    provider.
    """
    manifest = getattr(_module(known), "MANIFEST", None)
    if not isinstance(manifest, Manifest) or manifest.name != known.name:
        raise BadSettings(f"{known.module}: expected MANIFEST = Manifest(name={known.name!r}, ...)")
    return manifest


def check_settings(manifest: Manifest, table: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings table, with the defaults filled in. Settings without a value and without
    a default are omitted. Raises BadSettings.
    """
    known = {setting.name: setting for setting in (ENABLED, *manifest.settings)}
    for name in table:
        if name not in known:
            raise BadSettings(
                f"[providers.{manifest.name}] {name}: no such setting.{suggest(name, known)}"
            )
    values = {name: _check(manifest.name, known[name], value) for name, value in table.items()}
    defaults = {s.name: s.default for s in known.values() if s.default is not None}
    return {**defaults, **values}


def _check(provider: str, setting: ProviderSetting, value: Scalar) -> Scalar:
    where = f"[providers.{provider}] {setting.name}"
    number = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # not infinite, and no huge whole number
    )
    match setting.kind:
        case SettingKind.TEXT | SettingKind.KEY_FILE:
            value = (
                str(value) if number else value
            )  # such as `account = 1234`, or a single rate without a name
            good = isinstance(value, str)
        case SettingKind.FLAG:
            good = isinstance(value, bool)
        case SettingKind.INTEGER:
            good = number and isinstance(value, int)
        case SettingKind.NUMBER:
            good = number
    if not good:
        unit = f" ({setting.unit})" if setting.unit else ""
        raise BadSettings(f"{where}: expected {setting.kind}{unit}, not {value!r}")
    if setting.minimum is not None and isinstance(value, (int, float)) and value < setting.minimum:
        raise BadSettings(f"{where}: expected at least {setting.minimum:g}, not {value!r}")
    if setting.maximum is not None and isinstance(value, (int, float)) and value > setting.maximum:
        unit = f" {setting.unit}" if setting.unit else ""
        raise BadSettings(f"{where}: expected at most {setting.maximum:g}{unit}, not {value!r}")
    return value


def _module(known: KnownProvider) -> ModuleType:
    return import_part(known.name, known.module)


def import_part(provider: str, module: str) -> ModuleType:
    """Import a module of a provider. Raises BadSettings."""
    with _blaming(provider, "imported"):
        return import_module(module)


@contextmanager
def _blaming(provider: str, done: str) -> Iterator[None]:
    """Raise BadSettings, which names the provider, for each error in code that others may have
    written.
    """
    try:
        yield
    except ProviderError:
        raise
    except (Exception, SystemExit) as error:
        raise BadSettings(
            f"provider {provider!r} cannot be {done}: {_describe(error)}; repair or remove its "
            f"package, or set enabled = false in [providers.{provider}]"
        ) from error


def _describe(error: BaseException) -> str:
    """Return what failed and in which line of which file."""
    from traceback import extract_tb

    match error:
        case ModuleNotFoundError():
            return str(error)
        case SyntaxError(filename=str(file), lineno=int(line)):
            return f"{error.msg} ({file}, line {line})"
    told = f"{type(error).__name__}: {error}"
    *_, last = extract_tb(error.__traceback__)
    return told if last.filename == __file__ else f"{told} ({last.filename}, line {last.lineno})"
