"""The job format of Azure Machine Learning: builds a command job as a specification for
`az ml job create`, which `cavvy export azureml TASK.YAML` writes, and as the resource that the
provider creates by REST.

The fields are from CommandJobSchema of azure-ai-ml 1.35, and from the resource CommandJob of
Azure's published API 2024-04-01.
"""

import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from cavvy.domain.tasks import SpotPolicy, TaskSpec, Transfer
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import make_work
from cavvy.providers.formats import FindOffers, JobFormat, Machine, choose_machine, is_azure_type
from cavvy.providers.formats.notes import dump_yaml, list_notes, write_comments
from cavvy.providers.formats.program import (
    ALONE,
    copy_output,
    link_path,
    list_container_variables,
    make_program,
)

_COVERED = frozenset(
    ["checkpoint", "inputs", "limits.duration", "outputs", "resources.spot", "workdir"]
)
_STORE = "azureml://datastores/workspaceblobstore/paths"
_ACCOUNT = "ACCOUNT"
_IDLE_S = 20 * 60  # how long a node may be idle before the cluster removes it

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"


class DataMount(Struct, frozen=True, kw_only=True):
    """A folder or file of a storage account, or a data asset, that the job reads or writes. The
    command contains the path of the data as `${{inputs.NAME}}` or `${{outputs.NAME}}`.
    """

    name: str  # letters, digits and _
    path: str  # such as azureml://datastores/NAME/paths/PATH, wasbs://... or azureml:ASSET:1
    is_file: bool = False
    download: bool = False  # True: the input is copied to the node before the job starts


class CommandJobRequest(Struct, frozen=True, kw_only=True):
    """The values of a job of Azure Machine Learning. If `compute` is None, the job runs on
    serverless compute of the type `instance_type`.
    """

    name: str  # the display name; an exported job gets its unique name from the service
    experiment: str
    command: str
    image: str
    compute: str | None
    instance_type: str | None = None
    nodes: int = 1
    # the maximum size of /dev/shm; None for the service's default, which is 2 GiB
    shared_memory_mib: int | None = None
    code: str | None = None  # a folder of this machine, or a git URL
    environment: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[DataMount] = ()
    outputs: Sequence[DataMount] = ()
    longest: timedelta | None = None
    spot: bool = False  # for serverless compute
    tags: Mapping[str, str] = field(default_factory=dict)


def make_command_job(job: CommandJobRequest) -> dict[str, Any]:
    """Return the specification of a command job for `az ml job create`."""
    request: dict[str, Any] = {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": job.name,
        "experiment_name": job.experiment,
        "code": job.code,
        "command": job.command,
        "environment": {"image": job.image},
        "environment_variables": dict(job.environment),
        "compute": f"azureml:{job.compute}" if job.compute else None,
        "resources": _make_resources(job),
        # the service starts one process on each node and passes the rank to it
        "distribution": {"type": "pytorch", "process_count_per_instance": 1}
        if job.nodes > 1
        else None,
        "inputs": {
            each.name: {
                "type": "uri_file" if each.is_file else "uri_folder",
                "path": each.path,
                "mode": "download" if each.download else "ro_mount",
            }
            for each in job.inputs
        },
        "outputs": {
            each.name: {"type": "uri_folder", "path": each.path, "mode": "rw_mount"}
            for each in job.outputs
        },
        "limits": {"timeout": ceil(job.longest.total_seconds())} if job.longest else None,
        "queue_settings": {"job_tier": "spot"} if job.spot and job.compute is None else None,
        "tags": dict(job.tags),
    }
    return {key: value for key, value in request.items() if value}


def _make_resources(job: CommandJobRequest) -> dict[str, Any]:
    resources: dict[str, Any] = {"instance_count": job.nodes}
    if job.compute is None and job.instance_type:
        resources["instance_type"] = job.instance_type
    if job.shared_memory_mib is not None:
        resources["shm_size"] = f"{job.shared_memory_mib}m"
    return resources


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return the job as YAML for `az ml job create`. Raises Refused."""
    machine = choose_machine(task, find_offers, "azure", "Azure Machine Learning", is_azure_type)
    if "${{" in make_work(task):
        raise Refused("run: Azure Machine Learning replaces ${{...}}; remove it from the task")
    job = _make_request(task, machine)
    document = dump_yaml(make_command_job(job))
    notes = [*_list_steps(task, machine), *list_notes(task, _COVERED)]
    return "\n".join([*write_comments("azureml", task, notes), document])


def _make_request(task: TaskSpec, machine: Machine) -> CommandJobRequest:
    variables = list_container_variables(task, machine.accelerators)
    if task.nodes > 1:
        del variables["MASTER_PORT"]  # the service sets this variable itself
    inputs, outputs = _list_inputs(task), _list_outputs(task)
    given = [
        *(f'export CAVVY_{each.name}="${{{{inputs.{each.name}}}}}"' for each in inputs),
        *(f'export CAVVY_{each.name}="${{{{outputs.{each.name}}}}}"' for each in outputs),
    ]
    workdir = task.workdir
    return CommandJobRequest(
        name=task.name,
        experiment=task.project,
        command="\n".join([*given, _make_program(task)]),
        image=task.image or "IMAGE",
        compute="CLUSTER",
        nodes=task.nodes,
        shared_memory_mib=machine.offer.memory_mib or None if machine.offer else None,
        code=("workdir" if workdir.git else workdir.path or ".") if workdir else None,
        environment=variables,
        inputs=inputs,
        outputs=outputs,
        longest=task.limits.duration,
        tags=task.tags,
    )


def _list_inputs(task: TaskSpec) -> list[DataMount]:
    return [
        DataMount(
            name=f"input_{number}",
            path=_make_path(each.source, task, f"input_{number}"),
            is_file=bool(PurePosixPath(each.source).suffix),
        )
        for number, each in enumerate(task.inputs)
    ]


def _list_outputs(task: TaskSpec) -> list[DataMount]:
    """Return the task's outputs and its checkpoint folder."""
    found = [
        DataMount(name=name, path=_make_path(_find_folder(each), task, name))
        for number, each in enumerate(task.outputs)
        for name in (f"output_{number}",)
    ]
    if task.checkpoint is not None:
        storage = task.checkpoint.storage or ""
        found.append(DataMount(name="checkpoints", path=_make_path(storage, task, "checkpoints")))
    return found


