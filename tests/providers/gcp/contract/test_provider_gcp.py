"""The Google Compute Engine provider keeps the contract, on a stand-in that checks every request
and every reply against Google's discovery document.
"""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gcp_stand_in import (
    METRICS,
    PROJECT,
    TYPES,
    ZONES,
    GcpStandIn,
)
from tests.contract.google_contract import ServiceAccountContract
from tests.proofs import Proof
from tests.records import pick_prices

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers import gcp
from cavvy.providers.base import (
    GangSpec,
    GangState,
    NoCapacity,
    PartlyUnknown,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.gcp.cloud import GcpCloud
from cavvy.providers.vm.cloud import CloudFault, MachineState
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("gcp", False, "a strict stand-in for the Compute Engine API")


read_prices = pick_prices({*TYPES, "n1-standard-8-t4x1", "tpu-v6e-8"})


class GcpPlace(RestPlace):
    """One project, with a service account."""

    api: GcpStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        # the stand-in knows the tokens, not the cloud behind it
        traits = replace(GcpCloud.traits, tokens=False)
        super().__init__(gcp, traits, GcpStandIn, server, home)

    def failed(self) -> bool:
        return super().failed() and not self.api.undelivered


async def launch_again(account: RestPlace, provider: VmProvider, gang: GangSpec) -> int:
    """Launch a gang as the control plane does; the number of calls."""
    for calls in range(1, 9):
        with suppress(TryAgain):
            await provider.launch(gang)
            return calls
        await account.wait(timedelta(seconds=11))
    raise AssertionError("the launch does not end")


class TestGcp(ServiceAccountContract):
    package, traits, stand_in = gcp, GcpCloud.traits, GcpStandIn
    make_place = GcpPlace

    def test_a_quota_is_reported_as_one(self, account: RestPlace) -> None:
        """By the operation, in a reply with the status 200."""
        account.api.operation_time = timedelta(0)
        super().test_a_quota_is_reported_as_one(account)

    def test_a_read_above_the_rate_limit_is_repeated(self, account: RestPlace) -> None:
        """Google reports the limit with the status 403."""
        account.api.read_faults = [CloudFault(403, "rateLimitExceeded", "Rate Limit Exceeded")]
        assert asyncio.run(account.provider("ours").offers())
        assert account.api.read_faults == []

    @pytest.mark.parametrize(
        ("machine", "usual", "cards"), [("a3-highgpu-8g", 4, 0), ("a4-highgpu-8g", 1, 8)]
    )
    async def test_nodes_of_a_gang_get_the_interfaces_of_their_gpus(
        self, account: RestPlace, harness: ContractHarness, machine: str, usual: int, cards: int
    ) -> None:
        """In networks that are created once. Google creates them in the background."""
        offers = await harness.ours.offers()
        offer = next(each for each in offers if each.instance_type == "a3-highgpu-8g")
        offer = replace(offer, instance_type=machine)
        gang = replace(await harness.spec("wide", nodes=2), offer=offer)
        # networks, then subnets and rules, then machines, and then their operations
        assert await launch_again(account, harness.ours, gang) == 4
        made = [each for each in account.api.made if "/networks/" in each]
        assert len(made) == usual + (cards > 0)
        for body in account.api.bodies.values():
            kinds = [each.get("nicType") for each in body["networkInterfaces"]]
            assert kinds == ["GVNIC"] * (1 + usual) + ["MRDMA"] * cards
        await harness.ours.remove(gang.name)
        count, again = len(account.api.made), account.provider(gang.installation)
        await launch_again(account, again, replace(gang, name=f"{gang.name}-b"))
        alone = replace(gang, name=f"{gang.name}-c", nodes=1)
        await launch_again(account, again, alone)
        assert len(account.api.made) == count
        assert len(list(account.api.bodies.values())[-1]["networkInterfaces"]) == 1
        for each in ("b", "c"):
            await again.remove(f"{gang.name}-{each}")

    async def test_gangs_that_wait_for_the_same_networks_do_not_disturb_each_other(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        """Also if Google has forgotten the operations that created the networks."""
        offers = await harness.ours.offers()
        offer = next(each for each in offers if each.instance_type == "a3-highgpu-8g")
        first = replace(await harness.spec("wide", nodes=2), offer=offer)
        gangs = [first, replace(first, name=f"{first.name}-b")]
        with pytest.raises(TryAgain, match="Google creates the networks"):
            await harness.ours.launch(first)
        for forgotten in (True, False):
            await account.wait(timedelta(seconds=11))
            if forgotten:
                account.api.operations.clear()
            launches = (harness.ours.launch(each) for each in gangs)
            told = await asyncio.gather(*launches, return_exceptions=True)
            assert all(isinstance(each, TryAgain) for each in told), told
        for each in gangs:
            await launch_again(account, harness.ours, each)
            await harness.ours.remove(each.name)

    async def test_networks_that_cannot_be_created_are_told(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        offers = await harness.ours.offers()
        offer = next(each for each in offers if each.instance_type == "a3-highgpu-8g")
        gang = replace(await harness.spec("wide", nodes=2), offer=offer)
        account.api.may_network = False
        with pytest.raises(Refused, match="or set `gpu_networks` to false"):
            await harness.ours.launch(gang)
        account.api.may_network = True
        account.api.network_fault = CloudFault(403, "QUOTA_EXCEEDED", "Quota 'NETWORKS' exceeded")
        with pytest.raises(TryAgain, match="Google creates the networks"):
            await harness.ours.launch(gang)
        await account.wait(timedelta(seconds=11))
        with pytest.raises(QuotaTooSmall, match="'NETWORKS'"):
            await harness.ours.launch(gang)
        await harness.ours.remove(gang.name)
        provider = account.provider(gang.installation, gpu_networks=False)
        gang = replace(gang, name=f"{gang.name}-b")
        await launch_again(account, provider, gang)
        assert all(len(each["networkInterfaces"]) == 1 for each in account.api.bodies.values())
        await provider.remove(gang.name)

    async def test_a_zone_that_google_does_not_reach_may_have_machines(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang, provider = await harness.spec("one"), harness.ours
        region = gang.offer.region
        others = [each for each in ZONES if not each.startswith(region)]
        await harness.start(gang)
        account.api.unreachable = others[:1]
        (seen,) = await provider.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        with pytest.raises(PartlyUnknown, match=f"cannot reach its zones {others[0]}") as caught:
            await provider.gangs()
        assert caught.value.seen == [seen]
        account.api.unreachable = [each for each in ZONES if each.startswith(region)]
        await account.wait(timedelta(minutes=1))
        with pytest.raises(TryAgain, match=f"the list of machines in {region}"):
            await provider.gangs(gang.name)
        account.api.unreachable = []
        await account.settle()
        await provider.remove(gang.name)

    def test_quotas_limit_offers_by_cpu_and_gpu_and_region(self, account: RestPlace) -> None:
        """Spot machines count for the spot quota once Google has granted one."""
        limits = {
            ("us-central1", "NVIDIA_L4_GPUS"): 2,
            ("europe-west4", "PREEMPTIBLE_NVIDIA_L4_GPUS"): 5,
            ("europe-west4", "PREEMPTIBLE_NVIDIA_H100_GPUS"): 16,
            ("us-central1", "A2_CPUS"): 12,
            ("", "GPUS_ALL_REGIONS"): 4,
        }
        account.api.limits |= limits
        offers = asyncio.run(account.provider("ours").offers())
        found = {
            (each.region, each.instance_type, str(each.purchase)): each.quota_nodes
            for each in offers
        }
        america, europe = "us-central1", "europe-west4"
        assert found[america, "g2-standard-4", "on-demand"] == 2
        assert found[america, "g2-standard-4", "spot"] == 2
        assert found[europe, "g2-standard-4", "on-demand"] == 4
        assert found[europe, "g2-standard-4", "spot"] == 5
        assert found[america, "a2-highgpu-1g", "on-demand"] == 1
        assert found[america, "a3-highgpu-8g", "on-demand"] == 0  # of all GPUs
        assert found[europe, "a3-highgpu-8g", "spot"] == 2
        other = account.api.start_one("g2-standard-4", "us-central1-a")
        told = {
            (each.region, each.name): each
            for each in asyncio.run(account.provider("ours").quotas())
        }
        quota = told[america, "NVIDIA_L4_GPUS"]
        assert (quota.limit, quota.used, quota.unit, quota.purchase) == (2, 1, "GPUs", None)
        assert quota.request == (
            f"gcloud quotas preferences create --service=compute.googleapis.com "
            f"--project={PROJECT} --quota-id=NVIDIA-L4-GPUS-per-project-region "
            "--preferred-value=NEW_LIMIT --dimensions=region=us-central1"
        )
        assert told["", "GPUS_ALL_REGIONS"].request.endswith(
            "--quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=NEW_LIMIT"
        )
        assert {name for _, name in told} == {
            *METRICS, "CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS",
        } - {"NETWORKS", "COMMITTED_NVIDIA_L4_GPUS"}  # fmt: skip
        offers = asyncio.run(account.provider("ours").offers())
        mine = [o for o in offers if (o.region, o.instance_type) == (america, "g2-standard-4")]
        assert {each.capacity for each in mine} == {1}
        assert "1 of 2 GPUs used, 1 left" in mine[0].limited_by
        account.api.end(other)

    def test_quotas_that_may_not_be_read_limit_nothing(self, account: RestPlace) -> None:
        account.api.hides_quotas = True
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        assert {each.quota_nodes for each in offers} == {None}
        assert "compute.regions.list" in dict(asyncio.run(provider.whoami()))["quotas"]
        with pytest.raises(Refused, match=r"compute\.regions\.list"):  # and not an empty list
            asyncio.run(provider.quotas())
        with pytest.raises(Refused, match=r"compute\.regions\.list"):
            asyncio.run(account.provider("ours").quotas())

    def test_offers_are_types_of_a_zone_with_the_catalogs_price(self, account: RestPlace) -> None:
        provider = account.provider("ours", regions="us-central1")
        offers = asyncio.run(provider.offers())
        assert {offer.zone for offer in offers} == {"us-central1-a", "us-central1-b"}
        found = {
            offer.instance_type: (
                offer.accelerator,
                offer.accelerator_count,
                offer.accelerator_memory_mib // 1024,
            )
            for offer in offers
        }
        assert found == {
            "e2-standard-4": (None, 0, 0),
            "g2-standard-4": ("L4", 1, 24),
            "a2-highgpu-1g": ("A100", 1, 40),
            "a3-highgpu-8g": ("H100", 8, 80),
            "n1-standard-8-t4x1": ("T4", 1, 16),
            "tpu-v6e-8": ("TPU-v6e", 8, 32),
        }
        listed = {
            (each.instance_type, each.purchase): each.rate
            for each in read_prices("gcp")
            if each.region == "us-central1"
        }
        # GPUs for N1 machines are in one zone
        assert len({offer.key for offer in offers}) == len(offers) == 2 * 2 * len(found) - 2
        assert all(each.rate == listed[each.instance_type, each.purchase] for each in offers)
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["machine types without a known price"] == "a4-highgpu-8g"
        left_out = "machine types with GPUs that are not in the catalog"
        assert facts[left_out] == "e2-standard-2"

    async def test_a_read_of_offers_goes_on_when_its_caller_gives_up(
        self, account: RestPlace
    ) -> None:
        began, goes_on, reads = threading.Event(), threading.Event(), []

        def read_slowly(provider: str) -> Sequence[Offer]:
            reads.append(provider)
            began.set()
            goes_on.wait()
            return read_prices(provider)

        account.list_prices = read_slowly
        provider = account.provider("ours")
        first = asyncio.create_task(provider.offers())
        await asyncio.to_thread(began.wait)
        first.cancel()
        await asyncio.wait([first])
        goes_on.set()
        assert await provider.offers()
        assert reads == ["gcp"]

    def test_the_settings_choose_zones_and_machines(self, account: RestPlace) -> None:
        provider = account.provider("ours", zones="us-central1-b", machines="g2-*")
        offers = asyncio.run(provider.offers())
        assert {(each.zone, each.instance_type) for each in offers} == {
            ("us-central1-b", "g2-standard-4")
        }
        with pytest.raises(Refused, match="is not a pattern of machine types"):
            asyncio.run(account.provider("ours", machines='g2" OR').offers())

    def test_a_gpu_is_attached_to_an_n1_machine(self, account: RestPlace) -> None:
        (body, *_) = launch(account, "n1-standard-8-t4x1", Purchase.SPOT)
        assert body["machineType"] == "zones/us-central1-a/machineTypes/n1-standard-8"
        (gpu,) = body["guestAccelerators"]
        kind = "zones/us-central1-a/acceleratorTypes/nvidia-tesla-t4"
        assert gpu == {"acceleratorType": kind, "acceleratorCount": 1}
        image = body["disks"][0]["initializeParams"]["sourceImage"]
        assert image.endswith("/common-cu129-ubuntu-2204-nvidia-580")

    def test_a_tpu_slice_of_one_host_is_a_machine_type(self, account: RestPlace) -> None:
        (body, *_) = launch(account, "tpu-v6e-8", Purchase.SPOT, zone="europe-west4-a")
        assert body["machineType"] == "zones/europe-west4-a/machineTypes/ct6e-standard-8t"
        disk = body["disks"][0]["initializeParams"]
        assert disk["sourceImage"].endswith("/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e")
        assert disk["diskType"].endswith("/hyperdisk-balanced")
        assert body["scheduling"]["onHostMaintenance"] == "TERMINATE"

    @pytest.mark.parametrize(
        ("kind", "purchase", "image", "model"),
        [
            ("e2-standard-4", Purchase.ON_DEMAND, "ubuntu-2404-lts-amd64", "STANDARD"),
            ("g2-standard-4", Purchase.SPOT, "common-cu129-ubuntu-2204-nvidia-580", "SPOT"),
            (
                "a3-highgpu-8g",
                Purchase.ON_DEMAND,
                "ubuntu-accelerator-2404-amd64-with-nvidia-580",
                "STANDARD",
            ),
        ],
    )
    def test_machines_boot_the_image_of_their_gpu(
        self, account: RestPlace, kind: str, purchase: Purchase, image: str, model: str
    ) -> None:
        (body, *_) = launch(account, kind, purchase)
        assert body["disks"][0]["initializeParams"]["sourceImage"].endswith(f"/{image}")
        assert body["scheduling"]["provisioningModel"] == model
        assert body["scheduling"]["automaticRestart"] is False
        assert body["networkInterfaces"][0]["accessConfigs"]
        assert body["labels"]["cavvy-gang"].endswith("shaped")
        assert "serviceAccounts" not in body or body["serviceAccounts"] == []

    def test_the_settings_choose_network_disk_and_account(self, account: RestPlace) -> None:
        account.api.networks = ["lab"]
        table = {"network": "lab", "subnetwork": "inner", "external_address": False}
        table |= {"service_account": "jobs@example", "disk_gib": 200, "disk_type": "pd-ssd"}
        (body, *_) = launch(account, "g2-standard-4", Purchase.SPOT, table)
        (interface,) = body["networkInterfaces"]
        assert interface == {
            "network": "global/networks/lab",
            "subnetwork": "regions/us-central1/subnetworks/inner",
        }
        disk = body["disks"][0]["initializeParams"]
        assert (disk["diskSizeGb"], disk["diskType"]) == (
            "200",
            "zones/us-central1-a/diskTypes/pd-ssd",
        )
        assert body["serviceAccounts"][0]["email"] == "jobs@example"

    @pytest.mark.proves(PROOF, "disk")
    def test_a_task_chooses_its_disk(self, account: RestPlace) -> None:
        disk_of_task = {"disk_gib": 300, "disk_type": "pd-extreme"}
        (body, *_) = launch(account, "g2-standard-4", Purchase.SPOT, **disk_of_task)
        disk = body["disks"][0]["initializeParams"]
        assert (disk["diskSizeGb"], disk["diskType"].rsplit("/", 1)[1]) == ("300", "pd-extreme")

    def test_a_missing_network_is_refused_with_what_to_do(self, account: RestPlace) -> None:
        account.api.networks = []
        with pytest.raises(Refused, match="gcloud compute networks create default"):
            account.launch()

    def test_an_api_that_is_not_enabled_is_refused_with_its_link(self, account: RestPlace) -> None:
        link = "https://console.developers.google.com/apis/api/compute.googleapis.com/overview"
        text = f"Compute Engine API has not been used in project 42 before. Enable it at {link}"
        account.api.read_faults = [CloudFault(403, "accessNotConfigured", text)]
        with pytest.raises(Refused, match=link):
            asyncio.run(account.provider("ours").offers())

    async def test_a_task_names_its_reservation(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = replace(
            await harness.spec("held"), options={"reservation": "projects/p/reservations/r"}
        )
        spot = replace(gang, offer=replace(gang.offer, purchase=Purchase.SPOT))
        with pytest.raises(Refused, match="set `spot: never`"):
            await harness.ours.launch(replace(spot, name=f"{gang.name}x"))
        await harness.launch(replace(gang, offer=replace(gang.offer, purchase=Purchase.ON_DEMAND)))
        await harness.remove(gang.name)
        (body,) = account.api.bodies.values()  # type: ignore[attr-defined]
        assert body["reservationAffinity"] == {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": ["projects/p/reservations/r"],
        }

    async def test_a_zone_that_is_full_is_told_by_the_operation(self, account: RestPlace) -> None:
        """The first call finds the operation in progress, the second finds its error."""
        account.cloud.left = 1
        harness = account.harness()
        gang = await harness.spec("full", nodes=2)
        with pytest.raises(TryAgain, match="operation in progress"):
            await harness.ours.launch(gang)
        await account.wait(timedelta(seconds=15))
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            await harness.ours.launch(gang)
        await account.settle()
        assert await harness.ours.gangs() == []
        assert account.billed() == 0

    @pytest.mark.parametrize("code", ["RESOURCE_OPERATION_RATE_EXCEEDED", "RESOURCE_NOT_READY"])
    async def test_an_operation_that_asks_to_come_later_is_repeated(
        self, account: RestPlace, code: str
    ) -> None:
        account.api.refusals = [CloudFault(400, code, "Try again later")]
        harness = account.harness()
        gang = await harness.spec("later", nodes=2)
        for problem in ("operation in progress", code, "operation in progress"):
            with pytest.raises(TryAgain, match=problem):
                await harness.ours.launch(gang)
            await account.wait(timedelta(seconds=30))
        await harness.ours.launch(gang)
        assert account.billed() == 2
        await harness.ours.remove(gang.name)

    async def test_a_machine_ends_when_google_has_deleted_it(self, account: RestPlace) -> None:
        """Until then, Google shows the machine as STOPPING."""
        account.api.deletion_time = timedelta(minutes=2)
        harness = account.harness()
        gang = await harness.running("slow", nodes=1)
        await harness.ours.remove(gang.name)
        await account.wait(timedelta(minutes=1))
        assert (await harness.one(gang.name)).state is not GangState.ENDED
        await account.wait(timedelta(minutes=1))
        assert (await harness.one(gang.name)).state is GangState.ENDED
        assert account.billed() == 0

    async def test_a_machine_that_google_calls_stopped_is_deleted(self, account: RestPlace) -> None:
        """Google's list of states has both STOPPED and TERMINATED."""
        account.api.states = {**account.api.states, MachineState.STOPPED: "STOPPED"}
        harness = account.harness()
        gang = await harness.running("off", nodes=1)
        account.cloud.change(account.cloud.billed()[0].id, off=True)
        await account.wait(timedelta(minutes=1))
        assert (await harness.one(gang.name)).state is GangState.ENDED
        assert account.billed() == 0

    async def test_a_hidden_reason_of_a_stop_delays_no_removal(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        """The list asks for the reason of each spot machine that is off."""
        provider = account.provider("ours", zones="us-central1-a")
        (offer,) = [
            each
            for each in await provider.offers()
            if (each.instance_type, each.purchase) == ("g2-standard-4", Purchase.SPOT)
        ]
        spot = replace(await harness.spec("spot"), offer=offer)
        with suppress(TryAgain):
            await provider.launch(spot)
        await account.wait(timedelta(minutes=1))
        await provider.launch(spot)
        account.cloud.change(account.cloud.billed()[0].id, off=True)
        account.api.hides_operations = True
        await account.wait(timedelta(minutes=1))
        await provider.remove(spot.name)
        assert account.billed() == 0

    @pytest.mark.proves(PROOF, "spot")
    async def test_a_preempted_machine_is_told_with_its_end(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        """Google deletes the machine; only the zone's operations tell why, and when."""
        gang = await harness.running("taken", nodes=2)
        taken = account.cloud.billed()[0]
        at = account.cloud.time
        account.api.preempted.add(taken.id)
        account.cloud.change(taken.id, ended=at)
        await account.wait(timedelta(minutes=5))
        seen = await harness.one(gang.name)
        assert seen.preempted
        assert "preempted" in seen.reason
        (ended,) = [node for node in seen.nodes if node.ended_at is not None]
        assert ended.ended_at == at
        assert not ended.unseen
        await harness.remove(gang.name)
        await account.settle()
        assert (await harness.one(gang.name)).state is GangState.ENDED


def launch(
    account: RestPlace,
    kind: str,
    purchase: Purchase,
    table: dict[str, Scalar] | None = None,
    *,
    zone: str = "us-central1-a",
    **options: object,
) -> Sequence[dict[str, Any]]:
    """Launch one machine of a type; returns the bodies of the insertions."""

    async def scenario() -> None:
        harness = account.harness()
        provider = account.provider("ours", zones=zone, **(table or {}))
        (offer,) = [
            each
            for each in await provider.offers()
            if (each.instance_type, each.purchase) == (kind, purchase)
        ]
        gang = replace(await harness.spec("shaped"), offer=offer, **options)  # type: ignore[arg-type]
        with suppress(TryAgain):
            await provider.launch(gang)
        await account.wait(timedelta(seconds=15))
        await provider.launch(gang)
        await account.settle()
        await provider.remove(gang.name)

    asyncio.run(scenario())
    return list(account.api.bodies.values())
