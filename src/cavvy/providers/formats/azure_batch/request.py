"""Builds the requests to Azure Batch that create a pool, a job and a task.

Fields and limits are those of the models of azure-batch 15.1.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from typing import Any

ID_LENGTH = 64  # maximum length of an id of letters, digits, hyphens and underscores
UNLIMITED = -1  # the number of retries that means "no limit"
# A Linux image with Docker and NVIDIA's drivers, and the id of the matching Azure Batch agent.
_IMAGE = {
    "publisher": "microsoft-dsvm",
    "offer": "ubuntu-hpc",
    "sku": "2204",
    "version": "latest",
}
_AGENT = "batch.node.ubuntu 22.04"
_INTERVAL = "PT5M"  # how often a pool evaluates its formula; this is the shortest possible interval
# NVIDIA's container runtime reads these variables. Azure Batch refuses Docker's option --gpus.
_GPU_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
# The service runs this command line without a shell. A variable must be one line, so the program is
# encoded.
_START = '/bin/sh -c "printf %s $CAVVY_PROGRAM | base64 -d > cavvy.sh && exec sh cavvy.sh"'


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureBatchRequest:
    """The values of the requests to Azure Batch. The job has one task, and its pool has machines
    only while there are tasks. `retries` is for a program that fails.
    """

    name: str  # the name of the pool, of the job and of the task
    vm_size: str
    image: str
    program: str  # a shell script for sh
    gpus: int = 0
    most_nodes: int = 1
    spot: bool = False
    # values must not contain line breaks
    environment: Mapping[str, str] = field(default_factory=dict)
    longest: timedelta | None = None
    retries: int = 0
    priority: int = 0  # -1000 to 1000
    tags: Mapping[str, str] = field(default_factory=dict)


def make_pool(job: AzureBatchRequest) -> dict[str, Any]:
    """The body of `Pool - Add`."""
    return {
        "id": job.name,
        "vmSize": job.vm_size,
        "virtualMachineConfiguration": {
            "imageReference": dict(_IMAGE),
            "nodeAgentSKUId": _AGENT,
            "containerConfiguration": {
                "type": "dockerCompatible",
                "containerImageNames": [job.image],
            },
        },
        "enableAutoScale": True,
        "autoScaleFormula": make_formula(job.most_nodes, spot=job.spot),
        "autoScaleEvaluationInterval": _INTERVAL,
        "taskSlotsPerNode": 1,
    }


def make_formula(most_nodes: int, *, spot: bool) -> str:
    """An autoscale formula: the pool has one node for each task that waits or runs, but at most
    `most_nodes`. A node is removed when its task has ended.
    """
    kind = "$TargetLowPriorityNodes" if spot else "$TargetDedicatedNodes"
    return "\n".join(
        [
            "share = $PendingTasks.GetSamplePercent(TimeInterval_Minute * 5);",
            "last = max(0, $PendingTasks.GetSample(1));",
            "tasks = share < 70 ? last : "
            "max(last, avg($PendingTasks.GetSample(TimeInterval_Minute * 5)));",
            f"{kind} = min({most_nodes}, tasks);",
            "$NodeDeallocationOption = taskcompletion;",
        ]
    )


def make_job(job: AzureBatchRequest) -> dict[str, Any]:
    """The body of `Job - Add`."""
    request: dict[str, Any] = {
        "id": job.name,
        "priority": job.priority,
        "poolInfo": {"poolId": job.name},
    }
    if job.tags:
        request["metadata"] = [{"name": key, "value": value} for key, value in job.tags.items()]
    return request


def make_task(job: AzureBatchRequest) -> dict[str, Any]:
    """The body of `Task - Add`."""
    variables = {
        **(_GPU_VARIABLES if job.gpus else {}),
        **job.environment,
        "CAVVY_PROGRAM": b64encode(job.program.encode()).decode(),
    }
    constraints: dict[str, Any] = {"maxTaskRetryCount": job.retries}
    if job.longest is not None:
        constraints["maxWallClockTime"] = f"PT{ceil(job.longest.total_seconds())}S"
    return {
        "id": job.name,
        "commandLine": _START,
        "containerSettings": {"imageName": job.image},
        "environmentSettings": [
            {"name": name, "value": value} for name, value in variables.items()
        ],
        "constraints": constraints,
    }
