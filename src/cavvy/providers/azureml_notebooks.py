"""Azure Machine Learning's compute instances: each session is a managed notebook, which starts the
agent when it is created.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.azure import RESOURCE_MANAGER, WORKSPACE
from cavvy.providers.azure.account import MakeCredential
from cavvy.providers.azure.cloud import FULL
from cavvy.providers.azureml.api import (
    INSTANCE_VERSION,
    NAME_TAG,
    WorkspaceApi,
    make_short_name,
    read_time,
)
from cavvy.providers.azureml.clusters import WorkspaceSizes
from cavvy.providers.base import Feature, ProviderContext
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.managed.notebooks import NOTEBOOK_TRAITS, make_start_script
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm.cloud import NAME_PREFIX, BillEnd, CloudFault
from cavvy.providers.vm.records import make_mark
from cavvy.providers.vm.rest import Json

_DOCS = "https://learn.microsoft.com/azure"
_INSTANCE = f"{_DOCS}/machine-learning/concept-compute-instance"
_API = f"{_DOCS}/templates/microsoft.machinelearningservices/workspaces/computes"

MANIFEST = NotebookManifest(
    name="azureml-notebooks",
    title="Azure ML compute instances",
    cloud="cavvy.providers.azureml_notebooks:ComputeInstances",
    rights="Microsoft.MachineLearningServices/workspaces/read, workspaces/computes/read, write "
    "and delete, and locations/vmSizes/read (the role AzureML Compute Operator contains the "
    "permissions for computes)",
    unsupported={
        **list_unsupported_by_notebooks(
            "Azure", "a compute instance", images=_INSTANCE, api=_API, deletion=_INSTANCE
        ),
        Feature.VOLUMES: "a compute instance attaches no disks, but has the workspace's own files "
        f"below ~/cloudfiles ({_INSTANCE})",
        Feature.MOUNTS: "Cavvy mounts no folders on a compute instance; the instance has the "
        f"workspace's own files below ~/cloudfiles ({_INSTANCE})",
        Feature.NETWORK: f"Azure does not report the speed of the network ({_API})",
        Feature.DISK: f"Azure selects the disk ({_INSTANCE})",
        Feature.SELF_END: "a compute instance cannot delete itself; Azure stops it after the "
        f"time in the setting `idle_stop_s` ({_API})",
    },
    project_key="cavvy.providers.azure.account",
    settings=(
        *WORKSPACE,
        project_text(
            "sizes",
            "Patterns of the sizes to offer, such as `Standard_NC*`, separated by commas. The "
            "default is every size that Azure allows for compute instances and that has a price in "
            "the catalog.",
            "*",
        ),
        project_text(
            "user_id",
            "The object id of the user who may also open the notebook in Azure's studio. The "
            "default is the account of the credentials.",
        ).for_setup(),
        project_text("tenant_id", "The tenant of the user in `user_id`.").for_setup(),
        project_text(
            "subnet",
            "The id of the subnet of compute instances. By default, Azure selects the subnet.",
        ),
        project_number(
            "idle_stop_s",
            "Azure stops a compute instance if its own Jupyter, terminals and VS Code were not "
            "used for this time. Sessions that Cavvy opens do not count as use. A "
            "notebook whose Cavvy server is lost therefore stops after this time; `--keep` ends "
            "idle sessions sooner. Azure allows 3 days at most.",
            default=259_200,
            minimum=900,
            unit="seconds",
            whole=True,
        ),
        RESOURCE_MANAGER,
    ),
)


_KIND = "ComputeInstance"
# Where the image of compute instances has its Jupyter:
# https://learn.microsoft.com/azure/machine-learning/how-to-customize-compute-instance
_PROGRAMS = "/anaconda/envs/jupyter_env/bin:/anaconda/bin"
_MOST_IDLE_S = 3 * 24 * 3600
# https://learn.microsoft.com/rest/api/azureml/compute/get#computeinstancestate
_FAILED = frozenset({"CreateFailed", "SetupFailed", "UserSetupFailed", "Unusable"})
_STOPPED = frozenset({"Stopped", "Stopping"})
_STOPPED_BY = {
    "IdleShutdown": "Azure stopped the notebook after its idle time (`idle_stop_s`)",
    "Schedule": "a schedule of the workspace stopped the notebook",
    "User": "a person stopped the notebook in Azure's studio",
}


class ComputeInstances:
    """Implements `ManagedService`. A job's id is the name of its compute instance."""

    # On a stopping machine, systemd gives processes 90 seconds to end. Azure guarantees no such
    # time, so `stop_s` is shorter.
    traits = replace(
        NOTEBOOK_TRAITS,
        bill_ends=BillEnd.DELETION,
        quota_codes=frozenset({"QuotaExceeded", "ClusterCoreQuotaReached", "OperationNotAllowed"}),
    )

    def __init__(self, context: ProviderContext, make_credential: MakeCredential = None) -> None:
        self._settings = context.settings
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._api = WorkspaceApi(self._settings, make_credential, "azureml-notebooks")
        self._sizes = WorkspaceSizes(self._api, context, "azureml-notebooks", _KIND)
        self._notebooks: Mapping[
            str, str
        ] = {}  # name -> address of its Jupyter, from the last list
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        facts = [("workspace", str(self._settings["workspace"]))]
        facts += self._sizes.facts()
        facts += [(f"notebook {name}", at) for name, at in sorted(self._notebooks.items())]
        return facts

    async def offers(self) -> Sequence[Offer]:
        """Return the sizes of the workspace's region."""
        return await self._sizes.list()

    async def submit(self, request: JobRequest) -> str:
        name = make_short_name(request.name)
        await self._api.check_region(request.offer.region)
        if await self._api.cluster(name) is None:
            body = self._make(request)
            await self._api.create_compute(name, body, version=INSTANCE_VERSION)
        return name

    async def list(self) -> Sequence[ServiceJob]:
        told = [each for each in await self._api.clusters() if self._is_ours(each)]
        self._notebooks = {
            each["name"]: address for each in told if (address := read_jupyter(each))
        }
        return [read_instance(each) for each in told]

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._api.cluster(job)
        return None if told is None else read_instance(told)

    async def stop(self, job: str) -> None:
        await self._api.delete_compute(job)

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code in FULL

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    def _is_ours(self, told: Json) -> bool:
        tags, properties = told.get("tags") or {}, told.get("properties") or {}
        ours = str(tags.get(NAME_TAG)).startswith(self._prefix)
        return ours and properties.get("computeType") == _KIND

    def _make(self, request: JobRequest) -> Mapping[str, Any]:
        """Return the body of the request that creates a compute instance."""
        settings, region = self._settings, request.offer.region
        script = make_start_script(request, _PROGRAMS).encode()
        idle_s = min(int(settings["idle_stop_s"]), _MOST_IDLE_S)
        inner: dict[str, Any] = {
            "vmSize": request.offer.instance_type,
            "applicationSharingPolicy": "Personal",
            "sshSettings": {"sshPublicAccess": "Disabled"},
            "idleTimeBeforeShutdown": f"PT{idle_s // 60}M",
            "setupScripts": {
                "scripts": {
                    "creationScript": {
                        "scriptSource": "inline",
                        "scriptData": base64.b64encode(script).decode(),
                        "timeout": "15m",
                    }
                }
            },
        }
        if settings.get("user_id"):
            user = {"objectId": settings["user_id"], "tenantId": settings.get("tenant_id")}
            inner["personalComputeInstanceSettings"] = {"assignedUser": user}
        if settings.get("subnet"):
            inner["subnet"] = {"id": settings["subnet"]}
        return {
            "location": region,
            "tags": {**request.tags, NAME_TAG: request.name},
            "properties": {
                "computeType": _KIND,
                "computeLocation": region,
                "disableLocalAuth": True,
                "properties": inner,
            },
        }


