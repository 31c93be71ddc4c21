"""The Azure Batch provider keeps the contract, on a stand-in that checks every request and every
reply against Microsoft's package.
"""

import asyncio
import json
import re
from base64 import b64decode
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.azure_batch_stand_in import REGION, SPOT_USD, AzureBatchStandIn, BatchJob
from tests.proofs import Proof
from tests.providers.azure.contract.test_provider_azure import FileCredential
from tests.records import pick_prices

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import ProviderOptions, ResourceSpec, Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers import azure_batch
from cavvy.providers.azure_batch.service import AzureBatchService, find_start
from cavvy.providers.base import GangState, NoCapacity, ProviderContext, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud, make_provider
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("azure-batch", False, "a strict stand-in for an Azure Batch account")
CONTEXT = ProviderContext(installation="any", home=Path())
TRAITS = ManagedCloud(AzureBatchService(CONTEXT)).traits
ACCOUNT = f"train.{REGION}"
IMAGE = "docker.io/example/train:1"
T4 = "Standard_NC4as_T4_v3"
# https://learn.microsoft.com/azure/batch/batch-role-based-access-control: a job with its own pool
# needs the rights to make and delete pools
RIGHTS = {
    "create job": ("batchAccounts/jobs/write", "batchAccounts/pools/write"),
    "list jobs": ("batchAccounts/jobs/read",),
    "get job": ("batchAccounts/jobs/read",),
    "terminate job": ("batchAccounts/jobs/write", "batchAccounts/pools/delete"),
    "delete job": ("batchAccounts/jobs/delete",),
    "add tasks": ("batchAccounts/jobs/write",),
    "list tasks": ("batchAccounts/jobs/read",),
    "get pool": ("batchAccounts/pools/read",),
    "list nodes": ("batchAccounts/pools/read",),
    "prices": (),
}
TYPES = (T4, "Standard_D4s_v3", "Standard_ND96isr_MI300X_v5", "Standard_B2s")


read_prices = pick_prices(TYPES)


class AzureBatchPlace(RestPlace):
    """One Batch account, in which pools have spot machines."""

    api: AzureBatchStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        traits = replace(TRAITS, tags=True)
        super().__init__(azure_batch, traits, AzureBatchStandIn, server, home)
        # a job is listed until it is deleted
        self.cloud.traits = replace(self.cloud.traits, ended_listed=timedelta(days=30))

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        places: dict[str, Scalar] = {"account": ACCOUNT, "spot": True, "image": IMAGE}
        places |= {"endpoint": self.api.url, "prices_endpoint": self.api.url}
        context = self.make_context(installation, {**places, **table})
        service = AzureBatchService(context, lambda: FileCredential(self.file))
        made = make_provider(self.manifest, context, lambda context: service)
        self._providers.append(made)
        return made

    async def end(self, gang: str) -> None:
        for each in self.cloud.billed():
            self.cloud.change(each.id, ended=self.cloud.time)

    def newest(self) -> BatchJob:
        return list(self.api.jobs.values())[-1]


