"""The provider for instances of Vertex AI Workbench keeps the contract, on a stand-in that checks
every request and every reply against Google's discovery document.
"""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gcp_stand_in import PROJECT
from tests.contract.google_contract import ServiceAccountContract
from tests.contract.only_sessions import check_only_sessions
from tests.contract.workbench_stand_in import FULL, LOADER, ZONES, WorkbenchStandIn
from tests.proofs import Proof
from tests.records import pick_prices, words_of

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers import vertex_workbench
from cavvy.providers.base import GangState, ProviderContext, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState
from cavvy.providers.vertex_workbench import WorkbenchInstances, read_instance

PROOF = Proof("vertex-workbench", False, "a strict stand-in for Vertex AI Workbench")
CONTEXT = ProviderContext(installation="any", home=Path())
TRAITS = ManagedCloud(WorkbenchInstances(CONTEXT)).traits
TYPES = ("e2-standard-4", "n1-standard-8-t4x1", "g2-standard-4", "tpu-v6e-8")
START = datetime(2026, 11, 1, 12, tzinfo=UTC)


read_prices = pick_prices(TYPES)


class WorkbenchPlace(RestPlace):
    """One project, with a service account."""

    api: WorkbenchStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        traits = replace(TRAITS, tags=True)
        super().__init__(vertex_workbench, traits, WorkbenchStandIn, server, home)


