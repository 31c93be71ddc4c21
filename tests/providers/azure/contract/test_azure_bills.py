"""The bill of a gang on Azure contains its disks and public addresses at the list's prices."""

import asyncio
from calendar import monthrange
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.azure_stand_in import EXTRAS, AzureStandIn
from tests.contract.bills import bill_each_node, run_for_an_hour
from tests.providers.azure.contract.test_provider_azure import CPU, AzurePlace, find_offer

from cavvy.domain.events import ChargeKind
from cavvy.domain.units import parse_usd
from cavvy.domain.values import replace
from cavvy.providers import azure
from cavvy.providers.azure.cloud import AzureCloud
from cavvy.providers.base import TryAgain
from cavvy.providers.contract.rest_stand_in import RestServer

PRICES = {meter: parse_usd(usd).micros for meter, _, usd in EXTRAS}


@pytest.fixture
def account(rest_server: RestServer, tmp_path: Path) -> Iterator[AzurePlace]:
    with closing(
        AzurePlace(azure, AzureCloud.traits, AzureStandIn, rest_server, tmp_path)
    ) as account:
        yield account


@pytest.mark.parametrize(
    ("gib", "kind", "meter"),
    [
        (None, None, "E10 LRS Disk"),
        (64, None, "E10 LRS Disk"),  # Cavvy makes no disk smaller than the setting's 128 GiB
        (200, None, "E15 LRS Disk"),
        (256, "Premium_LRS", "P15 LRS Disk"),
        (200, "UltraSSD_LRS", ""),  # no price is known
    ],
)
async def test_a_disk_is_billed_at_the_size_that_azure_sells(
    account: AzurePlace, gib: int | None, kind: str | None, meter: str
) -> None:
    harness = account.harness()
    offer = await find_offer(harness, CPU)
    gang = await harness.spec("one", nodes=2)
    gang = replace(gang, offer=offer, disk_gib=gib, disk_type=kind)
    await run_for_an_hour(account, harness, gang)
    for body in account.api.bodies.values():
        disk = body["properties"]["storageProfile"]["osDisk"]
        assert disk["diskSizeGB"] == max(gib or 0, 128)
    for node, length, found in await bill_each_node(account, harness, gang):
        assert node.started_at is not None
        month = timedelta(days=monthrange(node.started_at.year, node.started_at.month)[1])
        exact = PRICES["Standard IPv4 Static Public IP"] * (length / timedelta(hours=1))
        assert abs(found[ChargeKind.ADDRESS].amount.micros - exact) <= 1
        assert (ChargeKind.DISK in found) == bool(meter)
        if meter:
            exact = PRICES[meter] * (length / month)
            assert abs(found[ChargeKind.DISK].amount.micros - exact) <= 1


def test_nodes_without_public_addresses_pay_for_none(account: AzurePlace) -> None:
    async def read() -> dict[ChargeKind, int]:
        offers = await account.provider("ours", public_ip=False).offers()
        assert all(each.source and each.as_of for offer in offers for each in offer.extras)
        return {each.kind: each.usual for each in offers[0].extras if each.usual}

    assert asyncio.run(read()) == {ChargeKind.DISK: 128}


async def test_prices_of_disks_that_cannot_be_read_hide_no_problem(account: AzurePlace) -> None:
    provider = account.provider("ours")
    account.api.extras_fault = True
    with pytest.raises(TryAgain):
        await provider.offers()
    account.api.extras_fault = False
    assert all(offer.extras for offer in await provider.offers())
