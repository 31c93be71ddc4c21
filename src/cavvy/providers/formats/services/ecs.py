"""The job format of Amazon ECS: builds the requests RegisterTaskDefinition and RunTask, for the
provider and for `cavvy export ecs TASK.YAML`.

Limits are from the service model 2014-11-13 of botocore.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from math import ceil
from typing import Any

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused
from cavvy.providers.formats import (
    FindOffers,
    JobFormat,
    choose_machine,
    is_ec2_container_type,
    list_types,
    program,
)
from cavvy.providers.formats.notes import list_notes, write_script
from cavvy.spec.support import read_options

_COVERED = frozenset(["resources.spot", "secrets", "volumes"])
_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_SECRET = "arn:aws:secretsmanager:REGION:000000000000:secret:"
_NO_GPU = (
    "resources.gpu: Fargate has no GPUs (https://docs.aws.amazon.com/AmazonECS/latest/"
    "developerguide/fargate-tasks-services.html); remove resources.options.ecs.launch_type, so "
    "that the machines of the cluster run the task"
)
_NO_GANG = (
    "nodes: ECS starts each task separately, without ranks, and may start only some of them; use "
    "`cavvy export aws-batch TASK.YAML`"
)
_DEFINE = "aws ecs register-task-definition --cli-input-yaml file:///dev/stdin"
_RUN = "aws ecs run-task --cli-input-yaml file:///dev/stdin"

CPU_UNITS = 1024  # CPU units in one vCPU
_SHORTEST_STOP_S, _LONGEST_STOP_S = 2, 120  # bounds of `stopTimeout` on Fargate
_SMALLEST_DISK_GIB, _LARGEST_DISK_GIB = 21, 200  # on Fargate
# Fargate's sizes from one vCPU: CPU units -> memory in GiB, as (smallest, largest, step).
_FARGATE_GIB = {
    1024: (2, 8, 1),
    2048: (4, 16, 1),
    4096: (8, 30, 1),
    8192: (16, 60, 4),
    16384: (32, 120, 8),
}


class LaunchType(StrEnum):
    """The kind of machine on which ECS runs a container."""

    EC2 = "EC2"  # on the machines of the cluster
    FARGATE = "FARGATE"  # on machines that AWS chooses


class EcsFolder(Struct, frozen=True, kw_only=True):
    """A folder of the machine (`source`) that is mounted in the container at `path`."""

    source: str
    path: str
    read_only: bool = False


class EcsTaskRequest(Struct, frozen=True, kw_only=True):
    """The values of a request to ECS for one task with one container. `instance_types` are the
    instance types on which the task may run; () allows all types of the cluster. `capacity` is the
    capacity provider to use; if it is None, the launch type and `spot` select the capacity.
    """

    name: str
    cluster: str
    image: str
    command: Sequence[str]
    launch_type: LaunchType
    cpus: int
    memory_mib: int  # on Fargate, one of Fargate's sizes: see `round_size`
    gpus: int = 0
    instance_types: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)  # variable -> ARN of the secret
    folders: Sequence[EcsFolder] = ()
    execution_role: str | None = None
    task_role: str | None = None
    log_group: str | None = None  # None: the container's output is not stored
    log_region: str = ""
    creates_log_group: bool = False
    capacity: str | None = None
    host_network: bool = False  # for EC2 only: the container has the machine's addresses and ports
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    public_address: bool = True  # for Fargate only
    spot: bool = False  # for Fargate only
    started_by: str | None = None  # ListTasks can select tasks by it
    token: str | None = None  # requests with the same token start one task
    disk_gib: int | None = None  # for Fargate only
    grace: timedelta = timedelta(seconds=30)
    tags: Mapping[str, str] = field(default_factory=dict)


def round_size(cpus: int, memory_mib: int) -> tuple[int, int] | None:
    """Return the smallest size of Fargate with at least these CPUs and this memory, as (CPUs, MiB).
    Returns None if no such size exists.
    """
    for units, (low, high, step) in _FARGATE_GIB.items():
        if units < cpus * CPU_UNITS or memory_mib > high * 1024:
            continue
        steps = max(0, ceil((memory_mib / 1024 - low) / step))
        return units // CPU_UNITS, (low + steps * step) * 1024
    return None


def make_task_definition(task: EcsTaskRequest) -> dict[str, Any]:
    """Return the arguments of RegisterTaskDefinition."""
    on_fargate = task.launch_type is LaunchType.FARGATE
    request: dict[str, Any] = {
        "family": task.name,
        "requiresCompatibilities": [str(task.launch_type)],
        "containerDefinitions": [_make_container(task)],
    }
    if task.host_network:
        request["networkMode"] = "host"
    if on_fargate:
        request |= {
            "networkMode": "awsvpc",
            "cpu": str(task.cpus * CPU_UNITS),
            "memory": str(task.memory_mib),
        }
        if task.disk_gib is not None:
            size = min(max(task.disk_gib, _SMALLEST_DISK_GIB), _LARGEST_DISK_GIB)
            request["ephemeralStorage"] = {"sizeInGiB": size}
    elif task.instance_types:
        types = ", ".join(task.instance_types)
        expression = f"attribute:ecs.instance-type in [{types}]"
        request["placementConstraints"] = [{"type": "memberOf", "expression": expression}]
    parts = {
        "executionRoleArn": task.execution_role,
        "taskRoleArn": task.task_role,
        "volumes": [
            {"name": f"folder-{number}", "host": {"sourcePath": each.source}}
            for number, each in enumerate(task.folders)
        ],
        "tags": [{"key": key, "value": value} for key, value in task.tags.items()],
    }
    return request | {key: value for key, value in parts.items() if value}


def make_run(task: EcsTaskRequest) -> dict[str, Any]:
    """Return the arguments of RunTask, for the newest revision of the task definition."""
    request: dict[str, Any] = {"cluster": task.cluster, "taskDefinition": task.name, "count": 1}
    on_fargate = task.launch_type is LaunchType.FARGATE
    capacity = task.capacity or ("FARGATE_SPOT" if on_fargate and task.spot else None)
    if capacity:
        request["capacityProviderStrategy"] = [{"capacityProvider": capacity, "weight": 1}]
    else:
        request["launchType"] = str(task.launch_type)
    if on_fargate:
        public = "ENABLED" if task.public_address else "DISABLED"
        network: dict[str, Any] = {"subnets": list(task.subnets), "assignPublicIp": public}
        if task.security_groups:
            network["securityGroups"] = list(task.security_groups)
        request["networkConfiguration"] = {"awsvpcConfiguration": network}
    if task.tags:
        request["propagateTags"] = "TASK_DEFINITION"
    if task.started_by:
        request["startedBy"] = task.started_by
    if task.token:
        request["clientToken"] = task.token
    return request


def _make_logs(task: EcsTaskRequest) -> dict[str, Any]:
    options = {
        "awslogs-group": task.log_group,
        "awslogs-region": task.log_region,
        "awslogs-stream-prefix": task.name,
    }
    if task.creates_log_group:
        options["awslogs-create-group"] = "true"
    return {"logDriver": "awslogs", "options": options}


def _make_container(task: EcsTaskRequest) -> dict[str, Any]:
    stop = max(_SHORTEST_STOP_S, ceil(task.grace.total_seconds()))
    on_fargate = task.launch_type is LaunchType.FARGATE
    if on_fargate:
        stop = min(stop, _LONGEST_STOP_S)
    container: dict[str, Any] = {
        "name": task.name,
        "image": task.image,
        "essential": True,
        "command": list(task.command),
        "cpu": task.cpus * CPU_UNITS,
        "memory": task.memory_mib,
        "stopTimeout": stop,
    }
    if not on_fargate:  # Fargate has no such parameter
        # else /dev/shm has 64 MiB, too few for loaders of data and for communication between GPUs
        container["linuxParameters"] = {"sharedMemorySize": task.memory_mib}
    if task.log_group:
        container["logConfiguration"] = _make_logs(task)
    parts = {
        "environment": [{"name": name, "value": text} for name, text in task.environment.items()],
        "secrets": [{"name": name, "valueFrom": arn} for name, arn in task.secrets.items()],
        "resourceRequirements": [{"type": "GPU", "value": str(task.gpus)}] if task.gpus else [],
        "mountPoints": [
            {
                "sourceVolume": f"folder-{number}",
                "containerPath": each.path,
                "readOnly": each.read_only,
            }
            for number, each in enumerate(task.folders)
        ],
    }
    return container | {key: value for key, value in parts.items() if value}


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return a shell script with the requests RegisterTaskDefinition and RunTask. A task without
    accelerators runs on Fargate, unless it names an instance type or
    `resources.options.ecs.launch_type` is EC2. Raises Refused.
    """
    if task.nodes > 1:
        raise Refused(_NO_GANG)
    job = _make_request(task, _choose_launch_type(task), find_offers)
    calls = [(_DEFINE, make_task_definition(job)), (_RUN, make_run(job))]
    return write_script("ecs", task, _list_steps(task, job), calls)


