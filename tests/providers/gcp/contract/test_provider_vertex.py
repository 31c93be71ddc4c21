"""The Vertex AI provider keeps the contract, on a stand-in that checks every request and every reply
against Google's discovery document.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gcp_stand_in import PROJECT
from tests.contract.google_contract import ServiceAccountContract
from tests.contract.vertex_stand_in import REGIONS, VertexStandIn
from tests.proofs import Proof
from tests.records import pick_prices

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import ProviderOptions, ResourceSpec, Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers import vertex
from cavvy.providers.base import (
    GangState,
    NoCapacity,
    ProviderContext,
    QuotaTooSmall,
    Refused,
)
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState
from cavvy.providers.registry import check_settings
from cavvy.providers.vertex.jobs import VertexService, read_job
from cavvy.providers.vertex.offers import read_fee
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.records import make_mark

PROOF = Proof("vertex", False, "a strict stand-in for Vertex AI's custom jobs")
START = datetime(2026, 11, 1, 12, tzinfo=UTC)
CONTEXT = ProviderContext(installation="any", home=Path())
TRAITS = ManagedCloud(VertexService(CONTEXT)).traits
IMAGE = "us-docker.pkg.dev/research-42/train/train:1"
TYPES = (
    "e2-standard-2",  # too small for a custom job
    "e2-standard-4",
    "n1-standard-8-t4x1",
    "g2-standard-4",
    "a3-highgpu-1g",
    "a3-highgpu-8g",
    "tpu-v6e-8",
)
STOCKOUT = "Resources are insufficient in region: us-central1. Try a different region."


read_prices = pick_prices(TYPES)


class VertexPlace(RestPlace):
    """One project, with a service account."""

    api: VertexStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(vertex, replace(TRAITS, tags=True), VertexStandIn, server, home)
        # Vertex AI lists jobs until they are deleted
        self.cloud.traits = replace(self.cloud.traits, ended_listed=timedelta(days=30))

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        places: Mapping[str, Scalar] = {"regions": ", ".join(REGIONS), "image": IMAGE}
        return super().provider(installation, **{**places, **table})

    async def end(self, gang: str) -> None:
        for each in self.cloud.billed():
            self.cloud.change(each.id, ended=self.cloud.time)

    def double(self) -> None:
        self.api.copy_newest()


class TestVertex(ServiceAccountContract):
    package, traits, stand_in = vertex, TRAITS, VertexStandIn
    make_place = VertexPlace

    def launch(self, account: VertexPlace, **changes: Any) -> dict[str, Any]:
        """Launch a gang with these fields, and remove it; the request of its job."""

        async def scenario() -> dict[str, Any]:
            harness = account.harness()
            purchase = changes.pop("purchase", None)
            table = changes.pop("table", {})
            gang = replace(await harness.spec("shaped", purchase=purchase), **changes)
            provider = account.provider(gang.installation, **table)
            await provider.launch(gang)
            await provider.remove(gang.name)
            (job,) = account.api.jobs.values()
            return job.body

        return asyncio.run(scenario())

    def test_offers_have_vertex_ais_own_prices(self, account: RestPlace) -> None:
        """The fee of a spot machine is a part of the standard price."""
        offers = asyncio.run(account.provider("ours", regions="us-central1").offers())
        found = {(each.instance_type, each.purchase): each for each in offers}
        known = {
            (each.instance_type, each.purchase): each.rate.micros_per_hour
            for each in read_prices("gcp")
            if each.region == "us-central1"
        }
        assert {name for name, _ in found} == set(TYPES) - {"e2-standard-2", "tpu-v6e-8"}
        assert ("a3-highgpu-1g", Purchase.ON_DEMAND) not in found  # spot only
        for (name, purchase), offer in found.items():
            fee = Decimal(known[name, Purchase.ON_DEMAND]) * Decimal("0.15")
            assert abs(offer.rate.micros_per_hour - known[name, purchase] - fee) <= 1
            assert "15.0% management fee" in offer.source
            assert offer.as_of == read_fee().as_of
            assert (offer.provider, offer.zone) == ("vertex", None)

    @pytest.mark.proves(PROOF, "image")
    def test_a_job_starts_the_agent_and_has_the_settings(self, account: VertexPlace) -> None:
        account_email = f"jobs@{PROJECT}.iam.gserviceaccount.com"
        body = self.launch(
            account,
            purchase=Purchase.ON_DEMAND,
            longest=timedelta(hours=2),
            disk_gib=300,
            table={"service_account": account_email, "network": "projects/1/global/networks/n"},
        )
        (pool,) = body["jobSpec"]["workerPoolSpecs"]
        assert pool["containerSpec"]["imageUri"] == IMAGE
        assert pool["machineSpec"] == {"machineType": "e2-standard-4"}
        assert pool["diskSpec"] == {"bootDiskSizeGb": 300}
        assert body["jobSpec"]["scheduling"] == {
            "strategy": "STANDARD",
            "timeout": f"{3 * 3600 + 1}s",
            "disableRetries": True,  # restarts are the control plane's alone
        }
        assert body["jobSpec"]["serviceAccount"] == account_email
        assert body["jobSpec"]["network"] == "projects/1/global/networks/n"
        assert set(body["labels"]) == {"cavvy-installation", "cavvy-gang"}
        assert "claim-" not in json.dumps(body)  # tokens are fetched, and not shown in the console

    def test_a_gang_has_a_pool_of_one_and_a_pool_of_the_others(self, account: VertexPlace) -> None:
        body = self.launch(account, nodes=3, purchase=Purchase.ON_DEMAND)
        first, others = body["jobSpec"]["workerPoolSpecs"]
        assert (first.pop("replicaCount"), others.pop("replicaCount")) == (1, 2)
        assert first == others

    def test_spot_jobs_use_spot_machines(self, account: VertexPlace) -> None:
        table = {"reservation": "any"}
        body = self.launch(account, purchase=Purchase.SPOT, table=table)
        (pool,) = body["jobSpec"]["workerPoolSpecs"]
        assert body["jobSpec"]["scheduling"]["strategy"] == "SPOT"
        assert "reservationAffinity" not in pool["machineSpec"]

    def test_a_job_uses_a_reservation(self, account: VertexPlace) -> None:
        """A gang's offer is in us-central1 or europe-west4; the reservation of another region is no
        offer.
        """
        path = f"projects/{PROJECT}/zones/us-central1-a/reservations/r"
        table = {"regions": "us-central1", "reservation": path}
        other = path.replace("us-central1", "europe-west4")
        with pytest.raises(NoCapacity, match="is not in us-central1"):
            self.launch(account, purchase=Purchase.ON_DEMAND, options={"reservation": other})
        body = self.launch(account, purchase=Purchase.ON_DEMAND, table=table)
        (pool,) = body["jobSpec"]["workerPoolSpecs"]
        assert pool["machineSpec"]["reservationAffinity"] == {
            "reservationAffinityType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [path],
        }

    @pytest.mark.parametrize("named", ["r", "projects/p/zones/z/reservations"])
    def test_a_reservation_needs_its_whole_name(self, account: VertexPlace, named: str) -> None:
        with pytest.raises(Refused, match=r"\[providers.vertex\] reservation: .* is not a name"):
            self.launch(account, purchase=Purchase.ON_DEMAND, table={"reservation": named})

    @pytest.mark.parametrize("fails", [True, False])
    async def test_a_reclaimed_spot_job_counts_as_preempted(
        self, account: VertexPlace, harness: ContractHarness, fails: bool
    ) -> None:
        """The job either fails, or waits for other machines; then Cavvy cancels it."""
        gang = await harness.running("taken", purchase=Purchase.SPOT)
        (job,) = account.api.jobs
        at = account.cloud.time
        change: dict[str, Any] = {"state": "JOB_STATE_PENDING"}
        if fails:
            change = {
                "state": "JOB_STATE_FAILED",
                "endTime": at.isoformat(),
                "error": {"code": 8, "message": STOCKOUT},
            }
        start = account.cloud.machines[0].at.isoformat()
        account.api.changes[job] = {**change, "startTime": start, "updateTime": at.isoformat()}
        await account.wait(timedelta(minutes=1))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        assert seen.nodes[0].ended_at == at
        if fails:
            await account.end(gang.name)
        assert ("aiplatform.customJobs.cancel" in account.api.calls) == (not fails)
        assert account.billed() == 0
        harness.restart()
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.preempted, seen.nodes[0].ended_at) == (True, at)

    def test_a_quota_that_is_used_up_is_no_rate_limit(self, account: VertexPlace) -> None:
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="custom_model_training_cpus"):
            self.launch(account)

    def test_a_job_without_an_image_is_refused(self, account: VertexPlace) -> None:
        with pytest.raises(Refused, match="image: no image is set"):
            self.launch(account, table={"image": ""})
        task, without = TaskSpec(name="t", run="true"), account.provider("ours", image="")
        (objection,) = without.check(task)
        assert objection.field == "image"
        own = ProviderOptions(provider="vertex", values=json.dumps({"image": IMAGE}))
        for each in (
            replace(task, image=IMAGE),
            replace(task, resources=ResourceSpec(options=(own,))),
        ):
            assert without.check(each) == []
        assert account.provider("ours").check(task) == []

    async def test_prices_are_read_again_after_some_time(self, account: VertexPlace) -> None:
        provider = account.provider("ours")
        first = await provider.offers()
        calls = len(account.api.calls)
        assert await provider.offers() == first
        assert len(account.api.calls) == calls
        await account.wait(timedelta(minutes=11))
        await provider.offers()
        assert len(account.api.calls) > calls

    async def test_a_job_without_capacity_fails_later_and_costs_nothing(
        self, account: VertexPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("full")
        (job,) = account.api.jobs
        account.api.changes[job] = {
            "state": "JOB_STATE_FAILED",
            "startTime": None,
            "error": {"code": 8, "message": STOCKOUT},
        }
        await account.wait(timedelta(seconds=30))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert seen.nodes[0].started_at == seen.nodes[0].ended_at
        assert STOCKOUT in seen.reason
        await account.end(gang.name)

    async def test_jobs_that_run_for_a_long_time_are_listed_until_they_have_ended(
        self, account: VertexPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("long")
        await account.wait(timedelta(hours=30))
        (seen,) = await harness.ours.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        at = account.cloud.time
        await account.end(gang.name)
        await account.wait(timedelta(seconds=30))
        (seen,) = await harness.ours.gangs(gang.name)
        assert (seen.state, seen.nodes[0].ended_at) == (GangState.ENDED, at)

    async def test_the_jobs_of_another_installation_are_not_listed(
        self, account: VertexPlace
    ) -> None:
        def service(installation: str) -> VertexService:
            places = {"endpoint": account.api.url, "key_file": str(account.file)}
            settings = check_settings(vertex.MANIFEST, {**places, "regions": ", ".join(REGIONS)})
            return VertexService(
                ProviderContext(
                    installation=installation,
                    home=account.home,
                    settings=settings,
                    now=account.cloud.now,
                )
            )

        gang = await account.harness().running("mine")
        ours, theirs = service(gang.installation), service("theirs")
        assert [job.state for job in await ours.list()] == [JobState.RUNNING]
        assert await theirs.list() == []
        mark = make_mark("theirs")
        asked = account.api.filters[-2 * len(REGIONS) :]
        assert all(f'labels.cavvy-installation="{mark}"' in each for each in asked)
        for each in (ours, theirs):
            each.close()
        await account.end(gang.name)

    def test_only_the_calls_of_the_guide_are_made(self, account: VertexPlace) -> None:
        self.launch(account)
        asyncio.run(account.provider("ours").gangs())
        guide = (Path(__file__).parents[4] / "docs/guides/vertex.md").read_text()
        granted = set(re.findall(r"`(aiplatform\.customJobs\.\w+)`", guide))
        assert set(account.api.calls) <= granted


def test_states_are_read() -> None:
    """https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState"""
    told = {
        "name": "projects/1/locations/us-central1/customJobs/7",
        "displayName": "cv-a-b-0-1",
        "createTime": "2026-11-01T12:00:00Z",
        "updateTime": "2026-11-01T12:20:00.123456789Z",
        "jobSpec": {"scheduling": {"strategy": "STANDARD"}},
    }
    for state in ("QUEUED", "PENDING"):
        job = read_job("us-central1", told | {"state": f"JOB_STATE_{state}"})
        assert (job.id, job.state, job.started_at) == ("us-central1/7", JobState.WAITING, None)
    told |= {"startTime": "2026-11-01T12:05:00Z"}
    for state in ("RUNNING", "CANCELLING", "UPDATING"):
        job = read_job("us-central1", told | {"state": f"JOB_STATE_{state}"})
        assert (job.state, job.started_at) == (JobState.RUNNING, START + timedelta(minutes=5))
    told |= {"endTime": "2026-11-01T12:30:00Z"}
    for state in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"):
        job = read_job("us-central1", told | {"state": f"JOB_STATE_{state}"})
        assert (job.state, job.ended_at) == (JobState.ENDED, START + timedelta(minutes=30))
        assert bool(job.reason) == (state != "SUCCEEDED")


def test_the_fee_follows_from_the_dated_rows() -> None:
    fee = read_fee()
    assert fee.part == Decimal("0.150")
    assert "SKU" in fee.source
