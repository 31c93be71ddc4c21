"""Price lists that `cavvy catalog refresh` reads, either public or with the user's credentials.

A source is a module that defines `SOURCE: PriceSource`: a provider names its own in
`Manifest.prices`; the modules of this package are sources for clouds that are not providers yet.

* PriceError       the prices cannot be read now; the message gives the reason and the remedy
  + NeedsLogin     the available credentials do not suffice; a refresh of all providers skips it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Protocol

from cavvy.domain.offers import Offer


class PriceError(Exception):
    """The prices cannot be read now; the message gives the reason and the remedy."""


class NeedsLogin(PriceError):
    """The available credentials are insufficient; a refresh of all providers skips this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """The inputs of a source. Price lists name instance types; `machines` describes these."""

    machines: Mapping[str, Offer]  # by instance type: vCPUs, memory, accelerators
    today: date
    progress: Callable[[str], None]  # reports the source's progress
    pause: Callable[[float], None]  # waits this many seconds between tries


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPrices:
    """Every price of one provider."""

    offers: Sequence[Offer]
    terms: Mapping[str, int] = field(
        default_factory=dict
    )  # months of commitment of reserved offers, by offer key
    unknown_types: int = 0  # instance types with a price that `machines` does not describe


class PriceSource(Protocol):
    """One provider's public price list."""

    @property
    def provider(self) -> str: ...
    @property
    def title(self) -> str:
        """For people: the owner of the list, and how it is read."""

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        """Read the whole list. Raises PriceError; an incomplete list is an error, never a short
        result.
        """


def list_sources() -> Mapping[str, PriceSource]:
    """Every source, by provider. Imports every provider's manifest."""
    from cavvy.providers.registry import manifests

    modules = [f"{__name__}.{path.stem}" for path in sorted(Path(__file__).parent.glob("[!_]*.py"))]
    modules += [manifest.prices for manifest in manifests() if manifest.prices]
    found = [import_module(module) for module in modules]
    sources: list[PriceSource] = [module.SOURCE for module in found if hasattr(module, "SOURCE")]
    return {source.provider: source for source in sources}


def list_unavailable() -> Mapping[str, str]:
    """Providers whose prices `refresh` cannot read, with the reasons."""
    from cavvy.providers.prices.unavailable import REASONS

    return REASONS