def _choose_launch_type(task: TaskSpec) -> LaunchType:
    need = task.resources
    value = read_options(need, "ecs").get("launch_type")
    if value is not None and value not in list(LaunchType):
        raise Refused(f"resources.options.ecs.launch_type: expected EC2 or FARGATE, not {value!r}")
    if value == LaunchType.FARGATE and need.accelerators:
        raise Refused(_NO_GPU)
    if value is not None:
        return LaunchType(value)
    return LaunchType.EC2 if need.accelerators or need.instance else LaunchType.FARGATE


def _choose_size(
    task: TaskSpec, launch_type: LaunchType, find_offers: FindOffers
) -> tuple[program.ContainerSize, list[str]]:
    """Return the size of the container, and the instance types on which the container can run."""
    if launch_type is LaunchType.FARGATE:
        size = program.choose_size(task, None)
        rounded = round_size(size.cpus, size.memory_mib)
        if rounded is None:
            raise Refused(
                "resources: Fargate has at most 16 vCPUs and 120 GiB; set "
                "resources.options.ecs.launch_type to EC2"
            )
        return program.ContainerSize(cpus=rounded[0], memory_mib=rounded[1], accelerators=0), []
    if not (task.resources.accelerators or task.resources.instance):
        return program.choose_size(task, None), []
    machine = choose_machine(task, find_offers, "aws", "Amazon ECS", is_ec2_container_type)
    return program.choose_size(task, machine), list_types(
        task, find_offers, "aws", is_ec2_container_type
    )


