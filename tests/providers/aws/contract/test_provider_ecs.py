"""The Amazon ECS provider keeps the contract, by real boto3 over a stand-in that checks requests and
replies against botocore's model.
"""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest
from tests.contract.aws_contract import CONTEXT, PRICES, AwsContract
from tests.contract.aws_service import ManagedPlace
from tests.contract.ecs_stand_in import CLUSTER, EcsStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import (
    GangSeen,
    GangState,
    NoCapacity,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import LaunchFault
from cavvy.providers.ecs import MANIFEST, EcsService
from cavvy.providers.ecs.capacity import parse_capacity, read_prices
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.task_files import parse_task

PROOF = Proof("ecs", False, "a strict stand-in for Amazon ECS, by real boto3")
TRAITS = ManagedCloud(EcsService(replace(CONTEXT, settings={"cluster": "x"}))).traits
EC2 = "cpu=m5.large, gpu=g4dn.xlarge, gpu-spot=g4dn.xlarge/spot, lab=g4dn.xlarge/paid"
TABLE: Mapping[str, Scalar] = {
    "regions": "us-east-1",
    "cluster": CLUSTER,
    "capacity": EC2,
    "subnets": "subnet-0123456789abcdef0",
    "image": "123456789012.dkr.ecr.{region}.amazonaws.com/train:1",
}


class EcsPlace(ManagedPlace):
    api: EcsStandIn

    def double(self) -> None:
        """A second task of the same definition."""
        newest = self.cloud.billed()[-1]
        made = self.cloud.add(newest.name, newest.tags)
        self.api.runs[made] = self.api.runs[newest.id]


class TestEcs(AwsContract[EcsPlace]):
    traits, manifest, stand_in, service = TRAITS, MANIFEST, EcsStandIn, EcsService
    place_type, table, prices, guide = EcsPlace, TABLE, PRICES, "ecs"

    def launch(self, account: EcsPlace, **changes: Any) -> list[dict[str, Any]]:
        """Launch a gang with these fields, and remove it; the requests RunTask with definitions."""
        self.run_gang(account, **changes)
        return list(account.api.runs.values())

    def see_end(self, account: EcsPlace, change: Mapping[str, Any]) -> GangSeen:
        """A gang whose task ended with these fields."""

        async def scenario() -> GangSeen:
            harness = self.harness(account)
            gang = await harness.running("ended", purchase=Purchase.SPOT)
            (machine,) = account.cloud.billed()
            account.api.changes[machine.id] = dict(change)
            await account.end(gang.name)
            await account.wait(timedelta(minutes=1))
            (seen,) = await harness.ours.gangs(gang.name)
            return seen

        return asyncio.run(scenario())

    @pytest.mark.proves(PROOF, "image")
    def test_a_task_runs_in_its_own_image(self, account: EcsPlace) -> None:
        image = "docker.io/library/python:3.12"
        (run,) = self.launch(account, image=image)
        assert f"'image': '{image}'" in str(run)

    def test_capacity_providers_with_a_known_machine_are_offers(self, account: EcsPlace) -> None:
        table = {"capacity": f"{EC2}, old=m5.large, huge=p9.48xlarge"}
        provider = account.provider("ours", **table)
        offers = asyncio.run(provider.offers())
        assert {
            (each.zone, each.instance_type, each.purchase, each.rate.micros_per_hour)
            for each in offers
        } == {
            ("cpu", "m5.large", Purchase.ON_DEMAND, 96_000),
            ("gpu", "g4dn.xlarge", Purchase.ON_DEMAND, 526_000),
            ("gpu-spot", "g4dn.xlarge", Purchase.SPOT, 210_000),
            ("lab", "g4dn.xlarge", Purchase.ON_DEMAND, 0),
        }
        assert [each.zone for each in offers if each.owned] == ["lab"]  # its price is no mistake
        facts = dict(asyncio.run(provider.whoami()))["capacity without offers"]
        assert f"old: the cluster {CLUSTER} has no such capacity provider" in facts

    def test_fargate_costs_its_vcpus_and_its_memory(self, account: EcsPlace) -> None:
        provider = account.provider("ours", capacity="FARGATE, FARGATE_SPOT")
        offers = {each.key: each for each in asyncio.run(provider.offers())}
        assert len(offers) == 2 * 67
        offer = offers["ecs/us-east-1/FARGATE/fargate-4x8:0/on-demand"]
        assert (offer.vcpus, offer.memory_mib) == (4, 8192)
        assert offer.rate.micros_per_hour == 4 * 40_480 + 8 * 4_445
        assert offer.minimum_charge == timedelta(minutes=1)
        (address,) = offer.extras
        assert address.price.micros == 5000
        spot = offers["ecs/us-east-1/FARGATE_SPOT/fargate-4x8:0/spot"]
        assert spot.rate.micros_per_hour == round(4 * 12_885.61 + 8 * 1_414.93)

    def test_a_task_on_fargate_has_one_of_its_sizes(self, account: EcsPlace) -> None:
        table = {
            "capacity": "FARGATE",
            "security_groups": "sg-1, sg-2",
            "public_address": False,
            "log_group": "/cavvy",
            "execution_role": "arn:aws:iam::123456789012:role/pull",
        }
        (run,) = self.launch(account, table=table, zone="FARGATE")
        definition = run["definition"]
        assert definition["requiresCompatibilities"] == ["FARGATE"]
        assert (definition["cpu"], definition["memory"]) == ("1024", "2048")
        assert definition["executionRoleArn"].endswith("/pull")
        (container,) = definition["containerDefinitions"]
        assert container["stopTimeout"] == 120
        assert "linuxParameters" not in container
        assert container["logConfiguration"]["options"] == {
            "awslogs-group": "/cavvy",
            "awslogs-region": "us-east-1",
            "awslogs-stream-prefix": run["taskDefinition"],
        }
        assert run["networkConfiguration"]["awsvpcConfiguration"] == {
            "subnets": ["subnet-0123456789abcdef0"],
            "assignPublicIp": "DISABLED",
            "securityGroups": ["sg-1", "sg-2"],
        }

    def test_a_task_on_ec2_has_a_whole_instance(self, account: EcsPlace) -> None:
        (run,) = self.launch(account, zone="gpu")
        definition = run["definition"]
        (container,) = definition["containerDefinitions"]
        assert (container["cpu"], container["memory"]) == (4096, 16384 * 90 // 100)
        assert container["resourceRequirements"] == [{"type": "GPU", "value": "1"}]
        assert container["linuxParameters"] == {"sharedMemorySize": 16384 * 90 // 100}
        assert definition["networkMode"] == "host"
        (rule,) = definition["placementConstraints"]
        assert rule["expression"] == "attribute:ecs.instance-type in [g4dn.xlarge]"
        assert run["capacityProviderStrategy"] == [{"capacityProvider": "gpu", "weight": 1}]
        assert "logConfiguration" not in container
        assert "claim-" not in json.dumps(run)

    def test_each_rank_of_a_gang_is_a_task(self, account: EcsPlace) -> None:
        runs = self.launch(account, nodes=3)
        ranks = [
            each["value"]
            for run in runs
            for each in run["definition"]["containerDefinitions"][0]["environment"]
            if each["name"] == "CAVVY_CONTAINER_RANK"
        ]
        assert ranks == ["0", "1", "2"]
        assert len({run["clientToken"] for run in runs}) == 3
        assert len({run["startedBy"] for run in runs}) == 1

    @pytest.mark.parametrize("reason", ["RESOURCE:GPU", "Capacity is unavailable at this time"])
    def test_a_gang_that_is_not_placed_as_a_whole_is_stopped(
        self, account: EcsPlace, reason: str
    ) -> None:
        account.api.reason = reason
        account.fail(1, LaunchFault.FULL)
        with pytest.raises(NoCapacity, match=reason):
            self.launch(account, nodes=2)
        assert account.cloud.billed() == []
        assert len(account.api.definitions) == 1  # that of the task that ran is deleted later

    @pytest.mark.parametrize("code", ["SpotInterruption", "TerminationNotice"])
    def test_an_interrupted_task_is_a_preemption(self, account: EcsPlace, code: str) -> None:
        change = {"stopCode": code, "stoppedReason": "Your Spot Task was interrupted."}
        seen = self.see_end(account, change)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)

    @pytest.mark.parametrize(
        ("code", "lost"), [("TerminationNotice", True), ("UserInitiated", False)]
    )
    def test_a_terminated_instance_is_a_preemption(
        self, account: EcsPlace, code: str, lost: bool
    ) -> None:
        """The code tells it: the reason of a stop may be a person's own words."""
        reason = "Host EC2 (instance i-0123456789abcdef0) terminated."
        assert self.see_end(account, {"stopCode": code, "stoppedReason": reason}).preempted is lost

    def test_a_failed_pull_is_no_preemption(self, account: EcsPlace) -> None:
        reason = "CannotPullContainerError: pull access denied"
        seen = self.see_end(account, {"stopCode": "TaskFailedToStart", "stoppedReason": reason})
        assert (seen.preempted, seen.no_capacity) == (False, False)
        assert reason in seen.reason

    async def test_a_task_without_capacity_cost_nothing(self, account: EcsPlace) -> None:
        harness = self.harness(account)
        gang = await harness.launched("waits")
        (machine,) = account.cloud.billed()
        await account.end(gang.name)
        account.api.changes[machine.id] = {
            "stopCode": "TaskFailedToStart",
            "stoppedReason": "RESOURCE:GPU",
            "pullStartedAt": account.cloud.time.timestamp(),
        }
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs(gang.name)
        await harness.remove(gang.name)
        seen = seen
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        (node,) = seen.nodes
        assert node.started_at == node.ended_at

    async def test_definitions_of_ended_tasks_are_deleted(self, account: EcsPlace) -> None:
        harness = self.harness(account)
        gang = await harness.spec("again")
        account.fail(0, LaunchFault.BROKEN)
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        await account.settle()
        await harness.launch(gang)
        assert len(account.api.definitions) == 2
        await harness.remove(gang.name)
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs()
        assert account.api.definitions == {}
        assert account.api.inactive == set()

    def test_a_job_that_is_listed_and_not_described_is_not_forgotten(
        self, account: EcsPlace
    ) -> None:
        self.check_undescribed(account)

    async def test_a_poll_deregisters_a_few_definitions(self, account: EcsPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("many", nodes=12)
        account.api.calls.clear()
        await harness.remove(gang.name)
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            await harness.ours.gangs()
        assert account.api.definitions == {}
        assert account.api.inactive == set()
        calls = [name.partition(":")[2] for name in account.api.calls]
        runs = [(name, len(list(group))) for name, group in groupby(calls)]
        deregistered = [many for name, many in runs if name == "DeregisterTaskDefinition"]
        assert deregistered == [10, 2]
        assert calls.count("DeleteTaskDefinitions") == 2

    async def test_tasks_of_others_are_left_alone(self, account: EcsPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("mine")
        (mine,) = account.cloud.billed()
        other = account.api.add_task(mine.name.replace("-0-1", "-1-2"))
        account.cloud.change(other, ended=account.cloud.time)
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs()
        assert seen.name == gang.name
        before = account.api.calls.count("ecs:DescribeTasks")
        assert len(account.api.definitions) == 2
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs()
        # the running task is described again, the foreign one is not
        assert account.api.calls.count("ecs:DescribeTasks") == before + 1
        await harness.remove(gang.name)

    def test_a_gpu_is_refused_if_there_is_only_fargate(self, account: EcsPlace) -> None:
        task = parse_task("run: x\nresources: {gpu: 1}")
        provider = account.provider("ours", capacity="FARGATE, FARGATE_SPOT")
        (objection,) = provider.check(task)
        assert objection.field == "resources.gpu"
        assert "Fargate has no GPUs" in objection.reason
        assert account.provider("ours").check(task) == []

    @pytest.mark.parametrize("name", ["capacity", "image", "subnets"])
    def test_a_missing_setting_is_named(self, account: EcsPlace, name: str) -> None:
        table = {"capacity": "FARGATE"} | {name: ""}
        with pytest.raises(Refused, match=rf"\[providers.ecs\] {name}: "):
            self.launch(account, table=table, zone="FARGATE")

    def test_a_missing_cluster_is_named(self, account: EcsPlace) -> None:
        with pytest.raises(Refused, match="has no active cluster other"):
            self.launch(account, table={"cluster": "other"})


@pytest.mark.parametrize("entry", ["gpu", "gpu=g5", "gpu=g5.xlarge/free", "FARGATE=g5.xlarge=x"])
def test_a_wrong_entry_is_shown(entry: str) -> None:
    with pytest.raises(Refused, match="is not FARGATE, FARGATE_SPOT or"):
        parse_capacity({"capacity": entry})


def test_types_that_run_no_tasks_are_refused() -> None:
    with pytest.raises(Refused, match="x86 CPU"):
        parse_capacity({"capacity": "arm=m7g.large"})


def test_each_price_of_fargate_has_a_date_and_a_source() -> None:
    for key, price in read_prices().items():
        assert price.source, key
        assert price.as_of.year >= 2026, key
    regions = {region for region, _ in read_prices()}
    assert all((each, "FARGATE_SPOT") in read_prices() for each in regions)
