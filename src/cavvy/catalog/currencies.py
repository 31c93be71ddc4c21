"""Exchange rates, for providers whose prices are not in US dollars.

The rates are the euro reference rates of the European Central Bank on the day in the column
`as_of`: https://www.ecb.europa.eu/stats/policy_and_exchange_rates/euro_reference_exchange_rates/.
They go stale, so each such provider has a setting for its rate (`providers.settings`).
"""

from datetime import date
from decimal import Decimal
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct

SOURCE = "European Central Bank"


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
