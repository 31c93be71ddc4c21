"""What exactly is asked of EC2 for networks, adapters, reservations, volumes and images, and
that an EC2 which refuses what the real one would refuse takes it; and that the printed IAM
policy is what is needed, no less and no more.
"""

import ast
import asyncio
import json
import re
from base64 import b64decode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from gzip import decompress
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.session import Session
from tests.ec2.cloud import Cloud
from tests.ec2.direct import Direct
from tests.ec2.grants import read_policy
from tests.ec2.launches import list_tagged
from tests.ec2.rules import Reserved, allow_only
from tests.ec2.server import Front
from tests.providers.aws.contract.test_provider_aws import PROOF
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    Fabric,
    NetworkNeed,
    ResourceSpec,
    Scalar,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import parse_rate
from cavvy.domain.values import replace
from cavvy.providers import aws
from cavvy.providers.aws import MANIFEST
from cavvy.providers.aws.launch_ledger import AwsGangRecord
from cavvy.providers.aws.policy import make_policy
from cavvy.providers.aws.prices import AwsPrices
from cavvy.providers.aws.provider import AwsProvider
from cavvy.providers.aws.quotas import read_quotas
from cavvy.providers.aws.volumes import list_node_disks
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    GangState,
    NoCapacity,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery
from cavvy.providers.registry import check_settings
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.store.snapshot import CatalogSnapshot

REGION = "us-east-1"
BASE: dict[str, Scalar] = {
    "regions": REGION,
    "endpoint": "http://127.0.0.1:1",
    "instances": "t3.medium, p4d.24xlarge, p5.48xlarge, g4dn.xlarge",
}


class ProviderRig:
    """One provider over one account, whose clock jumps."""

    def __init__(
        self, cloud: Cloud, account: Direct, home: Path, table: Mapping[str, Scalar]
    ) -> None:
        self.cloud = cloud
        self._account, self.home, self._settings = (
            account,
            home,
            check_settings(MANIFEST, {**BASE, **table}),
        )
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)
        self.provider = self.make("contract")

    def make(self, installation: str) -> AwsProvider:
        context = ProviderContext(
            installation=installation,
            home=self.home / installation,
            state=self.states[installation],
            settings=self._settings,
            node_endpoint=make_node_endpoint(),
            now=self.cloud.hours.now,
        )
        context.home.mkdir(parents=True, exist_ok=True)
        return AwsProvider(MANIFEST, context, self._account)

    async def gang(
        self,
        kind: str,
        *,
        name: str = "rm-a-1",
        nodes: int = 1,
        spot: bool = False,
        zone: str | None = None,
        **fields: Any,
    ) -> GangSpec:
        purchase = Purchase.SPOT if spot else Purchase.ON_DEMAND
        offers = [
            each
            for each in await self.provider.offers()
            if each.instance_type == kind
            and each.purchase is purchase
            and (zone is None or each.zone == zone)
        ]
        return make_gang_spec(
            offers[0],
            name=name,
            installation="contract",
            nodes=nodes,
            agent_endpoint=AgentEndpoint(address="unix:/nonexistent", token="t"),
            **fields,
        )

    async def pass_time(self, seconds: float = 60) -> None:
        self.cloud.hours.jump(timedelta(seconds=seconds))
        self.cloud.tick()
        await self.provider.gangs()

    async def clear(self) -> None:
        """Everything is given back, and nothing is left."""
        await self.clear_but_volumes()
        assert self.cloud.left() == {}

    async def clear_but_volumes(self) -> None:
        for seen in await self.provider.gangs():
            await self.provider.remove(seen.name)
        for _ in range(3):
            await self.pass_time()
        assert self.cloud.left().keys() <= {"volumes"}

    def launch(self) -> Mapping[str, str]:
        return next(
            params for action, params in reversed(self.cloud.requests) if action == "RunInstances"
        )


