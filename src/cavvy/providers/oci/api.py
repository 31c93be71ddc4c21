"""Calls OCI's Core Services and Identity APIs, version 20160918
(https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/), and its Limits API in several regions.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused
from cavvy.providers.oci.credentials import OciCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# a header: https://docs.oracle.com/en-us/iaas/Content/API/Concepts/usingapi.htm
_NEXT = "opc-next-page"
# the names of the services in their addresses
IDENTITY, COMPUTE, LIMITS = "identity", "iaas", "limits"


class OciApi:
    """Calls the APIs of each region. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], credentials: OciCredentials) -> None:
        self._endpoint, self._sign = str(settings["endpoint"]), credentials.sign
        self._limits_endpoint = str(settings["limits_endpoint"])
        self._clients: dict[tuple[str, str], RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def get(self, region: str, path: str, service: str = COMPUTE, **query: str) -> Json:
        target = f"{path}?{urlencode(query)}" if query else path
        return await self._client(service, region).get(target)

    async def send(
        self,
        region: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str = "",
    ) -> Json:
        """Send a request that creates or deletes a resource. OCI executes repeated requests with
        the same token only once.
        """
        headers = {"opc-retry-token": token} if token else {}
        return await self._client(COMPUTE, region).send(method, path, body, headers)

    async def list(
        self, region: str, path: str, service: str = COMPUTE, **query: str
    ) -> Sequence[Json]:
        """Return all items of a list."""
        first = f"{path}?{urlencode(query)}"

        def read_next(page: Json) -> str | None:
            return f"{first}&{urlencode({'page': page['next']})}" if page["next"] else None

        try:
            pages = await self._client(service, region).pages(first, read_next)
        except CloudFault as fault:
            if fault.status != 404:
                raise
            raise Refused(
                f"[providers.oci]: {region} does not list {path[1:]}: {fault}; check the setting "
                "`compartment`, and the policy of the user's group (docs/guides/oci.md)"
            ) from fault
        return [each for page in pages for each in page["items"]]

    def _client(self, service: str, region: str) -> RestClient:
        if (service, region) not in self._clients:
            endpoint = self._limits_endpoint if service == LIMITS else self._endpoint
            self._clients[service, region] = RestClient(
                endpoint.replace("{service}", service).replace("{region}", region),
                lambda: "",
                lambda told: (told["code"], told["message"]),
                sign=self._sign,
                read_reply=_read_reply,
            )
        return self._clients[service, region]


def _read_reply(told: Any, headers: Mapping[str, str]) -> Any:
    """Return a reply. Lists are arrays, or objects with the array `items`; a header names the next
    page."""
    if isinstance(told, dict) and told.keys() == {"items"}:
        told = told["items"]
    return {"items": told, "next": headers.get(_NEXT)} if isinstance(told, list) else told
