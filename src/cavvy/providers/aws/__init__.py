"""Amazon EC2: each gang is one all-or-none launch of instances that start the agent on boot."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    BILLS_VOLUMES,
    CHECKS_TASKS,
    CLOSEABLE,
    HAS_PARTS,
    HOLDS_VOLUMES,
    STATES_POLICY,
    TELLS_QUOTAS,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest, ProviderSetting, SettingKind, explain_results
from cavvy.providers.notices import NoticeSource, NoticeTokenSource
from cavvy.providers.settings import disk_setting, number, project_flag, project_text, text

# the settings that all providers on AWS share
REGIONS = project_text(
    "regions",
    "The regions to use, separated by commas. The default is the region of the AWS configuration.",
).for_setup()
ACCOUNT = (
    ProviderSetting(
        name="key_file",
        kind=SettingKind.KEY_FILE,
        consequence="A file with lines as in `~/.aws/credentials`: `aws_access_key_id "
        "= …`, `aws_secret_access_key = …` and, for temporary keys, "
        "`aws_session_token = …`. Other lines of the file are not read. By default, "
        "`profile` applies.",
    ).for_projects(),
    text(
        "profile",
        "The profile of `~/.aws` to use. By default, boto3 searches for credentials in its usual "
        "order.",
    ),
    text(
        "endpoint",
        "The address for all AWS calls, such as a private endpoint. The default is AWS's own "
        "address.",
    ),
)

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.REPAIR: "one request starts all instances of a gang, and Cavvy does not replace single "
    "ones yet (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html)",
    Feature.RESULTS: explain_results(
        "an instance's disk is deleted when the instance ends "
        "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html)",
        "the instance",
    ),
    Feature.CAPACITY: "EC2 does not report free capacity; if a launch fails for lack of capacity, "
    "Cavvy immediately tries the next best offer "
    "(https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html)",
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
    cloud="cavvy.providers.aws.provider:AwsProvider",
    unsupported=UNSUPPORTED,
    abilities=(
        HAS_PARTS,
        HOLDS_VOLUMES,
        BILLS_VOLUMES,
        CHECKS_TASKS,
        WHO_AM_I,
        TELLS_QUOTAS,
        STATES_POLICY,
        CLOSEABLE,
    ),
    prices="cavvy.providers.aws.prices",
    rights="the IAM policy that `cavvy check aws --policy` prints",
    visibility_delay=timedelta(seconds=30),
    notices=NOTICES,
    notice=timedelta(minutes=2),
    options={
        "image": "the machine image: an AMI's id, or the name of a Systems Manager parameter",
        "zone": "the availability zone, such as us-east-1a",
    },
    docs="docs/guides/aws.md",
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "instances",
            "Patterns of the instance types to offer, separated by commas, such as `p5.*, "
            "g6.xlarge`. The default is every type with accelerators, and the families c7i, m7i, "
            "r7i and t3.",
        ),
        project_text(
            "image",
            "The machine image: an AMI's id, or the name of a Systems Manager parameter that "
            "contains such an id. The default is AWS's newest image with drivers for the type: "
            "Deep Learning Base (NVIDIA GPUs since T4, Trainium, Inferentia2), or Amazon Linux "
            "2023 for types without accelerators.",
        ),
        disk_setting(
            "The size of a node's root disk, unless the task requests another size. If the image "
            "needs a larger disk, the disk has the size that the image needs.",
            100,
            minimum=8,
        ),
        project_text(
            "disk_type", "The type of the root disk, unless the task names a type.", "gp3"
        ),
        project_text(
            "vpc",
            "The VPC of nodes, unless the task names one. The default is the region's default VPC, "
            "or the region's only VPC if it has no default subnet.",
        ),
        project_text(
            "subnet",
            "The subnet of nodes, unless the task names one. By default, Cavvy tries the VPC's "
            "subnets in turn. Without a VPC, EC2 chooses a default subnet; if that subnet has no "
            "capacity, Cavvy tries the default subnets of the other zones.",
        ),
        project_text(
            "security_groups",
            "The security groups of nodes, as ids separated by commas, unless the task names its "
            "own. By default, each gang gets its own group, which accepts connections only from "
            "the gang's nodes and is removed when the gang has ended.",
        ),
        project_text(
            "key",
            "The key pair for SSH to nodes, unless the task names one. Without a key pair, nodes "
            "accept no SSH logins.",
        ),
        project_text(
            "instance_profile",
            "The instance profile of nodes, as a name or an ARN. With the profile's role, jobs can "
            "use AWS services, such as S3, without keys, and nodes can pull images from ECR. By "
            "default, nodes have no role.",
        ),
        project_text(
            "reservations",
            "Capacity reservations and capacity blocks (`cr-...`) that may be used, separated by "
            "commas.",
        ),
        number(
            "reserved_price_usd_hr",
            "The price of a node in a capacity reservation or capacity block. By default, a node "
            "in a reservation costs the on-demand price, and a node in a capacity block, which is "
            "paid in advance, costs nothing.",
            unit="USD per hour",
        ),
        project_flag(
            "efa",
            "If `true`, gangs get Elastic Fabric Adapters on instance types that have them. "
            "Nodes with several network cards get no public address, so their subnet needs "
            "another route to the server. If `false`, gangs get no adapters.",
            default=True,
        ),
        project_flag(
            "placement_group",
            "If `true`, a gang whose instance type has EFA gets its own cluster placement group: "
            "EC2 places the gang's nodes close together, but less often has capacity for such a "
            "group. If `false`, the gang's nodes can be anywhere in the region or zone.",
            default=True,
        ),
    ),
)
