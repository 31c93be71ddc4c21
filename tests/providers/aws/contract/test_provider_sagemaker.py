"""The SageMaker provider keeps the contract, by real boto3 over a stand-in that checks requests and
replies against botocore's model.
"""

import asyncio
import json
import subprocess
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.aws_contract import CONTEXT, START, AwsContract
from tests.contract.aws_service import MACHINES, Front, ManagedPlace
from tests.contract.sagemaker_stand_in import IMAGE, ROLE, SageMakerStandIn, interrupted
from tests.proofs import Proof

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar, Transfer
from cavvy.domain.values import replace
from cavvy.providers.abilities import KEEPS_NODES
from cavvy.providers.base import (
    GangSpec,
    GangState,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import ContractHarness, LaunchFault
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState, ServiceJob
from cavvy.providers.sagemaker import MANIFEST
from cavvy.providers.sagemaker.jobs import SageMakerService, read_job

PROOF = Proof("sagemaker", False, "a strict stand-in for SageMaker, by real boto3")
TRAITS = ManagedCloud(SageMakerService(CONTEXT)).traits
TABLE: Mapping[str, Scalar] = {"role": ROLE, "bucket": "s3://bucket/cavvy", "image": IMAGE}


class SageMakerPlace(ManagedPlace):
    api: SageMakerStandIn


class TestSageMaker(AwsContract[SageMakerPlace]):
    traits, manifest, stand_in, service = TRAITS, MANIFEST, SageMakerStandIn, SageMakerService
    place_type = SageMakerPlace
    table = TABLE
    guide = "sagemaker"

    def launch(self, account: SageMakerPlace, **changes: Any) -> dict[str, Any]:
        """Launch a gang with these fields, and remove it; the request of its job."""
        self.run_gang(account, **changes)
        (body,) = account.api.bodies.values()
        return body

    @pytest.mark.parametrize("text", ["Requested resource not found.", "No such training job."])
    def test_a_job_that_is_listed_and_not_described_is_not_forgotten(
        self, account: SageMakerPlace, text: str
    ) -> None:
        """It is billed, since the list shows it. The error is known by its code, not by its text."""
        account.api.missing = text
        self.check_undescribed(account)

    def test_offers_have_sagemakers_own_prices(self, account: SageMakerPlace) -> None:
        provider = account.provider("ours", regions="us-east-1")
        offers = asyncio.run(provider.offers())
        assert {(o.instance_type, o.accelerator, o.rate.micros_per_hour) for o in offers} == {
            ("ml.m5.large", None, 115_000),
            ("ml.g4dn.xlarge", "T4", 736_400),
        }
        assert {each.purchase for each in offers} == {Purchase.ON_DEMAND, Purchase.SPOT}
        assert all(each.source and each.as_of for each in offers)

    def test_the_catalog_is_read_outside_of_the_event_loop(
        self, account: SageMakerPlace, front: Front
    ) -> None:
        """Reading it opens a file for each unknown type, and would delay all other requests."""
        threads: list[threading.Thread] = []

        def find(provider: str, name: str) -> Offer | None:
            threads.append(threading.current_thread())
            return MACHINES.get(name)

        _, aws, settings = front
        context = replace(CONTEXT, settings=settings, find_instance=find, now=account.cloud.now)
        assert asyncio.run(SageMakerService(context, aws).offers())
        assert threads
        assert threading.main_thread() not in threads

    def test_a_job_starts_the_agent_and_has_the_settings(self, account: SageMakerPlace) -> None:
        body = self.launch(account, nodes=3, longest=timedelta(hours=2))
        assert body["RoleArn"] == ROLE
        assert body["AlgorithmSpecification"]["TrainingImage"].startswith(
            "123456789012.dkr.ecr.us-east-1."
        )
        resources = body["ResourceConfig"]
        assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.m5.large", 3)
        assert body["StoppingCondition"] == {"MaxRuntimeInSeconds": 3 * 3600 + 1}
        assert "RetryStrategy" not in body  # restarts are the control plane's alone
        assert {each["Key"] for each in body["Tags"]} == {"cavvy-installation", "cavvy-gang"}
        text = json.dumps(body)
        assert "claim-" not in text  # tokens are fetched, and not shown in the console

    def test_spot_jobs_have_both_limits_and_no_warm_pool(self, account: SageMakerPlace) -> None:
        body = self.launch(account, purchase=Purchase.SPOT, table={"warm_s": 600})
        assert body["EnableManagedSpotTraining"] is True
        assert body["StoppingCondition"] == {
            "MaxRuntimeInSeconds": 432_000,
            "MaxWaitTimeInSeconds": 432_000 + 1800,
        }
        assert "KeepAlivePeriodInSeconds" not in body["ResourceConfig"]

    @pytest.mark.proves(PROOF, "image")
    def test_the_options_of_a_task(self, account: SageMakerPlace) -> None:
        options = {
            "hyperparameters": {"learning-rate": 0.1, "nesterov": True, "name": "a b"},
            "channels": {"train": "s3://data/train"},
            "output": "s3://bucket/models",
            "checkpoints": "s3://bucket/ckpt",
            "warm_s": 900,
            "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/own:2",
        }
        body = self.launch(account, options=options, disk_gib=200)
        assert body["HyperParameters"] == {
            "learning-rate": "0.1",
            "nesterov": "true",
            "name": "a b",
        }
        (channel,) = body["InputDataConfig"]
        assert channel["ChannelName"] == "train"
        assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://data/train"
        assert body["OutputDataConfig"] == {"S3OutputPath": "s3://bucket/models"}
        assert body["CheckpointConfig"]["S3Uri"] == "s3://bucket/ckpt"
        resources = body["ResourceConfig"]
        assert (resources["KeepAlivePeriodInSeconds"], resources["VolumeSizeInGB"]) == (900, 200)
        assert body["AlgorithmSpecification"]["TrainingImage"].endswith("/own:2")

    def test_an_input_at_the_folder_of_a_channel_is_a_channel(
        self, account: SageMakerPlace
    ) -> None:
        train = Transfer(
            source="s3://data/train/", target="/opt/ml/input/data/train", region="us-east-1"
        )
        other = Transfer(source="s3://data/other/", target="data/other")
        body = self.launch(account, inputs=(train, other), options={"input_mode": "FastFile"})
        (channel,) = body["InputDataConfig"]
        assert (channel["ChannelName"], channel["InputMode"]) == ("train", "FastFile")
        source = channel["DataSource"]["S3DataSource"]
        assert (source["S3DataType"], source["S3Uri"]) == ("S3Prefix", "s3://data/train/")
        told = {key: value for key, value in body["Environment"].items() if key.startswith("SM_")}
        assert told == {
            "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
            "SM_MODEL_DIR": "/opt/ml/model",
            "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
            "SM_NUM_GPUS": "0",
        }

    def test_the_parameters_of_a_task_are_hyperparameters(self, account: SageMakerPlace) -> None:
        options = {"hyperparameters": {"optimizer": "sgd", "epochs": 3}}
        params = {"learning-rate": 0.1, "nesterov": True, "epochs": 9}
        body = self.launch(account, params=params, options=options)
        assert body["HyperParameters"] == {
            "learning-rate": "0.1",
            "nesterov": "true",
            "epochs": "3",
            "optimizer": "sgd",
        }

    def test_parameters_that_sagemaker_does_not_take_are_left_out(
        self, account: SageMakerPlace
    ) -> None:
        body = self.launch(account, params={"prompt": "two\nlines"})
        assert "HyperParameters" not in body

    def test_hyperparameters_that_sagemaker_does_not_take_are_refused(
        self, account: SageMakerPlace
    ) -> None:
        with pytest.raises(Refused, match="hyperparameters: SageMaker allows 100"):
            self.launch(account, options={"hyperparameters": {"prompt": "two\nlines"}})

    def test_subnets_need_security_groups_in_the_request(self, account: SageMakerPlace) -> None:
        table = {"subnets": "subnet-1, subnet-2", "security_groups": "sg-1"}
        body = self.launch(account, table=table)
        assert body["VpcConfig"] == {
            "Subnets": ["subnet-1", "subnet-2"],
            "SecurityGroupIds": ["sg-1"],
        }

    def test_a_quota_is_reported_as_one(self, account: SageMakerPlace) -> None:
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="training job usage"):
            self.launch(account)

    @pytest.mark.parametrize("name", ["role", "bucket"])
    def test_a_missing_setting_is_named(self, account: SageMakerPlace, name: str) -> None:
        self.check_missing(account, name)

    def test_a_job_without_an_image_is_refused(self, account: SageMakerPlace) -> None:
        with pytest.raises(Refused, match="image: no image is set"):
            self.launch(account, table={"image": ""})

    async def test_a_gang_on_several_pages_is_found_by_the_list_alone(
        self, account: SageMakerPlace
    ) -> None:
        harness = self.harness(account)
        gangs = [await harness.running(word) for word in ("one", "two", "three")]
        account.lose_records()
        harness.restart()
        seen = await harness.ours.gangs()
        assert [each.name for each in seen] == sorted(gang.name for gang in gangs)
        for gang in gangs:
            await harness.remove(gang.name)

    async def test_a_long_name_and_many_instances_are_one_job_after_a_lost_reply(
        self, account: SageMakerPlace
    ) -> None:
        harness = self.harness(account)
        gang = replace(await harness.spec("many"), name="g" * 38, nodes=100)
        account.fail(0, LaunchFault.LOST)
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        await account.settle()
        await harness.ours.launch(gang)
        assert len(account.api.bodies) == 1
        await harness.ours.remove(gang.name)

    async def test_an_interrupted_job_is_stopped_and_counts_as_preempted(
        self, account: SageMakerPlace
    ) -> None:
        """SageMaker would start it again by itself. It states the billable time once the job is
        stopped, so the bill has no time at the full price.
        """
        harness = self.harness(account)
        gang = await harness.running("taken", purchase=Purchase.SPOT)
        (job,) = [name for _, name in account.api.bodies]
        await account.wait(timedelta(hours=1))
        account.api.changes[job] = interrupted(account.cloud.time)
        account.api.billable = {"BillableTimeInSeconds": 600}
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs(gang.name)
        assert "sagemaker:StopTrainingJob" in account.api.calls
        assert account.billed() == 0
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        (node,) = seen.nodes
        assert node.started_at is not None
        assert node.ended_at is not None
        assert node.ended_at - node.started_at == timedelta(minutes=10)
        assert not node.unseen

    async def test_a_long_spot_job_is_reported_as_ended_after_its_end(
        self, account: SageMakerPlace
    ) -> None:
        """Its bill ends days before the job."""
        harness = self.harness(account)
        gang = await harness.running("long", purchase=Purchase.SPOT)
        await account.wait(timedelta(days=9))
        account.api.billable = {"BillableTimeInSeconds": 24 * 3600}
        await account.end(gang.name)
        for _ in range(3):
            await account.wait(timedelta(hours=1))
            (seen,) = await harness.ours.gangs(gang.name)
            assert seen.state is GangState.ENDED

    async def test_a_job_without_capacity_fails_later_and_costs_nothing(
        self, account: SageMakerPlace
    ) -> None:
        harness = self.harness(account)
        gang = await harness.launched("full")
        (job,) = [name for _, name in account.api.bodies]
        text = "CapacityError: Unable to provision requested ML compute capacity."
        account.api.changes[job] = {
            "TrainingJobStatus": "Failed",
            "SecondaryStatus": "Failed",
            "FailureReason": text,
        }
        await account.wait(timedelta(seconds=30))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert seen.nodes[0].started_at == seen.nodes[0].ended_at
        assert text in seen.reason
        await account.end(gang.name)

    async def keep_warm(self, harness: ContractHarness, account: SageMakerPlace) -> GangSpec:
        """A gang that has worked for an hour and was removed; its instances are kept."""
        gang = replace(
            await harness.spec("warm", purchase=Purchase.ON_DEMAND), options={"warm_s": 600}
        )
        await harness.launch(gang)
        await account.wait(timedelta(hours=1))
        await harness.ours.gangs(gang.name)
        await harness.ours.remove(gang.name)
        return gang

    async def end_of_bill(self, harness: ContractHarness, gang: GangSpec) -> datetime | None:
        """The end of the gang's bill; None if the gang has not ended."""
        (seen,) = await harness.ours.gangs(gang.name)
        (end,) = {each.ended_at for each in seen.nodes}
        assert (seen.state is GangState.ENDED) == (end is not None)
        return end

    async def test_a_warm_pool_is_on_the_bill_of_its_job(self, account: SageMakerPlace) -> None:
        harness = self.harness(account)
        gang, stopped = await self.keep_warm(harness, account), account.cloud.time
        for _ in range(2):
            assert await self.end_of_bill(harness, gang) is None
            await harness.ours.remove(gang.name)  # the control plane repeats it
            await account.wait(timedelta(minutes=4))
        await account.wait(timedelta(minutes=4))
        assert await self.end_of_bill(harness, gang) == stopped + timedelta(minutes=10)
        assert account.api.calls.count("sagemaker:StopTrainingJob") == 1
        assert "sagemaker:UpdateTrainingJob" not in account.api.calls

    async def test_a_warm_pool_can_be_ended(self, account: SageMakerPlace) -> None:
        """After the job has ended; a job that works is left alone."""
        harness = self.harness(account)
        working = await harness.running("working")
        gang, stopped = await self.keep_warm(harness, account), account.cloud.time
        await account.wait(timedelta(minutes=3))
        for each in (working, gang, gang):
            await harness.require(KEEPS_NODES).release(each.name)
        assert account.api.calls.count("sagemaker:UpdateTrainingJob") == 1
        assert await self.end_of_bill(harness, gang) == stopped + timedelta(minutes=3)
        assert await self.end_of_bill(harness, working) is None
        await harness.remove(working.name)

    async def test_a_warm_pool_that_the_next_job_takes_is_on_the_next_bill(
        self, account: SageMakerPlace
    ) -> None:
        harness = self.harness(account)
        gang, stopped = await self.keep_warm(harness, account), account.cloud.time
        await account.wait(timedelta(minutes=2))
        following = await harness.running("next")
        await account.wait(timedelta(minutes=5))
        assert await self.end_of_bill(harness, gang) == stopped + timedelta(minutes=2)
        assert await self.end_of_bill(harness, following) is None
        await harness.remove(following.name)

    async def use_all_calls(self, account: SageMakerPlace) -> None:
        harness = self.harness(account)
        gang = await self.keep_warm(harness, account)
        await harness.require(KEEPS_NODES).release(gang.name)


