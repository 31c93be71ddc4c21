"""A gang's network on EC2: every combination of what `network:` names, ways to the server,
adapters on their cards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import REGION, ProviderRig, interfaces, play

from cavvy.domain.tasks import NetworkNeed
from cavvy.domain.values import replace
from cavvy.providers.aws.network import GangNetworks
from cavvy.providers.base import NoCapacity, NodeEndpoint, Refused
from cavvy.providers.contract.memory_cloud import make_node_endpoint

account, provider_rig = requests.account, requests.provider_rig
KIND = "t3.medium"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A VPC of the user's, and what is in it."""

    here: ProviderRig
    backend: Any
    vpc: str
    subnet: str
    group: str
    table: str
    gateway: str


@pytest.fixture
def own(provider_rig: Callable[..., ProviderRig], monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    """The server is on the internet; the VPC has a gateway there, and no route to it yet."""
    monkeypatch.setattr(
        requests, "make_node_endpoint", lambda: _node_endpoint("https://1.1.1.1:7443")
    )
    here = provider_rig(instances="t3.medium, p4d.24xlarge, p6-b300.48xlarge")
    backend = here.cloud.backend(REGION)
    vpc = backend.create_vpc("10.79.0.0/16")
    subnet = backend.create_subnet(
        vpc.id, "10.79.1.0/24", availability_zone=here.cloud.rules.zones[REGION][2]
    )
    group = here.cloud.groups.make(REGION, {"GroupName": "mine", "VpcId": vpc.id}, {})
    gateway = backend.create_internet_gateway()
    backend.attach_internet_gateway(gateway.id, vpc.id)
    (table,) = backend.describe_route_tables(filters={"vpc-id": [vpc.id]})
    backend.create_key_pair("me", "rsa", {})
    yield Own(
        here=here,
        backend=backend,
        vpc=vpc.id,
        subnet=subnet.id,
        group=group.id,
        table=table.id,
        gateway=gateway.id,
    )
    backend.delete_key_pair("me")
    backend.detach_internet_gateway(gateway.id, vpc.id)
    backend.delete_internet_gateway(gateway.id)
    backend.delete_subnet(subnet.id)
    backend.delete_vpc(vpc.id)


def _node_endpoint(address: str) -> NodeEndpoint:
    return replace(make_node_endpoint(), address=address)


async def clear(own: Own) -> None:
    for seen in await own.here.provider.gangs():
        await own.here.provider.remove(seen.name)
    for _ in range(3):
        await own.here.pass_time()
    assert own.here.cloud.left() == {"security groups": ["mine"], "key pairs": ["me"]}


def test_every_combination_of_an_own_network(own: Own) -> None:
    """Where, groups, key and public address: each alone and all together; what is not named is
    made or left to EC2.
    """
    here = own.here
    own.backend.create_route(own.table, "0.0.0.0/0", gateway_id=own.gateway)
    default = here.cloud.vpcs(REGION)[0]
    theirs = here.cloud.groups.make(REGION, {"GroupName": "mine too", "VpcId": default}, {}).id

    async def scenario() -> None:
        for number, (where, grouped, key, public) in enumerate(
            product(("", "vpc", "subnet"), (False, True), (None, "me"), (None, True, False))
        ):
            vpc = own.vpc if where else default
            need = NetworkNeed(
                vpc=own.vpc if where == "vpc" else None,
                subnet=own.subnet if where == "subnet" else None,
                security_groups=((own.group if where else theirs),) if grouped else (),
                key=key,
                public_ip=public,
            )
            gang = await here.gang(KIND, name=f"rm-{number}-1", network=need)
            if where and public is not True:  # the subnet gives no public address by itself
                with pytest.raises(Refused, match="serves only nodes with a public address"):
                    await here.provider.launch(gang)
                continue
            await here.provider.launch(gang)
            params, life = here.launch(), here.cloud.history[-1]
            assert params.get("KeyName") == key
            (group,) = life.groups
            assert here.cloud.groups.get(group).vpc == vpc
            assert (group in (own.group, theirs)) == grouped
            (card,) = interfaces(params) or [params]
            told = card.get("AssociatePublicIpAddress")
            assert told == (None if public is None else str(public).lower())
            assert (card.get("SubnetId") == own.subnet) == bool(where)
        here.cloud.groups.known.pop(theirs)
        await clear(own)

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # moto's default VPC has no gateway, as every real one has
        patch.setattr(
            "cavvy.providers.aws.network.GangNetworks.check_way", _unless_default(own.vpc)
        )
        play(scenario)


def _unless_default(vpc: str) -> Any:
    real = GangNetworks.check_way

    async def check(
        self: GangNetworks, region: str, subnet: Any, server: str, *, public: bool
    ) -> None:
        if subnet["VpcId"] == vpc:
            await real(self, region, subnet, server, public=public)

    return check


@pytest.mark.parametrize(
    ("need", "told"),
    [
        (NetworkNeed(subnet="subnet-0"), "the subnet subnet-0"),
        (NetworkNeed(vpc="vpc-0"), "the VPC vpc-0 has no subnet"),
        (NetworkNeed(security_groups=("sg-0",)), "InvalidGroup.NotFound.*sg-0"),
        (NetworkNeed(key="nobody"), "InvalidKeyPair.NotFound.*nobody"),
        (NetworkNeed(security_groups=("OWN",)), "belong to different networks"),
    ],
)
async def test_what_is_named_wrongly_is_refused_and_leaves_nothing(
    own: Own, need: NetworkNeed, told: str
) -> None:
    if need.security_groups == ("OWN",):  # of a VPC, while nodes are in the default one
        need = NetworkNeed(security_groups=(own.group,))
    gang = await own.here.gang(KIND, network=need)
    with pytest.raises(Refused, match=told):
        await own.here.provider.launch(gang)
    assert own.here.cloud.history == []
    await clear(own)


async def test_a_subnet_that_does_not_lead_to_the_server_is_refused_before_anything_is_paid(
    own: Own,
) -> None:
    here = own.here

    async def attempt(number: int, **fields: Any) -> None:
        need = NetworkNeed(subnet=own.subnet, **fields)
        await here.provider.launch(await here.gang(KIND, name=f"rm-{number}-1", network=need))

    with pytest.raises(
        Refused,
        match=f"{own.subnet} cannot connect to the server at 1.1.1.1: "
        "the subnet's route table has no route",
    ):
        await attempt(1)
    own.backend.create_route(own.table, "0.0.0.0/0", gateway_id=own.gateway)
    with pytest.raises(Refused, match="public_ip: true"):
        await attempt(2)
    await attempt(3, public_ip=True)
    # A longer prefix goes before: this one goes through a NAT.
    nat = own.backend.create_nat_gateway(
        own.subnet, own.backend.allocate_address("vpc").allocation_id
    )
    own.backend.create_route(own.table, "1.1.0.0/16", nat_gateway_id=nat.id)
    await attempt(4)
    await attempt(5, public_ip=False)
    assert [action for action, _ in here.cloud.requests].count("RunInstances") == 3
    await clear(own)


async def test_who_may_not_look_at_routes_launches_all_the_same(own: Own) -> None:
    def fault(_: str, action: str) -> str | None:
        return "UnauthorizedOperation: no" if action == "DescribeRouteTables" else None

    own.here.cloud.rules.fault = fault
    await own.here.provider.launch(
        await own.here.gang(KIND, network=NetworkNeed(subnet=own.subnet))
    )
    assert own.here.launch()
    await clear(own)


def test_nothing_is_said_of_a_server_that_may_be_anywhere(
    provider_rig: Callable[..., ProviderRig], own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, address in enumerate(("https://gpu.example.org:7443", "https://10.0.0.9:7443")):
        monkeypatch.setattr(
            requests, "make_node_endpoint", lambda address=address: _node_endpoint(address)
        )
        own.here.provider = own.here.make("contract")

        async def scenario(number: int = number) -> None:
            gang = await own.here.gang(
                KIND, name=f"rm-{number}-1", network=NetworkNeed(subnet=own.subnet)
            )
            await own.here.provider.launch(gang)
            await clear(own)

        play(scenario)


def test_adapters_are_on_the_cards_that_take_them(own: Own) -> None:
    """A p6-b300 has seventeen cards: the first is the machine's address and takes no adapter."""
    here = own.here
    here.cloud.rules.on_demand[REGION, "p6-b300.48xlarge"] = "140"
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id="nat-0")

    async def scenario() -> None:
        gang = await here.gang("p6-b300.48xlarge", nodes=2, network=NetworkNeed(subnet=own.subnet))
        await here.provider.launch(gang)
        cards = interfaces(here.launch())
        assert [each.get("InterfaceType") for each in cards] == [None] + ["efa-only"] * 16
        assert [each["NetworkCardIndex"] for each in cards] == [str(card) for card in range(17)]
        # A public address leaves one interface, on the card that takes no adapter.
        public = NetworkNeed(public_ip=True)
        await here.provider.launch(
            await here.gang("p6-b300.48xlarge", name="rm-b-1", nodes=2, network=public)
        )
        (card,) = interfaces(here.launch())
        assert "InterfaceType" not in card
        await clear(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cavvy.providers.aws.network.GangNetworks.check_way", _unless_default(own.vpc)
        )
        play(scenario)


@pytest.mark.parametrize(("kind", "adapters"), [("p5.48xlarge", 32), ("p4d.24xlarge", 4)])
async def test_a_pair_gets_all_adapters_without_a_named_subnet(
    provider_rig: Callable[..., ProviderRig], kind: str, adapters: int
) -> None:
    here = provider_rig(instances=kind)
    await here.provider.launch(await here.gang(kind, nodes=2))
    cards = interfaces(here.launch())
    assert [each["InterfaceType"] for each in cards] == ["efa"] + ["efa-only"] * (adapters - 1)
    assert [each["NetworkCardIndex"] for each in cards] == [str(at) for at in range(adapters)]
    await here.clear()


async def test_adapters_that_would_cut_nodes_off_are_refused_with_a_way_out(own: Own) -> None:
    """The server is on the internet, and the default subnets have no NAT gateway."""
    with pytest.raises(Refused, match="name a subnet with a NAT gateway, or set `public_ip"):
        await own.here.provider.launch(await own.here.gang("p4d.24xlarge", nodes=2))
    await clear(own)


def test_a_vpc_s_other_zones_are_tried_where_one_has_no_capacity(own: Own) -> None:
    here, kind = own.here, "p4d.24xlarge"
    zones = here.cloud.rules.zones[REGION]
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id="nat-0")
    more = [
        own.backend.create_subnet(own.vpc, f"10.79.{16 * n}.0/20", availability_zone=zone)
        for n, zone in enumerate(zones[:2], start=1)
    ]

    async def scenario() -> None:
        for zone in zones[:2]:
            here.cloud.rules.stock[kind, zone, "on-demand"] = 0
        gang = await here.gang(kind, nodes=2, network=NetworkNeed(vpc=own.vpc))
        await here.provider.launch(gang)
        tried = [params for name, params in here.cloud.requests if name == "RunInstances"]
        assert [interfaces(each)[0]["SubnetId"] for each in tried][2:] == [own.subnet]
        assert len({each["ClientToken"] for each in tried}) == 3
        await here.provider.launch(gang)  # again, as after a restart: nothing new
        assert len(here.cloud.history) == 2

        here.cloud.rules.stock[kind, zones[2], "on-demand"] = 0
        with pytest.raises(NoCapacity):
            await here.provider.launch(
                await here.gang(kind, name="rm-b-1", network=NetworkNeed(vpc=own.vpc))
            )
        assert [seen.name for seen in await here.provider.gangs()] == ["rm-a-1"]
        for each in more:
            own.backend.delete_subnet(each.id)
        await clear(own)

    play(scenario)


