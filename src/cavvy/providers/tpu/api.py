"""Calls the Cloud TPU API, version 2 (https://cloud.google.com/tpu/docs/reference/rest, read on
2026-11-23), and reads its faults and operations.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

FULL, QUOTA = "no capacity", "quota exceeded"  # Cavvy's own codes
# The API has one code, RESOURCE_EXHAUSTED, for missing capacity, quotas and rate limits, so the
# message must be examined. Google documents no messages; its users quote these.
_FULL = re.compile(r"no more capacity|insufficient (reserved )?capacity", re.IGNORECASE)
_QUOTA = re.compile(r"quota limit '.*' has been exceeded", re.IGNORECASE)
_STATUS = {  # the HTTP statuses of the codes in https://google.aip.dev/193 that an operation has
    3: 400,
    5: 404,
    6: 409,
    7: 403,
    8: 429,
    9: 400,
}


class TpuApi:
    """Calls the API for one project. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], credentials: GoogleCredentials) -> None:
        self._credentials = credentials
        self._rest = RestClient(str(settings["endpoint"]), credentials.token, _read_error)
        self._quotas = RestClient(str(settings["quotas_endpoint"]), credentials.token, _read_error)

    def close(self) -> None:
        self._rest.close()
        self._quotas.close()

    async def project(self) -> str:
        """Return the project's id. Raises Refused."""
        return await asyncio.to_thread(self._credentials.project)

    async def get(self, path: str) -> Json:
        """Read `path`, which is relative to the project."""
        return await self._rest.get(await self._path(path))

    async def send(self, method: str, path: str, body: Json = None, **query: str) -> Json:
        """Send a request that creates or deletes a resource; return the request's operation."""
        try:
            return await self._rest.send(method, await self._path(path, query), body)
        except CloudFault as fault:
            raise sort(fault) from fault

    async def list(self, path: str, field: str) -> tuple[Sequence[Json], Sequence[str]]:
        """Return the items of a list, and the zones that Google did not reach."""
        first = await self._path(path, {"pageSize": "500"})

        def read_next(page: Json) -> str | None:
            token = page.get("nextPageToken")
            return f"{first}&{urlencode({'pageToken': token})}" if token else None

        pages = await self._rest.pages(first, read_next)
        lost = {last_part(each) for page in pages for each in page.get("unreachable", ())}
        return [each for page in pages for each in page.get(field, ())], sorted(lost)

    async def list_quotas(self) -> Sequence[Json]:
        """Return the quotas of the Cloud TPU API, as the Cloud Quotas API describes them."""
        first = (
            f"/projects/{await self.project()}/locations/global/services/tpu.googleapis.com/"
            "quotaInfos?pageSize=500"
        )

        def read_next(page: Json) -> str | None:
            token = page.get("nextPageToken")
            return f"{first}&{urlencode({'pageToken': token})}" if token else None

        pages = await self._quotas.pages(first, read_next)
        return [each for page in pages for each in page.get("quotaInfos", ())]

    async def _path(self, path: str, query: Mapping[str, str] | None = None) -> str:
        project = await self.project()
        return f"/projects/{project}/{path}" + (f"?{urlencode(query)}" if query else "")


def sort(fault: CloudFault) -> CloudFault:
    """Return the fault, with the code FULL if its message reports that a zone has no capacity, or
    QUOTA if its message reports an exceeded quota.
    """
    for code, pattern in ((FULL, _FULL), (QUOTA, _QUOTA)):
        if pattern.search(fault.message):
            return CloudFault(400, code, fault.message)
    return fault


def read_operation(operation: Json) -> CloudFault | None:
    """Return the fault of an operation, or None if the operation succeeded or has not ended."""
    error = operation.get("error")
    if not error:
        return None
    code = int(error.get("code") or 0)
    status = _STATUS.get(code, 500)
    return sort(CloudFault(status, f"code {code}", str(error.get("message") or "")[:500]))


def ended_at(operation: Json) -> datetime | None:
    told = (operation.get("metadata") or {}).get("endTime")
    return datetime.fromisoformat(told) if told else None


def last_part(name: str) -> str:
    """Return the last part of a resource's name."""
    return name.rpartition("/")[2]


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error reply."""
    error: dict[str, Any] = told["error"]
    return str(error.get("status") or error["code"]), str(error["message"])
