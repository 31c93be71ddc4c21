"""The Azure Machine Learning provider keeps the contract, on a stand-in that checks every request
and every reply against Azure's published API.
"""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.azureml_description import GROUP, SUBSCRIPTION, WORKSPACE
from tests.contract.azureml_stand_in import LOW_USD, PREEMPTED, ROOT, AzureMlStandIn
from tests.proofs import Proof
from tests.providers.azure.contract.test_provider_azure import FileCredential
from tests.records import pick_prices

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers import azureml, base
from cavvy.providers.azureml import MANIFEST
from cavvy.providers.azureml.jobs import AzureMlService, read_job
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud, make_provider
from cavvy.providers.managed.service import JobState
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.records import make_mark

PROOF = Proof("azureml", False, "a strict stand-in for Azure Machine Learning's command jobs")
START = datetime(2026, 11, 1, 12, tzinfo=UTC)
SETTINGS = check_settings(MANIFEST, {})
CONTEXT = base.ProviderContext(installation="any", home=Path(), settings=SETTINGS)
TRAITS = ManagedCloud(AzureMlService(CONTEXT)).traits
IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-ubuntu20.04"
TYPES = ("Standard_DS3_v2", "Standard_DS5_v2", "Standard_NC4as_T4_v3")
SPOT = Purchase.SPOT


read_prices = pick_prices(TYPES)


class AzureMlPlace(RestPlace):
    """One workspace."""

    api: AzureMlStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(azureml, replace(TRAITS, tags=True), AzureMlStandIn, server, home)
        self.published: list[bytes] = []  # what containers fetch
        # jobs are listed until they are archived
        self.cloud.traits = replace(self.cloud.traits, ended_listed=timedelta(days=30))

    def service(
        self, installation: str, **table: Scalar
    ) -> tuple[AzureMlService, base.ProviderContext]:
        places: dict[str, Scalar] = {
            "endpoint": self.api.url,
            "history_endpoint": self.api.url,
            "prices_endpoint": self.api.url,
            "subscription": SUBSCRIPTION,
            "resource_group": GROUP,
            "workspace": WORKSPACE,
            "image": IMAGE,
        }
        context = self.make_context(installation, {**places, **table})
        node_endpoint = replace(make_node_endpoint(), publish=self._publish)
        context = replace(context, node_endpoint=node_endpoint)
        return AzureMlService(context, lambda: FileCredential(self.file)), context

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        service, context = self.service(installation, **table)
        made = make_provider(MANIFEST, context, lambda context: service)
        self._providers.append(made)
        return made

    def _publish(self, content: bytes) -> str:
        self.published.append(content)
        return "3" * 64

    async def end(self, gang: str) -> None:
        for each in self.cloud.billed():
            self.cloud.change(each.id, ended=self.cloud.time)


