"""Bare metal servers of IBM Cloud keep the contract, on a stand-in that plays their API."""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.ibm_metal_stand_in import IbmMetalStandIn
from tests.contract.ibm_stand_in import HOME, image_id
from tests.proofs import Proof
from tests.providers.clouds.contract.test_provider_ibm import IbmPlace
from tests.records import make_attempt_record

from cavvy.costs.metering import bill, total
from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import Offer
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.planner.work import MACHINE_START, start_time
from cavvy.providers import ibm
from cavvy.providers.base import GangSpec, GangState, Refused, TryAgain
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.ibm.cloud import IbmCloud
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("ibm", False, "a strict stand-in for IBM Cloud's VPC API")
SMALL, LARGE, UNPRICED = "mx3-metal-16x128", "bx2-metal-96x384", "cx3-metal-48x128"
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


class MetalPlace(IbmPlace):
    """One account that rents bare metal servers."""

    api: IbmMetalStandIn


class TestIbmMetal(RestContract):
    package, traits, stand_in = ibm, IbmCloud.traits, IbmMetalStandIn

    def make_place(self, server: RestServer, home: Path) -> MetalPlace:
        return MetalPlace(ibm, IbmCloud.traits, IbmMetalStandIn, server, home)

    def test_offers_are_the_named_profiles_with_ibms_price(self, account: MetalPlace) -> None:
        provider = account.provider("ours")
        offers = {each.instance_type: each for each in servers_of(provider)}
        assert set(offers) == {SMALL, LARGE}
        small = offers[SMALL]
        assert (small.vcpus, small.memory_mib, small.disk_gib) == (16, 128 * 1024, 447)
        assert (small.rate.micros_per_hour, small.network_mbps) == (1_950_000, 200_000)
        assert (small.zone, small.accelerator, small.architecture) == (
            f"{HOME}-1",
            None,
            "x86_64",
        )
        facts = dict(asyncio.run(provider.whoami()))
        assert f"{UNPRICED} ({HOME})" in facts["profiles without a known price"]

    def test_without_the_setting_bare_metal_is_neither_offered_nor_listed(
        self, account: MetalPlace
    ) -> None:
        account.api.fail = lambda request: (
            (account.api.faults["forbidden"], False) if "bare_metal" in request.path else None
        )
        provider = account.provider("ours", bare_metal_profiles="")
        assert servers_of(provider) == []
        assert asyncio.run(provider.gangs()) == []

    def test_a_plan_counts_the_start_of_bare_metal(self, account: MetalPlace) -> None:
        provider = account.provider("ours")
        assert {start_time(each) for each in servers_of(provider)} == {10 * MINUTE}
        provider = account.provider("ours", cpu_profiles="cx2-2x4")
        instances = [each for each in asyncio.run(provider.offers()) if each.boot is None]
        assert {start_time(each) for each in instances} == {MACHINE_START}

    async def test_a_server_has_the_image_and_no_ssh_key(
        self, account: MetalPlace, harness: ContractHarness
    ) -> None:
        await harness.running("shaped")
        other = await harness.spec("typed")
        with pytest.raises(Refused, match="server, whose disks are fixed"):
            await harness.ours.launch(replace(other, disk_type="10iops-tier"))
        await remove_all(account, harness.ours)
        (body,) = account.api.bodies.values()
        assert body["initialization"]["image"] == {
            "id": image_id("ibm-ubuntu-22-04-5-minimal-amd64-9")
        }
        assert set(body["initialization"]) == {"image", "user_data"}
        assert body["profile"] == {"name": SMALL}

    def test_the_first_hour_is_billed_in_full_and_includes_the_start(
        self, account: MetalPlace
    ) -> None:
        """From the creation on, with ten minutes of provisioning, to the deletion."""
        account.cloud.boot_time = 10 * MINUTE

        async def scenario(length: timedelta) -> Money:
            harness = account.harness()
            gang = await harness.spec(f"billed-{length.seconds}")
            began = account.cloud.time
            await harness.ours.launch(gang)
            await account.wait(5 * MINUTE)
            assert (await harness.one(gang.name)).state is GangState.STARTING
            await account.wait(length - 5 * MINUTE)
            assert (await harness.one(gang.name)).state is GangState.RUNNING
            await harness.ours.remove(gang.name)
            seen = await harness.one(gang.name)
            assert seen.state is GangState.ENDED
            (node,) = seen.nodes
            assert (node.started_at, node.ended_at) == (began, began + length)
            return charge(gang, began, began + length)

        rate = 1_950_000
        assert asyncio.run(scenario(20 * MINUTE)) == Money(rate)
        assert asyncio.run(scenario(90 * MINUTE)) == Money(rate * 3 // 2)

    async def test_a_server_that_stops_slowly_is_deleted_later_and_billed_until_then(
        self, account: MetalPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("slow")
        account.api.slow_stops = True
        with pytest.raises(TryAgain, match="will be deleted once it is off"):
            await harness.ours.remove(gang.name)
        assert account.billed() == 1
        await account.wait(2 * MINUTE)
        await harness.ours.remove(gang.name)
        assert account.billed() == 0
        (node,) = (await harness.one(gang.name)).nodes
        assert node.ended_at == account.cloud.time

    async def test_a_server_that_finds_no_capacity_later_is_deleted(
        self, account: MetalPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("full")
        await harness.ours.launch(gang)
        (machine,) = account.cloud.billed()
        account.api.reasons[machine.id] = "cannot_start_capacity"
        account.cloud.change(machine.id, off=True)
        for _ in range(2):
            await account.wait(MINUTE)
            seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        assert account.billed() == 0

    async def test_a_server_that_shuts_itself_down_is_deleted(
        self, account: MetalPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("off")
        account.cloud.change(account.cloud.billed()[0].id, off=True)
        for _ in range(2):
            await account.wait(MINUTE)
            seen = await harness.one(gang.name)
        assert seen.state is GangState.ENDED
        assert account.billed() == 0


def servers_of(provider: VmProvider) -> list[Offer]:
    return [each for each in asyncio.run(provider.offers()) if "-metal-" in each.instance_type]


async def remove_all(account: MetalPlace, provider: Any) -> None:
    for each in await provider.gangs():
        await provider.remove(each.name)


def charge(gang: GangSpec, began: datetime, ended: datetime) -> Money:
    """The final bill of a gang of one node, as the control plane makes it."""
    attempt = make_attempt_record(began, gang.offer, id="job-1", job_id="job", gang=gang.name)
    charges = bill(attempt=attempt, rank=0, started=began, until=ended, final=True)
    kinds = {each.kind for each in charges}
    assert (ChargeKind.MINIMUM in kinds) is (ended - began < HOUR)
    return total(charges)
