"""The permissions that this provider needs: writes an IAM policy with them, and finds the calls for
which the account has no permission. Each such call is made as a dry run: EC2 reports whether it
would allow the call, but does not execute the call.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html: a dry run ends with
the error DryRunOperation if the call is allowed, otherwise with UnauthorizedOperation. All errors
except DryRunOperation and UnauthorizedOperation concern the values of the call, not permissions. A
dry run of a call that changes an object needs an existing object. AWS services other than EC2 have
no dry run.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.providers.aws.account import AwsAccount, AwsFault, camel

# All actions that this package calls, grouped by purpose. In the tests, the simulated EC2 refuses
# all other actions.
READS = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "pricing:GetProducts",
    "servicequotas:ListServiceQuotas",
    "ssm:GetParameter",
    "sts:GetCallerIdentity",
)
MAKES = (
    "ec2:RunInstances",
    "ec2:CreateSecurityGroup",
    "ec2:CreatePlacementGroup",
    "ec2:CreateVolume",
)
# These actions are allowed only for objects that carry the tag of an installation, which protects
# all other objects in the account.
CHANGES_OURS = (
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:DeletePlacementGroup",
    "ec2:DeleteSecurityGroup",
    "ec2:DeleteVolume",
    "ec2:ModifyInstanceAttribute",
    "ec2:TerminateInstances",
)
TAG = "cavvy:installation"
_EC2 = "ec2:"
_NAME = "cavvy-check"  # a placeholder name in the requests; the dry runs create no object


def make_policy(*, profile: str = "") -> str:
    """Return the policy as IAM JSON. The policy permits setting tags only in the call that creates
    an object. `profile` is the name or the ARN of the nodes' instance profile, or "". The policy
    assumes that the instance profile and its role have the same name.
    """
    statements: list[dict[str, object]] = [
        {"Sid": "Look", "Effect": "Allow", "Action": list(READS), "Resource": "*"},
        {"Sid": "Make", "Effect": "Allow", "Action": list(MAKES), "Resource": "*"},
        {
            "Sid": "TagWhatIsMade",
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": "*",
            "Condition": {
                "StringEquals": {"ec2:CreateAction": [each.removeprefix("ec2:") for each in MAKES]}
            },
        },
        {
            "Sid": "ChangeOurs",
            "Effect": "Allow",
            "Action": list(CHANGES_OURS),
            "Resource": "*",
            "Condition": {"Null": {f"aws:ResourceTag/{TAG}": "false"}},
        },
        # allows attaching any volume, because a task may name any, but only to nodes of an
        # installation
        {
            "Sid": "AttachVolumes",
            "Effect": "Allow",
            "Action": "ec2:AttachVolume",
            "Resource": "arn:aws:ec2:*:*:volume/*",
        },
        {
            "Sid": "AttachToOurs",
            "Effect": "Allow",
            "Action": "ec2:AttachVolume",
            "Resource": "arn:aws:ec2:*:*:instance/*",
            "Condition": {"Null": {f"aws:ResourceTag/{TAG}": "false"}},
        },
        {
            "Sid": "FirstSpot",
            "Effect": "Allow",
            "Action": "iam:CreateServiceLinkedRole",
            "Resource": "arn:aws:iam::*:role/aws-service-role/"
            "spot.amazonaws.com/AWSServiceRoleForEC2Spot",
            "Condition": {"StringLike": {"iam:AWSServiceName": "spot.amazonaws.com"}},
        },
    ]
    if profile:
        statements.append(
            {
                "Sid": "GiveProfile",
                "Effect": "Allow",
                "Action": "iam:PassRole",
                "Resource": _name_role(profile),
                "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
            }
        )
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def _name_role(profile: str) -> str:
    """Return the ARN of the role that has the same name as the instance profile. If `profile` is an
    ARN, such as arn:aws:iam::123456789012:instance-profile/path/name, the role is in the same
    account.
    """
    owner, _, path = profile.rpartition(":instance-profile/")
    return f"{owner or 'arn:aws:iam::*'}:role/{path.rpartition('/')[2]}"


async def find_refused_reads(account: AwsAccount, region: str) -> Sequence[str]:
    """Return the IAM names of the actions in `policy.READS` for which the account has no
    permission.
    """
    names = [each.removeprefix(_EC2) for each in READS if each.startswith(_EC2)]
    return await _try_all(account, region, {_snake(each): {} for each in names})


async def find_refused_launches(
    account: AwsAccount, offer: Offer, zone: str, image: str, profile: str
) -> Sequence[str]:
    """Return the actions that a launch of this offer needs, but for which the account has no
    permission. `profile` is the instance profile of nodes, or "".
    """
    tags = [{"ResourceType": "instance", "Tags": [{"Key": TAG, "Value": _NAME}]}]
    launch: dict[str, Any] = {
        "ImageId": image,
        "InstanceType": offer.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "TagSpecifications": tags,
    }
    if profile:
        launch["IamInstanceProfile"] = {"Arn" if profile.startswith("arn:") else "Name": profile}
    calls: dict[str, Mapping[str, Any]] = {
        "run_instances": launch,
        "create_security_group": {"GroupName": _NAME, "Description": _NAME},
        "create_placement_group": {"GroupName": _NAME, "Strategy": "cluster"},
        "create_volume": {"AvailabilityZone": zone, "Size": 1, "VolumeType": "gp3"},
    }
    return await _try_all(account, offer.region, calls)


def describe_rights(refused: Sequence[str]) -> str:
    """Return one line for `cavvy check` that lists the refused calls."""
    if not refused:
        return "EC2 allows all calls that a dry run can check"
    return f"refused: {', '.join(refused)}; `cavvy check aws --policy` prints the required policy"


async def _try_all(
    account: AwsAccount, region: str, calls: Mapping[str, Mapping[str, Any]]
) -> Sequence[str]:
    answers = await asyncio.gather(*(_is_refused(account, region, *each) for each in calls.items()))
    found = zip(calls, answers, strict=True)
    return [f"{_EC2}{camel(operation)}" for operation, refused in found if refused]


async def _is_refused(
    account: AwsAccount, region: str, operation: str, arguments: Mapping[str, Any]
) -> bool:
    try:
        await account.call(region, operation, DryRun=True, **arguments)
    except AwsFault as fault:
        return fault.code == "UnauthorizedOperation"
    return False


def _snake(action: str) -> str:
    """Return boto3's name of an action, such as run_instances for RunInstances."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", action).lower()
