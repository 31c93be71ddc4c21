"""Tables of facts about providers that their APIs do not report: CSV files in this folder, and the
readers of the small ones.
"""

import csv
import re
from collections.abc import Iterable, Mapping
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
