"""The Azure provider keeps the contract, on a stand-in that checks every request against the
description in Microsoft's packages.
"""

import asyncio
import json
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.contract.azure_description import OPERATIONS
from tests.contract.azure_stand_in import SUBSCRIPTION, AzureStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, Scalar
from cavvy.domain.values import replace
from cavvy.providers import azure, base
from cavvy.providers.azure import MANIFEST
from cavvy.providers.azure.cloud import AzureCloud
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import CloudFault, read_fault
from cavvy.providers.vm.provider import VmProvider, make_provider
from cavvy.providers.vm.records import INSTALLATION
from cavvy.server.open_state import find_instance

PROOF = Proof("azure", False, "a strict stand-in for Azure Resource Manager")
CPU, T4, SPOT = "Standard_D2s_v5", "Standard_NC4as_T4_v3", Purchase.SPOT


class Token(NamedTuple):
    token: str


class FileCredential:
    """A credential of azure-identity, as far as the provider uses it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def get_token(self, *scopes: str) -> Token:
        assert [scope.endswith("/.default") for scope in scopes] == [True]
        return Token(self._file.read_text().strip())


class AzurePlace(RestPlace):
    """One subscription with one resource group."""

    api: AzureStandIn

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        settings = check_settings(
            MANIFEST,
            {
                "endpoint": self.api.url,
                "prices_endpoint": self.api.url,
                "subscription": SUBSCRIPTION,
                **table,
            },
        )
        context = base.ProviderContext(
            installation=installation,
            home=self.home,
            settings=settings,
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            find_instance=find_instance,
            now=self.cloud.now,
        )
        made = make_provider(
            MANIFEST, context, lambda each: AzureCloud(each, lambda: FileCredential(self.file))
        )
        self._providers.append(made)
        return made


def make_cloud(account: AzurePlace, **table: Scalar) -> AzureCloud:
    return AzureCloud(
        base.ProviderContext(
            installation="ours",
            home=account.home,
            settings=check_settings(MANIFEST, table),
            find_instance=find_instance,
            now=account.cloud.now,
        )
    )


async def find_offer(
    harness: ContractHarness, size: str, purchase: Purchase = Purchase.ON_DEMAND
) -> Offer:
    offers = await harness.ours.offers()
    return next(o for o in offers if o.instance_type == size and o.purchase is purchase)


async def start_one(
    harness: ContractHarness,
    size: str,
    purchase: Purchase = Purchase.ON_DEMAND,
    *,
    nodes: int = 1,
    word: str = "one",
    **options: object,
) -> base.GangSeen:
    """Launch a gang on this size and wait until it runs."""
    gang = replace(await harness.spec(word, nodes=nodes), **options)  # type: ignore[arg-type]
    await harness.launch(replace(gang, offer=await find_offer(harness, size, purchase)))
    await harness.place.settle()
    return await harness.one(gang.name)


class TestAzure(RestContract):
    package, traits, stand_in = azure, AzureCloud.traits, AzureStandIn

    def make_place(self, server: RestServer, home: Path) -> AzurePlace:
        return AzurePlace(self.package, self.traits, self.stand_in, server, home)

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("Azure has no second machine of one name: it refuses other values")

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = asyncio.run(account.provider("ours").whoami())
        assert ("resource group", "cavvy") in facts
        assert self.stand_in.key not in str(facts)

    def test_offers_have_live_prices_and_parts_of_gpus_are_reported(
        self, account: AzurePlace
    ) -> None:
        provider = account.provider("ours")
        found = {
            (o.instance_type, o.purchase.value): (
                o.accelerator,
                o.accelerator_count,
                o.accelerator_memory_mib // 1024,
                o.rate.micros_per_hour / 1e6,
            )
            for o in asyncio.run(provider.offers())
        }
        assert found == {
            (CPU, "on-demand"): (None, 0, 0, 0.096),
            (CPU, "spot"): (None, 0, 0, 0.019),
            (T4, "on-demand"): ("T4", 1, 16, 0.526),
            (T4, "spot"): ("T4", 1, 16, 0.11),
            ("Standard_ND96isr_H100_v5", "on-demand"): ("H100", 8, 80, 98.32),
            ("Standard_ND96isr_H100_v5", "spot"): ("H100", 8, 80, 40.1),
            ("Standard_ND96isr_MI300X_v5", "on-demand"): ("MI300X", 8, 192, 48.0),
            ("Standard_NP10s", "on-demand"): ("U250", 1, 64, 1.65),
            ("Standard_NV36ads_A10_v5", "on-demand"): ("A10", 1, 24, 3.2),
            ("Standard_NV36ads_A10_v5", "spot"): ("A10", 1, 24, 0.64),
            ("Standard_NV6ads_A10_v5", "on-demand"): ("A10", 1, 4, 0.454),
            ("Standard_NV6ads_A10_v5", "spot"): ("A10", 1, 4, 0.09),
        }
        parts = {o.instance_type: o.accelerators_text for o in asyncio.run(provider.offers())}
        assert parts["Standard_NV6ads_A10_v5"] == "1/6"
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["sizes not offered"] == (
            "Standard_NC40ads_Z9000_v9, Standard_NV4as_v4 has 1/8 of an MI25"
        )

    async def test_quotas_limit_offers_by_family_and_purchase(self, account: AzurePlace) -> None:
        account.api.limits |= {
            ("eastus", "standardNCASv3_T4Family"): 8,
            ("eastus", "lowPriorityCores"): 4,
            ("eastus", "standardNDSH100v5Family"): 0,
        }
        provider = account.provider("ours")
        found = {(o.instance_type, str(o.purchase)): o for o in await provider.offers()}
        nodes = {key: offer.quota_nodes for key, offer in found.items()}
        assert (nodes[T4, "on-demand"], nodes[T4, "spot"]) == (2, 1)
        assert nodes["Standard_ND96isr_H100_v5", "on-demand"] == 0
        assert nodes[CPU, "spot"] == 2
        assert found[T4, "on-demand"].limited_by == (
            "the quota standardNCASv3_T4Family in eastus (0 of 8 vCPUs used, 8 left)"
        )
        told = {quota.name: quota for quota in await provider.quotas()}
        assert "availabilitySets" not in told
        assert told["standardNCASv3_T4Family"].family == "Standard NCASv3_T4 Family vCPUs"
        assert told["lowPriorityCores"].purchase is Purchase.SPOT
        assert told["cores"].request == (
            "az quota update --resource-name cores --scope /subscriptions/"
            f"{SUBSCRIPTION}/providers/Microsoft.Compute/locations/eastus --resource-type "
            "dedicated --limit-object value=NEW_LIMIT limit-object-type=LimitValue"
        )

    async def test_quotas_that_cannot_be_read_limit_nothing(self, account: AzurePlace) -> None:
        account.api.quota_fault = CloudFault(403, "AuthorizationFailed", "no right")
        provider = account.provider("ours")
        assert {offer.quota_nodes for offer in await provider.offers()} == {None}
        assert "no right" in dict(await provider.whoami())["quotas"]
        with pytest.raises(base.Refused, match="no right"):  # and not an empty list
            await provider.quotas()
        with pytest.raises(base.Refused, match="no right"):
            await account.provider("ours").quotas()

    async def test_a_region_that_fails_hides_no_other(self, account: AzurePlace) -> None:
        provider = account.provider("ours", regions="eastus, westeurope")
        account.api.faulty["westeurope"] = CloudFault(403, "AuthorizationFailed", "no right")
        assert {offer.region for offer in await provider.offers()} == {"eastus"}
        assert [each.partition(":")[0] for each in provider.silent()] == ["westeurope"]
        assert "no right" in dict(await provider.whoami())["silent"]
        assert {quota.region for quota in await provider.quotas()} == {"eastus"}
        assert [each.partition(":")[0] for each in provider.untold_quotas()] == ["westeurope"]
        account.api.faulty["eastus"] = account.api.faulty.pop("westeurope")
        await account.wait(timedelta(hours=1))
        assert {offer.region for offer in await provider.offers()} == {"westeurope"}
        account.api.faulty["westeurope"] = account.api.faulty["eastus"]
        await account.wait(timedelta(hours=1))
        with pytest.raises(base.Refused, match="no right"):
            await provider.offers()

    async def test_prices_are_kept_while_the_list_does_not_answer(
        self, account: AzurePlace
    ) -> None:
        provider = account.provider("ours")
        account.api.price_fault = CloudFault(503, "ServiceUnavailable", "later")
        with pytest.raises(base.TryAgain, match=r"price list cannot be read, .* HTTP 503"):
            await provider.offers()
        account.api.price_fault = None
        before = await provider.offers()
        account.api.price_fault = CloudFault(503, "ServiceUnavailable", "later")
        for _ in range(2):
            await account.wait(timedelta(hours=2))
            after = await provider.offers()
            assert [(x.key, x.rate, x.as_of) for x in after] == [
                (x.key, x.rate, x.as_of) for x in before
            ]
        await account.wait(timedelta(days=1))
        assert {x.as_of for x in await provider.offers()} == {before[0].as_of}

    def test_sizes_that_the_subscription_may_not_use_are_left_out(
        self, account: AzurePlace
    ) -> None:
        provider = account.provider("ours", regions="westeurope, eastus", sizes="*H100*")
        offers = asyncio.run(provider.offers())
        assert {(o.region, o.instance_type) for o in offers} == {
            ("eastus", "Standard_ND96isr_H100_v5")
        }

    async def test_a_gpu_boots_an_image_with_its_driver(self, account: AzurePlace) -> None:
        images = {
            CPU: "Canonical:ubuntu-24_04-lts:server:latest",
            T4: "microsoft-dsvm:ubuntu-hpc:2204:latest",
            "Standard_ND96isr_MI300X_v5": "microsoft-dsvm:ubuntu-hpc:2204-rocm:latest",
        }
        harness = account.harness()
        for size, image in images.items():
            gang = await start_one(harness, size, word=size[-5:].replace("_", "").lower())
            (machine,) = account.cloud.billed()
            storage = account.api.bodies[machine.id]["properties"]["storageProfile"]
            assert ":".join(storage["imageReference"].values()) == image
            await harness.remove(gang.name)
            await account.settle()

    async def test_a_size_without_an_image_for_its_driver_is_refused(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        with pytest.raises(base.Refused, match="name an image"):
            await start_one(harness, "Standard_NP10s")
        offers = await harness.ours.offers()
        assert {each.instance_type for each in offers if each.requires is not None} == {
            "Standard_NP10s",
            "Standard_NV36ads_A10_v5",
            "Standard_NV6ads_A10_v5",
        }
        named = account.provider("ours", image="a:b:c:latest")
        assert {each.requires for each in await named.offers()} == {None}

    async def test_one_deletion_removes_the_disk_the_interface_and_the_address(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await start_one(harness, CPU)
        (body,) = account.api.bodies.values()
        properties = body["properties"]
        (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
        (address,) = interface["properties"]["ipConfigurations"]
        public = address["properties"]["publicIPAddressConfiguration"]
        made = (
            properties["storageProfile"]["osDisk"],
            *(x["properties"] for x in (interface, public)),
        )
        assert [each["deleteOption"] for each in made] == ["Delete"] * 3
        assert "priority" not in properties
        await harness.remove(gang.name)

    @pytest.mark.proves(PROOF, "disk")
    async def test_a_task_chooses_its_disk(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await start_one(harness, CPU, disk_gib=300, disk_type="Premium_LRS")
        await harness.remove(gang.name)
        (body,) = account.api.bodies.values()
        disk = body["properties"]["storageProfile"]["osDisk"]
        assert disk["diskSizeGB"] == 300
        assert disk["managedDisk"] == {"storageAccountType": "Premium_LRS"}

    async def test_spot_machines_are_deleted_by_an_eviction_which_is_a_preemption(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await start_one(harness, T4, SPOT)
        (machine,) = account.cloud.billed()
        properties = account.api.bodies[machine.id]["properties"]
        assert properties["priority"] == "Spot"
        assert properties["evictionPolicy"] == "Delete"
        assert properties["billingProfile"] == {"maxPrice": -1}
        account.cloud.change(machine.id, ended=account.cloud.now())
        await account.wait(timedelta(minutes=1))
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted, seen.no_capacity) == (base.GangState.ENDED, True, False)
        assert "evict" in seen.reason

    @pytest.mark.parametrize("deleted", [True, False])
    async def test_an_eviction_is_told_from_a_deletion_after_a_restart(
        self, account: AzurePlace, harness: ContractHarness, deleted: bool
    ) -> None:
        gang = await start_one(harness, T4, SPOT)
        (machine,) = account.cloud.billed()
        if deleted:  # the machine has shut itself down, and the server has deleted it
            account.cloud.change(machine.id, off=True)
            await account.wait(timedelta(minutes=5))
            await harness.ours.gangs()
            assert account.billed() == 0
        else:
            account.cloud.change(machine.id, ended=account.cloud.now())
        harness.restart()
        await account.wait(timedelta(minutes=30))  # Azure has forgotten the machine
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (base.GangState.ENDED, not deleted)

    async def test_an_eviction_that_no_list_has_shown_is_a_preemption(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await start_one(harness, T4, SPOT)
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, ended=account.cloud.now())
        await account.wait(timedelta(minutes=30))  # Azure has forgotten the machine
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (base.GangState.ENDED, True)

    async def test_capacity_that_is_missing_at_the_end_of_a_creation(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        """Azure accepts the request, and finds no machine for it later."""
        account.api.late = "AllocationFailed"
        before = await find_offer(harness, T4, SPOT)
        gang = await start_one(harness, T4, SPOT)
        await account.wait(timedelta(minutes=1))
        gang = await harness.one(gang.name)
        assert (gang.state, gang.no_capacity) == (base.GangState.ENDED, True)
        assert "AllocationFailed" in gang.reason
        assert account.billed() == 0  # the provider has deleted what Azure left behind
        keys = [offer.key for offer in await harness.ours.offers()]
        assert before.key not in keys
        assert before.key.replace("spot", "on-demand") in keys
        again = replace(await harness.spec("again"), offer=before)
        with pytest.raises(base.NoCapacity, match="recently had no capacity"):
            await harness.ours.launch(again)
        await account.wait(timedelta(minutes=11))
        assert before.key in [offer.key for offer in await harness.ours.offers()]

    @pytest.mark.parametrize("owner", ["a person", "another installation"])
    async def test_the_failed_machines_of_others_are_not_deleted(
        self, account: AzurePlace, harness: ContractHarness, owner: str
    ) -> None:
        account.api.late = "AllocationFailed"
        if owner == "a person":
            other = account.cloud.add("cv-train-prod", {"team": "vision"})
            account.api.bodies[other] = {
                "location": "eastus",
                "properties": {"hardwareProfile": {"vmSize": T4}},
            }
            account.api.failed[other] = "AllocationFailed"
        else:
            gang = await harness.spec("theirs", installation="theirs")
            offer = await find_offer(harness, T4)
            await account.provider("theirs").launch(replace(gang, offer=offer))
            (other,) = (each.id for each in account.cloud.billed())
        await account.settle()
        for _ in range(3):
            await harness.ours.gangs()
            await account.wait(timedelta(minutes=1))
        assert T4 in [offer.instance_type for offer in await harness.ours.offers()]
        assert [each.id for each in account.cloud.billed()] == [other]
        account.cloud.change(other, ended=account.cloud.now())

    async def test_a_machine_whose_capacity_is_missing_is_billed_until_its_deletion(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        account.api.late = "AllocationFailed"
        account.fail_deletions(True)
        gang = await start_one(harness, T4, SPOT)
        assert gang.nodes[0].ended_at is None
        assert account.billed() == 1
        account.fail_deletions(False)
        for _ in range(2):
            await account.wait(timedelta(minutes=1))
            seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (base.GangState.ENDED, True)
        assert not seen.preempted
        assert account.billed() == 0

    @pytest.mark.parametrize("boots", [False, True])
    async def test_a_bill_begins_when_azure_has_started_the_machine(
        self, account: AzurePlace, harness: ContractHarness, boots: bool
    ) -> None:
        """Azure does not bill a machine while it looks for a place for it."""
        gang = await harness.spec("one")
        await harness.launch(replace(gang, offer=await find_offer(harness, T4)))
        created = account.cloud.now()
        await account.wait(timedelta(seconds=40))  # the stand-in boots a machine for a minute
        account.api.boots = boots
        (node,) = (await harness.one(gang.name)).nodes
        assert node.started_at == (created if boots else None)
        await account.settle()
        (node,) = (await harness.one(gang.name)).nodes
        assert node.started_at == created + timedelta(seconds=0 if boots else 40)
        await harness.remove(gang.name)

    async def test_a_machine_that_is_on_survives_an_extension_that_fails(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        account.api.late = "VMExtensionProvisioningError"
        gang = await start_one(harness, CPU)
        for _ in range(3):
            await account.wait(timedelta(minutes=1))
            seen = await harness.one(gang.name)
        assert (seen.state, seen.reason) == (base.GangState.RUNNING, "")
        await harness.remove(gang.name)

    @pytest.mark.parametrize("status", [403, 429])
    async def test_machines_are_deleted_if_the_subscription_does_not_list_its_machines(
        self, account: AzurePlace, harness: ContractHarness, status: int
    ) -> None:
        """The role of the server may hold for the resource group only."""
        account.api.power_fault = CloudFault(status, "AuthorizationFailed", "no")
        gang = await start_one(harness, CPU)
        assert gang.state is base.GangState.RUNNING
        await harness.remove(gang.name)
        assert account.billed() == 0

    async def test_a_machine_that_cannot_boot_is_deleted(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        account.api.late = "OSProvisioningTimedOut"
        gang = await start_one(harness, CPU)
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (base.GangState.ENDED, False)
        assert "OSProvisioningTimedOut" in seen.reason

    async def test_a_machine_that_is_off_is_deleted_within_minutes(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        """The list of a resource group does not say that a machine is off, and Azure bills it."""
        gang = await start_one(harness, CPU)
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, off=True)
        for _ in range(3):
            await account.wait(timedelta(minutes=1))
            await harness.ours.gangs()
        assert account.billed() == 0
        await account.wait(timedelta(minutes=3))
        assert (await harness.one(gang.name)).state is base.GangState.ENDED

    async def test_what_a_failed_creation_left_without_a_machine_is_deleted(
        self, account: AzurePlace
    ) -> None:
        """Only parts of this installation, and not before a second look ten minutes later."""
        gateway: dict[str, object] = {"privateEndpoint": {"id": "x"}, "natGateway": {"id": "x"}}
        used: dict[str, object] = {"virtualMachine": {"id": "x"}, "ipConfiguration": {"id": "x"}}
        harness = account.harness()
        gang = await start_one(harness, CPU)
        (machine,) = account.cloud.billed()
        network = account.api.bodies[machine.id]["properties"]["networkProfile"]
        (interface,) = network["networkInterfaceConfigurations"]
        (inner,) = interface["properties"]["ipConfigurations"]
        address = inner["properties"]["publicIPAddressConfiguration"]
        await harness.remove(gang.name)
        for kind, part in (("interfaces", interface), ("addresses", address)):
            own = {"name": part["name"], "tags": part["tags"]}
            theirs = {**part["tags"], INSTALLATION: "another"}
            account.api.leftovers[kind] = [
                {**own, "name": f"{part['name']}-a1b2", "properties": {}},
                {**own, "name": "used", "properties": used},
                {**own, "name": "gateway", "properties": gateway},
                {"name": part["name"], "tags": theirs, "properties": {}},
                {"name": "cv-prod-ip", "properties": {}},
            ]
        for _ in range(9):
            await harness.ours.gangs()
            assert [len(each) for each in account.api.leftovers.values()] == [5, 5]
            await account.wait(timedelta(minutes=1))
        for _ in range(2):
            await account.wait(timedelta(minutes=11))
            await harness.ours.gangs()
        for left in account.api.leftovers.values():
            names = [each["name"] for each in left]
            assert names == ["used", "gateway", machine.name, "cv-prod-ip"]

    async def test_infiniband_connects_the_machines_of_an_availability_set(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        """Azure has no spot machines in such a set. It is deleted when its machines are gone."""
        h100 = await find_offer(harness, "Standard_ND96isr_H100_v5")
        spot = await find_offer(harness, "Standard_ND96isr_H100_v5", Purchase.SPOT)
        t4 = await find_offer(harness, "Standard_NC4as_T4_v3")
        asked = replace(await harness.spec("ib", nodes=2), network=NetworkNeed(fabric=Fabric.RDMA))
        with pytest.raises(base.NoCapacity, match="connects no spot machines by InfiniBand"):
            await harness.ours.launch(replace(asked, offer=spot))
        assert (account.api.sets, account.api.bodies) == ({}, {})
        other = replace(asked, name=f"{asked.name}-b", network=None)
        gangs = [
            replace(asked, offer=h100),
            replace(other, offer=spot),
            replace(other, name=f"{asked.name}-c", offer=t4),
            replace(other, name=f"{asked.name}-d", offer=h100, nodes=1),
        ]
        for each in gangs:
            await harness.ours.launch(each)
        (name,) = account.api.sets
        used = [each["properties"].get("availabilitySet") for each in account.api.bodies.values()]
        assert [str(each and each["id"]).rpartition("/")[2] for each in used[:2]] == [name, name]
        assert used[2:] == [None] * 5
        for _ in range(3):
            await account.wait(timedelta(minutes=11))
            await harness.ours.gangs()
        assert list(account.api.sets) == [name]
        for each in gangs:
            await harness.ours.remove(each.name)
        for left in (1, 1, 0):
            await account.wait(timedelta(minutes=11))
            await account.provider("theirs").gangs()
            assert len(account.api.sets) == left
            await harness.ours.gangs()
        assert account.billed() == 0

    async def test_a_role_without_availability_sets_is_named(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        account.api.may_set = False
        offer = await find_offer(harness, "Standard_ND96isr_H100_v5")
        gang = replace(await harness.spec("ib", nodes=2), offer=offer)
        with pytest.raises(
            base.Refused, match="the role needs the actions read, write and delete of"
        ):
            await harness.ours.launch(gang)
        await harness.ours.gangs()
        await harness.ours.remove(gang.name)

    async def test_a_region_gets_one_network_which_a_setting_replaces(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await start_one(harness, CPU, nodes=3)
        assert set(account.api.networks) == {("network", "cavvy-eastus"), ("rules", "cavvy-eastus")}
        await harness.remove(gang.name)
        account.api.networks.clear()  # a person deletes it; the next launch makes it again
        with pytest.raises(base.Refused, match="subnet"):
            await start_one(harness, CPU, word="two")
        gang = await start_one(harness, CPU, word="three")
        await harness.remove(gang.name)
        subnet = "/subscriptions/1/resourceGroups/net/providers/x/virtualNetworks/a/subnets/b"
        provider = account.provider("ours", subnets=f"eastus={subnet}", public_ip=False)
        await provider.launch(await harness.spec("named"))
        text = str(list(account.api.bodies.values())[-1]["properties"]["networkProfile"])
        assert subnet in text
        assert "publicIPAddressConfiguration" not in text
        await provider.remove((await harness.spec("named")).name)

    async def test_no_machine_is_requested_before_its_network_is_ready(
        self, account: AzurePlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("early")
        network = account.api.networks
        account.api.slow_networks = True
        for _ in range(2):
            with pytest.raises(base.TryAgain, match="still creating the network cavvy-eastus"):
                await harness.ours.launch(gang)
            assert account.api.bodies == {}
        network["network", "cavvy-eastus"]["properties"]["provisioningState"] = "Failed"
        account.api.slow_networks = False  # the next launch makes it again
        await harness.ours.launch(gang)
        await harness.remove(gang.name)

    def test_the_set_up_that_is_missing_is_named(self, account: AzurePlace) -> None:
        account.api.subscriptions = [SUBSCRIPTION, "another"]
        with pytest.raises(base.Refused, match="has 2 enabled subscriptions"):
            asyncio.run(account.provider("ours", subscription="").offers())
        account.api.registered = False
        with pytest.raises(base.Refused, match="az provider register"):
            account.launch()
        account.api.group = False
        with pytest.raises(base.Refused, match="az group create --name cavvy"):
            asyncio.run(account.provider("ours").gangs())

    def test_azure_identity_finds_the_login_of_the_command_line_tool(
        self, account: AzurePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the real package: only the program `az` is a stand-in."""
        token = {"accessToken": account.api.key, "expires_on": 4102444800}
        tool = tmp_path / "bin" / "az"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(token)}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
        table: dict[str, Scalar] = {"endpoint": account.api.url, "subscription": SUBSCRIPTION}
        cloud = make_cloud(account, **table)
        assert asyncio.run(cloud.list()) == []
        cloud.close()
        tool.write_text("#!/bin/sh\necho 'Please run az login to set up an account.' >&2\nexit 1\n")
        cloud = make_cloud(account, **table)
        with pytest.raises(base.Refused, match="sign in with `az login`"):
            asyncio.run(cloud.list())
        cloud.close()

    def test_a_token_service_that_does_not_answer_ends_the_call(
        self, account: AzurePlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the real package, which by default waits 300 s for each of four tries."""
        monkeypatch.setattr("cavvy.providers.azure.account._CONNECT_S", 0.1)
        monkeypatch.setattr("cavvy.providers.azure.account._READ_S", 0.1)
        monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
        monkeypatch.setenv("IDENTITY_HEADER", "x")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host, port = silent.getsockname()
            monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://{host}:{port}")
            table: dict[str, Scalar] = {"endpoint": account.api.url, "subscription": SUBSCRIPTION}
            cloud = make_cloud(account, **table)
            with pytest.raises((CloudFault, base.Refused)):
                asyncio.run(cloud.list())
            cloud.close()

    async def test_a_wrong_subnet_or_image_is_refused(self, account: AzurePlace) -> None:
        with pytest.raises(base.Refused, match="is not REGION=RESOURCE-ID"):
            account.provider("ours", subnets="eastus")
        harness = account.harness()
        gang = await harness.spec("wrong")
        with pytest.raises(base.Refused, match="neither publisher"):
            await harness.ours.launch(replace(gang, options={"image": "ubuntu"}))

    @pytest.mark.parametrize(
        ("code", "message", "error"),
        [
            ("SkuNotAvailable", "", base.NoCapacity),
            ("AllocationFailed", "", base.NoCapacity),
            ("ZonalAllocationFailed", "", base.NoCapacity),
            ("OverconstrainedAllocationRequest", "", base.NoCapacity),
            ("QuotaExceeded", "", base.QuotaTooSmall),
            (
                "OperationNotAllowed",
                "exceeding approved LowPriorityCores quota",
                base.QuotaTooSmall,
            ),
            ("OperationNotAllowed", "another operation is in progress", base.TryAgain),
            ("RetryableError", "", base.TryAgain),
        ],
    )
    def test_only_missing_capacity_lets_the_job_try_other_sizes(
        self, account: AzurePlace, code: str, message: str, error: type[Exception]
    ) -> None:
        cloud = make_cloud(account)
        fault = cloud.name_quota(CloudFault(409, code, message))
        assert type(read_fault(cloud, fault, "a launch", making=True)) is error
        cloud.close()


def test_the_guide_lists_the_rights_of_all_calls() -> None:
    """Azure checks the other rights when one of these calls makes or joins a part of a machine."""
    guide = Path(__file__).parents[4] / "docs" / "guides" / "azure.md"
    block = re.search(r"```json\n(.*?)```", guide.read_text(), re.DOTALL)
    assert block is not None
    actions = json.loads(block[1])
    listed = set(actions)
    verbs = {"GET": "read", "PUT": "write", "DELETE": "delete"}
    called: set[str] = set()
    subscription: set[str] = set()  # the actions outside the resource group
    for operation in OPERATIONS.values():
        method, path, _ = operation.describe(SUBSCRIPTION, "cavvy")
        kind = "/".join(path.split("/providers/")[1].split("/")[:2])
        kind = kind.replace("/locations", "/locations/usages")
        (called if operation.group else subscription).add(f"{kind}/{verbs[method]}")
    assert set(actions[:3]) == subscription
    called |= subscription
    assert called <= listed
    assert listed - called == {
        "Microsoft.Resources/subscriptions/resourceGroups/read",
        "Microsoft.Compute/disks/write",
        "Microsoft.Compute/disks/delete",
        "Microsoft.Network/networkInterfaces/write",
        "Microsoft.Network/networkInterfaces/join/action",
        "Microsoft.Network/publicIPAddresses/write",
        "Microsoft.Network/publicIPAddresses/join/action",
        "Microsoft.Network/virtualNetworks/subnets/join/action",
        "Microsoft.Network/networkSecurityGroups/join/action",
    }
