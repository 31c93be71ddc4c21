"""Where the catalog's prices can be had from: one module per provider, by its public list or the
user's credentials.

A module of this package that defines `SOURCE: PriceSource` is found by folder scan; no shared file
names it.

* PriceError     the prices cannot be had now; the message says why and what to do + NeedsLogin
  not with the credentials that are at hand; a refresh of everything goes on without them
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Protocol

from cavvy.domain.offers import Offer


class PriceError(Exception):
    """The prices cannot be had now; the message says why and what to do."""


class NeedsLogin(PriceError):
    """Not with the credentials that are at hand; a refresh of everything goes on without this
    provider.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """What a source is given. Price lists name instance types; what those are made of, the
    caller knows already.
    """

    machines: Mapping[str, Offer]  # by instance type: vCPUs, memory, accelerators
    today: date
    progress: Callable[[str], None]  # is told now and then how far it is
    pause: Callable[[float], None]  # waits so many seconds between tries


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
        """For people: whose list, and how it is read."""

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        """Read the whole list. Raises PriceError; a list that breaks off is an error, never a
        short answer.
        """


def list_sources() -> Mapping[str, PriceSource]:
    """Every source, by provider."""
    modules = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")
    )
    found = [import_module(f"{__name__}.{name}") for name in modules]
    sources: list[PriceSource] = [module.SOURCE for module in found if hasattr(module, "SOURCE")]
    return {source.provider: source for source in sources}


def list_unavailable() -> Mapping[str, str]:
    """Providers whose prices `refresh` cannot read, and why."""
    from cavvy.providers.prices.unavailable import REASONS

    return REASONS
