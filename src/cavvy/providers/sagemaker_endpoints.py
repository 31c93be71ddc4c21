"""Real-time endpoints of Amazon SageMaker: each replica of a service is one endpoint with one
instance.

An endpoint's parts are the model (image, environment, files) and the configuration (instance type).

The SDK signs each request with the provider's credentials (Signature Version 4) and sends it once,
because a repeated request could do its work twice:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_runtime_InvokeEndpoint.html
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.tasks import Objection, Scalar, TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.aws import ACCOUNT, REGIONS
from cavvy.providers.aws.account import LATER, AwsAccount, AwsFault, CallLimits, translate
from cavvy.providers.base import Feature, ProviderContext, TryAgain
from cavvy.providers.managed.endpoint_provider import (
    AT_ONCE,
    ENDPOINT_TRAITS,
    TOO_MANY,
    EndpointThreads,
    list_variables,
    object_to_endpoint,
    object_to_program,
)
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.sagemaker import INSTANCES
from cavvy.providers.sagemaker.objects import (
    QUOTA,
    SageMakerObjects,
    object_to_image,
)
from cavvy.providers.settings import disk_setting, project_number, project_text
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting

_DOCS = "https://docs.aws.amazon.com/sagemaker/latest"
CONTRACT = f"{_DOCS}/dg/your-algorithms-inference-code.html"
_CONFIG = f"{_DOCS}/APIReference/API_ProductionVariant.html"
_MODEL = f"{_DOCS}/APIReference/API_ContainerDefinition.html"

MANIFEST = EndpointManifest(
    name="sagemaker-endpoints",
    title="Amazon SageMaker endpoints",
    cloud="cavvy.providers.sagemaker_endpoints:make_endpoints",
    rights="sagemaker:CreateModel, CreateEndpointConfig, CreateEndpoint, DescribeEndpoint, "
    "ListEndpoints, ListEndpointConfigs, ListModels, DeleteEndpoint, DeleteEndpointConfig, "
    "DeleteModel, AddTags and InvokeEndpoint, pricing:GetProducts, and iam:PassRole for the role "
    "of the setting `role`",
    unsupported={
        **list_unsupported_by_endpoints("SageMaker", container=CONTRACT, api=_CONFIG),
        Feature.SPOT: f"endpoints have no spot instances ({_CONFIG})",
        Feature.LOGIN: "SageMaker pulls images from Amazon ECR with the rights of the setting "
        f"`role` ({_MODEL})",
    },
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "role",
            "The ARN of the execution role of endpoints. SageMaker uses this role to pull the "
            "image and to read the model from its bucket. The container also runs with the role's "
            "permissions. "
            "Required.",
        ).for_setup(),
        project_text(
            "image",
            "The image, in Amazon ECR, of services whose task names no image. `{region}` is "
            "replaced by the endpoint's region. Without this setting, each task must name an "
            "image.",
        ),
        INSTANCES,
        project_text(
            "subnets",
            "The subnets of endpoints, separated by commas. By default, endpoints run in "
            "SageMaker's own network.",
        ),
        project_text("security_groups", "The security groups of endpoints, if `subnets` is set."),
        disk_setting(
            "The disk size that Cavvy states in offers and compares with `resources.disk`. "
            "The instance type of an endpoint determines the real size of its disk.",
            30,
            minimum=1,
        ),
        project_number(
            "download_s",
            "How long SageMaker may copy the model from its bucket. If copying takes longer, the "
            "endpoint fails.",
            default=1200,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        project_number(
            "start_s",
            "How long a container may take until it answers /ping. If the container takes longer, "
            "the endpoint fails.",
            default=1200,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
    ),
)


_FOLDER = "/opt/ml/model"
_VARIABLES, _VARIABLE = 100, 1024  # maximum variables of a model; maximum characters of one
_FULL = re.compile(r"insufficient .*capacity|CapacityError|unable to provision", re.IGNORECASE)
_FAILED = frozenset({"Failed", "UpdateRollbackFailed"})
_READ_S = 70  # more than the 60 seconds that SageMaker gives a container
_JSON = {"content-type": "application/json"}
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_PASSED = {"content-type": "ContentType", "accept": "Accept", _ATTRIBUTES: "CustomAttributes"}
_RETURNED = {"ContentType": "content-type", "CustomAttributes": _ATTRIBUTES}
# codes of replies that the container itself caused: it failed, or it is not ready
_OWN, _UNREADY = "ModelError", "ModelNotReadyException"


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


def make_endpoints(context: ProviderContext) -> tuple[SageMakerEndpoints, "SageMakerRuntime"]:
    """Return the service and the calls of its endpoints."""
    return SageMakerEndpoints(context), SageMakerRuntime(context.settings)


class SageMakerRuntime:
    """Implements `EndpointCalls`."""

    def __init__(self, settings: Mapping[str, Scalar], account: AwsAccount | None = None) -> None:
        self._threads = EndpointThreads("sagemaker-runtime")
        self.close = self._threads.close
        # Probes use another client, because requests may occupy all of these threads for a minute.
        self._looks = account or AwsAccount(settings, provider="sagemaker-endpoints")
        limits = CallLimits(read_s=_READ_S, connections=AT_ONCE)
        self._account = account or AwsAccount(
            settings, self._threads.run, provider="sagemaker-endpoints", limits=limits
        )

    async def answers(self, job: str) -> bool:
        region, _, name = job.partition("/")
        try:
            told = await self._looks.call(
                region, "describe_endpoint", service="sagemaker", EndpointName=name
            )
        except AwsFault as fault:
            raise translate(fault, f"DescribeEndpoint in {region}") from fault
        return bool(told["EndpointStatus"] == "InService")

    async def invoke(self, job: str, request: ReplicaRequest) -> ReplicaAnswer:
        region, _, name = job.partition("/")
        given = {
            key: request.headers[each] for each, key in _PASSED.items() if each in request.headers
        }
        try:
            told = await self._account.call(
                region,
                "invoke_endpoint",
                service="sagemaker-runtime",
                EndpointName=name,
                Body=request.body,
                **given,
            )
            body = await self._threads.run(told["Body"].read)
        except AwsFault as fault:
            return _read_fault(fault, region)
        headers = {own: str(told[key]) for key, own in _RETURNED.items() if told.get(key)}
        return ReplicaAnswer(status=200, headers=headers, body=body)


def _read_fault(fault: AwsFault, region: str) -> ReplicaAnswer:
    """Return the answer for a failed call: the container's own answer, or status 429 if the call
    was throttled or the endpoint is not ready. Raises TryAgain, Refused.
    """
    if fault.code == _OWN:
        status = int(fault.reply.get("OriginalStatusCode") or 500)
        text = str(fault.reply.get("OriginalMessage") or fault.message)
        return ReplicaAnswer(status=status, headers={}, body=text.encode())
    if (
        fault.code == _UNREADY
        or fault.status == 429
        or fault.code in LATER & {"ThrottlingException"}
    ):
        return TOO_MANY
    if fault.status >= 500 or fault.status == 0 or fault.code == "ValidationError":
        # the reply is lost, or the endpoint is being deleted
        raise TryAgain(f"InvokeEndpoint in {region}: {fault}") from fault
    raise translate(fault, f"InvokeEndpoint in {region}") from fault
