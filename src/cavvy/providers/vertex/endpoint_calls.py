"""Calls endpoints of Vertex AI with the method `rawPredict`, which accepts a body of any format:
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.endpoints/rawPredict
"""

from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import ProviderContext, Refused, TryAgain
from cavvy.providers.managed.endpoint_http import (
    TOO_MANY,
    EndpointHttp,
    keep_content_type,
    read_error,
)
from cavvy.providers.managed.service import JobState
from cavvy.providers.vertex.endpoints import VertexEndpoints

_READ_S = 70  # more than the 60 seconds that Vertex AI gives a container
_SERVED = "x-vertex-ai-deployed-model-id"  # a header of answers that a container gave


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
