"""The provider of IBM Cloud keeps the contract, on a stand-in that checks each request against the
models of IBM's own Python package.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.ibm_stand_in import HOME, IbmStandIn, image_id, make_subnet
from tests.proofs import Proof
from tests.records import pick_prices, words_of

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, Scalar
from cavvy.domain.values import replace
from cavvy.providers import ibm
from cavvy.providers.base import (
    GangState,
    NoCapacity,
    PartlyUnknown,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer
from cavvy.providers.ibm.cloud import IbmCloud, _read
from cavvy.providers.vm.cloud import CloudFault, MachineState

PROOF = Proof("ibm", False, "a strict stand-in for IBM Cloud's VPC API")
CPU, L4, V100, H100 = "bx3d-8x40", "gx3-16x80x1l4", "gx2-8x64x1v100", "gx3d-160x1792x8h100"
UBUNTU = "ibm-ubuntu-24-04-3-minimal-amd64-3"
# The fields of an instance that the provider reads, from the example of a reply in the reference
# (https://cloud.ibm.com/apidocs/vpc#get-instance, November 2026)
EXAMPLE: dict[str, Any] = {
    "id": "0717_e21b7391-2ca2-4ab5-84a8-b92157a633b0",
    "name": "my-instance",
    "created_at": "2019-06-12T20:08:40Z",
    "status": "stopped",
    "status_reasons": [],
    "primary_network_interface": {"primary_ip": {"address": "10.0.0.32"}},
}


read_prices = pick_prices()


class IbmPlace(RestPlace):
    """One account, with a file that has the API key of a user."""

    api: IbmStandIn
    list_prices = staticmethod(read_prices)


class TestIbm(RestContract):
    package, traits, stand_in = ibm, IbmCloud.traits, IbmStandIn
    launch_faults = read_replies("""
    NoCapacity     409  insufficient_capacity     in the zone
    QuotaTooSmall  403  over_quota                vCPUs
    QuotaTooSmall  400  instance_quota_exceeded   instances
    TryAgain       400  validation_unique_failed  Provided Name is not unique
    Refused        400  bad_field                 image
    Refused        403  not_authorized            not authorized
    """)

    def make_place(self, server: RestServer, home: Path) -> IbmPlace:
        return IbmPlace(ibm, IbmCloud.traits, IbmStandIn, server, home)

    def test_offers_are_the_profiles_of_a_zone_with_ibms_price(self, account: IbmPlace) -> None:
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        found = {(each.instance_type, each.purchase): each for each in offers}
        assert len({each.key for each in offers}) == len(offers)
        assert {name for name, _ in found} == {
            *("bxf-2x8", CPU, "bx2-8x32", V100, L4, H100),
            *("gx3-24x120x1l40s", "gx3d-208x1792x8mi300x"),
        }
        l4 = found[L4, Purchase.ON_DEMAND]
        assert (l4.accelerator, l4.accelerator_count, l4.accelerator_memory_mib) == ("L4", 1, 24576)
        assert (l4.rate.micros_per_hour, l4.zone, l4.memory_mib) == (
            1_075_200,
            f"{HOME}-1",
            80 * 1024,
        )
        assert found[H100, Purchase.SPOT].rate.micros_per_hour == 24_896_500
        assert found[H100, Purchase.SPOT].accelerator_memory_mib == 81920
        assert found[V100, Purchase.ON_DEMAND].rate.micros_per_hour == 2_497_000  # the catalog's
        assert found[V100, Purchase.ON_DEMAND].accelerator_memory_mib == 16384
        assert (V100, Purchase.SPOT) not in found
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["profiles without a known price"] == f"gx3d-160x1792x8h200 ({HOME})"
        assert facts["unknown accelerators"] == "Z9000"

    def test_prices_differ_by_region_and_the_settings_choose_the_profiles(
        self, account: IbmPlace
    ) -> None:
        provider = account.provider("ours", regions="eu-de", cpu_profiles="cx2-2x4")
        offers = {each.instance_type: each for each in asyncio.run(provider.offers())}
        assert {each.region for each in offers.values()} == {"eu-de"}
        assert offers["cx2-2x4"].rate.micros_per_hour == 108_000
        assert CPU not in offers

    @pytest.mark.parametrize("path", ["instance/profiles", "subnets"])
    async def test_a_region_that_fails_hides_no_other(self, account: IbmPlace, path: str) -> None:
        denied = CloudFault(403, "not_authorized", "no right")
        provider = account.provider("ours", regions=f"{HOME}, eu-de")
        account.api.faulty["eu-de", path] = denied
        assert {offer.region for offer in await provider.offers()} == {HOME}
        assert [each.partition(":")[0] for each in provider.silent()] == ["eu-de"]
        assert "no right" in dict(await provider.whoami())["silent"]
        account.api.faulty.clear()
        await account.wait(timedelta(minutes=1))
        assert {offer.region for offer in await provider.offers()} == {HOME, "eu-de"}
        assert not provider.silent()
        account.api.faulty |= {(region, path): denied for region in (HOME, "eu-de")}
        await account.wait(timedelta(hours=1))
        with pytest.raises(Refused, match="no right"):
            await provider.offers()

    async def test_a_token_is_renewed_before_it_expires(self, account: IbmPlace) -> None:
        provider = account.provider("ours")
        for _ in range(3):
            await provider.gangs()
            await account.wait(timedelta(minutes=56))
        assert len(account.api.tokens) == 3

    async def test_machines_of_several_regions_are_one_list(self, account: IbmPlace) -> None:
        harness, provider = (account.harness(), account.provider("ours", regions=f"{HOME}, eu-de"))
        for region in (HOME, "eu-de"):
            offer = await pick(provider, CPU, Purchase.ON_DEMAND, f"{region}-1")
            gang = replace(await harness.spec(region), offer=offer)
            await provider.launch(gang)
            await account.settle()
        assert len(await provider.gangs()) == 2
        for each in await provider.gangs():
            await provider.remove(each.name)
        assert set(account.api.regions.values()) == {HOME, "eu-de"}

    async def test_a_region_that_fails_hides_no_machines_of_others(self, account: IbmPlace) -> None:
        def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
            found = request.method == "GET" and "/eu-de/" in request.path
            return (CloudFault(503, "unavailable", "eu-de is down"), False) if found else None

        account.api.fail = fail
        provider = account.provider("ours", regions=f"{HOME}, eu-de")
        assert {each.region for each in await provider.offers()} == {HOME}
        assert {each.partition(":")[0] for each in provider.silent()} == {"eu-de"}
        gang = await account.harness().spec("one")
        offer = await pick(provider, CPU, Purchase.ON_DEMAND, f"{HOME}-1")
        gang = replace(gang, offer=offer)
        await provider.launch(gang)
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        with pytest.raises(PartlyUnknown, match="the list of machines in eu-de") as caught:
            await provider.gangs()
        assert caught.value.seen == [seen]
        await provider.remove(gang.name)
        account.api.fail = lambda _: None
        await account.wait(timedelta(minutes=1))
        assert {each.region for each in await provider.offers()} == {HOME, "eu-de"}
        assert provider.silent() == []

    @pytest.mark.proves(PROOF, "disk")
    def test_instances_boot_the_newest_ubuntu_and_lose_their_disk(self, account: IbmPlace) -> None:
        body = launch(account, CPU)
        assert body["image"] == {"id": image_id(UBUNTU)}
        assert body["boot_volume_attachment"] == {
            "delete_volume_on_instance_delete": True,
            "volume": {"capacity": 100, "profile": {"name": "general-purpose"}},
        }
        assert "availability" not in body
        body = launch(account, CPU, disk_gib=200, disk_type="10iops-tier")
        assert body["boot_volume_attachment"]["volume"] == {
            "capacity": 200,
            "profile": {"name": "10iops-tier"},
        }

    def test_a_gpu_needs_an_image_with_its_driver(self, account: IbmPlace) -> None:
        offers = {each.instance_type: each for each in asyncio.run(account.provider("o").offers())}
        assert offers[CPU].requires is None
        assert offers[L4].requires is not None
        assert offers[L4].requires.name == "image"
        with pytest.raises(Refused, match="no image with a driver for L4"):
            launch(account, L4)
        body = launch(account, L4, {"image": "our-image"})
        assert body["image"] == {"id": image_id("our-image")}
        body = launch(account, L4, options={"image": image_id("our-image")})
        assert body["image"] == {"id": image_id("our-image")}
        with pytest.raises(Refused, match="no available image called none-such"):
            launch(account, L4, {"image": "none-such"})

    def test_the_settings_choose_the_network_and_the_group(self, account: IbmPlace) -> None:
        account.api.subnets.append(make_subnet(f"{HOME}-1", "inner"))
        account.api.subnets.append(make_subnet(f"{HOME}-1", "broken", "failed"))
        with pytest.raises(Refused, match="has several: inner, net; choose one"):
            launch(account, CPU)
        table: dict[str, Scalar] = {"security_groups": "r006-one, r006-two", "subnet": "inner"}
        body = launch(account, CPU, {**table, "resource_group": "crew-1"})
        assert body["primary_network_interface"] == {
            "subnet": {"id": f"0717-inner-{HOME}-1"},
            "security_groups": [{"id": "r006-one"}, {"id": "r006-two"}],
        }
        assert body["resource_group"] == {"id": "crew-1"}

    def test_zones_without_a_subnet_have_no_offers(self, account: IbmPlace) -> None:
        account.api.subnets = [make_subnet(f"{HOME}-2")]
        offers = asyncio.run(account.provider("ours").offers())
        assert {each.zone for each in offers} == {f"{HOME}-2"}
        account.api.subnets = [make_subnet(f"{HOME}-2", "broken", "failed")]
        with pytest.raises(
            Refused, match=rf"no zone of {HOME} has a suitable subnet; create a VPC"
        ):
            asyncio.run(account.provider("ours").offers())

    async def test_a_gang_gets_a_cluster_network_with_eight_subnets(
        self, account: IbmPlace
    ) -> None:
        """It is made over several launches and by several servers, and deleted after the gang."""
        harness, api = account.harness(), account.api
        gang = await harness.spec("cluster", nodes=2)
        our = {"image": "our-image"}
        provider = account.provider(gang.installation, **our)
        gang = replace(gang, offer=await pick(provider, H100, Purchase.ON_DEMAND))
        for state in ("the cluster network", "the subnets of a cluster network"):
            with pytest.raises(TryAgain, match=f"IBM reports {state}.* as pending"):
                await provider.launch(gang)
            await account.wait(timedelta(minutes=2))
            provider = account.provider(gang.installation, **our)  # a restarted server
        l4 = replace(gang, name=f"{gang.name}-l4", offer=await pick(provider, L4, Purchase.SPOT))
        alone = replace(gang, name=f"{gang.name}-alone", nodes=1)
        for each in (gang, l4, alone):
            await provider.launch(each)
        ((network, told),) = api.networks.items()
        assert (told["profile"], told["vpc"]) == ({"name": "hopper-1"}, {"id": "r006-vpc"})
        subnets = [each["id"] for each in api.network_subnets[network]]
        assert len(subnets) == 8
        used = [each.get("cluster_network_attachments", []) for each in api.bodies.values()]
        attached = [
            [each["cluster_network_interface"]["subnet"]["id"] for each in one] for one in used
        ]
        assert attached == [subnets, subnets, [], [], []]
        for other in ("cv-0123456789-one-abcd", "crew", told["name"].rpartition("-")[0]):
            api.networks[other] = {**told, "id": other, "name": other}
            api.network_subnets[other] = []
        await account.wait(timedelta(hours=2))
        await account.provider(gang.installation, **our).gangs()
        # the gang's nodes still run, and two others are not this installation's
        assert list(api.networks) == [network, "cv-0123456789-one-abcd", "crew"]
        for each in (gang, l4, alone):
            await provider.remove(each.name)
        await account.wait(timedelta(minutes=31))
        await provider.gangs()
        assert list(api.networks) == ["cv-0123456789-one-abcd", "crew"]
        assert account.billed() == 0

    async def test_cluster_networks_that_cannot_be_had_are_told(self, account: IbmPlace) -> None:
        gang, our = await account.harness().spec("cluster", nodes=2), {"image": "our-image"}
        provider = account.provider(gang.installation, **our)
        gang = replace(gang, offer=await pick(provider, H100, Purchase.ON_DEMAND))
        account.api.may_network = False
        with pytest.raises(Refused, match=r"Services, or set `cluster_networks` to false"):
            await provider.launch(gang)
        await provider.gangs()  # networks that cannot be listed hide no machines
        account.api.may_network = True
        with pytest.raises(TryAgain):
            await provider.launch(gang)
        (network,) = account.api.networks.values()
        network["becomes"] = "failed"
        await account.wait(timedelta(minutes=2))
        with pytest.raises(Refused, match=r"the cluster network cv-.* as failed"):
            await provider.launch(gang)
        await provider.remove(gang.name)
        await account.wait(timedelta(hours=2))
        await provider.gangs()
        assert account.api.networks == {}
        # a task that asks for RDMA gets no machine without it
        asked = replace(gang, name=f"{gang.name}-b", network=NetworkNeed(fabric=Fabric.ROCE))
        provider = account.provider(gang.installation, cluster_networks=False, **our)
        with pytest.raises(NoCapacity, match="or the setting `cluster_networks` is false"):
            await provider.launch(asked)
        await provider.launch(replace(asked, name=f"{gang.name}-c", network=None))
        assert "cluster_network" not in str(account.api.bodies)
        for name in "bc":
            await provider.remove(f"{gang.name}-{name}")

    @pytest.mark.proves(PROOF, "spot")
    @pytest.mark.parametrize("taken", [True, False])
    async def test_a_preempted_instance_is_told_and_deleted(
        self, account: IbmPlace, taken: bool
    ) -> None:
        harness, provider = account.harness(), account.provider("ours", image="our-image")
        offer = await pick(provider, L4, Purchase.SPOT)
        gang = replace(await harness.spec("taken"), offer=offer)
        await provider.launch(gang)
        await account.settle()
        await provider.gangs()
        (machine,) = account.cloud.billed()
        if taken:
            account.api.reasons[machine.id] = "stopped_by_preemption"
        account.cloud.change(machine.id, off=True)
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            (seen,) = await provider.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, taken)
        assert account.billed() == 0
        (body,) = account.api.bodies.values()
        assert body["availability"] == {"class": "spot"}
        assert body["availability_policy"] == {"host_failure": "stop", "preemption": "stop"}

    async def test_an_instance_that_finds_no_capacity_later_is_deleted(
        self, account: IbmPlace
    ) -> None:
        harness, provider = account.harness(), account.provider("ours")
        gang = await harness.spec("full")
        await provider.launch(gang)
        (machine,) = account.cloud.billed()
        account.api.reasons[machine.id] = "cannot_start_capacity"
        account.cloud.change(machine.id, off=True)
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            (seen,) = await provider.gangs(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert account.billed() == 0


def test_the_documented_example_is_read() -> None:
    seen = _read(HOME, EXAMPLE)
    assert seen.id == f"{HOME}/0717_e21b7391-2ca2-4ab5-84a8-b92157a633b0"
    assert (seen.name, seen.address, seen.state) == (
        "my-instance",
        "10.0.0.32",
        MachineState.STOPPED,
    )
    assert seen.created_at == datetime(2019, 6, 12, 20, 8, 40, tzinfo=UTC)
    assert seen.reason == "IBM reports: stopped"


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            MachineState.STARTING: "pending starting",
            MachineState.RUNNING: "running restarting stopping a-state-of-the-future",
            MachineState.STOPPED: "failed",
            MachineState.ENDED: "deleting",
        }
    ),
)
def test_states_that_may_be_billed_count_as_running(status: str, state: MachineState) -> None:
    assert _read(HOME, {**EXAMPLE, "status": status}).state is state


async def pick(provider: Any, kind: str, purchase: Purchase, zone: str = f"{HOME}-1") -> Offer:
    """The first offer of a profile in a zone."""
    return next(
        each
        for each in await provider.offers()
        if (each.instance_type, each.purchase, each.zone) == (kind, purchase, zone)
    )


def launch(
    account: IbmPlace, kind: str, table: dict[str, Scalar] | None = None, **values: Any
) -> dict[str, Any]:
    """Launch and remove one instance; returns the body of its creation."""

    async def scenario() -> None:
        harness, provider = account.harness(), account.provider("ours", **(table or {}))
        offer = await pick(provider, kind, Purchase.ON_DEMAND)
        gang = replace(await harness.spec("shaped"), offer=offer, **values)
        gang = replace(gang, name=f"{gang.name}-{len(account.cloud.machines)}")
        await provider.launch(gang)
        await account.settle()
        await provider.remove(gang.name)

    asyncio.run(scenario())
    return list(account.api.bodies.values())[-1]
