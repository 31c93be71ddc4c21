"""Launches a gang with one request to EC2: all nodes or none. The request's client token is derived
from the gang's name.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import NetworkNeed, Scalar, VolumeKind
from cavvy.domain.values import Struct, replace
from cavvy.providers.aws.account import SAME_TOKEN, AwsAccount, AwsFault, Json, translate
from cavvy.providers.aws.launch_ledger import AwsGangRecord, AwsInstance
from cavvy.providers.aws.market import AwsMarket, CapacityReservation
from cavvy.providers.aws.network import GangNetworks, is_name, make_tags
from cavvy.providers.aws.shapes import InstanceShape, MachineImages, split_patterns
from cavvy.providers.aws.volumes import GangVolumes
from cavvy.providers.base import GangSpec, NoCapacity, Refused, TryAgain
from cavvy.providers.ledger import LaunchLedger

# stands for the server's address in route checks if the server's URL has a host name
_SOME_PUBLIC_ADDRESS = "1.1.1.1"


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """The network and disk options for a gang. The task's options take precedence over the
    settings."""

    vpc: str | None
    subnet: str | None
    groups: Sequence[str]
    key: str | None
    profile: str | None  # the instance profile: its name or ARN
    public_ip: bool | None
    disk_gib: int
    disk_type: str
    efa: bool
    placement_group: bool


def make_launch_options(gang: GangSpec, settings: Mapping[str, Scalar]) -> LaunchOptions:
    need = gang.network or NetworkNeed()

    def text(name: str) -> str | None:
        return str(settings.get(name) or "") or None

    return LaunchOptions(
        vpc=need.vpc or (None if need.subnet else text("vpc")),
        subnet=need.subnet or (None if need.vpc else text("subnet")),
        groups=need.security_groups or split_patterns(text("security_groups") or ""),
        key=need.key or text("key"),
        profile=text("instance_profile"),
        public_ip=need.public_ip,
        disk_gib=max(
            gang.disk_gib or 0, int(settings.get("disk_gib", 100) if gang.disk_gib is None else 8)
        ),
        disk_type=gang.disk_type or text("disk_type") or "gp3",
        efa=bool(settings.get("efa", True)),
        placement_group=bool(settings.get("placement_group", True)),
    )


class AwsLauncher:
    """Launches gangs. Objects left over from a failed launch stay recorded in the ledger until they
    are deleted.
    """

    def __init__(
        self,
        account: AwsAccount,
        market: AwsMarket,
        ledger: LaunchLedger[AwsGangRecord],
        networks: GangNetworks,
        volumes: GangVolumes,
        settings: Mapping[str, Scalar],
        *,
        mark: str,
        server: str,
        now: Callable[[], datetime],
    ) -> None:
        self._account, self._market, self._ledger, self._networks = (
            account,
            market,
            ledger,
            networks,
        )
        self._volumes = volumes
        self._images = MachineImages(account, settings, now)
        self._settings, self._mark, self._now = settings, mark, now
        self._server = server  # the address at which nodes reach the server
        self._choosing = asyncio.Lock()  # prevents two gangs from choosing the same volume

    async def launch(
        self, gang: GangSpec, write: Callable[[AwsGangRecord], Awaitable[str]]
    ) -> None:
        """Launch the gang, as `Provider.launch` describes. The caller holds the gang's lock.
        `write` returns the user data of the nodes.
        """
        record = self._ledger.get(gang.name)
        if record is not None and (
            record.launched or record.removed or record.ended_at is not None
        ):
            return
        shape = await self._shape(gang)
        launch_options = make_launch_options(gang, self._settings)
        record = record or await self._intend(gang, shape, launch_options)
        tags = make_tags(self._mark, gang.name, gang.labels)
        try:
            record = await self._volumes.make(record, gang.labels)
            record, groups = await self._make_network(record, shape, launch_options, tags)
            request = await self._request(gang, record, shape, launch_options, groups, tags)
            request["UserData"] = await write(record)
            told = await self._run(gang, record, request)
        except AwsFault as fault:
            if fault.code in SAME_TOKEN:  # an earlier request with this name succeeded
                return
            error = _translate(fault, gang, record)
            await self._give_up(record, error)
            raise error from fault
        except (NoCapacity, Refused) as error:
            await self._give_up(record, error)
            raise
        record = self._ledger.get(gang.name) or record
        await self._ledger.put(replace(record, launched=True, instances=_list_instances(told)))

    async def _run(self, gang: GangSpec, record: AwsGangRecord, request: dict[str, Any]) -> Json:
        """Launch the gang in the first of its subnets whose zone has capacity. Raises AwsFault."""
        while True:
            try:
                return await self._account.call(record.region, "run_instances", **request)
            except AwsFault as fault:
                if not record.others or not isinstance(_translate(fault, gang, record), NoCapacity):
                    raise
            subnet = record.others[0]
            record = replace(record, subnet=subnet, others=record.others[1:], moved=True)
            await self._ledger.put(record)
            request["ClientToken"] = self._make_token(record)
            for each in request.get("NetworkInterfaces", [request]):
                each["SubnetId"] = subnet

    def _make_token(self, record: AwsGangRecord) -> str:
        where = f"@{record.subnet}" if record.moved else ""
        return make_token(self._mark, record.name + where)

    async def _intend(
        self, gang: GangSpec, shape: InstanceShape, launch_options: LaunchOptions
    ) -> AwsGangRecord:
        named = any(each.kind is VolumeKind.NAMED for each in gang.volumes)
        async with self._choosing if named else nullcontext():
            record = await self._plan(gang, shape, launch_options)
            await self._ledger.put(record)
        return record

    async def _shape(self, gang: GangSpec) -> InstanceShape:
        offer = gang.offer
        if offer.region not in await self._account.regions():
            raise NoCapacity(
                f"{offer.key}: {offer.region} is not one of the regions in [providers.aws] regions"
            )
        shape = await self._market.shape(offer.region, offer.instance_type)
        if shape is None:
            raise NoCapacity(
                f"{offer.key}: EC2 does not offer {offer.instance_type} in {offer.region}"
            )
        return shape

    async def _plan(
        self, gang: GangSpec, shape: InstanceShape, launch_options: LaunchOptions
    ) -> AwsGangRecord:
        """Choose the values that the gang spec omits, such as the zone, the image and the subnets.
        Raises NoCapacity, Refused, TryAgain.
        """
        offer = gang.offer
        disks, zone = await self._volumes.plan(gang)
        zone = _choose_zone(gang, zone)
        subnets, free = await self._choose_subnets(
            gang, shape, launch_options, zone, chooses=bool(disks) and zone is None
        )
        if disks and not free:
            zone, subnets = zone or str(subnets[0]["AvailabilityZone"]), subnets[:1]
        first, others = _order_names(subnets, free=free, zone=zone)
        reserved = await self._reserve(offer, gang.nodes)
        image = await self._images.choose(offer.region, shape, str(gang.options.get("image") or ""))
        return AwsGangRecord(
            name=gang.name,
            region=offer.region,
            zone=zone,
            type=offer.instance_type,
            spot=offer.purchase is Purchase.SPOT,
            nodes=gang.nodes,
            intended_at=self._now(),
            image=image.id,
            root=image.root,
            disk_gib=max(launch_options.disk_gib, image.size_gib),
            disk_type=launch_options.disk_type,
            subnet=first,
            others=others,
            public=_expects_address(gang, shape, launch_options, subnets),
            **_describe(reserved),
            makes_group=not launch_options.groups,
            makes_placement=reserved is None and _belongs_together(gang, shape, launch_options),
            disks=disks,
        )

    def _zones(self, offer: Offer, zone: str | None) -> Collection[str]:
        """Return the zones in which EC2 offers the instance type, or only `zone` if it is given.
        Raises NoCapacity if EC2 does not offer the type in `zone`.
        """
        kind = offer.instance_type
        there = self._market.zones(offer.region, kind)
        if zone not in (None, *there):
            raise NoCapacity(
                f"{offer.key}: EC2 does not offer {kind} in {zone}; it is offered in "
                f"{', '.join(there) or 'no zone'}"
            )
        return there if zone is None else (zone,)

    async def _reserve(self, offer: Offer, nodes: int) -> CapacityReservation | None:
        reserved = await self._market.reservation(offer, nodes)
        if reserved is None and offer.zone is not None and offer.purchase is not Purchase.SPOT:
            raise NoCapacity(f"{offer.key}: no reservation has {nodes} free instances")
        return reserved

    async def _choose_subnets(
        self,
        gang: GangSpec,
        shape: InstanceShape,
        launch_options: LaunchOptions,
        zone: str | None,
        *,
        chooses: bool,
    ) -> tuple[Sequence[Json], bool]:
        """Return the subnets to try, one for each zone, and whether EC2 may choose one of these
        subnets. `chooses` is True if Cavvy must choose the subnet because it creates disks in the
        zone before the launch. Raises NoCapacity, Refused, TryAgain.
        """
        asked, region = launch_options, gang.offer.region
        zones = self._zones(gang.offer, zone)
        many = _has_many_cards(gang, shape, asked)
        named = bool(asked.subnet or asked.vpc)
        found = await self._networks.list_subnets(region, asked.subnet, asked.vpc, zones)
        default = all(each.get("DefaultForAz") for each in found)
        if default and not (named or many or asked.public_ip is not None or chooses):
            return _first_of_each_zone(found), True
        server = self._server
        if many and not named and is_name(server):
            server = f"https://{_SOME_PUBLIC_ADDRESS}"
        try:
            usable = await self._list_usable(region, found, server, asked.public_ip, many=many)
        except Refused:
            if named or not many:
                raise
            raise Refused(
                f"network: {gang.offer.instance_type} has {shape.efa} network adapters, so its "
                "nodes get no public address and cannot reach the server from any default subnet; "
                "name a subnet with a NAT gateway, or set `public_ip: true` to use only one "
                "adapter"
            ) from None
        return _first_of_each_zone(usable), False

    async def _list_usable(
        self,
        region: str,
        subnets: Sequence[Json],
        server: str,
        public_ip: bool | None,
        *,
        many: bool,
    ) -> Sequence[Json]:
        """Return the subnets from which nodes can reach the server. `many` is True if nodes have
        several network cards and get no public address by default. Raises Refused if no subnet is
        usable.
        """
        usable: list[Json] = []
        refusals = []
        for subnet in subnets:
            given = bool(subnet.get("MapPublicIpOnLaunch")) and not many
            public = given if public_ip is None else public_ip
            try:
                await self._networks.check_way(region, subnet, server, public=public)
            except Refused as error:
                refusals.append(error)
            else:
                usable.append(subnet)
        if not usable:
            raise refusals[0]
        return usable

    async def _make_network(
        self,
        record: AwsGangRecord,
        shape: InstanceShape,
        launch_options: LaunchOptions,
        tags: Sequence[Mapping[str, str]],
    ) -> tuple[AwsGangRecord, Sequence[str]]:
        """Create the security group and the placement group that the record requires. Return a
        pair: the record with the id of the security group, and the nodes' security groups.
        """
        if record.makes_placement:
            await self._networks.make_placement(record.region, record.name, tags)
        if not record.makes_group:
            return record, list(launch_options.groups)
        if record.group is not None:
            return record, [record.group]
        vpc = launch_options.vpc
        if record.subnet is not None and vpc is None:
            vpc = str((await self._networks.find_subnet(record.region, record.subnet))["VpcId"])
        whole = record.nodes > 1
        efa = whole and self._adapters(record, shape, launch_options) > 0
        group = await self._networks.make_group(
            record.region, record.name, vpc, tags, whole=whole, efa=efa
        )
        record = replace(record, group=group)
        await self._ledger.put(record)
        return record, [group]

    def _adapters(
        self, record: AwsGangRecord, shape: InstanceShape, launch_options: LaunchOptions
    ) -> int:
        """Return the number of Elastic Fabric Adapters of each node. A node with several network
        cards gets no public address, so nodes get at most one adapter if the subnet is unknown or a
        public address is requested.
        """
        if not launch_options.efa or record.nodes == 1 or not shape.efa:
            return 0
        return (
            shape.efa
            if record.subnet is not None and launch_options.public_ip is not True
            else int(shape.efa_card == 0)
        )

    async def _request(
        self,
        gang: GangSpec,
        record: AwsGangRecord,
        shape: InstanceShape,
        launch_options: LaunchOptions,
        groups: Sequence[str],
        tags: Sequence[Mapping[str, str]],
    ) -> dict[str, Any]:
        kinds = ["instance", "volume", "network-interface"] + (
            ["spot-instances-request"] if record.spot else []
        )
        disk = {
            "VolumeSize": record.disk_gib,
            "VolumeType": record.disk_type or launch_options.disk_type,
            "DeleteOnTermination": True,
        }
        request: dict[str, Any] = {
            "ClientToken": self._make_token(record),
            "ImageId": record.image,
            "InstanceType": record.type,
            "MinCount": gang.nodes,
            "MaxCount": gang.nodes,
            "InstanceInitiatedShutdownBehavior": "terminate",
            # Only version 2 of the metadata service is enabled. With a hop limit of 2, containers
            # can use the service.
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpEndpoint": "enabled",
                "HttpPutResponseHopLimit": 2,
            },
            "BlockDeviceMappings": [{"DeviceName": record.root, "Ebs": disk}],
            "TagSpecifications": [{"ResourceType": kind, "Tags": list(tags)} for kind in kinds],
        }
        request |= _make_identity(launch_options) | make_market_options(record)
        adapters = self._adapters(record, shape, launch_options)
        if adapters or launch_options.public_ip is not None:
            request["NetworkInterfaces"] = make_interfaces(
                record.subnet, groups, adapters, launch_options.public_ip, first=shape.efa_card
            )
        else:
            request["SecurityGroupIds"] = list(groups)
            request |= {"SubnetId": record.subnet} if record.subnet else {}
        return request

    async def _give_up(self, record: AwsGangRecord, error: Exception) -> None:
        """Remove the objects created for a launch that started no instance. If the objects cannot
        be removed now, record them for a later removal.
        """
        if isinstance(error, TryAgain):  # the request may have succeeded
            return
        record = self._ledger.get(record.name) or record
        try:
            gone = await self._volumes.remove_made(record)
            gone = await self._networks.remove_made(record) and gone
        except (TryAgain, Refused):
            gone = False
        if gone:
            await self._ledger.drop(record.name)
        else:
            await self._ledger.put(replace(record, ended_at=self._now()))


def _order_names(
    subnets: Sequence[Json], *, free: bool, zone: str | None
) -> tuple[str | None, Sequence[str]]:
    """Return the name of the subnet to try first (None lets EC2 choose), and the names to try next.
    If `free` is True, the first name is None. If `free` is True and `zone` is given, the sequence
    of the names to try next is empty.
    """
    names = [str(each["SubnetId"]) for each in subnets]
    if free:
        return None, names if zone is None else ()
    return names[0], names[1:]


def _belongs_together(gang: GangSpec, shape: InstanceShape, asked: LaunchOptions) -> bool:
    """Return whether a gang without a reservation gets a cluster placement group."""
    return gang.nodes > 1 and shape.efa > 0 and shape.cluster and asked.placement_group


def _has_many_cards(gang: GangSpec, shape: InstanceShape, asked: LaunchOptions) -> bool:
    """Return whether each node gets several network cards. If a public address is requested, each
    node gets only one network card.
    """
    many = asked.efa and gang.nodes > 1 and shape.efa + shape.efa_card > 1
    return many and asked.public_ip is not True


def _expects_address(
    gang: GangSpec, shape: InstanceShape, asked: LaunchOptions, subnets: Sequence[Json]
) -> bool:
    """Return whether EC2 will assign public addresses to the nodes. EC2 assigns no public address
    to nodes with several network cards.
    """
    if asked.public_ip is not None:
        return asked.public_ip
    given = all(each.get("MapPublicIpOnLaunch") for each in subnets)
    return given and not _has_many_cards(gang, shape, asked)


def _first_of_each_zone(subnets: Sequence[Json]) -> list[Json]:
    """Return the first subnet of each zone."""
    found: dict[str, Json] = {}
    for each in subnets:
        found.setdefault(str(each["AvailabilityZone"]), each)
    return list(found.values())


def _choose_zone(gang: GangSpec, zone: str | None) -> str | None:
    """Return the zone that the task requests or, without one, the zone of the task's volumes.
    Raises NoCapacity if the zone of the task differs from the zone of the task's volumes.
    """
    asked = str(gang.options.get("zone") or zone or "") or None
    if zone not in (None, asked):
        raise NoCapacity(
            f"{gang.offer.key}: the volumes are in {zone}, but the task requests the zone {asked}"
        )
    return asked


def _describe(reserved: CapacityReservation | None) -> dict[str, Any]:
    """Return the gang record's fields that describe `reserved`, or {} without a reservation."""
    if reserved is None:
        return {}
    return {"reservation": reserved.id, "block": reserved.block, "ends_at": reserved.ends_at}


