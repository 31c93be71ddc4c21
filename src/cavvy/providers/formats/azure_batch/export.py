"""Exports a task as a task of Azure Batch: `cavvy export azure-batch TASK.YAML`."""

import json
import shlex

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import here_document
from cavvy.providers.formats.azure_batch import request
from cavvy.providers.formats.azure_batch.request import AzureBatchRequest
from cavvy.providers.formats.containers import ALONE, list_container_variables
from cavvy.providers.formats.index import FindOffers, JobFormat
from cavvy.providers.formats.machines import Machine, choose_machine, is_azure_type
from cavvy.providers.formats.notes import list_notes, write_comments
from cavvy.providers.formats.program import make_program

_COVERED = frozenset(["limits.duration", "resources.spot", "retry"])
_NO_GANG = (
    "nodes: Azure Batch runs the command of a multi-instance task on its first node only, so the "
    "other nodes would not run the task; use `cavvy export azureml TASK.YAML`"
)


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
        _write("pool", request.make_pool(job)),
        _write("job", request.make_job(job)),
        _write("task", request.make_task(job)),
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
        name=task.name[: request.ID_LENGTH],
        vm_size=machine.instance_type,
        image=task.image or "IMAGE",
        program=make_program(task, prepare),
        gpus=machine.accelerators,
        spot=task.resources.spot is not SpotPolicy.NEVER,
        environment={name: text for name, text in variables.items() if name not in lines},
        longest=task.limits.duration,
        retries=request.UNLIMITED if retry is None else retry,
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
