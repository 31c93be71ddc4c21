"""Exports a task as a command job of Azure Machine Learning: `cavvy export azureml TASK.YAML`."""

import shlex
from pathlib import PurePosixPath

from cavvy.domain.tasks import SpotPolicy, TaskSpec, Transfer
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import make_work
from cavvy.providers.formats.azureml import request
from cavvy.providers.formats.azureml.request import CommandJobRequest, DataMount
from cavvy.providers.formats.containers import ALONE, list_container_variables
from cavvy.providers.formats.index import FindOffers, JobFormat
from cavvy.providers.formats.machines import Machine, choose_machine, is_azure_type
from cavvy.providers.formats.notes import list_notes, write_comments
from cavvy.providers.formats.program import copy_output, link_path, make_program
from cavvy.providers.formats.yaml_text import dump_yaml

_COVERED = frozenset(
    ["checkpoint", "inputs", "limits.duration", "outputs", "resources.spot", "workdir"]
)
_STORE = "azureml://datastores/workspaceblobstore/paths"
_ACCOUNT = "ACCOUNT"
_IDLE_S = 20 * 60  # how long a node may be idle before the cluster removes it


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return the job as YAML for `az ml job create`. Raises Refused."""
    machine = choose_machine(task, find_offers, "azure", "Azure Machine Learning", is_azure_type)
    if "${{" in make_work(task):
        raise Refused("run: Azure Machine Learning replaces ${{...}}; remove it from the task")
    job = _make_request(task, machine)
    document = dump_yaml(request.make_command_job(job))
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
