"""Amazon SageMaker: each gang is one training job, whose containers start the agent."""

from datetime import timedelta

from cavvy.providers.abilities import KEEPS_NODES
from cavvy.providers.aws import ACCOUNT, REGIONS
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import disk_setting, project_number, project_text
from cavvy.providers.vm.abilities import TOGETHER

_DOCS = "https://docs.aws.amazon.com/sagemaker/latest"
_JOB = f"{_DOCS}/APIReference/API_CreateTrainingJob.html"
_DISK = f"{_DOCS}/dg/API_ResourceConfig.html"

INSTANCES = project_text(
    "instances",
    "Patterns of the instance types to offer, separated by commas, such as `ml.g5.*, "
    "ml.p4d.24xlarge`. The default is every type in the catalog, without Trainium and "
    "Inferentia.",
)

MANIFEST = JobManifest(
    name="sagemaker",
    title="Amazon SageMaker",
    cloud="cavvy.providers.sagemaker.jobs:SageMakerService",
    abilities=(*TOGETHER, KEEPS_NODES),
    visibility_delay=timedelta(seconds=30),
    # SIGKILL follows SIGTERM after 120 seconds; the agent needs 10 of them for its last report
    notice=timedelta(seconds=110),
    rights="sagemaker:CreateTrainingJob, DescribeTrainingJob, ListTrainingJobs, StopTrainingJob, "
    "UpdateTrainingJob and AddTags, pricing:GetProducts, and iam:PassRole for the role of the "
    "setting `role`",
    unsupported={
        **list_unsupported_by_jobs("a training job", page=_JOB, disk=_DISK),
        Feature.LOGIN: "SageMaker pulls images from Amazon ECR with the rights of the setting "
        f"`role` ({_DOCS}/dg/sagemaker-roles.html)",
        Feature.CAPACITY: "SageMaker does not report free capacity; a job without capacity fails, "
        f"and Cavvy tries the next best offer ({_JOB})",
        Feature.VOLUMES: "a training job mounts no EBS volumes; copy data from and to a bucket "
        f"instead ({_JOB})",
        Feature.MOUNTS: "a training job is a container without access to folders of its host; EFS "
        "and FSx for Lustre are not supported yet "
        f"({_DOCS}/APIReference/API_FileSystemDataSource.html)",
        Feature.NETWORK: "SageMaker neither reports nor selects the speed of the network "
        f"({_DISK})",
        Feature.DISK: "SageMaker selects the type of the disk; `resources.disk` selects its size "
        f"({_DISK})",
    },
    options={
        "image": "the image for this task; see the setting `image`",
        "hyperparameters": "names and values to pass as hyperparameters, in addition to the "
        "task's `params`; SageMaker shows them, and writes them to "
        "/opt/ml/input/config/hyperparameters.json",
        "channels": "S3 URIs by channel; SageMaker copies the objects to "
        "/opt/ml/input/data/CHANNEL before the work starts",
        "input_mode": "how SageMaker provides channels: `File` copies all objects before the work "
        "starts (the default), `FastFile` reads an object when the work opens its file",
        "output": "the S3 URI to which SageMaker copies the folder /opt/ml/model after the work",
        "checkpoints": "the S3 URI that SageMaker synchronizes with /opt/ml/checkpoints",
        "warm_s": "as the setting `warm_s`",
    },
    docs="docs/guides/sagemaker.md",
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "role",
            "The ARN of the execution role of jobs. SageMaker uses this role to pull the image "
            "and to read and write `bucket`. The work in the job also runs with the role's "
            "permissions. Required.",
        ).for_setup(),
        project_text(
            "bucket",
            "An S3 URI below which SageMaker stores the copies of /opt/ml/model and "
            "/opt/ml/checkpoints, such as `s3://my-bucket/cavvy`. Required.",
        ).for_setup(),
        project_text(
            "image",
            "The image, in Amazon ECR, of jobs whose task names no image. `{region}` is replaced "
            "by the job's region. Without this setting, each task must name an image.",
        ),
        INSTANCES,
        project_text(
            "subnets",
            "The subnets of jobs, separated by commas. The subnets need a route to the server. By "
            "default, jobs run in SageMaker's own network, which reaches the internet.",
        ),
        project_text("security_groups", "The security groups of jobs, if `subnets` is set."),
        disk_setting(
            "The size of an instance's disk, unless the task requests another size.", 50, minimum=1
        ),
        project_number(
            "max_run_s",
            "SageMaker stops a job after this time if its task has no limit. A value above 5 days "
            "needs a higher quota.",
            default=432_000,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        project_number(
            "spot_wait_s",
            "How long SageMaker may wait for spot instances, in addition to the job's time limit.",
            default=1800,
            unit="seconds",
            whole=True,
        ),
        project_number(
            "warm_s",
            "SageMaker keeps the instances of an ended job for this long, so that a similar job "
            "starts sooner. The job's bill includes this time. `cavvy nodes down` ends these "
            "instances. The maximum is 21,600. The instances of spot jobs are not kept.",
            default=0,
            unit="seconds",
            whole=True,
        ),
    ),
)
