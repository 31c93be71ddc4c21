"""The AWS Batch provider keeps the contract, by real boto3 over a stand-in that checks requests and
replies against botocore's model.
"""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.aws_batch_stand_in import BatchStandIn
from tests.contract.aws_contract import CONTEXT, PRICES, AwsContract
from tests.contract.aws_service import ManagedPlace
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws_batch import MANIFEST, BatchService
from cavvy.providers.base import GangState, NoCapacity, Refused, TryAgain
from cavvy.providers.contract import LaunchFault
from cavvy.providers.managed.provider import ManagedCloud

PROOF = Proof("aws-batch", False, "a strict stand-in for AWS Batch, by real boto3")
TRAITS = ManagedCloud(BatchService(CONTEXT)).traits
TABLE: Mapping[str, Scalar] = {
    "regions": "us-east-1",
    "queues": "cpu, gpu, gpu-spot, mixed, serverless",
    "image": "123456789012.dkr.ecr.{region}.amazonaws.com/train:1",
}


class BatchPlace(ManagedPlace):
    api: BatchStandIn

    def double(self) -> None:
        """Names are not unique."""
        newest = self.cloud.billed()[-1]
        self.cloud.add(newest.name, newest.tags)


class TestAwsBatch(AwsContract[BatchPlace]):
    traits, manifest, stand_in, service = TRAITS, MANIFEST, BatchStandIn, BatchService
    place_type, table, prices, guide = BatchPlace, TABLE, PRICES, "aws-batch"

    def launch(self, account: BatchPlace, **changes: Any) -> dict[str, Any]:
        """Launch a gang with these fields, and remove it; the definition of its job."""
        self.run_gang(account, **changes)
        (body,) = account.api.bodies.values()
        definition: dict[str, Any] = body["definition"]
        return definition

    @pytest.mark.proves(PROOF, "image")
    def test_a_job_runs_in_its_own_image(self, account: BatchPlace) -> None:
        image = "docker.io/library/python:3.12"
        assert f"'image': '{image}'" in str(self.launch(account, image=image))

    def test_a_job_that_is_listed_and_not_described_is_not_forgotten(
        self, account: BatchPlace
    ) -> None:
        self.check_undescribed(account)

    def test_queues_with_one_known_machine_are_offers(self, account: BatchPlace) -> None:
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        assert {
            (each.zone, each.instance_type, each.purchase, each.rate.micros_per_hour)
            for each in offers
        } == {
            ("cpu", "m5.large", Purchase.ON_DEMAND, 96_000),
            ("gpu", "g4dn.xlarge", Purchase.ON_DEMAND, 526_000),
            ("gpu-spot", "g4dn.xlarge", Purchase.SPOT, 210_000),
        }
        facts = dict(asyncio.run(provider.whoami()))["queues without offers"]
        assert "mixed: the queue's compute environment must have one instance type" in facts
        assert "serverless: the queue's compute environment has the type FARGATE" in facts

    def test_new_prices_of_the_catalog_are_used(self, account: BatchPlace) -> None:
        async def read() -> int:
            offers = await provider.offers()
            return next(each.rate.micros_per_hour for each in offers if each.zone == "cpu")

        provider = account.provider("ours")
        assert asyncio.run(read()) == 96_000
        account.prices[0] = replace(PRICES[0], rate=HourlyRate(88_000))
        asyncio.run(account.wait(timedelta(minutes=10)))
        assert asyncio.run(read()) == 88_000

    def test_a_job_has_a_whole_instance_and_one_attempt(self, account: BatchPlace) -> None:
        definition = self.launch(account, longest=timedelta(hours=1))
        container = definition["containerProperties"]
        sizes = {each["type"]: each["value"] for each in container["resourceRequirements"]}
        assert sizes == {"VCPU": "2", "MEMORY": str(8192 * 90 // 100)}
        assert container["linuxParameters"] == {"sharedMemorySize": 8192 * 90 // 100}
        assert definition["retryStrategy"] == {"attempts": 1}
        assert definition["timeout"] == {"attemptDurationSeconds": 2 * 3600 + 1}
        assert "claim-" not in json.dumps(definition)

    def test_a_job_in_a_fair_share_queue_has_a_share_and_a_priority(
        self, account: BatchPlace
    ) -> None:
        account.api.fair = {"cpu"}
        definition = self.launch(account, options={"share": "research", "priority": 50})
        assert definition["schedulingPriority"] == 50
        (body,) = account.api.bodies.values()
        assert body["shareIdentifier"] == "research"

    def test_other_queues_get_no_share(self, account: BatchPlace) -> None:
        definition = self.launch(account, options={"priority": 50}, table={"share": "research"})
        assert "schedulingPriority" not in definition

    def test_a_fair_share_queue_without_a_share_is_explained(self, account: BatchPlace) -> None:
        account.api.fair = {"cpu"}
        with pytest.raises(Refused, match="share: the queue cpu has a fair-share policy"):
            self.launch(account)
        assert account.api.definitions == {}

    @pytest.mark.parametrize("priority", [-1, 10_000, True, "high"])
    def test_a_priority_out_of_range_is_refused(
        self, account: BatchPlace, priority: object
    ) -> None:
        with pytest.raises(Refused, match="not a whole number from 0 to 9999"):
            self.launch(account, options={"priority": priority})

    def test_a_gang_is_a_multi_node_job_of_one_type(self, account: BatchPlace) -> None:
        nodes = self.launch(account, nodes=3)["nodeProperties"]
        assert (nodes["numNodes"], nodes["mainNode"]) == (3, 0)
        (shape,) = nodes["nodeRangeProperties"]
        assert shape["container"]["instanceType"] == "m5.large"

    def test_a_gang_gets_no_spot_instances(self, account: BatchPlace) -> None:
        with pytest.raises(NoCapacity, match="runs no gangs on spot"):
            self.launch(account, nodes=2, purchase=Purchase.SPOT)

    async def test_definitions_of_ended_jobs_are_deregistered(self, account: BatchPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("gone")
        assert len(account.api.definitions) == 1
        await harness.remove(gang.name)
        await harness.ours.gangs()
        assert account.api.definitions == {}

    @pytest.mark.parametrize("foreign", ["cv-50", "cv-mnist-large-0-1", "cv-0123456789-x-abcd-0-1"])
    async def test_jobs_of_others_are_left_alone(self, account: BatchPlace, foreign: str) -> None:
        """Their names may begin as ours do."""
        harness = self.harness(account)
        other = account.api.add_job(foreign)
        gang = await harness.running("mine")
        account.cloud.change(other, ended=account.cloud.time)
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs()
        assert seen.name == gang.name
        assert f"{foreign}:1" in account.api.definitions
        await harness.remove(gang.name)

    async def test_a_definition_of_a_job_without_our_tag_stays(self, account: BatchPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("tagged")
        ((key, body),) = account.api.bodies.items()
        account.api.bodies[key] = body | {"tags": {}}
        await harness.remove(gang.name)
        await harness.ours.gangs()
        assert len(account.api.definitions) == 1

    async def test_all_revisions_of_a_repeated_request_are_deregistered(
        self, account: BatchPlace
    ) -> None:
        harness = self.harness(account)
        gang = await harness.spec("again")
        account.fail(0, LaunchFault.BROKEN)
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        await account.settle()
        await harness.launch(gang)
        assert list(account.api.revisions.values()) == [2]
        await harness.remove(gang.name)
        await harness.ours.gangs()
        assert account.api.definitions == {}

    async def test_a_poll_deregisters_a_few_definitions(self, account: BatchPlace) -> None:
        """Each is a call of its own, and polls must be quick."""
        harness = self.harness(account)
        for number in range(12):
            await harness.running(f"many{number}")
        await account.end("all")
        counts = []
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            account.api.calls.clear()
            await harness.ours.gangs()
            counts.append(account.api.calls.count("batch:DeregisterJobDefinition"))
        assert counts == [10, 2]
        assert account.api.definitions == {}

    async def test_a_reclaimed_instance_is_a_preemption(self, account: BatchPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("taken", purchase=Purchase.SPOT)
        (machine,) = account.cloud.billed()
        account.api.reasons[machine.id] = "Host EC2 (instance i-0123456789abcdef0) terminated."
        await account.end(gang.name)
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)

    @pytest.mark.parametrize("name", ["queues", "image"])
    def test_a_missing_setting_is_named(self, account: BatchPlace, name: str) -> None:
        with pytest.raises(Refused, match=rf"\[providers.aws-batch\] {name}: "):
            self.launch(account, table={name: ""})
