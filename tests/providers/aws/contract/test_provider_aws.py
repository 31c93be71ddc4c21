"""The EC2 provider keeps the contract, by real boto3 over an EC2 that behaves (tests/ec2), which
may do only what the provider's own IAM policy allows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.cloud import Cloud
from tests.ec2.rules import allow_only
from tests.ec2.server import Front, served
from tests.proofs import Proof

from cavvy.domain.tasks import Scalar
from cavvy.providers.aws import MANIFEST
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.aws.policy import make_policy
from cavvy.providers.aws.provider import AwsProvider
from cavvy.providers.base import GangSpec, Provider, ProviderContext, TryAgain
from cavvy.providers.contract import ProviderContract, ProviderUnderTest
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.registry import check_settings
from cavvy.providers.state import MemoryProviderState, ProviderState

PROOF = Proof("aws", False, "a simulated EC2 (moto), called with the real boto3")

TYPES = "t3.medium, g4dn.xlarge, p4d.24xlarge"


class AwsPlace:
    """One account at one endpoint; its clock, which the providers share, jumps where a scenario
    lets time pass.
    """

    def __init__(
        self, cloud: Cloud, account: AwsAccount, home: Path, settings: Mapping[str, Scalar]
    ) -> None:
        self.cloud, self.account, self.home, self.settings = cloud, account, home, settings
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    def provider(self, installation: str) -> AwsProvider:
        context = ProviderContext(
            installation=installation,
            home=self.home,
            settings=self.settings,
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            now=self.cloud.hours.now,
        )
        return AwsProvider(MANIFEST, context, self.account)

    async def settle(self) -> None:
        self.cloud.hours.jump(timedelta(seconds=30))
        self.cloud.tick()

    async def end(self, gang: str) -> None:
        for life in self.cloud.of(gang):
            if life.lives:
                self.cloud.shut_down_itself(life)

    async def wait(self, length: timedelta) -> None:
        self.cloud.hours.jump(length)
        self.cloud.tick()


@pytest.fixture(scope="module")
def front() -> Iterator[tuple[Front, AwsAccount, Mapping[str, Scalar]]]:
    """One server and one account's clients for all scenarios; making clients is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "for the stand-in only")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        front = Front(Cloud())
        with served(front) as endpoint:
            table: dict[str, Scalar] = {
                "regions": "us-east-1",
                "endpoint": endpoint,
                "instances": TYPES,
            }
            settings = check_settings(MANIFEST, table)
            yield front, AwsAccount(settings), settings


@pytest.fixture
def place(
    front: tuple[Front, AwsAccount, Mapping[str, Scalar]], tmp_path: Path
) -> Iterator[AwsPlace]:
    """A fresh account, which may do only what our policy allows; each scenario must leave nothing."""
    server, account, settings = front
    server.cloud = cloud = Cloud()
    allow_only(cloud.rules, make_policy())
    yield AwsPlace(cloud, account, tmp_path, settings)
    assert cloud.left() == {}, "the scenario is over and something of it is left"


class TestAws(ProviderContract):
    @pytest.fixture
    def place(self, place: AwsPlace) -> ProviderUnderTest:
        return place

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        """The line is cut after EC2 has done it."""
        assert isinstance(place, AwsPlace)
        place.cloud.rules.fault = lambda service, action: (
            "lose" if action == "RunInstances" else None
        )
        try:
            with suppress(TryAgain):
                await provider.launch(gang)
        finally:
            place.cloud.rules.fault = None