def test_other_default_zones_are_tried_if_the_zone_that_ec2_chose_is_full(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here, kind = provider_rig(instances="g4dn.xlarge"), "g4dn.xlarge"
    zones = here.cloud.rules.zones[REGION]
    here.cloud.rules.picks = zones[0]
    for zone in (zones[0], *zones[2:]):
        here.cloud.rules.stock[kind, zone, "on-demand"] = 0

    async def scenario() -> None:
        gang = await here.gang(kind, nodes=2)
        await here.provider.launch(gang)
        tried = [params for name, params in here.cloud.requests if name == "RunInstances"]
        assert "SubnetId" not in tried[0]
        assert all("SubnetId" in each for each in tried[1:])
        assert len({each["ClientToken"] for each in tried}) == len(tried) >= 2
        assert {life.zone for life in here.cloud.history} == {zones[1]}
        await here.provider.launch(gang)  # again, as after a restart: nothing new
        assert len(here.cloud.history) == 2
        await here.clear()

    try:
        play(scenario)
    finally:
        here.cloud.rules.picks = None


@pytest.fixture
def no_default(own: Own) -> Iterator[Own]:
    """The account has no default subnet any more, but an own VPC with a route to the server."""
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id="nat-0")
    default = [each for each in own.backend.describe_subnets() if each.default_for_az]
    for each in default:
        each.default_for_az = False
    yield own
    for each in default:
        each.default_for_az = True


