"""What EC2 refuses of a RunInstances that could never work, whatever is free: judged before
capacity and quotas.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tests.ec2.rules import TYPES, Answer

if TYPE_CHECKING:
    from tests.ec2.cloud import Cloud

_DISKS = ("standard", "gp2", "gp3", "io1", "io2", "st1", "sc1")
_RESERVATION = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
Params = Mapping[str, str]


def check_request(cloud: "Cloud", region: str, params: Params) -> None:
    """Raises Answer."""
    kind = params.get("InstanceType", "")
    if kind not in TYPES:
        raise Answer("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
    if len(params.get("UserData", "")) > 16384 * 4 // 3 + 4:
        raise Answer("InvalidParameterValue", "User data is limited to 16384 bytes")
    if not 1 <= int(params["MinCount"]) <= int(params["MaxCount"]):
        raise Answer("InvalidParameterCombination", "The min count is larger than the max count")
    image = params.get("ImageId", "")
    if image not in cloud.images(region):
        raise Answer("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
    if image in cloud.rules.unsubscribed:
        text = (
            "In order to use this AWS Marketplace product you need to accept terms and subscribe."
        )
        raise Answer("OptInRequired", text, 401)
    key = params.get("KeyName")
    if key and key not in cloud.backend(region).key_pairs:
        raise Answer("InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")
    for form in ("Name", "Arn"):
        profile = params.get(f"IamInstanceProfile.{form}")
        if profile is not None and profile not in cloud.rules.profiles:
            text = f"Value ({profile}) for parameter iamInstanceProfile.{form.lower()} is invalid."
            raise Answer("InvalidParameterValue", text)
    _check_market(cloud, params)
    _check_disk(params)
    _check_tags(params)
    _check_network(cloud, region, params)
    group = params.get("Placement.GroupName")
    if group and (region, group) not in cloud.placements:
        raise Answer("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    if group and "cluster" not in cloud.facts(kind)["PlacementGroupInfo"]["SupportedStrategies"]:
        raise Answer(
            "InvalidParameterCombination",
            f"Cluster placement groups are not supported by '{kind}'.",
        )


def list_groups(params: Params) -> list[str]:
    """The security groups that a request names."""
    interfaces = [each for name, each in params.items() if ".SecurityGroupId." in name]
    return [
        *(each for name, each in params.items() if name.startswith("SecurityGroupId.")),
        *interfaces,
    ]


def list_tagged(params: Params) -> Iterator[tuple[str, dict[str, str]]]:
    """What kinds of things a request tags, and with what."""
    for n in range(1, 9):
        prefix = f"TagSpecification.{n}."
        if f"{prefix}ResourceType" in params:
            keys = [i for i in range(1, 60) if f"{prefix}Tag.{i}.Key" in params]
            tags = {
                params[f"{prefix}Tag.{i}.Key"]: params.get(f"{prefix}Tag.{i}.Value", "")
                for i in keys
            }
            if len(tags) < len(keys):
                raise Answer("InvalidParameterValue", "Duplicate tag keys are not allowed")
            yield params[f"{prefix}ResourceType"], tags


def _check_market(cloud: "Cloud", params: Params) -> None:
    market, reservation = params.get("InstanceMarketOptions.MarketType"), params.get(_RESERVATION)
    if market not in (None, "spot", "capacity-block"):
        raise Answer("InvalidParameterValue", f"Invalid value '{market}' for MarketType.")
    if market == "spot" and reservation:
        raise Answer(
            "InvalidParameterCombination",
            "A capacity reservation cannot be used by Spot Instances.",
        )
    block = any(each.id == reservation and each.block for each in cloud.rules.reserved)
    if (market == "capacity-block") != block:
        raise Answer(
            "InvalidParameterCombination",
            "A capacity block needs the market type capacity-block, and it one.",
        )


def _check_disk(params: Params) -> None:
    size, kind = (
        params.get("BlockDeviceMapping.1.Ebs.VolumeSize"),
        params.get("BlockDeviceMapping.1.Ebs.VolumeType"),
    )
    if kind is not None and kind not in _DISKS:
        raise Answer(
            "InvalidParameterValue", f"Value ({kind}) for parameter volumeType is invalid."
        )
    if size is not None and int(size) < 8:
        raise Answer(
            "InvalidBlockDeviceMapping",
            f"Volume of size {size}GB is smaller than snapshot, expect size >= 8GB",
        )


def _check_tags(params: Params) -> None:
    for kind, tags in list_tagged(params):
        if (
            kind == "spot-instances-request"
            and params.get("InstanceMarketOptions.MarketType") != "spot"
        ):
            raise Answer(
                "InvalidParameterValue",
                f"'{kind}' is not a valid taggable resource type for this request.",
            )
        if len(tags) > 50:
            raise Answer("TagLimitExceeded", "More than 50 tags")
        for key, value in tags.items():
            if key.lower().startswith("aws:") or not 0 < len(key) <= 128 or len(value) > 256:
                raise Answer("InvalidParameterValue", f"Invalid tag {key!r}")


def _check_network(cloud: "Cloud", region: str, params: Params) -> None:
    first = "NetworkInterface.1.DeviceIndex" in params
    if first and (
        "SubnetId" in params or any(name.startswith("SecurityGroupId.") for name in params)
    ):
        text = (
            "Network interfaces and an instance-level subnet ID or security groups may not be "
            "specified together"
        )
        raise Answer("InvalidParameterCombination", text)
    backend = cloud.backend(region)
    subnet = params.get("SubnetId") or params.get("NetworkInterface.1.SubnetId")
    if subnet and subnet not in {each.id for each in backend.describe_subnets()}:
        raise Answer("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")
    vpc = backend.get_subnet(subnet).vpc_id if subnet else cloud.default_vpc(region)
    default = [each for each in backend.describe_subnets() if each.default_for_az]
    if not subnet and not any(each.vpc_id == vpc for each in default):
        text = f"No subnets found for the default VPC '{vpc}'. Please specify a subnet."
        raise Answer("MissingInput", text)
    for each in list_groups(params):
        if cloud.groups.get(each).vpc != vpc:
            raise Answer(
                "InvalidParameter",
                f"Security group {each} and subnet {subnet} belong to different networks.",
            )
    if first:
        _check_interfaces(cloud.facts(params["InstanceType"])["NetworkInfo"], params)


def _check_interfaces(facts: Mapping[str, Any], params: Params) -> None:
    count = sum(f"NetworkInterface.{n}.DeviceIndex" in params for n in range(1, 40))
    seen, adapters = set(), 0
    for n in range(1, count + 1):
        prefix = f"NetworkInterface.{n}."
        card, kind = (
            int(params.get(f"{prefix}NetworkCardIndex", "0")),
            params.get(f"{prefix}InterfaceType", "interface"),
        )
        where = (card, int(params[f"{prefix}DeviceIndex"]))
        if card >= int(facts.get("MaximumNetworkCards", 1)):
            raise Answer("InvalidParameterValue", f"The instance type has no network card {card}")
        if where in seen or where[1] >= int(
            facts["NetworkCards"][card]["MaximumNetworkInterfaces"]
        ):
            raise Answer(
                "InvalidParameterCombination", f"Invalid device index on network card {card}"
            )
        seen.add(where)
        if kind not in facts["NetworkCards"][card]["InterfaceTypes"]:
            raise Answer(
                "InvalidParameterCombination",
                f"Network card {card} does not support interface type {kind}",
            )
        adapters += kind.startswith("efa")
        if kind == "efa-only" and card == 0:
            raise Answer(
                "InvalidParameterCombination", "The primary network interface cannot be EFA-only"
            )
        if f"{prefix}AssociatePublicIpAddress" in params and count > 1:
            text = (
                "The associatePublicIPAddress parameter cannot be specified with multiple "
                "network interfaces."
            )
            raise Answer("InvalidParameterCombination", text)
    most = (
        int(facts.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0))
        if facts.get("EfaSupported")
        else 0
    )
    if adapters > most:
        raise Answer(
            "InvalidParameterCombination",
            f"The instance type takes {most} Elastic Fabric Adapters at most",
        )
