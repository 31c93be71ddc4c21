"""The Google Cloud TPU provider keeps the contract, on a stand-in that checks every request and
every reply against Google's discovery document.
"""

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gcp_stand_in import PROJECT
from tests.contract.google_contract import ServiceAccountContract
from tests.contract.tpu_stand_in import QUOTAS, ZONES, TpuStandIn
from tests.proofs import Proof

from cavvy.catalog.fit import match_offers
from cavvy.catalog.needs import parse_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.objections import explain_slice, spread_task
from cavvy.providers import tpu
from cavvy.providers.base import GangSpec, GangState, PartlyUnknown, Refused
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.tpu.cloud import TpuCloud
from cavvy.providers.vm.cloud import CloudFault
from cavvy.store.snapshot.reader import list_prices

PROOF = Proof("tpu", False, "a strict stand-in for the Cloud TPU API")
WHOLE = "tpu-v5litepod-16"  # a slice of four hosts with four chips each


@cache
def read_prices(provider: str) -> Sequence[Offer]:
    """The catalog's prices of TPUs, read once."""
    return [each for each in list_prices(provider) if each.instance_type.startswith("tpu-v5")]


class TpuPlace(RestPlace):
    """One project, with a service account."""

    api: TpuStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        # the stand-in knows the names, not the cloud behind it
        traits = replace(TpuCloud.traits, tokens=False)
        super().__init__(tpu, traits, TpuStandIn, server, home)


