"""Runs replicas as real-time endpoints of SageMaker. An endpoint's parts are the model (image,
environment, files) and the configuration (instance type).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.tasks import Objection, TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers.managed.endpoint_provider import ENDPOINT_TRAITS
from cavvy.providers.managed.endpoint_tasks import (
    list_variables,
    object_to_endpoint,
    object_to_program,
)
from cavvy.providers.managed.image import find_image
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.sagemaker.objects import (
    QUOTA,
    SageMakerObjects,
    object_to_image,
)
from cavvy.providers.sagemaker_endpoints import CONTRACT, MANIFEST
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting

_FOLDER = "/opt/ml/model"
_VARIABLES, _VARIABLE = 100, 1024  # maximum variables of a model; maximum characters of one
_FULL = re.compile(r"insufficient .*capacity|CapacityError|unable to provision", re.IGNORECASE)
_FAILED = frozenset({"Failed", "UpdateRollbackFailed"})


class SageMakerEndpoints(SageMakerObjects):
    """Implements `ManagedService`. A job's id is `REGION/NAME`, where NAME is the name of its
    endpoint.
    """

    provider, title, use = MANIFEST.name, "endpoint", "Hosting"
    kind, parts, failed = "Endpoint", ("EndpointConfig", "Model"), _FAILED
    traits = replace(ENDPOINT_TRAITS, quota_codes=frozenset({QUOTA}))

    @staticmethod
    def read(job: str, told: Mapping[str, Any]) -> ServiceJob:
        """Parse an endpoint in a reply. The bill begins with the endpoint's creation, because
        SageMaker reports no other time, and ends when the endpoint's deletion is requested. An
        endpoint that failed to start is not billed; `VmProvider` deletes it.
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

    async def submit(self, request: JobRequest) -> str:
        region, name = request.offer.region, request.name
        await self._aws.check_region(region)
        tags = [{"Key": key, "Value": value} for key, value in request.tags.items()]
        model, config = self._make_model(request), self._make_config(request)
        await self._create(region, "Model", Tags=tags, **model)
        await self._create(region, "EndpointConfig", Tags=tags, **config)
        try:
            await self._create(
                region, "Endpoint", Tags=tags, EndpointName=name, EndpointConfigName=name
            )
        except CloudFault as fault:
            if 400 <= fault.status < 500 and fault.status != 429:  # there is no endpoint
                await self._delete_parts(f"{region}/{name}")
            raise
        return f"{region}/{name}"

    async def stop(self, job: str) -> None:
        """Delete the endpoint. SageMaker refuses the deletion while the endpoint is still being
        created, so `VmProvider` repeats the call until the endpoint has ended.
        """
        told = await self._describe(job)
        if told is None or told["EndpointStatus"] == "Deleting":
            if told is not None:  # else SageMaker may not show a new endpoint yet
                await self._delete_parts(job)
            raise CloudFault(404, "ended", "the endpoint does not exist")
        await self._change(job, "delete")
        deleted = replace(self.read(job, told), state=JobState.ENDED, ended_at=self._now())
        self._ends.note(deleted)  # SageMaker shows the end only until the deletion is complete
        await self._delete_parts(job)

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL.search(f"{fault.code}: {fault.message}") is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        found = [] if task.service is None else _object_to_program(task)
        image = task.image or str(self._settings.get("image") or "")
        found += object_to_image(image) if image else []
        return [*found, *object_to_endpoint(task, MANIFEST.title, CONTRACT)]

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
