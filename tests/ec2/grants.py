"""What an IAM policy allows, judged for each thing that a request touches; what it does not name
is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

TAG = "cavvy:installation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One statement of a policy, with the two conditions that ours has."""

    actions: frozenset[str]
    resource: str
    tagged: bool = False  # only what carries our tag
    while_creating: frozenset[str] = frozenset()  # of CreateTags: with these actions only


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A thing that is there already and that a request changes."""

    kind: str  # as in its ARN: instance, volume, security-group, placement-group
    tags: Mapping[str, str]


def read_policy(policy: str) -> Sequence[Grant]:
    """The statements of an IAM policy. A condition that is not understood here must not be taken
    as none.
    """
    grants = []
    for statement in json.loads(policy)["Statement"]:
        assert statement["Effect"] == "Allow"
        named, condition = statement["Action"], dict(statement.get("Condition", {}))
        tagged = condition.pop("Null", None) == {f"aws:ResourceTag/{TAG}": "false"}
        equal = condition.pop("StringEquals", {})
        creating = equal.pop("ec2:CreateAction", ())
        assert equal in ({}, {"iam:PassedToService": "ec2.amazonaws.com"}), equal
        assert condition.keys() <= {"StringLike"}, condition
        actions = frozenset([named] if isinstance(named, str) else named)
        resource = str(statement["Resource"])
        grants.append(
            Grant(
                actions=actions,
                resource=resource,
                tagged=tagged,
                while_creating=frozenset(creating),
            )
        )
    return grants


def permits(grants: Sequence[Grant], action: str, targets: Sequence[Target]) -> bool:
    """Whether every target may be touched so; without targets, whether something new or
    everything may be.
    """
    mine = [grant for grant in grants if action in grant.actions]
    if not targets:
        return any(not grant.tagged for grant in mine)
    return all(any(_covers(grant, target) for grant in mine) for target in targets)


def permits_tags(grants: Sequence[Grant], creating: str) -> bool:
    """Whether what this action makes may be tagged with it."""
    return any(
        "ec2:CreateTags" in grant.actions and creating in grant.while_creating for grant in grants
    )


def permits_role(grants: Sequence[Grant], profile: str) -> bool:
    """Whether the role of this instance profile, which has its name, may be passed to EC2."""
    arn = f"arn:aws:iam::123456789012:role/{profile.rpartition('/')[2]}"
    return any(
        "iam:PassRole" in grant.actions and fnmatchcase(arn, grant.resource) for grant in grants
    )


def _covers(grant: Grant, target: Target) -> bool:
    arn = f"arn:aws:ec2:us-east-1:123456789012:{target.kind}/x"
    return fnmatchcase(arn, grant.resource) and (not grant.tagged or TAG in target.tags)
