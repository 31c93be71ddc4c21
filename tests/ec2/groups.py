"""Security groups: in one VPC each, with rules that name groups, and not removed while an
instance has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from tests.ec2.rules import Answer

Rule = tuple[str, str]  # direction and the group that may come in, or be called


@dataclass(slots=True, kw_only=True)
class Group:
    """One security group."""

    id: str
    region: str
    vpc: str
    name: str
    tags: Mapping[str, str]
    rules: set[Rule] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Groups:
    """Every group of an account but for the VPCs' own."""

    vpcs: Callable[[str], Sequence[str]]  # of a region
    default: Callable[[str], str]  # the default VPC of a region
    used: Callable[[str], bool]
    known: dict[str, Group] = field(default_factory=dict)
    made: int = 0

    def make(self, region: str, params: Mapping[str, str], tags: Mapping[str, str]) -> Group:
        vpcs, name = self.vpcs(region), params["GroupName"]
        vpc = params.get("VpcId") or self.default(region)
        if vpc not in vpcs:
            raise Answer("InvalidVpcID.NotFound", f"The vpc ID '{vpc}' does not exist")
        if any(
            (each.region, each.vpc, each.name) == (region, vpc, name)
            for each in self.known.values()
        ):
            raise Answer(
                "InvalidGroup.Duplicate",
                f"The security group '{name}' already exists for VPC '{vpc}'",
            )
        self.made += 1
        group = Group(id=f"sg-{self.made:017x}", region=region, vpc=vpc, name=name, tags=dict(tags))
        self.known[group.id] = group
        return group

    def get(self, group: str) -> Group:
        if group not in self.known:
            raise Answer("InvalidGroup.NotFound", f"The security group '{group}' does not exist")
        return self.known[group]

    def allow(self, direction: str, params: Mapping[str, str]) -> None:
        group, other = (
            self.get(params["GroupId"]),
            self.get(params["IpPermissions.1.Groups.1.GroupId"]),
        )
        assert params["IpPermissions.1.IpProtocol"] == "-1"
        if (direction, other.id) in group.rules:
            raise Answer("InvalidPermission.Duplicate", "the specified rule already exists")
        group.rules.add((direction, other.id))

    def delete(self, group: str) -> None:
        self.get(group)
        if self.used(group):
            raise Answer("DependencyViolation", f"resource {group} has a dependent object")
        del self.known[group]

    def show(self, region: str, wanted: Mapping[str, Sequence[str]]) -> str:
        """DescribeSecurityGroups' items."""
        items = ""
        for each in self.known.values():
            if each.region == region and all(
                each.tags.get(name.removeprefix("tag:")) in values
                for name, values in wanted.items()
            ):
                tags = "".join(
                    f"<item><key>{escape(k)}</key><value>{escape(v)}</value></item>"
                    for k, v in each.tags.items()
                )
                items += (
                    f"<item><groupId>{each.id}</groupId><groupName>{each.name}</groupName><vpcId>{each.vpc}</vpcId>"
                    f"<tagSet>{tags}</tagSet></item>"
                )
        return items
