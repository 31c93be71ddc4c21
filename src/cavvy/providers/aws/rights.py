"""Finds the calls for which the account has no permission. Each call is made as a dry run: EC2
reports whether it would allow the call, but does not execute the call.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html: a dry run ends with
the error DryRunOperation if the call is allowed, otherwise with UnauthorizedOperation. All errors
except DryRunOperation and UnauthorizedOperation concern the values of the call, not permissions. A
dry run of a call that changes an object needs an existing object. AWS services other than EC2 have
no dry run.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.providers.aws.account import AwsAccount, camel
from cavvy.providers.aws.errors import AwsFault
from cavvy.providers.aws.policy import READS, TAG

_EC2 = "ec2:"
_NAME = "cavvy-check"  # a placeholder name in the requests; the dry runs create no object


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
