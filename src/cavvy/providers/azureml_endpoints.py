"""Managed online endpoints of Azure Machine Learning: each replica of a service is one endpoint
with one deployment on one machine.

In this module, "job" means the deployment, because only the deployment is billed. One request
deletes the endpoint with its deployment. A version of an Azure ML environment stores the image and
its HTTP routes. All replicas with the same image share the environment version, which costs
nothing: https://learn.microsoft.com/azure/machine-learning/concept-endpoints-online

Calls carry a token of Microsoft Entra, so that no key of an endpoint exists outside of Azure:
https://learn.microsoft.com/azure/machine-learning/concept-endpoints-online-auth
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.azure import RESOURCE_MANAGER, WORKSPACE
from cavvy.providers.azure.account import MakeCredential
from cavvy.providers.azure.cloud import FULL
from cavvy.providers.azureml.api import NAME_TAG, WorkspaceApi, make_short_name
from cavvy.providers.azureml.clusters import WorkspaceSizes
from cavvy.providers.base import Feature, ProviderContext, Refused, TryAgain
from cavvy.providers.managed.endpoint_provider import (
    AT_ONCE,
    CALLED,
    ENDPOINT_TRAITS,
    PORT,
    PROBED,
    TOO_MANY,
    EndpointHttp,
    keep_content_type,
    list_variables,
    object_to_endpoint,
    object_to_files,
    object_to_program,
)
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm.cloud import NAME_PREFIX, BillEnd, CloudFault
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import make_mark
from cavvy.providers.vm.rest import Json

_LEARN = "https://learn.microsoft.com"
DOCS = f"{_LEARN}/azure/machine-learning"
CONTRACT = f"{DOCS}/how-to-deploy-custom-container"
_API = f"{_LEARN}/rest/api/azureml/online-deployments/create-or-update"

MANIFEST = EndpointManifest(
    name="azureml-endpoints",
    title="Azure ML endpoints",
    cloud="cavvy.providers.azureml_endpoints:make_endpoints",
    rights="the role AzureML Data Scientist, and two actions of "
    "Microsoft.MachineLearningServices: locations/vmSizes/read and "
    "locations/mfeOperationsStatus/read; instead of the role, these actions suffice: "
    "workspaces/read; workspaces/computes/read; workspaces/environments/versions/read and "
    "write; workspaces/onlineEndpoints/read, write, delete and score/action; "
    "workspaces/onlineEndpoints/deployments/read and write",
    unsupported={
        **list_unsupported_by_endpoints("Azure", container=CONTRACT, api=_API),
        Feature.SPOT: f"endpoints cannot use low-priority machines ({_API})",
        Feature.LOGIN: "Azure pulls images with the rights of the endpoint's identity, and accepts "
        f"no login ({DOCS}/how-to-troubleshoot-online-endpoints)",
    },
    project_key="cavvy.providers.azure.account",
    settings=(
        *WORKSPACE,
        project_text(
            "sizes",
            "Patterns of the sizes to offer, such as `Standard_NC*`, separated by commas. The "
            "default is every size that Azure allows for managed online endpoints, that the "
            "workspace's region has, and that has a price in the catalog.",
            "*",
        ),
        project_text(
            "image",
            "The image of services whose task names no image, such as "
            "`NAME.azurecr.io/digits:1`. Without this setting, each task must name an image.",
        ),
        project_text(
            "identity",
            "The resource id of a user-assigned managed identity. Endpoints pull their image "
            "with this identity, and containers run with it. By default, Azure creates an identity "
            "for each endpoint; such an identity may pull images from the workspace's own "
            "registry.",
        ),
        project_number(
            "start_s",
            "The maximum time between the start of a container and its first answer to /ping. If "
            "a container needs more time, the endpoint fails.",
            default=1800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        RESOURCE_MANAGER,
    ),
)


DEPLOYMENT = "replica"  # the name of an endpoint's only deployment
# the longest time that Azure gives a container for a request, in seconds:
# https://learn.microsoft.com/azure/machine-learning/how-to-manage-quotas
REQUEST_S = 180
# The sizes that managed online endpoints may have (2026-11-24):
# https://learn.microsoft.com/azure/machine-learning/reference-managed-online-endpoints-vm-sku-list
_SOLD = re.compile(
    r"standard_("
    r"d(2|4|8|16|32|48|64|96)as?_v4|ds[1-5]_v2|e(2|4|8|16|32|48|64)s_v3|"
    r"f(2|4|8|16|32|48|64|72)s_v2|fx(4|12|24|36|48)mds|l(8|16|32|48|64|80)(as_v3|s_v[23])|"
    r"nc(4|8|16|64)as_t4_v3|nc(6|12|24)s_v[23]|nc(24|48|96)ads_a100_v4|nc(40ads|80adis)_h100_v5|"
    r"nd40rs_v2|nd96(asr_v4|amsr_a100_v4|isr?_h100_v5)|nv(6|12|18|36|72)ads_a10_v5|nv36adms_a10_v5)"
)
_COMPUTE = "AmlCompute"  # the kind of compute that endpoints use
# The codes and texts of missing quotas and capacity (Azure's code OutOfQuota is for both), and the
# text with which Azure refuses a deployment because the endpoint is not ready yet. Azure may do so
# even after the endpoint's state has become Succeeded:
# https://learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-online-endpoints
# https://github.com/Azure/azure-sdk-for-net/issues/36961
_QUOTA = "OutOfQuota"
_NO_QUOTA = re.compile(r"not enough quota|out ?of ?quota", re.IGNORECASE)
_NO_ROOM = re.compile(r"(lack|out) ?of [\w ]*capacity|insufficient [\w ]*capacity", re.IGNORECASE)
_BUSY = re.compile(r"in \w+ provisioning state", re.IGNORECASE)
_PROBE_S = 10  # seconds between two probes
_FAILED = frozenset({"Failed", "Canceled"})
# Selects the deployment, so that the endpoint needs no division of its traffic:
# https://learn.microsoft.com/azure/machine-learning/how-to-safely-rollout-online-endpoints
_SELECT = {"azureml-model-deployment": DEPLOYMENT}
_OWN = "ms-azureml-model-error-statuscode"  # the status of a container that did not answer 200


class AzureMlEndpoints:
    """Implements `ManagedService`. A job's id is the name of its endpoint."""

    traits = replace(ENDPOINT_TRAITS, bill_ends=BillEnd.DELETION, quota_codes=frozenset({_QUOTA}))

    def __init__(self, context: ProviderContext, make_credential: MakeCredential = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._api = WorkspaceApi(self._settings, make_credential, MANIFEST.name)
        self._sizes = WorkspaceSizes(self._api, context, MANIFEST.name, _COMPUTE, _is_sold)
        self._leftovers = LeftoverSearch()
        self.close, self.token = self._api.close, self._api.ml_token

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        own = str(self._settings.get("identity") or "")
        return [
            ("workspace", str(self._settings["workspace"])),
            ("containers run as", own or "an identity that Azure creates for each endpoint"),
            *self._sizes.facts(),
        ]

    async def offers(self) -> Sequence[Offer]:
        return await self._sizes.list()

    async def submit(self, request: JobRequest) -> str:
        """Create the endpoint. Once the endpoint is complete, create its deployment. `providers.vm`
        repeats the call until Azure has accepted the request for the deployment.
        """
        region, job = request.offer.region, make_short_name(request.name)
        await self._api.check_region(region)
        tags = {**request.tags, NAME_TAG: request.name}
        told = await self._api.endpoint(job)
        if told is None:
            await self._api.create_endpoint(job, self._make_endpoint(region, tags))
            told = await self._api.endpoint(job)
        state = _state(told) if told else ""
        if state in _FAILED:
            code, reason = await self._read_error(told)
            await self._api.delete_endpoint(job)
            raise CloudFault(400, code, reason)
        if state != "Succeeded":
            raise CloudFault(503, "Creating", "Azure is still creating the endpoint")
        if await self._api.endpoint(job, DEPLOYMENT) is None:
            body = await self._make_deployment(request, region, tags)
            try:
                await self._api.create_endpoint(job, body, DEPLOYMENT)
            except CloudFault as fault:
                named = name_fault(fault)
                if 400 <= named.status < 500 and named.status not in (409, 429):
                    with suppress(CloudFault):  # else a search for leftovers deletes the endpoint
                        await self._api.delete_endpoint(job)
                raise named from fault
        return job

    async def list(self) -> Sequence[ServiceJob]:
        ours = [each for each in await self._api.endpoints() if self._is_ours(each)]
        read = [(each, await self._read(each)) for each in ours]
        await self._tidy([each for each, job in read if job is None])
        return [job for _, job in read if job is not None]

    async def get(self, job: str) -> ServiceJob | None:
        return await self.read(job)

    async def read(self, job: str) -> ServiceJob | None:
        """Return the job for an endpoint, as Azure reports it now, or None if the endpoint does not
        exist.
        """
        told = await self._api.endpoint(job)
        return None if told is None else await self._read(told)

    async def scoring_url(self, job: str) -> str:
        """Return the address that accepts requests for an endpoint. Raises CloudFault."""
        told = await self._api.endpoint(job)
        if told is None:
            raise CloudFault(404, "ended", "the endpoint does not exist")
        return str(told["properties"]["scoringUri"])

    async def stop(self, job: str) -> None:
        """Delete the endpoint with its deployment. Azure refuses the request while Azure changes
        the endpoint or the deployment, so `providers.vm` repeats the call.
        """
        told = await self._api.endpoint(job)
        if told is None or _state(told) == "Deleting":
            raise CloudFault(404, "ended", "the endpoint does not exist")
        await self._api.delete_endpoint(job)

    def is_full(self, fault: CloudFault) -> bool:
        return _is_full(fault.code, fault.message)

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        starts = "starts the image's own program, so set the image's `CMD` to `serve`"
        files = "Azure mounts only models of the workspace"
        return [
            *object_to_program(task, "Azure ML", CONTRACT, starts),
            *object_to_files(task, files, CONTRACT),
            *object_to_endpoint(task, MANIFEST.title, CONTRACT),
        ]

    def _is_ours(self, told: Json) -> bool:
        return str((told.get("tags") or {}).get(NAME_TAG)).startswith(self._prefix)

    async def _read(self, endpoint: Json) -> ServiceJob | None:
        """Parse an endpoint, or return None if it has no deployment."""
        deployment = await self._api.endpoint(str(endpoint["name"]), DEPLOYMENT)
        if deployment is None:
            return None
        failed = _state(deployment) in _FAILED
        error = await self._read_error(deployment) if failed else ("", "")
        return read_deployment(endpoint, deployment, error)

    async def _read_error(self, told: Json) -> tuple[str, str]:
        """Return the error code and the reason of a failure, which Azure stores only in the
        operation. The address of the operation is a property of the endpoint or deployment, as in
        Microsoft's example:
        https://learn.microsoft.com/azure/machine-learning/how-to-deploy-with-rest
        """
        url = (told["properties"].get("properties") or {}).get("AzureAsyncOperationUri")
        error: Mapping[str, Any] = {}
        if url:
            with suppress(CloudFault):  # Azure forgets operations after some time
                error = (await self._api.operation(str(url))).get("error") or {}
        code = str(error.get("code") or _state(told))
        return code, str(error.get("message") or "Azure reports no reason")

    async def _tidy(self, unused: Sequence[Json]) -> None:
        """Delete old endpoints without a deployment. An endpoint has no deployment if the server
        stopped before it created the deployment. An endpoint also has none if its replica was no
        longer needed by then.
        """
        now = self._now()
        if not self._leftovers.is_due("", now):
            return
        old = [
            str(each["name"])
            for each in unused
            if _state(each) != "Deleting" and _created_at(each) < now - UNUSED
        ]
        for name in old[:MOST_DELETED]:
            with suppress(CloudFault):
                await self._api.delete_endpoint(name)

    def _make_endpoint(self, region: str, tags: Mapping[str, str]) -> Mapping[str, Any]:
        own = str(self._settings.get("identity") or "")
        identity: dict[str, Any] = {"type": "SystemAssigned"}
        if own:
            identity = {"type": "UserAssigned", "userAssignedIdentities": {own: {}}}
        properties = {"authMode": "AADToken"}
        return {"location": region, "tags": tags, "identity": identity, "properties": properties}

    async def _make_deployment(
        self, request: JobRequest, region: str, tags: Mapping[str, str]
    ) -> Mapping[str, Any]:
        start_s = int(self._settings["start_s"])
        image = find_image(MANIFEST.name, request.gang, self._settings)
        routes = {
            f"{name}Route": {"port": PORT, "path": path}
            for name, path in (("liveness", PROBED), ("readiness", PROBED), ("scoring", CALLED))
        }
        probe = {"period": f"PT{_PROBE_S}S", "timeout": f"PT{_PROBE_S}S", "successThreshold": 1}
        properties = {
            "endpointComputeType": "Managed",
            "environmentId": await self._api.environment(image, routes),
            "environmentVariables": list_variables(request.gang),
            "instanceType": request.offer.instance_type,
            "scaleSettings": {"scaleType": "Default"},
            # the gateway limits the requests of a replica (`service.concurrency`)
            "requestSettings": {
                "requestTimeout": f"PT{REQUEST_S}S",
                "maxConcurrentRequestsPerInstance": AT_ONCE,
            },
            "readinessProbe": {
                **probe,
                "initialDelay": "PT1S",
                "failureThreshold": -(-start_s // _PROBE_S),
            },
            # Azure restarts a container that fails this probe, so the probe begins after the start
            "livenessProbe": {**probe, "initialDelay": f"PT{start_s}S", "failureThreshold": 3},
        }
        sku = {"name": "Default", "capacity": 1}
        return {"location": region, "tags": tags, "sku": sku, "properties": properties}


def read_deployment(endpoint: Json, deployment: Json, error: tuple[str, str]) -> ServiceJob:
    """Parse an endpoint and its deployment. The billed time lasts from the deployment's creation to
    the deployment's deletion, because Azure reports no other start time. A deployment that failed
    is billed too, unless Azure provided no machine:
    https://learn.microsoft.com/azure/machine-learning/how-to-view-online-endpoints-costs
    """
    state, job = JobState.RUNNING, _state(deployment)
    system = deployment.get("systemData") or {}
    started, full = _created_at(deployment), False
    if "Deleting" in (job, _state(endpoint)):
        state = JobState.ENDED
    elif job in _FAILED:
        state, full = JobState.RECLAIMED, error[0] == _QUOTA or _is_full(*error)
        started = datetime.fromisoformat(system["lastModifiedAt"]) if full else started
    elif job == "Creating":
        state = JobState.WAITING
    return ServiceJob(
        id=str(endpoint["name"]),
        name=str((endpoint.get("tags") or {}).get(NAME_TAG)),
        state=state,
        started_at=started,
        no_capacity=full,
        reason=": ".join(error) if state is JobState.RECLAIMED else "",
        waits=f"Azure reports: {job}" if state is JobState.WAITING else "",
    )


def name_fault(fault: CloudFault) -> CloudFault:
    """Set a fault's status and code according to the fault's reason, which Azure states only in the
    message. The fault must be from a request for a deployment.
    """
    if fault.status == 400 and _BUSY.search(fault.message):
        return CloudFault(409, fault.code, fault.message)
    if _NO_QUOTA.search(f"{fault.code}: {fault.message}") and not _NO_ROOM.search(fault.message):
        return CloudFault(fault.status, _QUOTA, f"{fault.message} ({DOCS}/how-to-manage-quotas)")
    return fault


def _is_full(code: str, message: str) -> bool:
    return code in FULL or _NO_ROOM.search(f"{code}: {message}") is not None


def _is_sold(size: str) -> bool:
    return _SOLD.fullmatch(size) is not None


def _state(told: Json) -> str:
    return str(told["properties"].get("provisioningState"))


def _created_at(told: Json) -> datetime:
    return datetime.fromisoformat(told["systemData"]["createdAt"])


def make_endpoints(
    context: ProviderContext, make_credential: MakeCredential = None
) -> tuple[AzureMlEndpoints, "AzureMlRuntime"]:
    """Return the service and the calls of its endpoints."""
    service = AzureMlEndpoints(context, make_credential)
    return service, AzureMlRuntime(service)


class AzureMlRuntime:
    """Implements `EndpointCalls`."""

    def __init__(self, service: AzureMlEndpoints) -> None:
        self._service = service
        self._http = EndpointHttp("azureml-score", REQUEST_S + 10)
        self._urls: dict[str, str] = {}  # by job
        self.close = self._http.close

    async def answers(self, job: str) -> bool:
        found = await self._service.read(job)
        return found is not None and found.state is JobState.RUNNING

    async def invoke(self, job: str, request: ReplicaRequest) -> ReplicaAnswer:
        if job not in self._urls:
            self._urls[job] = await self._service.scoring_url(job)
        url = self._urls[job]
        return read_answer(await self._http.post(url, self._service.token, request, _SELECT))


def read_answer(answer: ReplicaAnswer) -> ReplicaAnswer:
    """Return the answer of the container, or Azure's own answer if Azure limits the rate or the
    size of requests:
    https://learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-online-endpoints (HTTP
    status codes). Raises TryAgain, Refused.
    """
    status, kept = answer.status, replace(answer, headers=keep_content_type(answer))
    if status < 300 or status in (400, 413):
        return kept
    if status == 424 and (own := answer.headers.get(_OWN, "")).isdecimal():
        return replace(kept, status=int(own)) if 200 <= int(own) < 600 else kept
    if status == 408:  # the container is still working on the request
        return replace(kept, status=504)
    if status == 429:
        return TOO_MANY
    if status in (404, 424) or status >= 500:
        # the endpoint is being deleted, its container is not ready, or the answer is lost
        raise TryAgain(f"the Azure ML endpoint answered with status {status}")
    raise Refused(f"the Azure ML endpoint answered with status {status}: {answer.body[:200]!r}")
