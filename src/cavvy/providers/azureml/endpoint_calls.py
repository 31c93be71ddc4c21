"""Calls endpoints of Azure ML with a token of Microsoft Entra, so that no key of an endpoint exists
outside of Azure: https://learn.microsoft.com/azure/machine-learning/concept-endpoints-online-auth
"""

from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.azure.account import MakeCredential
from cavvy.providers.azureml.endpoints import DEPLOYMENT, REQUEST_S, AzureMlEndpoints
from cavvy.providers.base import ProviderContext, Refused, TryAgain
from cavvy.providers.managed.endpoint_http import TOO_MANY, EndpointHttp, keep_content_type
from cavvy.providers.managed.service import JobState

# Selects the deployment, so that the endpoint needs no division of its traffic:
# https://learn.microsoft.com/azure/machine-learning/how-to-safely-rollout-online-endpoints
_SELECT = {"azureml-model-deployment": DEPLOYMENT}
_OWN = "ms-azureml-model-error-statuscode"  # the status of a container that did not answer 200


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
