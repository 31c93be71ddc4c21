"""Creates the security group and the placement group of a gang before the launch, and removes both
groups after the gang has ended.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address, ip_network
from typing import Any
from urllib.parse import urlsplit

from cavvy.providers.aws.account import AwsAccount, AwsFault, Json, camel, translate
from cavvy.providers.aws.launch_ledger import AwsGangRecord
from cavvy.providers.aws.policy import TAG
from cavvy.providers.base import NoCapacity, NotFound, Refused, TryAgain

GANG = "cavvy:gang"
# maximum number of user tags per object: AWS allows 50 tags, and Cavvy sets some itself
_MOST_TAGS = 45


def mark_of(installation: str) -> str:
    """Return the value that identifies the installation in tags."""
    return hashlib.sha256(installation.encode()).hexdigest()[:20]


def make_tags(mark: str, gang: str, labels: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return the tags of a gang's objects in AWS's form. Labels become tags with the same names. If
    no label is called `Name`, the tag `Name` is the gang's name. Labels whose names AWS reserves
    are omitted.
    """
    own = {TAG: mark, GANG: gang}
    users = {_fit(key, 128): _fit(value, 256) for key, value in sorted(labels.items())[:_MOST_TAGS]}
    users = {
        key: value for key, value in users.items() if key and not key.lower().startswith("aws:")
    }
    return [{"Key": key, "Value": value} for key, value in {"Name": gang, **users, **own}.items()]


def filters(mark: str, gang: str | None = None) -> Mapping[str, str]:
    """Return filters that select the objects of this installation, or of one of its gangs."""
    return {f"tag:{TAG}": mark} | ({} if gang is None else {f"tag:{GANG}": gang})


def read_tag(told: Json, key: str) -> str:
    """Return the value of a tag of an EC2 object, or "" if the object has no such tag."""
    return next((str(tag["Value"]) for tag in told.get("Tags", []) if tag["Key"] == key), "")


