"""Amazon ECS: each rank of a gang is one task of a cluster, and the task's container starts the
agent.
"""

from datetime import timedelta

from cavvy.providers.aws import ACCOUNT
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import project_flag, project_number, project_text

_GUIDE = "https://docs.aws.amazon.com/AmazonECS/latest/developerguide"
_TASKS = f"{_GUIDE}/task_definition_parameters.html"
_STORAGE = f"{_GUIDE}/fargate-task-storage.html"

MANIFEST = JobManifest(
    name="ecs",
    title="Amazon ECS",
    cloud="cavvy.providers.ecs.service:EcsService",
    # Fargate: SIGKILL follows SIGTERM after 120 seconds; the agent needs 10 of them for its last
    # report. EC2: the instance's metadata announce the end of a spot instance 120 seconds in
    # advance.
    notice=timedelta(seconds=110),
    rights="ecs:RegisterTaskDefinition, DeregisterTaskDefinition, DeleteTaskDefinitions, RunTask, "
    "StopTask, ListTasks, DescribeTasks, DescribeClusters and TagResource, and iam:PassRole for "
    "the roles that the settings name",
    unsupported={
        **list_unsupported_by_jobs("a task", page=_TASKS, disk=_STORAGE),
        Feature.LOGIN: "ECS pulls images with the rights of the role in `execution_role` or, on "
        "EC2, of the instances' role; secrets for other registries are not supported yet "
        f"({_GUIDE}/private-auth.html)",
        Feature.CAPACITY: "ECS does not report free capacity; a task without capacity fails or "
        f"waits, and Cavvy tries the next best offer ({_GUIDE}/api_failures_messages.html)",
        Feature.VOLUMES: "ECS creates a new volume for each task, and attaches no existing volume; "
        f"copy data from and to a bucket instead ({_GUIDE}/ebs-volumes.html)",
        Feature.MOUNTS: "a task is a container, in which host folders and EFS cannot be mounted "
        f"yet ({_TASKS})",
        Feature.NETWORK: f"ECS neither reports nor selects the speed of the network ({_TASKS})",
        Feature.DISK: "a task on Fargate has 20 GiB, and larger disks are not supported yet "
        f"({_STORAGE}); the Auto Scaling group selects the disks of its instances",
    },
    options={
        "image": "the container image, in the format of the setting `image`",
        "launch_type": "`EC2` or `FARGATE`, for exported files only; the setting `capacity` "
        "selects where jobs run",
    },
    docs="docs/guides/ecs.md",
    settings=(
        project_text(
            "regions",
            "The region of the cluster. The default is the region of the AWS configuration.",
        ),
        *ACCOUNT,
        project_text("cluster", "The name of the cluster that runs the tasks.", "default"),
        project_text(
            "capacity",
            "The capacity providers of the cluster to use, separated by commas: `FARGATE`, "
            "`FARGATE_SPOT`, and `NAME=INSTANCE_TYPE` for a capacity provider whose Auto Scaling "
            "group has one instance type. `/spot` after the type means spot instances. `/paid` "
            "means instances that are already paid for, so that tasks cost nothing. Required.",
        ),
        project_text(
            "subnets",
            "The subnets of tasks on Fargate, separated by commas. Required for Fargate.",
        ),
        project_text(
            "security_groups",
            "The security groups of tasks on Fargate, separated by commas. The default is the "
            "default security group of the VPC.",
        ),
        project_flag(
            "public_address",
            "Tasks on Fargate get a public address, which is billed. Without a public address, "
            "the subnets need another route to the server, such as a NAT gateway.",
            default=True,
        ),
        project_text(
            "image",
            "The image of jobs whose task names no image. `{region}` stands for the region. "
            "Without "
            "this setting, each task must name an image.",
        ),
        project_text(
            "execution_role",
            "The ARN of the role that pulls the image and writes logs. Fargate needs this role "
            "for images in Amazon ECR and for `log_group`.",
        ),
        project_text(
            "task_role",
            "The ARN of the role that gives the work its permissions. The default is no role.",
        ),
        project_text(
            "log_group",
            "The log group of CloudWatch to which ECS copies the output of containers. By default, "
            "ECS copies no output; Cavvy stores the logs of jobs in any case.",
        ),
        project_number(
            "memory_percent",
            "The percentage of an instance's memory that a task requests; ECS needs the rest.",
            default=90,
            minimum=1,
            unit="percent",
            whole=True,
        ),
    ),
)
