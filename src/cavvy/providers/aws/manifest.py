"""The manifest of the AWS provider. Imports no SDK."""

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
    Feature.CAPACITY: "EC2 does not report free capacity; a failed launch moves on to the next "
    "best offer at once",
}

_IMDS = "http://169.254.169.254/latest"
_TOKEN = NoticeTokenSource(
    url=f"{_IMDS}/api/token",
    header="X-aws-ec2-metadata-token",
    headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
    life=timedelta(hours=6),
)
# AWS documents a notice of two minutes, polled every 5 seconds:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
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
    options={"image": "the machine image: an AMI's id, or a parameter's name"},
    settings=(
        text(
            "regions",
            "The regions to use, with commas between them. Unset: the region of the AWS "
            "configuration.",
        ),
        text(
            "profile",
            "The profile of `~/.aws` to use. Unset: AWS's usual search for credentials.",
        ),
        text(
            "endpoint",
            "Every call goes to this address, such as a private endpoint. Unset: AWS's own.",
        ),
        text(
            "instances",
            "Patterns separated by commas, such as `p5.*, g6.xlarge`; only these types are "
            "offered. Unset: every type with accelerators, and the families c7i, m7i, r7i and t3.",
        ),
        text(
            "image",
            "The machine image: an AMI's id, or the name of a Systems Manager parameter that "
            "contains one. Unset: the newest AWS Deep Learning Base image (Ubuntu 22.04) for types "
            "with NVIDIA GPUs, otherwise Amazon Linux 2023.",
        ),
        number(
            "disk_gib",
            "Size of a node's root disk if the task asks for none; an image may need more.",
            default=100,
            minimum=8,
            unit="GiB",
            whole=True,
        ),
        text("disk_type", "Type of the root disk if the task names none.", "gp3"),
        text("vpc", "The VPC of nodes if the task names none. Unset: the region's default VPC."),
        text(
            "subnet",
            "The subnet of nodes if the task names none. Unset: EC2 chooses one in the VPC.",
        ),
        text(
            "security_groups",
            "Ids with commas between them, used if the task names none. Unset: each gang gets its "
            "own group, which admits only the gang's nodes and is removed afterwards.",
        ),
        text(
            "key",
            "The key pair for SSH to nodes, if the task names none. Unset: no login by SSH.",
        ),
        text(
            "reservations",
            "Capacity reservations and capacity blocks (`cr-...`) that may be used, with commas "
            "between them.",
        ),
        number(
            "reserved_price_usd_hr",
            "The price of a node in a reservation. Unset: the on-demand price, and "
            "nothing in a capacity block, which is paid in advance.",
            unit="USD per hour",
        ),
        flag(
            "efa",
            "`true`: gangs get Elastic Fabric Adapters if their type has them. A type with several "
            "network cards also needs a named subnet, since its nodes get no public address. "
            "`false`: never.",
            default=True,
        ),
        flag(
            "placement_group",
            "`true`: a gang of a type with EFA gets its own cluster placement group: its nodes are "
            "close together, and harder to get. `false`: anywhere in the region or zone.",
            default=True,
        ),
    ),
)