class TestTpu(ServiceAccountContract):
    package, traits, stand_in = tpu, TpuCloud.traits, TpuStandIn
    make_place = TpuPlace

    def test_offers_are_the_hosts_of_the_slices_of_each_zone(self, account: TpuPlace) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        assert {each.zone for each in offers} == set(ZONES[:3])
        assert {each.provider for each in offers} == {"tpu"}
        found = {
            (each.instance_type, each.purchase): each for each in offers if each.zone == ZONES[0]
        }
        on_demand = Purchase.ON_DEMAND
        shapes = {
            name: (each.hosts, each.accelerator, each.accelerator_count, each.vcpus)
            for (name, purchase), each in found.items()
            if purchase is on_demand
        }
        assert shapes == {
            "tpu-v5litepod-1": (1, "TPU-v5e", 1, 24),
            "tpu-v5litepod-4": (1, "TPU-v5e", 4, 112),
            "tpu-v5litepod-8": (1, "TPU-v5e", 8, 224),
            WHOLE: (4, "TPU-v5e", 4, 112),
            "tpu-v5p-16": (2, "TPU-v5p", 4, 208),
        }
        # a host of a slice has its part of the slice's price
        four = found["tpu-v5litepod-4", on_demand].rate
        assert found[WHOLE, on_demand].rate == four
        assert found[WHOLE, Purchase.SPOT].rate.micros_per_hour < four.micros_per_hour

    def test_a_zone_that_fails_hides_no_other(self, account: TpuPlace) -> None:
        account.api.faulty[ZONES[0]] = CloudFault(403, "PERMISSION_DENIED", "no right")
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        assert {each.zone for each in offers} == set(ZONES[1:3])
        assert [each.partition(":")[0] for each in provider.silent()] == [ZONES[0]]

    async def test_a_slice_of_several_hosts_is_one_request_and_one_deletion(
        self, account: TpuPlace
    ) -> None:
        provider, gang = account.provider("ours"), await make_gang(account, nodes=8)
        await provider.launch(gang)
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        assert [each.rank for each in seen.nodes] == list(range(8))
        hosts = [each.engine_id.rpartition("/") for each in seen.nodes]
        assert [int(worker) for _, _, worker in hosts] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert len({place for place, _, _ in hosts}) == 2
        # a server without records finds the same nodes
        account.lose_records()
        (again,) = await account.provider("ours").gangs(gang.name)
        assert [each.engine_id for each in again.nodes] == [each.engine_id for each in seen.nodes]
        await provider.remove(gang.name)
        assert [method for method, _ in account.api.calls] == ["POST"] * 2 + ["DELETE"] * 2
        await account.settle()
        assert account.billed() == 0

    async def test_the_hosts_of_a_slice_get_one_script_that_learns_the_rank(
        self, account: TpuPlace
    ) -> None:
        provider, gang = account.provider("ours"), await make_gang(account, nodes=8)
        await provider.launch(gang)
        made = sorted(account.api.slices, key=lambda each: each.name)
        first, second = (each.body for each in made)
        boots = [read_boot(body["metadata"]["startup-script"]) for body in (first, second)]
        assert [each["metadata"]["first_rank"] for each in boots] == [0, 4]
        for each in boots:
            assert each["metadata"]["rank"].endswith("/attributes/agent-worker-number")
            assert each["metadata"]["headers"] == {"Metadata-Flavor": "Google"}
            assert len(each["tokens"]) == 8
        assert first["acceleratorType"] == "v5litepod-16"
        assert first["runtimeVersion"] == "v2-alpha-tpuv5-lite"
        assert "schedulingConfig" not in first
        await account.settle()
        await provider.remove(gang.name)

    def test_a_gang_must_fill_its_slices(self, account: TpuPlace) -> None:
        gang = asyncio.run(make_gang(account, nodes=3))
        with pytest.raises(Refused, match="must be a multiple of 4, not 3"):
            asyncio.run(account.provider("ours").launch(gang))
        task = TaskSpec(name="t", run="true", nodes=3)
        objection = explain_slice(task, gang.offer)
        assert objection is not None
        assert objection.reason == (
            "tpu-v5litepod-16 has 4 hosts, which are rented together; set `nodes` to 4 or a "
            "multiple of 4"
        )
        assert explain_slice(replace(task, nodes=8), gang.offer) is None

    @pytest.mark.parametrize(
        ("wanted", "nodes", "instance"),
        [
            ("TPU-v5e:8", 1, "tpu-v5litepod-8"),
            ("TPU-v5e:2x4", 1, "tpu-v5litepod-8"),
            ("v5litepod-8", 1, "tpu-v5litepod-8"),
            ("TPU-v5p:4", 2, "tpu-v5p-16"),
            ("TPU-v5p:4", 3, None),
            ("TPU-v5e:16", 1, "tpu-v5litepod-16"),
            ("tpu-v5litepod-16", 2, "tpu-v5litepod-16"),
            ("TPU-v5p:2x2x2", 1, "tpu-v5p-16"),
            ("TPU-v5e:12", 1, None),
        ],
    )
    def test_a_job_finds_its_slice_by_chips_topology_or_type(
        self, account: TpuPlace, wanted: str, nodes: int, instance: str | None
    ) -> None:
        need = ResourceSpec(accelerators=parse_accelerator(wanted))
        task = spread_task(TaskSpec(name="t", run="true", nodes=nodes, resources=need))
        provider = account.provider("ours")
        fitting = match_offers(asyncio.run(provider.offers()), task.resources).offers
        found = {each.instance_type for each in fitting if explain_slice(task, each) is None}
        assert not provider.check(task)
        assert found == ({instance} if instance else set())

    def test_quotas_are_by_zone_and_generation_and_count_all_slices(
        self, account: TpuPlace
    ) -> None:
        zone, whole = "us-central1-a", "TPUV5sLitepodPerProjectPerZoneForTPUAPI"
        serving = "TPUV5sLitepodServingPerProjectPerZoneForTPUAPI"
        account.api.limits |= {(zone, whole): 48, (zone, serving): 8}
        account.api.limits[zone, "TPUV5PPerProjectPerZoneForTPUAPI"] = 16
        found = asyncio.run(self._nodes(account, zone))
        assert found[WHOLE] == (12, 12)  # three slices of four hosts
        assert found["tpu-v5litepod-4"] == (2, 2)
        assert found["tpu-v5p-16"] == (2, 2)  # counted by cores, two for each chip

        async def use() -> None:
            provider, gang = account.provider("ours"), await make_gang(account, nodes=4)
            gang = replace(gang, offer=replace(gang.offer, zone=zone))
            await provider.launch(gang)
            await account.wait(timedelta(minutes=2))
            quotas = {(each.zone, each.name): each for each in await provider.quotas()}
            quota = quotas[zone, whole]
            assert (quota.limit, quota.used, quota.region) == (48, 16, "us-central1")
            assert quota.request == (
                "gcloud quotas preferences create --service=tpu.googleapis.com "
                f"--project={PROJECT} --quota-id={whole} --preferred-value=NEW_LIMIT "
                f"--dimensions=zone={zone}"
            )
            assert {each.name for each in quotas.values()} == {*QUOTAS}
            assert (await self._nodes(account, zone))[WHOLE] == (8, 12)
            await provider.remove(gang.name)

        asyncio.run(use())

    async def _nodes(self, account: TpuPlace, zone: str) -> dict[str, tuple[int, int]]:
        """The free and all nodes that quotas allow, by type of slice, on demand."""
        return {
            each.instance_type: (each.capacity or 0, each.quota_nodes or 0)
            for each in await account.provider("ours").offers()
            if (each.zone, each.purchase) == (zone, Purchase.ON_DEMAND)
        }

    def test_quotas_that_may_not_be_read_limit_nothing(self, account: TpuPlace) -> None:
        account.api.hides_quotas = True
        provider = account.provider("ours")
        assert {each.quota_nodes for each in asyncio.run(provider.offers())} == {None}
        assert "cloudquotas.quotas.get" in dict(asyncio.run(provider.whoami()))["quotas"]
        with pytest.raises(Refused, match=r"cloudquotas\.quotas\.get"):
            asyncio.run(provider.quotas())

    async def test_missing_capacity_that_is_told_later_ends_the_gang(
        self, account: TpuPlace
    ) -> None:
        provider, gang = account.provider("ours"), await make_gang(account, nodes=4)
        account.api.full_later = True
        await provider.launch(gang)
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert "no more capacity in the zone" in seen.reason
        assert {each.started_at for each in seen.nodes} == {None}
        await provider.remove(gang.name)

    @pytest.mark.proves(PROOF, "spot")
    async def test_a_preempted_slice_is_told_and_deleted(self, account: TpuPlace) -> None:
        provider = account.provider("ours")
        gang = await make_gang(account, nodes=4, purchase=Purchase.SPOT)
        await provider.launch(gang)
        assert account.api.slices[0].body["schedulingConfig"] == {"spot": True}
        await account.settle()
        await provider.gangs()
        account.api.preempted.add(account.api.slices[0].name)
        await account.wait(timedelta(minutes=1))
        await provider.gangs()
        await account.wait(timedelta(minutes=1))
        (seen,) = await provider.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        assert account.billed() == 0
        await provider.remove(gang.name)

    async def test_a_zone_that_google_does_not_reach_may_have_slices(
        self, account: TpuPlace
    ) -> None:
        provider, gang = account.provider("ours"), await make_gang(account, nodes=4)
        await provider.launch(gang)
        await account.settle()
        account.api.unreachable = ["europe-west4-b"]
        with pytest.raises(PartlyUnknown, match="cannot reach its zones europe-west4-b") as caught:
            await provider.gangs()
        assert [each.name for each in caught.value.seen] == [gang.name]
        account.api.unreachable = []
        await provider.remove(gang.name)


async def make_gang(
    account: TpuPlace, *, nodes: int, purchase: Purchase = Purchase.ON_DEMAND
) -> GangSpec:
    """A gang on a slice of four hosts."""
    offers = await account.provider("ours").offers()
    offer = next(
        each
        for each in offers
        if (each.instance_type, each.purchase, each.zone) == (WHOLE, purchase, ZONES[0])
    )
    gang = await account.harness().spec("sliced", nodes=nodes)
    return replace(gang, offer=offer)


def read_boot(script: str) -> Any:
    """The boot document in a script."""
    return json.loads(script.partition("<<'END_OF_BOOT'\n")[2].partition("\nEND_OF_BOOT")[0])
