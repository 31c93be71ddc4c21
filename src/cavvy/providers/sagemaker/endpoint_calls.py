"""Calls endpoints of SageMaker: https://docs.aws.amazon.com/sagemaker/latest/APIReference/
API_runtime_InvokeEndpoint.html

The SDK signs each request with the provider's credentials (Signature Version 4) and sends it once,
because a repeated request could do its work twice.
"""

from collections.abc import Mapping

from cavvy.domain.tasks import Scalar
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.aws.account import AwsAccount, CallLimits
from cavvy.providers.aws.errors import LATER, AwsFault, translate
from cavvy.providers.base import ProviderContext, TryAgain
from cavvy.providers.managed.endpoint_http import AT_ONCE, TOO_MANY, EndpointThreads
from cavvy.providers.sagemaker.endpoints import SageMakerEndpoints

_READ_S = 70  # more than the 60 seconds that SageMaker gives a container
_JSON = {"content-type": "application/json"}
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_PASSED = {"content-type": "ContentType", "accept": "Accept", _ATTRIBUTES: "CustomAttributes"}
_RETURNED = {"ContentType": "content-type", "CustomAttributes": _ATTRIBUTES}
# codes of replies that the container itself caused: it failed, or it is not ready
_OWN, _UNREADY = "ModelError", "ModelNotReadyException"


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
