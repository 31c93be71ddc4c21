"""AWS Batch: each gang is one job in a queue, and the job's containers start the agent."""

from datetime import timedelta

from cavvy.providers.aws.settings import ACCOUNT
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import project_number, project_text

_GUIDE = "https://docs.aws.amazon.com/batch/latest/userguide"
_JOBS = f"{_GUIDE}/job_definition_parameters.html"

MANIFEST = JobManifest(
    name="aws-batch",
    title="AWS Batch",
    cloud="cavvy.providers.aws_batch.service:BatchService",
    # the instance's metadata announce the end of a spot instance 120 seconds in advance
    notice=timedelta(minutes=2),
    rights="batch:RegisterJobDefinition, DeregisterJobDefinition, SubmitJob, TerminateJob, "
    "ListJobs, DescribeJobs, DescribeJobQueues, DescribeComputeEnvironments and TagResource, and "
    "iam:PassRole for the roles that the settings name",
    unsupported={
        **list_unsupported_by_jobs("a job", page=_JOBS, disk=_JOBS),
        Feature.LOGIN: "AWS Batch pulls images with the rights of the compute environment's "
        "instances or of the role in `execution_role`; secrets for other registries are not "
        f"supported yet ({_GUIDE}/private-registry.html)",
        Feature.CAPACITY: "AWS Batch does not report free capacity; a job without capacity waits "
        f"({_GUIDE}/job_stuck_in_runnable_capacity.html)",
        Feature.VOLUMES: "a job mounts no EBS volumes; copy data from and to a bucket instead "
        f"({_JOBS})",
        Feature.MOUNTS: "a job is a container, in which host folders and EFS cannot be mounted yet "
        f"({_JOBS})",
        Feature.NETWORK: "the compute environment selects the network "
        f"({_GUIDE}/create-compute-environment.html)",
        Feature.DISK: "the compute environment's launch template selects the disk "
        f"({_GUIDE}/launch-templates.html)",
    },
    options={
        "image": "the container image, in the format of the setting `image`",
        "share": "the share identifier of the job, in place of the setting `share`",
        "priority": "0 to 9999; in a queue with a fair-share policy, a job starts before the "
        "jobs of the same share that have a lower priority",
    },
    docs="docs/guides/aws-batch.md",
    settings=(
        project_text(
            "regions",
            "The region of the queues. The default is the region of the AWS configuration.",
        ),
        *ACCOUNT,
        project_text(
            "queues",
            "The job queues to use, separated by commas. Each queue must have one compute "
            "environment with one instance type. Required.",
        ),
        project_text(
            "image",
            "The image of jobs whose task names no image. `{region}` stands for the region. "
            "Without "
            "this setting, each task must name an image.",
        ),
        project_text(
            "share",
            "The share identifier of jobs whose task names no share identifier. Queues with a "
            "fair-share policy need a share identifier; other queues do not use it.",
        ),
        project_text(
            "job_role",
            "The ARN of the role that gives the work its permissions. The default is no role.",
        ),
        project_text(
            "execution_role",
            "The ARN of the role that pulls the image. By default, the instances' own role pulls "
            "the image.",
        ),
        project_number(
            "memory_percent",
            "The percentage of an instance's memory that a job requests; ECS needs the rest.",
            default=90,
            minimum=1,
            unit="percent",
            whole=True,
        ),
    ),
)
