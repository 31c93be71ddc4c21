"""The DigitalOcean provider keeps the contract, on a stand-in that checks every request against
DigitalOcean's published description.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.digitalocean_stand_in import DigitalOceanStandIn
from tests.contract.test_provider_aws import make_node_endpoint
from tests.contract.test_provider_vm import VmContract
from tests.contract.vm_cloud import MemoryPlace
from tests.proofs import Proof

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import NoCapacity, ProviderContext, QuotaTooSmall, Refused
from cavvy.providers.contract import ContractHarness, ProviderUnderTest
from cavvy.providers.digitalocean.cloud import DigitalOceanCloud
from cavvy.providers.digitalocean.manifest import MANIFEST
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import CloudFault, read_fault
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("digitalocean", False, "a strict stand-in for DigitalOcean's API")
TRAITS = replace(DigitalOceanCloud.traits, list_lag=timedelta(seconds=20))


class DigitalOceanPlace(MemoryPlace):
    """One account."""

    def __init__(self, home: Path) -> None:
        super().__init__(TRAITS, home)
        self.api = DigitalOceanStandIn(self.cloud)
        self.file = home / "config.yaml"
        self.file.write_text(f"context: default\naccess-token: {self.api.key}\n")
        self.providers: list[VmProvider] = []

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        table = {"endpoint": self.api.url, "key_file": str(self.file), **table}
        settings = check_settings(MANIFEST, table)
        context = ProviderContext(
            installation=installation,
            home=self.home,
            settings=settings,
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            now=self.cloud.now,
        )
        cloud = DigitalOceanCloud(settings, self.cloud.now)
        self.providers.append(
            VmProvider(MANIFEST, context, cloud, identity=cloud.identity, close=cloud.close)
        )
        return self.providers[-1]


@pytest.fixture
def account(tmp_path: Path) -> Iterator[DigitalOceanPlace]:
    account = DigitalOceanPlace(tmp_path)
    yield account
    account.api.close()
    for each in account.providers:
        asyncio.run(each.close())
    assert account.cloud.billed() == []


class TestDigitalOcean(VmContract):
    @pytest.fixture
    def place(self, account: DigitalOceanPlace) -> ProviderUnderTest:
        return account


def test_offers_have_live_prices_and_unknown_gpus_are_reported(account: DigitalOceanPlace) -> None:
    provider = account.provider("ours", regions="tor1")
    offers = {offer.instance_type: offer for offer in asyncio.run(provider.offers())}
    assert {offer.region for offer in offers.values()} == {"tor1"}
    found = {
        name: (offer.accelerator, offer.accelerator_count, offer.accelerator_memory_mib // 1024)
        for name, offer in offers.items()
    }
    assert found == {
        "s-4vcpu-8gb": (None, 0, 0),
        "gpu-h100x1-80gb": ("H100", 1, 80),
        "gpu-h100x8-640gb": ("H100", 8, 80),
        "gpu-mi300x1-192gb": ("MI300X", 1, 192),
    }
    assert offers["s-4vcpu-8gb"].rate.micros_per_hour == 71_430
    assert offers["gpu-h100x1-80gb"].minimum_charge == timedelta(minutes=1)
    cheap = offers["s-4vcpu-8gb"]
    assert cheap.rate.over(cheap.minimum_charge).micros == pytest.approx(10_000, abs=20)
    facts = dict(asyncio.run(provider.whoami()))
    assert facts["unknown accelerators"] == "nvidia_z9000"
    assert account.api.key not in str(facts)


@pytest.mark.parametrize(
    ("size", "image"),
    [
        ("s-4vcpu-8gb", "ubuntu-24-04-x64"),
        ("gpu-h100x1-80gb", "gpu-h100x1-base"),
        ("gpu-h100x8-640gb", "gpu-h100x8-base"),
        ("gpu-mi300x1-192gb", "gpu-amd-base"),
    ],
)
def test_gangs_of_every_size_are_found_and_boot_the_image_of_their_gpu(
    account: DigitalOceanPlace, size: str, image: str
) -> None:
    async def scenario() -> None:
        harness = ContractHarness(account, VmContract().lose_reply)
        gang, provider = await harness.spec("sized", nodes=3), harness.ours
        offers = [each for each in await provider.offers() if each.instance_type == size]
        await harness.launch(replace(gang, offer=offers[0]))
        account.lose_records()  # only the list shows the gang
        await account.settle()
        harness.restart()
        assert len((await harness.one(gang.name)).nodes) == 3
        await harness.remove(gang.name)

    asyncio.run(scenario())
    assert account.api.images == [image] * 3


def test_a_wrong_key_is_refused(account: DigitalOceanPlace) -> None:
    account.file.write_text("access-token: wrong\n")
    with pytest.raises(Refused, match="check the API key"):
        asyncio.run(account.provider("ours").offers())


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Size is not available in this region.", NoCapacity),
        ("Region is not available", NoCapacity),
        ("size is unavailable", NoCapacity),
        ("This size is currently restricted", NoCapacity),
        ("creating this/these droplet(s) will exceed your droplet limit", QuotaTooSmall),
        ("The image you specified is not available in the selected region", Refused),
        ("1 is an invalid SSH key identifier for Droplet creation.", Refused),
    ],
)
def test_only_missing_capacity_lets_the_job_try_other_sizes(
    account: DigitalOceanPlace, message: str, error: type[Exception]
) -> None:
    cloud = DigitalOceanCloud(check_settings(MANIFEST, {}), account.cloud.now)
    fault = CloudFault(422, "unprocessable_entity", message)
    assert type(read_fault(cloud, cloud.name_limit(fault), "a launch", making=True)) is error


def test_a_full_account_is_reported_as_a_quota(account: DigitalOceanPlace) -> None:
    account.api.limit = 0
    with pytest.raises(QuotaTooSmall, match="droplet limit"):
        asyncio.run(launch(account))


async def launch(account: DigitalOceanPlace) -> None:
    harness = ContractHarness(account, VmContract().lose_reply)
    await account.provider("ours").launch(await harness.spec("one"))


def test_other_machines_of_the_account_may_have_an_unusual_form(account: DigitalOceanPlace) -> None:
    account.api.others = [{"id": 7, "name": "web-1"}, {"id": 8}]
    assert asyncio.run(account.provider("ours").gangs()) == []


def test_droplets_get_no_tags_and_their_nodes_use_the_private_address(
    account: DigitalOceanPlace,
) -> None:
    async def scenario() -> None:
        harness = ContractHarness(account, VmContract().lose_reply)
        gang = await harness.spec("tagless", nodes=2)
        await harness.launch(gang)
        for request in account.cloud.requests:
            assert request.tags == {}
            told = json.loads(request.user_data[0].split("END_OF_BOOT'\n")[1].split("\n")[0])
            address = "http://169.254.169.254/metadata/v1/interfaces/private/0/ipv4/address"
            assert told["metadata"]["address"] == address
        await harness.remove(gang.name)

    asyncio.run(scenario())
