"""The provider of Oracle Cloud Infrastructure keeps the contract, on a stand-in that verifies the
signature of every request and checks the request against OCI's published descriptions.
"""

import asyncio
import base64
import email.utils
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.contract.oci_stand_in import (
    DOMAINS,
    FINGERPRINT,
    HOME,
    TENANCY,
    USER,
    OciStandIn,
    encode_key,
    make_key,
    make_subnet,
    write_profile,
)
from tests.proofs import Proof
from tests.records import pick_prices, words_of

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers import oci
from cavvy.providers.base import (
    GangState,
    PartlyUnknown,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer
from cavvy.providers.oci.api import OciCredentials
from cavvy.providers.oci.cloud import OciCloud
from cavvy.providers.recording import FOLDER
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState, SshTarget

PROOF = Proof("oci", False, "a strict stand-in for the APIs of Oracle Cloud Infrastructure")
A10, H100, V100 = "VM.GPU.A10.1", "BM.GPU.H100.8", "VM.GPU3.1"
NOWHERE = {"endpoint": "", "limits_endpoint": "", "profile": ""}
# An example of a reply to LaunchInstance (https://apis.io/examples/oracle-cloud/, November 2026).
EXAMPLE = {
    "id": "ocid1.instance.oc1.iad.abcdefg123456",
    "compartmentId": "ocid1.compartment.oc1..abcdefg123456",
    "availabilityDomain": "Uocm:US-ASHBURN-AD-1",
    "displayName": "my-instance-01",
    "shape": "VM.Standard.E4.Flex",
    "lifecycleState": "RUNNING",
    "region": "us-ashburn-1",
    "imageId": "ocid1.image.oc1.iad.abcdefg123456",
    "timeCreated": "2026-01-15T10:30:00Z",
    "freeformTags": {"key1": "value1"},
    "definedTags": {"key1": "value1"},
}


read_prices = pick_prices()


class OciPlace(RestPlace):
    """One tenancy, with the configuration file and the API key of a user."""

    api: OciStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(oci, OciCloud.traits, OciStandIn, server, home)
        self.write_key(make_key())

    def write_key(self, key: rsa.RSAPrivateKey) -> None:
        write_profile(self.file, key, self.api.key)


@pytest.mark.usefixtures("keys_read_once")
class TestOci(RestContract):
    package, traits, stand_in = oci, OciCloud.traits, OciStandIn
    make_place = OciPlace
    launch_faults = read_replies("""
    NoCapacity     500  InternalError          Out of host capacity.
    NoCapacity     500  InternalError          Out of capacity for shape VM.GPU.A10.1
    NoCapacity     500  OutOfHostCapacity      Please try later
    TryAgain       500  InternalError          Internal error
    QuotaTooSmall  400  LimitExceeded          gpu-a10-count
    QuotaTooSmall  400  QuotaExceeded          the compartment's quota
    TryAgain       409  IncorrectState         The subnet is being changed
    Refused        409  InvalidatedRetryToken  It was terminated
    Refused        400  InvalidParameter       imageId
    """)

    def test_a_wrong_key_is_refused(self, account: OciPlace) -> None:
        account.write_key(make_other_key())
        with pytest.raises(Refused, match="check the API key"):
            asyncio.run(account.provider("ours").offers())

    def test_a_recorded_launch_has_no_secrets_and_can_be_replayed(
        self, account: RestPlace, rest_server: RestServer
    ) -> None:
        """The paths of lists contain the compartment."""
        super().test_a_recorded_launch_has_no_secrets_and_can_be_replayed(account, rest_server)
        (file,) = (account.home / FOLDER).iterdir()
        assert "compartmentId=" in file.read_text()
        assert TENANCY not in file.read_text()

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("pass_phrase=", "pass_phrase=wrong-", "or `pass_phrase` does not decrypt it"),
            ("fingerprint=", "finger=", r"\[DEFAULT\] lacks fingerprint"),
            ("key_file=", "key_file=/nowhere", "cannot be read: No such file"),
            ("[DEFAULT]", "no profile", "cannot be read: MissingSectionHeaderError"),
        ],
    )
    def test_an_incomplete_configuration_file_is_refused(
        self, account: OciPlace, old: str, new: str, problem: str
    ) -> None:
        account.file.write_text(account.file.read_text().replace(old, new, 1))
        with pytest.raises(Refused, match=problem) as caught:
            asyncio.run(account.provider("ours").offers())
        assert account.api.key not in str(caught.value)

    async def test_a_region_that_fails_hides_no_other(self, account: OciPlace) -> None:
        other = "eu-frankfurt-1"
        provider = account.provider("ours", regions=f"{HOME}, {other}")
        account.api.faulty[other] = CloudFault(403, "NotAuthorized", "no right")
        assert {offer.region for offer in await provider.offers()} == {HOME}
        assert [each.partition(":")[0] for each in provider.silent()] == [other]
        assert "no right" in dict(await provider.whoami())["silent"]
        account.api.faulty.clear()
        await account.wait(timedelta(minutes=1))
        assert {offer.region for offer in await provider.offers()} == {HOME, other}
        assert not provider.silent()
        account.api.faulty |= dict.fromkeys(DOMAINS, CloudFault(403, "NotAuthorized", "no"))
        await account.wait(timedelta(hours=1))
        with pytest.raises(Refused, match="no"):
            await provider.offers()

    def test_offers_are_the_shapes_of_a_domain_with_the_catalogs_price(
        self, account: OciPlace
    ) -> None:
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        assert {(each.region, each.zone) for each in offers} == {
            (HOME, each) for each in DOMAINS[HOME]
        }
        found = {(each.instance_type, each.purchase): each for each in offers}
        assert len({each.key for each in offers}) == len(offers) == 2 * len(found)
        assert {name for name, _ in found if name.startswith(("BM.", "VM.GPU"))} == {
            A10,
            V100,
            H100,
            "BM.GPU.MI300X.8",
        }
        on_demand = Purchase.ON_DEMAND
        assert found[H100, on_demand].minimum_charge == timedelta(hours=1)
        assert found[A10, on_demand].minimum_charge == timedelta(minutes=1)
        assert found[A10, on_demand].accelerator == "A10"
        assert (V100, Purchase.SPOT) in found
        assert (H100, Purchase.SPOT) not in found
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["GPU shapes without a known price"] == "BM.GPU4.8, VM.GPU.Z9.1"

    def test_prices_are_the_same_in_regions_that_the_catalog_does_not_list(
        self, account: OciPlace
    ) -> None:
        offers = asyncio.run(account.provider("ours", regions="eu-frankfurt-1").offers())
        (found,) = [each for each in offers if each.instance_type == A10]
        assert found.region == "eu-frankfurt-1"
        assert {each.rate for each in read_prices("oci") if each.instance_type == A10} == {
            found.rate
        }

    def test_the_region_is_the_one_of_the_profile(self, account: OciPlace) -> None:
        offers = asyncio.run(account.provider("ours", profile="LAB").offers())
        assert {each.region for each in offers} == {"eu-frankfurt-1"}
        with pytest.raises(Refused, match=r"has no profile \[HOME\]"):
            asyncio.run(account.provider("ours", profile="HOME").offers())

    async def test_machines_of_several_regions_are_one_list(self, account: OciPlace) -> None:
        table: dict[str, Scalar] = {"regions": f"{HOME}, eu-frankfurt-1"}
        harness, provider = account.harness(), account.provider("ours", **table)
        for region in (HOME, "eu-frankfurt-1"):
            offer = await pick(provider, A10, Purchase.ON_DEMAND, region)
            gang = replace(await harness.spec(region), offer=offer)
            await provider.launch(gang)
            await account.settle()
        assert len(await provider.gangs()) == 2
        for each in await provider.gangs():
            await provider.remove(each.name)
        assert set(account.api.regions.values()) == {HOME, "eu-frankfurt-1"}

    async def test_a_region_that_fails_hides_and_keeps_no_machines_of_others(
        self, account: OciPlace
    ) -> None:
        table: dict[str, Scalar] = {"regions": f"{HOME}, eu-frankfurt-1"}
        harness, provider = account.harness(), account.provider("ours", **table)
        offer = await pick(provider, A10, Purchase.ON_DEMAND, HOME)
        gang = replace(await harness.spec("home"), offer=offer)
        await provider.launch(gang)
        await account.settle()
        account.api.fail = fail_list_of("eu-frankfurt-1")
        (seen,) = await provider.gangs(gang.name)
        assert seen.state is GangState.RUNNING
        with pytest.raises(PartlyUnknown, match="eu-frankfurt-1") as caught:
            await provider.gangs()
        assert caught.value.seen == [seen]
        with pytest.raises(TryAgain, match="eu-frankfurt-1"):
            await provider.gangs(harness.name("never"))
        await provider.remove(gang.name)
        assert account.billed() == 0
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, False)
        account.api.fail = fail_list_of(HOME)
        await account.settle()
        assert await provider.gangs(gang.name) == [seen]
        with pytest.raises(TryAgain, match=HOME):
            await provider.launch(replace(gang, name=harness.name("later")))
        account.api.fail = lambda _: None

    @pytest.mark.parametrize(
        ("kind", "image"),
        [
            ("VM.Standard.E5.Flex$_8_32", "canonical-ubuntu-24.04-2026.10.31-0"),
            (A10, "oracle-linux-8.10-gen2-gpu-2026.10.31-0"),
        ],
    )
    def test_instances_boot_an_image_with_the_driver_of_their_gpu(
        self, account: OciPlace, kind: str, image: str
    ) -> None:
        body = launch(account, kind)
        assert body["sourceDetails"]["imageId"].endswith(f".{image}")
        assert body["availabilityConfig"] == {"recoveryAction": "STOP_INSTANCE"}
        assert "preemptibleInstanceConfig" not in body
        if "$" in kind:
            assert body["shapeConfig"] == {"vcpus": 8, "memoryInGBs": 32.0}

    def test_nodes_of_a_subnet_may_reach_each_other(self, account: OciPlace) -> None:
        data = launch(account, A10)["metadata"]["user_data"]
        script = base64.b64decode(data).decode()
        assert script.startswith("#!/bin/sh\n")
        assert "iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT" in script.splitlines()[1]

    def test_an_accelerator_without_a_driver_needs_an_image(self, account: OciPlace) -> None:
        with pytest.raises(Refused, match="no platform image with a driver for MI300X"):
            launch(account, "BM.GPU.MI300X.8")
        body = launch(account, "BM.GPU.MI300X.8", {"image": "our-image"})
        assert body["sourceDetails"]["imageId"].endswith(".our-image")
        with pytest.raises(Refused, match="has no image called none-such"):
            launch(account, A10, {"image": "none-such"})

    def test_the_settings_choose_subnet_disk_and_address(self, account: OciPlace) -> None:
        account.api.subnets.append(make_subnet("inner", private=True))
        with pytest.raises(Refused, match="has several: inner, net; choose one"):
            launch(account, A10)
        body = launch(account, A10, {"subnet": "inner", "disk_gib": 200})
        assert body["createVnicDetails"] == {
            "subnetId": "ocid1.subnet.oc1.phx.inner",
            "assignPublicIp": False,
        }
        assert body["sourceDetails"]["bootVolumeSizeInGBs"] == 200
        body = launch(account, A10, {"subnet": "net"})
        assert body["createVnicDetails"]["assignPublicIp"] is True
        account.api.subnets = [make_subnet("far", "Uocm:PHX-AD-9")]
        with pytest.raises(Refused, match="and has none"):
            launch(account, A10)

    @pytest.mark.parametrize("old", [True, False])
    async def test_a_subnet_that_was_replaced_is_found_without_a_restart(
        self, account: OciPlace, old: bool
    ) -> None:
        """At once after a launch that failed for it, otherwise after an hour."""
        harness, provider = account.harness(), account.provider("ours")
        for name in ("one", "two"):
            gang = await harness.spec(name)
            await provider.launch(gang)
            await account.settle()
            await provider.remove(gang.name)
            account.api.subnets = [make_subnet("new")]
            if old:
                await account.wait(timedelta(hours=1))
            elif name == "one":
                with pytest.raises(Refused, match="does not fit"):
                    await provider.launch(await harness.spec("failed"))
        subnets = [each["createVnicDetails"]["subnetId"] for each in account.api.bodies.values()]
        assert [each.rpartition(".")[2] for each in subnets] == ["net", "new"]

    def test_a_missing_right_is_refused_with_what_to_check(self, account: OciPlace) -> None:
        account.api.authorized = False
        with pytest.raises(Refused, match=r"does not list .* check the setting `compartment`"):
            asyncio.run(account.provider("ours").gangs())

    @pytest.mark.parametrize("listed", [True, False])
    async def test_an_instance_that_the_user_may_not_terminate_is_not_gone(
        self, account: OciPlace, listed: bool
    ) -> None:
        """OCI hides missing rights behind the status of a missing instance."""
        provider = account.provider("ours")
        gang = await account.harness().spec("kept")
        await provider.launch(gang)
        await account.settle()
        await provider.gangs()
        account.api.terminates, account.api.authorized = False, listed
        with pytest.raises(Refused, match=r"check the .*policy of the user's group"):
            await provider.remove(gang.name)
        account.api.terminates = account.api.authorized = True
        await provider.remove(gang.name)
        await provider.remove(gang.name)

    async def test_a_gang_with_rdma_gets_a_compute_cluster(self, account: OciPlace) -> None:
        """It is shared by the gang's nodes, found by a restarted server, and deleted later."""
        harness = account.harness()
        gang = await harness.spec("cluster", nodes=2)
        provider = account.provider(gang.installation)
        offers = await provider.offers()
        gang = replace(gang, offer=next(each for each in offers if each.instance_type == H100))
        alone = replace(gang, name=f"{gang.name}-alone", nodes=1)
        small = next(each for each in offers if each.instance_type == A10)
        slow = replace(gang, name=f"{gang.name}-slow", offer=small)
        for each in (gang, alone, slow):
            await provider.launch(each)
        ((ocid, cluster),) = account.api.clusters.items()
        used = [each.get("computeClusterId") for each in account.api.bodies.values()]
        assert used == [ocid, ocid, None, None, None]
        first = next(iter(account.api.bodies.values()))
        assert [each["name"] for each in first["agentConfig"]["pluginsConfig"]] == [
            "Compute HPC RDMA Authentication",
            "Compute HPC RDMA Auto-Configuration",
        ]
        for installation in ("theirs", gang.installation):
            await account.wait(timedelta(hours=2))
            await account.provider(installation).gangs()
            assert cluster["lifecycleState"] == "ACTIVE"  # its nodes still run
        for each in (gang, alone, slow):
            await provider.remove(each.name)
        await account.wait(timedelta(minutes=31))
        await provider.gangs()
        assert cluster["lifecycleState"] == "DELETED"
        assert account.billed() == 0

    async def test_a_compute_cluster_that_a_person_deletes_during_a_launch_is_replaced(
        self, account: OciPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also by a restarted server. OCI does not accept the token of the deleted one again."""

        def refuse(*_: object) -> None:
            raise CloudFault(409, "IncorrectState", "The subnet is being changed")

        gang = await account.harness().spec("cluster", nodes=2)
        provider = account.provider(gang.installation)
        offers = await provider.offers()
        gang = replace(gang, offer=next(each for each in offers if each.instance_type == H100))
        with monkeypatch.context() as patched:
            patched.setattr(account.api, "_launch", refuse)
            with pytest.raises(TryAgain):
                await provider.launch(gang)
        ((ocid, cluster),) = account.api.clusters.items()
        cluster["lifecycleState"] = "DELETED"
        provider = account.provider(gang.installation)
        with pytest.raises(Refused, match="InvalidatedRetryToken"):
            await provider.launch(gang)
        await account.wait(timedelta(seconds=10))
        await provider.launch(gang)  # the instances have other names
        used = {each.get("computeClusterId") for each in account.api.bodies.values()}
        assert used == {*account.api.clusters} - {ocid}
        await provider.remove(gang.name)

    async def test_without_the_right_to_compute_clusters_a_gang_is_refused(
        self, account: OciPlace
    ) -> None:
        account.api.may_cluster = False
        gang = await account.harness().spec("cluster", nodes=2)
        provider = account.provider(gang.installation)
        offers = await provider.offers()
        gang = replace(gang, offer=next(each for each in offers if each.instance_type == H100))
        with pytest.raises(Refused, match=r"manage compute-clusters`, or set `compute_clusters`"):
            await provider.launch(gang)
        await provider.gangs()  # clusters that cannot be listed hide no machines
        await provider.remove(gang.name)
        provider = account.provider(gang.installation, compute_clusters=False)
        gang = replace(gang, name=f"{gang.name}-b")
        await provider.launch(gang)
        assert "computeClusterId" not in str(account.api.bodies)
        await provider.remove(gang.name)

    @pytest.mark.proves(PROOF, "disk")
    def test_a_disk_type_is_a_number_of_performance_units(self, account: OciPlace) -> None:
        body = launch(account, A10, disk_type="30", disk_gib=20)
        assert body["sourceDetails"]["bootVolumeVpusPerGB"] == 30
        assert body["sourceDetails"]["bootVolumeSizeInGBs"] == 50
        with pytest.raises(Refused, match="have no types, but a number of"):
            launch(account, A10, disk_type="ssd")

    @pytest.mark.proves(PROOF, "spot")
    async def test_a_preempted_instance_is_told_and_a_removed_one_is_not(
        self, account: OciPlace
    ) -> None:
        harness, provider = account.harness(), account.provider("ours")
        offer = await pick(provider, V100, Purchase.SPOT)
        for name in ("taken", "removed"):
            gang = replace(await harness.spec(name), offer=offer)
            await provider.launch(gang)
            await account.settle()
            await provider.gangs()
            if name == "taken":
                taken = account.cloud.billed()[0]
                account.cloud.change(taken.id, ended=account.cloud.time)
            else:
                await provider.remove(gang.name)
            await account.wait(timedelta(minutes=1))
            (seen,) = await provider.gangs(gang.name)
            assert seen.preempted == (name == "taken")
            await provider.remove(gang.name)
        for body in account.api.bodies.values():
            action = body["preemptibleInstanceConfig"]["preemptionAction"]
            assert action == {"type": "TERMINATE", "preserveBootVolume": False}

    async def test_a_terminated_instance_is_not_preempted_after_a_restart_of_the_server(
        self, account: OciPlace
    ) -> None:
        """The spot instance has shut itself down, and the server has terminated it."""
        harness, provider = account.harness(), account.provider("ours")
        offer = await pick(provider, V100, Purchase.SPOT)
        gang = replace(await harness.spec("off"), offer=offer)
        await provider.launch(gang)
        await account.settle()
        await provider.gangs()
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, off=True)
        await account.wait(timedelta(minutes=1))
        await provider.gangs()
        assert account.billed() == 0
        (seen,) = await account.provider("ours").gangs(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, False)

    @pytest.mark.parametrize(("public", "address"), [(True, "192.0.2.7"), (False, "10.0.0.1")])
    async def test_the_server_reaches_instances_by_their_primary_interface(
        self, account: OciPlace, public: bool, address: str
    ) -> None:
        provider = account.provider("ours", reach_by_ssh=True, public_address=public)
        gang = await account.harness().spec("reached")
        await provider.launch(gang)
        (body,) = account.api.bodies.values()
        script = base64.b64decode(body["metadata"]["user_data"]).decode()
        assert "ssh-ed25519 " in script
        await account.settle()
        cloud = provider._machines.cloud
        for _ in range(2):
            (seen,) = await cloud.list()
            assert (seen.address, seen.ssh) == ("10.0.0.1", SshTarget(address=address))
        await provider.remove(gang.name)
        await cloud.list()
        assert cloud._addresses.known == {}


def test_the_documented_example_is_read() -> None:
    cloud = OciCloud(ProviderContext(installation="ours", home=Path(), settings=NOWHERE))
    assert cloud._read("us-ashburn-1", EXAMPLE) == CloudMachine(
        id="us-ashburn-1/ocid1.instance.oc1.iad.abcdefg123456",
        name="my-instance-01",
        state=MachineState.RUNNING,
        tags={"key1": "value1"},
        created_at=datetime(2026, 1, 15, 10, 30, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            MachineState.STARTING: "PROVISIONING STARTING",
            MachineState.STOPPED: "STOPPING",
            MachineState.ENDED: "TERMINATING",
            MachineState.RUNNING: "MOVING CREATING_IMAGE",
        }
    ),
)
def test_states_that_may_be_billed_count_as_running(status: str, state: MachineState) -> None:
    cloud = OciCloud(ProviderContext(installation="ours", home=Path(), settings=NOWHERE))
    assert cloud._read(HOME, {**EXAMPLE, "lifecycleState": status}).state is state


def test_a_request_is_signed_as_documented(tmp_path: Path) -> None:
    """The order of the headers and the fields of the signature, for a request with a body."""
    (tmp_path / "key.pem").write_bytes(encode_key(make_key(), ""))
    lines = [f"user={USER}", f"tenancy={TENANCY}", f"fingerprint={FINGERPRINT}", f"region={HOME}"]
    config = tmp_path / "config"
    config.write_text("\n".join(["[DEFAULT]", *lines, f"key_file={tmp_path}/key.pem"]))
    credentials = OciCredentials({"key_file": str(config), "profile": "DEFAULT"})
    headers = credentials.sign("POST", "https://iaas.us-phoenix-1.oraclecloud.com/a?b=c", b"{}")
    assert headers["x-content-sha256"] == "RBNvo1WzZ4oRRq0W9+hknpT7T8If536DEMBg9hyq/4o="
    assert headers["content-length"] == "2"
    assert email.utils.parsedate_to_datetime(headers["date"]).tzinfo is UTC
    assert headers["Authorization"].startswith(
        f'Signature version="1",keyId="{TENANCY}/{USER}/{FINGERPRINT}",algorithm="rsa-sha256",'
        'headers="date (request-target) host content-length content-type x-content-sha256",'
    )


def test_a_key_that_is_not_rsa_is_refused(tmp_path: Path) -> None:
    key: Any = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(encode_key(key, ""))
    lines = ["user=u", "tenancy=t", "fingerprint=f", "region=r", f"key_file={tmp_path}/key.pem"]
    (tmp_path / "config").write_text("\n".join(["[DEFAULT]", *lines]))
    with pytest.raises(Refused, match="is not an RSA key"):
        OciCredentials({"key_file": str(tmp_path / "config"), "profile": "DEFAULT"}).profile()


async def pick(provider: Any, kind: str, purchase: Purchase, region: str = HOME) -> Offer:
    """The first offer of a shape in a region."""
    return next(
        each
        for each in await provider.offers()
        if (each.instance_type, each.purchase, each.region) == (kind, purchase, region)
    )


def fail_list_of(region: str) -> Callable[[RestRequest], tuple[CloudFault, bool] | None]:
    """Let the lists of a region's instances fail."""

    def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
        path = f"/iaas/{region}/20160918/instances"
        failing = request.method == "GET" and request.path.endswith(path)
        return (CloudFault(503, "ServiceUnavailable"), False) if failing else None

    return fail


def launch(
    account: OciPlace, kind: str, table: dict[str, Scalar] | None = None, **values: Any
) -> dict[str, Any]:
    """Launch and remove one instance; returns the body of its launch."""

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


@cache
def make_other_key() -> rsa.RSAPrivateKey:
    """The key of another user."""
    return make_key.__wrapped__()