def read_instance(told: Json) -> ServiceJob:
    """Parse a compute instance. `providers.vm` deletes an instance that is stopped or failed."""
    outer: Mapping[str, Any] = told["properties"]
    inner: Mapping[str, Any] = outer.get("properties") or {}
    last: Mapping[str, Any] = inner.get("lastOperation") or {}
    status = str(inner.get("state"))
    errors = [each.get("error") or each for each in inner.get("errors") or ()]
    reason = "; ".join(f"{each.get('code')}: {each.get('message')}" for each in errors)
    state, ended = _read_state(status, str(outer.get("provisioningState"))), None
    if state is JobState.ENDED:
        ended = read_time(last.get("operationTime"))
    elif status in _STOPPED:
        reason = _STOPPED_BY.get(str(last.get("operationTrigger")), reason)
    return ServiceJob(
        id=str(told["name"]),
        name=str((told.get("tags") or {}).get(NAME_TAG)),
        state=state,
        started_at=read_time(outer.get("createdOn")),
        ended_at=ended,
        no_capacity=any(str(each.get("code")) in FULL for each in errors),
        reason=(reason or f"Azure reports: {status}") if state is JobState.RECLAIMED else "",
        waits=f"Azure reports: {status} {reason}".rstrip() if state is JobState.WAITING else "",
    )


def _read_state(status: str, provisioning: str) -> JobState:
    if "Deleting" in (status, provisioning):
        return JobState.ENDED
    if status in _FAILED | _STOPPED or provisioning == "Failed":
        return JobState.RECLAIMED
    return JobState.WAITING if status == "Creating" else JobState.RUNNING


def read_jupyter(told: Json) -> str:
    """Return the address of the Jupyter server on a compute instance, or "" until the instance has
    one.
    """
    inner: Mapping[str, Any] = (told.get("properties") or {}).get("properties") or {}
    found = {
        str(each.get("displayName")): str(each.get("endpointUri"))
        for each in inner.get("applications") or ()
    }
    return found.get("Jupyter Lab") or found.get("Jupyter") or ""
