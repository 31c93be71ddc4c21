"""Calls the Compute Engine API, version 1
(https://cloud.google.com/compute/docs/reference/rest/v1),
and reads its faults and operations.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# Reasons of HTTP errors, and codes of failed operations, that are temporary:
# https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-rate-limits
_LATER = frozenset(
    {
        "rateLimitExceeded",
        "userRateLimitExceeded",
        "resourceNotReady",
        "RATE_LIMIT_EXCEEDED",
        "RESOURCE_OPERATION_RATE_EXCEEDED",
        "RESOURCE_NOT_READY",
    }
)
_NETWORK_PATHS = ("/networks/", "/subnetworks/")
QUOTA_CODES = frozenset({"quotaExceeded", "QUOTA_EXCEEDED", "limitExceeded"})
# Codes of operations that failed for lack of capacity:
# https://cloud.google.com/compute/docs/troubleshooting/ troubleshooting-resource-availability. An
# operation with INTERNAL_ERROR starts no machine either, and its token cannot be used again.
FULL_CODES = frozenset(
    {
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "RESOURCE_POOL_EXHAUSTED",
        "INTERNAL_ERROR",
    }
)
PENDING = "operation in progress"  # Cavvy's own code: the operation has not ended yet


class GcpApi:
    """Calls the API for one project. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], credentials: GoogleCredentials) -> None:
        self._credentials = credentials
        self._network = str(settings.get("network") or "default")
        self._rest = RestClient(
            str(settings["endpoint"]), credentials.token, _read_error, later=_LATER
        )
        self.close = self._rest.close

    async def project(self) -> str:
        return await asyncio.to_thread(self._credentials.project)

    async def get(self, path: str, **query: str) -> Json:
        """Read `path`, which is relative to the project; "" is the project itself."""
        try:
            return await self._rest.get(await self._path(path, query))
        except CloudFault as fault:
            raise self._sort(fault) from fault

    async def send(self, method: str, path: str, body: Json = None, **query: str) -> Json:
        """Send a write request and return the operation that it starts."""
        try:
            return await self._rest.send(method, await self._path(path, query), body)
        except CloudFault as fault:
            raise self._sort(fault) from fault

    async def aggregated(self, kind: str, **query: str) -> Sequence[Json]:
        """Return one kind of resource, such as "instances", from all zones that Google reaches."""
        return (await self.aggregated_parts(kind, **query))[0]

    async def aggregated_parts(
        self, kind: str, **query: str
    ) -> tuple[Sequence[Json], Sequence[str]]:
        """Return the items that `aggregated` returns, and the zones that Google did not reach."""
        pages = await self._pages(f"aggregated/{kind}", query)
        scopes = [scope for page in pages for scope in page.get("items", {}).items()]
        lost = [each for page in pages for each in page.get("unreachables", ())]
        lost += [name for name, told in scopes if _warns(told, "UNREACHABLE")]
        found = [each for _, told in scopes for each in told.get(kind, ())]
        return found, sorted({each.rpartition("/")[2] for each in lost})

    async def list(self, path: str, **query: str) -> Sequence[Json]:
        """Return the items of a list at `path`, which is relative to the project."""
        pages = await self._pages(path, query)
        return [each for page in pages for each in page.get("items", ())]

    async def _pages(self, path: str, query: Mapping[str, str]) -> Sequence[Json]:
        """Return all pages of a list. A page of a filtered list may be empty although other pages
        follow."""
        first = await self._path(path, {"maxResults": "500", **query})

        def read_next(page: Json) -> str | None:
            token = page.get("nextPageToken")
            return f"{first}&{urlencode({'pageToken': token})}" if token else None

        try:
            return await self._rest.pages(first, read_next)
        except CloudFault as fault:
            raise self._sort(fault) from fault

    async def _path(self, path: str, query: Mapping[str, str]) -> str:
        tail = f"?{urlencode(query)}" if query else ""
        inner = f"/{path}" if path else ""
        return f"/projects/{await self.project()}{inner}{tail}"

    def _sort(self, fault: CloudFault) -> CloudFault | Refused:
        """Return the error to raise for a fault: Refused if the fault means that the network does
        not exist, and the unchanged fault in all other cases.
        """
        if fault.status == 404 and any(each in fault.message for each in _NETWORK_PATHS):
            return Refused(
                f"[providers.gcp] network: {fault.message}; create the network with `gcloud "
                f"compute networks create {self._network} --subnet-mode auto` and a firewall rule "
                "for the network's own traffic, or name another network in `network` and "
                "`subnetwork`"
            )
        return fault


def read_operation(operation: Json) -> CloudFault | None:
    """Return the fault of an operation: None if the operation succeeded, or PENDING if it is still
    running. An operation reports its errors in its body, although the reply has the status 200.
    """
    if operation.get("status") != "DONE":
        return CloudFault(0, PENDING, str(operation.get("name")))
    errors = (operation.get("error") or {}).get("errors") or ()
    if not errors:
        return None
    told = [str(each.get("message") or "") for each in errors]
    code = str(errors[0].get("code"))
    # both statuses state that the operation had no effect
    return CloudFault(429 if code in _LATER else 400, code, "; ".join(told)[:500])


def last_part(url: str) -> str:
    """Return the name at the end of a resource's URL."""
    return url.rpartition("/")[2]


def _warns(scope: Json, code: str) -> bool:
    """Return whether a scope of an aggregated list has a warning with this code."""
    return bool((scope.get("warning") or {}).get("code") == code)


def _read_error(told: Json) -> tuple[str, str]:
    """Return the reason and the message of an error reply."""
    error: dict[str, Any] = told["error"]
    reasons = [str(each["reason"]) for each in error.get("errors", ()) if each.get("reason")]
    return (reasons or [str(error.get("status") or error["code"])])[0], str(error["message"])
