"""Runs replicas as real-time endpoints of SageMaker.

An endpoint needs three objects with one name: the model (image, environment, files), the
configuration (instance type) and the endpoint. Only the endpoint is billed. The model and the
configuration are deleted with the endpoint, or later if the server stopped before the deletion.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.managed.endpoint_provider import ENDPOINT_TRAITS
from cavvy.providers.managed.endpoint_tasks import (
    list_variables,
    object_to_endpoint,
    object_to_program,
)
from cavvy.providers.managed.image import find_image
from cavvy.providers.managed.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.managed.notebooks import NotebookEnds
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.sagemaker.offers import InstanceOffers
from cavvy.providers.sagemaker_endpoints.manifest import CONTRACT, MANIFEST
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark

_FOLDER = "/opt/ml/model"
_VARIABLES, _VARIABLE = 100, 1024  # maximum variables of a model; maximum characters of one
_INVALID = "ValidationException"  # the code for missing objects, taken names and wrong states
_TAKEN = re.compile(r"already exist", re.IGNORECASE)
_FULL = re.compile(r"insufficient .*capacity|CapacityError|unable to provision", re.IGNORECASE)
_IMAGE = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/\S+")
_FAILED = frozenset({"Failed", "UpdateRollbackFailed"})


class SageMakerEndpoints:
    """Implements `ManagedService`. A job's id is `REGION/NAME`, where NAME is the name of its
    endpoint.
    """

    traits = replace(ENDPOINT_TRAITS, quota_codes=frozenset({"ResourceLimitExceeded"}))

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._aws = AwsService(
            "sagemaker", self._settings, account, gone=frozenset(), provider=MANIFEST.name
        )
        self._offers = InstanceOffers(self._aws, context, MANIFEST.name, "Hosting")
        self._ends = NotebookEnds(self._now)
        self._leftovers = LeftoverSearch()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        facts = [("role", self._role())]
        if unknown := self._offers.unknown:
            facts.append(("instance types that are not in the catalog", ", ".join(unknown)))
        return facts

    async def offers(self) -> Sequence[Offer]:
        self._role()
        return await self._offers.list(Purchase.ON_DEMAND)

    async def submit(self, request: JobRequest) -> str:
        region, name = request.offer.region, request.name
        await self._aws.check_region(region)
        tags = [{"Key": key, "Value": value} for key, value in request.tags.items()]
        model, config = self._make_model(request), self._make_config(request)
        await self._create(region, "create_model", Tags=tags, **model)
        await self._create(region, "create_endpoint_config", Tags=tags, **config)
        try:
            await self._create(
                region, "create_endpoint", Tags=tags, EndpointName=name, EndpointConfigName=name
            )
        except CloudFault as fault:
            if 400 <= fault.status < 500 and fault.status != 429:  # there is no endpoint
                await self._delete_parts(region, name)
            raise
        return f"{region}/{name}"

    async def list(self) -> Sequence[ServiceJob]:
        found: dict[str, ServiceJob] = {}
        for region in await self._aws.regions():
            told = await self._aws.named(region, self._prefix, "list_endpoints", "Endpoint")
            for name, each in told.items():
                job = f"{region}/{name}"
                failed = each["EndpointStatus"] in _FAILED and job not in self._ends
                # only a description contains the reason
                read = await self.get(job) if failed else None
                found[job] = read or self._ends.note(read_endpoint(job, each))
            await self._tidy(region, set(told))
        self._ends.forget(found)
        return list(found.values())

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._describe(job)
        return self._ends.find(job) if told is None else self._ends.note(read_endpoint(job, told))

    async def stop(self, job: str) -> None:
        """Delete the endpoint. SageMaker refuses the deletion while the endpoint is still being
        created, so `VmProvider` repeats the call until the endpoint has ended.
        """
        region, _, name = job.partition("/")
        told = await self._describe(job)
        if told is None or told["EndpointStatus"] == "Deleting":
            if told is not None:  # else SageMaker may not show a new endpoint yet
                await self._delete_parts(region, name)
            raise CloudFault(404, "ended", "the endpoint does not exist")
        try:
            await self._aws.call(region, "delete_endpoint", EndpointName=name)
        except CloudFault as fault:
            if fault.code == _INVALID:  # the endpoint is being created, or no longer exists
                raise CloudFault(409, fault.code, fault.message) from fault
            raise
        deleted = replace(read_endpoint(job, told), state=JobState.ENDED, ended_at=self._now())
        self._ends.note(deleted)  # SageMaker shows the end only until the deletion is complete
        await self._delete_parts(region, name)

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL.search(f"{fault.code}: {fault.message}") is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        found = [] if task.service is None else _object_to_program(task)
        image = task.image or str(self._settings.get("image") or "")
        if image and not _IMAGE.fullmatch(image.replace("{region}", "any")):
            reason = "SageMaker starts only images in Amazon ECR, with names such as "
            reason += "123456789012.dkr.ecr.us-east-1.amazonaws.com/name:tag"
            found.append(Objection("image", reason))
        return [*found, *object_to_endpoint(task, MANIFEST.title, CONTRACT)]

    async def _create(self, region: str, operation: str, **body: Any) -> None:
        """Create an object. If the object already exists, an earlier request created it."""
        try:
            await self._aws.call(region, operation, **body)
        except CloudFault as fault:
            if fault.code != _INVALID or not _TAKEN.search(fault.message):
                raise

    async def _delete_parts(self, region: str, name: str) -> None:
        """Delete the endpoint's configuration and model. Objects that cannot be deleted now are
        deleted later."""
        with suppress(CloudFault):
            await self._aws.call(region, "delete_endpoint_config", EndpointConfigName=name)
        with suppress(CloudFault):
            await self._aws.call(region, "delete_model", ModelName=name)

    async def _describe(self, job: str) -> Mapping[str, Any] | None:
        region, _, name = job.partition("/")
        try:
            return await self._aws.call(region, "describe_endpoint", EndpointName=name)
        except CloudFault as fault:
            # the one argument is a name that SageMaker accepted before, so the error means that the
            # name is unknown
            if fault.code == _INVALID:
                return None
            raise

    async def _tidy(self, region: str, endpoints: set[str]) -> None:
        """Delete models and configurations whose endpoint was deleted or never created."""
        now = self._now()
        if not self._leftovers.is_due(region, now):
            return
        old = {"CreationTimeBefore": now - UNUSED}
        with suppress(CloudFault):
            configs = await self._aws.named(
                region, self._prefix, "list_endpoint_configs", "EndpointConfig", **old
            )
            models = await self._aws.named(region, self._prefix, "list_models", "Model", **old)
            unused = sorted((configs.keys() | models.keys()) - endpoints)
            for name in unused[:MOST_DELETED]:
                await self._delete_parts(region, name)

    def _make_model(self, request: JobRequest) -> Mapping[str, Any]:
        gang, settings = request.gang, self._settings
        container: dict[str, Any] = {
            "Image": find_image(MANIFEST.name, gang, settings).replace(
                "{region}", request.offer.region
            ),
            "Environment": list_variables(gang),
        }
        for each in gang.inputs:
            container["ModelDataSource"] = {"S3DataSource": _make_source(each)}
        body: dict[str, Any] = {
            "ModelName": request.name,
            "PrimaryContainer": container,
            "ExecutionRoleArn": self._role(),
        }
        if subnets := list_setting(settings, "subnets"):
            groups = list(list_setting(settings, "security_groups"))
            body["VpcConfig"] = {"Subnets": list(subnets), "SecurityGroupIds": groups}
        return body

    def _make_config(self, request: JobRequest) -> Mapping[str, Any]:
        variant = {
            "VariantName": "all",
            "ModelName": request.name,
            "InitialInstanceCount": 1,
            "InstanceType": request.offer.instance_type,
            "ModelDataDownloadTimeoutInSeconds": int(self._settings["download_s"]),
            "ContainerStartupHealthCheckTimeoutInSeconds": int(self._settings["start_s"]),
        }
        return {"EndpointConfigName": request.name, "ProductionVariants": [variant]}

    def _role(self) -> str:
        role = str(self._settings.get("role") or "")
        if not role:
            raise Refused(f"[providers.{MANIFEST.name}] role: not set; each endpoint needs a role")
        return role


def read_endpoint(job: str, told: Mapping[str, Any]) -> ServiceJob:
    """Parse an endpoint in a reply. The bill begins with the endpoint's creation, because SageMaker
    reports no other time, and ends when the endpoint's deletion is requested. An endpoint that
    failed to start is not billed; `VmProvider` deletes it.
    """
    status, reason = str(told["EndpointStatus"]), str(told.get("FailureReason") or "")
    created, changed = told.get("CreationTime"), told.get("LastModifiedTime")
    failed, ended = status in _FAILED, None
    state = JobState.WAITING if status == "Creating" else JobState.RUNNING
    if failed or status == "Deleting":
        ended = changed
        state = JobState.RECLAIMED if failed else JobState.ENDED
        reason = reason or f"the endpoint was deleted (SageMaker reports: {status})"
    return ServiceJob(
        id=job,
        name=str(told["EndpointName"]),
        state=state,
        started_at=ended if status == "Failed" else created,
        ended_at=ended,
        no_capacity=failed and _FULL.search(reason) is not None,
        reason=reason if ended else "",
        waits=f"SageMaker reports: {status}" if state is JobState.WAITING else "",
    )


def _object_to_program(task: TaskSpec) -> list[Objection]:
    found = object_to_program(task, "SageMaker", CONTRACT)
    if len(task.inputs) > 1 or not all(_is_model(each) for each in task.inputs):
        reason = f"SageMaker copies one folder or archive from S3 to {_FOLDER} ({CONTRACT})"
        found.append(Objection("inputs", reason))
    long = [name for name, value in task.env.items() if len(value) > _VARIABLE]
    if long or len(task.env) > _VARIABLES:
        reason = f"SageMaker allows {_VARIABLES} variables of {_VARIABLE} characters ({CONTRACT})"
        found.append(Objection("env", reason))
    return found


def _is_model(given: Transfer) -> bool:
    target = given.target.rstrip("/")
    return given.source.startswith("s3://") and target == _FOLDER and not given.stream


def _make_source(given: Transfer) -> Mapping[str, str]:
    archive = given.source.endswith((".tar.gz", ".tgz"))
    return {
        "S3Uri": given.source if archive else f"{given.source.rstrip('/')}/",
        "S3DataType": "S3Object" if archive else "S3Prefix",
        "CompressionType": "Gzip" if archive else "None",
    }
