"""The job format of Azure Batch: builds the requests that create a pool, a job and a task, for the
provider and for `cavvy export azure-batch TASK.YAML`.

Fields and limits are from the models of azure-batch 15.1.
"""

import json
import shlex
from base64 import b64encode
from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import ceil
from typing import Any

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import here_document
from cavvy.providers.formats import FindOffers, JobFormat, Machine, choose_machine, is_azure_type
from cavvy.providers.formats.notes import list_notes, write_comments
from cavvy.providers.formats.program import ALONE, list_container_variables, make_program

_COVERED = frozenset(["limits.duration", "resources.spot", "retry"])
_NO_GANG = (
    "nodes: Azure Batch runs the command of a multi-instance task on its first node only, so the "
    "other nodes would not run the task; use `cavvy export azureml TASK.YAML`"
)

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
# The environment variable with the number of a gang's task, which is the rank of its node
RANK_VARIABLE = "CAVVY_NODE_INDEX"
# time for the start of a gang's machines, which the job's time limit includes
_SCRATCH = timedelta(hours=1)
_INTERVAL = "PT5M"  # how often a pool evaluates its formula; this is the shortest possible interval
# NVIDIA's container runtime reads these variables. Azure Batch refuses Docker's option --gpus.
_GPU_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
# The service runs this command line without a shell. A variable must be one line, so the program is
# encoded.
_START = '/bin/sh -c "printf %s $CAVVY_PROGRAM | base64 -d > cavvy.sh && exec sh cavvy.sh"'

# Images expect that their programs run as root. A container's program does so with this scope and
# level: https://learn.microsoft.com/azure/batch/batch-docker-container-workloads
_ROOT = {"autoUser": {"scope": "pool", "elevationLevel": "admin"}}
# With the machine's /dev/shm. A container's own /dev/shm has 64 MiB, too few for loaders of data
# and for communication between GPUs.
_SHARED_MEMORY = "--ipc=host"


class AzureBatchRequest(Struct, frozen=True, kw_only=True):
    """The values for the requests to Azure Batch. The job has one task, and the job's pool has
    machines only while tasks wait or run. `retries` is the maximum number of retries of a program
    that fails.
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
    """Return the body of `Pool - Add`."""
    return {
        "id": job.name,
        **_describe_pool(job.vm_size, job.image),
        "autoScaleFormula": make_formula(job.most_nodes, spot=job.spot),
    }


def _describe_pool(vm_size: str, image: str) -> dict[str, Any]:
    """Return the part of a pool's description that is the same for every number of machines."""
    return {
        "vmSize": vm_size,
        "virtualMachineConfiguration": {
            "imageReference": dict(_IMAGE),
            "nodeAgentSKUId": _AGENT,
            "containerConfiguration": {
                "type": "dockerCompatible",
                "containerImageNames": [image],
            },
        },
        "enableAutoScale": True,
        "autoScaleEvaluationInterval": _INTERVAL,
        "taskSlotsPerNode": 1,
    }


def make_formula(most_nodes: int, *, spot: bool) -> str:
    """Return an autoscale formula: the pool has one node for each task that waits or runs, but at
    most `most_nodes`. A node is removed when its task has ended.
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
    """Return the body of `Job - Add`."""
    request: dict[str, Any] = {
        "id": job.name,
        "priority": job.priority,
        "poolInfo": {"poolId": job.name},
    }
    if job.tags:
        request["metadata"] = _list_pairs(job.tags)
    return request


def make_task(job: AzureBatchRequest) -> dict[str, Any]:
    """Return the body of `Task - Add`."""
    constraints: dict[str, Any] = {"maxTaskRetryCount": job.retries}
    if job.longest is not None:
        constraints["maxWallClockTime"] = _duration(job.longest)
    return {
        "id": job.name,
        "commandLine": _START,
        "containerSettings": {"imageName": job.image, "containerRunOptions": _SHARED_MEMORY},
        "userIdentity": _ROOT,
        "environmentSettings": _list_variables(job.environment, job.gpus, job.program),
        "constraints": constraints,
    }


def _list_variables(
    environment: Mapping[str, str], gpus: int, program: str
) -> list[dict[str, str]]:
    """Return the environment variables of a task. CAVVY_PROGRAM contains the task's program in
    base64.
    """
    encoded = b64encode(program.encode()).decode()
    return _list_pairs(
        {**(_GPU_VARIABLES if gpus else {}), **environment, "CAVVY_PROGRAM": encoded}
    )


def _list_pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _duration(length: timedelta) -> str:
    return f"PT{ceil(length.total_seconds())}S"


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return a shell script that creates the pool if it does not exist, and submits a job with one
    task. Raises Refused.
    """
    if task.nodes > 1:
        raise Refused(_NO_GANG)
    machine = choose_machine(task, find_offers, "azure", "Azure Batch", is_azure_type)
    job = _make_request(task, machine)
    name = shlex.quote(job.name)
    lines = [
        "#!/bin/bash",
        *write_comments(
            "azure-batch", task, [*_list_steps(task, job), *list_notes(task, _COVERED)]
        ),
        "set -euo pipefail",
        "folder=$(mktemp -d)",
        _write("pool", make_pool(job)),
        _write("job", make_job(job)),
        _write("task", make_task(job)),
        f"az batch pool show --pool-id {name} > /dev/null 2>&1 || "
        'az batch pool create --json-file "$folder/pool.json"',
        'az batch job create --json-file "$folder/job.json"',
        f'az batch task create --job-id {name} --json-file "$folder/task.json"',
        # This is set last, because a job without tasks would end at once.
        f"az batch job set --job-id {name} --on-all-tasks-complete terminateJob",
        'rm -r "$folder"',
    ]
    return "\n".join(lines) + "\n"


