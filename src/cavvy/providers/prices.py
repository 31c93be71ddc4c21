"""Price lists that `cavvy catalog refresh` reads. Some price lists are public; others need the
user's credentials.

A source is a module that defines `SOURCE: PriceSource`. A provider names its source in
`Manifest.prices`.

* PriceError       the prices cannot be read now; the message gives the reason and the remedy
  + NeedsLogin     the available credentials are insufficient; a refresh of all providers skips this
  source
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from types import ModuleType
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct

_NO_READER = "Cavvy cannot read the provider's price list yet"
# why Cavvy does not read the price lists of some providers yet
_UNREAD: Mapping[str, str] = {
    "oci": _NO_READER,
    "lambda": "the provider's price API needs an API key",
    "runpod": _NO_READER,
    "tpu": "Cavvy cannot read the prices of TPUs in Google's price list",
    "vast": _NO_READER,
    "nebius": "the provider's price API needs credentials",
    "verda": "the provider's price API needs credentials",
    "primeintellect": _NO_READER,
    "shadeform": _NO_READER,
    "coreweave": "the provider publishes prices on a web page, not through an API",
    "cudo": _NO_READER,
    "do": "the provider's price API needs a token",
    "fluidstack": _NO_READER,
    "hyperbolic": _NO_READER,
    "ibm": _NO_READER,
    "paperspace": _NO_READER,
    "seeweb": _NO_READER,
}


class PriceError(Exception):
    """Raised if the prices cannot be read now. The message gives the reason and the remedy."""


class NeedsLogin(PriceError):
    """Raised if the available credentials are insufficient. A refresh of all providers skips this
    source."""


class PriceQuery(Struct, frozen=True, kw_only=True):
    """The data and functions that a price source uses. A price list contains names of instance
    types; `machines` contains the vCPUs, memory and accelerators of each type.
    """

    machines: Mapping[str, Offer]  # keyed by instance type: vCPUs, memory and accelerators
    # whether lists of several GB may be read, because the user named the provider
    large: bool = False
    today: date
    progress: Callable[[str], None]  # called to report the source's progress
    pause: Callable[[float], None]  # called to wait this many seconds between attempts


class ProviderPrices(Struct, frozen=True, kw_only=True):
    """The prices of one provider: all prices, or only some (`complete` is False)."""

    offers: Sequence[Offer]
    complete: bool = True  # if not, the old offers with other keys stay
    unknown_types: int = 0  # instance types that have a price but are not in `machines`


class PriceSource(Protocol):
    """A provider's price list."""

    @property
    def provider(self) -> str: ...
    @property
    def title(self) -> str:
        """A text for users: the name of the price list, and how Cavvy reads the list."""

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        """Read the whole list. Raises PriceError if any part of the list cannot be read, so a
        returned result contains every price of the list.
        """


def list_sources() -> Mapping[str, PriceSource]:
    """Return all price sources, by provider. The call imports the manifests of all providers."""
    found = _import_sources()[0]
    sources: list[PriceSource] = [module.SOURCE for module in found if hasattr(module, "SOURCE")]
    return {source.provider: source for source in sources}


def list_unavailable() -> Mapping[str, str]:
    """Return the providers whose prices `refresh` cannot read, with the reasons."""
    return {**_UNREAD, **_import_sources()[1]}


def _import_sources() -> tuple[Sequence[ModuleType], Mapping[str, str]]:
    """Import the price sources that manifests name. Also return why some cannot be imported."""
    from cavvy.providers.registry import BadSettings, import_part, manifests

    found, problems = [], dict[str, str]()
    for manifest in manifests():
        if manifest.prices:
            try:
                found.append(import_part(manifest.name, manifest.prices))
            except BadSettings as error:
                problems[manifest.name] = str(error)
    return found, problems