def _make_identity(launch_options: LaunchOptions) -> dict[str, object]:
    """Return the fields of a launch request that set the key pair and the role of the nodes."""
    request: dict[str, object] = {}
    if launch_options.key:
        request["KeyName"] = launch_options.key
    if launch_options.profile:
        kind = "Arn" if launch_options.profile.startswith("arn:") else "Name"
        request["IamInstanceProfile"] = {kind: launch_options.profile}
    return request


def make_market_options(record: AwsGangRecord) -> dict[str, object]:
    """Return the fields of a launch request that set the location and the purchase type."""
    request: dict[str, object] = {}
    placement = {"AvailabilityZone": record.zone} if record.zone else {}
    placement |= {"GroupName": record.name} if record.makes_placement else {}
    if placement:
        request["Placement"] = placement
    if record.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    if record.reservation:
        target = {"CapacityReservationId": record.reservation}
        request["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if record.block:
        request["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    return request


def _list_instances(told: Json) -> tuple[AwsInstance, ...]:
    return tuple(
        AwsInstance(
            id=str(each["InstanceId"]),
            rank=int(each.get("AmiLaunchIndex", 0)),
            started_at=each["LaunchTime"],
        )
        for each in told.get("Instances", [])
    )


def _translate(fault: AwsFault, gang: GangSpec, record: AwsGangRecord) -> Exception:
    """Return the provider error for a launch request that EC2 refused."""
    where = record.zone or record.region
    what = f"RunInstances of {gang.nodes} x {gang.offer.instance_type} in {where}"
    if _is_hidden(fault, record):
        return TryAgain(f"{what}: EC2 does not find an object that it has just created: {fault}")
    return translate(fault, what, making=True)


def _is_hidden(fault: AwsFault, record: AwsGangRecord) -> bool:
    """Return whether the fault means that EC2 does not yet find an object that it has just created.
    EC2 is eventually consistent.

    https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
    """
    made = {
        "InvalidGroup.NotFound": record.group is not None,
        "InvalidPlacementGroup.Unknown": record.makes_placement,
    }
    return made.get(fault.code, False)


def make_token(mark: str, gang: str) -> str:
    """Return the client token, of at most 64 characters, of a gang's launch request. EC2 launches
    instances only once for each token.
    """
    return hashlib.sha256(f"{mark}/{gang}".encode()).hexdigest()


def make_interfaces(
    subnet: str | None,
    groups: Sequence[str],
    adapters: int,
    public_ip: bool | None,
    *,
    first: int = 0,
) -> list[Mapping[str, object]]:
    """Return the network interfaces of a node: one for each network card if the node has EFA,
    otherwise one interface. Network cards numbered `first` or higher get an Elastic Fabric Adapter.
    Network card 0 has the node's address.

    Devices are numbered within each card, and some cards support only one device:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    found: list[Mapping[str, object]] = []
    cards = range(max(1, first + adapters if adapters else 1))
    for card in cards:
        each: dict[str, object] = {
            "DeviceIndex": 0,
            "Groups": list(groups),
            "DeleteOnTermination": True,
        }
        each |= {"SubnetId": subnet} if subnet else {}
        if adapters:
            each["NetworkCardIndex"] = card
        if adapters and card >= first:
            each["InterfaceType"] = "efa" if card == 0 else "efa-only"
        if card == 0 and public_ip is not None and len(cards) == 1:
            each["AssociatePublicIpAddress"] = public_ip
        found.append(each)
    return found
