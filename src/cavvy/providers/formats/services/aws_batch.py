"""The job format of AWS Batch: builds the requests RegisterJobDefinition and SubmitJob, for the
provider and for `cavvy export aws-batch TASK.YAML`.

Limits are from the service model 2016-08-10 of botocore.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused
from cavvy.providers.formats import (
    FindOffers,
    JobFormat,
    Machine,
    choose_machine,
    is_ec2_container_type,
)
from cavvy.providers.formats.notes import list_notes, write_script
from cavvy.providers.formats.program import (
    ALONE,
    SHELL,
    ContainerSize,
    choose_size,
    list_container_variables,
    list_host_volumes,
    make_program,
)

_COVERED = frozenset(["limits.duration", "resources.spot", "retry", "secrets", "volumes"])
_SECRET = "arn:aws:secretsmanager:REGION:000000000000:secret:"
_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_LOWEST_PRIORITY = -100  # the lowest priority that a task can have
# AWS Batch sets the address of the main node as a variable on all nodes except the main node.
_RANKS = (
    "NODE_RANK=$AWS_BATCH_JOB_NODE_INDEX",
    "MASTER_ADDR=${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i | cut -d' ' -f1)}",
    "export NODE_RANK MASTER_ADDR",
)
_DEFINE = "aws batch register-job-definition --cli-input-yaml file:///dev/stdin"
_SUBMIT = "aws batch submit-job --cli-input-yaml file:///dev/stdin"

PRIORITY = 9999  # the highest priority
NAME_LENGTH = 128  # maximum length of a name of letters, digits, hyphens and underscores
ATTEMPTS = 10  # maximum number of attempts in a retry strategy
# The status reason of a job whose instance was reclaimed or lost, as a pattern of `onStatusReason`:
# https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html
LOST_HOST = "Host EC2*"
_CONDITIONS = 5  # maximum number of conditions in a retry strategy
_SHORTEST_S = 60  # the shortest time limit


class HostFolder(Struct, frozen=True, kw_only=True):
    """A folder of the machine (`source`) that is mounted in the container at `path`."""

    source: str
    path: str
    read_only: bool = False


class BatchRetries(Struct, frozen=True, kw_only=True):
    """The rules by which AWS Batch starts a job again. `attempts` is the maximum number of starts,
    including the first. A job is started again if its machine was reclaimed, or if its exit code is
    in `exit_codes`. If `exit_codes` is None, the job is started again after any exit code.
    """

    attempts: int = 1
    exit_codes: Sequence[int] | None = ()


class BatchJobRequest(Struct, frozen=True, kw_only=True):
    """The values of a request to AWS Batch. A job with several nodes is a multi-node parallel job
    with one container on each node.
    """

    name: str
    queue: str
    image: str
    command: Sequence[str]
    cpus: int
    memory_mib: int
    gpus: int = 0
    nodes: int = 1
    instance_type: str | None = None  # for several nodes; None if the queue decides
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)  # variable -> ARN of the secret
    folders: Sequence[HostFolder] = ()
    job_role: str | None = None
    execution_role: str | None = None
    retries: BatchRetries = BatchRetries()
    longest: timedelta | None = None  # the time limit of each attempt
    priority: int | None = None  # 0 to 9999; only for queues with a fair-share policy
    share: str | None = None  # the share identifier; only for queues with a fair-share policy
    array: int | None = None  # the number of equal jobs of an array job, 2 to 10,000
    tags: Mapping[str, str] = field(default_factory=dict)


def make_job_definition(job: BatchJobRequest) -> dict[str, Any]:
    """Return the arguments of RegisterJobDefinition."""
    container = _make_container(job)
    request: dict[str, Any] = {"jobDefinitionName": job.name}
    if job.nodes == 1:
        request |= {"type": "container", "containerProperties": container}
    else:
        if job.instance_type:
            container["instanceType"] = job.instance_type
        nodes = {
            "numNodes": job.nodes,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
        }
        request |= {"type": "multinode", "nodeProperties": nodes}
    request |= {"platformCapabilities": ["EC2"], "retryStrategy": _make_retries(job.retries)}
    if job.longest is not None:
        seconds = max(_SHORTEST_S, ceil(job.longest.total_seconds()))
        request["timeout"] = {"attemptDurationSeconds": seconds}
    if job.priority is not None:
        request["schedulingPriority"] = job.priority
    if job.tags:
        request |= {"tags": dict(job.tags), "propagateTags": True}
    return request


def make_submission(job: BatchJobRequest) -> dict[str, Any]:
    """Return the arguments of SubmitJob, for the newest revision of the job definition."""
    request: dict[str, Any] = {
        "jobName": job.name,
        "jobQueue": job.queue,
        "jobDefinition": job.name,
    }
    if job.array is not None:
        request["arrayProperties"] = {"size": job.array}
    if job.share is not None:
        request["shareIdentifier"] = job.share
    if job.tags:  # a job does not take over the tags of its definition
        request["tags"] = dict(job.tags)
    return request


def _make_container(job: BatchJobRequest) -> dict[str, Any]:
    sizes = {"VCPU": job.cpus, "MEMORY": job.memory_mib, "GPU": job.gpus}
    container: dict[str, Any] = {
        "image": job.image,
        "command": list(job.command),
        "resourceRequirements": [
            {"type": kind, "value": str(value)} for kind, value in sizes.items() if value
        ],
        # else /dev/shm has 64 MiB, too few for loaders of data and for communication between GPUs
        "linuxParameters": {"sharedMemorySize": job.memory_mib},
    }
    parts = {
        "environment": [{"name": name, "value": text} for name, text in job.environment.items()],
        "secrets": [{"name": name, "valueFrom": arn} for name, arn in job.secrets.items()],
        "volumes": [
            {"name": f"folder-{number}", "host": {"sourcePath": each.source}}
            for number, each in enumerate(job.folders)
        ],
        "mountPoints": [
            {
                "sourceVolume": f"folder-{number}",
                "containerPath": each.path,
                "readOnly": each.read_only,
            }
            for number, each in enumerate(job.folders)
        ],
        "jobRoleArn": job.job_role,
        "executionRoleArn": job.execution_role,
    }
    return container | {key: value for key, value in parts.items() if value}


def _make_retries(retries: BatchRetries) -> dict[str, Any]:
    strategy: dict[str, Any] = {"attempts": min(retries.attempts, ATTEMPTS)}
    if retries.exit_codes is None or retries.attempts == 1:
        return strategy
    codes = list(retries.exit_codes)[: _CONDITIONS - 2]
    strategy["evaluateOnExit"] = [
        {"onStatusReason": LOST_HOST, "action": "RETRY"},
        *({"onExitCode": str(code), "action": "RETRY"} for code in codes),
        {"onReason": "*", "action": "EXIT"},
    ]
    return strategy


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return a shell script with the requests RegisterJobDefinition and SubmitJob. Raises
    Refused."""
    machine = _choose_machine(task, find_offers)
    job = _make_request(task, choose_size(task, machine))
    calls = [
        (_DEFINE, make_job_definition(job)),
        (_SUBMIT, make_submission(job)),
    ]
    return write_script("aws-batch", task, _list_steps(task, job, machine), calls)


