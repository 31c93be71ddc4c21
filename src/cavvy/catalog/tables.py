"""Tables of facts that providers' APIs do not report: CSV files in this folder, and the readers of
the small ones, such as what public APIs ask for the tokens of models that one can also serve
oneself.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from pkgutil import get_data

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct

_SAME = {"aarch64": "arm64", "amd64": "x86_64"}
# Grace Hopper and Grace Blackwell combine the GPU with an Arm CPU, according to NVIDIA's data
# sheets.
_GRACE = ("GH200", "GB200", "GB300")

# The prices without discounts, as `scripts/catalog/token_prices.py` found them. They go stale.
TOKEN_PRICE_SOURCE = "genai-prices 0.2.3, 2026-11"
# what names of files, repositories and offers add to the name of a model: its format, or how an API
# serves it
_LONGEST = 500  # characters of a name that are compared
_ADDED = re.compile(
    r"(?:bf16|fp16|fp8|fp4|nvfp4|mxfp4|int8|int4|awq|gptq|gguf|w4a16|w8a8|w8a16|bnb4bit|4bit|8bit|"
    r"q[2-8](?:km|ks|0|1)|dynamic|quantized|turbo|fast|lite|hf)$"
)


def find_architecture(offer: Offer) -> str:
    """Return the architecture of the offer's CPUs, such as x86_64 or arm64."""
    if offer.architecture:
        return _SAME.get(offer.architecture.lower(), offer.architecture)
    return (
        "arm64"
        if offer.accelerator in _GRACE
        else _architecture_of(offer.provider, offer.instance_type)
    )


# The patterns for instance types are needed because price lists do not state the architecture. A
# type that no pattern matches has x86_64 CPUs, unless its accelerators contain an Arm CPU.
@cache
def _architecture_of(provider: str, instance_type: str) -> str:
    for row in read_table(__package__, "architectures"):
        if row["provider"] == provider and re.fullmatch(row["pattern"], instance_type):
            return row["architecture"]
    return "x86_64"


# The rates are the euro reference rates of the European Central Bank on the day in the column
# `as_of`: https://www.ecb.europa.eu/stats/policy_and_exchange_rates/euro_reference_exchange_rates/.
# They go stale, so each provider whose prices are not in US dollars has a setting for its rate
# (`providers.settings`).
CURRENCY_SOURCE = "European Central Bank"


class ExchangeRate(Struct, frozen=True, kw_only=True):
    """The price of one unit of `currency` (an ISO 4217 code) in US dollars on the day `as_of`."""

    currency: str
    usd: Decimal
    as_of: date


@cache
def _rates() -> dict[str, ExchangeRate]:
    rows = {row["currency"]: row for row in read_table(__package__, "currencies")}
    per_euro = Decimal(rows["USD"]["per_euro"])
    return {
        currency: ExchangeRate(
            currency=currency,
            usd=round(per_euro / Decimal(row["per_euro"]), 6),
            as_of=date.fromisoformat(row["as_of"]),
        )
        for currency, row in rows.items()
    }


def find_rate(currency: str) -> ExchangeRate:
    """Return the exchange rate of a currency. Raises LookupError, which names the known
    currencies."""
    found = _rates().get(currency.upper())
    if found is None:
        known = ", ".join(sorted(_rates()))
        raise LookupError(f"no exchange rate is known for {currency!r}; known are {known}")
    return found


# AWS: "a warning that is issued two minutes before Amazon EC2 stops or terminates your Spot
# Instance", docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.
# Google Cloud: a shutdown period of up to 30 seconds, cloud.google.com/compute/docs/instances/spot.
# Azure: a `Preempt` event at least 30 seconds before,
# learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. No other provider is known to
# promise a notice.
SPOT_NOTICES = {  # the notice before a spot node is reclaimed
    "aws": timedelta(minutes=2),
    "azure": timedelta(seconds=30),
    "gcp": timedelta(seconds=30),
}


# The rows of `retired.csv` come from announcements of the providers. A replacement has the same
# kind of accelerator or a newer kind.
class RetiredType(Struct, frozen=True, kw_only=True):
    """A withdrawn instance type. `since` is the last day on which the type could be used, or None
    if unknown.
    """

    instance_type: str
    provider: str
    successor: str
    since: date | None = None


def find_retired(instance_type: str) -> RetiredType | None:
    """Return the entry of a withdrawn type, ignoring case, or None for any other type."""
    return _retired().get(instance_type.strip().lower())


def successor(instance_type: str) -> str | None:
    """Return the replacement of a withdrawn type, or None for any other type."""
    retired = find_retired(instance_type)
    return retired.successor if retired else None


@cache
def _retired() -> dict[str, RetiredType]:
    return {
        row["instance_type"].lower(): RetiredType(
            instance_type=row["instance_type"],
            provider=row["provider"],
            successor=row["successor"],
            since=date.fromisoformat(row["since"]) if row["since"] else None,
        )
        for row in read_table(__package__, "retired")
    }


@cache
def list_unlisted_reasons() -> Mapping[tuple[str, Purchase], str]:
    """Return the reasons why prices are missing, by provider and purchase option. A reason applies
    to accelerator instance types without a price for the purchase option in the current catalog.
    """
    return {
        (row["provider"], Purchase(row["purchase"])): row["reason"]
        for row in read_table(__package__, "unlisted")
    }


def read_table(package: str, name: str) -> Iterable[Mapping[str, str]]:
    """Return the rows of `NAME.csv` in the package's folder, as mappings from column name to
    value."""
    data = get_data(package, f"{name}.csv")
    assert data is not None
    return csv.DictReader(data.decode().splitlines())


class ApiPrice(Struct, frozen=True, kw_only=True):
    """Micro-dollars for a million tokens of prompts, of prompts that were cached, and of
    completions."""

    api: str
    prompt: int
    cached: int
    completion: int

    def price(self, prompt: int, cached: int, completion: int) -> int:
        """Return the price of these tokens in millionths of micro-dollars, which needs no rounding.
        `cached` is a part of `prompt`."""
        whole = (prompt - cached) * self.prompt + cached * self.cached
        return whole + completion * self.completion


def find_name(model: str) -> str:
    """Return the name by which prices of a model are stored, such as `llama318binstruct` for
    `hf://meta-llama/Meta-Llama-3.1-8B-Instruct-FP8@main`: without organization, revision, format
    and punctuation.
    """
    name = model[-_LONGEST:].lower().rsplit("/", 1)[-1]
    name = re.sub(r"[^a-z0-9]", "", re.split("[:@]", name)[0].removesuffix(".gguf"))
    if name.startswith("metallama"):
        name = name.removeprefix("meta")
    while (shorter := _ADDED.sub("", name)) and shorter != name:
        name = shorter
    return name


def list_api_prices(model: str) -> Sequence[ApiPrice]:
    """Return the prices of all known APIs for a model; none for an unknown model."""
    return _read_prices().get(find_name(model), ())


@cache
def _read_prices() -> dict[str, tuple[ApiPrice, ...]]:
    found: dict[str, tuple[ApiPrice, ...]] = {}
    for row in read_table(__package__, "token_prices"):
        numbers = {
            name: int(Decimal(row[name]) * 1_000_000) for name in ("prompt", "cached", "completion")
        }
        price = ApiPrice(api=row["api"], **numbers)
        found[row["model"]] = (*found.get(row["model"], ()), price)
    return found