def test_without_a_default_subnet_the_only_vpc_is_used(no_default: Own) -> None:
    here, known = no_default.here, no_default.backend.subnets

    async def scenario() -> None:
        await here.provider.launch(await here.gang(KIND))
        (life,) = here.cloud.history
        assert here.launch()["SubnetId"] == no_default.subnet
        assert here.cloud.groups.get(life.groups[0]).vpc == no_default.vpc
        await clear(no_default)

    with pytest.MonkeyPatch.context() as patch:  # only the subnet of the own VPC is left
        for zone, there in dict(known).items():
            kept = {name: each for name, each in there.items() if each.vpc_id == no_default.vpc}
            patch.setitem(known, zone, kept)
        play(scenario)


async def test_without_a_default_subnet_one_of_several_vpcs_must_be_named(no_default: Own) -> None:
    here = no_default.here
    with pytest.raises(Refused, match=f"several VPCs .*{no_default.vpc}.*; set `vpc`"):
        await here.provider.launch(await here.gang(KIND))
    named = await here.gang(KIND, network=NetworkNeed(vpc=no_default.vpc))
    await here.provider.launch(named)
    assert here.launch()["SubnetId"] == no_default.subnet
    await clear(no_default)


async def test_a_card_that_takes_one_interface_gets_its_first(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second card of an hpc6id."""
    here = own.here
    for card in here.cloud.facts("p4d.24xlarge")["NetworkInfo"]["NetworkCards"]:
        monkeypatch.setitem(card, "MaximumNetworkInterfaces", 1)
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id="nat-0")
    await here.provider.launch(
        await here.gang("p4d.24xlarge", nodes=2, network=NetworkNeed(subnet=own.subnet))
    )
    assert len(interfaces(here.launch())) == 4
    await clear(own)


async def test_what_a_gang_has_goes_only_after_its_instances(own: Own) -> None:
    """While an instance shuts down its placement group and security group are in use; both go
    later, in any order.
    """
    here = own.here
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id="nat-0")
    need = NetworkNeed(subnet=own.subnet)
    await here.provider.launch(await here.gang("p4d.24xlarge", nodes=2, network=need))
    await here.provider.remove("rm-a-1")
    here.cloud.requests.clear()
    await here.pass_time(5)
    assert len(here.cloud.placements) == 1
    assert len(here.cloud.groups.known) == 2
    await here.pass_time(60)
    await here.pass_time(60)
    await clear(own)
    names = [action for action, _ in here.cloud.requests]
    assert "DeletePlacementGroup" in names
    assert "DeleteSecurityGroup" in names


async def test_no_room_in_a_subnet_is_no_capacity(own: Own) -> None:
    fault = "InsufficientFreeAddressesInSubnet: none are left"
    own.here.cloud.rules.fault = lambda service, action: fault if action == "RunInstances" else None
    gang = await own.here.gang(KIND)
    with pytest.raises(NoCapacity, match="none are left"):
        await own.here.provider.launch(gang)
    own.here.cloud.rules.fault = None
    await clear(own)
