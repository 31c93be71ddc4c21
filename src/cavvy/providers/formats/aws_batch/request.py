"""Builds the requests RegisterJobDefinition and SubmitJob of AWS Batch.

Limits are from the service model 2016-08-10 of botocore.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any

from cavvy.domain.values import Struct, field

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
