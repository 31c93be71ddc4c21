"""Price lists that `cavvy catalog refresh` reads. Some price lists are public; others need the
user's credentials.

A source is a module that defines `SOURCE: PriceSource`. A provider names its source in
`Manifest.prices`.

* PriceError       the prices cannot be read now; the message gives the reason and the remedy
  + NeedsLogin     the available credentials are insufficient; a refresh of all providers skips this
  source

`read_page` reads the pages of price lists, which are JSON objects.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from types import MappingProxyType, ModuleType
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, NoReply, ReplyTooLong

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

_UNCHANGED = "nothing was changed"


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


class PageRefused(PriceError):
    """Raised for a status that another attempt would not change."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read_page(
    client: HttpClient,
    url: str,
    pause: Callable[[float], None],
    *,
    tries: int,
    name: str,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Mapping[str, object]:
    """Return a page of the price list `name`; request the page again after a temporary fault.
    Raises PriceError.
    """
    fault = ""
    for attempt in range(tries):
        if attempt:
            pause(min(2.0**attempt, 30))
        try:
            reply = client.send("GET", url, None, {"Accept": "application/json", **headers})
            told = reply.parse_json() if reply.status == 200 else None
        except ReplyTooLong as error:
            raise PriceError(f"a page of {name} is too large: {error}; {_UNCHANGED}") from error
        except NoReply as error:
            fault = str(error)
            continue
        if isinstance(told, dict):
            return told
        fault = f"HTTP {reply.status}" if told is None else "the response is not a JSON object"
        if told is None and not reply.is_passing:
            raise PageRefused(f"{name} cannot be read: {fault}; {_UNCHANGED}", reply.status)
    raise PriceError(f"{name} cannot be read: {fault}; {_UNCHANGED}; try again later")