class TestVertexWorkbench(ServiceAccountContract):
    package, traits, stand_in = vertex_workbench, TRAITS, WorkbenchStandIn
    make_place = WorkbenchPlace
    has_others = False

    def launch(self, account: WorkbenchPlace, gpu: str = "", **table: Scalar) -> dict[str, Any]:
        """Launch a notebook with these settings and remove it; the request for it."""

        async def scenario() -> dict[str, Any]:
            harness = account.harness()
            gang = replace(await harness.spec("shaped"), disk_gib=200)
            provider = account.provider(gang.installation, **table)
            if gpu:
                offers = [each for each in await provider.offers() if each.accelerator == gpu]
                gang = replace(gang, offer=offers[0])
            await provider.launch(gang)
            await provider.remove(gang.name)
            (body,) = account.api.bodies.values()
            return body

        return asyncio.run(scenario())

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        super().test_facts_tell_where_the_key_was_found_and_not_the_key(account)
        assert ("GPUs without a fee", "L4") in asyncio.run(account.provider("ours").whoami())

    def test_offers_are_machines_at_googles_prices_with_the_fees(self, account: RestPlace) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        known = {
            (each.instance_type, each.region): each.rate.micros_per_hour
            for each in read_prices("gcp")
            if each.purchase is Purchase.ON_DEMAND
        }
        fees = {"e2-standard-4": 40_000, "n1-standard-8-t4x1": 580_000}
        assert {each.instance_type for each in offers} == set(fees)
        assert {each.zone for each in offers} == set(ZONES)
        for each in offers:
            price = known[each.instance_type, each.region] + fees[each.instance_type]
            assert each.rate.micros_per_hour == price
            assert each.purchase is Purchase.ON_DEMAND
            assert "management fee" in each.source
        free = asyncio.run(account.provider("ours", fees="vCPU=0, T4=0, L4=0").offers())
        assert {each.instance_type for each in free} == {*fees, "g2-standard-4"}

    @pytest.mark.parametrize(
        ("table", "reason"),
        [
            ({"zones": ""}, "zones: not set"),
            ({"script": ""}, "script: not set"),
            ({"fees": ""}, "fees: not set"),
            ({"fees": "T4=0.5"}, "the fee for a vCPU is not set"),
            ({"fees": "vCPU: 1"}, "'vCPU: 1' is not a fee"),
        ],
    )
    def test_missing_settings_are_named(
        self, account: RestPlace, table: dict[str, Scalar], reason: str
    ) -> None:
        with pytest.raises(Refused, match=reason):
            asyncio.run(account.provider("ours", **table).offers())

    def test_a_notebook_starts_the_agent_and_has_the_settings(
        self, account: WorkbenchPlace
    ) -> None:
        email = f"notebooks@{PROJECT}.iam.gserviceaccount.com"
        network = f"projects/{PROJECT}/global/networks/n"
        body = self.launch(
            account,
            service_account=email,
            owner="ada@example.org",
            network=network,
            idle_stop_s=3600,
        )
        setup = body["gceSetup"]
        assert setup["machineType"] == "e2-standard-4"
        assert setup["dataDisks"] == [{"diskSizeGb": "200"}]
        assert setup["serviceAccounts"] == [{"email": email}]
        assert setup["networkInterfaces"] == [{"network": network}]
        assert body["instanceOwners"] == ["ada@example.org"]
        assert set(body["labels"]) == {"cavvy-installation", "cavvy-gang"}
        metadata = setup["metadata"]
        script = metadata.pop("cavvy-script")
        assert metadata == {
            "post-startup-script": LOADER,
            "post-startup-script-behavior": "run_once",
            "idle-timeout-seconds": "3600",
        }
        assert "CAVVY_CONTAINER_RANK=0" in script
        assert script.rstrip().endswith("&")
        assert "; poweroff' </dev/null" in script  # a notebook whose agent has ended stops itself
        assert "claim-" not in script  # tokens are fetched, and not shown in the console

    def test_a_notebook_with_a_gpu_has_its_driver(self, account: WorkbenchPlace) -> None:
        setup = self.launch(account, "T4")["gceSetup"]
        assert setup["machineType"] == "n1-standard-8"
        assert setup["acceleratorConfigs"] == [{"type": "NVIDIA_TESLA_T4", "coreCount": "1"}]
        assert setup["gpuDriverConfig"] == {"enableGpuDriver": True}

    async def test_facts_have_the_address_of_a_running_notebook(
        self, account: WorkbenchPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("shown")
        await harness.ours.gangs()
        facts = dict(await account.provider(gang.installation).whoami())
        await harness.remove(gang.name)
        (address,) = [text for name, text in facts.items() if name.startswith("notebook us-")]
        assert address.startswith("https://")
        assert address.endswith(".notebooks.googleusercontent.com")

    def test_a_notebook_without_capacity_fails_later_and_costs_nothing(
        self, account: WorkbenchPlace
    ) -> None:
        """Google lists it until it is deleted, or does not list it at all."""

        async def scenario(*, listed: bool) -> None:
            harness = account.harness()
            gang = await harness.launched(f"full-{listed}".lower())
            (machine,) = account.cloud.billed()
            account.api.errors[machine.name] = FULL
            if not listed:
                account.cloud.change(machine.id, ended=account.cloud.time)
            for _ in range(3):
                await account.wait(timedelta(seconds=25))
                await harness.ours.gangs()
            await account.settle()
            seen = await harness.one(gang.name)
            assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
            assert seen.nodes[0].started_at == seen.nodes[0].ended_at
            assert seen.reason == FULL

        asyncio.run(scenario(listed=True))
        asyncio.run(scenario(listed=False))

    async def test_the_bill_ends_when_google_accepts_the_deletion(
        self, account: WorkbenchPlace, harness: ContractHarness
    ) -> None:
        """It is requested once, unless it fails."""
        gang = await harness.running("slow")
        await harness.expect(GangState.RUNNING, gang)
        (machine,) = account.cloud.billed()
        account.api.keeps.add(machine.name)
        deleted = account.cloud.time
        await harness.ours.remove(gang.name)
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            assert (await harness.one(gang.name)).state is GangState.RUNNING
        assert account.api.calls.count("notebooks.instances.delete") == 1
        account.api.errors["delete"] = "try again"
        account.api.keeps.clear()
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs()
        assert account.api.calls.count("notebooks.instances.delete") == 2
        await account.wait(timedelta(minutes=1))
        seen = await harness.one(gang.name)
        assert (seen.state, seen.nodes[0].ended_at) == (GangState.ENDED, deleted)

    def test_a_notebook_that_was_stopped_is_deleted_with_the_reason(
        self, account: WorkbenchPlace
    ) -> None:
        """By a person, by Google after its idle time, or by itself after the end of its agent."""

        async def scenario() -> str:
            harness = account.harness()
            gang = await harness.running("stopped")
            (machine,) = account.cloud.billed()
            account.cloud.change(machine.id, off=True)
            for _ in range(2):
                await account.wait(timedelta(minutes=1))
                await harness.ours.gangs()
            seen = await harness.one(gang.name)
            assert seen.state is GangState.ENDED
            return seen.reason

        assert "Google reports: STOPPED" in asyncio.run(scenario())
        assert account.billed() == 0

    def test_tasks_that_are_no_sessions_are_refused(self, account: RestPlace) -> None:
        check_only_sessions(account.provider("ours"))

    async def test_only_the_calls_of_the_guide_are_made(
        self, account: WorkbenchPlace, harness: ContractHarness
    ) -> None:
        await self.test_the_bill_ends_when_google_accepts_the_deletion(account, harness)
        guide = (Path(__file__).parents[4] / "docs/guides/notebooks.md").read_text()
        granted = set(re.findall(r"`(notebooks\.\w+\.\w+)`", guide))
        assert set(account.api.calls) <= granted


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            JobState.WAITING: "INITIALIZING STARTING",
            JobState.RUNNING: "ACTIVE UPGRADING",
            JobState.RECLAIMED: "STOPPING SUSPENDED ORPHANED",
            JobState.ENDED: "DELETED",
        }
    ),
)
def test_states_of_workbench_instances_are_read(status: str, state: JobState) -> None:
    told = {
        "state": status,
        "createTime": "2026-11-01T12:00:00.123456789Z",
        "updateTime": "2026-11-01T13:00:00Z",
    }
    job = read_instance("us-central1-a/cv-a-b-0-1", told)
    assert (job.name, job.state) == ("cv-a-b-0-1", state)
    assert job.started_at == START + timedelta(microseconds=123456)
    off = state in (JobState.RECLAIMED, JobState.ENDED)
    assert job.ended_at == (START + timedelta(hours=1) if off else None)
