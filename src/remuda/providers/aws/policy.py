"""The least that an IAM user or role needs for this provider, as an IAM policy."""

import json

# Every action that this package calls, and what for; a test's stand-in refuses whatever is not here.
READS = (
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "pricing:GetProducts",
    "servicequotas:ListServiceQuotas",
    "ssm:GetParameter",
    "sts:GetCallerIdentity",
)
MAKES = ("ec2:RunInstances", "ec2:CreateSecurityGroup", "ec2:CreatePlacementGroup", "ec2:CreateTags")
# Only of what carries our tag: whatever else the account holds cannot be touched.
CHANGES_OURS = (
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:DeletePlacementGroup",
    "ec2:DeleteSecurityGroup",
    "ec2:TerminateInstances",
)
TAG = "remuda:installation"


def make_policy() -> str:
    """IAM JSON. Tags can be given only to what is being made in the same call."""
    statements = [
        {"Sid": "Look", "Effect": "Allow", "Action": list(READS), "Resource": "*"},
        {"Sid": "Make", "Effect": "Allow", "Action": [each for each in MAKES if "Tags" not in each], "Resource": "*"},
        {
            "Sid": "TagWhatIsMade",
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": "*",
            "Condition": {
                "StringEquals": {"ec2:CreateAction": ["RunInstances", "CreateSecurityGroup", "CreatePlacementGroup"]}
            },
        },
        {
            "Sid": "ChangeOurs",
            "Effect": "Allow",
            "Action": list(CHANGES_OURS),
            "Resource": "*",
            "Condition": {"Null": {f"aws:ResourceTag/{TAG}": "false"}},
        },
        {
            "Sid": "FirstSpot",
            "Effect": "Allow",
            "Action": "iam:CreateServiceLinkedRole",
            "Resource": "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot",
            "Condition": {"StringLike": {"iam:AWSServiceName": "spot.amazonaws.com"}},
        },
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)
