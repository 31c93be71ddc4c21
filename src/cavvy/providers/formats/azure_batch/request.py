"""The requests of Azure Batch that create a pool, a job and a task, from values.

Fields and limits are those of the models of azure-batch 15.1.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from typing import Any

ID_LENGTH = 64  # of letters, digits, hyphens and underscores
UNLIMITED = -1  # as a number of retries
# An image of Linux with Docker and the drivers of NVIDIA's GPUs, and the agent for it.
_IMAGE = {
    "publisher": "microsoft-dsvm",
    "offer": "ubuntu-hpc",
    "sku": "2204",
    "version": "latest",
}
_AGENT = "batch.node.ubuntu 22.04"
_INTERVAL = "PT5M"  # the shortest interval in which a pool evaluates its formula
# Docker's runtime of NVIDIA reads these; Azure Batch refuses Docker's option --gpus.
_GPU_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
# The service starts the line without a shell. Variables have one line, so the program is encoded.
_START = '/bin/sh -c "printf %s $CAVVY_PROGRAM | base64 -d > cavvy.sh && exec sh cavvy.sh"'


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureBatchRequest:
    """What Azure Batch is asked for: a pool that has machines only while it has tasks, and a job
    with one task in it. `retries` applies to a program that fails.
    """

    name: str  # of the pool, the job and the task
    vm_size: str
    image: str
    program: str  # for sh
    gpus: int = 0
    most_nodes: int = 1
    spot: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)  # values without line ends
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
    """A formula for one node for each task that waits or runs, up to `most_nodes`. A node is
    removed when its task has ended.
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
