"""The provider for notebook instances of SageMaker keeps the contract, by real boto3 over a stand-in
that checks requests and replies against botocore's model.
"""

import asyncio
from collections.abc import Mapping
from datetime import timedelta

import pytest
from tests.contract.aws_contract import CONTEXT, AwsContract, StagedPlace, check_times, tell
from tests.contract.only_sessions import check_only_sessions
from tests.contract.sagemaker_notebooks_stand_in import FULL, NotebooksStandIn, read_last_command
from tests.contract.sagemaker_stand_in import ROLE
from tests.proofs import Proof
from tests.records import words_of

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import (
    GangState,
    QuotaTooSmall,
)
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState
from cavvy.providers.sagemaker_notebooks import MANIFEST, NotebookInstances

PROOF = Proof(
    "sagemaker-notebooks", False, "a strict stand-in for notebook instances, by real boto3"
)
TRAITS = ManagedCloud(NotebookInstances(CONTEXT)).traits
TABLE: Mapping[str, Scalar] = {"role": ROLE}


class NotebooksPlace(StagedPlace):
    api: NotebooksStandIn


class TestSageMakerNotebooks(AwsContract[NotebooksPlace]):
    traits, manifest, stand_in, service = TRAITS, MANIFEST, NotebooksStandIn, NotebookInstances
    place_type = NotebooksPlace
    table = TABLE
    guide = "notebooks"

    def test_offers_have_the_prices_of_notebooks(self, account: NotebooksPlace) -> None:
        provider = account.provider("ours", regions="us-east-1")
        offers = asyncio.run(provider.offers())
        assert {(o.instance_type, o.purchase, o.rate.micros_per_hour) for o in offers} == {
            ("ml.m5.xlarge", "on-demand", 230_000),
            ("ml.g4dn.xlarge", "on-demand", 736_400),
        }
        assert {each.source for each in offers} == {"AWS Price List API, SageMaker notebook"}
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["instance types that are not in the catalog"] == "ml.z9.large"

    def test_a_notebook_starts_the_agent_and_has_the_settings(
        self, account: NotebooksPlace
    ) -> None:
        table = {
            "subnet": "subnet-1",
            "security_groups": "sg-1, sg-2",
            "platform": "notebook-al2023-v1",
        }

        async def scenario() -> tuple[str, dict[str, str]]:
            harness = self.harness(account)
            gang = replace(await harness.spec("shaped"), disk_gib=200)
            provider = account.provider(gang.installation, **table)
            await provider.launch(gang)
            await account.settle()
            ((region, name),) = account.api.bodies
            script = account.api.script_of(region, name)
            facts = dict(await provider.whoami())
            await provider.remove(gang.name)
            await account.settle()
            return script, facts

        script, facts = asyncio.run(scenario())
        (((region, name), body),) = account.api.bodies.items()
        assert (body["RoleArn"], body["InstanceType"]) == (ROLE, "ml.m5.xlarge")
        assert (body["VolumeSizeInGB"], body["PlatformIdentifier"]) == (200, table["platform"])
        assert (body["SubnetId"], body["SecurityGroupIds"]) == ("subnet-1", ["sg-1", "sg-2"])
        assert {each["Key"] for each in body["Tags"]} == {"cavvy-installation", "cavvy-gang"}
        assert "CAVVY_CONTAINER_RANK=0" in script
        assert "/home/ec2-user/anaconda3/envs/JupyterSystemEnv/bin" in script
        assert "claim-" not in script  # tokens are fetched, and not shown in the console
        stop = f"aws sagemaker stop-notebook-instance --region {region}"
        assert read_last_command(script) == [*stop.split(), "--notebook-instance-name", name]
        address = f"https://{name}.notebook.{region}.sagemaker.aws"
        assert facts[f"notebook {region}/{name}"] == address

    async def test_a_notebook_is_stopped_and_then_deleted_with_its_disk(
        self, account: NotebooksPlace
    ) -> None:
        """It cannot be stopped while it starts. Its bill ends with the stop."""
        harness = self.harness(account)
        gang = await harness.launched("steps")
        await harness.ours.remove(gang.name)
        assert account.billed() == 1
        steps = []
        for _ in range(4):
            await account.wait(timedelta(minutes=1))
            seen = await harness.one(gang.name)
            steps.append((account.billed(), len(account.cloud.billed()), seen.state))
        assert steps == [
            (0, 1, GangState.RUNNING),
            (0, 0, GangState.RUNNING),
            (0, 0, GangState.ENDED),
            (0, 0, GangState.ENDED),
        ]
        (node,) = (await harness.one(gang.name)).nodes
        assert node.started_at is not None
        assert node.ended_at == node.started_at + timedelta(minutes=1)
        assert not node.unseen

    def test_a_notebook_that_a_person_stops_ends_its_session(self, account: NotebooksPlace) -> None:
        async def scenario() -> str:
            harness = self.harness(account)
            gang = await harness.running("stopped")
            ((region, name),) = account.api.bodies
            account.api.StopNotebookInstance(region, {"NotebookInstanceName": name})
            stopped = account.cloud.time
            await account.settle()
            seen = await harness.one(gang.name)
            assert (seen.state, seen.nodes[0].ended_at) == (GangState.ENDED, stopped)
            return seen.reason

        assert "was stopped" in asyncio.run(scenario())

    def test_a_notebook_without_capacity_fails_later_and_costs_nothing(
        self, account: NotebooksPlace
    ) -> None:
        self.check_failed_start(account, FULL, full=True)

    async def test_scripts_without_a_notebook_are_deleted_later(
        self, account: NotebooksPlace
    ) -> None:
        """Also those of a notebook that was refused; scripts of others are left alone."""
        other = {"CreationTime": 0.0}
        account.api.scripts["us-east-1", "cv-other"] = other
        harness = self.harness(account)
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="notebook instance usage"):
            await harness.launch(await harness.spec("refused"))
        account.api.quota = 1
        gang = await harness.running("kept")
        assert len(account.api.scripts) == 3
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        assert len(account.api.scripts) == 2
        await harness.remove(gang.name)
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        assert account.api.scripts == {("us-east-1", "cv-other"): other}

    def test_a_missing_role_is_named(self, account: NotebooksPlace) -> None:
        self.check_missing(account, "role")

    def test_tasks_that_are_no_sessions_are_refused(self, account: NotebooksPlace) -> None:
        check_only_sessions(account.provider("ours"))

    async def use_all_calls(self, account: NotebooksPlace) -> None:
        await super().use_all_calls(account)
        assert account.api.scripts == {}


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            JobState.WAITING: "Pending",
            JobState.RUNNING: "InService InMaintenance",
            JobState.RECLAIMED: "Stopping Stopped Failed",
            JobState.ENDED: "Deleting",
        }
    ),
)
def test_states_of_notebook_instances_are_read(status: str, state: JobState) -> None:
    job = NotebookInstances.read("us-east-1/cv-a-b-0-1", tell("NotebookInstance", status))
    check_times(job, status, state)