@pytest.fixture(scope="module")
def account() -> Iterator[Direct]:
    """One account's clients for all scenarios; making clients is slow."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "for the stand-in only",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        yield Direct(check_settings(MANIFEST, BASE), Front(Cloud()))


@pytest.fixture
def provider_rig(tmp_path: Path, account: Direct) -> Callable[..., ProviderRig]:
    def make(**table: Scalar) -> ProviderRig:
        account.front.cloud = cloud = Cloud()
        allow_only(cloud.rules, make_policy())
        return ProviderRig(cloud, account, tmp_path / str(id(cloud)), table)

    return make


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    asyncio.run(run())


def interfaces(params: Mapping[str, str]) -> list[dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, value in params.items():
        if name.startswith("NetworkInterface."):
            _, number, field = name.split(".", 2)
            found.setdefault(number, {})[field] = value
    return [found[number] for number in sorted(found, key=int)]


@pytest.mark.parametrize("fabric", [Fabric.EFA, Fabric.RDMA])
def test_a_task_with_efa_is_refused_if_the_settings_turn_efa_off(
    provider_rig: Callable[..., ProviderRig], fabric: Fabric
) -> None:
    need = ResourceSpec(network=NetworkNeed(fabric=fabric))
    task = TaskSpec(name="t", run="x", nodes=2, resources=need)
    assert provider_rig().provider.check(task) == []
    (objection,) = provider_rig(efa=False).provider.check(task)
    assert objection.field == "resources.network.fabric"
    assert "the setting `efa` in [providers.aws] is off" in objection.reason


async def test_a_gang_with_efa_is_near_each_other_and_lets_itself_in_and_out(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """With and without a named subnet: one adapter on each card."""
    here = provider_rig()
    await here.provider.launch(await here.gang("p4d.24xlarge", nodes=2))
    params = here.launch()
    assert params["Placement.GroupName"] == "rm-a-1"
    assert len(interfaces(params)) == 4
    (group,) = here.cloud.groups.known.values()
    assert group.rules == {("in", group.id), ("out", group.id)}
    await here.clear()
    subnet = here.cloud.backend(REGION).describe_subnets()[0]
    network = NetworkNeed(subnet=subnet.id)
    await here.provider.launch(
        await here.gang("p4d.24xlarge", name="rm-b-1", nodes=2, network=network)
    )
    cards = interfaces(here.launch())
    assert [
        (each["InterfaceType"], each["NetworkCardIndex"], each["DeviceIndex"]) for each in cards
    ] == [("efa", "0", "0"), ("efa-only", "1", "0"), ("efa-only", "2", "0"), ("efa-only", "3", "0")]
    assert {each["SubnetId"] for each in cards} == {subnet.id}
    await here.clear()
    await here.provider.launch(await here.gang("p4d.24xlarge", name="rm-c-1"))
    assert interfaces(here.launch()) == []  # one node talks to nobody
    assert "Placement.GroupName" not in here.launch()
    await here.clear()


async def test_settings_leave_adapters_and_placement_groups_out(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(efa=False, placement_group=False)
    await here.provider.launch(await here.gang("p4d.24xlarge", nodes=2))
    assert interfaces(here.launch()) == []
    assert here.cloud.placements == {}
    await here.clear()


@pytest.mark.parametrize("block", [False, True])
async def test_reservations_and_blocks(
    provider_rig: Callable[..., ProviderRig], block: bool
) -> None:
    """They are offers of their own zone with what is free in them; a block has a market of its
    own.
    """
    here = provider_rig(reservations="cr-0123456789abcdef0")
    zone = here.cloud.rules.zones[REGION][1]
    here.cloud.rules.reserved.append(
        Reserved(id="cr-0123456789abcdef0", type="p5.48xlarge", zone=zone, total=2, block=block)
    )
    gang = await here.gang("p5.48xlarge", nodes=2, zone=zone)
    assert gang.offer.capacity == 2
    assert (gang.offer.rate.micros_per_hour == 0) == block
    await here.provider.launch(gang)
    params = here.launch()
    target = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
    assert params[target] == "cr-0123456789abcdef0"
    assert params.get("InstanceMarketOptions.MarketType") == ("capacity-block" if block else None)
    assert params["Placement.AvailabilityZone"] == zone
    assert {life.zone for life in here.cloud.history} == {zone}
    with pytest.raises(NoCapacity):
        await here.provider.launch(replace(gang, name="rm-b-1"))
    await here.clear()


@pytest.mark.proves(PROOF, "network")
def test_an_own_network_and_key_are_used_and_nothing_is_made(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    backend = here.cloud.backend(REGION)
    vpc = backend.create_vpc("10.77.0.0/16")
    subnet = backend.create_subnet(
        vpc.id, "10.77.1.0/24", availability_zone=here.cloud.rules.zones[REGION][2]
    )
    own = here.cloud.groups.make(REGION, {"GroupName": "mine", "VpcId": vpc.id}, {})
    backend.create_key_pair("me", "rsa", {})

    async def scenario() -> None:
        network = NetworkNeed(
            subnet=subnet.id, security_groups=(own.id,), key="me", public_ip=False
        )
        await here.provider.launch(await here.gang("t3.medium", network=network))
        (card,) = interfaces(here.launch())
        assert card["AssociatePublicIpAddress"] == "false"
        assert (card["SubnetId"], card["SecurityGroupId.1"]) == (subnet.id, own.id)
        assert here.launch()["KeyName"] == "me"
        await here.provider.launch(
            await here.gang("t3.medium", name="rm-b-1", network=NetworkNeed(vpc=vpc.id))
        )
        assert here.launch()["SubnetId"] == subnet.id
        made = [each for each in here.cloud.groups.known.values() if each is not own]
        assert [each.vpc for each in made] == [vpc.id]
        with pytest.raises(Refused, match="InvalidKeyPair"):
            await here.provider.launch(
                await here.gang("t3.medium", name="rm-c-1", network=NetworkNeed(key="nobody"))
            )
        with pytest.raises(Refused, match="the subnet"):
            await here.provider.launch(
                await here.gang("t3.medium", name="rm-d-1", network=NetworkNeed(subnet="subnet-0"))
            )
        for seen in await here.provider.gangs():
            await here.provider.remove(seen.name)
        for _ in range(3):
            await here.pass_time()
        assert here.cloud.left() == {"security groups": ["mine"], "key pairs": ["me"]}

    try:
        play(scenario)
    finally:
        backend.delete_key_pair("me")
        backend.delete_subnet(subnet.id)
        backend.delete_vpc(vpc.id)


@pytest.mark.parametrize(
    ("spot", "code"), [(False, "VcpuLimitExceeded"), (True, "MaxSpotInstanceCountExceeded")]
)
async def test_a_quota_that_is_used_up_is_told_with_what_to_do(
    provider_rig: Callable[..., ProviderRig], spot: bool, code: str
) -> None:
    here = provider_rig()
    here.cloud.rules.vcpu_quota["G", "spot" if spot else "on-demand"] = 4
    gang = await here.gang("g4dn.xlarge", nodes=2, spot=spot)
    with pytest.raises(Refused, match=f"{code}.*request an increase"):
        await here.provider.launch(gang)
    assert here.cloud.history == []
    for _ in range(2):
        await here.pass_time()
    assert here.cloud.left() == {}
    facts = dict(await here.provider.whoami())
    name = "All G and VT Spot Instance Requests" if spot else "Running On-Demand G and VT instances"
    assert facts[f"{name} in {REGION}"] == "4 vCPUs"


@pytest.mark.parametrize("code", ["IdempotentParameterMismatch", "IdempotentInstanceTerminated"])
async def test_a_launch_that_was_granted_before_is_not_made_again_and_is_no_fault(
    provider_rig: Callable[..., ProviderRig], code: str
) -> None:
    here = provider_rig()
    here.cloud.rules.fault = lambda service, action: (
        f"{code}: used before" if action == "RunInstances" else None
    )
    await here.provider.launch(await here.gang("g4dn.xlarge"))
    here.cloud.rules.fault = None
    here.cloud.hours.jump(
        timedelta(minutes=11)
    )  # nothing was granted after all: what was made for it goes
    await here.provider.gangs()
    await here.clear()


async def test_everything_that_is_made_carries_the_tags(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """Instances, their disks, interfaces and spot requests, groups, volumes; tags that AWS
    refuses are mended.
    """
    here = provider_rig()
    labels = {
        "project": "p",
        "job": "j",
        "team": "vision/ä",
        "aws:x": "1",
        "odd": "a\tb" + "c" * 300,
    }
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8)
    await here.provider.launch(
        await here.gang("g4dn.xlarge", spot=True, labels=labels, volumes=(volume,))
    )
    await here.provider.launch(
        await here.gang("p4d.24xlarge", name="rm-b-1", nodes=2, labels=labels)
    )
    made = [
        (action, kind, tags)
        for action, params in here.cloud.requests
        if action.startswith(("Run", "Create"))
        for kind, tags in list_tagged(params)
    ]
    assert {kind for _, kind, _ in made} == {
        "instance",
        "volume",
        "network-interface",
        "spot-instances-request",
        "security-group",
        "placement-group",
    }
    for _, _, tags in made:
        assert tags["cavvy:installation"]
        assert tags["cavvy:gang"] in ("rm-a-1", "rm-b-1")
        assert (tags["project"], tags["job"], tags["team"]) == ("p", "j", "vision/ä")
        assert "aws:x" not in tags
        assert len(tags["odd"]) == 256
    await here.clear_but_volumes()


async def test_a_user_s_own_name_tag_is_kept(provider_rig: Callable[..., ProviderRig]) -> None:
    here = provider_rig()
    await here.provider.launch(await here.gang("t3.medium", labels={"Name": "ada's node"}))
    await here.provider.launch(await here.gang("t3.medium", name="rm-b-1"))
    assert [life.tags["Name"] for life in here.cloud.history] == ["ada_s node", "rm-b-1"]
    await here.clear()


@pytest.mark.parametrize("profile", ["training", "arn:aws:iam::123456789012:instance-profile/t"])
async def test_nodes_get_the_instance_profile_of_the_settings(
    provider_rig: Callable[..., ProviderRig], profile: str
) -> None:
    here = provider_rig(instance_profile=profile)
    here.cloud.rules.profiles = frozenset([profile])
    gang = await here.gang("t3.medium")
    with pytest.raises(Refused, match=r"iam:PassRole.*check aws --policy"):
        await here.provider.launch(gang)  # the policy of an account without profiles
    allow_only(here.cloud.rules, make_policy(profile="other"))
    with pytest.raises(Refused, match="iam:PassRole"):
        await here.provider.launch(gang)
    allow_only(here.cloud.rules, here.provider.policy())
    await here.provider.launch(gang)
    kind = "Arn" if profile.startswith("arn:") else "Name"
    assert here.launch()[f"IamInstanceProfile.{kind}"] == profile
    assert "iam:PassRole" in here.cloud.used
    here.cloud.rules.profiles = frozenset()
    with pytest.raises(Refused, match=f"{profile}.*is invalid"):
        await here.provider.launch(await here.gang("t3.medium", name="rm-b-1"))
    await here.clear()


@pytest.mark.parametrize(
    ("profile", "role"),
    [
        ("training", "arn:aws:iam::*:role/training"),
        ("arn:aws:iam::123456789012:instance-profile/t", "arn:aws:iam::123456789012:role/t"),
        ("arn:aws:iam::123456789012:instance-profile/a/t", "arn:aws:iam::123456789012:role/t"),
    ],
)
def test_the_policy_passes_only_the_role_of_the_profile(
    provider_rig: Callable[..., ProviderRig], profile: str, role: str
) -> None:
    grants = read_policy(provider_rig(instance_profile=profile).provider.policy())
    assert [each.resource for each in grants if "iam:PassRole" in each.actions] == [role]


@pytest.mark.proves(PROOF, "disk")
async def test_a_disk_is_as_asked_and_never_smaller_than_its_image(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    await here.provider.launch(await here.gang("t3.medium", disk_gib=200, disk_type="gp2"))
    params = here.launch()
    assert params["BlockDeviceMapping.1.Ebs.VolumeSize"] == "200"
    assert params["BlockDeviceMapping.1.Ebs.VolumeType"] == "gp2"
    assert params["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    await here.provider.launch(await here.gang("t3.medium", name="rm-b-1", disk_gib=1))
    assert int(here.launch()["BlockDeviceMapping.1.Ebs.VolumeSize"]) >= 8
    with pytest.raises(Refused, match="volumeType"):
        await here.provider.launch(await here.gang("t3.medium", name="rm-c-1", disk_type="floppy"))
    await here.clear()


@pytest.mark.proves(PROOF, "image", "build", "login")
async def test_an_instance_prepares_an_engine_for_an_image(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    for name, image in (("rm-a-1", None), ("rm-b-1", "docker.io/library/busybox:1")):
        gang = replace(await here.gang("t3.medium"), name=name, image=image)
        await here.provider.launch(gang)
        script = b64decode(here.launch()["UserData"])
        script = decompress(script) if script[:2] == b"\x1f\x8b" else script
        assert (b"command -v podman" in script) == bool(image)
    await here.clear()


async def test_a_task_names_its_machine_image(provider_rig: Callable[..., ProviderRig]) -> None:
    here = provider_rig()
    gang = await here.gang("t3.medium")
    usual, *_, other = sorted(here.cloud.images(gang.offer.region))
    for name, image in (("rm-a-1", usual), ("rm-b-1", other)):
        await here.provider.launch(replace(gang, name=name, options={"image": image}))
        assert here.launch()["ImageId"] == image
    with pytest.raises(Refused, match="ami-none"):
        await here.provider.launch(replace(gang, name="rm-c-1", options={"image": "ami-none"}))
    await here.clear()


async def test_a_task_names_its_zone(provider_rig: Callable[..., ProviderRig]) -> None:
    here = provider_rig()
    gang = await here.gang("t3.medium")
    zone = f"{gang.offer.region}b"
    await here.provider.launch(replace(gang, options={"zone": zone}))
    assert here.launch()["Placement.AvailabilityZone"] == zone
    with pytest.raises(NoCapacity, match="nowhere"):
        await here.provider.launch(replace(gang, name="rm-b-1", options={"zone": "nowhere"}))
    await here.clear()


def test_a_type_that_the_quota_allows_none_of_has_no_capacity(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """New accounts have a quota of 0 for many families; what cannot be read forbids nothing."""
    here = provider_rig()
    here.cloud.rules.vcpu_quota |= {("P", "on-demand"): 0, ("G", "spot"): 3}

    async def allowed() -> dict[tuple[str, Purchase], int | None]:
        offers = await here.provider.offers()
        return {(each.instance_type, each.purchase): each.quota_nodes for each in offers}

    async def scenario() -> None:
        found = await allowed()
        assert found["g4dn.xlarge", Purchase.ON_DEMAND] == 250_000
        assert found["g4dn.xlarge", Purchase.SPOT] == 0
        assert found["p4d.24xlarge", Purchase.ON_DEMAND] == 0
        assert found["t3.medium", Purchase.ON_DEMAND] is None
        here.cloud.rules.vcpu_quota["P", "on-demand"] = 96
        here.cloud.hours.jump(timedelta(minutes=11))
        found = await allowed()
        assert found["p4d.24xlarge", Purchase.ON_DEMAND] == 1
        assert found["p5.48xlarge", Purchase.ON_DEMAND] == 0
        here.cloud.rules.fault = lambda service, action: (
            "throttle" if action == "ListServiceQuotas" else None
        )
        fresh = ProviderRig(here.cloud, here._account, here.home / "fresh", {})
        offers = await fresh.provider.offers()
        assert len({each.instance_type for each in offers}) == 4
        assert {each.capacity for each in offers} == {None}

    play(scenario)


async def test_the_use_of_a_quota_is_subtracted_and_told(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """On-demand and spot instances count for different quotas."""
    here = provider_rig()
    here.cloud.rules.vcpu_quota |= {("G", "on-demand"): 12, ("G", "spot"): 8}

    async def left(purchase: Purchase) -> Offer:
        offers = await here.provider.offers()
        kind = "g4dn.xlarge"
        return next(o for o in offers if (o.instance_type, o.purchase) == (kind, purchase))

    assert (await left(Purchase.ON_DEMAND)).capacity == 3
    await here.provider.launch(await here.gang("g4dn.xlarge", nodes=2))
    here.cloud.hours.jump(timedelta(minutes=2))
    now = await left(Purchase.ON_DEMAND)
    assert (now.capacity, now.quota_nodes) == (1, 3)
    assert now.limited_by == (
        f"the quota Running On-Demand G and VT instances in {REGION} (8 of 12 vCPUs used, 4 left)"
    )
    assert (await left(Purchase.SPOT)).capacity == 2
    told = {each.name: each for each in await here.provider.quotas()}
    quota = told["Running On-Demand G and VT instances"]
    assert (quota.limit, quota.used, quota.left, quota.family) == (12, 8, 4, "G and VT")
    assert quota.request == (
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
        f"L-DB2E81BA --desired-value NEW_LIMIT --region {REGION}"
    )
    await here.clear()
    here.cloud.hours.jump(timedelta(minutes=2))
    assert (await left(Purchase.ON_DEMAND)).capacity == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
            {("t", False), ("m", False)},
        ),
        ("Running On-Demand G and VT instances", {("g", False), ("vt", False)}),
        ("All P4, P3 and P2 Spot Instance Requests", {("p4", True), ("p3", True), ("p2", True)}),
        ("All P5 Spot Instance Requests", {("p5", True)}),
        ("Running On-Demand Trn instances", {("trn", False)}),
        ("Elastic IPs", set()),
        ("Running Dedicated p5 Hosts", set()),
    ],
)
def test_which_families_a_quota_is_of(name: str, expected: set[tuple[str, bool]]) -> None:
    quotas = read_quotas([{"QuotaName": name, "Value": 64.0}], REGION, [])
    assert quotas.keys() >= expected
    assert bool(quotas) == bool(expected)
    assert {(each.limit, each.used) for each in quotas.values()} <= {(64.0, 0)}


async def test_machine_images_by_id_and_by_parameter(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    first = provider_rig()
    images = sorted(first.cloud.images(REGION))

    async def launch(here: ProviderRig) -> str:
        await here.provider.launch(await here.gang("t3.medium"))
        image = here.launch()["ImageId"]
        await here.clear()
        return image

    assert await launch(provider_rig(image=images[3])) == images[3]
    own = provider_rig(image="resolve:ssm:/my/images/training")
    own.cloud.rules.parameters["/my/images/training"] = images[5]
    assert await launch(own) == images[5]
    for wrong, told in {"/my/none": "no parameter", "ami-00000000": "ami-00000000"}.items():
        with pytest.raises(Refused, match=told):
            await launch(provider_rig(image=wrong))


async def test_volumes_are_used_in_their_zone_and_never_by_two(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    there, elsewhere = here.cloud.rules.zones[REGION][:2]
    data = here.cloud.disks.make(
        REGION, {"AvailabilityZone": there, "Size": "10"}, {"Name": "data"}
    )
    here.cloud.hours.jump(timedelta(seconds=5))
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d")
    (place,) = await here.provider.volumes()
    assert (place.names, place.region, place.zone) == ((data.id, "data"), REGION, there)
    with pytest.raises(NoCapacity, match=there):
        await here.provider.launch(
            await here.gang(
                "g4dn.xlarge", name="rm-z-1", spot=True, zone=elsewhere, volumes=(volume,)
            )
        )
    await here.provider.launch(
        await here.gang("g4dn.xlarge", volumes=(volume,))
    )  # of the whole region
    assert here.launch()["Placement.AvailabilityZone"] == there
    for by in (volume, replace(volume, source=data.id)):
        with pytest.raises(NoCapacity, match="in use by rm-a-1"):
            await here.provider.launch(await here.gang("g4dn.xlarge", name="rm-b-1", volumes=(by,)))
    await here.pass_time(10)
    (life,) = here.cloud.history
    assert data.host is life
    assert not data.goes
    # The node is taken back: its successor waits until EC2 has let the volume go.
    here.cloud.rules.shutting_down = timedelta(minutes=5)
    await here.provider.remove("rm-a-1")
    await here.provider.launch(await here.gang("g4dn.xlarge", name="rm-c-1", volumes=(volume,)))
    await here.pass_time(60)
    assert data.host is life
    await here.pass_time(300)
    await here.pass_time(1)
    assert data.host is here.cloud.history[1]
    await here.provider.remove("rm-c-1")
    await here.pass_time(400)
    await here.pass_time(60)
    assert here.cloud.left() == {"volumes": [data.id]}
    with pytest.raises(Refused, match="add a `size`"):
        await here.provider.launch(
            await here.gang("g4dn.xlarge", name="rm-d-1", volumes=(replace(volume, source="none"),))
        )
    here.cloud.disks.make(REGION, {"AvailabilityZone": there, "Size": "10"}, {"Name": "data"})
    with pytest.raises(Refused, match="several volumes"):
        await here.provider.launch(await here.gang("g4dn.xlarge", name="rm-e-1", volumes=(volume,)))
    for _ in range(2):
        await here.pass_time()
    assert list(here.cloud.left()) == ["volumes"]
    task = TaskSpec(name="t", run="x", nodes=2, volumes=(volume,))
    assert any("one node" in each.reason for each in here.provider.check(task))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "lost", [None, "CreateVolume", "AttachVolume", "RunInstances", "DeleteVolume"]
)
async def test_a_volume_is_made_once_and_goes_with_a_launch_that_failed(
    provider_rig: Callable[..., ProviderRig], keep: bool, lost: str | None
) -> None:
    here = provider_rig()
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8, keep=keep)
    zone = here.cloud.rules.zones[REGION][0]
    counts: dict[str, int] = {}

    def fault(service: str, action: str) -> str | None:
        counts[action] = counts.get(action, 0) + 1
        return "lose" if action == lost and counts[action] == 1 else None

    here.cloud.rules.stock["g4dn.xlarge", zone, "spot"] = 0
    here.cloud.rules.fault = fault
    gang = await here.gang("g4dn.xlarge", spot=True, zone=zone, volumes=(volume,))
    for _ in range(2):
        try:
            await here.provider.launch(gang)
        except ProviderError:
            continue
    for _ in range(3):
        await here.pass_time()
    assert len(here.cloud.disks.ever) == 1
    assert here.cloud.left() == {}
    other = replace(await here.gang("g4dn.xlarge", volumes=(volume,)), name="rm-b-1")
    for _ in range(2):
        try:
            await here.provider.launch(other)
        except ProviderError:
            continue
    for _ in range(3):
        await here.pass_time()
    (seen,) = [each for each in await here.provider.gangs() if each.state is GangState.RUNNING]
    disk = here.cloud.disks.ever[-1]
    assert disk.host is here.cloud.lives[seen.engine_id]
    assert (disk.goes, disk.tags["Name"]) == (not keep, "data")
    here.cloud.shut_down_itself(
        here.cloud.lives[seen.engine_id]
    )  # nobody of us is there: EC2's own means
    here.cloud.hours.jump(timedelta(minutes=1))
    here.cloud.tick()
    assert here.cloud.left().get("volumes", []) == ([disk.id] if keep else [])
    await here.clear_but_volumes()
    assert len(here.cloud.disks.ever) == 2


async def test_kept_volumes_are_told_with_their_price_and_their_gangs(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    zone = here.cloud.rules.zones[REGION][0]
    here.cloud.disks.make(REGION, {"AvailabilityZone": zone, "Size": "10"}, {"Name": "theirs"})
    kept, scratch = (
        Volume(kind=VolumeKind.NAMED, source=name, path=f"/{name}", size_gib=8, keep=keep)
        for name, keep in (("data", True), ("scratch", False))
    )
    gang = await here.gang("g4dn.xlarge", spot=True, zone=zone, volumes=(kept, scratch))
    await here.provider.launch(gang)
    for _ in range(3):
        await here.pass_time()
    (seen,) = await here.provider.kept_volumes()
    assert (seen.name, seen.size_gib, seen.region, seen.zone) == ("data", 8, REGION, zone)
    assert (seen.made_for, seen.used_by) == ("rm-a-1", ("rm-a-1",))
    assert seen.price is not None
    assert seen.price.price.micros > 0
    assert seen.price.source == "AWS Price List API"
    await here.clear_but_volumes()
    (after,) = await here.provider.kept_volumes()
    assert after == seen


async def test_two_gangs_that_start_at_once_do_not_make_one_volume_twice(
    provider_rig: Callable[..., ProviderRig], account: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def in_turns(call: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)  # others ask meanwhile
        return call()

    monkeypatch.setattr(account, "run", in_turns)
    here = provider_rig()
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8)
    gangs = [
        await here.gang("g4dn.xlarge", name=name, volumes=(volume,))
        for name in ("rm-a-1", "rm-b-1")
    ]
    answers = await asyncio.gather(*map(here.provider.launch, gangs), return_exceptions=True)
    assert [type(each) for each in answers if each is not None] == [NoCapacity]
    assert [each.tags["Name"] for each in here.cloud.disks.ever] == ["data"]
    await here.clear_but_volumes()


async def test_a_volume_that_was_deleted_meanwhile_hides_no_gang(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8)
    await here.provider.launch(await here.gang("g4dn.xlarge", name="rm-a-1", volumes=(volume,)))
    await here.provider.launch(await here.gang("t3.medium", name="rm-b-1"))
    here.cloud.disks.known.clear()
    await here.pass_time()
    seen = {each.name: each.state for each in await here.provider.gangs()}
    assert seen == {"rm-a-1": GangState.RUNNING, "rm-b-1": GangState.RUNNING}
    await here.clear()


async def test_a_kept_volume_that_no_node_came_to_format_is_formatted_by_the_next(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """The first node is taken back before it has mounted it; what others made is never
    formatted.
    """
    here = provider_rig()
    zone = here.cloud.rules.zones[REGION][0]
    here.cloud.disks.make(REGION, {"AvailabilityZone": zone, "Size": "10"}, {"Name": "theirs"})
    ours = Volume(kind=VolumeKind.NAMED, source="ours", path="/o", size_gib=8)
    theirs = Volume(kind=VolumeKind.NAMED, source="theirs", path="/t")
    await here.provider.launch(
        await here.gang("g4dn.xlarge", spot=True, zone=zone, volumes=(ours,))
    )
    await here.clear_but_volumes()
    again = await here.gang(
        "g4dn.xlarge", name="rm-b-1", spot=True, zone=zone, volumes=(ours, theirs)
    )
    await here.provider.launch(again)
    ledger = LaunchLedger(here.states["contract"], AwsGangRecord)
    await ledger.refresh()
    record = ledger.records["rm-b-1"]
    assert {each.path: each.make for each in list_node_disks(record)} == {"/o": True, "/t": False}
    await here.clear_but_volumes()


async def test_two_servers_see_each_others_launches_and_never_launch_twice(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    other = here.make("contract")  # a second server of this installation
    gang = await here.gang("g4dn.xlarge", nodes=2)
    done = await asyncio.gather(
        here.provider.launch(gang), other.launch(gang), return_exceptions=True
    )
    assert all(each is None or isinstance(each, TryAgain) for each in done)
    await other.launch(gang)
    await here.provider.launch(gang)
    assert len(here.cloud.of(gang.name)) == 2
    await here.pass_time()
    assert [each.name for each in await other.gangs()] == [gang.name]
    await other.remove(gang.name)
    await here.pass_time()
    (seen,) = await here.provider.gangs(gang.name)
    assert seen.state is GangState.ENDED
    await here.provider.launch(gang)  # it has ended: never again
    assert len(here.cloud.of(gang.name)) == 2
    await here.clear()


async def test_another_control_plane_of_the_account_is_left_alone(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    await here.provider.launch(await here.gang("p4d.24xlarge", nodes=2))
    other = here.make("another")
    assert await other.gangs() == []
    await other.remove("rm-a-1")
    for _ in range(3):
        here.cloud.hours.jump(timedelta(minutes=11))
        await other.gangs()
    assert len(here.cloud.groups.known) == len(here.cloud.placements) == 1
    (seen,) = await here.provider.gangs()
    assert seen.state is GangState.RUNNING
    await here.clear()


def test_the_policy_allows_what_is_called_and_nothing_else() -> None:
    """Every operation that the sources name, and no other; a scenario under the policy shows that
    it is enough.
    """
    told = json.loads(make_policy())["Statement"]
    actions = [statement["Action"] for statement in told]
    allowed = {
        each for action in actions for each in ([action] if isinstance(action, str) else action)
    }
    names = {}
    for service, prefix in {
        "ec2": "ec2",
        "ssm": "ssm",
        "pricing": "pricing",
        "service-quotas": "servicequotas",
        "sts": "sts",
    }.items():
        model = Session().get_service_model(service)
        names |= {xform_name(each): f"{prefix}:{each}" for each in model.operation_names}
    folder = Path(aws.__file__).parent
    called = {
        names[node.value]
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }
    # Tags are given while something is made; a first spot request makes the account's role for it.
    assert allowed - {"ec2:CreateTags", "iam:CreateServiceLinkedRole"} == called


def test_the_catalog_s_prices_are_read_of_every_region(account: Direct) -> None:
    """On demand and spot, zones by their ids; without credentials a refresh of everything goes
    on.
    """
    account.front.cloud = cloud = Cloud(regions=("us-east-1", "eu-west-1"))
    allow_only(cloud.rules, make_policy())
    with CatalogSnapshot.open() as snapshot:
        machines = snapshot.machines("aws")
    today = cloud.hours.now().date()
    query = PriceQuery(
        machines=machines, today=today, progress=lambda text: None, pause=lambda seconds: None
    )
    cloud.rules.commitments["us-east-1", "g4dn.xlarge"] = {"1yr": "0.331", "3yr": "0.227"}
    prices = AwsPrices(account=lambda: account).fetch(query)
    kept = {key: usd for key, usd in cloud.rules.on_demand.items() if key[0] in cloud.regions}
    told = {
        (each.region, each.instance_type): each
        for each in prices.offers
        if each.purchase is Purchase.ON_DEMAND
    }
    assert {key: each.rate for key, each in told.items()} == {
        key: parse_rate(usd) for key, usd in kept.items()
    }
    reserved = [each for each in prices.offers if each.purchase is Purchase.RESERVED]
    assert [(each.key, each.rate) for each in reserved] == [
        ("aws/us-east-1/g4dn.xlarge:1/reserved-12m", parse_rate("0.331")),
        ("aws/us-east-1/g4dn.xlarge:1/reserved-36m", parse_rate("0.227")),
    ]
    assert all(each.term_months == 0 for each in prices.offers if each not in reserved)
    spot = [each for each in prices.offers if each.purchase is Purchase.SPOT]
    assert len(spot) == len({(each.type, each.zone) for each in cloud.rules.spot})
    assert {each.region for each in spot} == {"us-east-1", "eu-west-1"}
    assert all(re.fullmatch(r"(use1|euw1)-az\d", each.zone or "") for each in spot)
    assert all((each.as_of, each.provider) == (today, "aws") for each in prices.offers)
    cloud.rules.grants = []
    with pytest.raises(NeedsLogin, match="check aws --policy"):
        AwsPrices(account=lambda: account).fetch(query)
    cloud.rules.grants, cloud.rules.fault = None, lambda service, action: "throttle"
    with pytest.raises(PriceError, match="nothing was changed"):
        AwsPrices(account=lambda: account).fetch(query)
    cloud.rules.fault = None
    with pytest.raises(PriceError, match="no price of a known instance type"):
        AwsPrices(account=lambda: account).fetch(replace(query, machines={}))


def test_an_accelerator_that_the_catalog_does_not_know_is_reported(
    provider_rig: Callable[..., ProviderRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = provider_rig()
    told = next(
        each
        for each in here.cloud.backend(REGION).instance_types
        if each["InstanceType"] == "g4dn.xlarge"
    )
    monkeypatch.setitem(told["GpuInfo"]["Gpus"][0], "Name", "T9000 (24 GB PCIe)")

    async def scenario() -> None:
        facts = dict(await here.provider.whoami())
        assert facts[f"unknown accelerators in {REGION}"] == "T9000 (24 GB PCIe)"
        offers = await here.provider.offers()
        assert offers
        assert not any(each.instance_type == "g4dn.xlarge" for each in offers)
        await here.clear()

    play(scenario)
