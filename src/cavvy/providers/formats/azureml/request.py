"""Builds a command job of Azure Machine Learning: as a specification for `az ml job create`, and as
the resource that the provider creates by REST.

The fields are from CommandJobSchema of azure-ai-ml 1.35, and from the resource CommandJob of
Azure's published API 2024-04-01.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any

from cavvy.domain.values import Struct, field

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