def test_a_spot_job_is_billed_for_its_billable_time() -> None:
    """https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html: the
    documented example has 500 seconds of training, of which 100 are billable.
    """
    told = {
        "TrainingJobName": "cv-a-b-0-1",
        "TrainingJobStatus": "Completed",
        "SecondaryStatus": "Completed",
        "CreationTime": START,
        "TrainingStartTime": START + timedelta(seconds=60),
        "TrainingEndTime": START + timedelta(seconds=560),
        "TrainingTimeInSeconds": 500,
        "BillableTimeInSeconds": 100,
    }
    assert read_job("us-east-1/cv-a-b-0-1", told) == ServiceJob(
        id="us-east-1/cv-a-b-0-1",
        name="cv-a-b-0-1",
        state=JobState.ENDED,
        started_at=START + timedelta(seconds=60),
        ended_at=START + timedelta(seconds=160),
    )


def test_the_entry_is_a_script_that_a_shell_understands(tmp_path: Path) -> None:
    """Its parts are joined again by the shell."""
    from cavvy.providers.managed.provider import make_entry

    script = "#!/bin/sh\n" + "".join(f"echo 'line {n}; $HOME \"x\"'\n" for n in range(200))
    entry = make_entry(script, 512)
    assert all(len(each) <= 256 for each in entry.command)
    done = subprocess.run(
        entry.command, env=dict(entry.environment), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f'line {n}; $HOME "x"' for n in range(200)]
