"""What the contract tests of AWS's managed services have in common: the account, gangs of any shape,
and the rules that apply to all of them.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from tests.contract.aws_service import MACHINES, AwsStandIn, Front, ManagedPlace, aws_front

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangState, Manifest, ProviderContext, ProviderError, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_stand_in import LONG_PAGE, RestServer
from cavvy.providers.contract.vm_contract import VmContract
from cavvy.providers.managed.service import JobState, ServiceJob

P = TypeVar("P", bound=ManagedPlace)
CONTEXT = ProviderContext(installation="any", home=Path("/nowhere"))
START = datetime(2026, 11, 1, 12, tzinfo=UTC)
GUIDES = Path(__file__).parents[2] / "docs/guides"
PRICES = [  # of the catalog: spot prices differ by zone
    replace(
        MACHINES[name],
        region="us-east-1",
        zone=zone,
        instance_type=name,
        purchase=purchase,
        rate=rate,
    )
    for name, zone, purchase, rate in (
        ("m5.large", None, Purchase.ON_DEMAND, HourlyRate(96_000)),
        ("g4dn.xlarge", None, Purchase.ON_DEMAND, HourlyRate(526_000)),
        ("g4dn.xlarge", "use1-az1", Purchase.SPOT, HourlyRate(160_000)),
        ("g4dn.xlarge", "use1-az2", Purchase.SPOT, HourlyRate(210_000)),
    )
]


class AwsContract(VmContract, Generic[P]):
    """One service, by real boto3 over its stand-in."""

    has_others = False
    failing_nodes = (1,)  # as of `RestContract`
    crowd = LONG_PAGE + 10
    manifest: Manifest
    stand_in: type[AwsStandIn]
    service: Any  # makes the service of a context and an account
    place_type: type[P]
    table: Mapping[str, Scalar] = {}
    prices: Sequence[Offer] = ()  # of the catalog
    guide: str  # whose first JSON block is the policy

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, rest_server: RestServer) -> Iterator[Front]:
        with aws_front(rest_server, cls.manifest, cls.table) as front:
            yield front

    @pytest.fixture
    def account(self, front: Front, tmp_path: Path) -> Iterator[P]:
        made = self.place_type(
            self.traits, tmp_path, self.stand_in, self.service, self.manifest, front, self.prices
        )
        yield made
        asyncio.run(made.settle())
        assert made.api.bugs == []
        assert made.cloud.billed() == []

    @pytest.fixture
    def place(self, account: P) -> P:
        return account

    def harness(self, account: P) -> ContractHarness:
        return ContractHarness(account, self.lose_reply)

    def run_gang(self, account: P, **changes: Any) -> None:
        """Launch a gang with these fields, in this `zone` and with this `purchase` and `table` of
        settings, and remove it.
        """

        async def scenario() -> None:
            table = changes.pop("table", {})
            gang = await self.harness(account).spec(
                "shaped", purchase=changes.pop("purchase", None)
            )
            provider = account.provider(gang.installation, **table)
            zone = changes.pop("zone", None)
            if zone is not None:
                offers = await provider.offers()
                gang = replace(gang, offer=next(each for each in offers if each.zone == zone))
            gang = replace(gang, **changes)
            await provider.launch(gang)
            await provider.remove(gang.name)

        asyncio.run(scenario())

    def check_missing(self, account: P, name: str) -> None:
        """Without this setting, offers are refused with its name."""
        with pytest.raises(Refused, match=rf"\[providers.{self.manifest.name}\] {name}: not set"):
            asyncio.run(account.provider("ours", **{name: ""}).offers())

    def check_undescribed(self, account: P) -> None:
        """A job that is listed, and cannot be described, is billed and not forgotten."""

        async def scenario() -> None:
            harness = self.harness(account)
            gang = await harness.running("lost")
            await account.wait(timedelta(minutes=10))
            await harness.ours.gangs()
            account.api.undescribed = {each.id for each in account.cloud.machines}
            for _ in range(2):
                await account.wait(timedelta(hours=7))
                (seen,) = await harness.ours.gangs()
                assert seen.state is GangState.RUNNING
            await harness.ours.remove(gang.name)
            assert account.billed() == 0
            account.api.undescribed = set()
            await harness.remove(gang.name)

        asyncio.run(scenario())

    def check_failed_start(self, account: P, reason: str, *, full: bool) -> None:
        """A gang that fails to start for this reason has ended, and costs nothing."""

        async def scenario() -> None:
            harness = self.harness(account)
            gang = await harness.launched("failed")
            ((_, name),) = account.api.bodies
            account.api.failures[name] = reason  # type: ignore[attr-defined]  # of endpoints and notebooks
            await account.settle()
            seen = await harness.one(gang.name)
            assert (seen.state, seen.no_capacity) == (GangState.ENDED, full)
            assert seen.nodes[0].started_at == seen.nodes[0].ended_at
            assert reason in seen.reason

        asyncio.run(scenario())

    async def use_all_calls(self, account: P) -> None:
        harness = self.harness(account)
        gang = await harness.running("all")
        await harness.remove(gang.name)
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()

    def test_only_the_calls_of_the_guides_policy_are_made(self, account: P) -> None:
        asyncio.run(self.use_all_calls(account))
        text = (GUIDES / f"{self.guide}.md").read_text()
        policy = json.loads(text.split("```json\n")[1].split("```")[0])
        actions = [each["Action"] for each in policy["Statement"]]
        granted = {name for each in actions for name in ([each] if isinstance(each, str) else each)}
        assert set(account.api.calls) <= granted


class StagedPlace(ManagedPlace):
    """An object is deleted in several steps, each of which a poll takes."""

    def __init__(self, *given: Any) -> None:
        self.newest: dict[str, Any] = {}  # providers by installation
        super().__init__(*given)

    def provider(self, installation: str, **table: Scalar) -> Any:
        self.newest[installation] = super().provider(installation, **table)
        return self.newest[installation]

    async def settle(self) -> None:
        for _ in range(4):
            await self.wait(timedelta(seconds=45))
            for each in self.newest.values():
                with suppress(ProviderError):
                    await each.gangs()

    def billed(self) -> int:
        return len([each for each in self.cloud.billed() if not each.off])


def tell(kind: str, status: str) -> dict[str, Any]:
    """What AWS tells of an endpoint or a notebook an hour after its creation."""
    return {
        f"{kind}Name": "cv-a-b-0-1",
        f"{kind}Status": status,
        "CreationTime": START,
        "LastModifiedTime": START + timedelta(hours=1),
    }


def check_times(job: ServiceJob, status: str, state: JobState) -> None:
    """The bill begins with the creation and ends with the last change; a failed start is free."""
    assert job.state is state
    off = state in (JobState.RECLAIMED, JobState.ENDED)
    assert job.ended_at == (START + timedelta(hours=1) if off else None)
    assert job.started_at == (job.ended_at if status == "Failed" else START)
