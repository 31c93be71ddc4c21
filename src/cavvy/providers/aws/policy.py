"""Writes an IAM policy with the minimum permissions that this provider needs."""

import json

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
