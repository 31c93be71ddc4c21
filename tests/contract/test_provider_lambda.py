"""The Lambda Cloud provider keeps the contract, on a stand-in that checks every request against
Lambda's published description.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.lambda_stand_in import LambdaStandIn
from tests.contract.test_provider_aws import make_node_endpoint
from tests.contract.test_provider_vm import VmContract
from tests.contract.vm_cloud import MemoryPlace
from tests.proofs import Proof

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import ProviderContext, QuotaTooSmall, Refused
from cavvy.providers.contract import ContractHarness, ProviderUnderTest
from cavvy.providers.lambda_cloud.cloud import LambdaCloud
from cavvy.providers.lambda_cloud.manifest import MANIFEST
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("lambda", False, "a strict stand-in for Lambda's API")
TRAITS = replace(
    LambdaCloud.traits, list_lag=timedelta(seconds=20), ended_listed=timedelta(minutes=2)
)


class LambdaPlace(MemoryPlace):
    """One account."""

    def __init__(self, home: Path) -> None:
        super().__init__(TRAITS, home)
        self.api = LambdaStandIn(self.cloud)
        self.file = home / "key"
        self.file.write_text(f"api_key = {LambdaStandIn.key}\n")
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
        cloud = LambdaCloud(settings, self.cloud.now)
        provider = VmProvider(MANIFEST, context, cloud, identity=cloud.identity, close=cloud.close)
        self.providers.append(provider)
        return provider


@pytest.fixture
def account(tmp_path: Path) -> Iterator[LambdaPlace]:
    account = LambdaPlace(tmp_path)
    yield account
    account.api.close()
    for each in account.providers:
        asyncio.run(each.close())
    assert account.cloud.billed() == []


class TestLambda(VmContract):
    @pytest.fixture
    def place(self, account: LambdaPlace) -> ProviderUnderTest:
        return account


def run(account: LambdaPlace, **changes: object) -> None:
    """Launch one gang."""

    async def scenario() -> None:
        harness = ContractHarness(account, VmContract().lose_reply)
        gang = await harness.spec("one")
        await account.provider("ours").launch(replace(gang, **changes))  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_offers_have_live_prices_and_unknown_gpus_are_reported(account: LambdaPlace) -> None:
    provider = account.provider("ours", regions="us-east-1")
    offers = {offer.instance_type: offer for offer in asyncio.run(provider.offers())}
    assert {offer.region for offer in offers.values()} == {"us-east-1"}
    found = {
        name: (offer.accelerator, offer.accelerator_count, offer.accelerator_memory_mib // 1024)
        for name, offer in offers.items()
    }
    assert found == {
        "cpu_4x_general": (None, 0, 0),
        "gpu_1x_a10": ("A10", 1, 24),
        "gpu_8x_a100": ("A100", 8, 40),
        "gpu_8x_a100_80gb_sxm4": ("A100", 8, 80),
        "gpu_1x_h100_pcie": ("H100-PCIe", 1, 80),
        "gpu_8x_h100_sxm5": ("H100", 8, 80),
        "gpu_1x_gh200": ("GH200", 1, 96),
    }
    assert offers["gpu_1x_a10"].rate.micros_per_hour == 1_290_000
    assert offers["gpu_1x_gh200"].architecture == "arm64"
    facts = dict(asyncio.run(provider.whoami()))
    assert facts["unknown accelerators"] == "Z9000 (999 GB SXM9)"
    assert facts["API key"] == str(account.file)
    assert LambdaStandIn.key not in str(facts)


def test_a_wrong_key_is_refused(account: LambdaPlace) -> None:
    account.file.write_text("wrong")
    with pytest.raises(Refused, match="check the API key"):
        asyncio.run(account.provider("ours").offers())


def test_a_quota_is_reported_as_one(account: LambdaPlace) -> None:
    account.api.quota = 0
    with pytest.raises(QuotaTooSmall, match="request a higher quota"):
        run(account)


def test_an_account_without_ssh_key_gets_a_hint(account: LambdaPlace) -> None:
    account.api.keys = []
    with pytest.raises(Refused, match="the account has no SSH key; add one"):
        run(account)


def test_other_machines_of_the_account_may_have_an_unusual_form(account: LambdaPlace) -> None:
    account.api.others = [{"id": 7, "name": "web-1"}, {"id": 8}]
    assert asyncio.run(account.provider("ours").gangs()) == []


def test_a_key_that_was_deleted_in_the_account_is_looked_up_again(account: LambdaPlace) -> None:
    async def scenario() -> None:
        harness = ContractHarness(account, VmContract().lose_reply)
        gang, provider = await harness.spec("one"), account.provider("ours")
        await provider.launch(gang)
        await provider.remove(gang.name)
        await account.settle()
        account.api.keys = ["desktop"]
        other = replace(gang, name=f"{gang.name}-2")
        with pytest.raises(Refused, match="ssh_key_names"):
            await provider.launch(other)
        await account.settle()
        await provider.launch(other)
        await provider.remove(other.name)

    asyncio.run(scenario())
