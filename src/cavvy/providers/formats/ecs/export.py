"""Exports a task as a task of Amazon ECS: `cavvy export ecs TASK.YAML`."""

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.providers.base import Refused
from cavvy.providers.formats.containers import (
    ALONE,
    ContainerSize,
    choose_size,
    list_container_variables,
    list_host_volumes,
)
from cavvy.providers.formats.ecs import request
from cavvy.providers.formats.ecs.request import EcsFolder, EcsTaskRequest, LaunchType
from cavvy.providers.formats.index import FindOffers, JobFormat
from cavvy.providers.formats.machines import choose_machine, is_ec2_container_type, list_types
from cavvy.providers.formats.notes import list_notes
from cavvy.providers.formats.program import SHELL, make_program
from cavvy.providers.formats.script import write_script
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


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return a shell script with the requests RegisterTaskDefinition and RunTask. A task without
    accelerators runs on Fargate, unless it names an instance type or
    `resources.options.ecs.launch_type` is EC2. Raises Refused.
    """
    if task.nodes > 1:
        raise Refused(_NO_GANG)
    job = _make_request(task, _choose_launch_type(task), find_offers)
    calls = [(_DEFINE, request.make_task_definition(job)), (_RUN, request.make_run(job))]
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
) -> tuple[ContainerSize, list[str]]:
    """Return the size of the container, and the instance types on which the container can run."""
    if launch_type is LaunchType.FARGATE:
        size = choose_size(task, None)
        rounded = request.round_size(size.cpus, size.memory_mib)
        if rounded is None:
            raise Refused(
                "resources: Fargate has at most 16 vCPUs and 120 GiB; set "
                "resources.options.ecs.launch_type to EC2"
            )
        return ContainerSize(cpus=rounded[0], memory_mib=rounded[1], accelerators=0), []
    if not (task.resources.accelerators or task.resources.instance):
        return choose_size(task, None), []
    machine = choose_machine(task, find_offers, "aws", "Amazon ECS", is_ec2_container_type)
    return choose_size(task, machine), list_types(task, find_offers, "aws", is_ec2_container_type)


def _make_request(
    task: TaskSpec, launch_type: LaunchType, find_offers: FindOffers
) -> EcsTaskRequest:
    size, types = _choose_size(task, launch_type, find_offers)
    on_machines = launch_type is LaunchType.EC2
    return EcsTaskRequest(
        name=task.name,
        cluster="CLUSTER",
        image=task.image or "IMAGE",
        command=("sh", "-c", SHELL, make_program(task, ALONE)),
        launch_type=launch_type,
        cpus=size.cpus,
        memory_mib=size.memory_mib,
        gpus=size.accelerators,
        instance_types=types,
        environment=list_container_variables(task, size.accelerators),
        secrets={name: f"{_SECRET}{name}" for name in task.secrets},
        folders=[
            EcsFolder(source=each.source, path=each.path, read_only=each.read_only)
            for each in list_host_volumes(task)
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
