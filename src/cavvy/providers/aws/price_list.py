"""Fetches EC2's prices with the account's credentials: on-demand and reserved prices from the Price
List API, spot prices from EC2's price history.

AWS also publishes the price list as files. This module does not use the files of the price list,
because a region's file has several hundred MB but only a few thousand useful rows.
"""

import asyncio
from collections.abc import Callable

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct, replace
from cavvy.providers.aws.account import HOME, AwsAccount
from cavvy.providers.aws.prices import fetch_listed, fetch_spot
from cavvy.providers.base import ProviderError, Refused, wall_clock
from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery, PriceSource, ProviderPrices


class AwsPrices(Struct, frozen=True, kw_only=True):
    """Reads the prices of all regions of the account, one region at a time."""

    provider: str = "aws"
    title: str = "AWS Price List API and EC2's spot price history, with your AWS credentials"
    account: Callable[[], AwsAccount] = lambda: AwsAccount({})

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        try:
            prices = asyncio.run(self._read(self.account(), query))
        except Refused as error:
            raise NeedsLogin(str(error)) from error
        except ProviderError as error:
            raise PriceError(f"{error}; nothing was changed") from error
        if not prices.offers:
            raise PriceError("AWS returned no price of a known instance type; nothing was changed")
        return prices

    async def _read(self, account: AwsAccount, query: PriceQuery) -> ProviderPrices:
        offers: list[Offer] = []
        unknown: set[str] = set()
        told = await account.items(HOME, "describe_regions")
        for region in sorted(str(each["RegionName"]) for each in told):
            query.progress(f"{self.title}: {len(offers):,} prices, {region}")
            rates, reserved = await fetch_listed(account, region)
            unknown |= rates.keys() - query.machines.keys()
            for name in sorted(rates.keys() & query.machines.keys()):
                offers.append(
                    _make(query, name, region, rate=rates[name], source="AWS Price List API")
                )
            offers += [
                _make(
                    query,
                    name,
                    region,
                    rate=rate,
                    purchase=Purchase.RESERVED,
                    term_months=months,
                    source="AWS Price List API, standard reservation without upfront payment",
                )
                for (name, months), rate in sorted(reserved.items())
                if name in query.machines
            ]
            offers += await self._read_spot(
                account, query, region, sorted(rates.keys() & query.machines.keys())
            )
        return ProviderPrices(offers=tuple(offers), unknown_types=len(unknown))

    async def _read_spot(
        self, account: AwsAccount, query: PriceQuery, region: str, types: list[str]
    ) -> list[Offer]:
        """Return a region's latest spot prices. Zones are named by their ids, which are the same in
        every account.
        """
        zones = await account.items(region, "describe_availability_zones")
        ids = {str(each["ZoneName"]): str(each["ZoneId"]) for each in zones}
        told = await fetch_spot(account, region, types, wall_clock())
        latest = {(name, zone): rate for name, zone, _, rate in told}
        return [
            _make(
                query,
                name,
                region,
                rate=rate,
                zone=ids[zone],
                purchase=Purchase.SPOT,
                source="EC2 spot price history",
            )
            for (name, zone), rate in sorted(latest.items())
            if zone in ids
        ]


def _make(query: PriceQuery, name: str, region: str, **fields: object) -> Offer:
    blank = replace(query.machines[name], zone=None, purchase=Purchase.ON_DEMAND, capacity=None)
    blank = replace(blank, region=region, as_of=query.today, term_months=0)
    return replace(blank, **fields)  # type: ignore[arg-type]  # fields of Offer


SOURCE: PriceSource = AwsPrices()