class TestAzureBatch(RestContract):
    package, traits, stand_in = azure_batch, TRAITS, AzureBatchStandIn
    make_place = AzureBatchPlace

    def launch(self, account: AzureBatchPlace, **changes: Any) -> BatchJob:
        """Launch a gang with these fields, and remove it; its job."""

        async def scenario() -> BatchJob:
            harness = account.harness()
            purchase, table = changes.pop("purchase", None), changes.pop("table", {})
            gang = replace(await harness.spec("shaped", purchase=purchase), **changes)
            provider = account.provider(gang.installation, **table)
            await provider.launch(gang)
            await provider.remove(gang.name)
            return account.newest()

        return asyncio.run(scenario())

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("a Batch account has no second job of one id")

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = asyncio.run(account.provider("ours").whoami())
        assert ("Batch account", "train") in facts
        assert ("region", REGION) in facts
        assert self.stand_in.key not in str(facts)

    def test_offers_have_azures_prices(self, account: AzureBatchPlace) -> None:
        """The catalog's on demand, and the public list's for spot, without Windows and without
        prices that are not lower.
        """
        offers = asyncio.run(account.provider("ours").offers())
        found = {(each.instance_type, each.purchase): each for each in offers}
        known = {
            (each.instance_type, each.purchase): each.rate
            for each in read_prices("azure")
            if each.region == REGION and each.instance_type in TYPES[:2]
        }
        spot = found.pop((T4, Purchase.SPOT))
        assert spot.rate.micros_per_hour == round(SPOT_USD[T4] * 1e6)
        assert spot.as_of == account.cloud.time.date()
        assert {key: each.rate for key, each in found.items()} == known
        assert {(each.provider, each.region) for each in offers} == {("azure-batch", REGION)}

    def test_without_the_setting_there_are_no_spot_offers(self, account: AzureBatchPlace) -> None:
        usual = asyncio.run(account.provider("ours", spot=False).offers())
        assert {each.purchase for each in usual} == {Purchase.ON_DEMAND}
        assert "prices" not in account.api.calls

    async def test_spot_prices_are_read_each_hour_and_kept_if_the_list_fails(
        self, account: AzureBatchPlace
    ) -> None:
        provider = account.provider("ours")
        for fails, minutes, calls in ((True, 10, 1), (False, 50, 2), (True, 10, 2)):
            account.api.prices_fail = fails
            sold = {each.purchase for each in await provider.offers()}
            assert (Purchase.SPOT in sold) == (calls > 1)
            assert account.api.calls.count("prices") == calls
            assert ("spot prices" in dict(await provider.whoami())) == (calls == 1)
            await account.wait(timedelta(minutes=minutes))
        sold = {each.purchase for each in await provider.offers()}
        assert sold == {Purchase.ON_DEMAND, Purchase.SPOT}
        assert account.api.calls.count("prices") == 3
        assert "cannot be read" in dict(await provider.whoami())["spot prices"]

    @pytest.mark.parametrize("name", ["", "train", "train.", "tr/ain.westeurope"])
    def test_the_account_has_a_name_and_a_region(self, account: RestPlace, name: str) -> None:
        with pytest.raises(Refused, match=r"account: .* is not the name and the region"):
            asyncio.run(account.provider("ours", account=name).offers())

    @pytest.mark.proves(PROOF, "image")
    def test_a_job_has_its_own_pool_and_a_task_that_starts_the_agent(
        self, account: AzureBatchPlace
    ) -> None:
        subnet = "/subscriptions/s/resourceGroups/g/providers/v/virtualNetworks/n/subnets/nodes"
        job = self.launch(
            account,
            purchase=Purchase.ON_DEMAND,
            longest=timedelta(hours=2),
            table={"subnet": subnet},
        )
        pool = job.body["poolInfo"]["autoPoolSpecification"]["pool"]
        assert "$TargetDedicatedNodes = tasks > 0 ? 1 : 0;" in pool["autoScaleFormula"]
        assert pool["networkConfiguration"] == {"subnetId": subnet}
        assert "enableInterNodeCommunication" not in pool
        assert job.body["constraints"] == {
            "maxTaskRetryCount": 0,  # restarts are the control plane's alone
            "maxWallClockTime": f"PT{4 * 3600 + 1}S",
        }
        (task,) = job.tasks.values()
        assert task["containerSettings"] == {
            "imageName": IMAGE,
            "containerRunOptions": "--ipc=host",
        }
        values = {each["name"]: each["value"] for each in job.body["commonEnvironmentSettings"]}
        script = b64decode(values["CAVVY_PROGRAM"]).decode()
        assert "cavvy_fetch" in script
        assert "claim-" not in script  # tokens are fetched, and not shown in the portal
        assert {each["name"] for each in job.body["metadata"]} == {
            "cavvy-installation",
            "cavvy-gang",
        }

    def test_a_gang_has_one_task_for_each_node(self, account: AzureBatchPlace) -> None:
        job = self.launch(account, nodes=3, purchase=Purchase.SPOT)
        pool = job.body["poolInfo"]["autoPoolSpecification"]["pool"]
        assert "$TargetLowPriorityNodes = tasks > 0 ? 3 : 0;" in pool["autoScaleFormula"]
        assert pool["enableInterNodeCommunication"] is True
        assert list(job.tasks) == ["0", "1", "2"]
        for rank, task in job.tasks.items():
            assert task["environmentSettings"] == [{"name": "CAVVY_NODE_INDEX", "value": rank}]
            options = task["containerSettings"]["containerRunOptions"]
            assert options == "--ipc=host --network=host"

    async def test_tasks_that_a_lost_reply_left_out_are_added(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        """The job was made and the server stopped before it added the tasks."""
        gang = await harness.running("halved", nodes=3)
        job = account.newest()
        del job.tasks["0"], job.tasks["2"]
        await harness.ours.gangs(gang.name)
        assert sorted(job.tasks) == ["0", "1", "2"]
        await harness.remove(gang.name)

    async def test_a_job_whose_tasks_have_ended_loses_its_machines(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        """Azure Batch keeps a job active after its last task."""
        gang = await harness.running("done", nodes=2)
        job = account.newest()
        for rank in range(2):
            changed = {"state": "completed", "previousState": "running"}
            job.changes[f"task {rank}"] = changed
            await account.wait(timedelta(minutes=1))
            await harness.ours.gangs(gang.name)
            assert ("terminate job" in account.api.calls) == (rank == 1)
        assert account.billed() == 0
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, False)

    @pytest.mark.parametrize("how", ["node", "task"])
    async def test_a_spot_machine_that_is_taken_back_ends_the_job(
        self, account: AzureBatchPlace, harness: ContractHarness, how: str
    ) -> None:
        """Azure Batch would start the task again on another machine."""
        gang = await harness.running("taken", purchase=Purchase.SPOT)
        job, at = account.newest(), account.cloud.time
        since = {"stateTransitionTime": at.isoformat()}
        if how == "node":
            job.changes["node 0"] = {"state": "preempted", **since}
        else:
            job.changes["task 0"] = {"state": "active", "previousState": "running", **since}
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs(gang.name)
        assert "terminate job" in account.api.calls
        assert account.billed() == 0
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        assert seen.nodes[0].ended_at == at
        assert "Azure reclaimed a spot machine" in seen.reason

    async def test_a_pool_that_gets_no_machines_has_no_capacity(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("full")
        job = account.newest()
        job.changes["nodes"] = {"none": True}
        error = {"code": "AllocationTimedOut", "message": "Desired nodes were not allocated."}
        job.changes["pool"] = {"allocationState": "steady", "resizeErrors": [error]}
        for _ in range(2):
            await account.wait(timedelta(seconds=30))
            (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert "AllocationTimedOut" in seen.reason
        assert account.billed() == 0

    async def test_a_job_whose_pool_exceeds_the_quota_has_no_capacity(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("quota")
        job, at = account.newest(), account.cloud.time
        error = {
            "category": "usererror",
            "code": "AutoPoolCreationFailedWithQuotaReached",
            "message": "The pool quota for the account is reached.",
        }
        job.changes["job"] = {"executionInfo": {"schedulingError": error}}
        for each in account.cloud.billed():
            account.cloud.change(each.id, ended=at)
        await account.wait(timedelta(seconds=30))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)

    async def test_a_node_that_cannot_start_the_image_ends_the_job(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("broken")
        errors = [{"code": "ContainerInvalidImage", "message": "The image is not found."}]
        account.newest().changes["node 0"] = {"state": "unusable", "errors": errors}
        for _ in range(2):
            await account.wait(timedelta(seconds=30))
            (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, False)
        assert "ContainerInvalidImage" in seen.reason

    def test_an_account_without_room_for_a_pool_has_no_capacity(
        self, account: AzureBatchPlace
    ) -> None:
        account.api.fail = lambda request: (
            (CloudFault(409, "PoolQuotaReached", "Pool quota reached."), False)
            if request.method == "POST" and request.path == "/jobs"
            else None
        )
        with pytest.raises(NoCapacity, match="PoolQuotaReached"):
            self.launch(account)

    async def test_jobs_that_ended_long_ago_are_deleted(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("old")
        await account.end(gang.name)
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs()
        (name,) = account.api.jobs
        assert account.api.deleted == []
        await account.wait(timedelta(hours=7))
        await harness.ours.gangs()
        assert account.api.deleted == [name]

    def test_a_job_without_an_image_is_refused(self, account: AzureBatchPlace) -> None:
        with pytest.raises(Refused, match="image: no image is set"):
            self.launch(account, table={"image": ""})
        task, without = TaskSpec(name="t", run="true"), account.provider("ours", image="")
        (objection,) = without.check(task)
        assert objection.field == "image"
        own = ProviderOptions(provider="azure-batch", values=json.dumps({"image": IMAGE}))
        for each in (
            replace(task, image=IMAGE),
            replace(task, resources=ResourceSpec(options=(own,))),
        ):
            assert without.check(each) == []
        assert account.provider("ours").check(task) == []

    async def test_only_the_calls_of_the_rights_are_made(
        self, account: AzureBatchPlace, harness: ContractHarness
    ) -> None:
        """The rights are in the guide, and `cavvy check` prints them."""
        await account.provider("ours").gangs()
        await self.test_jobs_that_ended_long_ago_are_deleted(account, harness)
        await self.test_a_pool_that_gets_no_machines_has_no_capacity(account, harness)
        needed = {right for each in account.api.calls for right in RIGHTS[each]}
        guide = (Path(__file__).parents[4] / "docs/guides/azure-batch.md").read_text()
        granted = set(re.findall(r"`(batchAccounts/[\w/]+)`", guide))
        assert granted == needed
        told = azure_batch.MANIFEST.rights
        for name in ("pools", "jobs"):
            assert f"batchAccounts/{name}/read, write and delete" in told


def test_the_start_of_a_bill_is_the_first_nodes_allocation() -> None:
    nodes = [{"allocationTime": f"2026-11-01T12:0{minute}:00Z"} for minute in (4, 2, 3)]
    assert find_start([]) is None
    assert find_start(nodes) == datetime.fromisoformat("2026-11-01T12:02:00Z")
