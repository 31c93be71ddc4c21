"""The bill of a gang on Google contains its disks and addresses at the list's prices, and its
machines at Google's live price.
"""

import asyncio
from calendar import monthrange
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.bills import bill_each_node, run_for_an_hour
from tests.contract.gcp_stand_in import A2_PRICES
from tests.providers.gcp.contract.test_provider_gcp import GcpPlace

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.contract.rest_stand_in import RestServer

HOUR = timedelta(hours=1)
ADDRESS = {Purchase.ON_DEMAND: 5_000, Purchase.SPOT: 2_500}


@pytest.fixture
def account(rest_server: RestServer, tmp_path: Path) -> Iterator[GcpPlace]:
    with closing(GcpPlace(rest_server, tmp_path)) as account:
        yield account


async def find(
    account: GcpPlace, kind: str, purchase: Purchase, region: str = "us-central1", **table: bool
) -> Offer:
    offers = await account.provider("ours", **table).offers()
    return next(
        each
        for each in offers
        if (each.instance_type, each.purchase, each.region) == (kind, purchase, region)
    )


@pytest.mark.parametrize("purchase", [Purchase.ON_DEMAND, Purchase.SPOT])
@pytest.mark.parametrize(
    ("gib", "kind", "micros"),
    [
        (None, None, 100 * 100_000),  # the settings' 100 GiB of pd-balanced
        (200, None, 200 * 100_000),
        (60, "pd-ssd", 60 * 170_000),
        (200, "pd-extreme", 0),  # no price is known
    ],
)
async def test_disks_and_addresses_are_billed(
    account: GcpPlace, purchase: Purchase, gib: int | None, kind: str | None, micros: int
) -> None:
    harness = account.harness()
    offer = await find(account, "g2-standard-4", purchase)
    gang = await harness.spec("one", nodes=2)
    gang = replace(gang, offer=offer, disk_gib=gib, disk_type=kind)
    await run_for_an_hour(account, harness, gang)
    for node, length, found in await bill_each_node(account, harness, gang):
        assert node.started_at is not None
        month = timedelta(days=monthrange(node.started_at.year, node.started_at.month)[1])
        exact = ADDRESS[purchase] * (length / HOUR)
        assert abs(found[ChargeKind.ADDRESS].amount.micros - exact) <= 1
        assert (ChargeKind.DISK in found) == bool(micros)
        if micros:
            assert abs(found[ChargeKind.DISK].amount.micros - micros * (length / month)) <= 1


def test_a_machine_that_accepts_hyperdisk_only_pays_for_one(account: GcpPlace) -> None:
    async def read() -> dict[str, int]:
        offers = await account.provider("ours").offers()
        kinds = {"tpu-v6e-8": "hyperdisk-balanced", "e2-standard-4": "pd-balanced"}
        for each in offers:
            disks = {extra.name: extra.usual for extra in each.extras if extra.name}
            if each.region == "us-central1" and each.instance_type in kinds:
                assert {name for name, gib in disks.items() if gib} == {kinds[each.instance_type]}
            assert all(extra.source and extra.as_of for extra in each.extras)
        return {each.region: len(each.extras) for each in offers}

    # the list prices disks in one region only, and addresses in all
    assert asyncio.run(read()) == {"us-central1": 4, "europe-west4": 1}


def test_nodes_without_external_addresses_pay_for_none(account: GcpPlace) -> None:
    offer = asyncio.run(find(account, "g2-standard-4", Purchase.ON_DEMAND, external_address=False))
    assert {each.kind for each in offer.extras} == {ChargeKind.DISK}


def test_offers_have_google_s_live_prices_where_the_list_has_them(account: GcpPlace) -> None:
    account.api.prices += A2_PRICES
    live = asyncio.run(find(account, "a2-highgpu-1g", Purchase.ON_DEMAND))
    # 12 vCPUs, 85 GiB and one GPU at the prices of the stand-in, which differ from the catalog's
    assert live.rate.micros_per_hour == 12 * 31_611 + 85 * 4_237 + 999_000
    assert live.source == "Google's Cloud Billing Catalog API"
    listed = asyncio.run(find(account, "g2-standard-4", Purchase.ON_DEMAND))
    assert "karpenter" in listed.source


async def test_a_list_of_prices_that_may_not_be_read_stops_no_job(account: GcpPlace) -> None:
    account.api.hides_prices = True
    provider = account.provider("ours")
    offers = await provider.offers()
    assert offers
    assert not any(each.extras for each in offers)
    told = dict(await provider.whoami())["prices"]
    assert told.startswith("Cavvy uses the catalog's prices")
    assert "cloudbilling.googleapis.com" in told


@pytest.mark.parametrize("units", ["x", "-1", "NaN", "1e30", 7])
def test_a_wrong_price_in_the_list_stops_no_job(account: GcpPlace, units: object) -> None:
    """Then the catalog's prices are used."""
    wrong = deepcopy(A2_PRICES)
    tiers = wrong[0]["pricingInfo"][0]["pricingExpression"]["tieredRates"]
    tiers[-1]["unitPrice"] = {"units": units, "nanos": 0} if units != 7 else units
    account.api.prices += wrong

    async def scenario() -> str:
        provider = account.provider("ours")
        offers = await provider.offers()
        assert {each.instance_type for each in offers} >= {"a2-highgpu-1g", "g2-standard-4"}
        assert not any(each.extras for each in offers)
        return dict(await provider.whoami())["prices"]

    assert asyncio.run(scenario()).startswith("Cavvy uses the catalog's prices")


def test_a_disk_with_a_price_per_hour_costs_as_much_as_with_one_per_month(
    account: GcpPlace,
) -> None:
    expression = account.api.prices[0]["pricingInfo"][0]["pricingExpression"]
    assert (account.api.prices[0]["description"], expression["usageUnit"]) == (
        "Balanced PD Capacity",
        "GiBy.mo",
    )
    hourly = deepcopy(account.api.prices[0])
    expression = hourly["pricingInfo"][0]["pricingExpression"]
    expression["usageUnit"] = "GiBy.h"
    expression["tieredRates"][-1]["unitPrice"]["nanos"] = 1_000_000
    account.api.prices[0] = hourly
    offer = asyncio.run(find(account, "g2-standard-4", Purchase.ON_DEMAND))
    (disk,) = [each for each in offer.extras if each.name == "pd-balanced"]
    assert disk.price.micros == 730 * 1_000