def _is_object(output: Transfer) -> bool:
    """Return whether an output seems to be a single file whose target is the URL of a file. Outputs
    without an az:// URL go to folders of the workspace's store, where files keep their names.
    """
    is_file = bool(PurePosixPath(output.source).suffix) and not output.target.endswith("/")
    return is_file and output.target.startswith("az://") and output.target.count("/") > 2


def _find_folder(output: Transfer) -> str:
    """Return the URL of the folder that the job writes to."""
    return output.target.rpartition("/")[0] + "/" if _is_object(output) else output.target


def _copy_output(number: int, output: Transfer) -> list[str]:
    folder = f'"$CAVVY_output_{number}"'
    named = f"{folder}/{shlex.quote(PurePosixPath(output.target).name)}"
    if _is_object(output):
        return copy_output(output.source, named, named)
    file = f"{folder}/{shlex.quote(PurePosixPath(output.source).name)}"
    return copy_output(output.source, folder, file)


def _make_path(uri: str, task: TaskSpec, name: str) -> str:
    """Return the path of a folder in the form that the request needs. If `uri` begins with az://,
    the folder is in the storage container that `uri` names. Otherwise the folder is in the
    workspace's default store.
    """
    if not uri.startswith("az://"):
        return f"{_STORE}/{task.name}/{name}/"
    container, _, key = uri.removeprefix("az://").partition("/")
    return f"wasbs://{container}@{_ACCOUNT}.blob.core.windows.net/{key}"


def _make_program(task: TaskSpec) -> str:
    prepare = [] if task.nodes > 1 else list(ALONE)
    for number, each in enumerate(task.inputs):
        prepare += link_path(f'"$CAVVY_input_{number}"', each.target)
    if task.checkpoint is not None:
        prepare += link_path('"$CAVVY_checkpoints"', task.checkpoint.path)
    finish = [
        line for number, each in enumerate(task.outputs) for line in _copy_output(number, each)
    ]
    return make_program(task, prepare, finish)


def _list_steps(task: TaskSpec, machine: Machine) -> list[str]:
    tier = "low_priority" if task.resources.spot is not SpotPolicy.NEVER else "dedicated"
    uris = [each.source for each in task.inputs] + [each.target for each in task.outputs]
    git = task.workdir.git if task.workdir else None
    others = [each for each in uris if not each.startswith("az://")]
    steps = {
        f"Run: az ml job create --file {task.name}.yaml, with the defaults group and workspace "
        "set": True,
        "Replace CLUSTER with the name of your cluster. To create a cluster, run: az ml compute "
        f"create --name CLUSTER --type AmlCompute --size {machine.instance_type} --min-instances 0 "
        f"--max-instances {task.nodes} --tier {tier} --idle-time-before-scale-down {_IDLE_S}": True,
        f"Replace {_ACCOUNT} with your storage account": len(others) < len(uris),
        f"inputs, outputs: {', '.join(others)} are not on Azure Blob; copy them from or to the "
        f"folders in {_STORE}/{task.name}/": bool(others),
        "resources.spot: the cluster's tier determines whether the cluster's machines are spot "
        "machines": (task.resources.spot is not SpotPolicy.NEVER),
        f"workdir: clone {git} into the folder workdir first": bool(git),
        "nodes: CAVVY_HOSTS is not set; the nodes know only MASTER_ADDR": task.nodes > 1,
    }
    return [step for step, is_so in steps.items() if is_so]


FORMAT = JobFormat(title="Azure Machine Learning", write=make_export)


def make_job_resource(
    job: CommandJobRequest, *, compute_id: str, environment_id: str
) -> dict[str, Any]:
    """Return a command job, as the body of the REST call that creates it:
    https://learn.microsoft.com/rest/api/azureml/jobs/create-or-update. `compute_id` and
    `environment_id` are resource ids; the paths of `inputs` are resource ids or URIs.
    """
    resources: dict[str, Any] = {"instanceCount": job.nodes}
    if job.shared_memory_mib is not None:
        resources["shmSize"] = f"{job.shared_memory_mib}m"
    properties: dict[str, Any] = {
        "jobType": "Command",
        "displayName": job.name,
        "experimentName": job.experiment,
        "command": job.command,
        "environmentId": environment_id,
        "environmentVariables": dict(job.environment),
        "computeId": compute_id,
        "resources": resources,
        # the service starts one process on each node and passes the rank to it
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1}
        if job.nodes > 1
        else None,
        "inputs": {
            each.name: {
                "jobInputType": "uri_file" if each.is_file else "uri_folder",
                "uri": each.path,
                "mode": "Download" if each.download else "ReadOnlyMount",
            }
            for each in job.inputs
        },
        "limits": {
            "jobLimitsType": "Command",
            "timeout": f"PT{ceil(job.longest.total_seconds())}S",
        }
        if job.longest
        else None,
        "tags": dict(job.tags),
    }
    return {"properties": {key: value for key, value in properties.items() if value}}