def _choose_machine(task: TaskSpec, find_offers: FindOffers) -> Machine:
    try:
        return choose_machine(task, find_offers, "aws", "AWS Batch", is_ec2_container_type)
    except Refused:
        other = choose_machine(task, find_offers, "aws", "AWS Batch", lambda name: True)
        raise Refused(
            "resources.gpu: containers of AWS Batch can reserve only NVIDIA's GPUs, but "
            f"{other.instance_type} has other accelerators"
        ) from None


def _make_request(task: TaskSpec, size: ContainerSize) -> BatchJobRequest:
    program = make_program(task, _RANKS if task.nodes > 1 else ALONE)
    return BatchJobRequest(
        name=task.name[:NAME_LENGTH],
        queue="QUEUE",
        image=task.image or "IMAGE",
        command=("sh", "-c", SHELL, program),
        cpus=size.cpus,
        memory_mib=size.memory_mib,
        gpus=size.accelerators,
        nodes=task.nodes,
        instance_type=task.resources.instance,
        environment=list_container_variables(task, size.accelerators),
        secrets={name: f"{_SECRET}{name}" for name in task.secrets},
        execution_role=_ROLE if task.secrets else None,
        folders=[
            HostFolder(source=each.source, path=each.path, read_only=each.read_only)
            for each in list_host_volumes(task)
        ],
        retries=_choose_retries(task),
        longest=task.limits.duration,
        priority=task.priority - _LOWEST_PRIORITY if task.priority else None,
        tags=task.tags,
    )


def _choose_retries(task: TaskSpec) -> BatchRetries:
    retry = task.retry
    counts = [retry.preemption, retry.node, retry.exit]
    most = max(ATTEMPTS if each is None else each for each in counts)
    codes = retry.exit_codes or None
    return BatchRetries(
        attempts=min(most + 1, ATTEMPTS), exit_codes=() if retry.exit == 0 else codes
    )


def _list_steps(task: TaskSpec, job: BatchJobRequest, machine: Machine) -> list[str]:
    mounted = {each.path for each in job.folders}
    left = [each.path for each in task.volumes if each.path not in mounted]
    gpu = machine.offer.accelerator if machine.offer else None
    steps = {
        "Run this script with the AWS CLI, version 2. Replace QUEUE with your job queue.": True,
        "Set minvCpus of the queue's compute environment to 0, so that the environment costs "
        "nothing without jobs.": True,
        f"resources.gpu: any GPU is accepted; use a queue whose machines have {gpu}, such as "
        f"{machine.instance_type}": bool(gpu and job.gpus),
        f"resources.instance: use a queue whose machines are {task.resources.instance}": bool(
            task.resources.instance and task.nodes == 1
        ),
        "resources.spot: the compute environment of the queue decides whether machines are "
        "spot instances": task.resources.spot != "never",
        f"secrets: replace the ARNs with the ARNs of {', '.join(task.secrets)} in Secrets Manager, "
        f"and {_ROLE} with an execution role that may read them": bool(task.secrets),
        f"volumes: the container does not mount {', '.join(left)}": bool(left),
        "nodes: CAVVY_HOSTS is not set; the nodes know only MASTER_ADDR": task.nodes > 1,
        "retry: AWS Batch restarts the program from its first line; only files in storage "
        "remain": job.retries.attempts > 1,
        "retry.delay: AWS Batch does not wait between attempts": bool(task.retry.delay),
        "priority: only a queue with a fair-share policy uses the priority; pass "
        "--share-identifier to such a queue": bool(task.priority),
        "limits.duration: the limit applies to each attempt": task.limits.duration is not None,
    }
    return [step for step, is_so in steps.items() if is_so] + list_notes(task, _COVERED)


FORMAT = JobFormat(title="AWS Batch", write=make_export)
