"""The Nebius provider keeps the contract, on a stand-in that checks every request."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.contract.nebius_stand_in import CLUSTER, PROJECT, NebiusStandIn
from tests.proofs import Proof
from tests.records import pick_prices, words_of

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, ResourceSpec, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers import nebius
from cavvy.providers.base import GangState, PartlyUnknown, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.nebius.api import flatten
from cavvy.providers.nebius.cloud import NebiusCloud, _read, object_to
from cavvy.providers.vm.cloud import CloudMachine, MachineState, SshTarget
from cavvy.providers.vm.records import make_mark

PROOF = Proof("nebius", False, "a strict stand-in for Nebius's gRPC API")


read_prices = pick_prices()


class NebiusPlace(RestPlace):
    """One project, with the catalog's prices."""

    api: NebiusStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(nebius, NebiusCloud.traits, NebiusStandIn, server, home)

    def close(self) -> None:
        super().close()
        self.api.close()

    def launch_with(
        self, kind: str, purchase: Purchase = Purchase.ON_DEMAND, **changes: Any
    ) -> Any:
        """Launch a machine of a type, and remove it; returns the request for it."""
        settings = changes.pop("settings", {})

        async def scenario() -> None:
            gang = await self.harness().spec("typed")
            provider = self.provider(gang.installation, **settings)
            (offer,) = [
                each
                for each in await provider.offers()
                if (each.instance_type, each.purchase) == (kind, purchase)
            ]
            await provider.launch(replace(gang, offer=offer, **changes))
            await self.settle()
            await provider.remove(gang.name)

        asyncio.run(scenario())
        return self.api.asked[-1]["spec"]


