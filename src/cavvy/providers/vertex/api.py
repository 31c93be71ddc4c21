"""Calls an API of Vertex AI in each location of the settings. Custom jobs (version 1 of the API)
belong to regions, and Workbench instances (version 2 of the Notebooks API) belong to zones:
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.customJobs,
https://cloud.google.com/vertex-ai/docs/workbench/reference/rest/v2/projects.locations.instances
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# Cavvy's own code: a quota for resources is used up, not the rate limit of requests
QUOTA = "QUOTA_EXCEEDED"
_QUOTA_TEXT = re.compile(r"exceed quota limits|Quota '\S+' exceeded")
_PAGE = "100"


class VertexApi:
    """Calls the API for one project and one collection of objects. An object's path is
    `LOCATION/ID`. Calls raise CloudFault and Refused.
    """

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        credentials: GoogleCredentials,
        collection: str = "customJobs",
    ) -> None:
        self._endpoint, self._credentials = str(settings.get("endpoint") or ""), credentials
        self._collection = collection
        self._clients: dict[str, RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def create(
        self, location: str, body: Mapping[str, Json], *, verb: str = "", **query: str
    ) -> Json:
        """Request an object. If Vertex AI creates the objects of a collection with a custom method,
        such as "upload", `verb` is the name of this method.
        """
        path = await self._path(location) + (f":{verb}" if verb else "")
        path += f"?{urlencode(query)}" if query else ""
        return await self._client(location).send("POST", path, body)

    async def get(self, known: str) -> Json:
        return await self._client(known).get(await self._path_of(known))

    async def find(self, known: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self.get(known)
        except CloudFault as fault:
            if fault.status == 404:
                return None
            raise

    async def cancel(self, job: str) -> None:
        """Request the cancellation of a job; the job ends later."""
        await self.act(job, "cancel", {})

    async def act(self, known: str, verb: str, body: Mapping[str, Json]) -> Json:
        """Call a method of an object, such as "deployModel"."""
        return await self._client(known).send("POST", f"{await self._path_of(known)}:{verb}", body)

    async def delete(self, known: str) -> Json:
        """Request the deletion of an object; return the operation of the deletion."""
        return await self._client(known).send("DELETE", await self._path_of(known))

    async def operation(self, name: str) -> Json:
        """Return the operation with this name, such as projects/P/locations/L/operations/O."""
        return await self._client(name.split("/")[3]).get(f"/{name}")

    async def operations(self, known: str) -> Sequence[Json]:
        """Return the operations of an object."""
        told = await self._client(known).get(f"{await self._path_of(known)}/operations")
        return list((told or {}).get("operations", ()))

    async def cancel_operation(self, name: str) -> None:
        """Request the cancellation of the operation with this name."""
        await self._client(name.split("/")[3]).send("POST", f"/{name}:cancel")

    async def url(self, known: str) -> str:
        """Return the address of an object."""
        return f"{self._address(known)}{await self._path_of(known)}"

    async def list(self, location: str, condition: str = "") -> Sequence[Json]:
        """Return a location's objects that meet a condition."""
        query = {"pageSize": _PAGE} | ({"filter": condition} if condition else {})
        first = f"{await self._path(location)}?{urlencode(query)}"

        def read_next(page: Json) -> str | None:
            token = page.get("nextPageToken")
            return f"{first}&{urlencode({'pageToken': token})}" if token else None

        pages = await self._client(location).pages(first, read_next)
        if any(page.get("unreachable") for page in pages):
            raise CloudFault(503, "UNAVAILABLE", f"{location} cannot be reached now")
        return [each for page in pages for each in page.get(self._collection, ())]

    async def check(self, location: str) -> None:
        """Read the first page of the location's objects. Raises an error if a permission is
        missing."""
        await self._client(location).get(f"{await self._path(location)}?pageSize=1")

    def _client(self, known: str) -> RestClient:
        """Return the client for a location, or for the location of an object."""
        location = known.partition("/")[0]
        if location not in self._clients:
            self._clients[location] = RestClient(
                self._address(known), self._credentials.token, _read_error
            )
        return self._clients[location]

    def _address(self, known: str) -> str:
        return self._endpoint.replace("{region}", known.partition("/")[0])

    async def _path(self, location: str) -> str:
        project = await asyncio.to_thread(self._credentials.project)
        return f"/projects/{project}/locations/{location}/{self._collection}"

    async def _path_of(self, known: str) -> str:
        location, _, name = known.partition("/")
        return f"{await self._path(location)}/{name}"


def is_gone(fault: CloudFault) -> bool:
    """Return True if the job does not exist, or if the job has ended and therefore cannot be
    cancelled.
    """
    return fault.status == 404 or fault.code == "FAILED_PRECONDITION"


def read_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _read_error(told: Json) -> tuple[str, str]:
    """Return the status and the message of an error reply:
    https://cloud.google.com/apis/design/errors. Google uses one status both for exceeded machine
    quotas and for exceeded rate limits.
    """
    error = told["error"]
    message = str(error["message"])
    return QUOTA if _QUOTA_TEXT.search(message) else str(error["status"]), message
