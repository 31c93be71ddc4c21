"""What this provider says about itself; imports no SDK."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    HAS_PARTS,
    HOLDS_VOLUMES,
    STATES_POLICY,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.notices import NoticeSource, NoticeTokenSource
from cavvy.providers.settings import flag, number, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.CAPACITY: "EC2 does not say how much is free; a launch is tried, and the next best "
    "place follows at once",
}

_IMDS = "http://169.254.169.254/latest"
_TOKEN = NoticeTokenSource(
    url=f"{_IMDS}/api/token",
    header="X-aws-ec2-metadata-token",
    headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
    life=timedelta(hours=6),
)
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html says
# two minutes, and to ask every 5 seconds;
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
NOTICES = (
    NoticeSource(
        source="EC2",
        url=f"{_IMDS}/meta-data/spot/instance-action",
        token=_TOKEN,
        match={"action": ("terminate", "stop", "hibernate")},
        time_field="time",
        within=timedelta(minutes=2),
    ),
    NoticeSource(
        source="EC2",
        url=f"{_IMDS}/meta-data/events/recommendations/rebalance",
        token=_TOKEN,
        advice=True,
    ),
)


MANIFEST = Manifest(
    name="aws",
    title="Amazon EC2",
    docs="docs/guides/aws.md",
    unsupported=UNSUPPORTED,
    abilities=(HAS_PARTS, HOLDS_VOLUMES, CHECKS_TASKS, WHO_AM_I, STATES_POLICY, CLOSEABLE),
    prices="cavvy.providers.aws.price_list",
    visibility_delay=timedelta(seconds=30),
    notices=NOTICES,
    notice=timedelta(minutes=2),
    settings=(
        text(
            "regions",
            "Names with commas between them; only these are used. Unset: the region of the AWS "
            "configuration.",
        ),
        text(
            "profile",
            "The profile of `~/.aws` to act as. Unset: credentials are found as every AWS tool "
            "does.",
        ),
        text(
            "endpoint",
            "Every call goes to this address, as for a private endpoint. Unset: AWS's own.",
        ),
        text(
            "instances",
            "Patterns with commas between them, such as `p5.*, g6.xlarge`; only these types are "
            "offered. Unset: every type with accelerators, and the families c7i, m7i, r7i and t3.",
        ),
        text(
            "image",
            "The machine image: an AMI's id, or the name of a parameter of Systems Manager that "
            "holds one. Unset: the newest AWS Deep Learning Base image (Ubuntu 22.04) for types "
            "with NVIDIA GPUs, Amazon Linux 2023 else.",
        ),
        number(
            "disk_gib",
            "Size of a node's root disk where a task asks for none; an image may need more.",
            default=100,
            minimum=8,
            unit="GiB",
            whole=True,
        ),
        text("disk_type", "Type of the root disk where a task names none.", "gp3"),
        text(
            "vpc", "Nodes are in this VPC where a task names none. Unset: the region's default VPC."
        ),
        text(
            "subnet",
            "Nodes are in this subnet where a task names none. Unset: one that EC2 chooses in the "
            "VPC.",
        ),
        text(
            "security_groups",
            "Ids with commas between them, where a task names none. Unset: each gang has one of "
            "its own, which lets nobody in but the gang itself, and is removed afterwards.",
        ),
        text(
            "key",
            "A key pair that nodes let in, where a task names none. Unset: nobody can log in by "
            "SSH.",
        ),
        text(
            "reservations",
            "Capacity reservations and capacity blocks (`cr-...`), with commas between them, that "
            "may be used.",
        ),
        number(
            "reserved_price_usd_hr",
            "What a job is charged for a node in a reservation. Unset: the on-demand price, and "
            "nothing in a capacity block, which was paid for beforehand.",
            unit="USD per hour",
        ),
        flag(
            "efa",
            "`true`: gangs have the Elastic Fabric Adapter where their type has it and, with "
            "several network cards, a subnet is named, since such nodes get no public address. "
            "`false`: never.",
            default=True,
        ),
        flag(
            "placement_group",
            "`true`: gangs of types with EFA are in a cluster placement group of their own: nearer "
            "to each other, and harder to get. `false`: anywhere in the region or zone.",
            default=True,
        ),
    ),
)