class TestNebius(RestContract):
    package, traits, stand_in = nebius, NebiusCloud.traits, NebiusStandIn
    make_place = NebiusPlace

    def test_offers_are_the_catalogs_prices_of_listed_presets(self, account: NebiusPlace) -> None:
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        found = {(each.instance_type, each.purchase): each for each in offers}
        assert {kind for kind, _ in found} == {
            "cpu-e2_2vcpu-8gb",
            "cpu-e2_4vcpu-16gb",
            "cpu-d3_4vcpu-16gb",
            "gpu-l40s-a_1gpu-8vcpu-32gb",
            "gpu-h100-sxm_1gpu-16vcpu-200gb",
            "gpu-h100-sxm_8gpu-128vcpu-1600gb",
        }
        assert {each.region for each in offers} == {"eu-north1"}
        spot = found["gpu-h100-sxm_8gpu-128vcpu-1600gb", Purchase.SPOT]
        assert (spot.accelerator, spot.accelerator_count) == ("H100", 8)
        unpriced = dict(asyncio.run(provider.whoami()))["GPU presets without a known price"]
        assert unpriced == "gpu-next-sxm_1gpu-16vcpu-200gb in eu-north1"

    def test_a_project_that_fails_hides_no_other(self, account: NebiusPlace) -> None:
        gone = "project-e00gone"
        provider = account.provider("ours", projects=f"{gone}, {PROJECT}")
        assert {each.region for each in asyncio.run(provider.offers())} == {"eu-north1"}
        assert [each.partition(":")[0] for each in provider.silent()] == [gone]
        with pytest.raises(Refused, match="no such project"):
            asyncio.run(account.provider("ours", projects=gone).offers())

    async def test_a_project_that_fails_hides_no_machines_of_others(
        self, account: NebiusPlace
    ) -> None:
        gang, other = await account.harness().spec("one"), "project-e01none"
        provider = account.provider(gang.installation, projects=f"{other}, {PROJECT}")
        offers = await provider.offers()
        assert {each.region for each in offers} == {"eu-north1"}
        with pytest.raises(Refused, match="a region"):  # it may be in the other project
            await provider.gangs(gang.name)
        with pytest.raises(Refused, match="a region"):  # its region is unknown
            await provider.launch(replace(gang, offer=offers[0]))
        account.api.regions[other] = "eu-west1"
        await account.wait(timedelta(minutes=1))
        await provider.offers()
        await provider.launch(replace(gang, offer=offers[0]))
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        with pytest.raises(PartlyUnknown, match="eu-west1") as caught:
            await provider.gangs()
        assert caught.value.seen == [seen]
        await provider.remove(gang.name)
        account.api.regions[other] = "eu-north1"
        with pytest.raises(Refused, match="several projects are in the region eu-north1"):
            await account.provider("ours", projects=f"{other}, {PROJECT}").offers()

    async def test_disks_are_billed_at_the_price_of_the_settings(
        self, account: NebiusPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("disk")
        provider = account.provider(gang.installation, disk_usd_gib_month=0.071, disk_gib=120)
        offer = (await provider.offers())[0]
        assert [(each.name, each.price.micros) for each in offer.extras] == [
            ("network_ssd", 71_000)
        ]
        await provider.launch(replace(gang, offer=offer))
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        (extra,) = seen.nodes[0].extras
        assert (extra.kind, extra.name, extra.units) == (ChargeKind.DISK, "network_ssd", 120)
        await provider.remove(gang.name)
        disk = account.api.asked[0]["spec"]["bootDisk"]["managedDisk"]["spec"]
        assert disk["sizeGibibytes"] == "120"

    @pytest.mark.parametrize(
        ("kind", "family"),
        [
            ("cpu-e2_2vcpu-8gb", "ubuntu24.04-driverless"),
            ("gpu-l40s-a_1gpu-8vcpu-32gb", "ubuntu24.04-cuda12"),
            ("gpu-h100-sxm_1gpu-16vcpu-200gb", "ubuntu24.04-cuda13.0"),
        ],
    )
    def test_machines_boot_the_newest_image_that_supports_them(
        self, account: NebiusPlace, kind: str, family: str
    ) -> None:
        spec = account.launch_with(kind)
        disk = spec["bootDisk"]["managedDisk"]["spec"]
        assert disk["sourceImageFamily"] == {"imageFamily": family}
        assert (disk["type"], disk["sizeGibibytes"]) == ("NETWORK_SSD", "100")
        assert "preemptible" not in spec
        assert "gpuCluster" not in spec

    @pytest.mark.proves(PROOF, "disk")
    def test_the_settings_name_the_image_the_subnet_and_the_disk(
        self, account: NebiusPlace
    ) -> None:
        account.api.subnets |= {"vpcsubnet-e00two": "two"}
        settings = {
            "image_family": "ubuntu22.04-cuda12",
            "subnet": "two",
            "disk_gib": 200,
            "public_address": False,
        }
        kind = "gpu-h100-sxm_1gpu-16vcpu-200gb"
        spec = account.launch_with(kind, disk_type="network_ssd_io_m3", settings=settings)
        disk = spec["bootDisk"]["managedDisk"]["spec"]
        assert disk["sourceImageFamily"] == {"imageFamily": "ubuntu22.04-cuda12"}
        assert (disk["type"], disk["sizeGibibytes"]) == ("NETWORK_SSD_IO_M3", "279")
        (network,) = spec["networkInterfaces"]
        assert network["subnetId"] == "vpcsubnet-e00two"
        assert "publicIpAddress" not in network

    @pytest.mark.proves(PROOF, "network")
    def test_a_task_names_its_subnet_and_its_security_groups(self, account: NebiusPlace) -> None:
        account.api.subnets |= {"vpcsubnet-e00two": "two"}
        need = NetworkNeed(subnet="two", security_groups=("vpcsecuritygroup-1",), public_ip=False)
        (network,) = account.launch_with("cpu-e2_2vcpu-8gb", network=need)["networkInterfaces"]
        assert network["subnetId"] == "vpcsubnet-e00two"
        assert network["securityGroups"] == [{"id": "vpcsecuritygroup-1"}]
        assert "publicIpAddress" not in network
        task = TaskSpec(
            name="one", run="true", resources=ResourceSpec(network=NetworkNeed(vpc="mine"))
        )
        (objection,) = object_to(task)
        assert objection.field == "resources.network.vpc"

    async def test_a_preemptible_machine_that_stops_was_preempted(
        self, account: NebiusPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("spot")
        offers = [each for each in await harness.ours.offers() if each.purchase is Purchase.SPOT]
        await harness.launch(replace(gang, offer=offers[0]))
        await account.settle()
        await harness.ours.gangs()
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, off=True)
        await account.settle()
        (seen,) = await harness.ours.gangs(gang.name)
        assert seen.preempted
        assert account.cloud.billed() == []
        await harness.remove(gang.name)
        assert account.api.asked[0]["spec"]["preemptible"] == {"onPreemption": "STOP"}

    async def test_a_creation_that_fails_later_is_missing_capacity_and_deleted(
        self, account: NebiusPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("later")
        (machine,) = account.cloud.billed()
        account.api.failed[machine.id] = "insufficient-capacity"
        await account.wait(timedelta(seconds=25))
        (seen,) = await harness.ours.gangs(gang.name)
        assert seen.no_capacity
        assert account.cloud.billed() == []
        await harness.remove(gang.name)

    async def test_a_disk_without_its_machine_is_deleted_after_an_hour(
        self, account: NebiusPlace
    ) -> None:
        theirs = {"computedisk-2": "data", "computedisk-3": "cv-images"}
        harness = account.harness()
        gang = await harness.running("other")
        gone = f"cv-{make_mark('ours')}-gone-abcd-0-1"
        account.api.loose = {"computedisk-1": gone, **theirs, "computedisk-4": f"{gone}0"}
        account.api.shared = {"computedisk-4": "computeinstance-e00reads"}
        for _ in range(12):
            await account.wait(timedelta(minutes=5))
            await harness.ours.gangs()
            assert len(account.api.loose) == 4
        await account.wait(timedelta(minutes=11))
        await harness.ours.gangs()
        await harness.remove(gang.name)
        assert account.api.loose.keys() == {*theirs, "computedisk-4"}

    def test_machines_with_eight_gpus_join_the_named_cluster(self, account: NebiusPlace) -> None:
        kind, need = "gpu-h100-sxm_8gpu-128vcpu-1600gb", NetworkNeed(fabric=Fabric.RDMA)
        with pytest.raises(Refused, match="gpu_clusters: the task needs InfiniBand"):
            account.launch_with(kind, network=need)
        settings = {"gpu_clusters": f"computegpucluster-e00other, {CLUSTER}"}
        assert account.launch_with(kind, network=need, settings=settings)["gpuCluster"] == {
            "id": CLUSTER
        }
        assert "gpuCluster" in account.launch_with(kind, settings=settings)

    def test_a_service_account_gets_its_token_by_a_signature(self, account: NebiusPlace) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        account.api.accounts["publickey-1"] = key.public_key()
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()
        subject = {
            "type": "JWT",
            "alg": "RS256",
            "private-key": pem,
            "kid": "publickey-1",
            "iss": "serviceaccount-1",
            "sub": "serviceaccount-1",
        }
        account.file.write_text(json.dumps({"subject-credentials": subject}))
        assert asyncio.run(account.provider("ours").gangs()) == []
        account.api.accounts.clear()
        with pytest.raises(Refused, match="check the API key"):
            asyncio.run(account.provider("ours").gangs())

    @pytest.mark.parametrize(
        ("table", "words"),
        [({"projects": ""}, "projects: not set"), ({"subnet": "none"}, "needs one subnet none")],
    )
    def test_missing_settings_are_refused_with_what_to_do(
        self, account: NebiusPlace, table: dict[str, str], words: str
    ) -> None:
        with pytest.raises(Refused, match=words):
            account.launch_with("cpu-e2_2vcpu-8gb", settings=table)

    def test_a_file_without_credentials_is_refused(self, account: NebiusPlace) -> None:
        account.file.write_text("two words")
        with pytest.raises(Refused, match="neither an IAM token nor the credentials"):
            asyncio.run(account.provider("ours").offers())


@pytest.mark.parametrize(
    ("word", "state"),
    words_of(
        {
            MachineState.STARTING: "CREATING STARTING",
            MachineState.RUNNING: "RUNNING UPDATING",
            MachineState.STOPPED: "STOPPED ERROR",
            MachineState.ENDED: "DELETING",
        }
    ),
)
def test_an_instance_in_the_documented_form_is_read(word: str, state: MachineState) -> None:
    port = {
        "ipAddress": {"address": "10.0.0.5/32"},
        "publicIpAddress": {"address": "203.0.113.9/32"},
    }
    told = {
        "metadata": {
            "id": "computeinstance-e00a",
            "parentId": PROJECT,
            "name": "cv-one",
            "createdAt": "2026-11-02T10:00:00.123456Z",
        },
        "spec": {"resources": {"platform": "cpu-d3", "preset": "4vcpu-16gb"}},
        "status": {"state": word, "networkInterfaces": [port]},
    }
    assert replace(_read(flatten(told)), reason="") == CloudMachine(
        id="computeinstance-e00a",
        name="cv-one",
        state=state,
        address="10.0.0.5",
        ssh=SshTarget(address="203.0.113.9"),
        created_at=datetime(2026, 11, 2, 10, 0, 0, 123456, tzinfo=UTC),
    )