def _write(name: str, value: object) -> str:
    text = json.dumps(value, indent=2) + "\n"
    return f'cat > "$folder/{name}.json" {here_document(text)}'


def _make_request(task: TaskSpec, machine: Machine) -> AzureBatchRequest:
    variables = list_container_variables(task, machine.accelerators)
    lines = {name: text for name, text in variables.items() if "\n" in text}
    prepare = [*ALONE, *(f"export {name}={shlex.quote(text)}" for name, text in lines.items())]
    retry = task.retry.exit
    return AzureBatchRequest(
        name=task.name[:ID_LENGTH],
        vm_size=machine.instance_type,
        image=task.image or "IMAGE",
        program=make_program(task, prepare),
        gpus=machine.accelerators,
        spot=task.resources.spot is not SpotPolicy.NEVER,
        environment={name: text for name, text in variables.items() if name not in lines},
        longest=task.limits.duration,
        retries=UNLIMITED if retry is None else retry,
        priority=task.priority,
        tags=task.tags,
    )


def _list_steps(task: TaskSpec, job: AzureBatchRequest) -> list[str]:
    steps = {
        "Run this script with the Azure CLI, after `az batch account login`.": True,
        f"name: the pool, the job and the task are called {job.name}; the name of a job can be "
        "used only once, and an existing pool is used unchanged": True,
        "The pool adds a machine within five minutes, and removes it when no task is left. Delete "
        f"the pool with: az batch pool delete --pool-id {job.name}": True,
        "resources.spot: the job runs on spot machines only; Azure Batch does not change to "
        "on-demand": task.resources.spot is SpotPolicy.AUTO,
        "retry: a lost machine does not count as a retry; the program starts again from its first "
        "line, and only files in storage remain": True,
        "retry.exit_codes: the program is retried after every exit code except 0": bool(
            task.retry.exit_codes
        ),
    }
    return [step for step, is_so in steps.items() if is_so]


FORMAT = JobFormat(title="Azure Batch", write=make_export)


class AzureBatchGang(Struct, frozen=True, kw_only=True):
    """The values for a job whose pool exists only while the job exists. Each of the pool's machines
    runs one task.
    """

    name: str
    vm_size: str
    image: str
    program: str  # a shell script for sh, which every task runs
    nodes: int = 1
    gpus: int = 0
    spot: bool = False
    longest: timedelta | None = None
    subnet: str | None = None  # the resource id of the machines' subnet
    metadata: Mapping[str, str] = field(default_factory=dict)


def make_gang_job(gang: AzureBatchGang) -> dict[str, Any]:
    """Return the body of `Job - Add` for a gang. The job stores the values of its tasks, so that
    `make_gang_tasks` can create the tasks from the job that the service returns.
    """
    constraints: dict[str, Any] = {"maxTaskRetryCount": 0}  # only the control plane restarts tasks
    if gang.longest is not None:
        constraints["maxWallClockTime"] = _duration(gang.longest + _SCRATCH)
    pool = _describe_pool(gang.vm_size, gang.image)
    pool["autoScaleFormula"] = make_gang_formula(gang.nodes, spot=gang.spot)
    if gang.nodes > 1:
        pool["enableInterNodeCommunication"] = True
    if gang.subnet is not None:
        pool["networkConfiguration"] = {"subnetId": gang.subnet}
    return {
        "id": gang.name,
        "constraints": constraints,
        "commonEnvironmentSettings": _list_variables({}, gang.gpus, gang.program),
        "poolInfo": {
            "autoPoolSpecification": {
                "autoPoolIdPrefix": "cavvy",
                "poolLifetimeOption": "job",
                "keepAlive": False,
                "pool": pool,
            }
        },
        "metadata": _list_pairs(gang.metadata),
    }


def make_gang_tasks(job: Mapping[str, Any], ranks: Iterable[int]) -> dict[str, Any]:
    """Return the body of `Task - Add Collection` for these nodes of a gang. `job` is the gang's
    job, as it was sent or as the service reports it.
    """
    pool = job["poolInfo"]["autoPoolSpecification"]["pool"]
    (image,) = pool["virtualMachineConfiguration"]["containerConfiguration"]["containerImageNames"]
    options = _SHARED_MEMORY
    if pool.get("enableInterNodeCommunication"):
        options = f"{options} --network=host"  # the nodes connect to each other
    container = {"imageName": image, "containerRunOptions": options}
    return {
        "value": [
            {
                "id": str(rank),
                "commandLine": _START,
                "containerSettings": container,
                "environmentSettings": [{"name": RANK_VARIABLE, "value": str(rank)}],
                "userIdentity": _ROOT,
            }
            for rank in ranks
        ]
    }


def make_gang_formula(nodes: int, *, spot: bool) -> str:
    """Return an autoscale formula for the pool of one gang: the pool starts with all nodes, keeps
    them while a task waits or runs, and then removes them. The pool is empty soon after the last
    task has ended, even if no request deletes the pool.
    """
    kind = "$TargetLowPriorityNodes" if spot else "$TargetDedicatedNodes"
    return "\n".join(
        [
            "share = $PendingTasks.GetSamplePercent(TimeInterval_Minute * 5);",
            "tasks = share < 70 ? 1 : max($PendingTasks.GetSample(TimeInterval_Minute * 5));",
            f"{kind} = tasks > 0 ? {nodes} : 0;",
            "$NodeDeallocationOption = taskcompletion;",
        ]
    )