class TestAzureMl(RestContract):
    package, traits, stand_in = azureml, TRAITS, AzureMlStandIn
    make_place = AzureMlPlace

    def launch(self, account: AzureMlPlace, **changes: Any) -> dict[str, Any]:
        """Launch a gang with these fields, and remove it; the properties of its job."""

        async def scenario() -> None:
            harness = account.harness()
            purchase = changes.pop("purchase", None)
            cluster = changes.pop("cluster", "")
            table = changes.pop("table", {})
            gang = replace(await harness.spec("shaped", purchase=purchase), **changes)
            if cluster:
                offers = await harness.ours.offers()
                offer = next(each for each in offers if each.zone == cluster)
                gang = replace(gang, offer=offer)
            provider = account.provider(gang.installation, **table)
            await provider.launch(gang)
            await provider.remove(gang.name)

        asyncio.run(scenario())
        (job,) = account.api.jobs.values()
        properties: dict[str, Any] = job.body["properties"]
        return properties

    @pytest.mark.proves(PROOF, "image")
    def test_a_job_runs_in_its_own_image(self, account: AzureMlPlace) -> None:
        image = "docker.io/library/python:3.12"
        used = self.launch(account, image=image)["environmentId"]
        assert account.api.environments[used.rsplit("/", 1)[1]] == image

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("the names of jobs are unique in a workspace")

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = dict(asyncio.run(account.provider("ours").whoami()))
        assert facts["workspace"] == WORKSPACE
        assert "idle nodes for PT20M" in facts["cluster gpu-low"]
        assert (
            "free: Azure's price list has no low-priority price" in facts["clusters without offers"]
        )
        assert "unpriced: the catalog has no price" in facts["clusters without offers"]
        assert "old: the machines run Windows" in facts["clusters without offers"]
        assert "k8s" not in str(facts)
        assert self.stand_in.key not in str(facts)

    def test_each_cluster_is_an_offer(self, account: AzureMlPlace) -> None:
        """Dedicated machines have the catalog's prices. Those with low priority have prices of
        their own in Azure's list.
        """
        offers = {each.zone: each for each in asyncio.run(account.provider("ours").offers())}
        assert set(offers) == {"cpu", "gpu", "gpu-low", "tiny"}
        known = {
            each.instance_type: each for each in read_prices("azure") if each.region == "eastus"
        }
        assert offers["gpu"].rate == known["Standard_NC4as_T4_v3"].rate
        assert offers["gpu"].as_of == known["Standard_NC4as_T4_v3"].as_of
        low = offers["gpu-low"]
        assert (low.purchase, low.rate.micros_per_hour) == (SPOT, round(LOW_USD * 1e6))
        assert low.as_of == account.cloud.time.date()
        assert "low priority" in low.source
        for each in offers.values():
            assert (each.provider, each.region) == ("azureml", "eastus")

    def test_clusters_are_chosen_by_patterns(self, account: AzureMlPlace) -> None:
        offers = asyncio.run(account.provider("ours", clusters="gpu*").offers())
        assert {each.zone for each in offers} == {"gpu", "gpu-low"}

    def test_without_the_price_list_dedicated_clusters_are_offered(
        self, account: AzureMlPlace
    ) -> None:
        account.api.prices_fail = True
        provider = account.provider("ours")
        assert {each.zone for each in asyncio.run(provider.offers())} == {"cpu", "gpu", "tiny"}
        facts = dict(asyncio.run(provider.whoami()))
        assert "gpu-low: the low-priority price" in facts["clusters without offers"]

    def test_a_job_starts_the_agent_and_has_the_settings(self, account: AzureMlPlace) -> None:
        job = self.launch(account, cluster="gpu", longest=timedelta(hours=2))
        assert job["computeId"] == f"{ROOT}/computes/gpu"
        version = job["environmentId"].rpartition("/")[2]
        assert account.api.environments == {version: IMAGE}
        assert job["limits"] == {"jobLimitsType": "Command", "timeout": f"PT{3 * 3600 + 1}S"}
        assert job["resources"] == {"instanceCount": 1, "shmSize": f"{28 * 1024}m"}
        assert "distribution" not in job
        assert job["experimentName"] == "cavvy"
        assert {"cavvy-installation", "cavvy-gang"} < set(job["tags"])
        assert "claim-" not in json.dumps(job)  # tokens are fetched, and not shown in the studio

    async def test_an_environment_is_made_once(
        self, account: AzureMlPlace, harness: ContractHarness
    ) -> None:
        """A restarted server finds it."""
        for word in ("one", "two"):
            gang = await harness.spec(word)
            provider = account.provider(gang.installation)
            await provider.launch(gang)
            await provider.remove(gang.name)
        assert len(account.api.jobs) == 2
        assert account.api.calls.count("make environment") == 1

    def test_agents_poll_azures_scheduled_events(self, account: AzureMlPlace) -> None:
        """They announce the loss of a node with low priority."""
        self.launch(account, purchase=SPOT)
        assert b"metadata/scheduledevents" in b"".join(account.published)

    def test_a_gang_is_one_job_with_a_process_on_each_node(self, account: AzureMlPlace) -> None:
        job = self.launch(account, nodes=3)
        assert job["resources"]["instanceCount"] == 3
        assert job["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
        assert job["command"].startswith("unset RANK WORLD_SIZE ")

    def test_a_gang_larger_than_its_cluster_has_no_capacity(self, account: AzureMlPlace) -> None:
        with pytest.raises(base.NoCapacity, match="at most 1 nodes, and the job needs 2"):
            self.launch(account, cluster="tiny", nodes=2)

    def test_data_assets_are_mounted(self, account: AzureMlPlace) -> None:
        job = self.launch(account, options={"data": "digits=azureml:digits:1, more=azureml:x-y:2"})
        assert job["inputs"]["more"] == {
            "jobInputType": "uri_folder",
            "uri": f"{ROOT}/data/x-y/versions/2",
            "mode": "ReadOnlyMount",
        }
        assert 'export AZUREML_DATA_digits="${{inputs.digits}}"\n' in job["command"]

    @pytest.mark.parametrize("named", ["digits", "digits=az://b/c", "a-b=azureml:x:1"])
    def test_a_data_asset_needs_a_name_and_a_version(
        self, account: AzureMlPlace, named: str
    ) -> None:
        with pytest.raises(
            base.Refused,
            match=r"resources.options.azureml.data: .* is not of the form NAME=azureml:ASSET:VERSION",
        ):
            self.launch(account, options={"data": named})

    @pytest.mark.parametrize("fails", [True, False])
    @pytest.mark.parametrize("restarted", [True, False])
    async def test_a_job_whose_nodes_were_taken_back_counts_as_preempted(
        self, account: AzureMlPlace, harness: ContractHarness, fails: bool, restarted: bool
    ) -> None:
        """Azure fails the job, or starts it again on other nodes; then Cavvy cancels it. A server
        that was restarted in between knows from the run history that the job ran.
        """
        gang = await harness.running("taken", purchase=SPOT)
        (name,) = account.api.jobs
        if restarted:
            harness.restart()
        if fails:
            account.api.preempt(name)
            await account.end(gang.name)
        else:
            account.api.statuses[name] = "Queued"
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs(gang.name)
        account.api.statuses.pop(name, None) if not fails else None
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (base.GangState.ENDED, True)
        assert ("pre-empted" if fails else "reclaimed the job's nodes") in seen.reason
        assert ("cancel" in account.api.calls) == (not fails)
        assert account.billed() == 0

    def test_a_quota_of_the_cluster_is_reported_before_a_job_waits_for_ever(
        self, account: AzureMlPlace
    ) -> None:
        account.api.quota = 0
        with pytest.raises(base.QuotaTooSmall, match="ClusterCoreQuotaReached"):
            self.launch(account)
        assert account.api.jobs == {}

    def test_a_job_without_an_image_is_refused(self, account: AzureMlPlace) -> None:
        with pytest.raises(base.Refused, match="image: no image is set"):
            self.launch(account, table={"image": ""})

    @pytest.mark.parametrize("name", ["workspace", "resource_group"])
    def test_the_workspace_must_be_named_and_exist(self, account: AzureMlPlace, name: str) -> None:
        with pytest.raises(base.Refused, match=rf"\[providers.azureml\] {name}: not set"):
            asyncio.run(account.provider("ours", **{name: ""}).offers())

    def test_errors_of_the_account_name_this_provider(self, account: AzureMlPlace) -> None:
        account.api.fail = lambda _: (
            CloudFault(404, "ResourceGroupNotFound", "no such group"),
            False,
        )
        with pytest.raises(
            base.Refused, match=r"\[providers.azureml\] resource_group: the resource group"
        ):
            asyncio.run(account.provider("ours").offers())

    async def test_the_jobs_of_another_installation_are_not_listed(
        self, account: AzureMlPlace
    ) -> None:
        gang = await account.harness().running("mine")
        ours, _ = account.service(gang.installation)
        theirs, _ = account.service("theirs")
        assert [job.state for job in await ours.list()] == [JobState.RUNNING]
        assert await theirs.list() == []
        assert account.api.tags[-1] == f"cv-{make_mark('theirs')}"
        for each in (ours, theirs):
            each.close()
        await account.end(gang.name)

    @pytest.mark.parametrize("refused", [False, True])
    async def test_jobs_that_ended_long_ago_are_archived(
        self, account: AzureMlPlace, harness: ContractHarness, refused: bool
    ) -> None:
        """Otherwise each poll would list all jobs that there ever were. If the service refuses,
        polls go on, and the next attempt is an hour later.
        """
        gang = await harness.running("old", purchase=SPOT)
        await account.end(gang.name)
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs()
        assert account.api.archived == []
        if refused:
            account.api.archive_fault = CloudFault(400, "UserError", "not now")
        await account.wait(timedelta(hours=7))
        made = account.api.calls.count("make job")
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            await harness.ours.gangs()
        assert account.api.calls.count("make job") == made + 1
        assert account.api.archived == ([] if refused else list(account.api.jobs))
        service, _ = account.service(gang.installation)
        await service.offers()
        await service.list()
        facts = dict(service.identity())
        assert ("jobs that cannot be archived" in facts) == refused
        service.close()
        account.api.archive_fault = None
        await account.wait(timedelta(hours=1))
        await harness.ours.gangs()
        assert account.api.archived == list(account.api.jobs)

    def test_a_poll_archives_a_few_jobs_only(self, account: AzureMlPlace) -> None:
        async def scenario() -> None:
            harness = account.harness()
            for number in range(3):
                gang = await harness.running(f"old{number}")
                await account.end(gang.name)
                await account.wait(timedelta(minutes=1))
            await account.wait(timedelta(hours=7))
            for archived in (2, 3, 3):
                await account.wait(timedelta(minutes=1))
                await harness.ours.gangs()
                assert len(account.api.archived) == archived

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cavvy.providers.azureml.jobs._ARCHIVED", 2)
            asyncio.run(scenario())

    def test_sizes_are_offered_with_both_priorities(self, account: AzureMlPlace) -> None:
        provider = account.provider("ours", sizes="Standard_*", clusters="none")
        offers = asyncio.run(provider.offers())
        assert {(each.instance_type, each.purchase, each.zone) for each in offers} == {
            ("Standard_DS3_v2", Purchase.ON_DEMAND, None),
            ("Standard_NC4as_T4_v3", Purchase.ON_DEMAND, None),
            ("Standard_NC4as_T4_v3", SPOT, None),
        }
        (low,) = [each for each in offers if each.purchase is SPOT]
        assert low.rate.micros_per_hour == round(LOW_USD * 1e6)
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["clusters without offers"] == "sizes without a known price: standard_z9"
        account.api.prices_fail = True
        provider = account.provider("ours", sizes="Standard_NC*", clusters="none")
        (usual,) = asyncio.run(provider.offers())
        assert usual.purchase is Purchase.ON_DEMAND

    @pytest.mark.parametrize("purchase", [Purchase.ON_DEMAND, SPOT])
    async def test_a_cluster_is_created_for_a_size_and_removed(
        self, account: AzureMlPlace, harness: ContractHarness, purchase: Purchase
    ) -> None:
        """It has no nodes without jobs. It serves the next gang, and is kept as long as a job uses
        it, also by a server that has been restarted and by one with another setting.
        """
        table = {"sizes": "Standard_NC*", "clusters": "none"}
        gang = await harness.spec("first")
        provider = account.provider(gang.installation, **table)
        offer = next(each for each in await provider.offers() if each.purchase is purchase)
        gang = replace(gang, offer=offer, nodes=2)
        with pytest.raises(base.TryAgain, match="Azure creates the compute cluster"):
            await provider.launch(gang)
        with pytest.raises(base.TryAgain):  # as long as the cluster is not ready
            await provider.launch(gang)
        assert account.api.jobs == {}
        ((name, (body, _)),) = account.api.made.items()
        inner = body["properties"]["properties"]
        assert inner["scaleSettings"] == {
            "minNodeCount": 0,
            "maxNodeCount": 100,
            "nodeIdleTimeBeforeScaleDown": "PT2M",
        }
        assert inner["vmPriority"] == ("LowPriority" if purchase is SPOT else "Dedicated")
        assert inner["remoteLoginPortPublicAccess"] == "Disabled"
        await account.wait(timedelta(minutes=1))
        await provider.launch(gang)
        (job,) = account.api.jobs.values()
        assert job.body["properties"]["computeId"] == f"{ROOT}/computes/{name}"
        for installation in ("theirs", gang.installation):
            other = account.provider(installation)  # without `sizes`, and does not offer it
            assert name not in {each.zone for each in await other.offers()}
            await account.wait(timedelta(hours=2))
            await other.gangs()
            assert list(account.api.made) == [name]
        facts = dict(await provider.whoami())
        assert "at most 100 nodes" in facts[f"cluster {name}"]
        await provider.remove(gang.name)
        await account.wait(timedelta(minutes=31))
        await provider.gangs()
        second = replace(gang, name=f"{gang.name}-b", nodes=1)
        await provider.launch(second)
        assert len(account.api.made) == 1
        await provider.remove(second.name)
        for kept in (1, 0):
            await account.wait(timedelta(minutes=45))
            await provider.gangs()
            assert len(account.api.made) == kept
        assert account.billed() == 0

    async def test_a_cluster_without_a_job_is_removed_by_a_restarted_server(
        self, account: AzureMlPlace, harness: ContractHarness
    ) -> None:
        """Its reply may have been lost, or the gang removed before the cluster was ready."""
        table = {"sizes": "Standard_NC*", "clusters": "none"}
        gang = await harness.spec("gone")
        provider = account.provider(gang.installation, **table)
        gang = replace(gang, offer=(await provider.offers())[0])
        with pytest.raises(base.TryAgain):
            await provider.launch(gang)
        await provider.remove(gang.name)
        provider = account.provider(gang.installation)
        await provider.gangs()
        assert len(account.api.made) == 1  # it is new
        await account.wait(timedelta(hours=1, minutes=1))
        await account.provider("theirs").gangs()
        assert len(account.api.made) == 1
        await provider.gangs()
        assert account.api.made == {}

    @pytest.mark.parametrize("code", ["ClusterCoreQuotaReached", "InternalServerError"])
    async def test_a_cluster_that_azure_fails_to_create_is_deleted(
        self, account: AzureMlPlace, harness: ContractHarness, code: str
    ) -> None:
        gang = await harness.spec("failed")
        provider = account.provider(gang.installation, sizes="Standard_NC*", clusters="none")
        gang = replace(gang, offer=(await provider.offers())[0])
        with pytest.raises(base.TryAgain):
            await provider.launch(gang)
        account.api.creation_error = {"code": code, "message": "no"}
        await account.wait(timedelta(minutes=1))
        with pytest.raises(base.QuotaTooSmall if "Quota" in code else base.NoCapacity, match=code):
            await provider.launch(gang)
        assert (account.api.made, account.api.jobs) == ({}, {})
        account.api.creation_error = {}
        with pytest.raises(base.TryAgain):
            await provider.launch(gang)
        await account.wait(timedelta(minutes=1))
        await provider.launch(gang)
        await provider.remove(gang.name)

    async def test_a_cluster_that_a_person_changed_gets_no_job_and_is_not_deleted(
        self, account: AzureMlPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("changed")
        provider = account.provider(gang.installation, sizes="Standard_NC*", clusters="none")
        gang = replace(gang, offer=(await provider.offers())[0])
        with pytest.raises(base.TryAgain):
            await provider.launch(gang)
        ((name, (body, at)),) = account.api.made.items()
        account.api.made[name] = {**body, "tags": {}}, at
        await account.wait(timedelta(hours=2))
        with pytest.raises(base.NoCapacity, match="a person has created or changed the cluster"):
            await provider.launch(gang)
        await provider.gangs()
        assert list(account.api.made) == [name]

    def test_only_the_calls_of_the_rights_are_made(self, account: AzureMlPlace) -> None:
        self.launch(account)
        asyncio.run(account.provider("ours").gangs())
        made = {each for each in account.api.calls if not each.startswith("make ")}
        assert made <= {
            "workspace",
            "computes",
            "compute",
            "environment",
            "jobs",
            "job",
            "cancel",
        } | {"run"}
        guide = (Path(__file__).parents[4] / "docs/guides/azureml.md").read_text()
        granted = set(re.findall(r"`(workspaces/[\w/]+)`", guide))
        assert granted == {
            "workspaces/read",
            "workspaces/computes/read",
            "workspaces/computes/write",
            "workspaces/computes/delete",
            "workspaces/environments/versions/read",
            "workspaces/environments/versions/write",
            "workspaces/jobs/read",
            "workspaces/jobs/write",
            "workspaces/jobs/cancel/action",
            "workspaces/experiments/runs/read",
        }


def job_with(status: str) -> dict[str, Any]:
    return {
        "name": "cv-a-b-0-1",
        "properties": {"status": status},
        "systemData": {"lastModifiedAt": "2026-11-01T12:30:00Z"},
    }


def test_states_are_read() -> None:
    """https://learn.microsoft.com/rest/api/azureml/jobs/get#jobstatus"""
    for status in ("NotStarted", "Starting", "Provisioning", "Preparing", "Queued"):
        job = read_job(job_with(status), {})
        assert (job.id, job.state, job.started_at) == ("cv-a-b-0-1", JobState.WAITING, None)
    ran = {"startTimeUtc": "2026-11-01T12:05:00.1234567+00:00"}
    begun = START + timedelta(minutes=5, microseconds=123456)
    assert read_job(job_with("Queued"), ran).state is JobState.RECLAIMED
    for status in ("Running", "Finalizing", "CancelRequested", "NotResponding", "Unknown"):
        job = read_job(job_with(status), ran)
        assert (job.state, job.started_at) == (JobState.RUNNING, begun)
    assert read_job(job_with("CancelRequested"), {}).state is JobState.WAITING
    for status in ("Completed", "Failed", "Canceled"):
        job = read_job(job_with(status), ran | {"endTimeUtc": "2026-11-01T12:20:00"})
        assert (job.state, job.ended_at) == (JobState.ENDED, START + timedelta(minutes=20))
        assert (bool(job.reason), job.preempted) == (status != "Completed", False)
        # a job that never ran was not billed
        job = read_job(job_with(status), {})
        assert job.started_at == job.ended_at == START + timedelta(minutes=30)
    error = {"error": {"error": {"code": "UserError", "message": PREEMPTED}}}
    assert read_job(job_with("Failed"), ran | error).preempted
