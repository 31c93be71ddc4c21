"""Finds the installed providers without importing them, so that a command which needs none starts
quickly. `registry` makes providers.

Cavvy finds providers in the package `cavvy.providers` and in the entry points of the group
`cavvy.providers`. A provider's name is the name of its package, without the suffix `_cloud` and
with each "_" replaced by "-". A table `[providers.<name>]` enables a provider. A package that
contains a file `on-by-default` needs no table; the file `on-by-default` has no effect in packages
of other distributions, so that installing a package never spends money. `enabled = false` in a
provider's table disables the provider.
"""

import os
from collections.abc import Collection, Mapping, Sequence

from cavvy.domain.offers import Offer, Readiness
from cavvy.domain.values import Struct
from cavvy.frame.entry_points import list_declared

_GROUP = "cavvy.providers"
_MARK = "on-by-default"
# a package's suffix that is not part of the provider's name, because `lambda` cannot be imported
_SUFFIX = "_cloud"
_NOT_PROVIDERS = frozenset(
    {
        "abilities",
        "base",
        "batch",
        "contract",
        "formats",
        "hosts",
        "installed",
        "ledger",
        "managed",
        "notices",
        "objections",
        "page_links",
        "price_pages",
        "prices",
        "project_caches",
        "recording",
        "registry",
        "required_images",
        "servers",
        "settings",
        "state",
        "vm",
    }
)


class NotInstalled(LookupError):
    """Raised if a settings table is for a provider that is not installed. The message names the
    table and suggests a provider.
    """


class KnownProvider(Struct, frozen=True, kw_only=True):
    """An installed provider, and the path of its module. The module is not imported yet."""

    name: str
    module: str
    by_default: bool = False


def list_known() -> Mapping[str, KnownProvider]:
    """Return every installed provider, by name. The call blocks while entry points are read."""
    found = list_own()
    for name, module in list_declared(_GROUP):
        found.setdefault(name, KnownProvider(name=name, module=module))
    return found


def list_enabled(tables: Mapping[str, Mapping[str, object]]) -> Sequence[KnownProvider]:
    """Return the providers that the settings enable. Imports no provider. Raises NotInstalled."""
    found = list_own()
    if any(name not in found for name in tables):
        found = dict(list_known())
    for name in tables:
        if name not in found:
            raise NotInstalled(f"[providers.{name}]: no such provider.{suggest(name, found)}")
    on = [known for name, known in sorted(found.items()) if name in tables or known.by_default]
    return [known for known in on if tables.get(known.name, {}).get("enabled", True) is not False]


def judge_readiness(
    offer: Offer,
    usable: Collection[tuple[str, str]],
    installed: Collection[str],
    failing: Collection[str] = (),
) -> Readiness:
    """Return whether a job can run on the offer. `usable` contains the (provider, region) pairs
    that can run jobs now. `installed` contains the names of the installed providers. `failing`
    contains the providers, and the keys of offers, that are configured but cannot be used.
    """
    if offer.provider in failing or offer.key in failing:
        return Readiness.FAILS
    if (offer.provider, offer.region) in usable:
        return Readiness.READY
    return Readiness.CONFIGURABLE if offer.provider in installed else Readiness.PRICE_ONLY


def suggest(name: str, known: Mapping[str, object]) -> str:
    """Return the known name that is most like the name, or all known names, as a sentence."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def list_own() -> dict[str, KnownProvider]:
    found = {}
    for entry in os.scandir(os.path.dirname(__file__)):
        stem, suffix = os.path.splitext(entry.name)
        name = stem.removesuffix(_SUFFIX)
        if name.startswith("_") or name in _NOT_PROVIDERS:
            continue
        name, module = name.replace("_", "-"), f"cavvy.providers.{stem}"
        if suffix == ".py":
            found[name] = KnownProvider(name=name, module=module)
        elif os.path.exists(os.path.join(entry.path, "__init__.py")):
            marked = os.path.exists(os.path.join(entry.path, _MARK))
            found[name] = KnownProvider(name=name, module=module, by_default=marked)
    return found