def _make_request(
    task: TaskSpec, launch_type: LaunchType, find_offers: FindOffers
) -> EcsTaskRequest:
    size, types = _choose_size(task, launch_type, find_offers)
    on_machines = launch_type is LaunchType.EC2
    return EcsTaskRequest(
        name=task.name,
        cluster="CLUSTER",
        image=task.image or "IMAGE",
        command=("sh", "-c", program.SHELL, program.make_program(task, program.ALONE)),
        launch_type=launch_type,
        cpus=size.cpus,
        memory_mib=size.memory_mib,
        gpus=size.accelerators,
        instance_types=types,
        environment=program.list_container_variables(task, size.accelerators),
        secrets={name: f"{_SECRET}{name}" for name in task.secrets},
        folders=[
            EcsFolder(source=each.source, path=each.path, read_only=each.read_only)
            for each in program.list_host_volumes(task)
            if on_machines
        ],
        execution_role=_ROLE,
        log_group=f"/ecs/{task.name}",
        log_region="REGION",
        creates_log_group=True,
        subnets=() if on_machines else ("SUBNET",),
        spot=task.resources.spot is not SpotPolicy.NEVER,
        disk_gib=task.resources.disk_gib,
        grace=task.grace,
        tags=task.tags,
    )


def _list_steps(task: TaskSpec, job: EcsTaskRequest) -> list[str]:
    mounted = {each.path for each in job.folders}
    left = [each.path for each in task.volumes if each.path not in mounted]
    on_fargate = job.launch_type is LaunchType.FARGATE
    steps = {
        "Run this script with the AWS CLI, version 2. Replace CLUSTER with your cluster, REGION "
        f"with its region, and {_ROLE} with an execution role that may pull the image and write "
        "logs": True,
        "Replace SUBNET with a subnet that has a route to the internet": on_fargate,
        "resources.spot: the cluster needs the capacity provider FARGATE_SPOT; ECS does not "
        "change to on-demand": on_fargate and job.spot,
        "resources.spot: the cluster's capacity determines whether the cluster's machines are "
        "spot instances": job.spot and not on_fargate,
        "secrets: replace the ARNs with the ARNs of "
        f"{', '.join(task.secrets)} in Secrets Manager": bool(task.secrets),
        f"volumes: the container does not mount {', '.join(left)}": bool(left),
    }
    return [step for step, is_so in steps.items() if is_so] + list_notes(task, _COVERED)


FORMAT = JobFormat(title="Amazon ECS", write=make_export)


def list_sizes() -> list[tuple[int, int]]:
    """Return Fargate's sizes with at least one vCPU, as pairs (CPUs, MiB)."""
    return [
        (units // CPU_UNITS, gib * 1024)
        for units, (low, high, step) in _FARGATE_GIB.items()
        for gib in range(low, high + 1, step)
    ]
