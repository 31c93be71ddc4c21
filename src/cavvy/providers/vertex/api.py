"""Calls the API of Vertex AI, version 1, in each region of the settings:
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.customJobs
"""

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# Cavvy's own code: a quota for resources is used up, not the rate limit of requests
QUOTA = "QUOTA_EXCEEDED"
_QUOTA_TEXT = "exceed quota limits"
_PAGE = "100"


class VertexApi:
    """Calls the API for one project. A job's path is `REGION/NUMBER`. Calls raise
    CloudFault and Refused.
    """

    def __init__(self, settings: Mapping[str, Scalar], credentials: GoogleCredentials) -> None:
        self._endpoint, self._credentials = str(settings.get("endpoint") or ""), credentials
        self._clients: dict[str, RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def create(self, region: str, job: Mapping[str, Json]) -> Json:
        """Request a custom job."""
        return await self._client(region).send("POST", await self._path(region), job)

    async def get(self, job: str) -> Json:
        region, _, number = job.partition("/")
        return await self._client(region).get(f"{await self._path(region)}/{number}")

    async def cancel(self, job: str) -> None:
        """Ask Vertex AI to cancel a job; the job ends later."""
        region, _, number = job.partition("/")
        path = f"{await self._path(region)}/{number}:cancel"
        await self._client(region).send("POST", path, {})

    async def list(self, region: str, condition: str) -> Sequence[Json]:
        """The custom jobs of a region that meet a condition."""
        query = {"filter": condition, "pageSize": _PAGE}
        first = f"{await self._path(region)}?{urlencode(query)}"

        def read_next(page: Json) -> str | None:
            token = page.get("nextPageToken")
            return f"{first}&{urlencode({'pageToken': token})}" if token else None

        pages = await self._client(region).pages(first, read_next)
        return [each for page in pages for each in page.get("customJobs", ())]

    async def check(self, region: str) -> None:
        """Read the first page of the region's jobs. Raises an error if a right is missing."""
        await self._client(region).get(f"{await self._path(region)}?pageSize=1")

    def _client(self, region: str) -> RestClient:
        if region not in self._clients:
            endpoint = self._endpoint.replace("{region}", region)
            self._clients[region] = RestClient(endpoint, self._credentials.token, _read_error)
        return self._clients[region]

    async def _path(self, region: str) -> str:
        project = await asyncio.to_thread(self._credentials.project)
        return f"/projects/{project}/locations/{region}/customJobs"


def is_gone(fault: CloudFault) -> bool:
    """Whether a job does not exist, or has ended and cannot be cancelled."""
    return fault.status == 404 or fault.code == "FAILED_PRECONDITION"


def _read_error(told: Json) -> tuple[str, str]:
    """The status and the message of an error reply: https://cloud.google.com/apis/design/errors.
    Exceeded quotas for machines and exceeded rate limits have the same status.
    """
    error = told["error"]
    message = str(error["message"])
    return QUOTA if _QUOTA_TEXT in message else str(error["status"]), message