class GangNetworks:
    """Manages the security groups and placement groups of one installation's gangs."""

    def __init__(self, account: AwsAccount, mark: str) -> None:
        self._account, self._mark = account, mark

    async def find_subnet(self, region: str, named: str) -> Json:
        """Return the named subnet. Raises Refused if the subnet does not exist."""
        found = await self._account.items(region, "describe_subnets", {"subnet-id": named})
        if not found:
            raise Refused(f"network: the subnet {named} does not exist in {region}")
        return found[0]

    async def list_subnets(
        self, region: str, named: str | None, vpc: str | None, zones: Collection[str]
    ) -> Sequence[Json]:
        """Return the subnets that are in these zones, sorted by free addresses (most first). If
        `named` is not None, only the subnet with this ID is considered; otherwise the subnets of
        `vpc` are considered. If `vpc` is None, use the default subnets or, if none exist, the
        subnets of the region's only VPC.

        Raises NoCapacity if these zones have no subnet. Raises Refused if the region has no subnet,
        or if it has several VPCs and none of them is the default.
        """
        if named:
            found: Sequence[Json] = [await self.find_subnet(region, named)]
            what = f"the subnet {named} is not"
        elif vpc is not None:
            found = await self._account.items(region, "describe_subnets", {"vpc-id": vpc})
            what = f"the VPC {vpc} has no subnet"
        else:
            default = {"default-for-az": "true"}
            found = await self._account.items(region, "describe_subnets", default)
            what = f"the account has no {'default ' if found else ''}subnet"
            found = found or await self._list_only_vpc(region)
        if not found:
            raise Refused(f"network: {what} in {region}; set `subnet` or another `vpc`")
        fits = [each for each in found if each.get("AvailabilityZone") in zones]
        if not fits:
            raise NoCapacity(
                f"network: {what} in {' or '.join(sorted(zones))}, the zones that offer this "
                "instance type"
            )
        return sorted(
            fits,
            key=lambda each: (int(each.get("AvailableIpAddressCount", 0)), str(each["SubnetId"])),
            reverse=True,
        )

    async def _list_only_vpc(self, region: str) -> Sequence[Json]:
        """Return the subnets of a region that has one VPC. Raises Refused if the region has several
        VPCs.
        """
        found = await self._account.items(region, "describe_subnets")
        vpcs = sorted({str(each["VpcId"]) for each in found})
        if len(vpcs) > 1:
            raise Refused(
                f"network: {region} has no default subnet and several VPCs ({', '.join(vpcs)}); "
                "set `vpc` or `subnet` in `resources.network` or in [providers.aws]"
            )
        return found

    async def check_way(self, region: str, subnet: Json, server: str, *, public: bool) -> None:
        """Raise Refused if nodes in the subnet cannot reach the server by the subnet's routes.

        Routes are not checked if the server's address is a host name or a private address.
        """
        address = _read_address(server)
        if address is None:
            return
        own = {"association.subnet-id": str(subnet["SubnetId"])}
        main = {"vpc-id": str(subnet["VpcId"]), "association.main": "true"}
        try:
            tables = await self._account.items(region, "describe_route_tables", own)
            tables = tables or await self._account.items(region, "describe_route_tables", main)
        except (
            Refused
        ):  # the account may not read routes; only a launch can show whether nodes reach the server
            return
        routes = [
            each
            for table in tables
            for each in table.get("Routes", [])
            if each.get("State") != "blackhole"
        ]
        if any(
            "DestinationPrefixListId" in each for each in routes
        ):  # a route to a prefix list is skipped, because the addresses in the list are unknown
            return
        leads = [
            each
            for each in routes
            if address in ip_network(each.get("DestinationCidrBlock", "255.255.255.255/32"))
        ]
        where = (
            f"network: nodes in the subnet {subnet['SubnetId']} cannot connect to the server at "
            f"{address}"
        )
        if not leads:
            raise Refused(
                f"{where}: the subnet's route table has no route to this address; add a NAT "
                "gateway, or name another subnet"
            )
        way = max(leads, key=lambda each: ip_network(each["DestinationCidrBlock"]).prefixlen)
        if str(way.get("GatewayId", "")).startswith("igw-") and not public:
            raise Refused(
                f"{where}: the subnet's route leads to an internet gateway, which serves only "
                "nodes with a "
                "public address, and these nodes have no public address; "
                "set `public_ip: true`, or name a subnet with a NAT gateway"
            )

    async def make_group(
        self,
        region: str,
        gang: str,
        vpc: str | None,
        tags: Sequence[Mapping[str, str]],
        *,
        whole: bool,
        efa: bool,
    ) -> str:
        """Create the gang's security group and return its id. The group accepts connections only
        from the gang's own nodes.
        """
        arguments: dict[str, Any] = {
            "GroupName": gang,
            "Description": "Created by Cavvy for one gang and removed after it",
            "TagSpecifications": [{"ResourceType": "security-group", "Tags": list(tags)}],
        }
        if vpc:
            arguments["VpcId"] = vpc
        try:
            made = await self._account.call(region, "create_security_group", **arguments)
            group = str(made["GroupId"])
        except AwsFault as fault:
            if (
                fault.code != "InvalidGroup.Duplicate"
            ):  # a duplicate means that an earlier request succeeded but its reply was lost
                raise translate(fault, f"CreateSecurityGroup in {region}", making=True) from fault
            group = await self._find_group(region, gang)
        if whole:
            await self._allow(region, group, "authorize_security_group_ingress")
        if efa:  # EFA also needs an outgoing rule that names the group itself
            await self._allow(region, group, "authorize_security_group_egress")
        return group

    async def make_placement(
        self, region: str, gang: str, tags: Sequence[Mapping[str, str]]
    ) -> None:
        """Create a cluster placement group for the gang."""
        try:
            await self._account.call(
                region,
                "create_placement_group",
                GroupName=gang,
                Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": list(tags)}],
            )
        except AwsFault as fault:
            if fault.code != "InvalidPlacementGroup.Duplicate":
                raise translate(fault, f"CreatePlacementGroup in {region}", making=True) from fault

    async def left(
        self, region: str, gang: str | None = None
    ) -> tuple[Sequence[Json], Sequence[Json]]:
        """Return the security groups and placement groups that exist for a gang, or for the whole
        installation if `gang` is None.
        """
        query = filters(self._mark, gang)
        groups = await self._account.items(region, "describe_security_groups", query)
        return groups, await self._account.items(region, "describe_placement_groups", query)

    async def remove_made(self, record: AwsGangRecord) -> bool:
        """Delete the security group and placement group in the gang's record. Returns False while a
        group is still in use. Raises TryAgain, Refused.
        """
        if (
            record.makes_group and record.group is None
        ):  # the group may have been created although the reply was lost
            return await self.remove(record.region, record.name)
        gone = True
        if record.group is not None and record.makes_group:
            gone = await self._delete(record.region, "delete_security_group", GroupId=record.group)
        if record.makes_placement:
            gone = (
                await self._delete(record.region, "delete_placement_group", GroupName=record.name)
                and gone
            )
        return gone

    async def remove(self, region: str, gang: str) -> bool:
        """Delete the security groups and placement groups with the gang's tags. Returns False while
        a group is still in use. Raises TryAgain, Refused.
        """
        groups, placements = await self.left(region, gang)
        gone = [
            await self._delete(region, "delete_security_group", GroupId=each["GroupId"])
            for each in groups
        ]
        for each in placements:
            if each.get("State") != "deleted":
                gone.append(
                    await self._delete(
                        region, "delete_placement_group", GroupName=each["GroupName"]
                    )
                )
        return all(gone)

    async def _delete(self, region: str, operation: str, **which: str) -> bool:
        try:
            await self._account.ask(region, operation, **which)
        except NotFound:
            return True
        except TryAgain:  # instances that are shutting down still use the object
            return False
        return True

    async def _allow(self, region: str, group: str, operation: str) -> None:
        rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        try:
            await self._account.call(region, operation, GroupId=group, IpPermissions=[rule])
        except AwsFault as fault:
            if fault.code == "InvalidGroup.NotFound":
                raise TryAgain(
                    f"the security group {group} was created in {region} but is not listed yet"
                ) from fault
            if fault.code != "InvalidPermission.Duplicate":
                raise translate(fault, f"{camel(operation)} in {region}", making=True) from fault

    async def _find_group(self, region: str, gang: str) -> str:
        groups, _ = await self.left(region, gang)
        if not groups:
            raise TryAgain(f"the security group {gang} exists in {region} but is not listed yet")
        return str(groups[0]["GroupId"])


def _read_address(server: str) -> IPv4Address | None:
    """Return the server's address, or None if the address is a host name or a private address."""
    try:
        address = IPv4Address(urlsplit(server).hostname or "")
    except ValueError:
        return None
    return address if address.is_global else None


def is_name(server: str) -> bool:
    """Return whether the host in a server's URL is a name, not an IP address."""
    host = urlsplit(server).hostname or ""
    return not host.replace(".", "").isdigit() and ":" not in host


def _fit(text: str, length: int) -> str:
    """Make a string valid as a tag: AWS allows letters, digits and spaces of any language, and + -
    = . _ : / @. Other characters become "_".
    """
    return "".join(char if char.isalnum() or char in " +-=._:/@" else "_" for char in text)[
        :length
    ].strip()
