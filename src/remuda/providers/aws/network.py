"""The least that a gang needs of a network where its task names none: made before a launch, removed after the end."""

import hashlib
from collections.abc import Mapping, Sequence

from remuda.providers.aws.account import Account, Json
from remuda.providers.aws.books import Record
from remuda.providers.aws.errors import Fault, translate
from remuda.providers.aws.policy import TAG
from remuda.providers.base import NotFound, Refused, TryAgain

GANG = "remuda:gang"
_MOST_TAGS = 45  # AWS takes 50


def mark_of(installation: str) -> str:
    """What tags carry of the installation's id."""
    return hashlib.sha256(installation.encode()).hexdigest()[:20]


def make_tags(mark: str, gang: str, labels: Mapping[str, str]) -> list[Mapping[str, str]]:
    """AWS's form. Users' tags keep their names, but for those that AWS reserves."""
    own = {TAG: mark, GANG: gang, "Name": gang}
    users = {_fit(key, 128): _fit(value, 256) for key, value in sorted(labels.items())[:_MOST_TAGS]}
    users = {key: value for key, value in users.items() if key and not key.lower().startswith("aws:")}
    return [{"Key": key, "Value": value} for key, value in {**users, **own}.items()]


def filters(mark: str, gang: str | None = None) -> Sequence[Mapping[str, object]]:
    """What of the account is this installation's, or one gang's."""
    own = [{"Name": f"tag:{TAG}", "Values": [mark]}]
    return own if gang is None else [*own, {"Name": f"tag:{GANG}", "Values": [gang]}]


class Networks:
    """Security groups and placement groups of one installation's gangs."""

    def __init__(self, account: Account, mark: str) -> None:
        self._account, self._mark = account, mark

    async def subnet(self, region: str, named: str | None, vpc: str | None, zone: str | None) -> Json | None:
        """The subnet that is named, or one of the VPC in the zone; None: EC2 may choose in the default VPC."""
        if named is None and vpc is None:
            return None
        query = [{"Name": "subnet-id" if named else "vpc-id", "Values": [named or vpc]}]
        found = await self._account.pages(region, "ec2", "describe_subnets", "Subnets", Filters=query)
        fits = [each for each in found if zone is None or each.get("AvailabilityZone") == zone]
        if not fits and named is None:
            raise Refused(f"network: the VPC {vpc} has no subnet{f' in {zone}' if zone else ''} in {region}")
        if not found:
            raise Refused(f"network: there is no subnet {named} in {region}")
        if not fits:
            raise NotFound(f"network: the subnet {named} is not in {zone}")
        return max(fits, key=lambda each: (int(each.get("AvailableIpAddressCount", 0)), str(each["SubnetId"])))

    async def default_subnet(self, region: str, zone: str | None) -> Json:
        """One of the default VPC's. Raises Refused where the account has none."""
        query = [{"Name": "default-for-az", "Values": ["true"]}]
        found = await self._account.pages(region, "ec2", "describe_subnets", "Subnets", Filters=query)
        fits = [each for each in found if zone is None or each.get("AvailabilityZone") == zone]
        if not fits:
            raise Refused(f"network: the account has no default subnet in {zone or region}; name a subnet")
        return max(fits, key=lambda each: (int(each.get("AvailableIpAddressCount", 0)), str(each["SubnetId"])))

    async def make_group(
        self, region: str, gang: str, vpc: str | None, tags: Sequence[Mapping[str, str]], *, whole: bool, efa: bool
    ) -> str:
        """The gang's own security group: nobody comes in but, in a gang of several nodes, the gang itself."""
        arguments: dict[str, object] = {
            "GroupName": gang,
            "Description": "Made by Remuda for one gang and removed after it",
            "TagSpecifications": [{"ResourceType": "security-group", "Tags": list(tags)}],
        }
        if vpc:
            arguments["VpcId"] = vpc
        try:
            group = str((await self._account.call(region, "ec2", "create_security_group", **arguments))["GroupId"])
        except Fault as fault:
            if fault.code != "InvalidGroup.Duplicate":  # an answer of ours that was lost
                raise translate(fault, f"CreateSecurityGroup in {region}") from fault
            group = await self._find_group(region, gang)
        if whole:
            await self._allow(region, group, "authorize_security_group_ingress")
        if efa:  # the adapter asks for a rule that names the group itself, outwards too
            await self._allow(region, group, "authorize_security_group_egress")
        return group

    async def make_placement(self, region: str, gang: str, tags: Sequence[Mapping[str, str]]) -> None:
        """A cluster placement group of the gang's own."""
        try:
            await self._account.call(
                region, "ec2", "create_placement_group", GroupName=gang, Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": list(tags)}],
            )  # fmt: skip
        except Fault as fault:
            if fault.code != "InvalidPlacementGroup.Duplicate":
                raise translate(fault, f"CreatePlacementGroup in {region}") from fault

    async def left(self, region: str, gang: str | None = None) -> tuple[Sequence[Json], Sequence[Json]]:
        """Security groups and placement groups of ours that are there."""
        query = filters(self._mark, gang)
        groups = await self._account.pages(region, "ec2", "describe_security_groups", "SecurityGroups", Filters=query)
        placements = await self._account.ask(region, "ec2", "describe_placement_groups", Filters=query)
        return groups, placements.get("PlacementGroups", [])

    async def remove_made(self, record: Record) -> bool:
        """Remove what a record says was made; False where something of it is still in use. Raises TryAgain, Refused."""
        if record.makes_group and record.group is None:  # perhaps it was, and its id never came
            return await self.remove(record.region, record.name)
        gone = True
        if record.group is not None and record.makes_group:
            gone = await self._delete(record.region, "delete_security_group", GroupId=record.group)
        if record.makes_placement:
            gone = await self._delete(record.region, "delete_placement_group", GroupName=record.name) and gone
        return gone

    async def remove(self, region: str, gang: str) -> bool:
        """Remove what shows by its tags; False where something of it is still in use. Raises TryAgain, Refused."""
        groups, placements = await self.left(region, gang)
        gone = [await self._delete(region, "delete_security_group", GroupId=each["GroupId"]) for each in groups]
        for each in placements:
            if each.get("State") != "deleted":
                gone.append(await self._delete(region, "delete_placement_group", GroupName=each["GroupName"]))
        return all(gone)

    async def _delete(self, region: str, operation: str, **which: str) -> bool:
        try:
            await self._account.ask(region, "ec2", operation, **which)
        except NotFound:
            return True
        except TryAgain:  # as long as an instance is shutting down, what it has is in use
            return False
        return True

    async def _allow(self, region: str, group: str, operation: str) -> None:
        rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        try:
            await self._account.call(region, "ec2", operation, GroupId=group, IpPermissions=[rule])
        except Fault as fault:
            if fault.code != "InvalidPermission.Duplicate":
                raise translate(fault, f"{operation} in {region}") from fault

    async def _find_group(self, region: str, gang: str) -> str:
        groups, _ = await self.left(region, gang)
        if not groups:
            raise TryAgain(f"the security group {gang} exists in {region} and does not show yet")
        return str(groups[0]["GroupId"])


def _fit(text: str, length: int) -> str:
    """Letters, digits and blanks of any language and + - = . _ : / @, as AWS takes them."""
    return "".join(char if char.isalnum() or char in " +-=._:/@" else "_" for char in text)[:length].strip()
