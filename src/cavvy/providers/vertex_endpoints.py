"""Online endpoints of Vertex AI: each replica of a service is one endpoint with one deployed model
on one machine.

A replica needs a model (image and environment), an endpoint, and the deployment of the model to the
endpoint. In this module, a job is the deployment, because only the deployment is billed. The model
and the endpoint have the same name. Cavvy deletes both when it deletes the deployment, or later if
the server stopped in between. Google creates, deploys and removes models and endpoints in
long-running operations.

Endpoints are called with the method `rawPredict`, which accepts a body of any format:
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.endpoints/rawPredict
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import Feature, ProviderContext, Refused, TryAgain
from cavvy.providers.formats.services.vertex import strip_gpus
from cavvy.providers.gcp import KEY_FILE, MACHINES, project
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.managed import endpoint_provider
from cavvy.providers.managed.endpoint_provider import (
    TOO_MANY,
    EndpointHttp,
    keep_content_type,
    read_error,
)
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.managed.notebooks import NotebookEnds
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.settings import disk_setting, project_number, project_text, text
from cavvy.providers.vertex.api import QUOTA, VertexApi
from cavvy.providers.vertex.offers import VertexOffers, name_accelerator
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import INSTALLATION, make_mark
from cavvy.providers.vm.rest import Json

_DOCS = "https://cloud.google.com/vertex-ai/docs"
CONTRACT = f"{_DOCS}/predictions/custom-container-requirements"
_API = f"{_DOCS}/reference/rest/v1/projects.locations.endpoints"

MANIFEST = EndpointManifest(
    name="vertex-endpoints",
    title="Vertex AI endpoints",
    cloud="cavvy.providers.vertex_endpoints:make_endpoints",
    rights="the role Vertex AI User (roles/aiplatform.user), or a role with these permissions: "
    "aiplatform.models.upload, get, list and delete; aiplatform.endpoints.create, get, list, "
    "deploy, undeploy, delete and predict. If the setting `service_account` is set: also "
    "iam.serviceAccounts.actAs for this account",
    unsupported={
        **list_unsupported_by_endpoints("Vertex AI", container=CONTRACT, api=_API),
        Feature.SPOT: "Cavvy starts no endpoints on spot machines yet "
        f"({_DOCS}/predictions/use-spot-vms)",
        Feature.LOGIN: "Vertex AI pulls images from Artifact Registry with the rights of its "
        f"service agent ({CONTRACT})",
    },
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("endpoints"),
        KEY_FILE,
        project_text(
            "regions", "The regions to use, separated by commas.", "us-central1"
        ).for_setup(),
        MACHINES,
        project_text(
            "image",
            "The image for services whose task names no image. The image must be in Artifact "
            "Registry. `{region}` is replaced by the endpoint's region. Without this setting, "
            "each task must name an image.",
        ),
        project_text(
            "service_account",
            "The e-mail address of the service account that containers run as. The default is "
            "Vertex AI's own service agent.",
        ),
        disk_setting(
            "The disk size with which Cavvy compares `resources.disk`. Google selects the real "
            "size of an endpoint's disk.",
            100,
            minimum=1,
        ),
        project_number(
            "start_s",
            "How long a deployment may take until its container answers /ping. If the deployment "
            "takes longer, the endpoint fails.",
            default=1800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of the API. `{region}` is replaced by the endpoint's region.",
            "https://{region}-aiplatform.googleapis.com/v1",
        ),
    ),
)


_DEPLOYED = "1"  # the id of an endpoint's only deployed model
_DEPLOYS, _UNDEPLOYS = "DeployModelOperationMetadata", "UndeployModelOperationMetadata"
_FULL = re.compile(r"stockout|resources are insufficient|not enough resources", re.IGNORECASE)
# matches images in Artifact Registry, the only registry from which endpoints pull
_IMAGE = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|(\w+\.)?gcr\.io)/\S+")
_READ_S = 70  # more than the 60 seconds that Vertex AI gives a container
_SERVED = "x-vertex-ai-deployed-model-id"  # a header of answers that a container gave


class VertexEndpoints:
    """Implements `ManagedService`. A job's id is `REGION/NAME`, where NAME is the name of its
    endpoint.
    """

    traits = replace(endpoint_provider.ENDPOINT_TRAITS, quota_codes=frozenset({QUOTA}))

    def __init__(self, context: ProviderContext) -> None:
        self._settings, self._now = context.settings, context.now
        self._mark = make_mark(context.installation)
        self.credentials = GoogleCredentials(self._settings, MANIFEST.name)
        self.endpoints = VertexApi(self._settings, self.credentials, "endpoints")
        self._models = VertexApi(self._settings, self.credentials, "models")
        self._offers = VertexOffers(context, MANIFEST.name, self.endpoints)
        self._ends = NotebookEnds(self._now)
        self._leftovers = LeftoverSearch()

    def close(self) -> None:
        self.endpoints.close()
        self._models.close()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`."""
        account = str(self._settings.get("service_account") or "")
        return [
            ("project", self.credentials.project()),
            ("credentials", self.credentials.describe()),
            ("containers run as", account or "Vertex AI's service agent"),
        ]

    async def offers(self) -> Sequence[Offer]:
        return [each for each in await self._offers.list() if each.purchase is Purchase.ON_DEMAND]

    async def submit(self, request: JobRequest) -> str:
        """Create the model and the endpoint, and deploy the model once both exist; until then,
        `VmProvider` repeats this call.
        """
        region, name = request.offer.region, request.name
        self._offers.check_region(region)
        job = f"{region}/{name}"
        upload = {"model": self._make_model(request), "modelId": name}
        model = await _find_or_create(self._models, job, upload, verb="upload")
        body = {"displayName": name, "labels": dict(request.tags)}
        await _find_or_create(self.endpoints, job, body, endpointId=name)
        if not await self._list_operations(job, _DEPLOYS):
            try:
                await self.endpoints.act(job, "deployModel", self._make_deployment(request, model))
            except CloudFault as fault:
                if 400 <= fault.status < 500 and fault.status not in (409, 429):
                    await self._delete_parts(job)
                if fault.code != "ALREADY_EXISTS":  # an earlier request deployed the model
                    raise
        return job

    async def list(self) -> Sequence[ServiceJob]:
        found: dict[str, ServiceJob] = {}
        mine = f'labels.{INSTALLATION}="{self._mark}"'
        for region in self._offers.regions():
            known = self._select(region, await self.endpoints.list(region, mine))
            for job, each in known.items():
                read = await self._read(job, each)
                found |= {job: read} if read else {}
            await self._tidy(region, mine, known.keys() - found.keys(), known)
        self._ends.forget(found)
        return list(found.values())

    async def get(self, job: str) -> ServiceJob | None:
        return await self.read(job) or self._ends.find(job)

    async def read(self, job: str) -> ServiceJob | None:
        """Return an endpoint with a deployment, as Google reports it now."""
        told = await self.endpoints.find(job)
        return None if told is None else await self._read(job, told)

    async def stop(self, job: str) -> None:
        """Execute the next step of the deletion: cancel the deployment, undeploy the model (this
        step ends the bill), or delete the endpoint and the model. Google refuses a step until the
        previous step is complete, so `VmProvider` repeats the call until the endpoint no longer
        exists.
        """
        told = await self.endpoints.find(job)
        if told is None:
            await self._delete_parts(job)
            raise CloudFault(404, "ended", "the endpoint does not exist")
        read = await self._read(job, told)
        for each in await self._list_operations(job, _DEPLOYS, going=True):
            await self.endpoints.cancel_operation(str(each["name"]))
            return
        if told.get("deployedModels"):
            if await self._list_operations(job, _UNDEPLOYS, going=True):
                return
            body = {"deployedModelId": told["deployedModels"][0]["id"]}
            await self.endpoints.act(job, "undeployModel", body)
            if read is not None:
                self._ends.note(replace(read, state=JobState.RECLAIMED, ended_at=self._now()))
            return
        try:
            await self.endpoints.delete(job)
        except CloudFault as fault:
            if fault.code == "FAILED_PRECONDITION":  # an operation is still running
                raise CloudFault(409, fault.code, fault.message) from fault
            raise
        await self._delete_parts(job)

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL.search(fault.message) is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        found = [*endpoint_provider.object_to_program(task, "Vertex AI", CONTRACT)]
        image = task.image or str(self._settings.get("image") or "")
        if image and not _IMAGE.fullmatch(image.replace("{region}", "any")):
            reason = "Vertex AI endpoints run only images in Artifact Registry, with names such as "
            reason += f"us-docker.pkg.dev/project/repository/name:tag ({CONTRACT})"
            found.append(Objection("image", reason))
        found += endpoint_provider.object_to_files(
            task, "Vertex AI copies no files into the container", CONTRACT
        )
        return [*found, *endpoint_provider.object_to_endpoint(task, MANIFEST.title, CONTRACT)]

    def _select(self, region: str, told: Sequence[Json]) -> Mapping[str, Json]:
        """Return the endpoints or models of this installation, by job."""
        named = {str(each.get("name")).rpartition("/")[2]: each for each in told}
        prefix = f"{NAME_PREFIX}{self._mark}-"
        return {f"{region}/{name}": each for name, each in named.items() if name.startswith(prefix)}

    async def _read(self, job: str, told: Json) -> ServiceJob | None:
        """Parse an endpoint, or return None if no model was ever deployed to it. The end of the
        bill comes from the endpoint's operations or, if no operation reports the end, from this
        server's memory.
        """
        operations = await self._list_operations(job, _DEPLOYS, _UNDEPLOYS)
        read = read_endpoint(job, told, operations)
        return None if read is None else self._ends.note(read)

    async def _list_operations(self, job: str, *kinds: str, going: bool = False) -> Sequence[Json]:
        """Return the endpoint's operations of the given kinds; if `going` is True, return only
        running operations.
        """
        return [
            each
            for each in await self.endpoints.operations(job)
            if _kind(each) in kinds and not (going and each.get("done"))
        ]

    async def _delete_parts(self, job: str) -> None:
        """Delete an endpoint without a deployment, and the endpoint's model. `_tidy` repeats
        deletions that fail.
        """
        for api in (self.endpoints, self._models):
            with suppress(CloudFault):
                await api.delete(job)

    async def _tidy(
        self, region: str, mine: str, unused: set[str], endpoints: Mapping[str, Json]
    ) -> None:
        """Delete endpoints without a deployment, and models whose endpoint no longer exists."""
        now = self._now()
        if not self._leftovers.is_due(region, now):
            return
        with suppress(CloudFault):
            models = self._select(region, await self._models.list(region, mine))
            told = {**models, **endpoints}
            spare = models.keys() - endpoints.keys() | unused
            old = [
                job
                for job in sorted(spare)
                if datetime.fromisoformat(told[job]["createTime"]) < now - UNUSED
            ]
            for job in old[:MOST_DELETED]:
                await self._delete_parts(job)

    def _make_model(self, request: JobRequest) -> Mapping[str, Any]:
        gang, region = request.gang, request.offer.region
        image = find_image(MANIFEST.name, gang, self._settings).replace("{region}", region)
        variables = endpoint_provider.list_variables(gang)
        container = {
            "imageUri": image,
            "args": ["serve"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "ports": [{"containerPort": endpoint_provider.PORT}],
            "predictRoute": endpoint_provider.CALLED,
            "healthRoute": endpoint_provider.PROBED,
            "deploymentTimeout": f"{int(self._settings['start_s'])}s",
        }
        labels = dict(request.tags)
        return {"displayName": request.name, "labels": labels, "containerSpec": container}

    def _make_deployment(self, request: JobRequest, model: Json) -> Mapping[str, Any]:
        offer = request.offer
        machine: dict[str, Any] = {"machineType": strip_gpus(offer.instance_type)}
        if (gpu := name_accelerator(offer)) is not None:
            machine |= {"acceleratorType": gpu, "acceleratorCount": offer.accelerator_count}
        account = str(self._settings.get("service_account") or "")
        deployed = {
            "id": _DEPLOYED,
            "displayName": request.name,
            "model": model["name"],
            "dedicatedResources": {
                "machineSpec": machine,
                "minReplicaCount": 1,
                "maxReplicaCount": 1,
            },
            **({"serviceAccount": account} if account else {}),
        }
        return {"deployedModel": deployed, "trafficSplit": {"0": 100}}


def read_endpoint(job: str, told: Json, operations: Sequence[Json]) -> ServiceJob | None:
    """Parse an endpoint and its operations. Returns None if no model was deployed to the endpoint.
    The bill begins when the deployed model is created and ends when the model's undeployment is
    requested. A deployment that failed is not billed (https://cloud.google.com/vertex-ai/pricing).
    """
    deployed = next(iter(told.get("deployedModels") or ()), None)
    ours = sorted(operations, key=_begun)
    deploys = [each for each in ours if _kind(each) == _DEPLOYS]
    undeploys = [each for each in ours if _kind(each) == _UNDEPLOYS and not each.get("error")]
    if deployed is None and not deploys:
        return None
    job_read = ServiceJob(id=job, name=job.partition("/")[2], state=JobState.RUNNING)
    started = None if deployed is None else datetime.fromisoformat(deployed["createTime"])
    if undeploys:
        if started is None and deploys:
            started = _changed(deploys[-1])
        ended = _begun(undeploys[-1])
        reason = "the model was undeployed"
        return replace(
            job_read, state=JobState.RECLAIMED, started_at=started, ended_at=ended, reason=reason
        )
    if deployed is not None:
        return replace(job_read, started_at=started)
    if not deploys[-1].get("done"):
        return replace(
            job_read, state=JobState.WAITING, waits="Vertex AI reports: the model is being deployed"
        )
    return _fail(job_read, deploys[-1])


def _fail(job: ServiceJob, deploy: Json) -> ServiceJob:
    """Return an endpoint whose deployment failed, or whose model is no longer deployed."""
    error = deploy.get("error") or {}
    reason = str(error.get("message") or "the model is no longer deployed")
    ended = _changed(deploy)
    return replace(
        job,
        state=JobState.RECLAIMED,
        started_at=ended if error else None,
        ended_at=ended,
        no_capacity=_FULL.search(reason) is not None,
        reason=reason,
    )


async def _find_or_create(api: VertexApi, job: str, body: Mapping[str, Any], **how: str) -> Json:
    """Return an object, and create the object if it does not exist. Raises CloudFault if a request
    fails or while Google is still creating the object.
    """
    found = await api.find(job)
    if found is None:
        try:
            await api.create(job.partition("/")[0], body, **how)
        except CloudFault as fault:
            if fault.code != "ALREADY_EXISTS":  # an earlier request created the object
                raise
        found = await api.find(job)
    if found is None:
        raise CloudFault(503, "CREATING", "Google is still creating the model or the endpoint")
    return found


def _kind(operation: Json) -> str:
    return str((operation.get("metadata") or {}).get("@type")).rpartition(".")[2]


def _begun(operation: Json) -> datetime:
    return datetime.fromisoformat(operation["metadata"]["genericMetadata"]["createTime"])


def _changed(operation: Json) -> datetime:
    return datetime.fromisoformat(operation["metadata"]["genericMetadata"]["updateTime"])


def make_endpoints(context: ProviderContext) -> tuple[VertexEndpoints, "VertexRuntime"]:
    """Return the service and the calls of its endpoints."""
    service = VertexEndpoints(context)
    return service, VertexRuntime(service)


class VertexRuntime:
    """Implements `EndpointCalls`."""

    def __init__(self, service: VertexEndpoints) -> None:
        self._service, self._http = service, EndpointHttp("vertex-predict", _READ_S)
        self.close = self._http.close

    async def answers(self, job: str) -> bool:
        found = await self._service.read(job)
        return found is not None and found.state is JobState.RUNNING

    async def invoke(self, job: str, request: ReplicaRequest) -> ReplicaAnswer:
        url = f"{await self._service.endpoints.url(job)}:rawPredict"
        return read_answer(await self._http.post(url, self._service.credentials.token, request))


def read_answer(answer: ReplicaAnswer) -> ReplicaAnswer:
    """Return the container's answer, or Vertex AI's own answer if the request is invalid, is too
    large, or exceeds a rate limit. Raises TryAgain, Refused.
    """
    error = None if _SERVED in answer.headers else read_error(answer)
    if error is None or answer.status in (200, 400, 413):
        return replace(answer, headers=keep_content_type(answer))
    if answer.status == 429:
        return TOO_MANY
    if answer.status == 404 or answer.status >= 500:
        # the endpoint is being deleted, or the answer is lost
        raise TryAgain(f"rawPredict of Vertex AI: {answer.status} {error}")
    raise Refused(f"rawPredict of Vertex AI: {answer.status} {error}")
